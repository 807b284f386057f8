use std::sync::Arc;

use super::Arena;
use super::queue::{Full, RawDescriptor};
use super::tables::{TableOrder, Tables};
use guestmem::area::Area;
use guestmem::guest::Range;
use guestmem::queue::split_fields::*;
use guestmem::queue::{
    DESCRIPTOR_LEN, FIRST_SPLIT_BASE, INDIRECT, NEXT, QueueSetup, WRITE, needs_event,
};
use guestmem::sync::{Ordering, full_fence};

/// The driver's side of one split virtqueue.
#[derive(Debug)]
pub(crate) struct SplitDriver {
    setup: QueueSetup,
    descriptors: Area,
    available: Area,
    used: Area,
    /// Free descriptors; the last is taken first.
    free: Vec<u16>,
    /// By head.
    chains: Vec<Option<Added>>,
    /// By head.
    tables: Tables,
    /// The available index, with what is not yet published.
    next_available: u16,
    published_available: u16,
    /// The used index up to which chains were taken back.
    next_used: u16,
    interrupts: bool,
}

/// A chain that the device may have.
#[derive(Debug)]
struct Added {
    token: u64,
    /// Its descriptors in the queue's table, the head first.
    descriptors: Vec<u16>,
}

impl SplitDriver {
    pub(crate) fn new(
        arena: Arc<Arena>,
        guest_base: u64,
        size: u16,
        event_index: bool,
        indirect: bool,
    ) -> SplitDriver {
        assert!(size.is_power_of_two(), "a queue of {size}");
        let entries = usize::from(size);
        let lens = [
            DESCRIPTOR_LEN * entries,
            AVAILABLE_RING + 2 * entries + 2,
            USED_RING + 8 * entries + 2,
        ];
        let [descriptors, available, used] = [(lens[0], 16), (lens[1], 2), (lens[2], 4)]
            .map(|(len, align)| arena.allocate(len, align));
        let base = arena.base();
        SplitDriver {
            setup: QueueSetup {
                size,
                descriptors: base + descriptors as u64,
                available: base + available as u64,
                used: base + used as u64,
                ring_base: FIRST_SPLIT_BASE,
                event_index,
                indirect,
                packed: false,
            },
            descriptors: arena.area(descriptors, lens[0]),
            available: arena.area(available, lens[1]),
            used: arena.area(used, lens[2]),
            free: (0..size).rev().collect(),
            chains: (0..size).map(|_| None).collect(),
            tables: Tables::new(arena, guest_base, size),
            next_available: 0,
            published_available: 0,
            next_used: 0,
            interrupts: true,
        }
    }

    pub(crate) fn setup(&self) -> QueueSetup {
        self.setup
    }

    pub(crate) fn start_at(&mut self, index: u16) {
        assert_eq!(
            self.free.len(),
            usize::from(self.setup.size),
            "the queue is in use"
        );
        self.next_available = index;
        self.published_available = index;
        self.next_used = index;
        self.setup.ring_base = u32::from(index);
        self.set_available_index(index);
        self.set_used_index(index);
        self.set_used_event(index);
        self.used
            .store_u16(self.available_event_offset(), index, Ordering::Relaxed);
    }

    pub(crate) fn add(
        &mut self,
        readable: &[Range],
        writable: &[Range],
        token: u64,
    ) -> Result<(), Full> {
        let count = readable.len() + writable.len();
        let readable = readable.iter().map(|range| (range, 0));
        let writable = writable.iter().map(|range| (range, WRITE));
        let mut parts = readable
            .chain(writable)
            .map(|(range, flags)| (*range, flags));
        let indirect = self.setup.indirect && count > 1;
        let needed = if indirect { 1 } else { count };
        if needed == 0 || needed > self.free.len() {
            return Err(Full);
        }
        let descriptors: Vec<u16> = self.free.drain(self.free.len() - needed..).rev().collect();
        let head = descriptors[0];
        if indirect {
            let table = self.tables.write(head, parts, count, TableOrder::Linked);
            let descriptor = RawDescriptor {
                address: table.address,
                len: table.len,
                flags: INDIRECT,
                next: 0,
            };
            self.write_descriptor(head, descriptor);
        } else {
            for (position, index) in descriptors.iter().enumerate() {
                let (range, flags) = parts.next().expect("as many parts as descriptors");
                let next = descriptors.get(position + 1).copied();
                let flags = flags | if next.is_some() { NEXT } else { 0 };
                let next = next.unwrap_or(0);
                self.write_descriptor(
                    *index,
                    RawDescriptor {
                        address: range.address,
                        len: range.len,
                        flags,
                        next,
                    },
                );
            }
        }
        self.chains[usize::from(head)] = Some(Added { token, descriptors });
        self.set_available_entry(self.next_available, head);
        self.next_available = self.next_available.wrapping_add(1);
        Ok(())
    }

