//! A span of our address space that shows a file of a VMM's.

mod room;
pub(crate) mod unmapper;

use std::fs::File;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use rustix::fs::{AtFlags, FileType, StatxFlags, fcntl_get_seals, fstatfs, statx};

use self::room::Room;
use crate::error::MemoryError;
use crate::fault::{self, Registration};
use crate::region::MAX_MAPPED_BYTES;
use crate::span::{AddressSpan, map_error, page_len};

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
    _room: Room,
}

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

        unmapper::start().map_err(MemoryError::Map)?;
        let room = after_unmapping(|| Room::take(len)).ok_or(MemoryError::TooMuchMapped {
            max: MAX_MAPPED_BYTES,
        })?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let span = AddressSpan::show(file, file_offset, len, protection)?;
        let anchor = AddressSpan::show(file, file_offset, page_len, libc::PROT_NONE)?;
        let start = span.base().addr().get();
        let registration = after_unmapping(|| fault::register(start, len, page_len))
            .ok_or(MemoryError::TooManyMappings)?;
        span.keep_out_of_core_dumps();
        Ok(Mapping(ManuallyDrop::new(Mapped {
            registration,
            span,
            _anchor: anchor,
            _room: room,
        })))
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.0.span.base()
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

/// Tries to take something, again when everything is unmapped that was dropped: until then that has its share.
fn after_unmapping<T>(take: impl Fn() -> Option<T>) -> Option<T> {
    take().or_else(|| {
        unmapper::finish();
        take()
    })
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
