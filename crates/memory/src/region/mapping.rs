//! A span of our address space that shows a file.

pub(crate) mod unmapper;

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

use rustix::fs::{AtFlags, FileType, StatxFlags, fcntl_get_seals, fstatfs, statx};

use crate::fault::{self, Registration};
use crate::guest::MemoryError;

/// File systems by their numbers (statfs(2)).
const HUGETLBFS: u32 = 0x9584_58F6;
const FUSE: u32 = 0x6573_5546;

/// Bytes that [`AddressSpan::clear`] takes out at a time: 16,384 ordinary pages, in less than a millisecond.
const CLEARED_BYTES: usize = 64 << 20;

/// A span of our address space that shows a file. Dropping it leaves the unmapping to the [`unmapper`]'s thread.
#[derive(Debug)]
pub(super) struct Mapping(ManuallyDrop<Mapped>);

/// What a mapping consists of. The order of the fields is the order of their drop: the span must have left the table before its addresses can be
/// used again.
#[derive(Debug)]
struct Mapped {
    registration: Registration,
    span: AddressSpan,
    /// One page of the same file, never accessed. When the handler of SIGBUS replaces the span, this still refers to the file, so that its memory is
    /// not freed on the thread that faulted.
    _anchor: AddressSpan,
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

impl Mapping {
    /// Shows `size` bytes of a file from `offset` on.
    pub(super) fn new(
        file: &File,
        offset: u64,
        size: u64,
        _frontend_address: u64,
    ) -> Result<Mapping, MemoryError> {
        fault::install().map_err(MemoryError::Map)?;
        check_file_system(file)?;
        let found = file.metadata().map_err(MemoryError::Map)?.len();
        if found < offset + size {
            return Err(MemoryError::FileTooShort {
                needed: offset + size,
                found,
            });
        }
        let page_len = page_len(file)?;
        if offset % page_len as u64 != 0 {
            return Err(MemoryError::MisalignedOffset { offset, page_len });
        }
        let too_large = || MemoryError::AddressOverflow {
            start: offset,
            size,
        };
        let len = usize::try_from(size)
            .ok()
            .and_then(|size| size.checked_next_multiple_of(page_len))
            .ok_or_else(too_large)?;
        let file_offset = libc::off_t::try_from(offset).map_err(|_| too_large())?;

        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let span = AddressSpan::show(file, file_offset, len, protection)?;
        let anchor = AddressSpan::show(file, file_offset, page_len, libc::PROT_NONE)?;
        unmapper::start().map_err(MemoryError::Map)?;
        let register = || fault::register(span.base.addr().get(), len, page_len);
        // What was dropped and not unmapped yet has its place in the table.
        let registration = register().or_else(|| {
            unmapper::finish();
            register()
        });
        let registration = registration.ok_or(MemoryError::TooManyMappings)?;
        span.keep_out_of_core_dumps();
        Ok(Mapping(ManuallyDrop::new(Mapped {
            registration,
            span,
            _anchor: anchor,
        })))
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.0.span.base
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.0.registration.is_poisoned()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the last use of the field.
        let mapped = unsafe { ManuallyDrop::take(&mut self.0) };
        unmapper::unmap(mapped);
    }
}

impl AddressSpan {
    /// Shows a file at a place that the kernel chooses.
    fn show(
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
            NonNull::new(base.cast()).expect("mmap places nothing at address zero unless told to");
        Ok(AddressSpan { base, len })
    }

    /// Addresses that nobody else gets, at a multiple of `page_len`, with nothing to be read or written there yet.
    #[cfg_attr(loom, allow(dead_code))] // A modelled window has no addresses.
    pub(crate) fn reserve(len: usize, page_len: usize) -> io::Result<AddressSpan> {
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
            // SAFETY: the mapping was made above and nobody has seen it; so below.
            unsafe { libc::munmap(found, before) };
        }
        if after > 0 {
            // SAFETY: the end of the same mapping.
            let end = unsafe { base.byte_add(len) };
            // SAFETY: as above.
            unsafe { libc::munmap(end, after) };
        }
        let base =
            NonNull::new(base.cast()).expect("mmap places nothing at address zero unless told to");
        Ok(AddressSpan { base, len })
    }

    #[cfg_attr(loom, allow(dead_code))]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    #[cfg_attr(loom, allow(dead_code))]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Takes the pages out of the page tables, a slice at a time: other threads that map memory, or fault some in, get in between.
    fn clear(&self) {
        for start in (0..self.len).step_by(CLEARED_BYTES) {
            let len = CLEARED_BYTES.min(self.len - start);
            // SAFETY: inside the span.
            let place = unsafe { self.base.add(start) };
            // SAFETY: the pages are the file's, which keeps them. What this does not do, `munmap` does.
            unsafe { libc::madvise(place.as_ptr().cast(), len, libc::MADV_DONTNEED) };
        }
    }

    /// A core of ours is no place for the guests' secrets, nor for their gigabytes.
    fn keep_out_of_core_dumps(&self) {
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

/// Refuses a file unless its pages are memory. Elsewhere an access may have to wait: for a disk, for the process that serves a file (FUSE), or for
/// another machine.
fn check_file_system(file: &File) -> Result<(), MemoryError> {
    // DONT_SYNC: what is known of the file without asking its file system.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let known = statx(file, "", flags, StatxFlags::TYPE).map_err(map_error)?;
    if FileType::from_raw_mode(known.stx_mode.into()) != FileType::RegularFile {
        return Err(MemoryError::NotARegularFile);
    }
    // Only files of tmpfs (memfds too) and hugetlbfs have seals, so these need no question to a file system.
    if fcntl_get_seals(file).is_ok() {
        return Ok(());
    }
    // This may block, if a process serves the file system: the caller is on a thread of the VMM's own.
    let kind = fstatfs(file).map_err(map_error)?.f_type as u32;
    Err(MemoryError::FileSystem { kind })
}

fn map_error(error: rustix::io::Errno) -> MemoryError {
    MemoryError::Map(error.into())
}

/// Size in bytes of the pages that a mapping of this file has.
pub(crate) fn page_len(file: &File) -> Result<usize, MemoryError> {
    let statistics = fstatfs(file).map_err(map_error)?;
    match statistics.f_type as u32 {
        HUGETLBFS => Ok(statistics.f_bsize as usize),
        // Its pages come from a process, which can let every access of ours wait for ever.
        FUSE => Err(MemoryError::FileSystem { kind: FUSE }),
        _ => Ok(rustix::param::page_size()),
    }
}
