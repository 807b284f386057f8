//! Where a queue and its chains may lie.

use super::*;

#[test]
fn goes_on_in_other_memory() {
    let mut pair = Pair::new(4, true, false);
    pair.add(1);
    pair.add(2);
    let first = pair.pop().unwrap();
    let spare = Arena::new(PAGE).unwrap();
    let mut more = (*pair.memory).clone();
    more.add_region(spare.region(0).unwrap()).unwrap();
    pair.queue.replace_memory(Arc::new(more)).unwrap();
    assert_eq!(pair.queue.memory().region_count(), 2);
    pair.pop().unwrap();
    pair.queue.complete(first, 3);
    pair.queue.publish();
    assert_eq!(pair.driver.take_used(), Some((1, 3)));

    let error = pair
        .queue
        .replace_memory(Arc::new(GuestMemory::new()))
        .unwrap_err();
    assert!(
        matches!(
            error,
            QueueError::AreaOutside {
                area: "descriptor table",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(pair.queue.memory().region_count(), 2, "unchanged");
    pair.add(3);
    assert!(pair.pop().is_some());
}

#[test]
fn a_descriptor_may_lie_across_regions() {
    let arena = Arc::new(Arena::new(8 * PAGE).unwrap());
    // The guest sees the second half first.
    let half = 4 * PAGE;
    let parts = vec![
        arena.part(0, half, half).unwrap(),
        arena.part(half as u64, 0, half).unwrap(),
    ];
    let memory = Arc::new(GuestMemory::with_regions(parts).unwrap());
    // The driver believes that the arena starts at the second region; only the addresses of buffers matter here.
    let mut driver = DriverQueue::new(Arc::clone(&arena), half as u64, 4, true, true);
    let mut queue = Queue::new(driver.setup(), memory).unwrap();
    let border = half as u64;
    driver
        .add(
            &[Range {
                address: border - 100,
                len: 300,
            }],
            &[Range {
                address: border - 1,
                len: 2,
            }],
            0,
        )
        .unwrap();
    driver.kick_needed();
    let mut chain = Chain::default();
    assert!(queue.pop(&mut chain).unwrap());
    assert_eq!(
        chain.readable,
        [
            Range {
                address: border - 100,
                len: 100
            },
            Range {
                address: border,
                len: 200
            }
        ]
    );
    assert_eq!(
        chain.writable,
        [
            Range {
                address: border - 1,
                len: 1
            },
            Range {
                address: border,
                len: 1
            }
        ]
    );

    // So may an indirect table, at any address.
    let table = border - 24;
    let descriptor = |address: u64, flags, next| {
        RawDescriptor {
            address,
            len: 8,
            flags,
            next,
        }
        .to_bytes()
    };
    let bytes = [
        descriptor(64, RawDescriptor::NEXT, 2),
        [0; 16],
        descriptor(128, RawDescriptor::WRITE, 0),
    ]
    .concat();
    queue
        .memory()
        .write(
            &[Range {
                address: table,
                len: 48,
            }],
            0,
            &bytes,
        )
        .unwrap();
    driver.write_descriptor(
        3,
        RawDescriptor {
            address: table,
            len: 48,
            flags: RawDescriptor::INDIRECT,
            next: 0,
        },
    );
    driver.publish_head(3);
    assert!(queue.pop(&mut chain).unwrap());
    assert_eq!(
        chain.readable,
        [Range {
            address: 64,
            len: 8
        }]
    );
    assert_eq!(
        chain.writable,
        [Range {
            address: 128,
            len: 8
        }]
    );
}

#[test]
fn refuses_setups_that_cannot_be() {
    let arena = Arc::new(Arena::new(256 * PAGE).unwrap());
    let memory = Arc::new(GuestMemory::with_regions(vec![arena.region(0).unwrap()]).unwrap());
    let base = arena.base();
    let setup = QueueSetup {
        size: 4,
        descriptors: base,
        available: base + 64,
        used: base + 128,
        ring_base: 0,
        event_index: true,
        indirect: true,
        packed: false,
    };
    let new = |setup| Queue::new(setup, Arc::clone(&memory));
    assert_eq!(new(setup).unwrap().size(), 4);
    for size in [0, 3, 5, 32767, 32769, 65535] {
        assert_eq!(
            new(QueueSetup { size, ..setup }).unwrap_err(),
            QueueError::Size { size }
        );
    }
    let large = QueueSetup {
        available: base + 0x9_0000,
        used: base + 0xb_0000,
        ..setup
    };
    for size in [1, 2, 16384, MAX_QUEUE_SIZE] {
        assert_eq!(new(QueueSetup { size, ..large }).unwrap().size(), size);
    }

    let misaligned = |setup, expected| {
        let error = new(setup).unwrap_err();
        assert!(
            matches!(error, QueueError::AreaMisaligned { area, .. } if area == expected),
            "{error}"
        );
    };
    misaligned(
        QueueSetup {
            descriptors: base + 8,
            ..setup
        },
        "descriptor table",
    );
    misaligned(
        QueueSetup {
            available: base + 65,
            ..setup
        },
        "available ring",
    );
    misaligned(
        QueueSetup {
            used: base + 130,
            ..setup
        },
        "used ring",
    );

    let outside = |setup, expected| {
        let error = new(setup).unwrap_err();
        assert!(
            matches!(error, QueueError::AreaOutside { area, .. } if area == expected),
            "{error}"
        );
    };
    let end = base + arena.size() as u64;
    for (descriptors, available, used) in [(end - 64, end - 14, end - 40), (base, base, base)] {
        new(QueueSetup {
            descriptors,
            available,
            used: used & !3,
            ..setup
        })
        .unwrap();
    }
    for address in [end - 48, end, base - 16, 0, u64::MAX - 15] {
        outside(
            QueueSetup {
                descriptors: address,
                ..setup
            },
            "descriptor table",
        );
    }
    for address in [end - 12, end, base - 2, u64::MAX - 1] {
        outside(
            QueueSetup {
                available: address,
                ..setup
            },
            "available ring",
        );
    }
    for address in [end - 36, end, base - 4, u64::MAX - 3] {
        outside(
            QueueSetup {
                used: address,
                ..setup
            },
            "used ring",
        );
    }
    // Without event indices the rings are two bytes shorter.
    new(QueueSetup {
        available: end - 12,
        used: end - 36,
        event_index: false,
        ..setup
    })
    .unwrap();
    outside(
        QueueSetup {
            available: end - 10,
            event_index: false,
            ..setup
        },
        "available ring",
    );
    outside(
        QueueSetup {
            used: end - 32,
            event_index: false,
            ..setup
        },
        "used ring",
    );
}

#[test]
fn a_queue_may_start_where_one_region_ends_and_another_begins() {
    let arena = Arc::new(Arena::new(4 * PAGE).unwrap());
    let half = 2 * PAGE;
    let parts = vec![
        arena.part(0, 0, half).unwrap(),
        arena.part(BASE, half, half).unwrap(),
    ];
    let memory = Arc::new(GuestMemory::with_regions(parts).unwrap());
    arena.allocate(half, PAGE);
    let mut driver = DriverQueue::new(Arc::clone(&arena), BASE, 4, true, false);
    assert_eq!(driver.setup().descriptors, arena.base() + half as u64);
    let mut queue = Queue::new(driver.setup(), Arc::clone(&memory)).unwrap();
    driver.add(&[Range { address: 1, len: 2 }], &[], 0).unwrap();
    driver.kick_needed();
    assert_eq!(queue.pop(&mut Chain::default()), Ok(true));
    // But it may not lie across.
    let setup = QueueSetup {
        descriptors: driver.setup().descriptors - 16,
        ..driver.setup()
    };
    assert!(matches!(
        Queue::new(setup, memory),
        Err(QueueError::AreaOutside {
            area: "descriptor table",
            ..
        })
    ));
}
