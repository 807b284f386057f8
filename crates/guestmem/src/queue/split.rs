//! The device side of a split virtqueue (virtio 1.2, section 2.7).
//!
//! # The three areas
//!
//! - the *descriptor table*: `size` descriptors of 16 bytes, each a stretch of guest memory and, if it has one, the index of
//!   the next descriptor of its chain. A chain may end in one *indirect* descriptor, whose stretch holds a table of more
//!   descriptors.
//! - the *available ring*, which only the driver writes: heads of chains that the device may use now, and an index that
//!   counts them all, modulo 65536.
//! - the *used ring*, which only the device writes: heads of chains that the device is done with, how many bytes it wrote
//!   into each, and an index that counts them.
//!
//! Our own two indices, and which chains are out, are kept in private memory and never read back. (The used index is read once when a
//! queue is set up: vhost-user says where the available ring was left and not where the used ring was.)

use std::hash::{DefaultHasher, Hasher};

use super::chain::{
    self, DESCRIPTOR_LEN, Descriptor, INDIRECT, NEXT, Reader, TableOrder, take_only,
};
use super::in_flight::{InFlight, Out};
use super::ledger::{Found, Ledger, Positions};
use super::{
    Chain, MAX_QUEUE_SIZE, MAX_SAMPLES, QueueError, QueueSetup, Running, area, needs_event, samples,
};
use crate::area::Area;
use crate::crash::Point;
use crate::guest::GuestMemory;
use crate::sync::{Ordering, full_fence};

use self::fields::*;

/// The device side of one split virtqueue.
#[derive(Debug)]
pub(super) struct Split {
    setup: QueueSetup,
    areas: Areas,
    /// The entry of the available ring to take next; counts chains modulo 65536.
    next_available: Running,
    /// The available index as it was read last: up to here entries may be taken without looking again.
    seen_available: Running,
    /// The entry of the used ring to fill next; counts chains modulo 65536.
    next_used: Running,
    /// The used index as the driver can see it.
    published_used: Running,
    /// Whether anything was published: before, the driver's wish for an interrupt has no span to be measured against.
    has_published: bool,
    /// What is in the used ring's flags.
    used_flags: u16,
    fresh: bool,
    in_flight: InFlight,
    ledger: Option<Ledger>,
    /// Whether marks wait for [`mark_out`](Self::mark_out).
    defers_marks: bool,
    /// So many of the chains that were taken last may be out without a mark.
    unmarked: u16,
    /// Chains with a mark that are in the used ring and not published.
    marked_back: Vec<u16>,
}

impl Split {
    pub(super) fn new(
        setup: QueueSetup,
        memory: &GuestMemory,
        ledger: Option<Ledger>,
    ) -> Result<Split, QueueError> {
        let size = setup.size;
        if !size.is_power_of_two() || size > MAX_QUEUE_SIZE {
            return Err(QueueError::Size { size });
        }
        let base = setup.ring_base;
        let base = u16::try_from(base).map_err(|_| QueueError::Base { base, size })?;
        let areas = Areas::new(&setup, memory)?;
        let used = areas.used.load_u16(USED_INDEX, Ordering::Acquire);
        let mut split = Split {
            setup,
            // Not at the base: chains that were taken before and not given back are with no one now. A VMM whose back end has died does not know
            // how many, and Cloud Hypervisor says that all were taken.
            next_available: Running::new(used),
            seen_available: Running::new(used),
            next_used: Running::new(used),
            published_used: Running::new(used),
            has_published: false,
            used_flags: areas.used.load_u16(USED_FLAGS, Ordering::Relaxed) & NO_NOTIFY,
            fresh: base == 0 && used == 0,
            in_flight: InFlight::new(size),
            areas,
            ledger: None,
            defers_marks: false,
            unmarked: 0,
            marked_back: Vec::new(),
        };
        if let Some(mut ledger) = ledger {
            match ledger.found() {
                Found::Nothing => ledger.begin(size, used),
                Found::Predecessors => split.take_over(&mut ledger)?,
                Found::Since(positions) => split.take_over_since(&mut ledger, positions)?,
            }
            split.ledger = Some(ledger);
        }
        Ok(split)
    }

