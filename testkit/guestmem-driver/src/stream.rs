//! A queue for one purpose that never changes: frames in, or frames out, as fast as a processor can.
//!
//! # Theory of operation
//!
//! Everything is written once, when the queue is made: slot *i* of the queue has its chain, and that chain its buffers, for good. To post
//! the next chains is then to bump an index (split rings), or to write the slots' descriptors again (packed rings, where the device
//! has overwritten them). The devices of this world that take chains from a queue in order also give them back in order, so that
//! there is no list of free descriptors: the slots that are out are those between two counters. A device that gives back in any other
//! order would make nonsense of what is counted here; every batch is checked for it.
//!
//! What a device asks for is honoured: [`post`](StreamQueue::post) says whether it wants a notification, and interrupts are asked
//! for, or not, as a driver does.

use std::sync::Arc;

use super::{Arena, RawDescriptor};
use guestmem::area::Area;
use guestmem::guest::Range;
use guestmem::queue::packed_fields::{
    AVAILABLE, EVENT_ALWAYS, EVENT_AT, EVENT_FLAGS, EVENT_FLAGS_SHIFT, EVENT_LEN, EVENT_NEVER,
    IDENTIFIER_SHIFT, Position, USED, is_passed,
};
use guestmem::queue::split_fields::{
    AVAILABLE_FLAGS, AVAILABLE_INDEX, AVAILABLE_RING, NO_INTERRUPT, NO_NOTIFY, USED_FLAGS,
    USED_INDEX, USED_RING,
};
use guestmem::queue::{
    DESCRIPTOR_LEN, FIRST_PACKED_BASE, FIRST_SPLIT_BASE, QueueSetup, needs_event,
};
use guestmem::sync::{Ordering, full_fence};

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

/// Both parties write beside each other as rarely as can be: each part has its own pair of cache lines.
const PART_ALIGNMENT: usize = 128;

/// What a stream's queue is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamOptions {
    /// A packed ring, and not a split one.
    pub packed: bool,
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub event_index: bool,
    /// The device writes into the chains: a receive queue.
    pub writable: bool,
    /// Where the guest sees the arena's start.
    pub guest_base: u64,
}

/// Slots that the device has just given back, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Returned {
    /// The first of them.
    pub first: u16,
    /// How many there are; the slot behind the last is the first one again.
    pub count: u16,
}

/// The driver's side of a virtqueue whose chains never change.
///
/// # Example
/// ```
/// use std::sync::Arc;
/// use guestmem_driver::{Arena, StreamOptions, StreamQueue};
/// use guestmem::guest::Range;
///
/// let arena = Arc::new(Arena::new(1 << 20)?);
/// let buffers: Vec<_> = (0..4)
///     .map(|_| vec![Range { address: arena.allocate(2048, 64) as u64, len: 2048 }])
///     .collect();
/// let options = StreamOptions { packed: false, event_index: true, writable: true, guest_base: 0 };
/// let mut queue = StreamQueue::new(&arena, &buffers, options);
///
/// queue.post(4);
/// assert_eq!(queue.take().count, 0, "there is no device");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StreamQueue {
    options: StreamOptions,
    setup: QueueSetup,
    /// Descriptor table or packed ring.
    descriptors: Area,
    /// Available ring, or the driver's event suppression.
    available: Area,
    /// Used ring, or the device's event suppression.
    used: Area,
    /// By slot, without the flags that distinguish rounds.
    templates: Vec<RawDescriptor>,
    /// By slot: how much the device has written. Packed rings only, where a new round overwrites it.
    written: Vec<u32>,
    /// Chains posted, and chains taken back, modulo 65536.
    posted: u16,
    taken: u16,
    /// Where that is in a packed ring.
    post_position: Position,
    take_position: Position,
}

impl StreamQueue {
    /// A queue with a slot for each of these chains, nothing posted. A chain of more than one range gets an indirect table.
    ///
    /// # Panics
    /// If the number of chains is no power of two, a chain is empty, or the arena has no room.
    pub fn new(arena: &Arc<Arena>, chains: &[Vec<Range>], options: StreamOptions) -> StreamQueue {
        let size = u16::try_from(chains.len()).expect("a queue has at most 32768 slots");
        assert!(size.is_power_of_two(), "a queue of {size}");
        let entries = chains.len();
        let lens = match options.packed {
            false => [
                DESCRIPTOR_LEN * entries,
                AVAILABLE_RING + 2 * entries + 2,
                USED_RING + 8 * entries + 2,
            ],
            true => [DESCRIPTOR_LEN * entries, EVENT_LEN, EVENT_LEN],
        };
        let [descriptors, available, used] = lens.map(|len| arena.allocate(len, PART_ALIGNMENT));
        let base = arena.base();
        let setup = QueueSetup {
            size,
            descriptors: base + descriptors as u64,
            available: base + available as u64,
            used: base + used as u64,
            ring_base: match options.packed {
                false => FIRST_SPLIT_BASE,
                true => FIRST_PACKED_BASE,
            },
            event_index: options.event_index,
            indirect: true,
            packed: options.packed,
        };
        let start = Position::from_bits(FIRST_PACKED_BASE as u16);
        let mut queue = StreamQueue {
            options,
            setup,
            descriptors: arena.area(descriptors, lens[0]),
            available: arena.area(available, lens[1]),
            used: arena.area(used, lens[2]),
            templates: Vec::with_capacity(entries),
            written: vec![0; entries],
            posted: 0,
            taken: 0,
            post_position: start,
            take_position: start,
        };
        for (slot, chain) in chains.iter().enumerate() {
            let template = queue.template(arena, chain, slot as u16);
            queue.templates.push(template);
            if !options.packed {
                queue.write_split(slot as u16, template);
            }
        }
        queue
    }

