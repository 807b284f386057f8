use super::packed::fields::{Position, is_passed};
use super::*;
use crate::guestmem_driver::{Arena, DriverQueue, RawDescriptor};

mod clauses;
mod hostile;
mod ledger;
mod model;
mod packed;
mod places;
mod threads;

const PAGE: usize = 4096;

/// A driver and a device over one arena, which the guest sees from [`BASE`] on.
struct Pair {
    arena: Arc<Arena>,
    memory: Arc<GuestMemory>,
    driver: DriverQueue,
    queue: Queue,
    chain: Chain,
}

const BASE: u64 = 0x10_0000;

type MakeDriver = fn(Arc<Arena>, u64, u16, bool, bool) -> DriverQueue;

/// Both formats: what they share is tested with each.
const FORMATS: [MakeDriver; 2] = [DriverQueue::new, DriverQueue::packed];

impl Pair {
    /// The device's side begins again where the VMM says, in a ring that was used before.
    fn connect_again(&mut self, ring_base: u32) {
        let setup = QueueSetup {
            ring_base,
            ..self.driver.setup()
        };
        self.queue = Queue::new(setup, Arc::clone(&self.memory)).unwrap();
        assert!(!self.queue.is_fresh());
    }

    fn new(size: u16, event_index: bool, indirect: bool) -> Pair {
        Pair::starting_at(0, size, event_index, indirect)
    }

    fn starting_at(index: u16, size: u16, event_index: bool, indirect: bool) -> Pair {
        Pair::of(DriverQueue::new, index, size, event_index, indirect)
    }

    /// With a driver of either format.
    fn of(format: MakeDriver, index: u16, size: u16, event_index: bool, indirect: bool) -> Pair {
        let arena = Arc::new(Arena::new(64 * PAGE).unwrap());
        let memory =
            Arc::new(GuestMemory::with_regions(vec![arena.region(BASE).unwrap()]).unwrap());
        let mut driver = format(Arc::clone(&arena), BASE, size, event_index, indirect);
        if index != 0 {
            driver.start_at(index);
        }
        let queue = Queue::new(driver.setup(), Arc::clone(&memory)).unwrap();
        Pair {
            arena,
            memory,
            driver,
            queue,
            chain: Chain::default(),
        }
    }

    /// Guest memory that nothing else uses.
    fn buffer(&self, len: u32) -> Range {
        Range {
            address: BASE + self.arena.allocate(len as usize, 1) as u64,
            len,
        }
    }

    fn add(&mut self, token: u64) -> bool {
        let buffer = self.buffer(16);
        self.driver.add(&[], &[buffer], token).unwrap();
        self.driver.kick_needed()
    }

    fn pop(&mut self) -> Option<u16> {
        self.queue
            .pop(&mut self.chain)
            .unwrap()
            .then_some(self.chain.head)
    }
}

#[test]
fn moves_bytes_both_ways() {
    for (format, base) in FORMATS.into_iter().zip([1, 0x8000_8001]) {
        moves_bytes(Pair::of(format, 0, 8, true, true), base);
    }
}

fn moves_bytes(mut pair: Pair, base: u32) {
    let (request, response) = (pair.buffer(10), pair.buffer(10));
    pair.memory.write(&[request], 0, b"question??").unwrap();
    pair.driver.add(&[request], &[response], 42).unwrap();
    assert!(pair.pop().is_none(), "it is not published yet");
    assert!(pair.driver.kick_needed());
    assert!(pair.queue.pending().unwrap());
    let head = pair.pop().unwrap();
    assert_eq!(
        (&pair.chain.readable[..], &pair.chain.writable[..]),
        (&[request][..], &[response][..])
    );
    assert!(!pair.queue.pending().unwrap());
    assert_eq!((pair.queue.in_flight(), pair.queue.ring_base()), (1, base));

    let mut question = [0; 10];
    pair.queue
        .memory()
        .read(&pair.chain.readable, 0, &mut question)
        .unwrap();
    assert_eq!(&question, b"question??");
    pair.queue
        .memory()
        .write(&pair.chain.writable, 0, b"answer")
        .unwrap();
    pair.queue.complete(head, 6);
    assert_eq!(pair.driver.take_used(), None, "it is not published yet");
    assert!(pair.queue.publish());
    assert_eq!(pair.driver.take_used(), Some((42, 6)));
    assert!(!pair.queue.publish(), "nothing is new");
}

