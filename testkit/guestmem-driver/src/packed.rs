use std::sync::Arc;

use super::Arena;
use super::queue::{Full, RawDescriptor};
use super::tables::{TableOrder, Tables};
use guestmem::area::Area;
use guestmem::guest::Range;
use guestmem::queue::packed_fields::*;
use guestmem::queue::{
    DESCRIPTOR_LEN, FIRST_PACKED_BASE, INDIRECT, MAX_QUEUE_SIZE, NEXT, QueueSetup, WRITE,
};
use guestmem::sync::{Ordering, full_fence};

/// The driver's side of one packed virtqueue.
#[derive(Debug)]
pub(crate) struct PackedDriver {
    setup: QueueSetup,
    descriptors: Area,
    driver_event: Area,
    device_event: Area,
    /// Identifiers that no chain has; the last is taken first.
    identifiers: Vec<u16>,
    /// By identifier: the chain that the device may have. Without descriptors it has none.
    chains: Vec<Added>,
    /// By identifier.
    tables: Tables,
    /// Descriptors that the device does not have.
    free: u16,
    next_available: Position,
    /// The first descriptor that was added since the last publication, and its second word: it becomes visible last.
    held_back: Option<(Position, u64)>,
    next_used: Position,
    /// Chains that came back, modulo 65536.
    taken: u16,
    interrupts: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Added {
    token: u64,
    descriptors: u16,
}

impl PackedDriver {
    pub(crate) fn new(
        arena: Arc<Arena>,
        guest_base: u64,
        size: u16,
        event_index: bool,
        indirect: bool,
    ) -> PackedDriver {
        assert!(size > 0 && size <= MAX_QUEUE_SIZE, "a queue of {size}");
        let entries = usize::from(size);
        let len = DESCRIPTOR_LEN * entries;
        let descriptors = arena.allocate(len, 16);
        let [driver_event, device_event] = [(); 2].map(|()| arena.allocate(EVENT_LEN, 4));
        let base = arena.base();
        let first = Position::from_bits(FIRST_PACKED_BASE as u16);
        PackedDriver {
            setup: QueueSetup {
                size,
                descriptors: base + descriptors as u64,
                available: base + driver_event as u64,
                used: base + device_event as u64,
                ring_base: FIRST_PACKED_BASE,
                event_index,
                indirect,
                packed: true,
            },
            descriptors: arena.area(descriptors, len),
            driver_event: arena.area(driver_event, EVENT_LEN),
            device_event: arena.area(device_event, EVENT_LEN),
            identifiers: (0..size).rev().collect(),
            chains: vec![Added::default(); entries],
            tables: Tables::new(arena, guest_base, size),
            free: size,
            next_available: first,
            held_back: None,
            next_used: first,
            taken: 0,
            interrupts: true,
        }
    }

    pub(crate) fn setup(&self) -> QueueSetup {
        self.setup
    }

    pub(crate) fn start_at(&mut self, index: u16) {
        let size = self.setup.size;
        assert_eq!(self.free, size, "the queue is in use");
        let position = Position::new(index % size, (index / size) % 2 == 0);
        self.next_available = position;
        self.next_used = position;
        let bits = u32::from(position.to_bits());
        self.setup.ring_base = bits | bits << 16;
        // What is behind was used in this round, what lies ahead in the last one.
        for index in 0..size {
            let round = Position::new(index, position.wrap() == (index < position.index()));
            let offset = DESCRIPTOR_LEN * usize::from(index) + 8;
            self.descriptors
                .store_u64(offset, round.used_flags(), Ordering::Relaxed);
        }
        self.wish_for_interrupt();
        if self.setup.event_index {
            let event = EVENT_AT << EVENT_FLAGS_SHIFT | bits;
            self.device_event.store_u32(0, event, Ordering::Relaxed);
        }
    }

    pub(crate) fn add(
        &mut self,
        readable: &[Range],
        writable: &[Range],
        token: u64,
    ) -> Result<(), Full> {
        let count = readable.len() + writable.len();
        let indirect = self.setup.indirect && count > 1;
        let needed = if indirect { 1 } else { count };
        if needed == 0 || needed > usize::from(self.free) {
            return Err(Full);
        }
        let needed = needed as u16;
        // There are as many identifiers as descriptors, and every chain has a descriptor at least.
        let identifier = self.identifiers.pop().expect("as many as descriptors");
        self.chains[usize::from(identifier)] = Added {
            token,
            descriptors: needed,
        };
        self.free -= needed;
        let readable = readable.iter().map(|range| (*range, 0));
        let writable = writable.iter().map(|range| (*range, WRITE));
        let parts = readable.chain(writable);
        if indirect {
            let table = self
                .tables
                .write(identifier, parts, count, TableOrder::Sequential);
            self.write_next(table, INDIRECT, identifier);
            return Ok(());
        }
        // From the last one to the first would do as well: the device reads the first alone, and that one is held back or lies behind one
        // that is.
        for (position, (range, flags)) in parts.enumerate() {
            let next = if position + 1 < count { NEXT } else { 0 };
            self.write_next(range, flags | next, identifier);
        }
        Ok(())
    }

