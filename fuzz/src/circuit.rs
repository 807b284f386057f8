//! One end of a circuit's rings, and a peer that writes anything anywhere.

use shmring::{
    CircuitError, Consumer, Identity, Kind, MIN_RING_LEN, Peeked, Producer, Side, Window,
    WindowSpec, system_page_len,
};

use crate::Dice;

/// In bytes.
const RING: usize = MIN_RING_LEN as usize;

/// Where the fields of the rings are (docs/circuit-abi.md): the first ring's, then the second's.
const RINGS: [usize; 2] = [1024, 2048];
/// Head, producer's state, tail, consumer's state, and the two events.
const FIELDS: [usize; 6] = [0, 8, 128, 136, 256, 384];

/// The peer writes anything into the window, between any two steps of ours. Our two ends find exactly what a second reader finds, knowing only the
/// document; once they have said that the peer broke the rules, they are not asked again. No span is ever longer than what there can be.
pub fn peer(input: &[u8]) {
    let mut dice = Dice::new(input);
    let spec = WindowSpec {
        identity: Identity {
            generation: 1 + u64::from(dice.byte()),
            nonce: [9; 16],
        },
        kind: Kind::Bytes,
        ring_len: MIN_RING_LEN,
        page_len: system_page_len(),
    };
    let file = Window::create(&spec).expect("a window");
    let attach = || Window::attach(&file, 0, &spec).expect("the window just made");
    let (producer, consumer) = attach().split(Side::First);
    let mut world = World {
        hostile: attach(),
        generation: spec.identity.generation,
        fields: [0; 12],
        producer,
        consumer,
        tail: 0,
        head: 0,
        capacity: RING as u64,
    };
    // What the peer's library would have said.
    world.scribble(RINGS[0] + 136, spec.identity.generation << 8 | 1);
    world.scribble(RINGS[1] + 8, spec.identity.generation << 8 | 1);
    for _ in 0..300 {
        if dice.is_empty() || !world.step(&mut dice) {
            break;
        }
    }
}

struct World {
    hostile: Window,
    generation: u64,
    /// What the peer wrote last, by ring and field.
    fields: [u64; 12],
    producer: Producer,
    consumer: Consumer,
    /// The peer's counts as they were taken for good last.
    tail: u64,
    head: u64,
    capacity: u64,
}

impl World {
    fn scribble(&mut self, offset: usize, value: u64) {
        self.hostile.scribble(offset, value);
        for (ring, base) in RINGS.into_iter().enumerate() {
            for (index, field) in FIELDS.into_iter().enumerate() {
                if base + field == offset {
                    self.fields[6 * ring + index] = value;
                }
            }
        }
    }

    /// One thing that happens. False when the circuit has ended.
    fn step(&mut self, dice: &mut Dice<'_>) -> bool {
        match dice.below(8) {
            0..=2 => self.attack(dice),
            3 => {
                // The bytes of both rings, at any time.
                let ring = dice.pick(&[Side::First, Side::Second]);
                let bytes = dice.take(16);
                let position = dice.quad();
                self.hostile
                    .any_span(ring, position, bytes.len())
                    .write(0, bytes);
            }
            4 | 5 => return self.write(dice),
            _ => return self.read(dice),
        }
        true
    }

    fn attack(&mut self, dice: &mut Dice<'_>) {
        let ring = dice.pick(&RINGS);
        let field = dice.pick(&FIELDS);
        let near = u64::from(dice.byte()).wrapping_sub(8);
        let value = match (field, dice.below(4)) {
            (_, 0) => dice.quad(),
            (8 | 136, _) => self.generation << 8 | u64::from(dice.byte() % 5),
            (_, 1) => self
                .consumer
                .position()
                .wrapping_add(self.capacity.wrapping_add(near)),
            (_, 2) => self.producer.position().wrapping_add(near),
            _ => self.consumer.position().wrapping_add(near),
        };
        self.scribble(ring + field, value);
        if dice.one_in(16) {
            // Anywhere else in the header: it is not read any more.
            self.scribble(8 * dice.below(128), dice.quad());
        }
    }

    fn write(&mut self, dice: &mut Dice<'_>) -> bool {
        let len = 1 + dice.below(RING);
        let (tail, state) = (self.fields[2], self.fields[3]);
        let produced = self.producer.position();
        // It need not look while it knows of enough room.
        let known = self.capacity - produced.wrapping_sub(self.tail);
        let reserved = self.producer.reserve(1, len);
        if known >= len as u64 {
            assert_eq!(reserved.expect("room").expect("room").len(), len);
        } else {
            let is_possible = tail.wrapping_sub(self.tail) <= produced.wrapping_sub(self.tail);
            match reserved {
                Err(CircuitError::Count { .. }) => {
                    assert!(!is_possible);
                    return false;
                }
                Err(_) => {
                    assert!(is_possible && state != self.generation << 8 | 1);
                    return false;
                }
                Ok(room) => {
                    assert!(is_possible && [0, self.generation << 8 | 1].contains(&state));
                    self.tail = tail;
                    let free = (self.capacity - produced.wrapping_sub(tail)) as usize;
                    assert_eq!(room.map_or(0, |room| room.len()), free.min(len));
                    if free == 0 {
                        return true;
                    }
                }
            }
        }
        let room = self.capacity - produced.wrapping_sub(self.tail);
        let len = len.min(room as usize);
        self.producer.commit(len).expect("it was reserved");
        assert!(self.producer.commit(RING + 1).is_err());
        true
    }

    fn read(&mut self, dice: &mut Dice<'_>) -> bool {
        let (head, state) = (self.fields[6], self.fields[7]);
        let released = self.consumer.position();
        let ahead = head.wrapping_sub(self.head);
        let most = released.wrapping_add(self.capacity).wrapping_sub(self.head);
        let is_possible = ahead <= most;
        let available = match self.consumer.available() {
            Err(CircuitError::Count { .. }) => {
                assert!(!is_possible);
                return false;
            }
            Err(_) => {
                assert!(is_possible && head == released);
                assert!(![1, 2].contains(&state.wrapping_sub(self.generation << 8)));
                return false;
            }
            Ok(available) => available,
        };
        assert!(is_possible && available as u64 == head.wrapping_sub(released));
        self.head = head;
        if self.consumer.is_at_end() {
            // From here on another head is an error, which this reader does not follow.
            return false;
        }
        let wanted = 1 + dice.below(RING);
        match self.consumer.peek(wanted) {
            Ok(Peeked::Bytes(span)) => {
                assert_eq!(span.len(), wanted.min(available));
                let mut bytes = vec![0; span.len()];
                span.read(0, &mut bytes);
            }
            Ok(Peeked::Empty | Peeked::Finished) => assert_eq!(available, 0),
            Err(_) => return false,
        }
        assert!(self.consumer.release(available + 1).is_err());
        let len = dice.below(available + 1);
        self.consumer.release(len).expect("it is there");
        true
    }
}