#[test]
fn what_is_rewound_comes_again_in_order() {
    let mut pair = Pair::starting_at(65533, 8, true, false);
    for token in 0..6 {
        pair.add(token);
    }
    let first: Vec<_> = (0..6).map(|_| pair.pop().unwrap()).collect();
    assert!(pair.pop().is_none());
    assert_eq!(pair.queue.ring_base(), 3);
    pair.queue.rewind(0);
    pair.queue.complete(first[0], 0);
    pair.queue.rewind(5);
    assert_eq!((pair.queue.ring_base(), pair.queue.in_flight()), (65534, 0));
    assert!(pair.queue.pending().unwrap());
    let second: Vec<_> = (0..5).map(|_| pair.pop().unwrap()).collect();
    assert_eq!(second, first[1..]);
    assert!(pair.pop().is_none());
}

#[test]
fn goes_on_where_another_left() {
    for (format, base) in FORMATS.into_iter().zip([3, 0x8003_8003]) {
        goes_on(Pair::of(format, 0, 4, true, false), base);
    }
}

fn goes_on(mut pair: Pair, base: u32) {
    for round in 0..3 {
        pair.add(round);
        let head = pair.pop().unwrap();
        pair.queue.complete(head, 0);
        pair.queue.publish();
        assert_eq!(pair.driver.take_used(), Some((round, 0)));
    }
    pair.add(7);
    pair.pop().unwrap();
    pair.queue.rewind(1);

    let ring_base = pair.queue.ring_base();
    assert_eq!(ring_base, base);
    pair.connect_again(ring_base);
    let head = pair.pop().unwrap();
    pair.queue.complete(head, 9);
    assert!(
        pair.queue.publish(),
        "a first time, who knows what the driver saw"
    );
    assert_eq!(pair.driver.take_used(), Some((7, 9)));
}

/// A VMM whose back end has died does not know what that had taken.
#[test]
fn chains_that_were_taken_and_not_given_back_are_taken_again() {
    let mut pair = Pair::new(4, true, false);
    for token in 0..4 {
        pair.add(token);
    }
    let first = pair.pop().unwrap();
    pair.queue.complete(first, 0);
    pair.queue.publish();
    assert_eq!(pair.driver.take_used(), Some((0, 0)));
    let out = pair.pop().unwrap();
    // As many as were made available, as many as were taken, as many as were given back.
    for ring_base in [4, 2, 1] {
        pair.connect_again(ring_base);
        assert_eq!(pair.pop(), Some(out), "{ring_base}");
        assert_eq!(pair.queue.ring_base(), 2);
    }
    pair.queue.complete(out, 0);
    pair.queue.publish();
    assert_eq!(pair.driver.take_used(), Some((1, 0)));
}

/// A hint changes nothing, whatever is asked for and whatever the driver has written.
#[test]
fn asking_for_chains_ahead_takes_none() {
    for (format, start) in FORMATS
        .into_iter()
        .flat_map(|format| [(format, 0), (format, 65_533)])
    {
        let mut pair = Pair::of(format, start, 8, true, true);
        let hints = |queue: &Queue| {
            for (ahead, chains) in [0, 1, 7, 8, 9, u16::MAX]
                .into_iter()
                .flat_map(|ahead| [0, 1, 8, 9, u16::MAX].map(|chains| (ahead, chains)))
            {
                queue.prefetch(ahead, chains);
            }
        };
        hints(&pair.queue);
        for token in 0..5 {
            pair.add(token);
        }
        let base = pair.queue.ring_base();
        hints(&pair.queue);
        let first = pair.pop().unwrap();
        pair.queue.rewind(1);
        // Heads and places that there are not, and chains of which the first is all that may be read.
        for index in 0..8 {
            let descriptor = RawDescriptor {
                address: u64::MAX - u64::from(index),
                len: u32::MAX,
                flags: RawDescriptor::NEXT | RawDescriptor::AVAILABLE,
                next: u16::MAX,
            };
            if index != first % 8 {
                pair.driver.write_descriptor(index, descriptor);
            }
            if !pair.driver.setup().packed {
                pair.driver.set_available_entry(index + 1, 8 + index);
            }
        }
        hints(&pair.queue);
        assert_eq!((pair.queue.ring_base(), pair.queue.in_flight()), (base, 0));
    }
}

