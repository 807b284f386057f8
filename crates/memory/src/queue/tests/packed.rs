//! What is particular to packed rings: clauses of virtio 1.2, section 2.8, each over every case within its bounds, and drivers that break
//! the rules.

use super::clauses::{sequences, split};
use super::*;

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
    /// Makes this chain available from the place on that the device looks at next, which is `place` descriptors behind the beginning.
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

/// A table is for who negotiated it, and the only descriptor of its chain (2.8.19).
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
                // The first publication of a queue that is taken over always interrupts, since nobody knows what the driver saw.
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
        assert!(!pair.add(1), "nobody asked");
        assert!(pair.queue.enable_notifications(), "there is work");
        assert_eq!(pair.driver.device_event(), wish(place));
        pair.pop().unwrap();
        assert!(!pair.queue.enable_notifications());
        assert_eq!(pair.driver.device_event(), wish(place + 1));
        assert!(pair.add(2));
    }
}

#[test]
fn a_chain_is_named_as_the_driver_likes() {
    let mut pair = at(0, 4, false);
    for (place, name) in [0, 65_535, 4, 32_768].into_iter().enumerate() {
        let descriptor = RawDescriptor {
            next: name,
            ..stretch(0, 0)
        };
        pair.offer_at(place as u16, &[descriptor]);
        assert_eq!(pair.pop(), Some(name));
    }
    for name in [4, 65_535, 32_768, 0] {
        pair.queue.complete(name, 0);
    }
    assert_eq!(pair.queue.in_flight(), 0);
}

#[test]
fn a_name_twice() {
    let mut pair = at(3, 4, false);
    let descriptor = RawDescriptor {
        next: 9,
        ..stretch(0, 0)
    };
    pair.offer_at(3, &[descriptor]);
    pair.offer_at(4, &[stretch(1, NEXT), descriptor]);
    assert_eq!(pair.pop(), Some(9));
    assert_eq!(pair.refused(), QueueError::HeadInFlight { head: 9 });
    // After it was given back it may come again.
    pair.queue.complete(9, 0);
    assert_eq!(pair.pop(), Some(9));
}

#[test]
fn never_are_more_descriptors_out_than_the_ring_has() {
    let mut pair = at(1, 4, false);
    let chain = [
        stretch(0, NEXT),
        stretch(1, NEXT),
        stretch(2, NEXT),
        stretch(3, NEXT),
    ];
    pair.offer_at(1, &chain);
    let too_many = |head, free| QueueError::TooManyOut {
        head,
        free,
        size: 4,
    };
    assert_eq!(pair.refused(), too_many(1, 4));
    pair.offer_at(1, &[stretch(0, NEXT), stretch(1, 0)]);
    assert_eq!(pair.pop(), Some(101));
    pair.offer_at(3, &chain[..3]);
    assert_eq!(pair.refused(), too_many(3, 2));
    pair.offer_at(3, &[stretch(2, NEXT), stretch(3, 0)]);
    assert_eq!(pair.pop(), Some(103));
    // All four are out. That one becomes available again is a lie.
    assert_eq!(pair.queue.in_flight(), 2);
    pair.offer_at(5, &[stretch(4, 0)]);
    assert_eq!(pair.refused(), too_many(1, 0));
    pair.queue.complete(103, 0);
    assert_eq!(pair.pop(), Some(104));
    assert_eq!((pair.queue.in_flight(), pair.chain.entries), (2, 1));
}

#[test]
fn what_is_wrong_with_a_descriptor_is_said_with_its_place() {
    let mut pair = at(7, 8, true);
    pair.offer_at(7, &[stretch(0, WRITE | NEXT), stretch(1, 0)]);
    assert_eq!(
        pair.refused(),
        QueueError::ReadableAfterWritable { head: 7, index: 0 }
    );
    let (address, len) = (BASE + 64 * PAGE as u64 - 1, 2);
    let outside = RawDescriptor {
        address,
        len,
        ..stretch(0, 0)
    };
    pair.offer_at(7, &[stretch(0, NEXT), outside]);
    assert_eq!(
        pair.refused(),
        QueueError::NotMapped {
            head: 7,
            index: 0,
            address,
            len
        }
    );
    let table = RawDescriptor {
        flags: INDIRECT,
        ..outside
    };
    pair.offer_at(7, &[RawDescriptor { len: 24, ..table }]);
    assert_eq!(
        pair.refused(),
        QueueError::IndirectTableLength { head: 7, len: 24 }
    );
    pair.offer_at(7, &[RawDescriptor { len: 16, ..table }]);
    assert_eq!(
        pair.refused(),
        QueueError::NotMapped {
            head: 7,
            index: 7,
            address,
            len: 16
        }
    );
}

