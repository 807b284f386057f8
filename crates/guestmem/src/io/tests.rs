use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::guestmem_driver::Arena;

const PAGE: usize = 4096;
const ARENA: usize = 64 * PAGE;

fn guest() -> (Arena, GuestMemory) {
    let arena = Arena::new(ARENA).unwrap();
    // Two regions that touch for the guest and not here.
    let half = ARENA / 2;
    let memory = GuestMemory::with_regions(vec![
        arena.part(0, half, half).unwrap(),
        arena.part(half as u64, 0, half).unwrap(),
    ])
    .unwrap();
    let bytes: Vec<u8> = (0..ARENA)
        .map(|index| (index / 3) as u8 ^ (index >> 9) as u8)
        .collect();
    memory.write(&[range(0, ARENA)], 0, &bytes).unwrap();
    (arena, memory)
}

fn range(address: usize, len: usize) -> Range {
    Range {
        address: address as u64,
        len: len as u32,
    }
}

fn content(memory: &GuestMemory, ranges: &[Range]) -> Vec<u8> {
    let mut bytes = vec![0; crate::guest::total_len(ranges)];
    memory.read(ranges, 0, &mut bytes).unwrap();
    bytes
}

fn records() -> (OwnedFd, OwnedFd) {
    let mut pair = [0; 2];
    // SAFETY: there is room for the two descriptors of the answer.
    let result = unsafe {
        libc::socketpair(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC,
            0,
            pair.as_mut_ptr(),
        )
    };
    assert_eq!(result, 0);
    // SAFETY: both are new and have no other owner.
    pair.map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) })
        .into()
}

/// Pieces of a transfer: guest ranges, or private bytes of some length.
fn any_pieces() -> impl Strategy<Value = Vec<Result<Vec<Range>, usize>>> {
    let some_range = (0..ARENA - 600, 0..600_usize).prop_map(|(address, len)| range(address, len));
    let ranges = vec(some_range, 0..4).prop_map(Ok);
    let bytes = (0..100_usize).prop_map(Err);
    vec(prop_oneof![ranges, bytes], 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..Default::default() })]

    #[test]
    fn sends_the_pieces_in_order(pieces in any_pieces(), cut in 0..200_usize) {
        let (_arena, memory) = guest();
        let private: Vec<u8> = (0..100).map(|index| 255 - index).collect();
        let mut gather = Gather::new();
        let mut expected = Vec::new();
        for piece in &pieces {
            match piece {
                Ok(ranges) => {
                    let all = content(&memory, ranges);
                    let offset = cut.min(all.len());
                    gather.push(&memory, ranges, offset, all.len() - offset).unwrap();
                    expected.extend_from_slice(&all[offset..]);
                }
                Err(len) => {
                    gather.push_bytes(&private[..*len]).unwrap();
                    expected.extend_from_slice(&private[..*len]);
                }
            }
        }
        prop_assert_eq!(gather.len(), expected.len());
        prop_assert_eq!(gather.is_empty(), expected.is_empty());
        let (near, mut far) = UnixStream::pair().unwrap();
        prop_assert_eq!(gather.send(near.as_fd(), false).unwrap(), expected.len());
        drop(near);
        let mut found = Vec::new();
        far.read_to_end(&mut found).unwrap();
        prop_assert!(found == expected);
    }

    #[test]
    fn receives_into_the_pieces_in_order(
        guest_lens in vec(1..2000_usize, 1..5), private_len in 1..100_usize, sent in 1..8000_usize,
    ) {
        let (_arena, memory) = guest();
        // Side by side, with gaps, and across the border of the regions.
        let mut address = ARENA / 2 - 1500;
        let ranges: Vec<Range> = guest_lens.iter().map(|len| {
            let here = range(address, *len);
            address += len + 3;
            here
        }).collect();
        let around = [range(0, ARENA)];
        let mut expected = content(&memory, &around);
        let mut private = vec![0; private_len];
        let message: Vec<u8> = (0..sent).map(|index| (index * 7 / 5) as u8).collect();
        let total = private_len + crate::guest::total_len(&ranges);
        let len = sent.min(total);

        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&message).unwrap();
        let mut scatter = Scatter::new();
        scatter.push_bytes(&mut private).unwrap();
        scatter.push(&memory, &ranges, 0, total - private_len).unwrap();
        prop_assert_eq!(scatter.len(), total);
        prop_assert_eq!(scatter.receive(near.as_fd()).unwrap(), len);
        drop(scatter);

        let header = len.min(private_len);
        prop_assert_eq!(&private[..header], &message[..header]);
        let places = ranges.iter().flat_map(|range| range.address as usize..range.address as usize + range.len as usize);
        for (place, byte) in places.zip(&message[header..len]) {
            expected[place] = *byte;
        }
        prop_assert!(content(&memory, &around) == expected);
    }
}

