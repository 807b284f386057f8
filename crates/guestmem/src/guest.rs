//! The memory of a guest, and the copies in, out, and across.
//!
//! A [`GuestMemory`] is a snapshot: a short sorted list of references to mapped regions. Cloning one is cheap, and changing
//! a clone does not disturb holders of the old one; this is how regions come and go while queues are running.
//!
//! What to copy is said with [`Range`]s, in guest physical addresses, as a queue yields them, and a byte offset into
//! their concatenation. They are looked up again at every use: a range that has lost its region is an error,
//! never an access.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use crate::error::MemoryError;
pub use crate::region::{MAX_MAPPED_BYTES, RegionSpec};

use crate::fault;
use crate::region::{Region, Span};

mod transfer;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

/// The most regions that one memory may have: what vhost-user back ends commonly announce, after the number of slots that KVM
/// once had for a machine.
pub const MAX_REGIONS: usize = 509;

/// The most bytes that the regions of one memory may have together: 8 TiB, as many as KVM takes in one slot.
pub const MAX_MEMORY_BYTES: u64 = 8 << 40;

/// A snapshot of the regions that make up a guest's memory.
#[derive(Debug, Default)]
pub struct GuestMemory {
    /// Sorted by guest address; neither guest nor front-end addresses overlap.
    regions: Vec<Arc<Region>>,
    /// Where each of them is: look-ups need no more, and find it without another step through memory.
    spans: Vec<Span>,
    /// Index of the region that was found last: most guests use one or two, and runs of accesses stay in one.
    last_found: AtomicUsize,
}

impl GuestMemory {
    /// A memory without regions.
    pub fn new() -> GuestMemory {
        GuestMemory::default()
    }

    /// Maps all of these regions.
    ///
    /// # Errors
    /// As [`add_region`](Self::add_region), for the first region that is refused.
    pub fn with_regions(specs: Vec<RegionSpec>) -> Result<GuestMemory, MemoryError> {
        let mut memory = GuestMemory::new();
        for spec in specs {
            memory.add_region(spec)?;
        }
        Ok(memory)
    }

