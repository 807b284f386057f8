use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::guestmem_driver::Arena;

const PAGE: usize = 4096;

/// Three regions: two that touch, shown in the wrong order by their file, and one behind a gap.
struct Guest {
    arena: Arena,
    memory: GuestMemory,
}

const LOW: u64 = 0x1_0000;
const LOW_LEN: usize = 2 * PAGE;
const HIGH: u64 = 0x8000_0000;
const HIGH_LEN: usize = PAGE;

fn guest() -> Guest {
    let arena = Arena::new(3 * PAGE).unwrap();
    let memory = GuestMemory::with_regions(vec![
        arena.part(HIGH, 0, HIGH_LEN).unwrap(),
        arena.part(LOW + PAGE as u64, PAGE, PAGE).unwrap(),
        arena.part(LOW, 2 * PAGE, PAGE).unwrap(),
    ])
    .unwrap();
    Guest { arena, memory }
}

impl Guest {
    /// All bytes of the guest, in the order of [`place`].
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LOW_LEN + HIGH_LEN];
        self.arena.read(2 * PAGE, &mut bytes[..PAGE]);
        self.arena.read(PAGE, &mut bytes[PAGE..2 * PAGE]);
        self.arena.read(0, &mut bytes[2 * PAGE..]);
        bytes
    }

    fn fill(&self, seed: u8) {
        for (offset, step) in [(0, 7), (PAGE, 11), (2 * PAGE, 13)] {
            let bytes: Vec<u8> = (0..PAGE)
                .map(|index| (index * step / 3) as u8 ^ seed)
                .collect();
            self.arena.write(offset, &bytes);
        }
    }
}

/// The indices in [`Guest::bytes`] of a list's bytes.
fn places(ranges: &[Range]) -> Vec<usize> {
    let place = |address: u64| {
        if address < HIGH {
            (address - LOW) as usize
        } else {
            LOW_LEN + (address - HIGH) as usize
        }
    };
    ranges
        .iter()
        .flat_map(|range| (0..u64::from(range.len)).map(move |index| place(range.address + index)))
        .collect()
}

fn any_range() -> impl Strategy<Value = Range> {
    let low = (0..LOW_LEN as u64)
        .prop_flat_map(|start| (Just(LOW + start), 0..=(LOW_LEN as u64 - start)));
    let high = (0..HIGH_LEN as u64)
        .prop_flat_map(|start| (Just(HIGH + start), 0..=(HIGH_LEN as u64 - start)));
    prop_oneof![low, high].prop_map(|(address, len)| Range {
        address,
        len: len as u32,
    })
}