#[test]
fn a_chain_has_at_most_as_many_descriptors_as_any_may_have() {
    let mut pair = at(0, 2048, false);
    let chain = |len: u16| -> Vec<RawDescriptor> {
        let descriptor = |index| RawDescriptor {
            len: 1,
            ..stretch(0, if index + 1 < len { NEXT } else { 0 })
        };
        (0..len).map(descriptor).collect()
    };
    pair.offer_at(0, &chain(1025));
    assert_eq!(pair.refused(), QueueError::ChainTooLong { head: 0 });
    pair.offer_at(0, &chain(1024));
    assert_eq!(pair.pop(), Some(100));
    assert_eq!(
        (pair.chain.readable.len(), pair.chain.entries),
        (1024, 1024)
    );
}

/// What was given back in between was taken before, so that its used descriptor lies before what is rewound.
#[test]
fn what_is_rewound_is_still_there_after_others_came_back() {
    for place in 0..16 {
        let mut pair = at(place, 8, false);
        let buffers: Vec<Range> = (0..3).map(|_| pair.buffer(16)).collect();
        for (token, parts) in [1, 3, 2, 2].into_iter().enumerate() {
            pair.driver
                .add(&buffers[..parts], &[], token as u64)
                .unwrap();
        }
        pair.driver.kick_needed();
        let heads: Vec<u16> = (0..4).map(|_| pair.pop().unwrap()).collect();
        pair.queue.complete(heads[1], 0);
        pair.queue.publish();
        pair.queue.rewind(2);
        assert_eq!(pair.queue.in_flight(), 1);
        assert_eq!((pair.pop(), pair.chain.readable.len()), (Some(heads[2]), 2));
        pair.queue.complete(heads[0], 0);
        pair.queue.publish();
        assert_eq!((pair.pop(), pair.chain.readable.len()), (Some(heads[3]), 2));
        assert_eq!(pair.pop(), None);
        for head in &heads[2..] {
            pair.queue.complete(*head, 0);
        }
        pair.queue.publish();
        let tokens: Vec<u64> = std::iter::from_fn(|| pair.driver.take_used())
            .map(|(token, _)| token)
            .collect();
        assert_eq!(tokens, [1, 0, 2, 3]);
        assert_eq!(pair.driver.free_descriptors(), 8);
    }
}

#[test]
fn bases_that_cannot_be_are_refused() {
    let pair = at(0, 6, false);
    let new = |ring_base| {
        let setup = QueueSetup {
            ring_base,
            ..pair.driver.setup()
        };
        Queue::new(setup, Arc::clone(&pair.memory))
    };
    // Whatever is written is as far along as one round behind what is read.
    for (available, used) in
        (0..12).flat_map(|available| (0..12).map(move |used| (available, used)))
    {
        let [low, high] = [available, used].map(|place| u32::from(position(place, 6).to_bits()));
        let base = low | high << 16;
        match new(base) {
            Ok(queue) => assert_eq!(queue.ring_base(), base),
            Err(error) => assert_eq!(error, QueueError::Base { base, size: 6 }),
        }
        assert_eq!(new(base).is_ok(), (available + 12 - used) % 12 <= 6);
    }
    for base in [0x8006_8000, 0x8000_8006, 0x8000_ffff, 0xffff_8000] {
        assert_eq!(new(base).unwrap_err(), QueueError::Base { base, size: 6 });
    }
    let split = Pair::new(8, true, false);
    let setup = QueueSetup {
        ring_base: 65_536,
        ..split.driver.setup()
    };
    let refusal = Queue::new(setup, Arc::clone(&split.memory)).unwrap_err();
    assert_eq!(
        refusal,
        QueueError::Base {
            base: 65_536,
            size: 8
        }
    );
}

