//! Random steps of both ends, beside a model that is a queue.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Write {
        least: usize,
        most: usize,
        share: usize,
    },
    Read {
        most: usize,
        share: usize,
    },
    ArmProducer(usize),
    ArmConsumer(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![0..40_usize, 0..=RING + 2, RING - 3..=RING];
    prop_oneof![
        3 => (len.clone(), len.clone(), 0..100_usize).prop_map(|(least, most, share)| {
            Step::Write { least, most, share }
        }),
        3 => (len.clone(), 0..100_usize).prop_map(|(most, share)| Step::Read { most, share }),
        1 => len.clone().prop_map(Step::ArmProducer),
        1 => len.prop_map(Step::ArmConsumer),
    ]
}

/// What a ring must do, said with a queue.
#[derive(Default)]
struct Model {
    bytes: VecDeque<u8>,
    next: u8,
    /// How many bytes were ever written, and at how many the consumer wants to be woken.
    written: i64,
    wake_consumer_at: i64,
    /// How many were ever read, and at how many the producer wants to be woken.
    read: i64,
    wake_producer_at: i64,
}

impl Model {
    fn free(&self) -> usize {
        RING - self.bytes.len()
    }

    fn arm_producer(&mut self, producer: &mut Producer, least: usize) {
        match producer.arm(least) {
            Ok(sleep) => {
                assert_eq!(sleep, self.free() < least);
                self.wake_producer_at = self.written - (RING - least) as i64;
            }
            Err(_) => assert!(least > RING),
        }
    }

    fn arm_consumer(&mut self, consumer: &mut Consumer, beyond: usize) {
        match consumer.arm(beyond) {
            Ok(sleep) => {
                assert_eq!(sleep, self.bytes.len() <= beyond);
                self.wake_consumer_at = self.read + beyond as i64 + 1;
            }
            Err(_) => assert!(beyond >= RING),
        }
    }

    fn write(&mut self, producer: &mut Producer, least: usize, most: usize, share: usize) {
        let free = self.free();
        let room = match producer.reserve(least, most) {
            Err(CircuitError::TooLong { .. }) => return assert!(least > RING),
            Err(error) => panic!("{error}"),
            Ok(room) => room,
        };
        let Some(mut room) = room else {
            return assert!(least > free);
        };
        // It need not know yet that there is more room than it was when it looked last, unless that is needed.
        assert!(room.len() >= least && room.len() <= free && room.len() <= most.max(least));
        let len = room.len() * share / 99;
        let bytes: Vec<u8> = (0..len)
            .map(|index| self.next.wrapping_add(index as u8))
            .collect();
        room.span().write(0, &bytes);
        self.next = self.next.wrapping_add(len as u8);
        self.bytes.extend(bytes);
        let before = self.written;
        self.written += len as i64;
        let wake = before < self.wake_consumer_at && self.wake_consumer_at <= self.written;
        assert_eq!(room.commit(len).unwrap(), wake);
    }

    fn read(&mut self, consumer: &mut Consumer, most: usize, share: usize) {
        let mut bytes = Vec::new();
        match consumer.peek(most).unwrap() {
            Peeked::Bytes(span) => {
                assert_eq!(span.len(), most.min(self.bytes.len()));
                bytes.resize(span.len(), 0);
                span.read(0, &mut bytes);
            }
            Peeked::Empty => assert!(self.bytes.is_empty()),
            Peeked::Finished => panic!("not finished in the model"),
        }
        assert!(bytes.iter().eq(self.bytes.iter().take(bytes.len())));
        let len = bytes.len() * share / 99;
        self.bytes.drain(..len);
        let before = self.read;
        self.read += len as i64;
        let wake = before < self.wake_producer_at && self.wake_producer_at <= self.read;
        assert_eq!(consumer.release(len).unwrap(), wake);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 400 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_ring_is_a_queue(steps in proptest::collection::vec(step(), 0..60)) {
        let mut world = world();
        let World { producer, consumer, .. } = &mut world;
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Write { least, most, share } => model.write(producer, least, most, share),
                Step::Read { most, share } => model.read(consumer, most, share),
                Step::ArmProducer(least) => model.arm_producer(producer, least),
                Step::ArmConsumer(beyond) => model.arm_consumer(consumer, beyond),
            }
        }
    }
}
