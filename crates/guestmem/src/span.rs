//! Spans of our address space, and the files that are shown there.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

use rustix::fs::fstatfs;

use crate::error::MemoryError;
use crate::fault::{self, Registration};

/// File systems by their numbers (statfs(2)).
const HUGETLBFS: u32 = 0x9584_58F6;
const FUSE: u32 = 0x6573_5546;

/// Bytes that [`AddressSpan::clear`] takes out at a time: 16,384 ordinary pages, in less than a millisecond.
const CLEARED_BYTES: usize = 64 << 20;

/// Addresses of our own at which files are shown, entered in the table of [`fault`](crate::fault): where a page of theirs is lost, the span is
/// poisoned, and shows zeros. The order of the fields is the order of their drop, as in a region's mapping.
#[derive(Debug)]
pub struct GuardedSpan {
    registration: Registration,
    span: AddressSpan,
    page_len: usize,
}

impl GuardedSpan {
    /// Takes `len` bytes of addresses, a multiple of `page_len`. There is nothing to be read or written yet.
    ///
    /// # Errors
    /// [`MemoryError::TooManyMappings`], or what the system reports.
    ///
    /// # Panics
    /// For a length that is no multiple of the pages'.
    pub fn reserve(len: usize, page_len: usize) -> Result<GuardedSpan, MemoryError> {
        fault::install().map_err(MemoryError::Map)?;
        let span = AddressSpan::reserve(len, page_len).map_err(MemoryError::Map)?;
        let registration = fault::register(span.base.addr().get(), len, page_len);
        Ok(GuardedSpan {
            registration: registration.ok_or(MemoryError::TooManyMappings)?,
            span,
            page_len,
        })
    }

    /// Shows `len` bytes of a file from `offset` on, at `at` bytes into the span. They are left out of core dumps.
    ///
    /// # Panics
    /// For a place that is not inside the span, in whole pages.
    ///
    /// # Safety
    /// The file's pages are no longer than the span's: the system maps whole pages.
    pub unsafe fn show(
        &mut self,
        at: usize,
        file: &File,
        offset: u64,
        len: usize,
    ) -> io::Result<()> {
        let room = self.span.len.checked_sub(at);
        let is_inside = room.is_some_and(|room| len <= room);
        assert!(
            is_inside && at % self.page_len == 0 && len % self.page_len == 0,
            "{len} at {at} of the span"
        );
        let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the place is inside the span.
        let place = unsafe { self.span.base.add(at) };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let descriptor = file.as_raw_fd();
        let place = place.as_ptr().cast();
        // SAFETY: what is replaced was reserved for this, in whole pages of the file; nothing refers to it, since the span is exclusively borrowed.
        let mapped = unsafe { libc::mmap(place, len, protection, flags, descriptor, offset) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: this changes nothing about the memory itself; what it says holds for the new mapping only, and a failure does no harm.
        unsafe { libc::madvise(mapped, len, libc::MADV_DONTDUMP) };
        Ok(())
    }

    /// Where it begins. It stays there for as long as `self` lives.
    #[inline]
    pub fn base(&self) -> NonNull<u8> {
        self.span.base
    }

    /// In bytes.
    pub fn len(&self) -> usize {
        self.span.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.span.len == 0
    }

    /// Whether a page was lost.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        fault::count() != 0 && self.registration.is_poisoned()
    }
}

/// A stretch of our address space. It is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct AddressSpan {
    base: NonNull<u8>,
    /// Length in bytes, whole pages of the file's kind.
    len: usize,
}

// SAFETY: the span is plain memory that no thread owns; it is accessed only through raw pointers, by code that
// expects others to write to it at any time.
unsafe impl Send for AddressSpan {}
// SAFETY: as above.
unsafe impl Sync for AddressSpan {}

impl AddressSpan {
    /// Shows a file at a place that the kernel chooses.
    pub(crate) fn show(
        file: &File,
        offset: libc::off_t,
        len: usize,
        protection: libc::c_int,
    ) -> Result<AddressSpan, MemoryError> {
        let descriptor = file.as_raw_fd();
        let (anywhere, flags) = (ptr::null_mut(), libc::MAP_SHARED);
        // SAFETY: a new mapping at a place that the kernel chooses touches nothing that exists.
        let base = unsafe { libc::mmap(anywhere, len, protection, flags, descriptor, offset) };
        if base == libc::MAP_FAILED {
            return Err(MemoryError::Map(io::Error::last_os_error()));
        }
        let base =
            NonNull::new(base.cast()).expect("mmap places nothing at address zero unless asked to");
        Ok(AddressSpan { base, len })
    }

    /// Reserved addresses, at a multiple of `page_len`, with nothing to be read or written there yet.
    fn reserve(len: usize, page_len: usize) -> io::Result<AddressSpan> {
        assert!(
            page_len > 0 && len % page_len == 0,
            "{len} bytes in pages of {page_len}"
        );
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let padded = len.checked_add(page_len).ok_or_else(too_large)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at a place that the kernel chooses touches nothing that exists.
        let found = unsafe { libc::mmap(ptr::null_mut(), padded, libc::PROT_NONE, flags, -1, 0) };
        if found == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = found.addr().next_multiple_of(page_len) - found.addr();
        let after = padded - before - len;
        // SAFETY: less than a page further, inside what was mapped.
        let base = unsafe { found.byte_add(before) };
        if before > 0 {
            // SAFETY: the mapping was made above and has no user yet; so below.
            unsafe { libc::munmap(found, before) };
        }
        if after > 0 {
            // SAFETY: the end of the same mapping.
            let end = unsafe { base.byte_add(len) };
            // SAFETY: as above.
            unsafe { libc::munmap(end, after) };
        }
        let base =
            NonNull::new(base.cast()).expect("mmap places nothing at address zero unless asked to");
        Ok(AddressSpan { base, len })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Takes the pages out of the page tables, a slice at a time: other threads that map memory, or fault some in, get in between.
    pub(crate) fn clear(&self) {
        for start in (0..self.len).step_by(CLEARED_BYTES) {
            let len = CLEARED_BYTES.min(self.len - start);
            // SAFETY: inside the span.
            let place = unsafe { self.base.add(start) };
            // SAFETY: the pages are the file's, which keeps them. What this does not do, `munmap` does.
            unsafe { libc::madvise(place.as_ptr().cast(), len, libc::MADV_DONTNEED) };
        }
    }

    /// A core of ours is no place for the guests' secrets, nor for their gigabytes.
    pub(crate) fn keep_out_of_core_dumps(&self) {
        // SAFETY: this changes nothing about the memory itself. A failure does no harm either.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_DONTDUMP) };
    }
}

impl Drop for AddressSpan {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and this is the last reference to it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Size in bytes of the pages that a mapping of this file has.
///
/// # Errors
/// What the system reports; [`MemoryError::FileSystem`] for FUSE.
pub fn page_len(file: &File) -> Result<usize, MemoryError> {
    let statistics = fstatfs(file).map_err(map_error)?;
    match statistics.f_type as u32 {
        HUGETLBFS => Ok(statistics.f_bsize as usize),
        // Its pages come from a process, which can let every access of ours wait for ever.
        FUSE => Err(MemoryError::FileSystem { kind: FUSE }),
        _ => Ok(rustix::param::page_size()),
    }
}

pub(crate) fn map_error(error: rustix::io::Errno) -> MemoryError {
    MemoryError::Map(error.into())
}
