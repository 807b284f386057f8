//! Drivers of packed rings that break the rules, and the corners of those that do not.

use super::*;

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
        "twice round looks the same"
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
