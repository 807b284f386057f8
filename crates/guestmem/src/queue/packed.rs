//! The device side of a packed virtqueue (virtio 1.2, section 2.8).
//!
//! # One ring for both sides
//!
//! There is one ring of descriptors. The driver writes chains into it, one descriptor behind the other, and goes round; the device writes
//! what it is done with into the same ring, behind it, in an order of its own, and goes round too. Whose a descriptor is, say two of its
//! flags together with a *wrap counter*, one bit that each side turns over whenever it passes the end: the driver sets AVAIL to its
//! counter and USED to the opposite, the device sets both to its own. So what is left from the last round is never taken for news.
//!
//! A chain is named by an *identifier* which the driver chooses and puts into the chain's last descriptor. To give a chain back, the device writes
//! one descriptor with that identifier, and then skips as many places as the chain had descriptors: both sides remember how many these were.
//!
//! # Visible at once
//!
//! A driver reads one place, that of the next used descriptor, and goes on from there. So only the first descriptor of a batch has to be held back
//! until [`Packed::publish`]; the driver does not read those behind it before. The price is one store for each batch, and there is no index whose
//! cache line travels between two processors.
//!
//! # What may be overwritten
//!
//! A descriptor that was taken is never read again, except after a rewind. The place of a used descriptor may well be that of another
//! chain that is out, since chains come back in any order; but never one of a chain that can still be rewound: what was given back
//! was taken before that chain, and has no more descriptors than lie in front of it.
//!
//! # Events
//!
//! Each side has a structure of 32 bits that only the other side reads: notify always, never, or (with event indices) when a certain place is
//! passed. It is read and written in one access, so that its halves belong together.

use std::hash::{DefaultHasher, Hasher};

use self::fields::*;
use super::chain::{
    self, DESCRIPTOR_LEN, Descriptor, INDIRECT, NEXT, Reader, TableOrder, WRITE, take_only,
};
use super::ledger::{Found, Ledger, Left, PackedLedger};
use super::{
    Chain, FIRST_PACKED_BASE, MAX_QUEUE_SIZE, MAX_SAMPLES, QueueError, QueueSetup, Running, area,
    samples,
};
use crate::area::Area;
use crate::crash::Point;
use crate::guest::GuestMemory;
use crate::sync::{Ordering, full_fence};

pub mod fields;

/// Descriptors in a line of the cache.
const LINE_DESCRIPTORS: u16 = 4;

/// How many descriptors ahead the processor is asked for them.
const DESCRIPTORS_AHEAD: u16 = 16;

/// The device side of one packed virtqueue.
#[derive(Debug)]
pub(super) struct Packed {
    setup: QueueSetup,
    areas: Areas,
    /// Where the next available descriptor is.
    next_available: Position,
    /// Where the next used descriptor goes.
    next_used: Position,
    /// The first descriptor that was given back since the last publication: it becomes visible last.
    held_back: Option<HeldBack>,
    /// Whether anything was published: before, the driver's wish for an interrupt has no span to be measured against.
    has_published: bool,
    /// What is in the device's event structure.
    device_event: u32,
    fresh: bool,
    in_flight: InFlight,
    ledger: Option<PackedLedger>,
}

/// The second word of a descriptor that is not yet in the ring.
#[derive(Debug, Clone, Copy)]
struct HeldBack {
    position: Position,
    word: u64,
}

impl Packed {
    pub(super) fn new(
        setup: QueueSetup,
        memory: &GuestMemory,
        ledger: Option<Ledger>,
    ) -> Result<Packed, QueueError> {
        let (size, base) = (setup.size, setup.ring_base);
        if size == 0 || size > MAX_QUEUE_SIZE {
            return Err(QueueError::PackedSize { size });
        }
        let next_available = Position::from_bits(base as u16);
        let next_used = Position::from_bits((base >> 16) as u16);
        let inside = next_available.index() < size && next_used.index() < size;
        // What is available is never behind what is used, nor ahead of it by more than the ring.
        if !inside || next_available.ahead_of(next_used, size) > u32::from(size) {
            return Err(QueueError::Base { base, size });
        }
        let areas = Areas::new(&setup, memory)?;
        let mut packed = Packed {
            setup,
            next_available,
            next_used,
            held_back: None,
            has_published: false,
            device_event: areas.device_event.load_u32(0, Ordering::Relaxed),
            fresh: base == FIRST_PACKED_BASE,
            in_flight: InFlight::new(size),
            areas,
            ledger: None,
        };
        if let Some(mut ledger) = ledger.map(PackedLedger::new) {
            match ledger.found() {
                Found::Nothing => ledger.begin(size, next_available, next_used),
                Found::Predecessors => {
                    let left = ledger.recover(size, |place| packed.is_used_or_next(place))?;
                    packed.ledger = Some(ledger);
                    packed.take_over(left);
                    return Ok(packed);
                }
                Found::Since(_) => return Err(QueueError::NoPositions),
            }
            packed.ledger = Some(ledger);
        }
        Ok(packed)
    }

