//! What is particular to packed rings: clauses of virtio 1.2, section 2.8, each over every case within its bounds.

use super::clauses::{sequences, split};
use super::*;

mod hostile;

const NEXT: u16 = RawDescriptor::NEXT;
const WRITE: u16 = RawDescriptor::WRITE;
const INDIRECT: u16 = RawDescriptor::INDIRECT;
const AVAILABLE: u16 = RawDescriptor::AVAILABLE;
const USED: u16 = RawDescriptor::USED;

/// A pair whose positions are so many descriptors on; twice the size is once round with either counter.
fn at(start: u16, size: u16, indirect: bool) -> Pair {
    Pair::of(DriverQueue::packed, start, size, true, indirect)
}

fn position(place: u16, size: u16) -> Position {
    Position::new(place % size, place / size % 2 == 0)
}

/// The bits of an available or a used descriptor at this place.
fn flags_at(place: u16, size: u16, used: bool) -> u16 {
    match (position(place, size).wrap(), used) {
        (true, true) => AVAILABLE | USED,
        (false, true) => 0,
        (true, false) => AVAILABLE,
        (false, false) => USED,
    }
}

/// Descriptor number `index` of a test: a stretch of its own, with a length and an identifier of its own.
fn stretch(index: u16, flags: u16) -> RawDescriptor {
    RawDescriptor {
        address: BASE + 0x8000 + 0x100 * u64::from(index),
        len: 1 + u32::from(index),
        flags,
        next: 100 + index,
    }
}

impl Pair {
    /// Makes this chain available from the place on that the device reads next, which is `place` descriptors behind the beginning.
    fn offer_at(&self, place: u16, chain: &[RawDescriptor]) {
        let size = self.queue.size();
        for (count, descriptor) in chain.iter().enumerate().rev() {
            let place = place + count as u16;
            let flags = descriptor.flags | flags_at(place, size, false);
            let descriptor = RawDescriptor {
                flags,
                ..*descriptor
            };
            self.driver.write_descriptor(place % size, descriptor);
        }
    }

    fn refused(&mut self) -> QueueError {
        let before = (self.queue.ring_base(), self.queue.in_flight());
        let error = self.queue.pop(&mut self.chain).unwrap_err();
        assert_eq!(
            (self.queue.ring_base(), self.queue.in_flight()),
            before,
            "nothing was taken"
        );
        assert_eq!(
            self.queue.pop(&mut self.chain),
            Err(error),
            "and it stays so"
        );
        error
    }
}

/// A descriptor is available if AVAIL is the driver's wrap counter and USED is not; whatever the other flags are.
#[test]
fn spec_2_8_1_two_flags_and_a_counter_say_whose_a_descriptor_is() {
    for size in [1, 3] {
        for place in 0..2 * size {
            for (flags, other) in [0, AVAILABLE, USED, AVAILABLE | USED]
                .into_iter()
                .flat_map(|flags| [(flags, 0), (flags, WRITE), (flags, 0x7f78)])
            {
                let mut pair = at(place, size, false);
                pair.driver
                    .write_descriptor(place % size, stretch(0, flags | other));
                let wrap = position(place, size).wrap();
                let expected = (flags & AVAILABLE != 0) == wrap && (flags & USED != 0) != wrap;
                assert_eq!(pair.queue.pending(), Ok(expected));
                assert_eq!(pair.queue.enable_notifications(), expected);
                assert_eq!(pair.pop().is_some(), expected);
            }
        }
    }
}

/// A chain goes on in the next place of the ring, also round its end, as long as NEXT is set; its identifier is that of its last descriptor;
/// writable elements come after readable ones (2.8.17).
///
/// Every ring of four with each descriptor readable or writable, with NEXT or without, with bytes or without, from every place.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_8_6_chains_are_followed_round_the_ring() {
    let size = 4_u16;
    for place in 0..2 * size {
        let mut pair = at(place, size, false);
        for choice in sequences(8, 4) {
            let ring: Vec<RawDescriptor> = (0..size)
                .map(|index| {
                    let kind = choice[usize::from(index)];
                    let flags = if kind & 1 != 0 { NEXT } else { 0 };
                    let writable = if kind & 2 != 0 { WRITE } else { 0 };
                    let mut descriptor = stretch(index, flags | writable);
                    descriptor.len *= (kind >> 2) as u32;
                    descriptor
                })
                .collect();
            pair.offer_at(place, &ring);
            let end = ring
                .iter()
                .position(|descriptor| descriptor.flags & NEXT == 0);
            let expected = end.and_then(|end| Some((end, split(&ring[..=end])?)));
            match (pair.queue.pop(&mut pair.chain), expected) {
                (Ok(true), Some((end, (readable, writable)))) => {
                    assert_eq!(
                        (&pair.chain.readable, &pair.chain.writable),
                        (&readable, &writable)
                    );
                    assert_eq!(
                        (pair.chain.head, pair.chain.entries),
                        (100 + end as u16, 1 + end as u16)
                    );
                    let taken = position(place + 1 + end as u16, size).to_bits();
                    assert_eq!(pair.queue.ring_base() as u16, taken);
                    pair.queue.rewind(1);
                }
                (Err(_), None) => {}
                (found, expected) => panic!("{found:?} where {expected:?} was expected"),
            }
            assert_eq!(
                pair.queue.ring_base() as u16,
                position(place, size).to_bits()
            );
        }
    }
}

