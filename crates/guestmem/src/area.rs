//! A checked stretch of shared memory with the field accesses that a ring needs.
//!
//! Every access is one atomic load or store of a little-endian field. An offset outside the area, or off its alignment, is a
//! mistake of the caller's and panics: offsets are computed from private values only.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::prefetch::{self, Use};
use crate::region::Region;

/// A part of one region. Holds the region mapped.
#[derive(Debug)]
pub struct Area {
    base: NonNull<u8>,
    /// In bytes.
    len: usize,
    _region: Arc<Region>,
}

// SAFETY: the memory belongs to no thread, the region it lies in is kept mapped, and every access is atomic.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

macro_rules! accessors {
    ($load:ident, $store:ident, $integer:ty, $atomic:ty) => {
        /// Reads a field.
        #[inline]
        pub fn $load(&self, offset: usize, ordering: Ordering) -> $integer {
            let field = self.place(offset, size_of::<$integer>()).as_ptr().cast();
            // SAFETY: the place is mapped for as long as `self` lives, aligned, and inside the area; others access it at any
            // time, which an atomic allows.
            let field = unsafe { <$atomic>::from_ptr(field) };
            <$integer>::from_le(field.load(ordering))
        }

        /// Writes a field.
        #[inline]
        pub fn $store(&self, offset: usize, value: $integer, ordering: Ordering) {
            let field = self.place(offset, size_of::<$integer>()).as_ptr().cast();
            // SAFETY: as for the load.
            let field = unsafe { <$atomic>::from_ptr(field) };
            field.store(value.to_le(), ordering);
        }
    };
}

impl Area {
    /// The `len` bytes from a front-end address in this region, if they are inside. The address of the memory here must be a
    /// multiple of eight for 64-bit fields, and so on; `alignment` says which multiple is demanded.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn new(
        region: &Arc<Region>,
        frontend_address: u64,
        len: usize,
        alignment: usize,
    ) -> Result<Area, Refusal> {
        let (base, left) = region
            .at_frontend(frontend_address)
            .ok_or(Refusal::Outside)?;
        if left < len {
            return Err(Refusal::Outside);
        }
        if base.addr().get() % alignment != 0 {
            return Err(Refusal::Misaligned);
        }
        Ok(Area {
            base,
            len,
            _region: Arc::clone(region),
        })
    }

    /// Two fields of 64 bits, one behind the other: one check, two loads.
    #[inline]
    pub fn load_pair(&self, offset: usize, ordering: Ordering) -> [u64; 2] {
        let first = self.place(offset, 2 * size_of::<u64>()).cast();
        // SAFETY: both places are inside the area, since their span was just found to be.
        let second = unsafe { first.add(1) };
        [first, second].map(|field| {
            // SAFETY: as for any load; the span's alignment is that of both its halves.
            let field = unsafe { AtomicU64::from_ptr(field.as_ptr()) };
            u64::from_le(field.load(ordering))
        })
    }

    /// Asks for the cache line of a field, to be read and then written.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        prefetch::line(self.base.as_ptr().wrapping_add(offset), Use::Write);
    }

    accessors!(load_u16, store_u16, u16, AtomicU16);
    accessors!(load_u32, store_u32, u32, AtomicU32);
    accessors!(load_u64, store_u64, u64, AtomicU64);

    #[inline]
    fn place(&self, offset: usize, field_len: usize) -> NonNull<u8> {
        if offset >= self.len || self.len - offset < field_len {
            outside(offset, self.len);
        }
        // SAFETY: the offset was just found to lie inside the area, which lies inside one mapping.
        let place = unsafe { self.base.add(offset) };
        if place.addr().get() % field_len != 0 {
            misaligned(offset, field_len);
        }
        place
    }
}

// Out of line, so that what they say costs nothing where nothing is wrong.

#[cold]
#[inline(never)]
fn outside(offset: usize, len: usize) -> ! {
    panic!("field at {offset} outside an area of {len}");
}

#[cold]
#[inline(never)]
fn misaligned(offset: usize, field_len: usize) -> ! {
    panic!("field at {offset} is not aligned to its size {field_len}");
}

/// Why a place cannot be an area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It is not in the region.
    Outside,
    /// It is off the alignment that its fields need.
    Misaligned,
}
