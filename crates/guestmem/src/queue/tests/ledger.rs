//! Processes that end at any point, and successors that go on with their queues.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::crash::armed::{Ended, arm};
use crate::queue::{Found, Ledgers, Positions};

/// A ledger for one queue, in a file of its own.
fn ledgers() -> (Arc<Arena>, Ledgers) {
    let size = Ledgers::file_bytes(1) as usize;
    let arena = Arc::new(Arena::new(size.next_multiple_of(PAGE)).unwrap());
    let file = arena.file().try_clone().unwrap();
    (arena, Ledgers::new(file, 1).unwrap())
}

fn below(random: &mut u64, bound: u64) -> u64 {
    // xorshift64
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random % bound
}

/// Where the ledger of a device's first queue begins.
const HEADER: usize = 4096;

struct Scene {
    pair: Pair,
    ledgers: Ledgers,
    /// Chains that this process has taken.
    taken: Vec<u16>,
    /// The one that was taken last, if it is still out: it alone can be put back.
    last: Option<u16>,
    /// Tokens of chains that the driver has made available and not got back.
    open: BTreeSet<u64>,
    /// By where their first buffers are.
    tokens: BTreeMap<u64, u64>,
    /// By heads of chains that were taken: how many bytes it would write.
    written: BTreeMap<u16, u32>,
    next_token: u64,
    random: u64,
    deaths: u32,
}

impl Scene {
    fn new(seed: u64, index: u16, event_index: bool) -> Scene {
        Scene::of(Pair::starting_at(index, 8, event_index, true), seed)
    }

    fn of(pair: Pair, seed: u64) -> Scene {
        let (_, ledgers) = ledgers();
        let mut scene = Scene {
            pair,
            ledgers,
            taken: Vec::new(),
            last: None,
            open: BTreeSet::new(),
            tokens: BTreeMap::new(),
            written: BTreeMap::new(),
            next_token: 1,
            random: seed * 2 + 1,
            deaths: 0,
        };
        scene.set_up(Found::Nothing);
        scene
    }

    fn below(&mut self, bound: u64) -> u64 {
        below(&mut self.random, bound)
    }

    fn set_up(&mut self, found: Found) {
        let ledger = self.ledgers.queue(0, found);
        let (setup, memory) = (self.pair.driver.setup(), Arc::clone(&self.pair.memory));
        self.pair.queue = Queue::with_ledger(setup, memory, ledger).unwrap();
    }

    /// Does something, unless the process ends in it; then a successor goes on, which may end as well.
    fn survive(&mut self, after: Option<u32>, work: &dyn Fn(&mut Scene)) {
        arm(after);
        let ended = catch_unwind(AssertUnwindSafe(|| work(self)));
        arm(None);
        let Err(ended) = ended else { return };
        assert!(ended.is::<Ended>(), "the test itself failed");
        self.deaths += 1;
        (self.taken, self.last) = (Vec::new(), None);
        // The driver goes on meanwhile: in a packed ring it writes over what it got back.
        if self.below(2) == 0 {
            self.collect();
            self.offer();
        }
        let after = (self.below(3) == 0).then(|| self.below(30) as u32);
        self.survive(after, &|scene| {
            scene.set_up(Found::Predecessors);
            scene.pair.queue.publish();
        });
        self.collect();
    }

    /// What the driver gets back, it gets back once.
    fn collect(&mut self) {
        while let Some((token, written)) = self.pair.driver.take_used() {
            assert!(self.open.remove(&token), "chain {token} comes back twice");
            assert!(written == 0 || u64::from(written) == token % 17);
        }
    }

    /// Makes a chain available, of several descriptors if there is room.
    fn offer(&mut self) {
        if self.open.len() == 8 {
            return;
        }
        let buffers: Vec<Range> = (0..1 + self.below(3))
            .map(|_| self.pair.buffer(1))
            .collect();
        let (readable, writable) = buffers.split_at(self.below(buffers.len() as u64 + 1) as usize);
        let token = self.next_token;
        if self.pair.driver.add(readable, writable, token).is_ok() {
            self.next_token += 1;
            self.open.insert(token);
            self.tokens.insert(buffers[0].address, token);
            self.pair.driver.kick_needed();
        }
    }

    /// What the device says that it has written into the chain that it has just taken.
    fn note_taken(&mut self, head: u16) {
        let chain = &self.pair.chain;
        let first = chain.readable.first().or(chain.writable.first());
        let token = self.tokens[&first.unwrap().address];
        assert!(self.open.contains(&token), "chain {token} is not available");
        self.written.insert(head, (token % 17) as u32);
    }