#[test]
fn a_packed_queue_may_have_any_size_and_lies_where_it_is_aligned() {
    let arena = Arc::new(Arena::new(130 * PAGE).unwrap());
    let memory = Arc::new(GuestMemory::with_regions(vec![arena.region(BASE).unwrap()]).unwrap());
    let end = arena.base() + 130 * PAGE as u64;
    let setup = QueueSetup {
        size: 3,
        descriptors: end - 48,
        available: end - 4,
        used: end - 8,
        ring_base: FIRST_PACKED_BASE,
        event_index: true,
        indirect: true,
        packed: true,
    };
    let new = |setup| Queue::new(setup, Arc::clone(&memory));
    assert_eq!(new(setup).unwrap().size(), 3);
    let refusal = |setup| new(setup).unwrap_err();
    for size in [0, 32_769, 65_535] {
        assert_eq!(
            refusal(QueueSetup { size, ..setup }),
            QueueError::PackedSize { size }
        );
    }
    for size in [1, 255, 32_767, 32_768] {
        let setup = QueueSetup {
            size,
            descriptors: arena.base(),
            ..setup
        };
        assert_eq!(new(setup).unwrap().size(), size);
    }
    let outside = |area, address, len| QueueError::AreaOutside { area, address, len };
    let address = end - 32;
    let moved = QueueSetup {
        descriptors: address,
        ..setup
    };
    assert_eq!(refusal(moved), outside("descriptor ring", address, 48));
    let moved = QueueSetup {
        available: end,
        ..setup
    };
    assert_eq!(refusal(moved), outside("driver's event structure", end, 4));
    let moved = QueueSetup { used: end, ..setup };
    assert_eq!(refusal(moved), outside("device's event structure", end, 4));
    let misaligned = |area, address, alignment| QueueError::AreaMisaligned {
        area,
        address,
        alignment,
    };
    let moved = QueueSetup {
        descriptors: end - 56,
        ..setup
    };
    assert_eq!(refusal(moved), misaligned("descriptor ring", end - 56, 16));
    let moved = QueueSetup {
        available: end - 6,
        ..setup
    };
    assert_eq!(
        refusal(moved),
        misaligned("driver's event structure", end - 6, 4)
    );
    let moved = QueueSetup {
        used: end - 6,
        ..setup
    };
    assert_eq!(
        refusal(moved),
        misaligned("device's event structure", end - 6, 4)
    );
}

#[test]
fn is_fresh_only_at_the_beginning() {
    let mut pair = at(0, 4, false);
    assert!(pair.queue.is_fresh());
    pair.add(1);
    assert!(pair.queue.is_fresh());
    pair.pop().unwrap();
    assert!(!pair.queue.is_fresh());
    for place in 1..8 {
        assert!(!at(place, 4, false).queue.is_fresh());
    }
    assert!(
        at(8, 4, false).queue.is_fresh(),
        "twice round cannot be told apart"
    );
}

#[test]
fn a_digest_sees_what_the_driver_writes() {
    let pair = at(0, 4, false);
    let mut digests = vec![pair.queue.driver_digest()];
    assert_eq!(pair.queue.driver_digest(), digests[0]);
    for index in 0..4 {
        pair.driver.write_descriptor(index, stretch(index, 0));
        let digest = pair.queue.driver_digest();
        assert!(!digests.contains(&digest));
        digests.push(digest);
    }
}

#[test]
fn goes_on_in_other_memory_with_a_packed_ring() {
    let mut pair = at(2, 4, false);
    pair.add(1);
    let head = pair.pop().unwrap();
    let spare = Arena::new(PAGE).unwrap();
    let mut more = (*pair.memory).clone();
    more.add_region(spare.region(0).unwrap()).unwrap();
    pair.queue.replace_memory(Arc::new(more)).unwrap();
    let lost = pair.queue.replace_memory(Arc::new(GuestMemory::new()));
    assert!(matches!(
        lost,
        Err(QueueError::AreaOutside {
            area: "descriptor ring",
            ..
        })
    ));
    assert_eq!(pair.queue.memory().region_count(), 2, "unchanged");
    pair.queue.complete(head, 3);
    pair.queue.publish();
    assert_eq!(pair.driver.take_used(), Some((1, 3)));
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "is given back and is not out")]
fn giving_back_what_is_not_out_is_a_mistake() {
    at(0, 4, false).queue.complete(65_535, 0);
}
