//! What has happened on a channel, written by its task and read by queries.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts of one channel. They only grow.
#[derive(Debug, Default)]
pub(super) struct Counts {
    attached: AtomicBool,
    taken: AtomicBool,
    /// How often a VMM was met.
    pub(super) connections: Count,
    /// How often there was something at the other end: programs, or times that the file was opened.
    pub(super) takers: Count,
    /// Bytes that the guest has written and that were given to the other end.
    pub(super) bytes_from_guest: Count,
    /// Bytes that were given to the VMM for the guest.
    pub(super) bytes_to_guest: Count,
    /// Bytes that the guest has written and that are lost.
    pub(super) lost_from_guest: Count,
    /// Bytes for the guest that it will not get.
    pub(super) lost_to_guest: Count,
}

/// One count.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn add(&self, number: usize) {
        self.0.fetch_add(number as u64, Ordering::Relaxed);
    }

    fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counts {
    /// A VMM is connected, or is not.
    pub(super) fn set_attached(&self, attached: bool) {
        self.attached.store(attached, Ordering::Relaxed);
    }

    pub(super) fn is_attached(&self) -> bool {
        self.attached.load(Ordering::Relaxed)
    }

    /// Something is at the other end, or is not.
    pub(super) fn set_taken(&self, taken: bool) {
        self.taken.store(taken, Ordering::Relaxed);
    }

    pub(super) fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed)
    }

    /// The counts by name.
    pub(super) fn read(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::from([
            ("connections", self.connections.read()),
            ("takers", self.takers.read()),
            ("bytes_from_guest", self.bytes_from_guest.read()),
            ("bytes_to_guest", self.bytes_to_guest.read()),
            ("lost_bytes_from_guest", self.lost_from_guest.read()),
            ("lost_bytes_to_guest", self.lost_to_guest.read()),
        ])
    }
}
