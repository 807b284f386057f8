//! Two threads over one window, as two processes would be.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::*;

/// Bytes of a stream by their position, so that each knows where it belongs.
fn byte_at(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn produce(mut producer: Producer, total: u64, wake: Sender<()>, woken: Receiver<()>) {
    let mut chunk = 1;
    while producer.position() < total {
        let position = producer.position();
        chunk = chunk * 7 % 5003 + 1;
        let most = chunk.min((total - position) as usize);
        match producer.reserve(1, most).unwrap() {
            Some(mut room) => {
                let len = room.len();
                let bytes: Vec<u8> = (position..).take(len).map(byte_at).collect();
                room.span().write(0, &bytes);
                if room.commit(len).unwrap() {
                    wake.send(()).unwrap();
                }
            }
            None => {
                if producer.arm(1).unwrap() {
                    woken.recv().unwrap();
                }
            }
        }
    }
    producer.finish();
    wake.send(()).unwrap();
}

fn consume(mut consumer: Consumer, wake: Sender<()>, woken: Receiver<()>) -> u64 {
    loop {
        let position = consumer.position();
        let len = match consumer.peek(3001).unwrap() {
            Peeked::Bytes(span) => {
                let mut bytes = vec![0; span.len()];
                span.read(0, &mut bytes);
                for (byte, position) in bytes.iter().zip(position..) {
                    assert_eq!(*byte, byte_at(position), "at {position}");
                }
                bytes.len()
            }
            Peeked::Finished => return position,
            Peeked::Empty => 0,
        };
        if len == 0 {
            if consumer.arm(0).unwrap() {
                woken.recv().unwrap();
            }
        } else if consumer.release(len).unwrap() {
            // Its reader may have written all it had, and be gone.
            let _ = wake.send(());
        }
    }
}

#[test]
fn a_stream_arrives_whole_and_nobody_is_left_asleep() {
    let total = if cfg!(miri) { 30_000 } else { 20_000_000 };
    let World {
        producer, consumer, ..
    } = world();
    let (to_consumer, consumer_woken) = channel();
    let (to_producer, producer_woken) = channel();
    let writer = thread::spawn(move || produce(producer, total, to_consumer, producer_woken));
    assert_eq!(consume(consumer, to_producer, consumer_woken), total);
    writer.join().unwrap();
}
