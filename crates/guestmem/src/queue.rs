//! The device side of a virtqueue, split or packed (virtio 1.2, sections 2.7 and 2.8).
//!
//! # Two formats, one face
//!
//! A driver gives a queue memory in which it describes its *chains*, each of one or more stretches of guest memory, and in which
//! the device says what it is done with. In the *split* format these are three areas: a table of descriptors, a ring of chains that
//! are available, a ring of chains that are used. In the *packed* format there is one ring of descriptors, which driver and device
//! overwrite in turn, and one small structure for each side's wish to be notified. A [`Queue`] is of either format; what follows is true of
//! both, and the modules `split` and `packed` say what is particular to each.
//!
//! # One breath
//!
//! [`Queue::pop`] takes a chain; its memory is copied from or to, now or later; [`Queue::complete`] gives the chain back, in any
//! order; [`Queue::publish`] makes all that was given back visible at once and says whether the driver wants an
//! interrupt. When there is nothing to pop, [`Queue::enable_notifications`] asks for a notification, and answers
//! whether something came in the meantime, so that no wake-up is lost: the driver publishes first and looks for our wish
//! second, we state our wish first and look for its publication second, each with a full fence in between.
//!
//! # Trust
//!
//! Nothing in the areas is trusted, and every field is read once per use. Our own positions, and which chains are out, are kept
//! in private memory and never read back. A driver that breaks the rules gets an error with the numbers in it,
//! and the error is fatal for the line: the state of such a ring means nothing.
//!
//! # Limits
//!
//! - A queue has at most [`MAX_QUEUE_SIZE`] entries, as the specification says.
//! - A chain has at most as many descriptors as the queue, an indirect table at most [`MAX_CHAIN_LEN`] entries, and a chain with
//!   its table at most [`MAX_CHAIN_LEN`] altogether, as in QEMU.
//! - At most as many chains are out at a time as the queue has entries, each name once; in a packed ring, at most as many descriptors.
//!   This bounds what a device may have to remember about parked chains.

use std::sync::Arc;

use self::packed::Packed;
use self::split::Split;
use crate::area::{Area, Refusal};
use crate::guest::{GuestMemory, MAX_REGIONS, Range};

mod chain;

mod error;
mod in_flight;
mod ledger;
mod packed;
mod split;

#[cfg(test)]
#[cfg(loom)]
#[path = "queue/tests/interleavings.rs"]
mod interleavings;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use chain::{DESCRIPTOR_LEN, INDIRECT, NEXT, WRITE};
pub use error::QueueError;
pub use ledger::{Found, Ledger, Ledgers, Positions};
pub use {packed::fields as packed_fields, split::fields as split_fields};

/// The most entries that a queue may have (virtio 1.2, section 2.7).
pub const MAX_QUEUE_SIZE: u16 = 32768;

/// The most descriptors that one chain may have, those in an indirect table included.
pub const MAX_CHAIN_LEN: usize = 1024;

/// The most ranges that one chain can turn into: a descriptor that lies across two regions becomes two.
pub const MAX_CHAIN_RANGES: usize = MAX_CHAIN_LEN + MAX_REGIONS;

/// Where a queue is and how its driver uses it: what vhost-user's vring messages and the negotiated features say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSetup {
    /// Number of entries: a power of two, unless the queue is packed.
    pub size: u16,
    /// Address in the front end's address space of the descriptor table; of the descriptor ring, if packed.
    pub descriptors: u64,
    /// Address in the front end's address space of the available ring; of the driver's event suppression structure, if packed.
    pub available: u64,
    /// Address in the front end's address space of the used ring; of the device's event suppression structure, if packed.
    pub used: u64,
    /// Where to go on, as vhost-user's SET_VRING_BASE says it.
    ///
    /// Split: how many chains were taken so far, modulo 65536. Packed: where the next available descriptor is in bits 0 to 14, the wrap
    /// counter there in bit 15, where the next used descriptor goes in bits 16 to 30, the wrap counter there in bit 31. A new queue begins at
    /// [`FIRST_SPLIT_BASE`] or [`FIRST_PACKED_BASE`].
    pub ring_base: u32,
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub event_index: bool,
    /// VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// VIRTIO_F_RING_PACKED was negotiated.
    pub packed: bool,
}