    /// Maps one more region. The file is not needed after.
    ///
    /// The file must be in memory (a memfd, a file of tmpfs or hugetlbfs), open for reading and writing, and long enough. Pages of other file systems
    /// have to be waited for: a disk's too, whose VMM can drop them from the cache before each access.
    ///
    /// # Errors
    /// A size of zero, a region that overlaps another one or does not fit into the address space, a file that does not
    /// do, more than [`MAX_REGIONS`] regions or [`MAX_MEMORY_BYTES`], more than [`MAX_MAPPED_BYTES`] in all memories, or what the system reports when it maps the file. The memory is unchanged.
    pub fn add_region(&mut self, spec: RegionSpec) -> Result<(), MemoryError> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(MemoryError::TooManyRegions { max: MAX_REGIONS });
        }
        let present: u64 = self.regions.iter().map(|region| region.size()).sum();
        if spec.size > MAX_MEMORY_BYTES - present {
            return Err(MemoryError::TooMuchMemory {
                max: MAX_MEMORY_BYTES,
            });
        }
        for region in &self.regions {
            let guest = overlap(
                spec.guest_address,
                spec.size,
                region.guest_address(),
                region.size(),
            );
            let frontend = overlap(
                spec.frontend_address,
                spec.size,
                region.frontend_address(),
                region.size(),
            );
            if guest || frontend {
                let (address, other) = if guest {
                    (spec.guest_address, region.guest_address())
                } else {
                    (spec.frontend_address, region.frontend_address())
                };
                return Err(MemoryError::Overlap {
                    address,
                    size: spec.size,
                    other,
                    other_size: region.size(),
                });
            }
        }
        let region = Region::map(spec)?;
        let index = self
            .regions
            .partition_point(|other| other.guest_address() < region.guest_address());
        self.spans.insert(index, region.span());
        self.regions.insert(index, Arc::new(region));
        Ok(())
    }

    /// Takes one region out, named as it was added. It stays mapped for holders of an older snapshot.
    ///
    /// # Errors
    /// [`MemoryError::NoSuchRegion`] unless all three values are those of one region.
    pub fn remove_region(
        &mut self,
        guest_address: u64,
        size: u64,
        frontend_address: u64,
    ) -> Result<(), MemoryError> {
        let index = self.index_of(guest_address, size, frontend_address);
        let index = index.ok_or(MemoryError::NoSuchRegion {
            guest_address,
            size,
            frontend_address,
        })?;
        self.regions.remove(index);
        self.spans.remove(index);
        Ok(())
    }

    /// Whether there is a region with these three values.
    pub fn has_region(&self, guest_address: u64, size: u64, frontend_address: u64) -> bool {
        self.index_of(guest_address, size, frontend_address)
            .is_some()
    }

    fn index_of(&self, guest_address: u64, size: u64, frontend_address: u64) -> Option<usize> {
        self.regions.iter().position(|region| {
            region.guest_address() == guest_address
                && region.size() == size
                && region.frontend_address() == frontend_address
        })
    }

    /// How many regions there are.
    pub fn region_count(&self) -> usize {
        self.regions.len()
    }

    /// Whether a page of ours was lost: the file was truncated under us, or the machine reported a memory error. The region
    /// then shows zeros in place of the guest's memory, and its line must be dropped (see [`fault`]).
    pub fn is_poisoned(&self) -> bool {
        fault::count() != 0 && self.regions.iter().any(|region| region.is_poisoned())
    }

    /// Copies bytes out of the guest: `into.len()` of them, from `offset` bytes into the ranges on.
    ///
    /// # Errors
    /// [`MemoryError::RangesTooShort`] before anything is copied; [`MemoryError::NotMapped`] and
    /// [`MemoryError::Poisoned`] after any part of `into` may have been written to.
    pub fn read(
        &self,
        ranges: &[Range],
        offset: usize,
        into: &mut [u8],
    ) -> Result<(), MemoryError> {
        transfer::read(self, ranges, offset, into)?;
        self.check_poison()
    }

    /// Copies the beginning of the ranges out of the guest, as much of it as there is and `into` has room for, and says how many bytes that is.
    ///
    /// # Errors
    /// [`MemoryError::NotMapped`] and [`MemoryError::Poisoned`], as for [`read`](Self::read).
    #[inline]
    pub fn read_head(&self, ranges: &[Range], into: &mut [u8]) -> Result<usize, MemoryError> {
        let len = match ranges.first() {
            Some(first) if first.len as usize >= into.len() => into.len(),
            _ => total_len(ranges).min(into.len()),
        };
        self.read(ranges, 0, &mut into[..len])?;
        Ok(len)
    }

    /// Copies bytes into the guest: all of `from`, to `offset` bytes into the ranges on.
    ///
    /// # Errors
    /// As for [`read`](Self::read), with parts written to the guest.
    pub fn write(&self, ranges: &[Range], offset: usize, from: &[u8]) -> Result<(), MemoryError> {
        transfer::write(self, ranges, offset, from)?;
        self.check_poison()
    }

    /// The place of a guest address in our memory and the number of bytes that follow it without a gap: up to the end of its
    /// region. The place is valid as long as `self` lives.
    #[inline]
    pub(crate) fn locate(&self, address: u64) -> Option<(NonNull<u8>, usize)> {
        let hint = self.last_found.load(Ordering::Relaxed);
        let found = self.spans.get(hint).and_then(|span| span.at_guest(address));
        match found {
            Some(_) => found,
            None => self.search(address),
        }
    }

    /// The region that holds this address of the front end.
    pub(crate) fn region_at_frontend(&self, address: u64) -> Option<&Arc<Region>> {
        self.regions
            .iter()
            .find(|region| region.at_frontend(address).is_some())
    }

    #[cold]
    fn search(&self, address: u64) -> Option<(NonNull<u8>, usize)> {
        let index = self
            .spans
            .partition_point(|span| span.guest_address() <= address)
            .checked_sub(1)?;
        let found = self.spans.get(index)?.at_guest(address)?;
        self.last_found.store(index, Ordering::Relaxed);
        Some(found)
    }

    #[inline]
    fn check_poison(&self) -> Result<(), MemoryError> {
        if self.is_poisoned() {
            Err(MemoryError::Poisoned)
        } else {
            Ok(())
        }
    }
}