    fn complete(&mut self, head: u16) {
        self.pair.queue.complete(head, self.written[&head]);
    }

    fn step(&mut self) {
        let after = (self.below(2) == 0).then(|| self.below(6) as u32);
        match self.below(10) {
            0..4 if self.open.len() < 8 => self.offer(),
            0..7 => self.survive(after, &|scene| {
                if let Some(head) = scene.pair.pop() {
                    scene.note_taken(head);
                    scene.taken.push(head);
                    scene.last = Some(head);
                }
            }),
            7 if !self.taken.is_empty() => {
                let place = self.below(self.taken.len() as u64) as usize;
                let head = self.taken.remove(place);
                self.last = self.last.filter(|last| *last != head);
                self.survive(after, &|scene| scene.complete(head));
            }
            8 if self.last.is_some() => {
                let last = self.last.take();
                self.taken.retain(|head| Some(*head) != last);
                self.survive(after, &|scene| scene.pair.queue.rewind(1));
            }
            _ => self.survive(after, &|scene| {
                scene.pair.queue.publish();
            }),
        }
        self.collect();
    }
}

/// Lets processes end, and says how many did.
fn play(mut scene: Scene, seed: u64) -> u32 {
    for _ in 0..100 {
        scene.step();
    }
    // The last one ends, and nothing is out any more.
    scene.set_up(Found::Predecessors);
    scene.pair.queue.publish();
    scene.collect();
    while let Some(head) = scene.pair.pop() {
        scene.pair.queue.complete(head, 0);
        scene.pair.queue.publish();
    }
    scene.collect();
    assert!(scene.open.is_empty(), "seed {seed}: lost {:?}", scene.open);
    scene.deaths
}

#[test]
fn a_chain_comes_back_once_wherever_a_process_ends() {
    let deaths = (0..2000).map(|seed| {
        let (index, is_indirect) = ([0, 65530][seed as usize % 2], seed % 5 < 3);
        let pair = Pair::starting_at(index, 8, seed % 3 == 0, is_indirect);
        play(Scene::of(pair, seed), seed)
    });
    let deaths: u32 = deaths.sum();
    assert!(deaths > 10_000, "{deaths}");
}

/// A round of the ring is a few steps, so that every scene passes its end many times, with either wrap counter.
#[test]
fn a_chain_of_a_packed_ring_comes_back_once_wherever_a_process_ends() {
    let deaths = (0..4000).map(|seed| {
        let (size, is_indirect) = ([1, 3, 7, 8][seed as usize % 4], seed % 5 < 3);
        let index = seed as u16 % (2 * size);
        let is_event_index = seed % 3 == 0;
        let pair = Pair::of(
            DriverQueue::packed,
            index,
            size,
            is_event_index,
            is_indirect,
        );
        play(Scene::of(pair, seed), seed)
    });
    let deaths: u32 = deaths.sum();
    assert!(deaths > 20_000, "{deaths}");
}

#[test]
fn a_ledger_that_does_not_fit_is_refused() {
    let (arena, ledgers) = ledgers();
    let pair = Pair::new(8, true, false);
    let with = |setup: QueueSetup, found| {
        let memory = Arc::clone(&pair.memory);
        Queue::with_ledger(setup, memory, ledgers.queue(0, found))
    };
    let setup = pair.driver.setup();
    // Nothing was written yet.
    with(setup, Found::Predecessors).unwrap_err();
    with(setup, Found::Nothing).unwrap();
    with(setup, Found::Predecessors).unwrap();
    // Another size; a used index that cannot be; a head that cannot be.
    with(QueueSetup { size: 4, ..setup }, Found::Predecessors).unwrap_err();
    pair.driver.set_used_index(9);
    with(setup, Found::Predecessors).unwrap_err();
    pair.driver.set_used_index(1);
    with(setup, Found::Predecessors).unwrap();
    // Any bytes do no harm.
    for byte in [0, 1, 7, 8, 0x7f, 0xff] {
        arena.write(0, &vec![byte; arena.size()]);
        let _ = with(setup, Found::Predecessors);
    }
}