#[test]
fn says_when_it_would_block_and_how_much_went() {
    let (_arena, memory) = guest();
    let (near, mut far) = UnixStream::pair().unwrap();
    let ranges = [range(0, ARENA)];
    let mut scatter = Scatter::new();
    scatter.push(&memory, &ranges, 0, 10).unwrap();
    assert_eq!(
        scatter.receive(near.as_fd()).unwrap_err().kind(),
        ErrorKind::WouldBlock
    );
    drop(scatter);

    let expected = content(&memory, &ranges);
    let mut sent = 0;
    let error = loop {
        let mut gather = Gather::new();
        let offset = sent % ARENA;
        gather
            .push(&memory, &ranges, offset, ARENA - offset)
            .unwrap();
        match gather.send(near.as_fd(), false) {
            Ok(len) => sent += len,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    drop(near);
    let mut found = Vec::new();
    far.read_to_end(&mut found).unwrap();
    assert_eq!(found.len(), sent);
    assert!(
        found
            .iter()
            .zip(expected.iter().cycle())
            .all(|(found, expected)| found == expected)
    );
}

#[test]
fn counts_pieces_and_takes_so_many() {
    let (_arena, memory) = guest();
    // Every other byte: none follows another.
    let single = |index: usize| range(2 * index, 1);
    let mut gather = Gather::new();
    let most: Vec<Range> = (0..Gather::MAX_SEGMENTS - 2).map(single).collect();
    gather.push(&memory, &most, 0, most.len()).unwrap();
    let before = (gather.segments(), gather.len());
    assert_eq!(before, (Gather::MAX_SEGMENTS - 2, Gather::MAX_SEGMENTS - 2));

    let three: Vec<Range> = (5000..5003).map(single).collect();
    let error = gather.push(&memory, &three, 0, 3).unwrap_err();
    assert!(
        matches!(
            error,
            MemoryError::TooManySegments {
                max: Gather::MAX_SEGMENTS
            }
        ),
        "{error}"
    );
    assert_eq!(
        (gather.segments(), gather.len()),
        before,
        "nothing was added"
    );
    gather.push(&memory, &three, 0, 2).unwrap();
    assert_eq!(gather.segments(), Gather::MAX_SEGMENTS);

    assert!(matches!(
        gather.push_bytes(b"x"),
        Err(MemoryError::TooManySegments { .. })
    ));
    // What goes on where the last piece ended is no new piece; and nothing is nothing.
    gather
        .push(&memory, &[range(2 * 5001 + 1, 5)], 0, 5)
        .unwrap();
    gather.push_bytes(b"").unwrap();
    assert_eq!(
        (gather.segments(), gather.len()),
        (Gather::MAX_SEGMENTS, Gather::MAX_SEGMENTS + 5)
    );
    // The last piece grew and must shrink again when the rest does not fit.
    let error = gather
        .push(&memory, &[range(2 * 5001 + 6, 5), range(0, 1)], 0, 6)
        .unwrap_err();
    assert!(
        matches!(error, MemoryError::TooManySegments { .. }),
        "{error}"
    );
    assert_eq!(gather.len(), Gather::MAX_SEGMENTS + 5);

    let (near, mut far) = UnixStream::pair().unwrap();
    assert_eq!(gather.send(near.as_fd(), false).unwrap(), gather.len());
    drop(near);
    let mut found = Vec::new();
    far.read_to_end(&mut found).unwrap();
    let mut ranges = most;
    ranges.extend_from_slice(&three[..2]);
    ranges.push(range(2 * 5001 + 1, 5));
    assert!(found == content(&memory, &ranges));

    let mut scatter = Scatter::new();
    let too_many: Vec<Range> = (0..=Scatter::MAX_SEGMENTS).map(single).collect();
    assert!(matches!(
        scatter.push(&memory, &too_many, 0, too_many.len()),
        Err(MemoryError::TooManySegments { .. })
    ));
    assert_eq!((scatter.segments(), scatter.len()), (0, 0));
    scatter
        .push(&memory, &too_many, 1, Scatter::MAX_SEGMENTS)
        .unwrap();
    let mut byte = [0];
    assert!(matches!(
        scatter.push_bytes(&mut byte),
        Err(MemoryError::TooManySegments { .. })
    ));
}

#[test]
fn adds_nothing_of_ranges_that_will_not_do() {
    let (_arena, memory) = guest();
    let mut gather = Gather::new();
    gather.push(&memory, &[range(0, 10)], 0, 10).unwrap();
    let half_mapped = [range(10, 20), range(ARENA - 1, 2)];
    let error = gather.push(&memory, &half_mapped, 0, 22).unwrap_err();
    assert!(
        matches!(error, MemoryError::NotMapped { address } if address == ARENA as u64),
        "{error}"
    );
    assert!(matches!(
        gather.push(&memory, &half_mapped, 0, 23),
        Err(MemoryError::RangesTooShort { .. })
    ));
    assert_eq!((gather.segments(), gather.len()), (1, 10));
}

#[test]
fn keeps_records_apart_and_says_when_one_is_cut() {
    let (_arena, memory) = guest();
    let (near, far) = records();
    let ranges = [range(100, 50), range(1000, 50)];
    let mut gather = Gather::new();
    gather.push(&memory, &ranges, 0, 100).unwrap();
    assert_eq!(gather.send(near.as_fd(), true).unwrap(), 100);
    assert_eq!(gather.send(near.as_fd(), true).unwrap(), 100);

    let expected = content(&memory, &ranges);
    let mut room = [0; 150];
    let mut scatter = Scatter::new();
    scatter.push_bytes(&mut room).unwrap();
    let received = scatter.receive_record(far.as_fd()).unwrap();
    assert_eq!((received.len, received.truncated), (100, false));
    drop(scatter);
    assert_eq!(room[..100], expected);

    let mut scatter = Scatter::new();
    scatter.push(&memory, &[range(5000, 99)], 0, 99).unwrap();
    let received = scatter.receive_record(far.as_fd()).unwrap();
    assert_eq!((received.len, received.truncated), (99, true));
    assert_eq!(content(&memory, &[range(5000, 99)]), expected[..99]);
    assert_eq!(
        scatter.receive(far.as_fd()).unwrap_err().kind(),
        ErrorKind::WouldBlock,
        "the rest is gone"
    );
}

#[test]
fn a_peer_that_is_gone_is_an_end_or_an_error() {
    let (_arena, memory) = guest();
    let (near, far) = UnixStream::pair().unwrap();
    drop(far);
    let mut gather = Gather::new();
    gather.push_bytes(b"into the void").unwrap();
    assert_eq!(
        gather.send(near.as_fd(), false).unwrap_err().kind(),
        ErrorKind::BrokenPipe
    );
    let mut scatter = Scatter::new();
    assert_eq!(
        scatter.receive(near.as_fd()).unwrap_err().kind(),
        ErrorKind::InvalidInput,
        "no room is no end"
    );
    scatter.push(&memory, &[range(0, 1)], 0, 1).unwrap();
    assert_eq!(scatter.receive(near.as_fd()).unwrap(), 0);
}

#[test]
fn memory_that_is_gone_is_an_error_and_no_signal() {
    let (arena, memory) = guest();
    arena.file().set_len(0).unwrap();
    let (near, mut far) = UnixStream::pair().unwrap();
    let mut gather = Gather::new();
    gather.push(&memory, &[range(0, 8)], 0, 8).unwrap();
    let error = gather.send(near.as_fd(), false).unwrap_err();
    assert!(is_memory_fault(&error), "{error}");
    far.write_all(b"incoming").unwrap();
    let mut scatter = Scatter::new();
    scatter.push(&memory, &[range(0, 8)], 0, 8).unwrap();
    let error = scatter.receive(near.as_fd()).unwrap_err();
    assert!(is_memory_fault(&error), "{error}");
    assert!(!is_memory_fault(&io::Error::from(ErrorKind::WouldBlock)));
}

/// Whether SIGPIPE waits for this thread, which has it blocked.
fn signal_is_pending() -> bool {
    let mut pending = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the set is large enough for the answer.
    let result = unsafe { libc::sigpending(pending.as_mut_ptr()) };
    assert_eq!(result, 0);
    // SAFETY: an all-zero set is valid, and the call has filled it in.
    let pending = unsafe { pending.assume_init() };
    // SAFETY: the set is initialised.
    unsafe { libc::sigismember(&pending, libc::SIGPIPE) == 1 }
}

#[test]
fn a_peer_that_is_gone_raises_no_signal() {
    // A blocked signal stays pending, even where the process ignores it; so the thread can check whether one was raised.
    thread::spawn(|| {
        let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: the set is large enough.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        // SAFETY: as above.
        unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE) };
        // SAFETY: the set was filled in above.
        let result =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut()) };
        assert_eq!(result, 0);

        let (near, far) = UnixStream::pair().unwrap();
        drop(far);
        let mut gather = Gather::new();
        gather.push_bytes(b"into the void").unwrap();
        assert!(gather.send(near.as_fd(), false).is_err());
        assert!(!signal_is_pending());
        // An ordinary write does raise it, so the check works.
        // SAFETY: the bytes are valid for the call.
        let written = unsafe { libc::write(near.as_raw_fd(), b"x".as_ptr().cast(), 1) };
        assert_eq!(written, -1);
        assert!(signal_is_pending());
    })
    .join()
    .unwrap();
}
