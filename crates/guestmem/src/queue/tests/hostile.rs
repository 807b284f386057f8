//! Drivers that break the rules: each gets its own error, and nothing is taken.

use super::*;
use crate::guest::RegionSpec;

const NEXT: u16 = RawDescriptor::NEXT;
const WRITE: u16 = RawDescriptor::WRITE;
const INDIRECT: u16 = RawDescriptor::INDIRECT;

fn raw(address: u64, len: u32, flags: u16, next: u16) -> RawDescriptor {
    RawDescriptor {
        address,
        len,
        flags,
        next,
    }
}

/// A queue of eight with these descriptors, the first of which was made available.
fn with(descriptors: &[RawDescriptor]) -> Pair {
    let mut pair = Pair::new(8, true, true);
    for (index, descriptor) in descriptors.iter().enumerate() {
        pair.driver.write_descriptor(index as u16, *descriptor);
    }
    pair.driver.publish_head(0);
    pair
}

/// The same with an indirect table of these, and nothing else.
fn with_table(descriptors: &[RawDescriptor]) -> Pair {
    let mut pair = Pair::new(8, true, true);
    let len = (16 * descriptors.len()) as u32;
    let table = pair.buffer(len);
    let bytes: Vec<u8> = descriptors
        .iter()
        .flat_map(|descriptor| descriptor.to_bytes())
        .collect();
    pair.memory.write(&[table], 0, &bytes).unwrap();
    pair.driver
        .write_descriptor(0, raw(table.address, len, INDIRECT, 0));
    pair.driver.publish_head(0);
    pair
}

fn refused(mut pair: Pair) -> QueueError {
    let error = pair.queue.pop(&mut pair.chain).unwrap_err();
    assert_eq!(
        (pair.queue.ring_base(), pair.queue.in_flight()),
        (0, 0),
        "nothing was taken"
    );
    assert_eq!(
        pair.queue.pop(&mut pair.chain),
        Err(error),
        "and it stays so"
    );
    error
}

fn taken(mut pair: Pair) -> Chain {
    assert_eq!(pair.queue.pop(&mut pair.chain), Ok(true));
    pair.chain
}

fn range(address: u64, len: u32) -> Range {
    Range { address, len }
}

#[test]
fn available_index_jumps() {
    for (index, allowed) in [(8, true), (9, false), (65535, false), (32768, false)] {
        let mut pair = Pair::new(8, true, true);
        pair.driver.set_available_index(index);
        let jump = QueueError::AvailableIndexJump {
            from: 0,
            to: index,
            size: 8,
        };
        if allowed {
            assert_eq!(pair.queue.pending(), Ok(true));
        } else {
            assert_eq!(pair.queue.pending(), Err(jump));
            assert!(pair.queue.enable_notifications(), "something is available");
            assert_eq!(refused(pair), jump);
        }
    }
}

#[test]
fn the_available_index_goes_backwards() {
    let mut pair = Pair::new(8, true, false);
    pair.add(1);
    pair.add(2);
    pair.pop().unwrap();
    pair.pop().unwrap();
    pair.driver.set_available_index(1);
    let error = pair.queue.pop(&mut pair.chain).unwrap_err();
    assert_eq!(
        error,
        QueueError::AvailableIndexJump {
            from: 2,
            to: 1,
            size: 8
        }
    );
}

#[test]
fn heads_out_of_range() {
    for head in [8, 9, 65535] {
        let mut pair = Pair::new(8, true, true);
        pair.driver.publish_head(head);
        assert_eq!(refused(pair), QueueError::HeadOutOfRange { head, size: 8 });
    }
    let mut pair = Pair::new(8, true, true);
    pair.driver.write_descriptor(7, raw(BASE, 1, 0, 0));
    pair.driver.publish_head(7);
    assert_eq!(taken(pair).readable, [range(BASE, 1)]);
}

#[test]
fn a_head_twice() {
    let mut pair = with(&[raw(BASE, 1, 0, 0)]);
    pair.driver.publish_head(0);
    pair.pop().unwrap();
    assert_eq!(
        pair.queue.pop(&mut pair.chain),
        Err(QueueError::HeadInFlight { head: 0 })
    );
    // After it was given back it may come again.
    pair.queue.complete(0, 0);
    assert_eq!(pair.pop(), Some(0));
}

