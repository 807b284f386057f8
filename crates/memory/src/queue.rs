//! The device side of a split virtqueue (virtio 1.2, section 2.7).
//!
//! # The three areas
//!
//! A driver gives a queue three areas of its memory:
//!
//! - the *descriptor table*: `size` descriptors of 16 bytes, each a stretch of guest memory and, if it has one, the index of
//!   the next descriptor of its chain. A chain may end in one *indirect* descriptor, whose stretch holds a table of more
//!   descriptors.
//! - the *available ring*, which only the driver writes: heads of chains that the device may use now, and an index that
//!   counts them all, modulo 65536.
//! - the *used ring*, which only the device writes: heads of chains that the device is done with, how many bytes it wrote
//!   into each, and an index that counts them.
//!
//! # One breath
//!
//! [`Queue::pop`] takes a chain; its memory is copied from or to, now or later; [`Queue::complete`] gives the chain back, in any
//! order; [`Queue::publish`] makes all that was given back visible at once and says whether the driver wants an
//! interrupt. When there is nothing to pop, [`Queue::enable_notifications`] asks for a notification, and answers
//! whether something came in the meantime, so that no wake-up is lost: the driver publishes first and looks for our wish
//! second, we state our wish first and look for its publication second, each with a full fence in between.
//!
//! # Who trusts what
//!
//! Nothing in the areas is trusted, and every field is read once per use. Our own two indices, and which chains are out, are kept
//! in private memory and never read back. (The used index is read once when a queue is set up: vhost-user says where the
//! available ring was left and not where the used ring was.) A driver that breaks the rules gets an error with the numbers in it,
//! and the error is fatal for the line: the state of such a ring means nothing.
//!
//! # Limits
//!
//! - A queue has at most [`MAX_QUEUE_SIZE`] entries, as the specification says.
//! - A chain has at most as many descriptors as the queue, an indirect table at most [`MAX_CHAIN_LEN`] entries, and a chain with
//!   its table at most [`MAX_CHAIN_LEN`] altogether, as in QEMU.
//! - At most as many chains are out at a time as the queue has entries, each head once. This bounds what a device may
//!   have to remember about parked chains.

use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use crate::area::{Area, Refusal};
use crate::guest::{GuestMemory, MAX_REGIONS, Range};
use crate::sync::{Ordering, fence};

mod chain;
mod error;

#[cfg(test)]
#[cfg(loom)]
mod interleavings;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(feature = "driver")]
pub(crate) use chain::{DESCRIPTOR_LEN, INDIRECT, NEXT, WRITE};
pub use error::QueueError;

/// The most entries that a queue may have (virtio 1.2, section 2.7).
pub const MAX_QUEUE_SIZE: u16 = 32768;

/// The most descriptors that one chain may have, those in an indirect table included.
pub const MAX_CHAIN_LEN: usize = 1024;

/// The most ranges that one chain can turn into: a descriptor that lies across two regions becomes two.
pub const MAX_CHAIN_RANGES: usize = MAX_CHAIN_LEN + MAX_REGIONS;

/// Where a queue is and how its driver uses it: what vhost-user's vring messages and the negotiated features say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSetup {
    /// Number of entries, a power of two.
    pub size: u16,
    /// The descriptor table's address in the front end's address space.
    pub descriptors: u64,
    /// The available ring's address in the front end's address space.
    pub available: u64,
    /// The used ring's address in the front end's address space.
    pub used: u64,
    /// How many chains were taken so far, modulo 65536: where to go on in the available ring.
    pub next_available: u16,
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub event_index: bool,
    /// VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
}

/// A chain of descriptors, taken out of the guest's memory and checked.
///
/// Made to be used again: [`Queue::pop`] clears and refills it, and allocates only until it has seen the longest chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    /// The name of the chain, by which it is given back.
    pub head: u16,
    /// How many descriptors of the queue's own table it takes up: with an indirect table, one for all of that. While the
    /// chain is out, the driver lacks as many.
    pub entries: u16,
    /// What the device may read. Mapped when it was popped, never empty ranges.
    pub readable: Vec<Range>,
    /// What the device may write, likewise.
    pub writable: Vec<Range>,
}

