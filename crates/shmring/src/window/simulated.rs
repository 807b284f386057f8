//! What stands for a mapping under Miri, which knows no files that are mapped: ordinary memory of the process, that two windows share.

use std::alloc::{self, Layout as Allocation};
use std::fs::File;
use std::ptr::NonNull;
use std::sync::Arc;

use guestmem::guest::MemoryError;

use crate::error::WindowError;
use crate::layout::{HEADER_LEN, Layout};
use crate::spec::WindowSpec;

pub(super) fn create(_spec: &WindowSpec) -> Result<File, WindowError> {
    Err(MemoryError::NotARegularFile.into())
}

pub(super) fn pair(spec: &WindowSpec) -> (Mapping, Mapping) {
    let layout = Layout::new(spec).unwrap();
    let allocation = Allocation::from_size_align(layout.window_len(), HEADER_LEN).unwrap();
    // SAFETY: the length is not zero.
    let base = NonNull::new(unsafe { alloc::alloc_zeroed(allocation) }).unwrap();
    let memory = Arc::new(Memory { base, allocation });
    let map = || Mapping {
        memory: Arc::clone(&memory),
        layout,
    };
    (map(), map())
}

#[derive(Debug)]
struct Memory {
    base: NonNull<u8>,
    allocation: Allocation,
}

// SAFETY: the memory belongs to no thread; it is accessed only through raw pointers.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated so, and this is the last reference.
        unsafe { alloc::dealloc(self.base.as_ptr(), self.allocation) };
    }
}

#[derive(Debug)]
pub(super) struct Mapping {
    memory: Arc<Memory>,
    layout: Layout,
}

impl Mapping {
    pub(super) fn new(
        _file: &File,
        _offset: u64,
        _spec: &WindowSpec,
    ) -> Result<Mapping, WindowError> {
        Err(MemoryError::NotARegularFile.into())
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    pub(super) fn header(&self) -> NonNull<u8> {
        self.memory.base
    }

    pub(super) fn ring(&self, index: usize) -> NonNull<u8> {
        let offset = self.layout.data_offset + index * self.layout.ring_len;
        // SAFETY: both rings lie inside the memory.
        unsafe { self.memory.base.add(offset) }
    }

    pub(super) fn is_mirrored(&self) -> bool {
        false
    }

    pub(super) fn is_poisoned(&self) -> bool {
        false
    }
}