    pub(crate) fn kick_needed(&mut self) -> bool {
        let (old, new) = (self.published_available, self.next_available);
        if old == new {
            return false;
        }
        self.available
            .store_u16(AVAILABLE_INDEX, new, Ordering::Release);
        self.published_available = new;
        full_fence();
        if self.setup.event_index {
            needs_event(self.available_event(), old, new)
        } else {
            self.used_flags() & NO_NOTIFY == 0
        }
    }

    pub(crate) fn take_used(&mut self) -> Option<(u64, u32)> {
        let ahead = self.used_index().wrapping_sub(self.next_used);
        if ahead == 0 {
            return None;
        }
        assert!(
            ahead <= self.setup.size,
            "{ahead} chains came back of a queue of {}",
            self.setup.size
        );
        let (id, written) = self.used_entry(self.next_used);
        let slot = self.chains.get_mut(id as usize).and_then(Option::take);
        let added = slot.unwrap_or_else(|| panic!("chain {id} came back and was not out"));
        self.free.extend(added.descriptors.iter().rev());
        self.next_used = self.next_used.wrapping_add(1);
        if self.interrupts && self.setup.event_index {
            self.set_used_event(self.next_used);
            full_fence();
        }
        Some((added.token, written))
    }

    pub(crate) fn enable_interrupts(&mut self) -> bool {
        self.interrupts = true;
        self.set_used_event(self.next_used);
        self.set_available_flags(0);
        full_fence();
        self.used_index() != self.next_used
    }

    pub(crate) fn disable_interrupts(&mut self) {
        self.interrupts = false;
        if self.setup.event_index {
            // As far away as can be.
            self.set_used_event(self.next_used.wrapping_sub(1));
        } else {
            self.set_available_flags(NO_INTERRUPT);
        }
    }

    pub(crate) fn free_descriptors(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn set_available_flags(&self, flags: u16) {
        self.available
            .store_u16(AVAILABLE_FLAGS, flags, Ordering::Relaxed);
    }

    pub(crate) fn available_index(&self) -> u16 {
        self.available.load_u16(AVAILABLE_INDEX, Ordering::Relaxed)
    }

    pub(crate) fn set_available_index(&self, index: u16) {
        self.available
            .store_u16(AVAILABLE_INDEX, index, Ordering::Release);
    }

    pub(crate) fn set_available_entry(&self, index: u16, head: u16) {
        self.available.store_u16(
            AVAILABLE_RING + 2 * self.slot(index),
            head,
            Ordering::Relaxed,
        );
    }

    pub(crate) fn publish_head(&mut self, head: u16) {
        self.set_available_entry(self.next_available, head);
        self.next_available = self.next_available.wrapping_add(1);
        self.published_available = self.next_available;
        self.set_available_index(self.next_available);
    }

    pub(crate) fn set_used_event(&self, index: u16) {
        self.available.store_u16(
            AVAILABLE_RING + 2 * usize::from(self.setup.size),
            index,
            Ordering::Relaxed,
        );
    }

    pub(crate) fn write_descriptor(&self, index: u16, descriptor: RawDescriptor) {
        let offset = DESCRIPTOR_LEN * usize::from(index);
        let [address, rest] = descriptor.words();
        self.descriptors
            .store_u64(offset, address, Ordering::Relaxed);
        self.descriptors
            .store_u64(offset + 8, rest, Ordering::Relaxed);
    }

    pub(crate) fn used_flags(&self) -> u16 {
        self.used.load_u16(USED_FLAGS, Ordering::Relaxed)
    }

    pub(crate) fn used_index(&self) -> u16 {
        self.used.load_u16(USED_INDEX, Ordering::Acquire)
    }

    pub(crate) fn set_used_index(&self, index: u16) {
        self.used.store_u16(USED_INDEX, index, Ordering::Release);
    }

    pub(crate) fn used_entry(&self, index: u16) -> (u32, u32) {
        let offset = USED_RING + 8 * self.slot(index);
        (
            self.used.load_u32(offset, Ordering::Relaxed),
            self.used.load_u32(offset + 4, Ordering::Relaxed),
        )
    }

    pub(crate) fn available_event(&self) -> u16 {
        self.used
            .load_u16(self.available_event_offset(), Ordering::Relaxed)
    }

    fn available_event_offset(&self) -> usize {
        USED_RING + 8 * usize::from(self.setup.size)
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.setup.size - 1))
    }
}