/// The device side of one split virtqueue.
#[derive(Debug)]
pub struct Queue {
    setup: QueueSetup,
    memory: Arc<GuestMemory>,
    areas: Areas,
    /// The entry of the available ring to take next; counts chains modulo 65536.
    next_available: u16,
    /// The available index as it was read last: up to here entries may be taken without looking again.
    seen_available: u16,
    /// The entry of the used ring to fill next; counts chains modulo 65536.
    next_used: u16,
    /// The used index as the driver can see it.
    published_used: u16,
    /// Whether anything was published: before, the driver's wish for an interrupt has no span to be measured against.
    has_published: bool,
    /// What is in the used ring's flags.
    used_flags: u16,
    fresh: bool,
    in_flight: InFlight,
}

impl Queue {
    /// A queue as the driver set it up. Writes nothing: whether the driver notifies is as it was left, so call
    /// [`enable_notifications`](Self::enable_notifications) before waiting for the first notification.
    ///
    /// # Errors
    /// A size that is zero, no power of two, or over [`MAX_QUEUE_SIZE`]; an area that is misaligned or not inside one region.
    pub fn new(setup: QueueSetup, memory: Arc<GuestMemory>) -> Result<Queue, QueueError> {
        if !setup.size.is_power_of_two() || setup.size > MAX_QUEUE_SIZE {
            return Err(QueueError::Size { size: setup.size });
        }
        let areas = Areas::new(&setup, &memory)?;
        let used = areas.used.load_u16(USED_INDEX, Ordering::Acquire);
        Ok(Queue {
            setup,
            memory,
            next_available: setup.next_available,
            seen_available: setup.next_available,
            next_used: used,
            published_used: used,
            has_published: false,
            used_flags: areas.used.load_u16(USED_FLAGS, Ordering::Relaxed) & NO_NOTIFY,
            fresh: setup.next_available == 0 && used == 0,
            in_flight: InFlight::new(setup.size),
            areas,
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
        self.areas = Areas::new(&self.setup, &memory)?;
        self.memory = memory;
        Ok(())
    }

    /// Takes the next available chain into `chain`. `false` when there is none; `chain` is then as it was.
    ///
    /// # Errors
    /// The driver broke the rules, and the line is lost. Nothing was taken.
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, QueueError> {
        if self.next_available == self.seen_available {
            self.seen_available = self.load_available_index()?;
            if self.next_available == self.seen_available {
                return Ok(false);
            }
        }
        let slot = self.slot(self.next_available);
        let head = self
            .areas
            .available
            .load_u16(AVAILABLE_RING + 2 * slot, Ordering::Relaxed);
        if head >= self.setup.size {
            return Err(QueueError::HeadOutOfRange {
                head,
                size: self.setup.size,
            });
        }
        if self.in_flight.contains(head) {
            return Err(QueueError::HeadInFlight { head });
        }
        chain.head = head;
        chain::read(&self.areas.descriptors, &self.setup, &self.memory, chain)?;
        self.in_flight.insert(head, slot);
        self.next_available = self.next_available.wrapping_add(1);
        self.fresh = false;
        Ok(true)
    }

    /// Whether a chain is available right now.
    ///
    /// # Errors
    /// [`QueueError::AvailableIndexJump`].
    pub fn pending(&self) -> Result<bool, QueueError> {
        Ok(self.next_available != self.seen_available
            || self.load_available_index()? != self.next_available)
    }

    /// Gives a chain back, with `written` bytes in it. The driver sees that after [`publish`](Self::publish).
    ///
    /// A head that is not out has no effect: giving one back twice is a mistake of the caller's, which a build with debug
    /// assertions reports by a panic.
    pub fn complete(&mut self, head: u16, written: u32) {
        if !self.in_flight.remove(head) {
            debug_assert!(false, "chain {head} is given back and is not out");
            return;
        }
        let element = USED_RING + 8 * self.slot(self.next_used);
        self.areas
            .used
            .store_u32(element, u32::from(head), Ordering::Relaxed);
        self.areas
            .used
            .store_u32(element + 4, written, Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Makes all chains that were given back visible to the driver. `true` when it wants an interrupt for them.
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published_used, self.next_used);
        if old == new {
            return false;
        }
        // Everything written before, the chains' bytes too, is visible to whoever sees the new index.
        self.areas
            .used
            .store_u16(USED_INDEX, new, Ordering::Release);
        self.published_used = new;
        let first = !self.has_published;
        self.has_published = true;
        // Publish first, look for the driver's wish second: the driver does it the other way round.
        fence(Ordering::SeqCst);
        if self.setup.event_index {
            let wanted = self
                .areas
                .available
                .load_u16(self.used_event_offset(), Ordering::Relaxed);
            first || needs_event(wanted, old, new)
        } else {
            self.areas
                .available
                .load_u16(AVAILABLE_FLAGS, Ordering::Relaxed)
                & NO_INTERRUPT
                == 0
        }
    }

    /// Tells the driver that it need not notify. It may do so anyway.
    pub fn disable_notifications(&mut self) {
        // With event indices there is nothing to do: having passed the index that was asked for, the driver stays silent.
        if !self.setup.event_index {
            self.set_used_flags(NO_NOTIFY);
        }
    }

    /// Asks the driver to notify when it makes the next chain available. `true`: something is available already, or the
    /// driver broke a rule, which [`pop`](Self::pop) will report; look again, there may be no notification for it.
    pub fn enable_notifications(&mut self) -> bool {
        if self.setup.event_index {
            self.areas.used.store_u16(
                self.available_event_offset(),
                self.next_available,
                Ordering::Relaxed,
            );
        } else {
            self.set_used_flags(0);
        }
        fence(Ordering::SeqCst);
        self.pending().unwrap_or(true)
    }

    /// How many chains were taken so far, modulo 65536: what vhost-user's GET_VRING_BASE answers when no chain is out.
    pub fn next_available(&self) -> u16 {
        self.next_available
    }

    /// How many chains are out: popped, and neither given back nor forgotten.
    pub fn in_flight(&self) -> u16 {
        self.in_flight.count
    }

    /// Forgets the last `chains` that were popped: they will be popped again. None of them may have been given back.
    ///
    /// # Panics
    /// With debug assertions, if one of them is not out. Without, it stops there.
    pub fn rewind(&mut self, chains: u16) {
        for _ in 0..chains {
            let last = self.next_available.wrapping_sub(1);
            if !self.in_flight.remove_at(self.slot(last)) {
                debug_assert!(false, "entry {last} is rewound and its chain is not out");
                return;
            }
            self.next_available = last;
        }
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.setup.size
    }

    /// Whether the driver has just initialised the queue: when it was set up here nothing had ever been taken from it or given back,
    /// and nothing was taken since. A queue that a VM's pause has stopped goes on elsewhere, except after an exact
    /// multiple of 65536 chains; so ask all queues of a device before concluding that it was reset.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// A digest of what only the driver writes: the descriptor table and the available ring. It stays the same while a
    /// VM is paused. A guest that runs on without this queue, because its driver has let go of it, sooner or later uses the
    /// memory for something else.
    pub fn driver_digest(&self) -> u64 {
        let size = usize::from(self.setup.size);
        let mut digest = DefaultHasher::new();
        for word in 0..2 * size {
            digest.write_u64(self.areas.descriptors.load_u64(8 * word, Ordering::Relaxed));
        }
        for word in 0..2 + size {
            digest.write_u16(self.areas.available.load_u16(2 * word, Ordering::Relaxed));
        }
        digest.finish()
    }

    fn load_available_index(&self) -> Result<u16, QueueError> {
        // Acquire: what the driver wrote before it published this index is visible after.
        let index = self
            .areas
            .available
            .load_u16(AVAILABLE_INDEX, Ordering::Acquire);
        let ahead = index.wrapping_sub(self.next_available);
        // Entries that were rewound may have been seen, and counted, already; hence no more than the size altogether.
        if ahead > self.setup.size {
            let (from, size) = (self.next_available, self.setup.size);
            return Err(QueueError::AvailableIndexJump {
                from,
                to: index,
                size,
            });
        }
        Ok(index)
    }

    fn set_used_flags(&mut self, flags: u16) {
        if self.used_flags != flags {
            self.used_flags = flags;
            self.areas
                .used
                .store_u16(USED_FLAGS, flags, Ordering::Relaxed);
        }
    }

    /// The place in a ring that a running index stands for. The size is a power of two.
    #[inline]
    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.setup.size - 1))
    }

    fn used_event_offset(&self) -> usize {
        AVAILABLE_RING + 2 * usize::from(self.setup.size)
    }

    fn available_event_offset(&self) -> usize {
        USED_RING + 8 * usize::from(self.setup.size)
    }
}