    /// Number of slots.
    pub fn size(&self) -> u16 {
        self.setup.size
    }

    /// What a device needs to know, with the addresses of this process as the front end's.
    pub fn setup(&self) -> QueueSetup {
        self.setup
    }

    /// How many chains the device has.
    pub fn out(&self) -> u16 {
        self.posted.wrapping_sub(self.taken)
    }

    /// The slot that is posted next.
    pub fn next_slot(&self) -> u16 {
        self.slot(self.posted)
    }

    /// Takes back what the device is done with.
    ///
    /// # Panics
    /// If it gave back anything but the oldest chains that it has.
    #[inline]
    pub fn take(&mut self) -> Returned {
        let first = self.slot(self.taken);
        let count = match self.options.packed {
            false => self.take_split(),
            true => self.take_packed(),
        };
        self.taken = self.taken.wrapping_add(count);
        Returned { first, count }
    }

    /// How much the device wrote into a slot that it has given back, until that slot is posted again.
    #[inline]
    pub fn written(&self, slot: u16) -> u32 {
        match self.options.packed {
            false => {
                let entry = USED_RING + 8 * usize::from(slot);
                self.used.load_u32(entry + 4, Ordering::Relaxed)
            }
            true => self.written[usize::from(slot)],
        }
    }

    /// Gives the device the next `count` slots. `true` when it wants a notification for that.
    ///
    /// # Panics
    /// If it has one of them already.
    #[inline]
    pub fn post(&mut self, count: u16) -> bool {
        if count == 0 {
            return false;
        }
        assert!(
            count <= self.setup.size - self.out(),
            "{count} more chains for a device that has {} of {}",
            self.out(),
            self.setup.size
        );
        let (old, old_position) = (self.posted, self.post_position);
        self.posted = old.wrapping_add(count);
        match self.options.packed {
            false => {
                self.available
                    .store_u16(AVAILABLE_INDEX, self.posted, Ordering::Release);
            }
            true => self.post_packed(count),
        }
        // Publish first, look for the device's wish second: the device does it the other way round.
        full_fence();
        match self.options.packed {
            false => self.split_wants_kick(old),
            true => self.packed_wants_kick(old_position),
        }
    }

    /// Asks for an interrupt when the next chain comes back. `true`: one came back already, take it.
    pub fn enable_interrupts(&mut self) -> bool {
        if self.options.packed {
            self.wish_packed(match self.options.event_index {
                true => EVENT_AT,
                false => EVENT_ALWAYS,
            });
        } else if self.options.event_index {
            self.set_used_event(self.taken);
        } else {
            self.available
                .store_u16(AVAILABLE_FLAGS, 0, Ordering::Relaxed);
        }
        full_fence();
        match self.options.packed {
            false => self.used.load_u16(USED_INDEX, Ordering::Acquire) != self.taken,
            true => self.out() > 0 && self.is_back(self.second_word(self.take_position.index())),
        }
    }

