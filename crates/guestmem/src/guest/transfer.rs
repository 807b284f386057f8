//! The copies themselves.

use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, compiler_fence};

use super::{GuestMemory, MemoryError, Range, Walk};

pub(super) fn read(
    memory: &GuestMemory,
    ranges: &[Range],
    offset: usize,
    into: &mut [u8],
) -> Result<(), MemoryError> {
    if let Some(place) = in_one_piece(memory, ranges, offset, into.len()) {
        // SAFETY: the source is mapped for as many bytes as `into` has, and `into` is exclusively borrowed private memory.
        unsafe { move_bytes(place.as_ptr(), into.as_mut_ptr(), into.len()) };
        return Ok(());
    }
    let mut source = Walk::new(memory, ranges, offset, into.len())?;
    let mut rest = into;
    while !rest.is_empty() {
        let (place, available) = source.here()?;
        let (piece, after) = rest.split_at_mut(available.min(rest.len()));
        // SAFETY: the source is mapped for at least as long as the piece is, since `available` bounds it, and the piece
        // is exclusively borrowed private memory.
        unsafe { move_bytes(place.as_ptr(), piece.as_mut_ptr(), piece.len()) };
        source.advance(piece.len());
        rest = after;
    }
    Ok(())
}

pub(super) fn write(
    memory: &GuestMemory,
    ranges: &[Range],
    offset: usize,
    from: &[u8],
) -> Result<(), MemoryError> {
    if let Some(place) = in_one_piece(memory, ranges, offset, from.len()) {
        // SAFETY: the target is mapped for as many bytes as `from` has, and `from` is private memory.
        unsafe { move_bytes(from.as_ptr(), place.as_ptr(), from.len()) };
        return Ok(());
    }
    let mut target = Walk::new(memory, ranges, offset, from.len())?;
    let mut rest = from;
    while !rest.is_empty() {
        let (place, room) = target.here()?;
        let (piece, after) = rest.split_at(room.min(rest.len()));
        // SAFETY: the target is mapped for at least as long as the piece is, since `room` bounds it, and the piece is
        // private memory.
        unsafe { move_bytes(piece.as_ptr(), place.as_ptr(), piece.len()) };
        target.advance(piece.len());
        rest = after;
    }
    Ok(())
}

/// A position in a guest's memory: ranges, and an offset into them.
type Place<'a> = (&'a GuestMemory, &'a [Range], usize);

/// One `memmove` per pair of contiguous pieces.
// Inlined where it is called: to be handed over, the address and the length of ranges would be loaded in one access, and one that spans two recent stores
// waits until all stores before it have left the processor, those into the last frame's buffers too.
#[inline(always)]
pub(super) fn copy(source: Place<'_>, target: Place<'_>, len: usize) -> Result<(), MemoryError> {
    let piece = |(memory, ranges, offset)| in_one_piece(memory, ranges, offset, len);
    if let (Some(from), Some(to)) = (piece(source), piece(target)) {
        // SAFETY: both places are mapped for at least `len` bytes.
        unsafe { move_bytes(from.as_ptr(), to.as_ptr(), len) };
        return Ok(());
    }
    copy_pieces(source, target, len)
}

fn copy_pieces(source: Place<'_>, target: Place<'_>, len: usize) -> Result<(), MemoryError> {
    let walk = |(memory, ranges, offset)| Walk::new(memory, ranges, offset, len);
    let (mut source, mut target) = (walk(source)?, walk(target)?);
    let mut left = len;
    while left > 0 {
        let (from, available) = source.here()?;
        let (to, room) = target.here()?;
        let step = available.min(room).min(left);
        // SAFETY: both places are mapped for at least `step` bytes, which bounds both.
        unsafe { move_bytes(from.as_ptr(), to.as_ptr(), step) };
        source.advance(step);
        target.advance(step);
        left -= step;
    }
    Ok(())
}

/// The place of these bytes, if all of them are in the first range and in one region. That is so for nearly all, and then there is nothing to
/// walk.
#[inline]
fn in_one_piece(
    memory: &GuestMemory,
    ranges: &[Range],
    offset: usize,
    len: usize,
) -> Option<NonNull<u8>> {
    let first = ranges.first()?;
    let end = offset.checked_add(len)?;
    if end > first.len as usize {
        return None;
    }
    let address = first.address.checked_add(offset as u64)?;
    let (place, room) = memory.locate(address)?;
    (len <= room).then_some(place)
}

/// Moves bytes of which at least one side is shared. Overlap is allowed, since a guest may ask for a copy onto itself. (In the C
/// library `memmove` and `memcpy` are the same routine.)
///
/// The fences keep the optimiser from reading shared memory again, or earlier, in place of the copy: see "Racing bytes" in the documentation of the
/// crate.
///
/// # Safety
/// Both places are valid for `len` bytes, `from` for reads and `to` for writes.
#[inline]
unsafe fn move_bytes(from: *const u8, to: *mut u8, len: usize) {
    compiler_fence(Ordering::SeqCst);
    // SAFETY: the caller's promise.
    unsafe { ptr::copy(from, to, len) };
    compiler_fence(Ordering::SeqCst);
}
