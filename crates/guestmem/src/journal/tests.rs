use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::crash::armed::{Ended, arm};
use crate::guestmem_driver::Arena;

const RECORDS: usize = 8;

fn arena() -> Arena {
    let size = Journal::file_bytes(RECORDS) as usize;
    Arena::new(size.next_multiple_of(4096)).unwrap()
}

fn create(arena: &Arena) -> Journal {
    Journal::create(arena.file().try_clone().unwrap(), RECORDS).unwrap()
}

fn open(arena: &Arena) -> Journal {
    Journal::open(arena.file().try_clone().unwrap(), RECORDS).unwrap()
}

fn contents(journal: &Journal) -> Vec<Option<Vec<u8>>> {
    (0..RECORDS).map(|index| journal.read(index)).collect()
}

#[test]
fn changes_count_when_their_turn_ends() {
    let arena = arena();
    let mut journal = create(&arena);
    assert!(journal.write(3, b"one") && journal.write(4, &[7; MAX_RECORD_BYTES]));
    assert_eq!(journal.read(3), None);
    journal.commit();
    assert_eq!(journal.read(3).unwrap(), b"one");
    assert_eq!(journal.read(4).unwrap(), [7; MAX_RECORD_BYTES]);
    journal.write(3, b"another");
    journal.write(3, b"two");
    journal.write(4, b"");
    assert_eq!(open(&arena).read(3).unwrap(), b"one");
    journal.write(3, b"two");
    journal.write(4, b"");
    journal.commit();
    assert_eq!(open(&arena).read(3).unwrap(), b"two");
    assert_eq!(open(&arena).read(4), None);
    // There is no room for these.
    assert!(!journal.write(RECORDS, b"") && !journal.write(0, &[0; MAX_RECORD_BYTES + 1]));
}

#[test]
fn a_successor_finds_the_last_whole_turn_wherever_a_process_ends() {
    let mut random = 1u64;
    let mut below = |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % bound
    };
    let mut deaths = 0;
    for _ in 0..300 {
        let arena = arena();
        let mut journal = create(&arena);
        let mut expected = contents(&journal);
        for _ in 0..60 {
            let mut next = expected.clone();
            let changes: Vec<_> = (0..below(6))
                .map(|_| {
                    (
                        below(RECORDS as u64) as usize,
                        vec![below(256) as u8; below(40) as usize],
                    )
                })
                .collect();
            for (index, record) in &changes {
                next[*index] = (!record.is_empty()).then(|| record.clone());
            }
            arm((below(3) == 0).then(|| below(12) as u32));
            let ended = catch_unwind(AssertUnwindSafe(|| {
                for (index, record) in &changes {
                    journal.write(*index, record);
                }
                journal.commit();
            }));
            arm(None);
            match ended {
                Ok(()) => expected = next,
                Err(ended) => {
                    assert!(ended.is::<Ended>());
                    deaths += 1;
                    journal = open(&arena);
                    let found = contents(&journal);
                    assert!(found == expected || found == next);
                    expected = found;
                }
            }
            assert_eq!(contents(&journal), expected);
        }
    }
    assert!(deaths > 1_000, "{deaths}");
}

#[test]
fn any_bytes_do_no_harm() {
    let arena = arena();
    let file = || arena.file().try_clone().unwrap();
    assert!(matches!(
        Journal::open(file(), RECORDS),
        Err(JournalError::Foreign)
    ));
    let mut journal = create(&arena);
    for index in 0..RECORDS {
        journal.write(index, &[index as u8; 20]);
    }
    journal.commit();
    assert!(matches!(
        Journal::open(file(), 4),
        Err(JournalError::Size { .. })
    ));
    // A byte of the record, of its length, of its turn; a place that was another record's.
    for (at, byte) in [(16, 9), (8, 19), (0, 0), (12, 0)] {
        let mut journal = create(&arena);
        journal.write(0, &[1; 20]);
        journal.commit();
        arena.write(place(0, 0) + at, &[byte]);
        assert_eq!(open(&arena).read(0), None);
    }
    for byte in [1, 7, 8, 0x7f, 0xff] {
        let all = vec![byte; arena.size() - RECORDS_AT];
        arena.write(RECORDS_AT, &(RECORDS as u64).to_le_bytes());
        arena.write(WRITTEN_AT, &all[..arena.size() - WRITTEN_AT]);
        assert_eq!(contents(&open(&arena)), vec![None; RECORDS]);
    }
}

/// Byte by byte: a successor of another version finds things by the same shape.
#[test]
fn the_file_is_of_its_shape() {
    let arena = arena();
    let mut journal = create(&arena);
    journal.write(1, b"a record");
    journal.commit();
    let mut header = [0; 32];
    arena.read(0, &mut header);
    let numbers = [RECORDS as u64, 2, 1].map(u64::to_le_bytes).concat();
    assert_eq!(header[..], [&b"journal\x03"[..], &numbers].concat());
    let mut first = [0; 24];
    arena.read(4096 + 2 * 320, &mut first);
    let bytes = [&1u64.to_le_bytes()[..], &[8, 0, 0, 0], &[0; 4], b"a record"].concat();
    first[12..16].fill(0);
    assert_eq!(first[..], bytes, "another shape has another number");
}
