//! What stands for an area where `loom` enumerates interleavings: every field is one of its atomics.
//!
//! Driver and device map the same file at different addresses. Their areas share fields by the place in the page: a model
//! has one arena, of one page at most. A field is made by its first access, which must come before the threads do
//! (loom's atomics are born in one thread, as memory is not), and has one width ever after.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::region::Region;

/// Size of the one page, in bytes.
const PAGE_LEN: u64 = 4096;

loom::lazy_static! {
    /// The fields of this execution, by their place in the page. The lock is never held where loom can switch threads.
    static ref FIELDS: Mutex<BTreeMap<usize, Field>> = Mutex::new(BTreeMap::new());
}

#[derive(Debug, Clone)]
enum Field {
    U16(Arc<AtomicU16>),
    U32(Arc<AtomicU32>),
    U64(Arc<AtomicU64>),
}

/// A part of one region.
#[derive(Debug)]
pub struct Area {
    /// In the page, in bytes.
    place: usize,
    /// In bytes.
    len: usize,
    _region: Arc<Region>,
}

macro_rules! accessors {
    ($load:ident, $store:ident, $integer:ty, $atomic:ty, $field:ident) => {
        pub fn $load(&self, offset: usize, ordering: Ordering) -> $integer {
            match self.field(offset, size_of::<$integer>(), || {
                Field::$field(Arc::new(<$atomic>::new(0)))
            }) {
                Field::$field(field) => field.load(ordering),
                other => panic!("{other:?} at {offset} is read in another width"),
            }
        }

        pub fn $store(&self, offset: usize, value: $integer, ordering: Ordering) {
            match self.field(offset, size_of::<$integer>(), || {
                Field::$field(Arc::new(<$atomic>::new(0)))
            }) {
                Field::$field(field) => field.store(value, ordering),
                other => panic!("{other:?} at {offset} is written in another width"),
            }
        }
    };
}

impl Area {
    pub fn new(
        region: &Arc<Region>,
        frontend_address: u64,
        len: usize,
        alignment: usize,
    ) -> Result<Area, Refusal> {
        let (_, left) = region
            .at_frontend(frontend_address)
            .ok_or(Refusal::Outside)?;
        if left < len {
            return Err(Refusal::Outside);
        }
        if frontend_address % alignment as u64 != 0 {
            return Err(Refusal::Misaligned);
        }
        Ok(Area {
            place: (frontend_address % PAGE_LEN) as usize,
            len,
            _region: Arc::clone(region),
        })
    }

    pub fn load_pair(&self, offset: usize, ordering: Ordering) -> [u64; 2] {
        [offset, offset + 8].map(|offset| self.load_u64(offset, ordering))
    }

    /// Has no visible effect.
    pub fn prefetch(&self, _offset: usize) {}

    accessors!(load_u16, store_u16, u16, AtomicU16, U16);
    accessors!(load_u32, store_u32, u32, AtomicU32, U32);
    accessors!(load_u64, store_u64, u64, AtomicU64, U64);

    fn field(&self, offset: usize, field_len: usize, make: impl FnOnce() -> Field) -> Field {
        assert!(
            offset < self.len && self.len - offset >= field_len,
            "field at {offset} outside an area of {}",
            self.len
        );
        let mut fields = FIELDS.lock().unwrap_or_else(PoisonError::into_inner);
        let place = self.place + offset;
        fields.entry(place).or_insert_with(make).clone()
    }
}

/// Why a place cannot be an area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It is not in the region.
    Outside,
    /// It is off the alignment that its fields need.
    Misaligned,
}
