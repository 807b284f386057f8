//! How much of the process's address space regions have.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::region::MAX_MAPPED_BYTES;

static TAKEN: AtomicU64 = AtomicU64::new(0);

/// So many bytes of [`MAX_MAPPED_BYTES`], given back when this is dropped.
#[derive(Debug)]
pub(super) struct Room(u64);

impl Room {
    /// `None` when there are not as many left.
    pub(super) fn take(len: usize) -> Option<Room> {
        let len = len as u64;
        let add = |taken: u64| {
            let sum = taken.checked_add(len)?;
            (sum <= MAX_MAPPED_BYTES).then_some(sum)
        };
        let taken = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        taken.ok().map(|_| Room(len))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        TAKEN.fetch_sub(self.0, Ordering::Relaxed);
    }
}