    /// Goes on where another process has left the queue, and gives back what was out: all in one publication, since that process may have written used
    /// descriptors behind the first one, which a driver would take for published.
    fn take_over(&mut self, left: Left) {
        self.next_available = left.next_available;
        self.next_used = left.next_used;
        self.fresh = self.ring_base() == FIRST_PACKED_BASE;
        for (identifier, entries) in &left.out {
            self.in_flight.insert(*identifier, *entries);
        }
        for (identifier, _) in left.out {
            self.complete(identifier, 0);
        }
    }

    /// Whether a descriptor that was available here is used, or available in the next round.
    fn is_used_or_next(&self, position: Position) -> bool {
        let word = self.load_word(position.index(), Ordering::Acquire);
        (word & USED != 0) == position.wrap()
    }

    pub(super) fn replace_memory(&mut self, memory: &GuestMemory) -> Result<(), QueueError> {
        self.areas = Areas::new(&self.setup, memory)?;
        Ok(())
    }

    pub(super) fn pop(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<bool, QueueError> {
        // Acquire: what the driver wrote before it set these flags is visible after.
        let word = self.load_word(self.next_available.index(), Ordering::Acquire);
        if !self.next_available.is_available(word) {
            return Ok(false);
        }
        let (position, size) = (self.next_available, self.setup.size);
        if position.index() % LINE_DESCRIPTORS == 0 {
            // What is read here is written over soon: to have it to oneself at once saves a second journey.
            let ahead = position.plus(DESCRIPTORS_AHEAD.min(size - 1), size);
            let offset = DESCRIPTOR_LEN * usize::from(ahead.index());
            self.areas.descriptors.prefetch(offset);
        }
        let address = self.load_address(position.index());
        let first = Descriptor::from_packed_words(address, word);
        let is_free = self.in_flight.descriptors < u32::from(size);
        let after = if is_free && take_only(memory, chain, address, first.len, first.flags) {
            chain.head = first.identifier();
            position.plus(1, size)
        } else {
            self.read_chain(memory, chain, address, word)?
        };
        if self.in_flight.contains(chain.head) {
            return Err(QueueError::HeadInFlight { head: chain.head });
        }
        if let Some(ledger) = &mut self.ledger {
            ledger.mark(chain.head, chain.entries);
        }
        self.in_flight.insert(chain.head, chain.entries);
        self.next_available = after;
        self.fresh = false;
        Ok(true)
    }

    pub(super) fn prefetch(&self, memory: &GuestMemory, ahead: u16, chains: u16) {
        let size = self.setup.size;
        if ahead >= size {
            return;
        }
        let mut position = self.next_available.plus(ahead, size);
        for _ in 0..chains.min(size - ahead) {
            let word = self.load_word(position.index(), Ordering::Relaxed);
            // A descriptor in the middle of a chain is asked for like another one: most chains have one only.
            if !position.is_available(word) {
                return;
            }
            let address = self.load_address(position.index());
            // Length, identifier and flags are one word.
            chain::prefetch(memory, address, word as u32, (word >> 48) as u16);
            position = position.plus(1, size);
        }
    }

    pub(super) fn pending(&self) -> Result<bool, QueueError> {
        let word = self.load_word(self.next_available.index(), Ordering::Acquire);
        Ok(self.next_available.is_available(word))
    }

    pub(super) fn complete(&mut self, identifier: u16, written: u32) {
        let Some(entries) = self.in_flight.remove(identifier) else {
            debug_assert!(false, "chain {identifier} is given back and is not out");
            return;
        };
        if let Some(ledger) = &mut self.ledger {
            ledger.mark_back(identifier, entries);
        }
        // The flag says whether the length means anything (2.8.3, 2.8.4).
        let has_data = if written > 0 {
            u64::from(WRITE) << FLAGS_SHIFT
        } else {
            0
        };
        let name = u64::from(identifier) << IDENTIFIER_SHIFT;
        let position = self.next_used;
        let word = u64::from(written) | name | has_data | position.used_flags();
        if self.held_back.is_none() {
            self.held_back = Some(HeldBack { position, word });
        } else {
            self.store_word(position.index(), word, Ordering::Relaxed);
        }
        self.next_used = position.plus(entries, self.setup.size);
    }

    pub(super) fn publish(&mut self) -> bool {
        let Some(HeldBack { position, word }) = self.held_back.take() else {
            return false;
        };
        if let Some(ledger) = &self.ledger {
            ledger.begin_publication(position, self.next_used);
        }
        // Everything written before, the chains' bytes and the descriptors behind this one too, is visible to a driver that sees it.
        self.store_word(position.index(), word, Ordering::Release);
        if let Some(ledger) = &mut self.ledger {
            ledger.end_publication(self.next_used);
        }
        let first = !self.has_published;
        self.has_published = true;
        // Publish first, look for the driver's wish second: the driver does it the other way round.
        full_fence();
        let event = self.areas.driver_event.load_u32(0, Ordering::Relaxed);
        match event >> EVENT_FLAGS_SHIFT & EVENT_FLAGS {
            EVENT_NEVER => false,
            EVENT_AT if self.setup.event_index => {
                first || is_passed(event as u16, position, self.next_used, self.setup.size)
            }
            _ => true,
        }
    }

    pub(super) fn disable_notifications(&mut self) {
        self.set_device_event(EVENT_NEVER << EVENT_FLAGS_SHIFT);
    }

    pub(super) fn enable_notifications(&mut self) -> bool {
        let event = if self.setup.event_index {
            EVENT_AT << EVENT_FLAGS_SHIFT | u32::from(self.next_available.to_bits())
        } else {
            EVENT_ALWAYS << EVENT_FLAGS_SHIFT
        };
        self.set_device_event(event);
        full_fence();
        self.pending().unwrap_or(true)
    }

    pub(super) fn ring_base(&self) -> u32 {
        u32::from(self.next_available.to_bits()) | u32::from(self.next_used.to_bits()) << 16
    }

    pub(super) fn in_flight(&self) -> u16 {
        // At most as many as the ring has places.
        self.in_flight.chains as u16
    }

    pub(super) fn rewind(&mut self, chains: u16) {
        for _ in 0..chains {
            let Some((identifier, entries)) = self.in_flight.forget_last() else {
                debug_assert!(false, "a chain is rewound and is not out");
                return;
            };
            if let Some(ledger) = &self.ledger {
                ledger.clear(identifier);
            }
            self.next_available = self.next_available.minus(entries, self.setup.size);
        }
    }

    pub(super) fn note_unseen(&self, is_unseen: bool) {
        if let Some(ledger) = &self.ledger {
            ledger.note_unseen(is_unseen);
        }
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.fresh
    }

    pub(super) fn is_blank(&self) -> bool {
        let mut words = 0..2 * usize::from(self.setup.size).min(MAX_SAMPLES);
        words.all(|word| self.areas.descriptors.load_u64(8 * word, Ordering::Relaxed) == 0)
    }

    pub(super) fn driver_digest(&self) -> u64 {
        let mut digest = DefaultHasher::new();
        for entry in samples(self.setup.size) {
            let descriptors = &self.areas.descriptors;
            for word in descriptors.load_pair(16 * entry, Ordering::Relaxed) {
                digest.write_u64(word);
            }
        }
        digest.finish()
    }

    /// Fills `chain` with the chain that begins with this descriptor, and says where the next one is.
    // Apart, since few chains come here, and those that do not would pay for its variables.
    #[inline(never)]
    fn read_chain(
        &self,
        memory: &GuestMemory,
        chain: &mut Chain,
        address: u64,
        word: u64,
    ) -> Result<Position, QueueError> {
        let size = self.setup.size;
        let head = self.next_available.index();
        let free = size - self.in_flight.descriptors as u16;
        let mut reader = Reader::new(memory, chain, head);
        let mut position = self.next_available;
        let mut descriptor = Descriptor::from_packed_words(address, word);
        for entries in 1..=free {
            let index = position.index();
            position = position.plus(1, size);
            if descriptor.flags & INDIRECT != 0 {
                if !self.setup.indirect {
                    return Err(QueueError::IndirectNotNegotiated { head, index });
                }
                if descriptor.flags & NEXT != 0 {
                    return Err(QueueError::IndirectWithNext { head, index });
                }
                if entries > 1 {
                    return Err(QueueError::IndirectNotAlone { head, index });
                }
                reader.add_table(index, descriptor, TableOrder::Sequential)?;
            } else {
                reader.add(index, descriptor)?;
            }
            if descriptor.flags & NEXT == 0 {
                chain.head = descriptor.identifier();
                chain.entries = entries;
                return Ok(position);
            }
            // The first descriptor was published last, so this one is there; and if it is not, it is the driver's own loss.
            let word = self.load_word(position.index(), Ordering::Relaxed);
            descriptor = Descriptor::from_packed_words(self.load_address(position.index()), word);
        }
        Err(QueueError::TooManyOut { head, free, size })
    }

    #[inline]
    fn load_address(&self, index: u16) -> u64 {
        let offset = DESCRIPTOR_LEN * usize::from(index);
        self.areas.descriptors.load_u64(offset, Ordering::Relaxed)
    }

    /// The second word of a descriptor: length, identifier and flags in one access, so that they belong together.
    #[inline]
    fn load_word(&self, index: u16, ordering: Ordering) -> u64 {
        let offset = DESCRIPTOR_LEN * usize::from(index) + 8;
        self.areas.descriptors.load_u64(offset, ordering)
    }

    #[inline]
    fn store_word(&self, index: u16, word: u64, ordering: Ordering) {
        let offset = DESCRIPTOR_LEN * usize::from(index) + 8;
        self.areas
            .descriptors
            .publish_u64(Point::PackedDescriptor, offset, word, ordering);
    }

    fn set_device_event(&mut self, event: u32) {
        if self.device_event != event {
            self.device_event = event;
            self.areas
                .device_event
                .publish_u32(Point::PackedEvent, 0, event, Ordering::Relaxed);
        }
    }
}

/// The three areas, mapped and checked.
#[derive(Debug)]
struct Areas {
    descriptors: Area,
    driver_event: Area,
    device_event: Area,
}

impl Areas {
    fn new(setup: &QueueSetup, memory: &GuestMemory) -> Result<Areas, QueueError> {
        let len = DESCRIPTOR_LEN * usize::from(setup.size);
        Ok(Areas {
            descriptors: area(memory, "descriptor ring", setup.descriptors, len, 16)?,
            driver_event: area(
                memory,
                "driver's event structure",
                setup.available,
                EVENT_LEN,
                4,
            )?,
            device_event: area(memory, "device's event structure", setup.used, EVENT_LEN, 4)?,
        })
    }
}

/// Which chains are out, and in which order they were taken.
#[derive(Debug)]
struct InFlight {
    /// By identifier: how many descriptors the chain has, zero if it is not out. A driver may choose its identifiers as it likes, so this grows
    /// with the largest that was seen; up to 65536 of them, that is.
    entries: Vec<u16>,
    /// The identifiers of the chains that were taken last, by a running number.
    taken: Box<[u16]>,
    /// How many chains were taken, less those that were forgotten.
    number: Running,
    /// Chains that are out.
    chains: u32,
    /// Their descriptors, of which there are at most as many as the ring has places.
    descriptors: u32,
}

impl InFlight {
    fn new(size: u16) -> InFlight {
        InFlight {
            entries: vec![0; usize::from(size)],
            // A power of two, so that a running number may wrap. The largest size is one.
            taken: vec![0; usize::from(size).next_power_of_two()].into(),
            number: Running::new(0),
            chains: 0,
            descriptors: 0,
        }
    }