impl Clone for GuestMemory {
    fn clone(&self) -> Self {
        GuestMemory {
            regions: self.regions.clone(),
            spans: self.spans.clone(),
            last_found: AtomicUsize::new(0),
        }
    }
}

/// A stretch of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Guest physical address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub len: u32,
}

/// The sum of the lengths, in bytes.
pub fn total_len(ranges: &[Range]) -> usize {
    ranges.iter().map(|range| range.len as usize).sum()
}

/// Copies `len` bytes from one guest to another, or within one: memory to memory, nothing in between.
///
/// The offsets are counted in bytes from the start of each list. The lists need not be cut alike. Where the two overlap
/// inside one piece the bytes arrive as if they had been taken out first; what arrives where different pieces of the lists
/// overlap is not specified.
///
/// # Errors
/// [`MemoryError::RangesTooShort`] before anything is copied; [`MemoryError::NotMapped`] and [`MemoryError::Poisoned`]
/// after any part may have been.
#[inline(always)]
pub fn copy(
    from: &GuestMemory,
    from_ranges: &[Range],
    from_offset: usize,
    to: &GuestMemory,
    to_ranges: &[Range],
    to_offset: usize,
    len: usize,
) -> Result<(), MemoryError> {
    let (source, target) = ((from, from_ranges, from_offset), (to, to_ranges, to_offset));
    transfer::copy(source, target, len)?;
    from.check_poison()?;
    to.check_poison()
}

/// A position in a list of ranges. Its maker has checked that the list is long enough.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    memory: &'a GuestMemory,
    ranges: std::slice::Iter<'a, Range>,
    address: u64,
    /// Bytes left in the current range.
    left: usize,
}

impl<'a> Walk<'a> {
    /// Stands at `offset` bytes into the list, with `len` bytes or more ahead.
    pub(crate) fn new(
        memory: &'a GuestMemory,
        ranges: &'a [Range],
        offset: usize,
        len: usize,
    ) -> Result<Walk<'a>, MemoryError> {
        let found = total_len(ranges);
        if offset.checked_add(len).is_none_or(|end| end > found) {
            return Err(MemoryError::RangesTooShort {
                offset,
                wanted: len,
                found,
            });
        }
        let mut walk = Walk {
            memory,
            ranges: ranges.iter(),
            address: 0,
            left: 0,
        };
        let mut to_skip = offset;
        while to_skip > walk.left {
            to_skip -= walk.left;
            walk.enter_next();
        }
        walk.advance(to_skip);
        Ok(walk)
    }

    /// The place where the walk stands and how many bytes it can go without a gap. At the end that is an error: the caller has
    /// counted.
    #[inline]
    pub(crate) fn here(&mut self) -> Result<(NonNull<u8>, usize), MemoryError> {
        while self.left == 0 {
            if !self.enter_next() {
                return Err(MemoryError::RangesTooShort {
                    offset: 0,
                    wanted: 1,
                    found: 0,
                });
            }
        }
        let (place, room) = self
            .memory
            .locate(self.address)
            .ok_or(MemoryError::NotMapped {
                address: self.address,
            })?;
        Ok((place, room.min(self.left)))
    }

    /// Goes on inside the current range: by no more than [`here`](Self::here) said.
    #[inline]
    pub(crate) fn advance(&mut self, len: usize) {
        debug_assert!(
            len <= self.left,
            "a step of {len} where {} bytes are left",
            self.left
        );
        self.left -= len;
        // At the very top of the address space the sum wraps to zero, with nothing left.
        self.address = self.address.wrapping_add(len as u64);
    }

    #[inline]
    fn enter_next(&mut self) -> bool {
        let Some(range) = self.ranges.next() else {
            return false;
        };
        self.address = range.address;
        self.left = range.len as usize;
        true
    }
}

fn overlap(start: u64, size: u64, other: u64, other_size: u64) -> bool {
    // In 128 bits no sum overflows; a region that does is refused later, with its own words.
    let (start, other) = (u128::from(start), u128::from(other));
    start < other + u128::from(other_size) && other < start + u128::from(size)
}
