//! Sockets that read from guest memory and write to it, with no copy of ours in between.
//!
//! A [`Gather`] lists the pieces that leave with one `sendmsg`, a [`Scatter`] those that one `recvmsg` fills. Pieces are ranges of guest
//! memory or of other shared memory, or private bytes, in any order: a header beside a guest's payload, or payloads of several packets in a row. Both
//! borrow the memory for their life, so that the kernel never writes to a region that was unmapped meanwhile.
//!
//! The guest may change the bytes while the kernel copies them. That is the guest's affair.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use smallvec::SmallVec;

use crate::guest::{GuestMemory, MemoryError, Range, Walk};

#[cfg(test)]
#[cfg(not(any(miri, loom)))]
mod tests;

/// Whether this error of a [`Gather`] or [`Scatter`] says that guest memory was not there: its file was truncated. The line must be
/// dropped, as for [`GuestMemory::is_poisoned`].
pub fn is_memory_fault(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EFAULT)
}

/// Pieces of guest memory and private `Bytes`, in the order in which they were pushed.
///
/// It allocates nothing up to 64 pieces. Pieces that follow each other in memory count as one.
#[derive(Debug)]
pub struct Pieces<'m, Bytes> {
    list: SmallVec<[libc::iovec; 64]>,
    bytes: usize,
    borrowed: PhantomData<(&'m GuestMemory, Bytes)>,
}

/// Data that leaves.
pub type Gather<'m> = Pieces<'m, &'m [u8]>;

/// Room for data that arrives.
pub type Scatter<'m> = Pieces<'m, &'m mut [u8]>;

impl<Bytes> Default for Pieces<'_, Bytes> {
    fn default() -> Self {
        Pieces {
            list: SmallVec::new(),
            bytes: 0,
            borrowed: PhantomData,
        }
    }
}

impl<'m, Bytes> Pieces<'m, Bytes> {
    /// The most pieces that one call takes: `UIO_MAXIOV` of Linux.
    pub const MAX_SEGMENTS: usize = 1024;

    /// An empty list.
    pub fn new() -> Self {
        Pieces::default()
    }