#[test]
fn is_fresh_until_something_went_through() {
    let mut pair = Pair::new(4, true, false);
    assert!(pair.queue.is_fresh());
    assert!(pair.pop().is_none());
    pair.add(1);
    assert!(pair.queue.pending().unwrap());
    assert!(pair.queue.is_fresh());
    pair.pop().unwrap();
    assert!(!pair.queue.is_fresh());
    pair.queue.rewind(1);
    assert!(!pair.queue.is_fresh());
    // With one index at zero and the other not it goes on.
    pair.driver.set_used_index(1);
    assert!(
        !Queue::new(pair.driver.setup(), Arc::clone(&pair.memory))
            .unwrap()
            .is_fresh()
    );
    pair.driver.set_used_index(0);
    let setup = QueueSetup {
        ring_base: 1,
        ..pair.driver.setup()
    };
    assert!(
        !Queue::new(setup, Arc::clone(&pair.memory))
            .unwrap()
            .is_fresh()
    );
    assert!(
        Queue::new(pair.driver.setup(), Arc::clone(&pair.memory))
            .unwrap()
            .is_fresh()
    );
}

#[test]
fn event_indices_ask_for_one_notification() {
    // From the beginning, and so that the ring's end is passed.
    for (format, start) in FORMATS.into_iter().zip([0, 6]) {
        event_indices_ask_once(Pair::of(format, start, 8, true, false));
    }
}

fn event_indices_ask_once(mut pair: Pair) {
    assert!(pair.add(1), "a fresh ring's first chain is announced");
    assert!(!pair.add(2), "no interrupt was asked for the second");
    assert!(pair.queue.enable_notifications(), "there is work");
    while pair.pop().is_some() {}
    assert!(!pair.queue.enable_notifications());
    assert!(pair.add(3));
    assert!(!pair.add(4));
    while pair.pop().is_some() {}
    pair.queue.disable_notifications();
    assert!(!pair.add(5));
    assert!(pair.queue.enable_notifications());
}

#[test]
fn flags_switch_notifications_on_and_off() {
    for format in FORMATS {
        flags_switch_notifications(Pair::of(format, 0, 8, false, false));
    }
}

fn flags_switch_notifications(mut pair: Pair) {
    assert!(pair.add(1));
    assert!(pair.add(2));
    pair.queue.disable_notifications();
    assert!(!pair.add(3));
    assert!(pair.queue.enable_notifications(), "there is work");
    while pair.pop().is_some() {}
    assert!(!pair.queue.enable_notifications());
    assert!(pair.add(4));
    // A queue that goes on knows what its predecessor wrote.
    pair.queue.disable_notifications();
    let setup = QueueSetup {
        ring_base: pair.queue.ring_base(),
        ..pair.driver.setup()
    };
    pair.queue = Queue::new(setup, Arc::clone(&pair.memory)).unwrap();
    assert!(!pair.add(5));
    pair.queue.enable_notifications();
    assert!(pair.add(6));
}

#[test]
fn interrupts_come_when_they_are_wanted() {
    for (format, event_index) in FORMATS
        .into_iter()
        .flat_map(|format| [(format, true), (format, false)])
    {
        let mut pair = Pair::of(format, 5, 8, event_index, false);
        let done = |pair: &mut Pair, count: u64| {
            for token in 0..count {
                pair.add(token);
                let head = pair.pop().unwrap();
                pair.queue.complete(head, 0);
            }
            pair.queue.publish()
        };
        assert!(done(&mut pair, 1));
        assert!(
            pair.driver.enable_interrupts(),
            "there is something to take"
        );
        assert!(pair.driver.take_used().is_some());
        assert!(!pair.driver.enable_interrupts());
        assert!(done(&mut pair, 3));
        // With event indices the wish is for one; with flags for all.
        assert_eq!(done(&mut pair, 1), !event_index);
        while pair.driver.take_used().is_some() {}
        pair.driver.disable_interrupts();
        assert!(!done(&mut pair, 2));
        while pair.driver.take_used().is_some() {}
        assert!(!pair.driver.enable_interrupts());
        assert!(done(&mut pair, 1));
    }
}

