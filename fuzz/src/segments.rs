//! Copies between lists of ranges cut in any way, and between such lists and sockets.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use guestmem::guest::{GuestMemory, MemoryError, Range, copy, total_len};
use guestmem::io::{Gather, Scatter};
use guestmem_driver::Arena;

use crate::Dice;

const PAGE: usize = 4096;
/// Bytes of memory of each guest, in two regions that touch in the guest and not in the file.
const GUEST_BYTES: usize = 8 * PAGE;
const BASE: u64 = 1 << 30;

/// A guest with a flat copy of its memory beside it.
struct Guest {
    arena: Arena,
    memory: GuestMemory,
    flat: Vec<u8>,
}

impl Guest {
    fn new(seed: u8) -> Guest {
        let arena = Arena::new(GUEST_BYTES + PAGE).expect("an arena");
        let flat: Vec<u8> = (0..GUEST_BYTES)
            .map(|index| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ seed)
            .collect();
        let half = GUEST_BYTES / 2;
        arena.write(0, &flat[..half]);
        arena.write(half + PAGE, &flat[half..]);
        let parts = vec![
            arena.part(BASE, 0, half).expect("a part"),
            arena
                .part(BASE + half as u64, half + PAGE, half)
                .expect("a part"),
        ];
        let memory = GuestMemory::with_regions(parts).expect("they touch and do not overlap");
        Guest {
            arena,
            memory,
            flat,
        }
    }

    /// Bytes of the flat copy that a list stands for, in order.
    fn places(ranges: &[Range]) -> impl Iterator<Item = usize> + '_ {
        ranges.iter().flat_map(|range| {
            let start = (range.address - BASE) as usize;
            start..start + range.len as usize
        })
    }

    fn gather(&self, ranges: &[Range], offset: usize, len: usize) -> Vec<u8> {
        let places = Guest::places(ranges).skip(offset).take(len);
        places.map(|place| self.flat[place]).collect()
    }

    fn scatter(&mut self, ranges: &[Range], offset: usize, bytes: &[u8]) {
        let places: Vec<usize> = Guest::places(ranges).skip(offset).collect();
        for (place, byte) in places.into_iter().zip(bytes) {
            self.flat[place] = *byte;
        }
    }

    /// The guest's memory is exactly the flat copy.
    fn check(&self) {
        let half = GUEST_BYTES / 2;
        let mut real = vec![0; GUEST_BYTES];
        self.arena.read(0, &mut real[..half]);
        self.arena.read(half + PAGE, &mut real[half..]);
        assert!(real == self.flat, "the memory is not what it should be");
        let mut gap = [0; PAGE];
        self.arena.read(half, &mut gap);
        assert_eq!(gap, [0; PAGE], "what is between the regions was written to");
    }
}

/// Ranges in order and apart, with gaps of any size, some across the border of the regions.
fn any_ranges(dice: &mut Dice<'_>) -> Vec<Range> {
    let mut ranges = Vec::new();
    let mut at = dice.below(GUEST_BYTES);
    for _ in 0..dice.below(12) {
        let len = match dice.below(4) {
            0 => dice.below(3 * PAGE),
            _ => dice.below(200),
        };
        let len = len.min(GUEST_BYTES - at);
        ranges.push(Range {
            address: BASE + at as u64,
            len: len as u32,
        });
        at = (at + len + dice.below(64)).min(GUEST_BYTES);
    }
    ranges
}

/// Bytes go from any place of one list to any place of another, through private memory or through a socket or neither,
/// and nothing else changes. Too much is refused with nothing done.
pub fn move_bytes(input: &[u8]) {
    let mut dice = Dice::new(input);
    let (from, mut to) = (Guest::new(0), Guest::new(0x5a));
    for _ in 0..8 {
        if dice.is_empty() {
            break;
        }
        let (sources, targets) = (any_ranges(&mut dice), any_ranges(&mut dice));
        let (found, room) = (total_len(&sources), total_len(&targets));
        let source_offset = dice.below(found + 1);
        let target_offset = dice.below(room + 1);
        let most = (found - source_offset).min(room - target_offset);
        let len = dice.below(most + 1);
        let bytes = from.gather(&sources, source_offset, len);
        match dice.below(4) {
            0 | 1 => {
                let mut private = vec![0; len];
                let read = from.memory.read(&sources, source_offset, &mut private);
                read.expect("it is all there");
                assert!(private == bytes);
                let wrote = to.memory.write(&targets, target_offset, &private);
                wrote.expect("there is room");
            }
            2 => copy(
                &from.memory,
                &sources,
                source_offset,
                &to.memory,
                &targets,
                target_offset,
                len,
            )
            .expect("it is all there, and there is room"),
            _ => through_socket(
                (&from.memory, &sources, source_offset),
                (&to.memory, &targets, target_offset),
                len,
            ),
        }
        to.scatter(&targets, target_offset, &bytes);
        to.check();
        let too_much = copy(
            &from.memory,
            &sources,
            source_offset,
            &to.memory,
            &targets,
            target_offset,
            most + 1,
        );
        assert!(matches!(too_much, Err(MemoryError::RangesTooShort { .. })));
    }
    from.check();
    to.check();
}

type Place<'a> = (&'a GuestMemory, &'a [Range], usize);

fn through_socket(from: Place<'_>, to: Place<'_>, len: usize) {
    let (near, far) = UnixStream::pair().expect("a pair of sockets");
    let mut gather = Gather::new();
    gather
        .push(from.0, from.1, from.2, len)
        .expect("few enough pieces");
    assert_eq!(gather.len(), len);
    let mut scatter = Scatter::new();
    scatter
        .push(to.0, to.1, to.2, len)
        .expect("few enough pieces");
    if len == 0 {
        return;
    }
    assert_eq!(gather.send(near.as_fd(), false).expect("it fits"), len);
    assert_eq!(scatter.receive(far.as_fd()).expect("it is there"), len);
}