#[test]
fn a_ledger_that_does_not_fit_a_packed_ring_is_refused() {
    let (arena, ledgers) = ledgers();
    let size = 7;
    let pair = Pair::of(DriverQueue::packed, 5, size, true, false);
    let with = |setup: QueueSetup, found| {
        let memory = Arc::clone(&pair.memory);
        Queue::with_ledger(setup, memory, ledgers.queue(0, found))
    };
    let setup = pair.driver.setup();
    with(setup, Found::Predecessors).unwrap_err();
    // A split queue's, of the same size.
    let split = Pair::new(8, true, false);
    let ledger = ledgers.queue(0, Found::Nothing);
    Queue::with_ledger(split.driver.setup(), split.memory, ledger).unwrap();
    let other = Pair::of(DriverQueue::packed, 0, 8, true, false);
    let ledger = ledgers.queue(0, Found::Predecessors);
    Queue::with_ledger(other.driver.setup(), other.memory, ledger).unwrap_err();
    with(setup, Found::Nothing).unwrap();
    with(setup, Found::Predecessors).unwrap();
    with(QueueSetup { size: 8, ..setup }, Found::Predecessors).unwrap_err();
    let positions = Positions {
        available: 5,
        used: 5,
    };
    let refused = with(setup, Found::Since(positions)).unwrap_err();
    assert_eq!(refused, QueueError::NoPositions);
    // Any bytes do no harm, of which some have a size, a limit, and positions that can be.
    let mut random = 1;
    for round in 0..20_000 {
        let mut below = |bound| below(&mut random, bound);
        let mut bytes: Vec<u8> = (0..48)
            .map(|_| [0, 1, 2, 0x80, 0xff][below(5) as usize])
            .collect();
        bytes[..2].copy_from_slice(&size.to_le_bytes());
        if round % 4 > 0 {
            bytes[2..4].fill(0);
            bytes[4..8].copy_from_slice(&(7 + 13 * below(2) as u32).to_le_bytes());
        }
        for at in [8, 10] {
            let position = (below(9) | below(2) << 15) as u16;
            bytes[at..at + 2].copy_from_slice(&position.to_le_bytes());
        }
        arena.write(HEADER, &bytes);
        let Ok(mut queue) = with(setup, Found::Predecessors) else {
            continue;
        };
        queue.publish();
        assert_eq!(queue.in_flight(), 0);
        let base = queue.ring_base();
        assert_eq!(base >> 16, base & 0xffff, "what was out is back");
        let _ = queue.pop(&mut Chain::default());
    }
}

/// Descriptors that a VMM says are out when it sets up a ring stay so: they are not taken again.
#[test]
fn what_was_out_before_a_packed_ring_was_set_up_stays_out() {
    let (_arena, ledgers) = ledgers();
    let pair = Pair::of(DriverQueue::packed, 0, 8, true, false);
    let setup = QueueSetup {
        ring_base: 0x8006_0001,
        ..pair.driver.setup()
    };
    for found in [Found::Nothing, Found::Predecessors, Found::Predecessors] {
        let memory = Arc::clone(&pair.memory);
        let queue = Queue::with_ledger(setup, memory, ledgers.queue(0, found)).unwrap();
        assert_eq!(queue.ring_base(), setup.ring_base);
    }
}

/// A driver may name its chains as it likes (virtio 1.2, section 2.8.6).
#[test]
fn a_chain_of_any_name_comes_back() {
    let (arena, ledgers) = ledgers();
    // What another queue has left there is none of this one's.
    arena.write(0, &vec![0xff; arena.size()]);
    let mut pair = Pair::of(DriverQueue::packed, 0, 8, true, false);
    let set_up = |pair: &mut Pair, found| {
        let (setup, memory) = (pair.driver.setup(), Arc::clone(&pair.memory));
        pair.queue = Queue::with_ledger(setup, memory, ledgers.queue(0, found)).unwrap();
    };
    set_up(&mut pair, Found::Nothing);
    for (place, name) in [7, 300, 65_535].into_iter().enumerate() {
        let offered = RawDescriptor {
            address: BASE,
            len: 1,
            flags: RawDescriptor::AVAILABLE,
            next: name,
        };
        pair.driver.write_descriptor(place as u16, offered);
        assert_eq!(pair.pop(), Some(name));
    }
    set_up(&mut pair, Found::Predecessors);
    pair.queue.publish();
    let used = RawDescriptor::AVAILABLE | RawDescriptor::USED;
    for (place, name) in [7, 300, 65_535].into_iter().enumerate() {
        let descriptor = pair.driver.packed_descriptor(place as u16);
        assert_eq!((descriptor.next, descriptor.flags), (name, used));
    }
}

#[test]
fn an_answer_under_way_is_noted() {
    let (_arena, ledgers) = ledgers();
    assert!(!ledgers.is_answering());
    ledgers.set_answering(true);
    assert!(ledgers.is_answering());
}

/// A process that works in turns: what it gives back is published when it has written down how far it is.
struct Turns {
    scene: Scene,
    committed: Positions,
    /// Tokens of chains that are out, in the order in which they were taken: as of now, and as of the last turn's end.
    out: Vec<u16>,
    committed_out: Vec<u16>,
    /// How many of the last that were taken are out: they may count as not taken.
    last: usize,
    defers_marks: bool,
}

