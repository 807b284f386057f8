//! A peer that writes anything anywhere.

use super::*;
use crate::layout::State;

fn fields(side: Side) -> RingFields {
    RingFields::written_by(side)
}

/// A third mapping stands for what the peer does behind its own library's back.
struct Attack {
    world: World,
}

impl Attack {
    fn new() -> Attack {
        Attack { world: world() }
    }

    fn write(&self, offset: usize, value: u64) {
        let window = self.world.back_producer.window();
        window.store(offset, value, Ordering::SeqCst);
    }
}

#[test]
fn a_head_beyond_the_ring_or_behind_itself_ends_the_circuit() {
    let ring = RING as u64;
    for (tail, first, then, good) in [
        (0, 0, ring, true),
        (0, 0, ring + 1, false),
        (0, 0, u64::MAX, false),
        (0, 10, 9, false),
        (0, 10, 10, true),
        (10, 10, ring + 10, true),
        (10, 10, ring + 11, false),
        (10, 10, 9, false),
    ] {
        // Here the peer is the one that writes the first ring; we are the second side.
        let mut attack = Attack::new();
        attack.write(fields(Side::First).head, first);
        assert_eq!(attack.world.consumer.available(), Ok(first as usize));
        attack.world.consumer.release(tail).unwrap();
        attack.write(fields(Side::First).head, then);
        let found = attack.world.consumer.available();
        match good {
            true => assert_eq!(found, Ok((then - tail as u64) as usize)),
            false => {
                let error = found.unwrap_err();
                assert!(matches!(error, CircuitError::Count { count: "head", .. }));
                let text = error.to_string();
                assert!(
                    text.contains(&then.to_string()) && text.contains("expected"),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn a_tail_beyond_the_head_or_behind_itself_ends_the_circuit() {
    for (first, then, good) in [
        (0, 100, true),
        (0, 101, false),
        (0, u64::MAX, false),
        (50, 49, false),
        (50, 50, true),
    ] {
        let mut attack = Attack::new();
        send(&mut attack.world.producer, &[0; 100]);
        attack.write(fields(Side::First).tail, first);
        assert_eq!(
            attack.world.producer.free(),
            Ok(RING - 100 + first as usize)
        );
        attack.write(fields(Side::First).tail, then);
        match attack.world.producer.free() {
            Ok(free) => assert!(good && free == RING - 100 + then as usize),
            Err(error) => {
                assert!(!good, "{error}");
                assert!(matches!(error, CircuitError::Count { count: "tail", .. }));
            }
        }
    }
}

/// Our own counts and states are never read back: a peer that writes over them confuses only itself.
#[test]
fn our_own_fields_are_ours() {
    let mut attack = Attack::new();
    send(&mut attack.world.producer, b"abc");
    attack.write(fields(Side::First).head, u64::MAX);
    attack.write(fields(Side::First).producer_state, u64::MAX);
    assert_eq!(attack.world.producer.free(), Ok(RING - 3));
    send(&mut attack.world.producer, b"def");
    attack.write(fields(Side::First).producer_state, State::Open.word(7));
    assert_eq!(receive(&mut attack.world.consumer, 9), b"abcdef");
    attack.write(fields(Side::First).tail, u64::MAX);
    assert_eq!(attack.world.consumer.position(), 6);
}

#[test]
fn a_state_that_does_not_exist_ends_the_circuit_and_another_generation_revokes_it() {
    for (word, expected) in [
        (7 << 8 | 4, CircuitError::State { found: 7 << 8 | 4 }),
        (7 << 8, CircuitError::State { found: 7 << 8 }),
        (8 << 8 | 1, CircuitError::Revoked),
        (1, CircuitError::Revoked),
        (7 << 8 | 3, CircuitError::Reset),
    ] {
        let mut attack = Attack::new();
        attack.write(fields(Side::First).consumer_state, word);
        assert_eq!(attack.world.producer.free(), Err(expected));
        attack.write(fields(Side::First).producer_state, word);
        assert_eq!(attack.world.consumer.available(), Err(expected));
    }
}

#[test]
fn a_peer_that_has_not_come_yet_is_waited_for_and_one_that_was_there_is_revoked() {
    let (first, second) = Window::pair(&spec());
    let (mut producer, mut consumer) = first.split(Side::First);
    assert_eq!(producer.free(), Ok(RING));
    assert_eq!(consumer.arm(0), Ok(true));
    send(&mut producer, b"early");
    let (_back, mut other) = second.split(Side::Second);
    assert_eq!(receive(&mut other, 9), b"early");
    assert_eq!(consumer.available(), Ok(0));
    let window = other.window();
    window.store(fields(Side::Second).producer_state, 0, Ordering::SeqCst);
    assert_eq!(consumer.available(), Err(CircuitError::Revoked));
}

#[test]
fn an_end_stays_the_end() {
    let mut attack = Attack::new();
    send(&mut attack.world.producer, b"x");
    attack.world.producer.finish();
    assert_eq!(receive(&mut attack.world.consumer, 9), b"x");
    assert!(matches!(
        attack.world.consumer.peek(9).unwrap(),
        Peeked::Finished
    ));
    attack.write(fields(Side::First).head, 2);
    assert!(matches!(
        attack.world.consumer.peek(9),
        Err(CircuitError::Count {
            found: 2,
            least: 1,
            most: 1,
            ..
        })
    ));
    attack.write(fields(Side::First).head, 1);
    attack.write(fields(Side::First).producer_state, State::Open.word(7));
    assert!(matches!(
        attack.world.consumer.peek(9),
        Err(CircuitError::State { .. })
    ));
}

/// Whatever an event says, it costs a wake-up at most.
#[test]
fn a_lie_about_events_is_harmless() {
    let mut attack = Attack::new();
    for event in [0, 1, u64::MAX, RING as u64 * 9] {
        attack.write(fields(Side::First).consumer_event, event);
        attack.write(fields(Side::First).producer_event, event);
        send(&mut attack.world.producer, b"abc");
        assert_eq!(receive(&mut attack.world.consumer, 9), b"abc");
    }
}
