//! Both ends in one thread and in two, an honest peer and a hostile one.

use guestmem::sync::Ordering;

use super::layout::RingFields;
use super::*;

mod hostile;
mod model;
#[cfg(not(miri))]
mod places;
mod threads;

pub(super) const RING: usize = MIN_RING_LEN as usize;

pub(super) fn spec() -> WindowSpec {
    WindowSpec {
        identity: Identity {
            generation: 7,
            nonce: *b"0123456789abcdef",
        },
        kind: Kind::Bytes,
        ring_len: MIN_RING_LEN,
        page_len: system_page_len(),
    }
}

/// Both ends of both sides.
pub(super) struct World {
    pub(super) producer: Producer,
    pub(super) consumer: Consumer,
    pub(super) back_producer: Producer,
    pub(super) back_consumer: Consumer,
}

pub(super) fn world() -> World {
    let (first, second) = Window::pair(&spec());
    let (producer, back_consumer) = first.split(Side::First);
    let (back_producer, consumer) = second.split(Side::Second);
    World {
        producer,
        consumer,
        back_producer,
        back_consumer,
    }
}

/// Writes all of it at once. Whether the peer wants to be woken.
pub(super) fn send(producer: &mut Producer, bytes: &[u8]) -> bool {
    let mut room = producer.reserve(bytes.len(), 0).unwrap().expect("room");
    room.span().write(0, bytes);
    room.commit(bytes.len()).unwrap()
}

/// Reads and releases what there is, up to `most`.
pub(super) fn receive(consumer: &mut Consumer, most: usize) -> Vec<u8> {
    let Peeked::Bytes(span) = consumer.peek(most).unwrap() else {
        return Vec::new();
    };
    let mut bytes = vec![0; span.len()];
    span.read(0, &mut bytes);
    consumer.release(bytes.len()).unwrap();
    bytes
}

#[test]
fn bytes_go_both_ways() {
    let mut world = world();
    assert!(matches!(world.consumer.peek(9).unwrap(), Peeked::Empty));
    send(&mut world.producer, b"there");
    send(&mut world.back_producer, b"back");
    assert_eq!(receive(&mut world.consumer, 100), b"there");
    assert_eq!(receive(&mut world.back_consumer, 100), b"back");
    assert!(matches!(world.consumer.peek(9).unwrap(), Peeked::Empty));
}

#[cfg(not(miri))]
#[test]
fn both_sides_may_be_in_one_place() {
    let file = Window::create(&spec()).unwrap();
    let window = Window::attach(&file, 0, &spec()).unwrap();
    let ((mut producer, _), (_, mut consumer)) = window.split_both();
    send(&mut producer, b"here");
    assert_eq!(receive(&mut consumer, 9), b"here");
}

#[test]
fn a_span_goes_over_the_end_of_the_ring() {
    let mut world = world();
    for round in 0..5_u8 {
        let bytes: Vec<u8> = (0..3000).map(|index| round ^ (index % 251) as u8).collect();
        send(&mut world.producer, &bytes);
        assert_eq!(receive(&mut world.consumer, RING), bytes);
    }
    assert_eq!(world.producer.position(), 15_000);
    assert_eq!(world.consumer.position(), 15_000);
}

#[test]
fn a_span_is_filled_and_shown_chunk_by_chunk_over_the_end_too() {
    let mut world = world();
    let len = RING - 24;
    for round in 0..3 {
        let mut room = world.producer.reserve(len, 0).unwrap().expect("room");
        let mut next = round;
        room.span().fill(|chunk| {
            for byte in chunk {
                *byte = next;
                next = next.wrapping_add(3);
            }
        });
        room.commit(len).unwrap();
        let Peeked::Bytes(span) = world.consumer.peek(RING).unwrap() else {
            panic!("bytes");
        };
        let (mut expected, mut seen) = (round, 0);
        span.for_each(|chunk| {
            for byte in chunk {
                assert_eq!(*byte, expected);
                expected = expected.wrapping_add(3);
                seen += 1;
            }
        });
        assert_eq!(
            (seen, span.pieces().map(|(_, len)| len).iter().sum()),
            (len, len)
        );
        world.consumer.release(len).unwrap();
    }
}

#[test]
fn a_ring_can_be_full_and_no_fuller() {
    let mut world = world();
    let World {
        producer, consumer, ..
    } = &mut world;
    assert_eq!(producer.capacity(), RING);
    send(producer, &[1; RING]);
    assert!(producer.reserve(1, 1).unwrap().is_none());
    assert_eq!(producer.reserve(0, 9).unwrap().unwrap().len(), 0);
    assert!(matches!(
        producer.commit(1),
        Err(CircuitError::TooLong {
            asked: 1,
            most: 0,
            ..
        })
    ));
    let error = producer.reserve(RING + 1, 0).unwrap_err();
    assert!(matches!(error, CircuitError::TooLong { asked, .. } if asked == RING + 1));
    assert_eq!(receive(consumer, 1), [1]);
    assert_eq!(producer.reserve(1, RING).unwrap().unwrap().len(), 1);
    assert!(producer.reserve(2, RING).unwrap().is_none());
    assert!(!producer.is_drained().unwrap());
    receive(consumer, RING);
    assert!(producer.is_drained().unwrap());
}