/// An indirect table is used from its beginning to its end; of its descriptors' flags only WRITE counts, and their identifiers do not.
///
/// Every table of three whose descriptors have any of the flags that mean something elsewhere, and every length of it around one to three.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_8_7_indirect_tables_are_used_in_order() {
    let mut pair = at(3, 4, true);
    let table = pair.arena.allocate(64, 1) + 1;
    for choice in sequences(8, 3) {
        let inner: Vec<RawDescriptor> = choice
            .iter()
            .enumerate()
            .map(|(index, flags)| {
                stretch(
                    index as u16,
                    (*flags as u16) | (0x8080 * (index as u16 % 2)),
                )
            })
            .collect();
        for (index, descriptor) in inner.iter().enumerate() {
            pair.arena
                .write(table + 16 * index, &descriptor.to_packed_bytes());
        }
        for (len, ignored) in [0, 1, 15, 16, 17, 32, 33, 47, 48]
            .into_iter()
            .flat_map(|len| [(len, 0), (len, WRITE)])
        {
            let outer = RawDescriptor {
                address: BASE + table as u64,
                len,
                flags: INDIRECT | ignored,
                next: 7,
            };
            pair.offer_at(3, &[outer]);
            let whole = len > 0 && len % 16 == 0;
            let expected = split(&inner[..len as usize / 16]).filter(|_| whole);
            match (pair.queue.pop(&mut pair.chain), expected) {
                (Ok(true), Some((readable, writable))) => {
                    assert_eq!(
                        (&pair.chain.readable, &pair.chain.writable),
                        (&readable, &writable)
                    );
                    assert_eq!((pair.chain.head, pair.chain.entries), (7, 1));
                    pair.queue.rewind(1);
                }
                (Err(_), None) => {}
                (found, expected) => panic!("{found:?} where {expected:?} was expected"),
            }
        }
    }
}

/// A table is for drivers with it, and the only descriptor of its chain (2.8.19).
#[test]
fn spec_2_8_19_an_indirect_descriptor_stands_alone() {
    let outer = |flags| RawDescriptor {
        address: BASE + 0x4000,
        len: 16,
        flags: INDIRECT | flags,
        next: 5,
    };
    let mut pair = at(0, 4, false);
    pair.offer_at(0, &[outer(0)]);
    assert_eq!(
        pair.refused(),
        QueueError::IndirectNotNegotiated { head: 0, index: 0 }
    );
    let mut pair = at(2, 4, true);
    pair.offer_at(2, &[outer(NEXT), stretch(0, 0)]);
    assert_eq!(
        pair.refused(),
        QueueError::IndirectWithNext { head: 2, index: 2 }
    );
    pair.offer_at(2, &[stretch(0, NEXT), stretch(1, NEXT), outer(0)]);
    assert_eq!(
        pair.refused(),
        QueueError::IndirectNotAlone { head: 2, index: 0 }
    );
    pair.offer_at(2, &[outer(0)]);
    assert_eq!(pair.pop(), Some(5));
}

