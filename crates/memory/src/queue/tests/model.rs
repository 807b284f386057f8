//! The device's side against the driver's, with random traffic and a list that remembers what must come out.

use std::collections::VecDeque;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// One thing that happens. Numbers are reduced to what is possible at the time.
#[derive(Debug, Clone)]
enum Step {
    /// The driver adds a chain, of ranges with these lengths; some of them are empty.
    Add {
        readable: Vec<u32>,
        writable: Vec<u32>,
    },
    Kick,
    /// The device takes so many chains.
    Pop(usize),
    /// It forgets so many.
    Rewind(usize),
    /// It gives back the nth of those that are out, with so many bytes.
    Complete(usize, u32),
    Publish,
    /// The driver takes back so many.
    Take(usize),
    WantInterrupts(bool),
    WantNotifications(bool),
}

fn any_step() -> impl Strategy<Value = Step> {
    let lens = || vec(prop_oneof![1 => Just(0), 9 => 1..3000_u32], 0..5);
    prop_oneof![
        6 => (lens(), lens()).prop_map(|(readable, writable)| Step::Add { readable, writable }),
        4 => Just(Step::Kick),
        4 => (1..20_usize).prop_map(Step::Pop),
        1 => (1..4_usize).prop_map(Step::Rewind),
        6 => (any::<usize>(), any::<u32>()).prop_map(|(index, written)| Step::Complete(index, written)),
        3 => Just(Step::Publish),
        4 => (1..20_usize).prop_map(Step::Take),
        1 => any::<bool>().prop_map(Step::WantInterrupts),
        1 => any::<bool>().prop_map(Step::WantNotifications),
    ]
}

fn any_size() -> impl Strategy<Value = u16> {
    prop_oneof![Just(1), Just(2), Just(4), Just(128), Just(256), Just(1024)]
}

#[derive(Debug, Clone)]
struct Expected {
    token: u64,
    readable: Vec<Range>,
    writable: Vec<Range>,
}

struct Model {
    pair: Pair,
    tokens: u64,
    /// Where the next buffer starts: buffers may overlap, nobody writes to them here.
    cursor: u64,
    added: VecDeque<Expected>,
    published: VecDeque<Expected>,
    out: Vec<(u16, Expected)>,
    /// The tokens of all chains that were taken, in order.
    taken: Vec<u64>,
    completed: VecDeque<(u64, u32)>,
    visible: VecDeque<(u64, u32)>,
    /// Running indices, as the specification counts: what each side has published so far.
    available: u16,
    used: u16,
    has_published: bool,
}

/// The last address that buffers of the test may have, behind `BASE`.
const BUFFERS: u64 = 60 * PAGE as u64;

impl Model {
    fn new(start: u16, size: u16, event_index: bool, indirect: bool) -> Model {
        let mut pair = Pair::starting_at(start, size, event_index, indirect);
        // Larger than the other tests', for tables; and in two regions that touch, so that some buffers lie across.
        let arena = Arc::new(Arena::new(1024 * PAGE).unwrap());
        let border = 30 * PAGE;
        let parts = vec![
            arena.part(BASE, 0, border).unwrap(),
            arena
                .part(BASE + border as u64, border, arena.size() - border)
                .unwrap(),
        ];
        arena.allocate(BUFFERS as usize, PAGE);
        pair.memory = Arc::new(GuestMemory::with_regions(parts).unwrap());
        pair.driver = DriverQueue::new(Arc::clone(&arena), BASE, size, event_index, indirect);
        pair.arena = arena;
        if start != 0 {
            pair.driver.start_at(start);
        }
        pair.queue = Queue::new(pair.driver.setup(), Arc::clone(&pair.memory)).unwrap();
        Model {
            pair,
            tokens: 0,
            cursor: 0,
            added: VecDeque::new(),
            published: VecDeque::new(),
            out: Vec::new(),
            taken: Vec::new(),
            completed: VecDeque::new(),
            visible: VecDeque::new(),
            available: start,
            used: start,
            has_published: false,
        }
    }

    fn buffers(&mut self, lens: &[u32]) -> Vec<Range> {
        let mut ranges = Vec::new();
        for len in lens {
            if self.cursor + u64::from(*len) > BUFFERS {
                self.cursor = 0;
            }
            ranges.push(Range {
                address: BASE + self.cursor,
                len: *len,
            });
            self.cursor += u64::from(*len);
        }
        ranges
    }