#[test]
fn a_reservation_that_is_dropped_is_none_and_a_part_of_it_can_be_committed() {
    let mut world = world();
    let mut room = world.producer.reserve(10, 10).unwrap().unwrap();
    room.span().write(0, b"0123456789");
    let _ = room;
    assert_eq!(receive(&mut world.consumer, 100), b"");
    let mut room = world.producer.reserve(10, 10).unwrap().unwrap();
    room.span().write(0, b"abcdefghij");
    room.commit(3).unwrap();
    assert_eq!(receive(&mut world.consumer, 100), b"abc");
    let room = world.producer.reserve(10, 10).unwrap().unwrap();
    assert!(matches!(
        room.commit(11),
        Err(CircuitError::TooLong {
            asked: 11,
            most: 10,
            ..
        })
    ));
}

#[test]
fn more_than_was_there_cannot_be_released() {
    let mut world = world();
    send(&mut world.producer, b"abc");
    assert_eq!(world.consumer.available(), Ok(3));
    assert!(matches!(
        world.consumer.release(4),
        Err(CircuitError::TooLong {
            asked: 4,
            most: 3,
            ..
        })
    ));
    assert!(world.consumer.release(3).is_ok());
}

/// Only the publication that reaches the wanted count wakes, and only an end that has asked.
#[test]
fn a_sleeper_is_woken_once_and_at_its_count() {
    let mut world = world();
    let World {
        producer, consumer, ..
    } = &mut world;
    assert!(!send(producer, b"a"), "the reader does not sleep");
    assert_eq!(consumer.arm(0), Ok(false), "there is a byte");
    assert_eq!(consumer.arm(2), Ok(true));
    assert!(
        !send(producer, b"b"),
        "there are two, and more than two are wanted"
    );
    assert!(send(producer, b"c"));
    assert!(!send(producer, b"d"), "it was woken already");
    assert_eq!(receive(consumer, RING), b"abcd");
    assert_eq!(consumer.arm(0), Ok(true));
    assert!(send(producer, b"e"));

    send(producer, &[0; RING - 1]);
    assert_eq!(producer.arm(1), Ok(true));
    assert_eq!(producer.arm(100), Ok(true));
    assert_eq!(consumer.available(), Ok(RING));
    assert!(!consumer.release(99).unwrap());
    assert!(consumer.release(1).unwrap());
    assert!(!consumer.release(1).unwrap());
    assert_eq!(producer.arm(100), Ok(false), "there is room");
    assert!(matches!(
        producer.arm(RING + 1),
        Err(CircuitError::TooLong { .. })
    ));
    assert!(matches!(
        consumer.arm(RING),
        Err(CircuitError::TooLong { .. })
    ));
}

#[test]
fn what_was_sent_before_the_end_arrives_before_it() {
    let mut world = world();
    send(&mut world.producer, b"last");
    world.producer.finish();
    assert!(matches!(
        world.producer.reserve(1, 1),
        Err(CircuitError::Closed)
    ));
    assert!(matches!(
        world.producer.commit(1),
        Err(CircuitError::Closed)
    ));
    assert_eq!(receive(&mut world.consumer, 3), b"las");
    assert!(!world.consumer.is_at_end(), "it had no reason to look");
    assert_eq!(receive(&mut world.consumer, 3), b"t");
    assert!(matches!(world.consumer.peek(1).unwrap(), Peeked::Finished));
    assert!(world.consumer.is_at_end());
    assert_eq!(
        world.consumer.arm(0),
        Ok(false),
        "there would be no wake-up"
    );
    // It is a half-close: the other way is open.
    send(&mut world.back_producer, b"answer");
    assert_eq!(receive(&mut world.back_consumer, 9), b"answer");
}

#[test]
fn a_writer_hears_that_nobody_reads_any_more() {
    let mut world = world();
    send(&mut world.producer, &[0; RING]);
    assert_eq!(world.producer.arm(1), Ok(true));
    world.consumer.close();
    assert_eq!(world.producer.arm(1), Err(CircuitError::ReaderGone));
    assert!(matches!(
        world.producer.reserve(1, 1),
        Err(CircuitError::ReaderGone)
    ));
    assert!(matches!(world.consumer.peek(1), Err(CircuitError::Closed)));
    assert!(matches!(
        world.consumer.release(1),
        Err(CircuitError::Closed)
    ));
}

#[test]
fn a_reset_is_seen_by_the_other_side_and_outlives_everything() {
    let mut world = world();
    send(&mut world.producer, b"bytes");
    world.producer.finish();
    world.producer.reset();
    world.back_consumer.reset();
    assert_eq!(
        receive(&mut world.consumer, 9),
        b"bytes",
        "they were published before"
    );
    assert!(matches!(world.consumer.peek(1), Err(CircuitError::Reset)));
    assert!(matches!(
        world.back_producer.free(),
        Err(CircuitError::Reset)
    ));
    assert!(matches!(
        world.producer.reserve(1, 1),
        Err(CircuitError::Reset)
    ));
    world.producer.finish();
    assert!(matches!(world.consumer.peek(1), Err(CircuitError::Reset)));
}

#[test]
fn counts_may_wrap() {
    for (event, old, new, passed) in [
        (5, 4, 5, true),
        (5, 5, 6, false),
        (5, 3, 4, false),
        (5, 5, 5, false),
        (1, u64::MAX, 1, true),
        (u64::MAX, u64::MAX - 1, 3, true),
        (4, u64::MAX, 3, false),
        (0, 0, 7, false),
    ] {
        assert_eq!(ring::passes(event, old, new), passed, "{event} {old} {new}");
    }
}