    /// Goes on where another process has left the queue, and gives back what was out.
    fn take_over(&mut self, ledger: &mut Ledger) -> Result<(), QueueError> {
        let (size, used) = (self.setup.size, self.next_used);
        let out = ledger.recover(size, used.get(), |index| self.used_head(index))?;
        self.go_on_at(used.get().wrapping_add(out.len() as u16));
        for head in out {
            // Which entry of the available ring it had is needed to rewind it, which it is not.
            self.in_flight.insert(head, 0, Out::Marked);
            self.complete(head, 0);
        }
        Ok(())
    }

    /// Goes on at these positions, where another process was before it did what it never published or what is to be published now.
    fn take_over_since(
        &mut self,
        ledger: &mut Ledger,
        positions: Positions,
    ) -> Result<(), QueueError> {
        let (size, used) = (self.setup.size, self.next_used.get());
        let Positions { available, .. } = positions;
        let mut out = ledger.recover(size, used, |index| self.used_head(index))?;
        let unfit = QueueError::Ledger { size, noted: size };
        let unpublished = positions.used.wrapping_sub(used);
        if unpublished > size {
            return Err(unfit);
        }
        // Given back before: to be published.
        let given_back: Vec<u16> = (0..unpublished)
            .filter_map(|step| u16::try_from(self.used_head(used.wrapping_add(step))).ok())
            .filter(|head| *head < size)
            .collect();
        // Taken since: to be taken again.
        self.go_on_at(available);
        let ahead = self.load_available_index()?.get().wrapping_sub(available);
        let again: Vec<u16> = (0..ahead)
            .map(|step| self.available_head(self.slot(Running::new(available.wrapping_add(step)))))
            .collect();
        out.retain(|head| {
            let is_taken_again = again.contains(head);
            if is_taken_again {
                ledger.clear(*head);
            }
            !is_taken_again && !given_back.contains(head)
        });
        if out.len() != usize::from(available.wrapping_sub(positions.used)) {
            return Err(unfit);
        }
        self.next_used = Running::new(positions.used);
        self.marked_back = given_back;
        for head in out {
            self.in_flight.insert(head, 0, Out::Marked);
        }
        Ok(())
    }

    fn go_on_at(&mut self, available: u16) {
        self.next_available = Running::new(available);
        self.seen_available = self.next_available;
        self.fresh = available == 0 && self.next_used.get() == 0;
    }

    /// How far the queue has come, as if the last so many chains that were taken had not been.
    pub(super) fn positions(&self, untaken: u16) -> Positions {
        Positions {
            available: self.next_available.get().wrapping_sub(untaken),
            used: self.next_used.get(),
        }
    }

    /// The chains that a predecessor took and that are out, in the order in which it took them.
    pub(super) fn out(&self) -> Vec<u16> {
        let ledger = self.ledger.as_ref();
        let mut out = ledger.map_or_else(Vec::new, |ledger| ledger.out(self.setup.size));
        out.retain(|head| self.in_flight.contains(*head));
        out
    }

    pub(super) fn read_again(
        &self,
        memory: &GuestMemory,
        head: u16,
        chain: &mut Chain,
    ) -> Result<bool, QueueError> {
        if !self.in_flight.contains(head) {
            return Ok(false);
        }
        chain.head = head;
        let [address, word] = self.load_descriptor(head);
        let first = Descriptor::from_words(address, word);
        if !take_only(memory, chain, address, first.len, first.flags) {
            self.read_chain(memory, chain, address, word)?;
        }
        Ok(true)
    }

    fn available_head(&self, slot: usize) -> u16 {
        self.areas
            .available
            .load_u16(AVAILABLE_RING + 2 * slot, Ordering::Relaxed)
    }

