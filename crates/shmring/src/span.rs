//! Bytes in a ring: what one end of it may touch until it publishes them or gives them back.

use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, compiler_fence};

use guestmem::io::{Gather, Scatter};

/// How many bytes [`Span::fill`] and [`Span::for_each`] show at a time: few enough to stay in registers if little is done with them. So they are made, or read,
/// as fast as if there were a slice.
pub const CHUNK_LEN: usize = 128;

/// Bytes in a ring, which the peer can change at any time.
///
/// So there is no slice of them. They are copied in and out, or shown chunk by chunk in a private copy, which the compiler keeps in registers or on the stack:
/// that costs nothing beside making or reading them in place, and what was checked in the copy stays as it was. For C and the like there are pointers.
#[derive(Debug)]
pub struct Span<'a> {
    /// Where it begins, and how many bytes are there; then where it goes on, and how many are left. In a ring that is mapped twice there is
    /// nothing left.
    pieces: [(NonNull<u8>, usize); 2],
    window: PhantomData<&'a ()>,
}

impl Span<'_> {
    /// # Safety
    /// Both pieces are mapped for as long as the span lives, for reading and writing, and lie apart.
    #[inline]
    pub(super) unsafe fn new<'a>(
        here: NonNull<u8>,
        here_len: usize,
        rest: NonNull<u8>,
        rest_len: usize,
    ) -> Span<'a> {
        Span {
            pieces: [(here, here_len), (rest, rest_len)],
            window: PhantomData,
        }
    }

    /// In bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.pieces[0].1 + self.pieces[1].1
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the bytes are: one piece, or two. Reading and writing there needs `unsafe`, and the knowledge that the peer may be
    /// writing there too.
    pub fn pieces(&self) -> [(*mut u8, usize); 2] {
        self.pieces.map(|(place, len)| (place.as_ptr(), len))
    }

    /// Writes `from` at an offset.
    ///
    /// # Panics
    /// If it goes beyond the span.
    #[inline]
    pub fn write(&mut self, offset: usize, from: &[u8]) {
        let mut rest = from;
        while !rest.is_empty() {
            let at = offset + (from.len() - rest.len());
            let (place, room) = self.at(at, rest.len());
            let (piece, after) = rest.split_at(room);
            // SAFETY: there is room for the piece, which is private memory.
            unsafe { move_bytes(piece.as_ptr(), place.as_ptr(), room) };
            rest = after;
        }
    }

    /// Reads into `into` from an offset on.
    ///
    /// # Panics
    /// If it goes beyond the span.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let total = into.len();
        let mut rest = into;
        while !rest.is_empty() {
            let (place, room) = self.at(offset + (total - rest.len()), rest.len());
            let (piece, after) = rest.split_at_mut(room);
            // SAFETY: so many bytes are there, and the piece is exclusively borrowed private memory.
            unsafe { move_bytes(place.as_ptr(), piece.as_mut_ptr(), room) };
            rest = after;
        }
    }

    /// Has the whole span filled, chunk by chunk, in order: each of [`CHUNK_LEN`] bytes or, at the end and where a ring that is not mapped twice ends,
    /// less. A chunk's content is not defined beforehand.
    #[inline(always)]
    pub fn fill(&mut self, mut produce: impl FnMut(&mut [u8])) {
        for (place, len) in self.pieces {
            let (mut place, mut left) = (place.as_ptr(), len);
            // The length is a constant here, so what is made stays in registers, if `produce` does not need more of them.
            while left >= CHUNK_LEN {
                let mut chunk = Chunk([0; CHUNK_LEN]);
                produce(&mut chunk.0);
                // SAFETY: so many bytes are left in this piece, and the chunk is private memory.
                unsafe { move_bytes(chunk.0.as_ptr(), place, CHUNK_LEN) };
                // SAFETY: inside the piece, or at its end.
                place = unsafe { place.add(CHUNK_LEN) };
                left -= CHUNK_LEN;
            }
            if left > 0 {
                let mut chunk = Chunk([0; CHUNK_LEN]);
                produce(&mut chunk.0[..left]);
                // SAFETY: as above.
                unsafe { move_bytes(chunk.0.as_ptr(), place, left) };
            }
        }
    }

    /// Shows the whole span, chunk by chunk, in order: each of [`CHUNK_LEN`] bytes or, at the end and where a ring that is not mapped twice ends, less.
    #[inline(always)]
    pub fn for_each(&self, mut consume: impl FnMut(&[u8])) {
        for (place, len) in self.pieces {
            let (mut place, mut left) = (place.as_ptr(), len);
            while left >= CHUNK_LEN {
                let mut chunk = Chunk([0; CHUNK_LEN]);
                // SAFETY: so many bytes are left in this piece, and the chunk is private memory.
                unsafe { move_bytes(place, chunk.0.as_mut_ptr(), CHUNK_LEN) };
                consume(&chunk.0);
                // SAFETY: inside the piece, or at its end.
                place = unsafe { place.add(CHUNK_LEN) };
                left -= CHUNK_LEN;
            }
            if left > 0 {
                let mut chunk = Chunk([0; CHUNK_LEN]);
                // SAFETY: as above.
                unsafe { move_bytes(place, chunk.0.as_mut_ptr(), left) };
                consume(&chunk.0[..left]);
            }
        }
    }

    /// Sends what a socket takes at once straight from the ring, and says how many bytes that was.
    ///
    /// # Errors
    /// As [`Gather::send`].
    pub fn send(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut gather = Gather::new();
        for (place, len) in self.pieces {
            // SAFETY: the piece is mapped for as long as the span lives, which outlives the list.
            unsafe { gather.push_mapped(place, len) }.map_err(io::Error::other)?;
        }
        gather.send(socket, false)
    }

    /// Takes from a socket what it has at once straight into the ring, and says how many bytes that was. Zero is the end of the stream.
    ///
    /// # Errors
    /// As [`Scatter::receive`].
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut scatter = Scatter::new();
        for (place, len) in self.pieces {
            // SAFETY: as above; no reference to these bytes is ever made.
            unsafe { scatter.push_mapped(place, len) }.map_err(io::Error::other)?;
        }
        scatter.receive(socket)
    }

    /// Where the byte at `offset` is, and how many of `len` bytes follow there in one piece.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> (NonNull<u8>, usize) {
        assert!(
            offset <= self.len() && self.len() - offset >= len,
            "{len} bytes at {offset} of a span of {}",
            self.len()
        );
        let [(here, here_len), (rest, _)] = self.pieces;
        let (base, offset, len) = match offset < here_len {
            true => (here, offset, len.min(here_len - offset)),
            false => (rest, offset - here_len, len),
        };
        // SAFETY: the offset lies inside this piece, or at its end.
        (unsafe { base.add(offset) }, len)
    }
}

/// Aligned for whatever a chunk's user makes of it.
#[repr(align(64))]
struct Chunk([u8; CHUNK_LEN]);

/// Copies bytes of which one side is shared; see "Racing bytes" in the documentation of the crate for the fences.
///
/// # Safety
/// Both places are valid for `len` bytes, `from` for reads and `to` for writes, and they lie apart.
#[inline(always)]
unsafe fn move_bytes(from: *const u8, to: *mut u8, len: usize) {
    compiler_fence(Ordering::SeqCst);
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(from, to, len) };
    compiler_fence(Ordering::SeqCst);
}