#[test]
fn never_are_more_chains_out_than_the_queue_has_entries() {
    let mut pair = Pair::new(8, true, false);
    for head in 0..8 {
        pair.driver.write_descriptor(head, raw(BASE, 1, 0, 0));
        pair.driver.publish_head(head);
    }
    while pair.pop().is_some() {}
    assert_eq!(pair.queue.in_flight(), 8);
    for head in 0..8 {
        pair.driver.set_available_entry(head, head);
        pair.driver.set_available_index(9);
        assert!(matches!(
            pair.queue.pop(&mut pair.chain),
            Err(QueueError::HeadInFlight { .. })
        ));
    }
}

#[test]
fn a_next_that_is_none() {
    for next in [8, 65535] {
        let error = refused(with(&[raw(BASE, 1, NEXT, 1), raw(BASE, 1, NEXT, next)]));
        assert_eq!(
            error,
            QueueError::NextOutOfRange {
                head: 0,
                index: 1,
                next,
                entries: 8
            }
        );
    }
    // Where there is no next one, the field means nothing.
    assert_eq!(taken(with(&[raw(BASE, 1, 0, 65535)])).readable.len(), 1);
    let error = refused(with_table(&[raw(BASE, 1, NEXT, 1), raw(BASE, 1, NEXT, 2)]));
    assert_eq!(
        error,
        QueueError::NextOutOfRange {
            head: 0,
            index: 1,
            next: 2,
            entries: 2
        }
    );
}

#[test]
fn loops() {
    let looped = QueueError::Loop {
        head: 0,
        entries: 8,
    };
    assert_eq!(refused(with(&[raw(BASE, 1, NEXT, 0)])), looped);
    assert_eq!(
        refused(with(&[raw(BASE, 1, NEXT, 1), raw(BASE, 1, NEXT, 0)])),
        looped
    );
    // Also one of nothing but empty descriptors.
    assert_eq!(refused(with(&[raw(BASE, 0, NEXT, 0)])), looped);
    // All eight, and no loop.
    let all: Vec<_> = (0..8)
        .map(|index| raw(BASE, 1, if index < 7 { NEXT } else { 0 }, index + 1))
        .collect();
    assert_eq!(taken(with(&all)).readable.len(), 8);
    let error = refused(with_table(&[raw(BASE, 1, NEXT, 1), raw(BASE, 1, NEXT, 1)]));
    assert_eq!(
        error,
        QueueError::Loop {
            head: 0,
            entries: 2
        }
    );
}

#[test]
fn readable_after_writable() {
    let refusal = QueueError::ReadableAfterWritable { head: 0, index: 1 };
    assert_eq!(
        refused(with(&[raw(BASE, 1, WRITE | NEXT, 1), raw(BASE, 1, 0, 0)])),
        refusal
    );
    assert_eq!(
        refused(with_table(&[
            raw(BASE, 1, WRITE | NEXT, 1),
            raw(BASE, 1, 0, 0)
        ])),
        refusal
    );
    // In front of an indirect table as well.
    let pair = with_table(&[raw(BASE, 1, 0, 0)]);
    let table = raw(BASE + pair.arena.allocate(16, 16) as u64, 16, INDIRECT, 0);
    pair.memory
        .write(
            &[range(table.address, 16)],
            0,
            &raw(BASE, 1, 0, 0).to_bytes(),
        )
        .unwrap();
    pair.driver.write_descriptor(1, table);
    pair.driver
        .write_descriptor(0, raw(BASE, 1, WRITE | NEXT, 1));
    assert_eq!(
        refused(pair),
        QueueError::ReadableAfterWritable { head: 0, index: 0 }
    );
}

#[test]
fn memory_that_is_none() {
    let len = 64 * PAGE as u64;
    let end = BASE + len;
    for (address, len) in [
        (end, 1),
        (end - 1, 2),
        (BASE - 1, 1),
        (BASE - 1, 2),
        (0, 1),
        (u64::MAX, 1),
        (u64::MAX, 2),
        (BASE, u32::MAX),
    ] {
        let error = refused(with(&[raw(address, len, 0, 0)]));
        assert_eq!(
            error,
            QueueError::NotMapped {
                head: 0,
                index: 0,
                address,
                len
            }
        );
        let error = refused(with_table(&[
            raw(BASE, 1, NEXT, 1),
            raw(address, len, WRITE, 0),
        ]));
        assert_eq!(
            error,
            QueueError::NotMapped {
                head: 0,
                index: 1,
                address,
                len
            }
        );
    }
    assert_eq!(
        taken(with(&[raw(BASE, len as u32, 0, 0)])).readable,
        [range(BASE, len as u32)]
    );
    // What is empty need not be anywhere, and leaves no trace.
    let chain = taken(with(&[raw(0, 0, NEXT | WRITE, 1), raw(BASE, 1, 0, 0)]));
    assert_eq!(
        (chain.readable, chain.writable),
        (vec![range(BASE, 1)], vec![])
    );
    let chain = taken(with(&[raw(u64::MAX, 0, 0, 0)]));
    assert_eq!((chain.readable, chain.writable), (vec![], vec![]));
}