    /// Adds `len` bytes of guest memory, from `offset` bytes into the ranges on. Adds nothing when it fails.
    pub fn push(
        &mut self,
        memory: &'m GuestMemory,
        ranges: &[Range],
        offset: usize,
        len: usize,
    ) -> Result<(), MemoryError> {
        let mut walk = Walk::new(memory, ranges, offset, len)?;
        let before = self.mark();
        let mut left = len;
        while left > 0 {
            let pushed = walk.here().and_then(|(place, available)| {
                let step = available.min(left);
                self.push_place(place.as_ptr(), step).map(|()| step)
            });
            match pushed {
                Ok(step) => {
                    walk.advance(step);
                    left -= step;
                }
                Err(error) => {
                    self.roll_back(before);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Adds memory that something else than a guest shares, such as a ring.
    ///
    /// # Safety
    /// The `len` bytes are mapped for as long as `'m`, for reading, and for writing in a [`Scatter`], where no reference to them may
    /// exist. They may change at any time.
    pub unsafe fn push_mapped(
        &mut self,
        start: NonNull<u8>,
        len: usize,
    ) -> Result<(), MemoryError> {
        self.push_place(start.as_ptr(), len)
    }

    /// How many bytes there are, or fit.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// How many pieces there are.
    pub fn segments(&self) -> usize {
        self.list.len()
    }

    fn push_place(&mut self, start: *mut u8, len: usize) -> Result<(), MemoryError> {
        if len == 0 {
            return Ok(());
        }
        let full = self.list.len() == Self::MAX_SEGMENTS;
        match self.list.last_mut() {
            // The two are one piece for the kernel, also if they belong to different owners: it sees addresses only.
            Some(last) if last.iov_base.addr() + last.iov_len == start.addr() => {
                last.iov_len += len
            }
            _ if full => {
                return Err(MemoryError::TooManySegments {
                    max: Self::MAX_SEGMENTS,
                });
            }
            _ => self.list.push(libc::iovec {
                iov_base: start.cast(),
                iov_len: len,
            }),
        }
        self.bytes += len;
        Ok(())
    }

    /// What [`roll_back`](Self::roll_back) needs: how many pieces there are, how long the last one is, how many bytes.
    fn mark(&self) -> (usize, usize, usize) {
        (
            self.list.len(),
            self.list.last().map_or(0, |last| last.iov_len),
            self.bytes,
        )
    }

    fn roll_back(&mut self, (count, last_len, bytes): (usize, usize, usize)) {
        self.list.truncate(count);
        if let Some(last) = self.list.last_mut() {
            last.iov_len = last_len;
        }
        self.bytes = bytes;
    }

    fn message(&self) -> libc::msghdr {
        libc::msghdr {
            msg_name: ptr::null_mut(),
            msg_namelen: 0,
            // The kernel only reads the list.
            msg_iov: self.list.as_ptr().cast_mut(),
            msg_iovlen: self.list.len() as _,
            msg_control: ptr::null_mut(),
            msg_controllen: 0,
            msg_flags: 0,
        }
    }
}

impl<'m> Gather<'m> {
    /// Adds private bytes.
    pub fn push_bytes(&mut self, bytes: &'m [u8]) -> Result<(), MemoryError> {
        self.push_place(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Sends what a socket takes at once, and says how many bytes that was. `end_of_record` marks the end of a message
    /// (`MSG_EOR`), on the sockets that know of it.
    ///
    /// On a socket of records (SOCK_SEQPACKET) all is one record, and an empty list is an empty record.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing now; otherwise what `sendmsg(2)` reports. It never blocks, and never raises SIGPIPE.
    /// See [`is_memory_fault`].
    pub fn send(&self, socket: BorrowedFd<'_>, end_of_record: bool) -> io::Result<usize> {
        let message = self.message();
        let mut flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        if end_of_record {
            flags |= libc::MSG_EOR;
        }
        // SAFETY: the message points at a list of pieces, each of which is mapped or borrowed for the life of `self`; the kernel
        // only reads them.
        uninterrupted(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) })
    }

    /// Writes everything in one call, as a tap device or a packet socket takes a frame.
    ///
    /// # Errors
    /// What `writev(2)` reports: `WouldBlock` when there is no room now, if the descriptor does not block. See [`is_memory_fault`].
    pub fn write(&self, descriptor: BorrowedFd<'_>) -> io::Result<usize> {
        let list = &self.list;
        // SAFETY: each piece of the list is mapped or borrowed for the life of `self`; the kernel only reads them. There are
        // MAX_SEGMENTS at most.
        uninterrupted(|| unsafe {
            libc::writev(descriptor.as_raw_fd(), list.as_ptr(), list.len() as _)
        })
    }
}

/// What one call of [`Scatter::receive_record`] brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// How many bytes were written.
    pub len: usize,
    /// The record had more bytes than there was room for, and they are lost (`MSG_TRUNC`).
    pub truncated: bool,
    /// The sender marked the end of a message (`MSG_EOR`). UNIX sockets do not pass this on: there a record is a message.
    pub end_of_record: bool,
    /// The sender sent descriptors or the like along, which were thrown away (`MSG_CTRUNC`). They also end what one call
    /// reads, so that there may be more however short it was.
    pub control_dropped: bool,
}

impl<'m> Scatter<'m> {
    /// Adds private bytes.
    pub fn push_bytes(&mut self, bytes: &'m mut [u8]) -> Result<(), MemoryError> {
        self.push_place(bytes.as_mut_ptr(), bytes.len())
    }

    /// Takes from a socket what it has at once, and says how many bytes that was. Zero is the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing now; `InvalidInput` without room, where zero bytes would look like the end of the
    /// stream; otherwise what `recvmsg(2)` reports. It never blocks. See [`is_memory_fault`].
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.receive_record(socket).map(|received| received.len)
    }

    /// As [`receive`](Self::receive), for a socket of records: says also whether the record fitted.
    pub fn receive_record(&mut self, socket: BorrowedFd<'_>) -> io::Result<Received> {
        if self.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "there is no room to receive into",
            ));
        }
        let mut message = self.message();
        // SAFETY: the message points at a list of pieces, each of which is mapped, or exclusively borrowed, for the life of `self`; guest memory may
        // be written to by others at any time.
        let len = uninterrupted(|| unsafe {
            libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT)
        })?;
        Ok(Received {
            len,
            truncated: message.msg_flags & libc::MSG_TRUNC != 0,
            end_of_record: message.msg_flags & libc::MSG_EOR != 0,
            control_dropped: message.msg_flags & libc::MSG_CTRUNC != 0,
        })
    }
}

/// Repeats a system call while a signal interrupts it.
fn uninterrupted(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        if let Ok(len) = usize::try_from(call()) {
            return Ok(len);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