/// Whether an index that moved from `old` to `new` has passed the one after which an event is `wanted` (virtio 1.2, section
/// 2.7.10; `vring_need_event` there). All three run modulo 65536.
pub(crate) fn needs_event(wanted: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(wanted).wrapping_sub(1) < new.wrapping_sub(old)
}

// Offsets in the available ring (virtio 1.2, section 2.7.6), in bytes.
pub(crate) const AVAILABLE_FLAGS: usize = 0;
pub(crate) const AVAILABLE_INDEX: usize = 2;
pub(crate) const AVAILABLE_RING: usize = 4;
/// The driver wants no interrupts.
pub(crate) const NO_INTERRUPT: u16 = 1;

// Offsets in the used ring (virtio 1.2, section 2.7.8), in bytes.
pub(crate) const USED_FLAGS: usize = 0;
pub(crate) const USED_INDEX: usize = 2;
pub(crate) const USED_RING: usize = 4;
/// The device wants no notifications.
pub(crate) const NO_NOTIFY: u16 = 1;

/// The three areas, mapped and checked.
#[derive(Debug)]
struct Areas {
    descriptors: Area,
    available: Area,
    used: Area,
}

impl Areas {
    fn new(setup: &QueueSetup, memory: &GuestMemory) -> Result<Areas, QueueError> {
        let size = usize::from(setup.size);
        let event = if setup.event_index { 2 } else { 0 };
        let area = |name, address, len, alignment| {
            let region = memory.region_at_frontend(address);
            let region = region.ok_or(QueueError::AreaOutside {
                area: name,
                address,
                len,
            })?;
            Area::new(region, address, len, alignment).map_err(|refusal| match refusal {
                Refusal::Outside => QueueError::AreaOutside {
                    area: name,
                    address,
                    len,
                },
                Refusal::Misaligned => QueueError::AreaMisaligned {
                    area: name,
                    address,
                    alignment,
                },
            })
        };
        Ok(Areas {
            descriptors: area("descriptor table", setup.descriptors, 16 * size, 16)?,
            available: area(
                "available ring",
                setup.available,
                AVAILABLE_RING + 2 * size + event,
                2,
            )?,
            used: area("used ring", setup.used, USED_RING + 8 * size + event, 4)?,
        })
    }
}

/// Which chains are out, and which head each entry of the available ring had when it was taken.
#[derive(Debug)]
struct InFlight {
    /// One bit per head.
    heads: Box<[u64]>,
    taken: Box<[u16]>,
    count: u16,
}

impl InFlight {
    fn new(size: u16) -> InFlight {
        InFlight {
            heads: vec![0; usize::from(size).div_ceil(64)].into(),
            taken: vec![0; usize::from(size)].into(),
            count: 0,
        }
    }

    #[inline]
    fn contains(&self, head: u16) -> bool {
        self.heads
            .get(usize::from(head) / 64)
            .is_some_and(|word| word & (1 << (head % 64)) != 0)
    }

    #[inline]
    fn insert(&mut self, head: u16, slot: usize) {
        self.heads[usize::from(head) / 64] |= 1 << (head % 64);
        self.taken[slot] = head;
        self.count += 1;
    }

    #[inline]
    fn remove(&mut self, head: u16) -> bool {
        let is_out = self.contains(head);
        if is_out {
            self.heads[usize::from(head) / 64] &= !(1 << (head % 64));
            self.count -= 1;
        }
        is_out
    }

    fn remove_at(&mut self, slot: usize) -> bool {
        self.remove(self.taken[slot])
    }
}