    /// Asks for no interrupts. One may still come.
    pub fn disable_interrupts(&mut self) {
        if self.options.packed {
            self.wish_packed(EVENT_NEVER);
        } else if self.options.event_index {
            // As far away as can be.
            self.set_used_event(self.taken.wrapping_sub(1));
        } else {
            self.available
                .store_u16(AVAILABLE_FLAGS, NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    fn template(&self, arena: &Arena, chain: &[Range], slot: u16) -> RawDescriptor {
        let write = match self.options.writable {
            true => RawDescriptor::WRITE,
            false => 0,
        };
        // In a packed ring this is the chain's name, in a split one nothing.
        let next = if self.options.packed { slot } else { 0 };
        match chain {
            [] => panic!("an empty chain"),
            [range] => RawDescriptor {
                address: range.address,
                len: range.len,
                flags: write,
                next,
            },
            ranges => {
                let len = DESCRIPTOR_LEN * ranges.len();
                let table = arena.allocate(len, 16);
                for (position, range) in ranges.iter().enumerate() {
                    let is_last = position + 1 == ranges.len();
                    let entry = self.table_entry(range, write, position as u16, is_last);
                    arena.write(table + DESCRIPTOR_LEN * position, &entry);
                }
                RawDescriptor {
                    address: self.options.guest_base + table as u64,
                    len: len as u32,
                    flags: RawDescriptor::INDIRECT,
                    next,
                }
            }
        }
    }

    /// In the table of a packed ring the order says what is next.
    fn table_entry(&self, range: &Range, write: u16, position: u16, is_last: bool) -> [u8; 16] {
        let mut entry = RawDescriptor {
            address: range.address,
            len: range.len,
            flags: write,
            next: 0,
        };
        if self.options.packed {
            return entry.to_packed_bytes();
        }
        if !is_last {
            entry.flags |= RawDescriptor::NEXT;
            entry.next = position + 1;
        }
        entry.to_bytes()
    }

    fn write_split(&self, slot: u16, template: RawDescriptor) {
        let offset = DESCRIPTOR_LEN * usize::from(slot);
        let [address, rest] = template.words();
        self.descriptors
            .store_u64(offset, address, Ordering::Relaxed);
        self.descriptors
            .store_u64(offset + 8, rest, Ordering::Relaxed);
        self.available.store_u16(
            AVAILABLE_RING + 2 * usize::from(slot),
            slot,
            Ordering::Relaxed,
        );
    }

    fn take_split(&self) -> u16 {
        let index = self.used.load_u16(USED_INDEX, Ordering::Acquire);
        let count = index.wrapping_sub(self.taken);
        if count > 0 {
            assert!(
                count <= self.out(),
                "{count} chains came back of {} that were out",
                self.out()
            );
            let slot = self.slot(index.wrapping_sub(1));
            let entry = USED_RING + 8 * usize::from(slot);
            let name = self.used.load_u32(entry, Ordering::Relaxed);
            assert_in_order(name, slot);
        }
        count
    }

    fn take_packed(&mut self) -> u16 {
        let (limit, mut count) = (self.out(), 0);
        while count < limit {
            let slot = self.take_position.index();
            let word = self.second_word(slot);
            if !self.is_back(word) {
                break;
            }
            assert_in_order(u32::from((word >> IDENTIFIER_SHIFT) as u16), slot);
            self.written[usize::from(slot)] = word as u32;
            self.take_position = self.take_position.plus(1, self.setup.size);
            count += 1;
        }
        count
    }

    /// From the last slot to the first, so that a device that looks all the time finds the whole batch at once, and does not take
    /// the cache line away after each of its descriptors.
    fn post_packed(&mut self, count: u16) {
        let start = self.post_position;
        for step in (0..count).rev() {
            let position = start.plus(step, self.setup.size);
            let [address, word] = self.templates[usize::from(position.index())].packed_words();
            let offset = DESCRIPTOR_LEN * usize::from(position.index());
            self.descriptors
                .store_u64(offset, address, Ordering::Relaxed);
            let word = word | position.available_flags();
            self.descriptors
                .store_u64(offset + 8, word, Ordering::Release);
        }
        self.post_position = start.plus(count, self.setup.size);
    }

    fn split_wants_kick(&self, old: u16) -> bool {
        if self.options.event_index {
            let offset = USED_RING + 8 * usize::from(self.setup.size);
            let wanted = self.used.load_u16(offset, Ordering::Relaxed);
            needs_event(wanted, old, self.posted)
        } else {
            self.used.load_u16(USED_FLAGS, Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    fn packed_wants_kick(&self, old: Position) -> bool {
        let event = self.used.load_u32(0, Ordering::Relaxed);
        match event >> EVENT_FLAGS_SHIFT & EVENT_FLAGS {
            EVENT_NEVER => false,
            EVENT_AT => is_passed(event as u16, old, self.post_position, self.setup.size),
            _ => true,
        }
    }

    /// What of interrupts is wanted; where that matters, when the next chain comes back.
    fn wish_packed(&self, flags: u32) {
        let place = u32::from(self.take_position.to_bits());
        self.available
            .store_u32(0, place | flags << EVENT_FLAGS_SHIFT, Ordering::Relaxed);
    }

    /// Whether the descriptor that comes back next has done so; this is its second word.
    #[inline]
    fn is_back(&self, word: u64) -> bool {
        word & (AVAILABLE | USED) == self.take_position.used_flags()
    }

    /// Length, name and flags.
    #[inline]
    fn second_word(&self, slot: u16) -> u64 {
        let offset = DESCRIPTOR_LEN * usize::from(slot) + 8;
        self.descriptors.load_u64(offset, Ordering::Acquire)
    }

    fn set_used_event(&self, index: u16) {
        let offset = AVAILABLE_RING + 2 * usize::from(self.setup.size);
        self.available.store_u16(offset, index, Ordering::Relaxed);
    }

    #[inline]
    fn slot(&self, index: u16) -> u16 {
        index & (self.setup.size - 1)
    }
}

#[inline]
fn assert_in_order(name: u32, slot: u16) {
    assert!(
        name == u32::from(slot),
        "chain {name} came back where {slot} should have: the device does not keep the order"
    );
}
