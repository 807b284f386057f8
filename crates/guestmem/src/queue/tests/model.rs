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
    /// How far it moves an index: in a split queue by one, in a packed one by its descriptors.
    step: u32,
    readable: Vec<Range>,
    writable: Vec<Range>,
}

struct Model {
    pair: Pair,
    tokens: u64,
    /// Where the next buffer starts: buffers may overlap, they are not written to here.
    cursor: u64,
    added: VecDeque<Expected>,
    published: VecDeque<Expected>,
    out: Vec<(u16, Expected)>,
    /// The tokens of all chains that were taken, in order.
    taken: Vec<u64>,
    completed: VecDeque<(u64, u32)>,
    visible: VecDeque<(u64, u32)>,
    /// Running indices, as the specification counts, modulo `modulus`: what each side has published so far.
    available: u32,
    used: u32,
    /// How far the device is ahead of what it has published.
    given_back: u32,
    /// 65536; in a packed queue twice the size, since a place there comes with a wrap counter.
    modulus: u32,
    has_published: bool,
}

/// The last address that buffers of the test may have, behind `BASE`.
const BUFFERS: u64 = 60 * PAGE as u64;

impl Model {
    fn new(format: MakeDriver, start: u16, size: u16, event_index: bool, indirect: bool) -> Model {
        let mut pair = Pair::of(format, start, size, event_index, indirect);
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
        pair.driver = format(Arc::clone(&arena), BASE, size, event_index, indirect);
        pair.arena = arena;
        if start != 0 {
            pair.driver.start_at(start);
        }
        pair.queue = Queue::new(pair.driver.setup(), Arc::clone(&pair.memory)).unwrap();
        let modulus = match pair.driver.setup().packed {
            true => 2 * u32::from(size),
            false => 65_536,
        };
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
            available: u32::from(start) % modulus,
            used: u32::from(start) % modulus,
            given_back: 0,
            modulus,
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
        let setup = self.pair.driver.setup();
        let parts = (readable.len() + writable.len()) as u32;
        let step = match setup.packed && !setup.indirect {
            true => parts,
            false => 1,
        };
        if self.pair.driver.add(&readable, &writable, token).is_ok() {
            self.added.push_back(Expected {
                token,
                step,
                readable: cut(&readable),
                writable: cut(&writable),
            });
        }
    }

    fn kick(&mut self) {
        let count = self.added.iter().map(|expected| expected.step).sum();
        let wanted = count > 0
            && match self.wish_for_notification() {
                Wish::Always => true,
                Wish::Never => false,
                Wish::At(place) => self.passes(place, self.available, count),
            };
        assert_eq!(self.pair.driver.kick_needed(), wanted);
        self.available = (self.available + count) % self.modulus;
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
        self.given_back += expected.step;
        self.completed.push_back((expected.token, written));
    }

    fn publish(&mut self) {
        let count = std::mem::take(&mut self.given_back);
        let wanted = count > 0
            && match self.wish_for_interrupt() {
                Wish::Always => true,
                Wish::Never => false,
                Wish::At(place) => !self.has_published || self.passes(place, self.used, count),
            };
        assert_eq!(self.pair.queue.publish(), wanted);
        self.has_published |= count > 0;
        self.used = (self.used + count) % self.modulus;
        self.visible.append(&mut self.completed);
    }

    fn take(&mut self, count: usize) {
        for _ in 0..count {
            assert_eq!(self.pair.driver.take_used(), self.visible.pop_front());
        }
    }

    /// The driver's wish, read where the device reads it.
    fn wish_for_interrupt(&self) -> Wish {
        let setup = self.pair.driver.setup();
        if setup.packed {
            return self.wish(setup.available);
        }
        match self.field(setup.available) {
            _ if setup.event_index => {
                let event = setup.available + 4 + 2 * u64::from(setup.size);
                Wish::At(u32::from(self.field(event)))
            }
            0 => Wish::Always,
            _ => Wish::Never,
        }
    }

    /// The device's wish, read where the driver reads it.
    fn wish_for_notification(&self) -> Wish {
        let setup = self.pair.driver.setup();
        if setup.packed {
            return self.wish(setup.used);
        }
        match self.field(setup.used) {
            _ if setup.event_index => {
                let event = setup.used + 4 + 8 * u64::from(setup.size);
                Wish::At(u32::from(self.field(event)))
            }
            0 => Wish::Always,
            _ => Wish::Never,
        }
    }

    /// What an event suppression structure says (virtio 1.2, section 2.8.14).
    fn wish(&self, structure: u64) -> Wish {
        let setup = self.pair.driver.setup();
        match self.field(structure + 2) {
            0 => Wish::Always,
            1 => Wish::Never,
            2 if setup.event_index => {
                let event = u32::from(self.field(structure));
                Wish::At(
                    (event & 0x7fff)
                        + if event >> 15 == 1 {
                            0
                        } else {
                            u32::from(setup.size)
                        },
                )
            }
            flags => panic!("flags {flags}"),
        }
    }

    /// Whether an index that moves on by `count` passes `place`, by counting.
    fn passes(&self, place: u32, from: u32, count: u32) -> bool {
        (0..count).any(|step| (from + step) % self.modulus == place)
    }

    /// What a base must say of a device that has taken and given back so much.
    fn expected_base(&self) -> u32 {
        let ahead: u32 = self.published.iter().map(|expected| expected.step).sum();
        let taken = (self.available + self.modulus - ahead % self.modulus) % self.modulus;
        let setup = self.pair.driver.setup();
        if !setup.packed {
            return taken;
        }
        let size = u32::from(setup.size);
        let bits = |place: u32| (place % size) | (u32::from(place < size) << 15);
        bits(taken) | bits((self.used + self.given_back) % self.modulus) << 16
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
        assert_eq!(self.pair.queue.ring_base(), self.expected_base());
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

/// When one side wants notifications of the other.
enum Wish {
    Always,
    Never,
    At(u32),
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 3 } else { 300 }, failure_persistence: None, ..Default::default() })]

    #[test]
    fn everything_comes_back_as_it_went(
        packed: bool,
        size in any_size(),
        whole: bool,
        start in prop_oneof![Just(0), Just(65500), any::<u16>()],
        event_index: bool,
        indirect: bool,
        steps in vec(any_step(), 1..if cfg!(miri) { 40 } else { 400 }),
    ) {
        // A packed queue may have any size.
        let size = if packed && !whole { size - size / 4 } else { size };
        let mut model = Model::new(FORMATS[usize::from(packed)], start, size, event_index, indirect);
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
        packed: bool,
    ) {
        let mut pair = Pair::of(FORMATS[usize::from(packed)], 0, 8, true, indirect);
        let end = BASE + pair.arena.size() as u64;
        pair.arena.write(0, &bytes);
        // Half of the time something that is nearly right, which gets further.
        for (index, (flags, next, len)) in tame.iter().enumerate() {
            if index % 2 == 0 {
                let flags = *flags | if packed { RawDescriptor::AVAILABLE } else { 0 };
                let descriptor = RawDescriptor { address: BASE + 16 * u64::from(*next), len: *len, flags, next: *next };
                pair.driver.write_descriptor(index as u16, descriptor);
            }
            if !packed {
                pair.driver.set_available_entry(index as u16, *next);
            }
        }
        if !packed {
            pair.driver.set_available_index(8);
        }
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
    for (event_index, format) in [true, false]
        .into_iter()
        .flat_map(|event_index| FORMATS.map(|format| (event_index, format)))
    {
        let mut model = Model::new(format, 0, 4, event_index, false);
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
        model.finish();
    }
}
