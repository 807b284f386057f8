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
    /// The guest is owed an interrupt for what has been published.
    pub(crate) owes_interrupt: bool,
    /// Descriptors of the ring that were given back since the last interrupt.
    pub(crate) given_back: u16,
    pub(crate) counts: RingCounts,
    /// It was kicked since it was last drained.
    pub(crate) is_kicked: bool,
    /// There is a moment by which an interrupt that is owed will be sent.
    pub(crate) has_deadline: bool,
}

/// How often the two sides of a ring notified each other, and how often that was saved. All only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingCounts {
    /// Times that the guest notified us.
    pub kicks: u64,
    /// Times that something of the guest's was found without its having notified us.
    pub kicks_saved: u64,
    /// Times that we interrupted the guest.
    pub interrupts: u64,
    /// Times that something was given back without an interrupt of its own: the guest wanted none, or one is sent for several.
    pub interrupts_saved: u64,
}

impl RingCounts {
    /// Adds another ring's, or the same ring's of another time.
    pub fn add(&mut self, other: RingCounts) {
        self.kicks += other.kicks;
        self.kicks_saved += other.kicks_saved;
        self.interrupts += other.interrupts;
        self.interrupts_saved += other.interrupts_saved;
    }
}

/// What became of an interrupt that could wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lazily {
    /// None is owed, or when it will be sent has been settled before.
    Quiet,
    /// It was sent.
    Interrupted,
    /// It must be sent in a while, and there is no deadline yet for that.
    Owes,
}

impl Ring {
    /// A ring that has just been set up.
    pub(crate) fn new(queue: Queue, kick: File, call: Option<File>, enabled: bool) -> Ring {
        Ring {
            queue,
            kick,
            call,
            enabled,
            held: VecDeque::new(),
            touched: false,
            owes_interrupt: false,
            given_back: 0,
            counts: RingCounts::default(),
            is_kicked: false,
            has_deadline: false,
        }
    }

    /// Gives a chain back to the guest. It sees it at the next [`Ring::publish`].
    pub(crate) fn complete(&mut self, chain: &Chain, written: u32) {
        self.queue.complete(chain.head, written);
        self.touched = true;
        self.given_back = self.given_back.saturating_add(chain.entries);
    }

    /// Makes everything given back visible, and interrupts the guest if it wants to know.
    pub(crate) fn publish(&mut self) {
        self.show();
        self.pay_interrupt();
    }

    /// Makes everything given back visible. Returns whether the guest wants to be interrupted for it, which is then up to the caller.
    pub(crate) fn publish_silently(&mut self) -> bool {
        self.show();
        std::mem::take(&mut self.owes_interrupt)
    }

    /// Makes everything given back visible. The guest is interrupted only once a quarter of the ring is back, or if it is pressing: that packets it
    /// sent have left is news to a guest only when it lacks descriptors for more.
    pub(crate) fn publish_lazily(&mut self, is_pressing: bool) -> Lazily {
        self.show();
        let is_due = is_pressing || self.given_back >= self.queue.size() / 4;
        if is_due && self.pay_interrupt() {
            Lazily::Interrupted
        } else if self.owes_interrupt && !std::mem::replace(&mut self.has_deadline, true) {
            Lazily::Owes
        } else {
            Lazily::Quiet
        }
    }

    /// Sends the interrupt that is owed, if one is. Returns whether one was.
    pub(crate) fn pay_interrupt(&mut self) -> bool {
        let owed = std::mem::take(&mut self.owes_interrupt);
        if owed {
            self.given_back = 0;
            self.interrupt();
        }
        owed
    }

    fn show(&mut self) {
        if std::mem::take(&mut self.touched) {
            let is_wanted = self.queue.publish();
            self.counts.interrupts_saved += u64::from(!is_wanted || self.owes_interrupt);
            self.owes_interrupt |= is_wanted;
        }
    }

    /// The guest has notified us.
    pub(crate) fn kicked(&mut self) {
        self.counts.kicks += 1;
        self.is_kicked = true;
    }

    /// Something of the guest's was found.
    pub(crate) fn found(&mut self) {
        let was_kicked = std::mem::take(&mut self.is_kicked);
        self.counts.kicks_saved += u64::from(!was_kicked);
    }

    pub(crate) fn interrupt(&mut self) {
        self.counts.interrupts += 1;
        if let Some(call) = &self.call {
            // A full counter means that an interrupt is pending.
            let _ = rustix::io::write(call, &1u64.to_ne_bytes());
        }
    }
}