    fn add(&mut self, readable: &[u32], writable: &[u32]) {
        let (readable, writable) = (self.buffers(readable), self.buffers(writable));
        self.tokens += 1;
        let token = self.tokens;
        if self.pair.driver.add(&readable, &writable, token).is_ok() {
            self.added.push_back(Expected {
                token,
                readable: cut(&readable),
                writable: cut(&writable),
            });
        }
    }

    fn kick(&mut self) {
        let setup = self.pair.driver.setup();
        let count = self.added.len() as u16;
        let wanted = if setup.event_index {
            passes(self.pair.driver.available_event(), self.available, count)
        } else {
            count > 0 && self.pair.driver.used_flags() == 0
        };
        assert_eq!(self.pair.driver.kick_needed(), wanted);
        self.available = self.available.wrapping_add(count);
        self.published.append(&mut self.added);
    }

    fn pop(&mut self, count: usize) {
        for _ in 0..count {
            assert_eq!(self.pair.queue.pending(), Ok(!self.published.is_empty()));
            let Some(expected) = self.published.pop_front() else {
                assert_eq!(self.pair.pop(), None);
                return;
            };
            let head = self.pair.pop().unwrap();
            assert_eq!(self.pair.chain.readable, expected.readable);
            assert_eq!(self.pair.chain.writable, expected.writable);
            self.taken.push(expected.token);
            self.out.push((head, expected));
        }
    }

    /// Forgets chains that were taken last, up to the first that was given back.
    fn rewind(&mut self, count: usize) {
        let mut rewound = 0;
        while rewound < count {
            let last = self.taken.last().copied();
            let Some(position) = self
                .out
                .iter()
                .position(|(_, expected)| Some(expected.token) == last)
            else {
                break;
            };
            let (_, expected) = self.out.remove(position);
            self.published.push_front(expected);
            self.taken.pop();
            rewound += 1;
        }
        self.pair.queue.rewind(rewound as u16);
    }

    fn complete(&mut self, index: usize, written: u32) {
        if self.out.is_empty() {
            return;
        }
        let (head, expected) = self.out.remove(index % self.out.len());
        self.pair.queue.complete(head, written);
        self.completed.push_back((expected.token, written));
    }

    fn publish(&mut self) {
        let count = self.completed.len() as u16;
        let wanted = if self.pair.driver.setup().event_index {
            count > 0 && (!self.has_published || passes(self.used_event(), self.used, count))
        } else {
            count > 0 && self.wants_interrupts()
        };
        assert_eq!(self.pair.queue.publish(), wanted);
        self.has_published |= count > 0;
        self.used = self.used.wrapping_add(count);
        self.visible.append(&mut self.completed);
    }

    fn take(&mut self, count: usize) {
        for _ in 0..count {
            assert_eq!(self.pair.driver.take_used(), self.visible.pop_front());
        }
    }

    /// The driver's wish, read where the device reads it.
    fn used_event(&self) -> u16 {
        let setup = self.pair.driver.setup();
        self.field(setup.available + 4 + 2 * u64::from(setup.size))
    }

    fn wants_interrupts(&self) -> bool {
        self.field(self.pair.driver.setup().available) == 0
    }

    fn field(&self, frontend_address: u64) -> u16 {
        let mut bytes = [0; 2];
        self.pair.arena.read(
            (frontend_address - self.pair.arena.base()) as usize,
            &mut bytes,
        );
        u16::from_le_bytes(bytes)
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Add { readable, writable } => self.add(&readable, &writable),
            Step::Kick => self.kick(),
            Step::Pop(count) => self.pop(count),
            Step::Rewind(count) => self.rewind(count),
            Step::Complete(index, written) => self.complete(index, written),
            Step::Publish => self.publish(),
            Step::Take(count) => self.take(count),
            Step::WantInterrupts(true) => assert_eq!(
                self.pair.driver.enable_interrupts(),
                !self.visible.is_empty()
            ),
            Step::WantInterrupts(false) => self.pair.driver.disable_interrupts(),
            Step::WantNotifications(true) => {
                assert_eq!(
                    self.pair.queue.enable_notifications(),
                    !self.published.is_empty()
                );
            }
            Step::WantNotifications(false) => self.pair.queue.disable_notifications(),
        }
        assert_eq!(usize::from(self.pair.queue.in_flight()), self.out.len());
        let out_or_done = self.available.wrapping_sub(self.published.len() as u16);
        assert_eq!(self.pair.queue.next_available(), out_or_done);
    }

    /// Lets everything run to its end.
    fn finish(mut self) {
        self.kick();
        self.pop(usize::MAX);
        while !self.out.is_empty() {
            self.complete(0, 1);
        }
        self.publish();
        self.take(self.visible.len() + 1);
        assert_eq!(
            self.pair.driver.free_descriptors(),
            usize::from(self.pair.queue.size())
        );
    }
}