/// [`QueueSetup::ring_base`] of a split queue that is new.
pub const FIRST_SPLIT_BASE: u32 = 0;

/// [`QueueSetup::ring_base`] of a packed queue that is new: both positions at the beginning, both wrap counters one.
pub const FIRST_PACKED_BASE: u32 = 0x8000_8000;

/// A chain of descriptors, taken out of the guest's memory and checked.
///
/// Made to be used again: [`Queue::pop`] clears and refills it, and allocates only until it has seen the longest chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    /// The name of the chain, by which it is given back: in a split queue the index of its first descriptor, in a packed one the
    /// identifier that the driver gave it.
    pub head: u16,
    /// How many descriptors of the queue itself it takes up: with an indirect table, one for all of that. While the
    /// chain is out, the driver lacks as many.
    pub entries: u16,
    /// How many descriptors were read for it, those of an indirect table included: what it has cost to take.
    pub descriptors: u16,
    /// What the device may read. Mapped when it was popped, never empty ranges.
    pub readable: Vec<Range>,
    /// What the device may write, likewise.
    pub writable: Vec<Range>,
}

/// The device side of one virtqueue.
#[derive(Debug)]
pub struct Queue {
    memory: Arc<GuestMemory>,
    format: Format,
    size: u16,
}

#[derive(Debug)]
enum Format {
    Split(Split),
    Packed(Packed),
}

/// The same call on whichever format the queue has: one branch, which never changes in a queue's life.
macro_rules! either {
    ($queue:expr, $ring:ident => $call:expr) => {
        match &$queue.format {
            Format::Split($ring) => $call,
            Format::Packed($ring) => $call,
        }
    };
    (mut $queue:expr, $ring:ident => $call:expr) => {
        match &mut $queue.format {
            Format::Split($ring) => $call,
            Format::Packed($ring) => $call,
        }
    };
}

impl Queue {
    /// A queue as the driver set it up. Writes nothing: whether the driver notifies is as it was left, so call
    /// [`enable_notifications`](Self::enable_notifications) before waiting for the first notification.
    ///
    /// # Errors
    /// A size that is zero or over [`MAX_QUEUE_SIZE`] or, unless packed, no power of two; a base that such a queue cannot have; an area that
    /// is misaligned or not inside one region.
    pub fn new(setup: QueueSetup, memory: Arc<GuestMemory>) -> Result<Queue, QueueError> {
        Queue::with_ledger(setup, memory, None)
    }

    /// A queue of which a successor of this process can know where it goes on. If the ledger is a predecessor's, the queue goes on where that one left it,
    /// whatever its setup says, and the chains that were out are given back without a byte in them, or with [`Found::Since`] stay [`out`](Self::out): call
    /// [`publish`](Self::publish).
    ///
    /// # Errors
    /// As [`new`](Self::new); a ledger that does not fit the queue, or [`Found::Since`] for a packed queue, which has no positions to go back to.
    pub fn with_ledger(
        setup: QueueSetup,
        memory: Arc<GuestMemory>,
        ledger: Option<Ledger>,
    ) -> Result<Queue, QueueError> {
        let format = if setup.packed {
            Format::Packed(Packed::new(setup, &memory, ledger)?)
        } else {
            Format::Split(Split::new(setup, &memory, ledger)?)
        };
        Ok(Queue {
            memory,
            format,
            size: setup.size,
        })
    }

    /// The memory that the queue lies in and its chains refer to.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Goes on in another snapshot of the memory. The queue's state stays; chains that are out are looked up in the new
    /// memory from now on.
    ///
    /// # Errors
    /// As [`new`](Self::new), if an area is not there any more; the queue is unchanged then.
    pub fn replace_memory(&mut self, memory: Arc<GuestMemory>) -> Result<(), QueueError> {
        either!(mut self, ring => ring.replace_memory(&memory))?;
        self.memory = memory;
        Ok(())
    }