#[test]
fn indirect_where_it_may_not_be() {
    let mut pair = Pair::new(8, true, false);
    pair.driver.write_descriptor(0, raw(BASE, 16, INDIRECT, 0));
    pair.driver.publish_head(0);
    assert_eq!(
        refused(pair),
        QueueError::IndirectNotNegotiated { head: 0, index: 0 }
    );
    assert_eq!(
        refused(with(&[raw(BASE, 16, INDIRECT | NEXT, 1)])),
        QueueError::IndirectWithNext { head: 0, index: 0 }
    );
    let error = refused(with_table(&[
        raw(BASE, 1, NEXT, 1),
        raw(BASE, 16, INDIRECT, 0),
    ]));
    assert_eq!(error, QueueError::IndirectInIndirect { head: 0, index: 1 });
}

#[test]
fn indirect_tables_of_a_wrong_length() {
    let most = 16 * MAX_CHAIN_LEN as u32;
    for len in [0, 1, 15, 17, most + 16, u32::MAX, 0xffff_fff0] {
        let error = refused(with(&[raw(BASE, len, INDIRECT, 0)]));
        assert_eq!(error, QueueError::IndirectTableLength { head: 0, len });
    }
    let end = BASE + 64 * PAGE as u64;
    for (address, len) in [
        (end - 16, 32),
        (end, 16),
        (0, 16),
        (u64::MAX - 15, 16),
        (u64::MAX - 15, 32),
        (u64::MAX, 16),
    ] {
        // The first entry goes on to the second, so that the whole table is read.
        let mut pair = with(&[raw(address, len, INDIRECT, 0)]);
        if address == end - 16 {
            pair.memory
                .write(&[range(address, 16)], 0, &raw(BASE, 1, NEXT, 1).to_bytes())
                .unwrap();
        }
        pair.chain = Chain::default();
        assert_eq!(
            refused(pair),
            QueueError::NotMapped {
                head: 0,
                index: 0,
                address,
                len
            }
        );
    }
}

#[test]
fn a_device_ignores_that_the_table_is_writable() {
    // Virtio 1.2, 2.7.5.3.2: the write-only flag of the descriptor that refers to the table means nothing; direct descriptors
    // may come before it.
    let pair = with_table(&[raw(BASE + 5, 5, 0, 0)]);
    let table = BASE + pair.arena.allocate(32, 16) as u64;
    let entries = [
        raw(BASE + 1, 1, NEXT, 1).to_bytes(),
        raw(BASE + 2, 2, WRITE, 0).to_bytes(),
    ]
    .concat();
    pair.memory.write(&[range(table, 32)], 0, &entries).unwrap();
    pair.driver.write_descriptor(0, raw(BASE, 1, NEXT, 5));
    pair.driver
        .write_descriptor(5, raw(table, 32, INDIRECT | WRITE, 0));
    let chain = taken(pair);
    assert_eq!(chain.readable, [range(BASE, 1), range(BASE + 1, 1)]);
    assert_eq!(chain.writable, [range(BASE + 2, 2)]);
}

/// A table whose entries follow each other, all the same but for that.
fn row(count: usize, len: u32) -> Vec<RawDescriptor> {
    let flags = |index| if index + 1 < count { NEXT } else { 0 };
    (0..count)
        .map(|index| raw(BASE, len, flags(index), (index + 1) as u16))
        .collect()
}