/// What the device must see of these: nothing empty, and two where there were one across the border.
fn cut(ranges: &[Range]) -> Vec<Range> {
    let border = BASE + 30 * PAGE as u64;
    let pieces = ranges.iter().flat_map(|range| {
        let end = range.address + u64::from(range.len);
        let middle = border.clamp(range.address, end);
        [
            Range {
                address: range.address,
                len: (middle - range.address) as u32,
            },
            Range {
                address: middle,
                len: (end - middle) as u32,
            },
        ]
    });
    pieces.filter(|range| range.len > 0).collect()
}

/// Whether an index that moves on by `count` passes `wanted`, told by counting.
fn passes(wanted: u16, from: u16, count: u16) -> bool {
    (0..count).any(|step| from.wrapping_add(step) == wanted)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 3 } else { 300 }, failure_persistence: None, ..Default::default() })]

    #[test]
    fn everything_comes_back_as_it_went(
        size in any_size(),
        start in prop_oneof![Just(0), Just(65500), any::<u16>()],
        event_index: bool,
        indirect: bool,
        steps in vec(any_step(), 1..if cfg!(miri) { 40 } else { 400 }),
    ) {
        let mut model = Model::new(start, size, event_index, indirect);
        for step in steps {
            model.step(step);
        }
        model.finish();
    }

    /// A ring of random bytes gives chains inside the guest's memory, or errors, and ends.
    #[test]
    fn nonsense_is_survived(
        bytes in vec(any::<u8>(), 8 * 16 + 22 + 70),
        tame in vec((0..8_u16, 0..8_u16, 0..3000_u32), 8),
        indirect: bool,
    ) {
        let mut pair = Pair::new(8, true, indirect);
        let end = BASE + pair.arena.size() as u64;
        pair.arena.write(0, &bytes);
        // Half of the time something that is nearly right, which gets further.
        for (index, (flags, next, len)) in tame.iter().enumerate() {
            if index % 2 == 0 {
                let descriptor = RawDescriptor { address: BASE + 16 * u64::from(*next), len: *len, flags: *flags, next: *next };
                pair.driver.write_descriptor(index as u16, descriptor);
            }
            pair.driver.set_available_entry(index as u16, *next);
        }
        pair.driver.set_available_index(8);
        for _ in 0..20 {
            match pair.queue.pop(&mut pair.chain) {
                Ok(true) => {
                    let all = pair.chain.readable.iter().chain(&pair.chain.writable);
                    for range in all {
                        prop_assert!(range.len > 0 && range.address >= BASE);
                        prop_assert!(range.address + u64::from(range.len) <= end);
                    }
                    pair.queue.complete(pair.chain.head, 0);
                }
                Ok(false) => break,
                Err(error) => {
                    prop_assert!(!error.to_string().is_empty());
                    break;
                }
            }
        }
        pair.queue.publish();
    }
}

#[test]
#[cfg_attr(miri, ignore = "long there")]
fn indices_wrap() {
    for event_index in [true, false] {
        let mut model = Model::new(0, 4, event_index, false);
        for round in 0..70_000_u32 {
            model.step(Step::Add {
                readable: vec![1],
                writable: vec![1],
            });
            model.step(Step::Kick);
            model.step(Step::Pop(1));
            model.step(Step::Complete(0, round));
            model.step(Step::Publish);
            model.step(Step::Take(1));
        }
        assert_eq!(
            model.pair.queue.next_available(),
            (70_000_u32 % 65_536) as u16
        );
        model.finish();
    }
}