    /// Takes the next available chain into `chain`. `false` when there is none; `chain` is then as it was.
    ///
    /// # Errors
    /// The driver broke the rules, and the line is lost. Nothing was taken.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, QueueError> {
        either!(mut self, ring => ring.pop(&self.memory, chain))
    }

    /// Asks the processor for the beginnings of chains that are not taken yet: of `chains` of them, of which the first is the one behind the next
    /// `ahead`. It has no other effect, and fails at nothing.
    ///
    /// [`pop`](Self::pop) prefetches the beginning of what it takes, which is in time for a caller that takes many chains and then reads them. This
    /// is for a caller that uses each chain at once: call it for eight chains ahead, now and then.
    #[inline]
    pub fn prefetch(&self, ahead: u16, chains: u16) {
        either!(self, ring => ring.prefetch(&self.memory, ahead, chains));
    }

    /// Whether a chain is available right now.
    pub fn pending(&self) -> Result<bool, QueueError> {
        either!(self, ring => ring.pending())
    }

    /// Gives a chain back, with `written` bytes in it. The driver sees that after [`publish`](Self::publish).
    ///
    /// A head that is not out has no effect: giving one back twice is a mistake of the caller's, which a build with debug
    /// assertions reports by a panic.
    #[inline]
    pub fn complete(&mut self, head: u16, written: u32) {
        either!(mut self, ring => ring.complete(head, written));
    }

    /// Makes all chains that were given back visible to the driver. `true` when it wants an interrupt for them.
    pub fn publish(&mut self) -> bool {
        either!(mut self, ring => ring.publish())
    }

    /// Whether the driver would want an interrupt if one chain more were given back and published now: it sleeps, or is about to. Never of a packed queue.
    pub fn awaits_interrupt(&self) -> bool {
        match &self.format {
            Format::Split(ring) => ring.awaits_interrupt(),
            Format::Packed(_) => false,
        }
    }

    /// Notification suppression: the driver need not notify. It may do so anyway.
    pub fn disable_notifications(&mut self) {
        either!(mut self, ring => ring.disable_notifications());
    }

    /// Asks the driver to notify when it makes the next chain available. `true`: something is available already, or the driver broke a rule, which
    /// [`pop`](Self::pop) will report; call it, there may be no notification.
    pub fn enable_notifications(&mut self) -> bool {
        either!(mut self, ring => ring.enable_notifications())
    }

    /// Where the queue would go on: what vhost-user's GET_VRING_BASE answers when no chain is out, as [`QueueSetup::ring_base`] has it.
    pub fn ring_base(&self) -> u32 {
        either!(self, ring => ring.ring_base())
    }

    /// How many chains are out: popped, and neither given back nor forgotten.
    pub fn in_flight(&self) -> u16 {
        either!(self, ring => ring.in_flight())
    }

    /// Forgets the last `chains` that were popped: they will be popped again. None of them may have been given back.
    ///
    /// # Panics
    /// With debug assertions, if one of them is not out. Without, it stops there.
    pub fn rewind(&mut self, chains: u16) {
        either!(mut self, ring => ring.rewind(chains));
    }

    /// How far the queue has come, as if the last `untaken` chains had not been popped; none of them may have been given back. None of a packed queue.
    pub fn positions(&self, untaken: u16) -> Option<Positions> {
        match &self.format {
            Format::Split(ring) => Some(ring.positions(untaken)),
            Format::Packed(_) => None,
        }
    }

    /// From now on the ledger has a mark for a chain when [`mark_out`](Self::mark_out) was called, and not when it was popped: for a caller that writes
    /// [`positions`](Self::positions) down before it publishes, so that what it popped since counts as not popped.
    pub fn defer_marks(&mut self) {
        if let Format::Split(ring) = &mut self.format {
            ring.defer_marks();
        }
    }

    /// Marks the chains that are out, but for the last `untaken` that were popped. To be called before the [`positions`](Self::positions) are written down.
    pub fn mark_out(&mut self, untaken: u16) {
        if let Format::Split(ring) = &mut self.format {
            ring.mark_out(untaken);
        }
    }

    /// After a set-up with [`Found::Since`], before anything is popped: the chains that stay out, in the order in which they were popped.
    pub fn out(&self) -> Vec<u16> {
        match &self.format {
            Format::Split(ring) => ring.out(),
            Format::Packed(_) => Vec::new(),
        }
    }

    /// Reads a chain that is [`out`](Self::out) into `chain`, as [`pop`](Self::pop) did in another process. `false` if it is not out.
    ///
    /// # Errors
    /// As [`pop`](Self::pop).
    pub fn read_again(&self, head: u16, chain: &mut Chain) -> Result<bool, QueueError> {
        match &self.format {
            Format::Split(ring) => ring.read_again(&self.memory, head, chain),
            Format::Packed(_) => Ok(false),
        }
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Whether the driver has just initialised the queue: when it was set up here nothing had ever been taken from it or given back,
    /// and nothing was taken since. A queue that a VM's pause has stopped goes on elsewhere, except after an exact
    /// multiple of 65536 chains (packed: when it has just gone round the ring twice); so ask all queues of a device before concluding that
    /// it was reset.
    pub fn is_fresh(&self) -> bool {
        either!(self, ring => ring.is_fresh())
    }

    /// Whether there are only zeros where the driver writes: the first descriptors and, if split, the beginning of the available ring. A driver that
    /// makes something available changes that, for as long as the queue is [fresh](Self::is_fresh).
    pub fn is_blank(&self) -> bool {
        either!(self, ring => ring.is_blank())
    }

    /// Has a successor of this process know that nothing is seen of what the device's driver writes, or that it is; see [`Ledgers::is_unseen`].
    pub fn note_unseen(&self, is_unseen: bool) {
        either!(self, ring => ring.note_unseen(is_unseen));
    }

    /// A digest of what only the driver writes while this queue is not used: the descriptors and, if split, the available ring, of a large queue at
    /// places all over it. It stays the same while a VM is paused. A guest that runs on without this queue, because its driver has let go of it,
    /// sooner or later uses the memory for something else.
    pub fn driver_digest(&self) -> u64 {
        either!(self, ring => ring.driver_digest())
    }
}

