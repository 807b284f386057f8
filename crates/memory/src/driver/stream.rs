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
use crate::area::Area;
use crate::guest::Range;
use crate::queue::{
    AVAILABLE_FLAGS, AVAILABLE_INDEX, AVAILABLE_RING, DESCRIPTOR_LEN, NO_INTERRUPT, NO_NOTIFY,
    USED_FLAGS, USED_INDEX, USED_RING, needs_event,
};
use crate::sync::{Ordering, fence};

#[cfg(test)]
mod tests;

/// Flags of a descriptor of a packed ring: made available, and used, in an odd round (virtio 1.2, section 2.8.1).
const PACKED_AVAILABLE: u16 = 1 << 7;
const PACKED_USED: u16 = 1 << 15;

/// Fields of the event suppression structures of a packed ring (section 2.8.14), and values of the second.
const EVENT_PLACE: usize = 0;
const EVENT_FLAGS: usize = 2;
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_AT_PLACE: u16 = 2;
/// In a place: the round.
const EVENT_ROUND: u16 = 1 << 15;

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

/// Where the parts of a queue are, as front-end addresses: what SET_VRING_ADDR says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamAddresses {
    /// The descriptor table, or the packed ring.
    pub descriptors: u64,
    /// The available ring, or the driver's event suppression.
    pub available: u64,
    /// The used ring, or the device's event suppression.
    pub used: u64,
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
/// use memory::driver::{Arena, StreamOptions, StreamQueue};
/// use memory::guest::Range;
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
    size: u16,
    options: StreamOptions,
    addresses: StreamAddresses,
    /// Descriptor table or packed ring.
    descriptors: Area,
    /// Available ring, or the driver's event suppression.
    available: Area,
    /// Used ring, or the device's event suppression.
    used: Area,
    /// By slot, without the flags that tell rounds apart.
    templates: Vec<RawDescriptor>,
    /// By slot: how much the device has written. Packed rings only, where a new round overwrites it.
    written: Vec<u32>,
    /// Chains posted, and chains taken back, modulo 65536.
    posted: u16,
    taken: u16,
    /// The rounds of a packed ring that the next chain is posted and taken in.
    posting_round: bool,
    taking_round: bool,
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
        // An area of its own cache lines for each, since two parties write them.
        let lens = match options.packed {
            false => [
                DESCRIPTOR_LEN * entries,
                AVAILABLE_RING + 2 * entries + 2,
                USED_RING + 8 * entries + 2,
            ],
            true => [DESCRIPTOR_LEN * entries, 4, 4],
        };
        let [descriptors, available, used] = lens.map(|len| arena.allocate(len, 128));
        let base = arena.base();
        let mut queue = StreamQueue {
            size,
            options,
            addresses: StreamAddresses {
                descriptors: base + descriptors as u64,
                available: base + available as u64,
                used: base + used as u64,
            },
            descriptors: arena.area(descriptors, lens[0]),
            available: arena.area(available, lens[1]),
            used: arena.area(used, lens[2]),
            templates: Vec::with_capacity(entries),
            written: vec![0; entries],
            posted: 0,
            taken: 0,
            posting_round: true,
            taking_round: true,
        };
        for (slot, chain) in chains.iter().enumerate() {
            let template = queue.template(arena, chain);
            queue.templates.push(template);
            if !options.packed {
                queue.write_split(slot as u16, template);
            }
        }
        queue
    }

    /// Number of slots.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Where it is.
    pub fn addresses(&self) -> StreamAddresses {
        self.addresses
    }

    /// What SET_VRING_BASE says: a packed ring begins in the odd round, on both sides.
    pub fn base(&self) -> u32 {
        match self.options.packed {
            false => 0,
            true => u32::from(EVENT_ROUND) << 16 | u32::from(EVENT_ROUND),
        }
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
            count <= self.size - self.out(),
            "{count} more chains for a device that has {} of {}",
            self.out(),
            self.size
        );
        let old = self.posted;
        self.posted = old.wrapping_add(count);
        match self.options.packed {
            false => {
                self.available
                    .store_u16(AVAILABLE_INDEX, self.posted, Ordering::Release);
            }
            true => self.post_packed(old, count),
        }
        // Publish first, look for the device's wish second: the device does it the other way round.
        fence(Ordering::SeqCst);
        match self.options.packed {
            false => self.split_wants_kick(old),
            true => self.packed_wants_kick(count),
        }
    }

    /// Asks for an interrupt when the next chain comes back. `true`: one came back already, take it.
    pub fn enable_interrupts(&mut self) -> bool {
        if self.options.packed {
            let place = self.slot(self.taken) | if self.taking_round { EVENT_ROUND } else { 0 };
            let flags = match self.options.event_index {
                true => EVENT_AT_PLACE,
                false => EVENT_ENABLE,
            };
            self.available
                .store_u16(EVENT_PLACE, place, Ordering::Relaxed);
            self.available
                .store_u16(EVENT_FLAGS, flags, Ordering::Release);
        } else if self.options.event_index {
            self.set_used_event(self.taken);
        } else {
            self.available
                .store_u16(AVAILABLE_FLAGS, 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        match self.options.packed {
            false => self.used.load_u16(USED_INDEX, Ordering::Acquire) != self.taken,
            true => self.out() > 0 && self.is_back(self.slot(self.taken), self.taking_round),
        }
    }

    /// Asks for no interrupts. One may still come.
    pub fn disable_interrupts(&mut self) {
        if self.options.packed {
            self.available
                .store_u16(EVENT_FLAGS, EVENT_DISABLE, Ordering::Relaxed);
        } else if self.options.event_index {
            // As far away as can be.
            self.set_used_event(self.taken.wrapping_sub(1));
        } else {
            self.available
                .store_u16(AVAILABLE_FLAGS, NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    fn template(&self, arena: &Arena, chain: &[Range]) -> RawDescriptor {
        let write = match self.options.writable {
            true => RawDescriptor::WRITE,
            false => 0,
        };
        match chain {
            [] => panic!("an empty chain"),
            [range] => RawDescriptor {
                address: range.address,
                len: range.len,
                flags: write,
                next: 0,
            },
            ranges => {
                let len = DESCRIPTOR_LEN * ranges.len();
                let table = arena.allocate(len, 16);
                for (position, range) in ranges.iter().enumerate() {
                    let next = Some(position + 1).filter(|next| *next < ranges.len());
                    let next = next.map(|next| next as u16);
                    let entry = table_entry(self.options.packed, range, write, next);
                    arena.write(table + DESCRIPTOR_LEN * position, &entry);
                }
                RawDescriptor {
                    address: self.options.guest_base + table as u64,
                    len: len as u32,
                    flags: RawDescriptor::INDIRECT,
                    next: 0,
                }
            }
        }
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
            let slot = self.slot(self.taken.wrapping_add(count));
            let rest = self.second_word(slot);
            if !is_used((rest >> 48) as u16, self.taking_round) {
                break;
            }
            assert_in_order(u32::from((rest >> 32) as u16), slot);
            self.written[usize::from(slot)] = rest as u32;
            count += 1;
            if slot + 1 == self.size {
                self.taking_round = !self.taking_round;
            }
        }
        count
    }

    /// From the last slot to the first, so that a device that looks all the time finds the whole batch at once, and does not take
    /// the cache line away after each of its descriptors.
    fn post_packed(&mut self, start: u16, count: u16) {
        let first = self.slot(start);
        let wraps = usize::from(first) + usize::from(count) >= usize::from(self.size);
        for step in (0..count).rev() {
            let slot = self.slot(start.wrapping_add(step));
            // A slot below the first lies behind the ring's end.
            let round = self.posting_round == (slot >= first);
            let mut template = self.templates[usize::from(slot)];
            template.flags |= if round { PACKED_AVAILABLE } else { PACKED_USED };
            let offset = DESCRIPTOR_LEN * usize::from(slot);
            self.descriptors
                .store_u64(offset, template.address, Ordering::Relaxed);
            let rest =
                u64::from(template.len) | u64::from(slot) << 32 | u64::from(template.flags) << 48;
            self.descriptors
                .store_u64(offset + 8, rest, Ordering::Release);
        }
        if wraps {
            self.posting_round = !self.posting_round;
        }
    }

    fn split_wants_kick(&self, old: u16) -> bool {
        if self.options.event_index {
            let offset = USED_RING + 8 * usize::from(self.size);
            let wanted = self.used.load_u16(offset, Ordering::Relaxed);
            needs_event(wanted, old, self.posted)
        } else {
            self.used.load_u16(USED_FLAGS, Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    fn packed_wants_kick(&self, count: u16) -> bool {
        let flags = self.used.load_u16(EVENT_FLAGS, Ordering::Acquire);
        if flags != EVENT_AT_PLACE {
            return flags != EVENT_DISABLE;
        }
        let place = self.used.load_u16(EVENT_PLACE, Ordering::Relaxed);
        let (mut wanted, new) = (place & !EVENT_ROUND, self.slot(self.posted));
        if (place & EVENT_ROUND != 0) != self.posting_round {
            // It is a place of the round before.
            wanted = wanted.wrapping_sub(self.size);
        }
        needs_event(wanted, new.wrapping_sub(count), new)
    }

    fn is_back(&self, slot: u16, round: bool) -> bool {
        is_used((self.second_word(slot) >> 48) as u16, round)
    }

    /// Length, name and flags.
    #[inline]
    fn second_word(&self, slot: u16) -> u64 {
        let offset = DESCRIPTOR_LEN * usize::from(slot) + 8;
        self.descriptors.load_u64(offset, Ordering::Acquire)
    }

    fn set_used_event(&self, index: u16) {
        let offset = AVAILABLE_RING + 2 * usize::from(self.size);
        self.available.store_u16(offset, index, Ordering::Relaxed);
    }

    #[inline]
    fn slot(&self, index: u16) -> u16 {
        index & (self.size - 1)
    }
}

/// An entry of an indirect table. In that of a packed ring the order says what is next, and the flags are the last field.
fn table_entry(packed: bool, range: &Range, write: u16, next: Option<u16>) -> [u8; 16] {
    let mut entry = RawDescriptor {
        address: range.address,
        len: range.len,
        flags: write,
        next: 0,
    };
    if packed {
        (entry.flags, entry.next) = (0, write);
    } else if let Some(next) = next {
        (entry.flags, entry.next) = (write | RawDescriptor::NEXT, next);
    }
    entry.to_bytes()
}

/// Whether both marks are those of the round.
#[inline]
fn is_used(flags: u16, round: bool) -> bool {
    let (available, used) = (flags & PACKED_AVAILABLE != 0, flags & PACKED_USED != 0);
    available == round && used == round
}

#[inline]
fn assert_in_order(name: u32, slot: u16) {
    assert!(
        name == u32::from(slot),
        "chain {name} came back where {slot} should have: the device does not keep the order"
    );
}
