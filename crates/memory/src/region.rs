//! One region of guest memory, mapped.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

use crate::fault::{self, Registration};
use crate::guest::MemoryError;

/// What a VMM says about a region (vhost-user, "Memory region description"), with the file that came along.
#[derive(Debug)]
pub struct RegionSpec {
    /// Where the guest sees the region: a guest physical address.
    pub guest_address: u64,
    /// Size of the region, in bytes.
    pub size: u64,
    /// Where the VMM, the front end, has mapped it: vhost-user gives the addresses of rings in these terms.
    pub frontend_address: u64,
    /// The file that backs it.
    pub file: File,
    /// Where in the file the region starts, in bytes.
    pub file_offset: u64,
}

/// A mapped region. It is unmapped when the last reference goes.
#[derive(Debug)]
pub(crate) struct Region {
    guest_address: u64,
    size: u64,
    frontend_address: u64,
    mapping: Mapping,
}

impl Region {
    pub(crate) fn map(spec: RegionSpec) -> Result<Region, MemoryError> {
        let RegionSpec {
            guest_address,
            size,
            frontend_address,
            ref file,
            file_offset,
        } = spec;
        if size == 0 {
            return Err(MemoryError::EmptyRegion { guest_address });
        }
        // The last address must exist, so that a sum of an address inside and a length up to the end never overflows.
        for start in [guest_address, frontend_address, file_offset] {
            if start.checked_add(size).is_none() || isize::try_from(size).is_err() {
                return Err(MemoryError::AddressOverflow { start, size });
            }
        }
        let mapping = Mapping::new(file, file_offset, size, frontend_address)?;
        Ok(Region {
            guest_address,
            size,
            frontend_address,
            mapping,
        })
    }

    pub(crate) fn guest_address(&self) -> u64 {
        self.guest_address
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn frontend_address(&self) -> u64 {
        self.frontend_address
    }

    pub(crate) fn contains_guest(&self, address: u64) -> bool {
        address.wrapping_sub(self.guest_address) < self.size
    }

    /// The place of a guest address inside the region and the number of bytes from there to the region's end.
    pub(crate) fn at_guest(&self, address: u64) -> Option<(NonNull<u8>, usize)> {
        self.at_offset(address.wrapping_sub(self.guest_address))
    }

    /// The same for an address of the front end.
    pub(crate) fn at_frontend(&self, address: u64) -> Option<(NonNull<u8>, usize)> {
        self.at_offset(address.wrapping_sub(self.frontend_address))
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.mapping.registration.is_poisoned()
    }

    #[inline]
    fn at_offset(&self, offset: u64) -> Option<(NonNull<u8>, usize)> {
        if offset >= self.size {
            return None;
        }
        // Both fit, because the size fits.
        let (offset, left) = (offset as usize, (self.size - offset) as usize);
        // SAFETY: the offset lies inside the mapping, which is at least `size` bytes long and no longer than isize::MAX.
        let place = unsafe { self.mapping.span.base.add(offset) };
        Some((place, left))
    }
}

/// A span of our address space that shows a file.
///
/// The order of the fields is the order of their drop: the span must have left the table before its addresses can be
/// somebody else's.
#[derive(Debug)]
struct Mapping {
    registration: Registration,
    span: Span,
}

#[derive(Debug)]
struct Span {
    base: NonNull<u8>,
    /// Length in bytes, whole pages of the file's kind.
    #[cfg_attr(miri, allow(dead_code))]
    len: usize,
}

// SAFETY: the span is plain memory that no thread owns; it is accessed only through raw pointers, by code that
// expects others to write to it at any time.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

#[cfg(not(miri))]
impl Mapping {
    fn new(
        file: &File,
        offset: u64,
        size: u64,
        _frontend_address: u64,
    ) -> Result<Mapping, MemoryError> {
        fault::install().map_err(MemoryError::Map)?;
        let metadata = file.metadata().map_err(MemoryError::Map)?;
        if !metadata.is_file() {
            return Err(MemoryError::NotARegularFile);
        }
        if metadata.len() < offset + size {
            return Err(MemoryError::FileTooShort {
                needed: offset + size,
                found: metadata.len(),
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
        // SAFETY: a new mapping at a place that the kernel chooses touches nothing that exists.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                file_offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(MemoryError::Map(io::Error::last_os_error()));
        }
        let Some(registration) = Registration::new(base.addr(), len, page_len) else {
            // SAFETY: the mapping was made above and nobody has seen it.
            unsafe { libc::munmap(base, len) };
            return Err(MemoryError::TooManyMappings);
        };
        let base =
            NonNull::new(base.cast()).expect("mmap places nothing at address zero unless told to");
        Ok(Mapping {
            registration,
            span: Span { base, len },
        })
    }
}

#[cfg(not(miri))]
impl Drop for Span {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and this is the last reference to it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Miri knows no files that are mapped. There the driver's memory is ordinary memory of the same process, and the "front end's
/// address" is where it is.
#[cfg(miri)]
impl Mapping {
    fn new(
        _file: &File,
        _offset: u64,
        size: u64,
        frontend_address: u64,
    ) -> Result<Mapping, MemoryError> {
        let base = NonNull::new(ptr::with_exposed_provenance_mut(frontend_address as usize))
            .ok_or(MemoryError::NotARegularFile)?;
        let registration = Registration::new(base.addr().get(), size as usize, 4096)
            .ok_or(MemoryError::TooManyMappings)?;
        Ok(Mapping {
            registration,
            span: Span {
                base,
                len: size as usize,
            },
        })
    }
}

/// Size in bytes of the pages that a mapping of this file has.
#[cfg(not(miri))]
fn page_len(file: &File) -> Result<usize, MemoryError> {
    let mut statistics = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open and the buffer is large enough for the answer.
    let result = unsafe { libc::fstatfs(file.as_raw_fd(), statistics.as_mut_ptr()) };
    if result != 0 {
        return Err(MemoryError::Map(io::Error::last_os_error()));
    }
    // SAFETY: the call succeeded, so it has filled in the buffer.
    let statistics = unsafe { statistics.assume_init() };
    match statistics.f_type {
        libc::HUGETLBFS_MAGIC => Ok(statistics.f_bsize as usize),
        // Its pages come from a process, which can let every access of ours wait for ever.
        libc::FUSE_SUPER_MAGIC => Err(MemoryError::ServedByAProcess),
        _ => {
            // SAFETY: no memory is involved.
            let len = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            Ok(usize::try_from(len).expect("every Linux system has a page size"))
        }
    }
}