/// Entries of a queue that are read without being taken, at most: a VMM can have that done as often as it likes.
const MAX_SAMPLES: usize = 256;

/// Entries from all over a queue of this size.
fn samples(size: u16) -> impl Iterator<Item = usize> {
    let size = usize::from(size);
    (0..size).step_by(size.div_ceil(MAX_SAMPLES))
}

/// A part of a queue that the driver has placed, mapped and checked. `name` is for people.
fn area(
    memory: &GuestMemory,
    name: &'static str,
    address: u64,
    len: usize,
    alignment: usize,
) -> Result<Area, QueueError> {
    let outside = QueueError::AreaOutside {
        area: name,
        address,
        len,
    };
    let region = memory.region_at_frontend(address).ok_or(outside)?;
    Area::new(region, address, len, alignment).map_err(|refusal| match refusal {
        Refusal::Outside => outside,
        Refusal::Misaligned => QueueError::AreaMisaligned {
            area: name,
            address,
            alignment,
        },
    })
}

/// An index that runs modulo 65536, in a word of its own. (Narrow fields that stand side by side may be loaded as one, and such a load waits
/// for the store of one of them to reach the cache.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Running(u32);

impl Running {
    fn new(index: u16) -> Running {
        Running(u32::from(index))
    }

    #[inline]
    fn get(self) -> u16 {
        self.0 as u16
    }

    #[inline]
    fn next(self) -> Running {
        Running((self.0 + 1) & 0xffff)
    }

    fn previous(self) -> Running {
        Running::new(self.get().wrapping_sub(1))
    }
}

/// Whether an index that moved from `old` to `new` has passed the one after which an event is `wanted` (virtio 1.2, section
/// 2.7.10; `vring_need_event` there). All three run modulo 65536.
pub fn needs_event(wanted: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(wanted).wrapping_sub(1) < new.wrapping_sub(old)
}