#[test]
fn chains_of_the_greatest_length() {
    assert_eq!(
        taken(with_table(&row(MAX_CHAIN_LEN, 1))).readable.len(),
        MAX_CHAIN_LEN
    );
    // One direct descriptor before a full table is one too many.
    for (before_table, allowed) in [(0, true), (1, false)] {
        let count = MAX_CHAIN_LEN - 1 + before_table;
        let mut pair = Pair::new(8, true, true);
        let table = pair.buffer((16 * count) as u32);
        let bytes: Vec<u8> = row(count, 1)
            .iter()
            .flat_map(|descriptor| descriptor.to_bytes())
            .collect();
        pair.memory.write(&[table], 0, &bytes).unwrap();
        pair.driver.write_descriptor(0, raw(BASE, 1, NEXT, 1));
        pair.driver
            .write_descriptor(1, raw(table.address, table.len, INDIRECT, 0));
        pair.driver.publish_head(0);
        if allowed {
            assert_eq!(taken(pair).readable.len(), MAX_CHAIN_LEN);
        } else {
            assert_eq!(refused(pair), QueueError::ChainTooLong { head: 0 });
        }
    }
    // A large queue's own table as well.
    for (count, allowed) in [(MAX_CHAIN_LEN, true), (MAX_CHAIN_LEN + 1, false)] {
        let mut pair = Pair::new(2048, true, true);
        for (index, descriptor) in row(count, 1).into_iter().enumerate() {
            pair.driver.write_descriptor(index as u16, descriptor);
        }
        pair.driver.publish_head(0);
        if allowed {
            assert_eq!(taken(pair).readable.len(), MAX_CHAIN_LEN);
        } else {
            assert_eq!(refused(pair), QueueError::ChainTooLong { head: 0 });
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes four gigabytes there")]
fn chains_of_the_most_bytes() {
    // A sparse gigabyte: it is never touched.
    let arena = Arc::new(Arena::new(1 << 30).unwrap());
    let memory = Arc::new(GuestMemory::with_regions(vec![arena.region(0).unwrap()]).unwrap());
    for (last, allowed) in [(0, true), (1, false)] {
        let mut driver = DriverQueue::new(Arc::clone(&arena), 0, 8, true, true);
        for index in 0..4 {
            driver.write_descriptor(index, raw(0, 1 << 30, NEXT, index + 1));
        }
        driver.write_descriptor(4, raw(0, last, 0, 0));
        driver.publish_head(0);
        let mut queue = Queue::new(driver.setup(), Arc::clone(&memory)).unwrap();
        let expected = if allowed {
            Ok(true)
        } else {
            Err(QueueError::TooManyBytes { head: 0 })
        };
        assert_eq!(queue.pop(&mut Chain::default()), expected);
    }
}

#[test]
fn chains_over_many_small_regions() {
    let arena = Arc::new(Arena::new(64 * PAGE).unwrap());
    // Sixteen regions of one page, side by side, and the queue in one behind them.
    let mut parts: Vec<RegionSpec> = (0..16)
        .map(|index| {
            arena
                .part((index * PAGE) as u64, index * PAGE, PAGE)
                .unwrap()
        })
        .collect();
    parts.push(arena.part(BASE, 16 * PAGE, 48 * PAGE).unwrap());
    let memory = Arc::new(GuestMemory::with_regions(parts).unwrap());
    arena.allocate(16 * PAGE, PAGE);
    let table = arena.allocate(16 * MAX_CHAIN_LEN, 16);
    // Each descriptor becomes sixteen ranges: 95 are 1520 of the 1533 that may be, and thirteen more fit.
    for (single, allowed) in [
        (MAX_CHAIN_RANGES - 95 * 16, true),
        (MAX_CHAIN_RANGES - 95 * 16 + 1, false),
    ] {
        let mut driver = DriverQueue::new(Arc::clone(&arena), BASE, 8, true, true);
        let mut descriptors = row(95 + single, 1);
        for descriptor in &mut descriptors {
            descriptor.address = 0;
        }
        for descriptor in &mut descriptors[..95] {
            descriptor.len = 16 * PAGE as u32;
        }
        for (index, descriptor) in descriptors.iter().enumerate() {
            arena.write(table + 16 * index, &descriptor.to_bytes());
        }
        let address = BASE + (table - 16 * PAGE) as u64;
        driver.write_descriptor(0, raw(address, 16 * descriptors.len() as u32, INDIRECT, 0));
        driver.publish_head(0);
        let mut queue = Queue::new(driver.setup(), Arc::clone(&memory)).unwrap();
        let mut chain = Chain::default();
        if allowed {
            assert_eq!(queue.pop(&mut chain), Ok(true));
            assert_eq!(chain.readable.len(), MAX_CHAIN_RANGES);
        } else {
            assert_eq!(
                queue.pop(&mut chain),
                Err(QueueError::TooManyRanges { head: 0 })
            );
        }
    }
}

/// What a chain takes from the driver's table decides how many may be parked.
#[test]
fn a_chain_knows_how_many_entries_it_takes_up() {
    assert_eq!(taken(with(&row(5, 16))).entries, 5);
    assert_eq!(taken(with(&row(1, 16))).entries, 1);
    assert_eq!(taken(with_table(&row(5, 16))).entries, 1);
}