/// The device writes one used descriptor for each chain, with its identifier, the number of bytes, and WRITE if there are any (2.8.3, 2.8.4); the next
/// one goes as many places further on as the chain had descriptors.
///
/// Chains of one to three descriptors, given back in every order, from every place of a ring of six.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_8_4_used_descriptors_say_what_came_back() {
    let (size, lens) = (6, [2, 1, 3_u16]);
    for (place, order) in (0..2 * size).flat_map(|place| {
        [
            [0, 1, 2],
            [0, 2, 1],
            [1, 0, 2],
            [1, 2, 0],
            [2, 0, 1],
            [2, 1, 0],
        ]
        .map(|order| (place, order))
    }) {
        let mut pair = at(place, size, false);
        let mut end = place;
        for (chain, len) in lens.into_iter().enumerate() {
            let descriptors: Vec<RawDescriptor> = (1..=len)
                .map(|count| RawDescriptor {
                    next: 60_000 + chain as u16,
                    ..stretch(count, if count < len { NEXT } else { 0 })
                })
                .collect();
            pair.offer_at(end, &descriptors);
            end += len;
            assert_eq!(pair.pop(), Some(60_000 + chain as u16));
        }
        let before: Vec<_> = (0..size)
            .map(|index| pair.driver.packed_descriptor(index))
            .collect();
        let mut used = place;
        for (count, chain) in order.into_iter().enumerate() {
            let written = [0, 1, u32::MAX][count];
            pair.queue.complete(60_000 + chain as u16, written);
            if count == 0 {
                let first = pair.driver.packed_descriptor(place % size);
                assert_eq!(
                    first,
                    before[usize::from(place % size)],
                    "it is not published yet"
                );
            }
            used += lens[chain];
        }
        pair.queue.publish();
        let bits = u32::from(position(used, size).to_bits());
        assert_eq!(pair.queue.ring_base(), bits | bits << 16);
        used = place;
        for (count, chain) in order.into_iter().enumerate() {
            let found = pair.driver.packed_descriptor(used % size);
            let written = [0, 1, u32::MAX][count];
            let has_data = if written > 0 { WRITE } else { 0 };
            assert_eq!(
                (found.next, found.len, found.flags),
                (
                    60_000 + chain as u16,
                    written,
                    has_data | flags_at(used, size, true)
                )
            );
            used += lens[chain];
        }
    }
}

/// The driver says always, never or, if event indices were negotiated, at which place it wants an interrupt.
///
/// Every advance in a ring of three and of four, from every place, with every wish; a wish of a kind that there is not counts as always.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_8_10_interrupts() {
    for (size, event_index) in [(3_u16, true), (4, true), (4, false)] {
        for (place, advance) in
            (0..2 * size).flat_map(|place| (1..=size).map(move |by| (place, by)))
        {
            for (kind, wanted) in
                (0..4_u32).flat_map(|kind| (0..2 * size).map(move |at| (kind, at)))
            {
                let before = place + 2 * size - 1;
                let mut pair = Pair::of(DriverQueue::packed, before, size, event_index, false);
                let mut done = |place: u16, count: u16| {
                    for place in place..place + count {
                        pair.offer_at(place, &[stretch(0, 0)]);
                        let head = pair.pop().unwrap();
                        pair.queue.complete(head, 0);
                    }
                    let event = u32::from(position(wanted, size).to_bits()) | kind << 16;
                    pair.driver.set_driver_event(event);
                    pair.queue.publish()
                };
                // The first publication of a queue that is taken over always interrupts, since it is unknown what the driver saw.
                assert_eq!(done(before, 1), kind != 1);
                let written = (place..place + advance).any(|at| at % (2 * size) == wanted);
                let expected = match kind {
                    1 => false,
                    2 if event_index => written,
                    _ => true,
                };
                assert_eq!(
                    done(place, advance),
                    expected,
                    "{wanted} in {place} and {advance} more"
                );
            }
        }
    }
}

/// The device asks always, never or, if event indices were negotiated, for the place of the next chain; it writes only what has changed.
#[test]
fn spec_2_8_10_the_device_asks_for_notifications_in_the_way_negotiated() {
    for (event_index, place) in [(true, 0), (true, 7), (false, 7)] {
        let mut pair = Pair::of(DriverQueue::packed, place, 4, event_index, false);
        let wish = |place| match event_index {
            true => 2 << 16 | u32::from(position(place, 4).to_bits()),
            false => 0,
        };
        assert!(!pair.queue.enable_notifications());
        assert_eq!(pair.driver.device_event(), wish(place));
        pair.queue.disable_notifications();
        assert_eq!(pair.driver.device_event(), 1 << 16);
        assert!(!pair.add(1), "no interrupt was asked for");
        assert!(pair.queue.enable_notifications(), "there is work");
        assert_eq!(pair.driver.device_event(), wish(place));
        pair.pop().unwrap();
        assert!(!pair.queue.enable_notifications());
        assert_eq!(pair.driver.device_event(), wish(place + 1));
        assert!(pair.add(2));
    }
}