    fn used_head(&self, index: u16) -> u32 {
        let element = USED_RING + 8 * self.slot(Running::new(index));
        self.areas.used.load_u32(element, Ordering::Relaxed)
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
        if self.next_available == self.seen_available {
            self.seen_available = self.load_available_index()?;
            if self.next_available == self.seen_available {
                return Ok(false);
            }
        }
        let slot = self.slot(self.next_available);
        let head = self.available_head(slot);
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
        let [address, word] = self.load_descriptor(head);
        let first = Descriptor::from_words(address, word);
        if !take_only(memory, chain, address, first.len, first.flags) {
            self.read_chain(memory, chain, address, word)?;
        }
        match &mut self.ledger {
            Some(ledger) if !self.defers_marks => {
                ledger.mark(head);
                self.in_flight.insert(head, slot, Out::Marked);
            }
            _ => {
                self.in_flight.insert(head, slot, Out::Unmarked);
                self.unmarked = self.setup.size.min(self.unmarked + 1);
            }
        }
        self.next_available = self.next_available.next();
        self.fresh = false;
        Ok(true)
    }

    pub(super) fn prefetch(&self, memory: &GuestMemory, ahead: u16, chains: u16) {
        let available = self
            .seen_available
            .get()
            .wrapping_sub(self.next_available.get());
        for ahead in ahead..ahead.saturating_add(chains).min(available) {
            let index = self.next_available.get().wrapping_add(ahead);
            let slot = self.slot(Running::new(index));
            let entry = AVAILABLE_RING + 2 * slot;
            let head = self.areas.available.load_u16(entry, Ordering::Relaxed);
            if head < self.setup.size {
                let [address, word] = self.load_descriptor(head);
                chain::prefetch(memory, address, word as u32, (word >> 32) as u16);
            }
        }
    }

    pub(super) fn pending(&self) -> Result<bool, QueueError> {
        Ok(self.next_available != self.seen_available
            || self.load_available_index()? != self.next_available)
    }