    #[inline]
    fn contains(&self, identifier: u16) -> bool {
        self.entries
            .get(usize::from(identifier))
            .is_some_and(|entries| *entries != 0)
    }

    #[inline]
    fn insert(&mut self, identifier: u16, entries: u16) {
        let place = usize::from(identifier);
        if place >= self.entries.len() {
            self.entries.resize(place + 1, 0);
        }
        self.entries[place] = entries;
        let slot = self.slot(self.number);
        self.taken[slot] = identifier;
        self.number = self.number.next();
        self.chains += 1;
        self.descriptors += u32::from(entries);
    }

    /// Takes a chain out, and says how many descriptors it has; nothing if it is not out.
    #[inline]
    fn remove(&mut self, identifier: u16) -> Option<u16> {
        let entries = self.entries.get_mut(usize::from(identifier))?;
        let entries = std::mem::take(entries);
        if entries == 0 {
            return None;
        }
        self.chains -= 1;
        self.descriptors -= u32::from(entries);
        Some(entries)
    }

    /// Takes the chain out that was taken last, and says which one it is, and likewise.
    fn forget_last(&mut self) -> Option<(u16, u16)> {
        let last = self.number.previous();
        let identifier = self.taken[self.slot(last)];
        let entries = self.remove(identifier)?;
        self.number = last;
        Some((identifier, entries))
    }

    #[inline]
    fn slot(&self, number: Running) -> usize {
        usize::from(number.get()) & (self.taken.len() - 1)
    }
}