    pub(crate) fn kick_needed(&mut self) -> bool {
        let Some((old, word)) = self.held_back.take() else {
            return false;
        };
        self.store_word(old.index(), word, Ordering::Release);
        full_fence();
        let event = self.device_event();
        match event >> EVENT_FLAGS_SHIFT & EVENT_FLAGS {
            EVENT_NEVER => false,
            EVENT_AT if self.setup.event_index => {
                is_passed(event as u16, old, self.next_available, self.setup.size)
            }
            _ => true,
        }
    }

    pub(crate) fn take_used(&mut self) -> Option<(u64, u32)> {
        let word = self.load_word(self.next_used.index(), Ordering::Acquire);
        if !is_used(self.next_used, word) {
            return None;
        }
        let identifier = (word >> IDENTIFIER_SHIFT) as u16;
        let slot = self.chains.get_mut(usize::from(identifier));
        let added = slot.map(std::mem::take).unwrap_or_default();
        assert!(
            added.descriptors > 0,
            "chain {identifier} came back and was not out"
        );
        self.identifiers.push(identifier);
        self.taken = self.taken.wrapping_add(1);
        self.free += added.descriptors;
        self.next_used = self.next_used.plus(added.descriptors, self.setup.size);
        if self.interrupts && self.setup.event_index {
            self.wish_for_interrupt();
            full_fence();
        }
        let has_data = word & u64::from(WRITE) << FLAGS_SHIFT != 0;
        Some((added.token, if has_data { word as u32 } else { 0 }))
    }

    pub(crate) fn enable_interrupts(&mut self) -> bool {
        self.interrupts = true;
        self.wish_for_interrupt();
        full_fence();
        is_used(
            self.next_used,
            self.load_word(self.next_used.index(), Ordering::Acquire),
        )
    }

    pub(crate) fn disable_interrupts(&mut self) {
        self.interrupts = false;
        self.set_driver_event(EVENT_NEVER << EVENT_FLAGS_SHIFT);
    }

    pub(crate) fn used_index(&self) -> u16 {
        let (mut position, mut count) = (self.next_used, self.taken);
        loop {
            let word = self.load_word(position.index(), Ordering::Acquire);
            let chain = self
                .chains
                .get((word >> IDENTIFIER_SHIFT) as usize & 0xffff);
            let descriptors = chain.map_or(0, |chain| chain.descriptors);
            if !is_used(position, word) || descriptors == 0 {
                return count;
            }
            position = position.plus(descriptors, self.setup.size);
            count = count.wrapping_add(1);
        }
    }

    pub(crate) fn free_descriptors(&self) -> usize {
        usize::from(self.free)
    }

    pub(crate) fn write_descriptor(&self, index: u16, descriptor: RawDescriptor) {
        let [address, word] = descriptor.packed_words();
        let offset = DESCRIPTOR_LEN * usize::from(index);
        self.descriptors
            .store_u64(offset, address, Ordering::Relaxed);
        // Release: the device takes it as available, once it is.
        self.store_word(index, word, Ordering::Release);
    }

    pub(crate) fn descriptor(&self, index: u16) -> RawDescriptor {
        let word = self.load_word(index, Ordering::Acquire);
        let offset = DESCRIPTOR_LEN * usize::from(index);
        let address = self.descriptors.load_u64(offset, Ordering::Relaxed);
        RawDescriptor::from_packed_words([address, word])
    }

    pub(crate) fn set_driver_event(&self, event: u32) {
        self.driver_event.store_u32(0, event, Ordering::Relaxed);
    }

    pub(crate) fn driver_event(&self) -> u32 {
        self.driver_event.load_u32(0, Ordering::Relaxed)
    }

    pub(crate) fn device_event(&self) -> u32 {
        self.device_event.load_u32(0, Ordering::Relaxed)
    }

    /// Makes the next descriptor of the ring available, or holds it back.
    #[inline]
    fn write_next(&mut self, range: Range, flags: u16, identifier: u16) {
        let position = self.next_available;
        self.next_available = position.plus(1, self.setup.size);
        let offset = DESCRIPTOR_LEN * usize::from(position.index());
        self.descriptors
            .store_u64(offset, range.address, Ordering::Relaxed);
        let word = u64::from(range.len)
            | u64::from(identifier) << IDENTIFIER_SHIFT
            | u64::from(flags) << FLAGS_SHIFT
            | position.available_flags();
        if self.held_back.is_none() {
            self.held_back = Some((position, word));
        } else {
            self.store_word(position.index(), word, Ordering::Relaxed);
        }
    }

    fn wish_for_interrupt(&self) {
        let event = if self.setup.event_index {
            EVENT_AT << EVENT_FLAGS_SHIFT | u32::from(self.next_used.to_bits())
        } else {
            EVENT_ALWAYS << EVENT_FLAGS_SHIFT
        };
        self.set_driver_event(event);
    }

    #[inline]
    fn load_word(&self, index: u16, ordering: Ordering) -> u64 {
        let offset = DESCRIPTOR_LEN * usize::from(index) + 8;
        self.descriptors.load_u64(offset, ordering)
    }

    #[inline]
    fn store_word(&self, index: u16, word: u64, ordering: Ordering) {
        let offset = DESCRIPTOR_LEN * usize::from(index) + 8;
        self.descriptors.store_u64(offset, word, ordering);
    }
}

#[inline]
fn is_used(position: Position, word: u64) -> bool {
    word & (AVAILABLE | USED) == position.used_flags()
}