    pub(super) fn complete(&mut self, head: u16, written: u32) {
        match self.in_flight.remove(head) {
            Out::Unmarked => {}
            Out::Marked => self.marked_back.push(head),
            Out::Not => {
                debug_assert!(false, "chain {head} is given back and is not out");
                return;
            }
        }
        let element = USED_RING + 8 * self.slot(self.next_used);
        self.areas
            .used
            .publish_u32(Point::UsedHead, element, u32::from(head), Ordering::Relaxed);
        self.areas
            .used
            .publish_u32(Point::UsedLen, element + 4, written, Ordering::Relaxed);
        self.next_used = self.next_used.next();
    }

    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.published_used, self.next_used);
        if old == new {
            return false;
        }
        // Everything written before, the chains' bytes too, is visible to a driver that sees the new index.
        self.areas
            .used
            .publish_u16(Point::UsedIndex, USED_INDEX, new.get(), Ordering::Release);
        self.published_used = new;
        if let Some(ledger) = &self.ledger {
            for head in self.marked_back.drain(..) {
                ledger.clear(head);
            }
            ledger.set_published(new.get());
        }
        let first = !self.has_published;
        self.has_published = true;
        // Publish first, look for the driver's wish second: the driver does it the other way round.
        full_fence();
        first && self.setup.event_index || self.wants_interrupt(old, new)
    }

    /// Whether the driver wants an interrupt for what was given back between these two.
    fn wants_interrupt(&self, old: Running, new: Running) -> bool {
        let available = &self.areas.available;
        if self.setup.event_index {
            let wanted = available.load_u16(self.used_event_offset(), Ordering::Relaxed);
            needs_event(wanted, old.get(), new.get())
        } else {
            available.load_u16(AVAILABLE_FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0
        }
    }

    pub(super) fn awaits_interrupt(&self) -> bool {
        self.wants_interrupt(self.published_used, self.next_used.next())
    }

    pub(super) fn note_unseen(&self, is_unseen: bool) {
        if let Some(ledger) = &self.ledger {
            ledger.note_unseen(is_unseen);
        }
    }

    pub(super) fn defer_marks(&mut self) {
        self.defers_marks = true;
    }

    pub(super) fn mark_out(&mut self, untaken: u16) {
        let unmarked = self.unmarked;
        self.unmarked = untaken.min(unmarked);
        let Some(ledger) = &mut self.ledger else {
            return;
        };
        // Most often all others have been given back.
        if self.in_flight.unmarked() == u32::from(self.unmarked) {
            return;
        }
        let next = self.next_available.get();
        for back in (self.unmarked + 1..=unmarked).rev() {
            let index = usize::from(next.wrapping_sub(back) & (self.setup.size - 1));
            if let Some(head) = self.in_flight.mark_at(index) {
                ledger.mark(head);
            }
        }
    }

    pub(super) fn disable_notifications(&mut self) {
        // With event indices there is nothing to do: having passed the index that was asked for, the driver stays silent.
        if !self.setup.event_index {
            self.set_used_flags(NO_NOTIFY);
        }
    }

    pub(super) fn enable_notifications(&mut self) -> bool {
        if self.setup.event_index {
            self.areas.used.publish_u16(
                Point::AvailableEvent,
                self.available_event_offset(),
                self.next_available.get(),
                Ordering::Relaxed,
            );
        } else {
            self.set_used_flags(0);
        }
        full_fence();
        self.pending().unwrap_or(true)
    }

    pub(super) fn ring_base(&self) -> u32 {
        u32::from(self.next_available.get())
    }

    pub(super) fn in_flight(&self) -> u16 {
        // At most as many as the queue has entries.
        self.in_flight.count() as u16
    }

    pub(super) fn rewind(&mut self, chains: u16) {
        for _ in 0..chains {
            let last = self.next_available.previous();
            let head = self.in_flight.taken_at(self.slot(last));
            match (self.in_flight.remove(head), &self.ledger) {
                (Out::Not, _) => {
                    let last = last.get();
                    debug_assert!(false, "entry {last} is rewound and its chain is not out");
                    return;
                }
                (Out::Marked, Some(ledger)) => ledger.clear(head),
                _ => {}
            }
            self.unmarked = self.unmarked.saturating_sub(1);
            self.next_available = last;
        }
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.fresh
    }

    pub(super) fn is_blank(&self) -> bool {
        let size = usize::from(self.setup.size).min(MAX_SAMPLES);
        let Areas {
            descriptors,
            available,
            ..
        } = &self.areas;
        // The index is among the first: a driver that makes something available moves it.
        (0..2 + size).all(|word| available.load_u16(2 * word, Ordering::Relaxed) == 0)
            && (0..2 * size).all(|word| descriptors.load_u64(8 * word, Ordering::Relaxed) == 0)
    }

    pub(super) fn driver_digest(&self) -> u64 {
        let Areas {
            descriptors,
            available,
            ..
        } = &self.areas;
        let mut digest = DefaultHasher::new();
        for word in 0..2 {
            digest.write_u16(available.load_u16(2 * word, Ordering::Relaxed));
        }
        for entry in samples(self.setup.size) {
            for word in descriptors.load_pair(16 * entry, Ordering::Relaxed) {
                digest.write_u64(word);
            }
            digest.write_u16(available.load_u16(4 + 2 * entry, Ordering::Relaxed));
        }
        digest.finish()
    }

    /// Fills `chain` with the ranges of the chain that starts at `chain.head`, which is an index of the table, with this descriptor.
    // Apart, since few chains come here, and those that do not would pay for its variables.
    #[inline(never)]
    fn read_chain(
        &self,
        memory: &GuestMemory,
        chain: &mut Chain,
        address: u64,
        word: u64,
    ) -> Result<(), QueueError> {
        let (head, size) = (chain.head, self.setup.size);
        let mut reader = Reader::new(memory, chain, head);
        let (mut index, mut descriptor) = (head, Descriptor::from_words(address, word));
        // A chain with more descriptors than the table has visits one of them twice.
        for entries in 1..=size {
            reader.set_entries(entries);
            if descriptor.flags & INDIRECT != 0 {
                if !self.setup.indirect {
                    return Err(QueueError::IndirectNotNegotiated { head, index });
                }
                if descriptor.flags & NEXT != 0 {
                    return Err(QueueError::IndirectWithNext { head, index });
                }
                return reader.add_table(index, descriptor, TableOrder::Linked);
            }
            reader.add(index, descriptor)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            let next = descriptor.next();
            if next >= size {
                return Err(QueueError::NextOutOfRange {
                    head,
                    index,
                    next,
                    entries: size,
                });
            }
            index = next;
            let [address, word] = self.load_descriptor(index);
            descriptor = Descriptor::from_words(address, word);
        }
        Err(QueueError::Loop {
            head,
            entries: size,
        })
    }

    #[inline]
    fn load_descriptor(&self, index: u16) -> [u64; 2] {
        let offset = DESCRIPTOR_LEN * usize::from(index);
        self.areas.descriptors.load_pair(offset, Ordering::Relaxed)
    }

    fn load_available_index(&self) -> Result<Running, QueueError> {
        // Acquire: what the driver wrote before it published this index is visible after.
        let index = self
            .areas
            .available
            .load_u16(AVAILABLE_INDEX, Ordering::Acquire);
        let ahead = index.wrapping_sub(self.next_available.get());
        // Entries that were rewound may have been seen, and counted, already; hence no more than the size altogether.
        if ahead > self.setup.size {
            let (from, size) = (self.next_available.get(), self.setup.size);
            return Err(QueueError::AvailableIndexJump {
                from,
                to: index,
                size,
            });
        }
        Ok(Running::new(index))
    }

    fn set_used_flags(&mut self, flags: u16) {
        if self.used_flags != flags {
            self.used_flags = flags;
            self.areas
                .used
                .publish_u16(Point::UsedFlags, USED_FLAGS, flags, Ordering::Relaxed);
        }
    }

    /// The place in a ring that a running index stands for. The size is a power of two.
    #[inline]
    fn slot(&self, index: Running) -> usize {
        usize::from(index.get() & (self.setup.size - 1))
    }

    fn used_event_offset(&self) -> usize {
        AVAILABLE_RING + 2 * usize::from(self.setup.size)
    }

    fn available_event_offset(&self) -> usize {
        USED_RING + 8 * usize::from(self.setup.size)
    }
}