impl Turns {
    fn new(seed: u64) -> Turns {
        let mut scene = Scene::new(seed, [0, 65530][seed as usize % 2], seed % 3 == 0);
        let committed = scene.pair.queue.positions(0).unwrap();
        let defers_marks = seed % 5 != 0;
        if defers_marks {
            scene.pair.queue.defer_marks();
        }
        Turns {
            scene,
            committed,
            out: Vec::new(),
            committed_out: Vec::new(),
            last: 0,
            defers_marks,
        }
    }

    fn turn(&mut self) {
        for _ in 0..self.scene.below(6) {
            match self.scene.below(3) {
                0 if self.scene.open.len() < 8 => {
                    let token = self.scene.next_token;
                    self.scene.next_token += 1;
                    self.scene.open.insert(token);
                    let buffer = self.scene.pair.buffer(1);
                    self.scene.pair.driver.add(&[], &[buffer], token).unwrap();
                    self.scene.pair.driver.kick_needed();
                }
                1 => {
                    let taken = self.scene.pair.pop();
                    self.last += taken.iter().count();
                    self.out.extend(taken);
                }
                _ if !self.out.is_empty() => {
                    let place = self.scene.below(self.out.len() as u64) as usize;
                    let head = self.out.remove(place);
                    self.last = self.last.min(self.out.len() - place);
                    self.scene.pair.queue.complete(head, 0);
                }
                _ => {}
            }
        }
        let untaken = self.scene.below(self.last as u64 + 1) as u16;
        self.scene.pair.queue.mark_out(untaken);
        self.committed = self.scene.pair.queue.positions(untaken).unwrap();
        let taken = self.out.len() - usize::from(untaken);
        self.committed_out = self.out[..taken].to_vec();
        self.scene.pair.queue.publish();
    }

    fn go_on(&mut self) {
        self.scene.set_up(Found::Since(self.committed));
        assert_eq!(self.scene.pair.queue.out(), self.committed_out);
        if self.defers_marks {
            self.scene.pair.queue.defer_marks();
        }
        (self.out, self.last) = (self.committed_out.clone(), 0);
        for head in &self.out {
            let mut chain = Chain::default();
            assert!(self.scene.pair.queue.read_again(*head, &mut chain).unwrap());
            assert_eq!(chain.entries, 1);
        }
        self.scene.pair.queue.publish();
    }
}

#[test]
fn a_turn_that_did_not_end_has_not_happened() {
    let mut deaths = 0;
    for seed in 0..2000 {
        let mut turns = Turns::new(seed);
        for _ in 0..40 {
            let dies = turns.scene.below(2) == 0;
            let mut after = dies.then(|| turns.scene.below(20) as u32);
            let mut work: fn(&mut Turns) = Turns::turn;
            loop {
                arm(after.take());
                let ended = catch_unwind(AssertUnwindSafe(|| work(&mut turns)));
                arm(None);
                let Err(ended) = ended else { break };
                if !ended.is::<Ended>() {
                    std::panic::resume_unwind(ended);
                }
                deaths += 1;
                work = Turns::go_on;
                after = (turns.scene.below(3) == 0).then(|| turns.scene.below(20) as u32);
            }
            turns.scene.collect();
        }
        while let Some(head) = turns.scene.pair.pop() {
            turns.out.push(head);
        }
        for head in std::mem::take(&mut turns.out) {
            turns.scene.pair.queue.complete(head, 0);
        }
        turns.scene.pair.queue.publish();
        turns.scene.collect();
        assert!(turns.scene.open.is_empty(), "seed {seed}");
    }
    assert!(deaths > 5_000, "{deaths}");
}

#[test]
fn positions_that_do_not_fit_are_refused() {
    let mut turns = Turns::new(1);
    for _ in 0..20 {
        turns.turn();
    }
    turns.scene.collect();
    let Positions { available, used } = turns.committed;
    for (available, used) in [
        (available.wrapping_add(1), used),
        (available.wrapping_sub(1), used),
        (available, used.wrapping_add(9)),
        (available, used.wrapping_sub(1)),
        (available.wrapping_add(9), used),
    ] {
        let found = Found::Since(Positions { available, used });
        let ledger = turns.scene.ledgers.queue(0, found);
        let (setup, memory) = (
            turns.scene.pair.driver.setup(),
            Arc::clone(&turns.scene.pair.memory),
        );
        Queue::with_ledger(setup, memory, ledger).unwrap_err();
    }
}
