//! A virtqueue with the descriptors through which its two sides notify each other.

use std::collections::VecDeque;
use std::fs::File;

use memory::queue::{Chain, Queue};

/// A running ring of a guest.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) queue: Queue,
    /// The guest notifies us here.
    pub(crate) kick: File,
    /// We interrupt the guest here; without it, it polls.
    pub(crate) call: Option<File>,
    /// Whether the VMM lets it run.
    pub(crate) enabled: bool,
    /// Buffers taken and not used yet. They count as not taken when the ring is stopped.
    pub(crate) held: VecDeque<Chain>,
    /// There is something to publish.
    pub(crate) touched: bool,
}

impl Ring {
    /// Gives a chain back to the guest. It sees it at the next [`Ring::publish`].
    pub(crate) fn complete(&mut self, head: u16, written: u32) {
        self.queue.complete(head, written);
        self.touched = true;
    }

    /// Makes everything given back visible, and interrupts the guest if it wants to know.
    pub(crate) fn publish(&mut self) {
        if std::mem::take(&mut self.touched) && self.queue.publish() {
            self.interrupt();
        }
    }

    pub(crate) fn interrupt(&self) {
        if let Some(call) = &self.call {
            // A full counter means that an interrupt is pending.
            let _ = rustix::io::write(call, &1u64.to_ne_bytes());
        }
    }
}