/// Ranges with a part of them: an offset and a length.
fn any_part() -> impl Strategy<Value = (Vec<Range>, usize, usize)> {
    vec(any_range(), 0..6).prop_flat_map(|ranges| {
        let total = total_len(&ranges);
        (Just(ranges), 0..=total)
            .prop_flat_map(move |(ranges, offset)| (Just(ranges), Just(offset), 0..=total - offset))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]

    #[test]
    fn reads_what_is_there((ranges, offset, len) in any_part()) {
        let guest = guest();
        guest.fill(1);
        let bytes = guest.bytes();
        let expected: Vec<u8> = places(&ranges)[offset..offset + len].iter().map(|place| bytes[*place]).collect();
        let mut found = vec![0; len];
        guest.memory.read(&ranges, offset, &mut found).unwrap();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn reads_as_much_of_the_head_as_there_is((ranges, _, _) in any_part(), room in 0..3 * PAGE) {
        let guest = guest();
        guest.fill(9);
        let bytes = guest.bytes();
        let expected: Vec<u8> = places(&ranges).iter().take(room).map(|place| bytes[*place]).collect();
        let mut found = vec![0xee; room];
        let len = guest.memory.read_head(&ranges, &mut found).unwrap();
        prop_assert_eq!(&found[..len], &expected[..]);
        prop_assert!(found[len..].iter().all(|byte| *byte == 0xee));
    }

    #[test]
    fn writes_there_and_nowhere_else((ranges, offset, len) in any_part()) {
        let guest = guest();
        guest.fill(2);
        let from: Vec<u8> = (0..len).map(|index| (index * 31 / 8) as u8).collect();
        let mut expected = guest.bytes();
        for (place, byte) in places(&ranges)[offset..].iter().zip(&from) {
            expected[*place] = *byte;
        }
        guest.memory.write(&ranges, offset, &from).unwrap();
        prop_assert!(guest.bytes() == expected);
    }

    #[test]
    fn copies_between_guests(
        (from_ranges, from_offset, from_len) in any_part(),
        (to_ranges, to_offset, to_len) in any_part(),
    ) {
        let (from, to) = (guest(), guest());
        from.fill(3);
        to.fill(4);
        let len = from_len.min(to_len);
        let (source, mut expected) = (from.bytes(), to.bytes());
        let sources = &places(&from_ranges)[from_offset..from_offset + len];
        for (source_place, place) in sources.iter().zip(&places(&to_ranges)[to_offset..]) {
            expected[*place] = source[*source_place];
        }
        copy(&from.memory, &from_ranges, from_offset, &to.memory, &to_ranges, to_offset, len).unwrap();
        prop_assert!(to.bytes() == expected);
        prop_assert!(from.bytes() == source);
    }
}

#[test]
fn copies_onto_itself_as_memmove_does() {
    let guest = guest();
    guest.fill(5);
    for (from, to) in [(0_usize, 100_usize), (100, 0), (7, 7)] {
        let mut expected = guest.bytes();
        expected.copy_within(from..from + 1000, to);
        let range = |start: usize| {
            [Range {
                address: LOW + start as u64,
                len: 1000,
            }]
        };
        copy(
            &guest.memory,
            &range(from),
            0,
            &guest.memory,
            &range(to),
            0,
            1000,
        )
        .unwrap();
        assert!(guest.bytes() == expected, "from {from} to {to}");
    }
}

#[test]
fn refuses_what_the_ranges_do_not_have() {
    let guest = guest();
    let ranges = [
        Range {
            address: LOW,
            len: 10,
        },
        Range {
            address: HIGH,
            len: 20,
        },
    ];
    let mut into = [0; 31];
    guest.memory.read(&ranges, 0, &mut into[..30]).unwrap();
    guest.memory.read(&ranges, 30, &mut []).unwrap();
    guest.memory.write(&ranges, 29, &[1]).unwrap();
    for (offset, len) in [(0, 31), (1, 30), (30, 1), (31, 0), (usize::MAX, 1)] {
        let error = guest
            .memory
            .read(&ranges, offset, &mut into[..len])
            .unwrap_err();
        assert!(
            matches!(error, MemoryError::RangesTooShort { found: 30, .. }),
            "{error}"
        );
        let error = guest
            .memory
            .write(&ranges, offset, &into[..len])
            .unwrap_err();
        assert!(
            matches!(error, MemoryError::RangesTooShort { found: 30, .. }),
            "{error}"
        );
        let error = copy(
            &guest.memory,
            &ranges,
            offset,
            &guest.memory,
            &ranges,
            0,
            len,
        )
        .unwrap_err();
        assert!(
            matches!(error, MemoryError::RangesTooShort { found: 30, .. }),
            "{error}"
        );
    }
}

#[test]
fn refuses_addresses_without_memory() {
    let guest = guest();
    let end = LOW + LOW_LEN as u64;
    // Below, above, over the end, and around the top of the address space.
    for (address, missing) in [
        (LOW - 1, LOW - 1),
        (end, end),
        (end - 1, end),
        (u64::MAX, u64::MAX),
        (0, 0),
    ] {
        let ranges = [Range { address, len: 2 }];
        let error = guest.memory.read(&ranges, 0, &mut [0; 2]).unwrap_err();
        assert!(
            matches!(error, MemoryError::NotMapped { address } if address == missing),
            "{address:#x}: {error}"
        );
        let error = guest.memory.write(&ranges, 0, &[0; 2]).unwrap_err();
        assert!(
            matches!(error, MemoryError::NotMapped { address } if address == missing),
            "{address:#x}: {error}"
        );
    }
    let empty = GuestMemory::new();
    assert!(matches!(
        empty.read(&[Range { address: 0, len: 1 }], 0, &mut [0]),
        Err(MemoryError::NotMapped { address: 0 })
    ));
    empty.read(&[], 0, &mut []).unwrap();
}

#[test]
fn a_removed_region_stays_with_the_old_snapshot() {
    let guest = guest();
    let old = guest.memory.clone();
    let mut new = guest.memory.clone();
    assert_eq!(new.region_count(), 3);
    let frontend = guest.arena.base();
    for (address, size, frontend) in [
        (HIGH + 1, PAGE, frontend),
        (HIGH, PAGE - 1, frontend),
        (HIGH, PAGE, frontend + 1),
    ] {
        let error = new
            .remove_region(address, size as u64, frontend)
            .unwrap_err();
        assert!(matches!(error, MemoryError::NoSuchRegion { .. }), "{error}");
        assert!(!new.has_region(address, size as u64, frontend));
    }
    assert!(new.has_region(HIGH, HIGH_LEN as u64, frontend));
    new.remove_region(HIGH, HIGH_LEN as u64, frontend).unwrap();
    assert!(!new.has_region(HIGH, HIGH_LEN as u64, frontend));
    assert_eq!(new.region_count(), 2);
    let ranges = [Range {
        address: HIGH,
        len: 4,
    }];
    assert!(matches!(
        new.write(&ranges, 0, b"gone"),
        Err(MemoryError::NotMapped { address: HIGH })
    ));
    drop(guest.memory);
    old.write(&ranges, 0, b"here").unwrap();
    let mut found = [0; 4];
    guest.arena.read(0, &mut found);
    assert_eq!(&found, b"here");
    // The place is free again.
    new.add_region(guest.arena.part(HIGH, 0, HIGH_LEN).unwrap())
        .unwrap();
    new.read(&ranges, 0, &mut found).unwrap();
    assert_eq!(&found, b"here");
}

#[test]
fn refuses_regions_that_overlap() {
    let arena = Arena::new(8 * PAGE).unwrap();
    let spec = |guest: u64, frontend: u64, pages: usize| RegionSpec {
        frontend_address: frontend,
        ..arena.part(guest, 0, pages * PAGE).unwrap()
    };
    let page = PAGE as u64;
    let mut memory = GuestMemory::with_regions(vec![spec(10 * page, 100 * page, 2)]).unwrap();
    for (guest, pages) in [(9, 2), (10, 1), (11, 1), (11, 2), (9, 4), (10, 2)] {
        let error = memory
            .add_region(spec(guest * page, 200 * page, pages))
            .unwrap_err();
        assert!(
            matches!(error, MemoryError::Overlap { .. }),
            "guest page {guest}: {error}"
        );
        let error = memory
            .add_region(spec(20 * page, (guest + 90) * page, pages))
            .unwrap_err();
        assert!(
            matches!(error, MemoryError::Overlap { .. }),
            "front-end page {guest}: {error}"
        );
    }
    memory.add_region(spec(9 * page, 102 * page, 1)).unwrap();
    memory.add_region(spec(12 * page, 99 * page, 1)).unwrap();
    assert_eq!(memory.region_count(), 3);
}

#[test]
fn refuses_sizes_and_addresses_that_cannot_be() {
    let arena = Arena::new(PAGE).unwrap();
    let add = |change: &dyn Fn(&mut RegionSpec)| {
        let mut spec = arena.region(0).unwrap();
        change(&mut spec);
        GuestMemory::with_regions(vec![spec]).unwrap_err()
    };
    assert!(matches!(
        add(&|spec| spec.size = 0),
        MemoryError::EmptyRegion { guest_address: 0 }
    ));
    let page = PAGE as u64;
    for error in [
        add(&|spec| spec.guest_address = u64::MAX - page + 1),
        add(&|spec| spec.frontend_address = u64::MAX - page + 1),
        add(&|spec| spec.file_offset = u64::MAX - page + 1),
    ] {
        assert!(
            matches!(error, MemoryError::AddressOverflow { .. }),
            "{error}"
        );
    }
    for size in [1 << 63, u64::MAX] {
        let error = add(&|spec| spec.size = size);
        assert!(
            matches!(error, MemoryError::TooMuchMemory { .. }),
            "{error}"
        );
    }
    // One page below the top fits, and its last byte can be used.
    let top = u64::MAX - page;
    let memory = GuestMemory::with_regions(vec![RegionSpec {
        guest_address: top,
        ..arena.region(0).unwrap()
    }])
    .unwrap();
    memory
        .write(
            &[Range {
                address: u64::MAX - 1,
                len: 1,
            }],
            0,
            &[9],
        )
        .unwrap();
    let beyond = [Range {
        address: u64::MAX - 1,
        len: 3,
    }];
    assert!(matches!(
        memory.write(&beyond, 0, &[9; 3]),
        Err(MemoryError::NotMapped { address: u64::MAX })
    ));
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn refuses_files_that_will_not_do() {
    let arena = Arena::new(2 * PAGE).unwrap();
    let page = PAGE as u64;
    let add = |spec: RegionSpec| GuestMemory::with_regions(vec![spec]);
    let spec = |file_offset: u64, size: u64| RegionSpec {
        file_offset,
        size,
        ..arena.region(0).unwrap()
    };

    add(spec(page, page)).unwrap();
    let error = add(spec(page, page + 1)).unwrap_err();
    assert!(
        matches!(error, MemoryError::FileTooShort { needed, found } if needed == 2 * page + 1 && found == 2 * page),
        "{error}"
    );
    let error = add(spec(1, page)).unwrap_err();
    assert!(
        matches!(
            error,
            MemoryError::MisalignedOffset {
                offset: 1,
                page_len: PAGE
            }
        ),
        "{error}"
    );

    let socket = OwnedFd::from(UnixStream::pair().unwrap().0);
    let devices = [
        File::from(socket),
        File::open("/dev/zero").unwrap(),
        File::open("/proc/self").unwrap(),
    ];
    for file in devices {
        let error = add(RegionSpec {
            file,
            ..spec(0, page)
        })
        .unwrap_err();
        assert!(matches!(error, MemoryError::NotARegularFile), "{error}");
    }
    // This program: a file on a disk, unless it was built in memory.
    let file = File::open(std::env::current_exe().unwrap()).unwrap();
    if rustix::fs::fcntl_get_seals(&file).is_err() {
        let error = add(RegionSpec {
            file,
            ..spec(0, page)
        })
        .unwrap_err();
        assert!(matches!(error, MemoryError::FileSystem { .. }), "{error}");
    }
    // On /proc: a regular file of a file system that holds no guest's memory.
    let file = File::open("/proc/self/maps").unwrap();
    let error = add(RegionSpec {
        file,
        ..spec(0, page)
    })
    .unwrap_err();
    assert!(
        matches!(error, MemoryError::FileSystem { kind: 0x9fa0 }),
        "{error}"
    );
    let memory = arena.region(0).unwrap().file;
    let read_only = File::open(format!("/proc/self/fd/{}", memory.as_raw_fd())).unwrap();
    let error = add(RegionSpec {
        file: read_only,
        ..spec(0, page)
    })
    .unwrap_err();
    assert!(matches!(error, MemoryError::Map(_)), "{error}");
}

#[test]
fn a_size_that_is_no_multiple_of_a_page_ends_where_it_says() {
    let arena = Arena::new(PAGE).unwrap();
    let spec = RegionSpec {
        size: 100,
        ..arena.region(LOW).unwrap()
    };
    let memory = GuestMemory::with_regions(vec![spec]).unwrap();
    memory
        .write(
            &[Range {
                address: LOW + 99,
                len: 1,
            }],
            0,
            &[1],
        )
        .unwrap();
    let error = memory
        .write(
            &[Range {
                address: LOW + 99,
                len: 2,
            }],
            0,
            &[1, 2],
        )
        .unwrap_err();
    assert!(
        matches!(error, MemoryError::NotMapped { address } if address == LOW + 100),
        "{error}"
    );
}

#[test]
#[cfg_attr(miri, ignore = "slow there, and about nothing that Miri sees")]
fn has_at_most_so_many_regions() {
    let arena = Arena::new((MAX_REGIONS + 1) * PAGE).unwrap();
    let spec = |index: usize| {
        arena
            .part((2 * index * PAGE) as u64, index * PAGE, PAGE)
            .unwrap()
    };
    let mut memory =
        GuestMemory::with_regions((0..MAX_REGIONS - 1).rev().map(spec).collect()).unwrap();
    memory.add_region(spec(MAX_REGIONS - 1)).unwrap();
    let error = memory.add_region(spec(MAX_REGIONS)).unwrap_err();
    assert!(
        matches!(error, MemoryError::TooManyRegions { max: MAX_REGIONS }),
        "{error}"
    );
    assert_eq!(memory.region_count(), MAX_REGIONS);
    // Every region is found, and none of the gaps.
    for index in 0..MAX_REGIONS {
        let address = (2 * index * PAGE) as u64;
        memory
            .write(
                &[Range { address, len: 2 }],
                0,
                &(index as u16).to_le_bytes(),
            )
            .unwrap();
        let mut found = [0; 2];
        arena.read(index * PAGE, &mut found);
        assert_eq!(u16::from_le_bytes(found), index as u16);
        assert!(memory.locate(address + PAGE as u64).is_none());
    }
    memory.remove_region(0, PAGE as u64, arena.base()).unwrap();
    memory.add_region(spec(0)).unwrap();
}
