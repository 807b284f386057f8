//! The two ends of a ring on two threads, in every order that loom can think of and with every value that a processor may show them.
//!
//! - No wake-up is lost. An end with nothing to do sleeps; if it is not woken, loom reports that all threads are blocked.
//! - Nothing is read before it was published, nor written before it was released: each byte is a cell that loom watches.
//! - A reader that gets the end has got all bytes before it.

use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::*;

/// A wake channel: what was sent and not read adds up to one, and waiting takes it away.
struct Channel {
    signalled: Mutex<bool>,
    changed: Condvar,
}

impl Channel {
    fn wake(&self) {
        *self.signalled.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut signalled = self.signalled.lock().unwrap();
        while !*signalled {
            signalled = self.changed.wait(signalled).unwrap();
        }
        *signalled = false;
    }
}

struct Channels {
    to_producer: Channel,
    to_consumer: Channel,
}

/// What the producer does behind its last byte.
#[derive(Clone, Copy)]
enum End {
    Finish,
    Reset,
}

/// Writes the bytes 1, 2, 3 and so on, as many at a time as there is room for, up to `batch`.
fn produce(
    producer: &mut Producer,
    channels: &Channels,
    count: u8,
    batch: usize,
    end: End,
) -> Result<(), CircuitError> {
    let mut next = 1;
    while next <= count {
        let most = batch.min(usize::from(count - next) + 1);
        match producer.reserve(1, most)? {
            Some(mut room) => {
                let len = room.len();
                let bytes: Vec<u8> = (next..next + len as u8).collect();
                room.span().write(0, &bytes);
                next += len as u8;
                if room.commit(len)? {
                    channels.to_consumer.wake();
                }
            }
            None => {
                if producer.arm(1)? {
                    channels.to_producer.wait();
                }
            }
        }
    }
    match end {
        End::Finish => producer.finish(),
        End::Reset => producer.reset(),
    }
    channels.to_consumer.wake();
    Ok(())
}

/// Reads until the end, or until it has had `enough`. Returns how many bytes there were.
fn consume(consumer: &mut Consumer, channels: &Channels, enough: u8) -> Result<u8, CircuitError> {
    let mut count = 0;
    while count < enough {
        let len = match consumer.peek(usize::MAX)? {
            Peeked::Bytes(span) => {
                let mut bytes = vec![0; span.len()];
                span.read(0, &mut bytes);
                for byte in &bytes {
                    count += 1;
                    assert_eq!(*byte, count);
                }
                bytes.len()
            }
            Peeked::Finished => return Ok(count),
            Peeked::Empty => 0,
        };
        if len == 0 {
            if consumer.arm(0)? {
                channels.to_consumer.wait();
            }
        } else if consumer.release(len)? {
            channels.to_producer.wake();
        }
    }
    consumer.close();
    channels.to_producer.wake();
    Ok(count)
}

/// Runs both to their end in every way. `preemptions` bounds how often a thread may be interrupted in the middle of its work in one run;
/// `LOOM_MAX_PREEMPTIONS` says otherwise.
fn explore(
    ring_len: usize,
    count: u8,
    batch: usize,
    end: End,
    enough: u8,
    check: fn(Result<(), CircuitError>, Result<u8, CircuitError>),
) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 10_000;
    builder.preemption_bound = builder.preemption_bound.or(Some(2));
    builder.check(move || {
        let window = Window::new(ring_len);
        let channel = || Channel {
            signalled: Mutex::new(false),
            changed: Condvar::new(),
        };
        let channels = loom::sync::Arc::new(Channels {
            to_producer: channel(),
            to_consumer: channel(),
        });
        let (mut producer, _) = window.clone().split(Side::First);
        let (_, mut consumer) = window.split(Side::Second);
        let others = loom::sync::Arc::clone(&channels);
        let reader = thread::spawn(move || consume(&mut consumer, &others, enough));
        let produced = produce(&mut producer, &channels, count, batch, end);
        check(produced, reader.join().unwrap());
    });
}

fn all_arrive(produced: Result<(), CircuitError>, consumed: Result<u8, CircuitError>) {
    assert_eq!((produced, consumed), (Ok(()), Ok(2)));
}

#[test]
fn two_bytes_through_a_ring_of_one() {
    explore(1, 2, 1, End::Finish, u8::MAX, all_arrive);
}

#[test]
fn two_bytes_through_a_ring_of_two() {
    explore(2, 2, 1, End::Finish, u8::MAX, all_arrive);
    explore(2, 2, 2, End::Finish, u8::MAX, all_arrive);
}

#[test]
fn three_bytes_go_around_a_ring_of_two() {
    explore(2, 3, 2, End::Finish, u8::MAX, |produced, consumed| {
        assert_eq!((produced, consumed), (Ok(()), Ok(3)));
    });
}

/// A reset wakes the reader, whether it has all bytes or none.
#[test]
fn a_reset_wakes_the_reader() {
    explore(1, 1, 1, End::Reset, u8::MAX, |produced, consumed| {
        assert_eq!((produced, consumed), (Ok(()), Err(CircuitError::Reset)));
    });
}

/// The end of the reader wakes a writer that waits for room.
#[test]
fn a_reader_that_has_enough_wakes_the_writer() {
    explore(1, 3, 1, End::Finish, 1, |produced, consumed| {
        assert_eq!(consumed, Ok(1));
        assert!(
            matches!(produced, Err(CircuitError::ReaderGone)),
            "{produced:?}"
        );
    });
}
