//! What stands for a mapping under Miri, which knows no files that are mapped: there the driver's memory is ordinary memory
//! of the same process, and the "front end's address" is where it is.

use std::fs::File;
use std::ptr::{self, NonNull};

use crate::error::MemoryError;

#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
}

// SAFETY: the memory belongs to no thread; it is accessed only through raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(
        _file: &File,
        _offset: u64,
        _size: u64,
        frontend_address: u64,
    ) -> Result<Mapping, MemoryError> {
        let base = ptr::with_exposed_provenance_mut(frontend_address as usize);
        Ok(Mapping {
            base: NonNull::new(base).ok_or(MemoryError::NotARegularFile)?,
        })
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn is_poisoned(&self) -> bool {
        false
    }
}
