//! One region of guest memory, mapped.

use std::fs::File;
use std::ptr::NonNull;

use self::mapping::Mapping;
use crate::error::MemoryError;

#[cfg_attr(miri, path = "region/simulated.rs")]
mod mapping;

#[cfg(all(test, not(any(miri, loom))))]
pub(crate) use self::mapping::unmapper;

/// The most bytes that all regions of the process may have together: 64 TiB, half of the addresses of a program on x86-64. A file without pages costs its
/// VMM nothing, and a process without addresses can neither map the memory of the next guest nor have more of its own.
pub const MAX_MAPPED_BYTES: u64 = 64 << 40;

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

/// A mapped region. It is unmapped soon after the last reference goes, on a thread of its own.
#[derive(Debug)]
pub struct Region {
    guest_address: u64,
    size: u64,
    frontend_address: u64,
    mapping: Mapping,
}

impl Region {
    /// Maps the file.
    ///
    /// # Errors
    /// The region is empty, has addresses that do not exist, or cannot be mapped.
    pub fn map(spec: RegionSpec) -> Result<Region, MemoryError> {
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

    /// In bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where the front end has it.
    #[inline]
    pub fn frontend_address(&self) -> u64 {
        self.frontend_address
    }

    /// Where the region is, for look-ups by guest address.
    pub(crate) fn span(&self) -> Span {
        Span {
            guest_address: self.guest_address,
            size: self.size,
            base: self.mapping.base(),
        }
    }

    /// The place of an address of the front end inside the region and the number of bytes from there to the region's end.
    #[inline]
    pub fn at_frontend(&self, address: u64) -> Option<(NonNull<u8>, usize)> {
        self.span()
            .at_offset(address.wrapping_sub(self.frontend_address))
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }
}

/// Where a region is: what a look-up needs of it, in one piece. It is valid for as long as there is a reference to the region.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    guest_address: u64,
    size: u64,
    base: NonNull<u8>,
}

// SAFETY: the memory belongs to no thread; it is accessed only through raw pointers, by code that expects others to write to it at any time.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    pub(crate) fn guest_address(&self) -> u64 {
        self.guest_address
    }

    /// The place of a guest address inside the region and the number of bytes from there to the region's end.
    #[inline]
    pub(crate) fn at_guest(&self, address: u64) -> Option<(NonNull<u8>, usize)> {
        self.at_offset(address.wrapping_sub(self.guest_address))
    }

    #[inline]
    fn at_offset(&self, offset: u64) -> Option<(NonNull<u8>, usize)> {
        if offset >= self.size {
            return None;
        }
        // Both fit, because the size fits.
        let (offset, left) = (offset as usize, (self.size - offset) as usize);
        // SAFETY: the offset lies inside the mapping, which is at least `size` bytes long and no longer than isize::MAX.
        let place = unsafe { self.base.add(offset) };
        Some((place, left))
    }
}