/// Where things are, for both sides.
/// Fields of the rings and their values.
pub mod fields {
    /// In the available ring (virtio 1.2, section 2.7.6), in bytes: the flags.
    pub const AVAILABLE_FLAGS: usize = 0;
    /// Likewise the index.
    pub const AVAILABLE_INDEX: usize = 2;
    /// Likewise the heads.
    pub const AVAILABLE_RING: usize = 4;
    /// The driver wants no interrupts.
    pub const NO_INTERRUPT: u16 = 1;

    /// In the used ring (virtio 1.2, section 2.7.8), in bytes: the flags.
    pub const USED_FLAGS: usize = 0;
    /// Likewise the index.
    pub const USED_INDEX: usize = 2;
    /// Likewise the chains.
    pub const USED_RING: usize = 4;
    /// The device wants no notifications.
    pub const NO_NOTIFY: u16 = 1;
}

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
        Ok(Areas {
            descriptors: area(memory, "descriptor table", setup.descriptors, 16 * size, 16)?,
            available: area(
                memory,
                "available ring",
                setup.available,
                AVAILABLE_RING + 2 * size + event,
                2,
            )?,
            used: area(
                memory,
                "used ring",
                setup.used,
                USED_RING + 8 * size + event,
                4,
            )?,
        })
    }
}