#[test]
fn an_event_is_due_when_the_index_passes_it() {
    let passes = |wanted: u16, old: u16, new: u16| {
        let mut index = old;
        let mut passed = false;
        while index != new {
            passed |= index == wanted;
            index = index.wrapping_add(1);
        }
        passed
    };
    let around = [
        0_u16, 1, 2, 5, 32767, 32768, 32769, 65530, 65533, 65534, 65535,
    ];
    for wanted in around {
        for old in around {
            for advance in [0, 1, 2, 3, 7, 100] {
                let new = old.wrapping_add(advance);
                assert_eq!(
                    needs_event(wanted, old, new),
                    passes(wanted, old, new),
                    "{wanted} in {old}..{new}"
                );
            }
        }
    }
}

#[test]
fn an_event_of_a_packed_ring_is_due_when_its_place_is_passed() {
    for size in [1, 2, 3, 5, 8] {
        let all = (0..2 * size).map(|place| Position::new(place % size, place < size));
        for (wanted, old) in all
            .clone()
            .flat_map(|old| all.clone().map(move |at| (at, old)))
        {
            let (mut new, mut passed) = (old, false);
            for advance in 0..=size {
                assert_eq!(old.plus(advance, size), new);
                assert_eq!(new.minus(advance, size), old);
                assert_eq!(Position::from_bits(new.to_bits()), new);
                assert_eq!(
                    is_passed(wanted.to_bits(), old, new, size),
                    passed,
                    "{wanted:?} in {old:?}..{new:?} of {size}"
                );
                passed |= new == wanted;
                let index = new.index() + 1;
                new = Position::new(index % size, new.wrap() != (index == size));
            }
        }
        // A place that the ring does not have is never passed.
        let start = Position::new(0, true);
        let nowhere = Position::new(size, true).to_bits();
        assert!(!is_passed(nowhere, start, start.plus(size, size), size));
    }
    // The largest ring, whose indices have as many bits as there are.
    let last = Position::new(32_767, false);
    let first = Position::new(0, true);
    assert_eq!(last.plus(1, 32_768), first);
    assert_eq!(first.minus(1, 32_768), last);
    assert_eq!(first.plus(32_768, 32_768), Position::new(0, false));
    assert!(is_passed(last.to_bits(), last, first, 32_768));
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "is given back and is not out")]
fn giving_back_twice_is_a_mistake() {
    let mut pair = Pair::new(4, true, false);
    pair.add(1);
    let head = pair.pop().unwrap();
    pair.queue.complete(head, 0);
    pair.queue.complete(head, 0);
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "is rewound and its chain is not out")]
fn rewinding_too_far_is_a_mistake() {
    let mut pair = Pair::new(4, true, false);
    pair.add(1);
    pair.pop().unwrap();
    pair.queue.rewind(2);
}

#[test]
fn a_queue_is_blank_until_its_driver_writes() {
    for format in FORMATS {
        for bits in 0..4 {
            let mut pair = Pair::of(format, 0, 8, bits & 1 != 0, bits & 2 != 0);
            assert!(pair.queue.is_blank());
            // What the device writes is not the driver's.
            pair.queue.disable_notifications();
            pair.queue.enable_notifications();
            assert!(pair.queue.is_blank());
            pair.add(1);
            assert!(!pair.queue.is_blank());
        }
    }
}

/// A VMM can have a ring read as often as it likes, and so large a ring is read in places.
#[test]
fn a_digest_is_of_so_many_entries_from_all_over_a_queue() {
    const STEP: u16 = 128;
    for format in FORMATS {
        let arena = Arc::new(Arena::new(1024 * PAGE).unwrap());
        let memory =
            Arc::new(GuestMemory::with_regions(vec![arena.region(BASE).unwrap()]).unwrap());
        let driver = format(Arc::clone(&arena), BASE, MAX_QUEUE_SIZE, false, false);
        let queue = Queue::new(driver.setup(), memory).unwrap();
        let mut digest = queue.driver_digest();
        let seen = |entry: &u16| {
            let descriptor = RawDescriptor {
                address: 1 + u64::from(*entry),
                ..RawDescriptor::default()
            };
            driver.write_descriptor(*entry, descriptor);
            let before = std::mem::replace(&mut digest, queue.driver_digest());
            before != digest
        };
        // Few of each stretch, so that the test is quick.
        let tried = (0..MAX_QUEUE_SIZE).filter(|entry| entry % STEP < 2);
        let seen: Vec<u16> = tried.filter(seen).collect();
        assert_eq!(
            seen,
            Vec::from_iter((0..MAX_QUEUE_SIZE).step_by(STEP.into()))
        );
        assert_eq!(seen.len(), MAX_SAMPLES);
    }
}
