//! The virtqueue over hostile memory.

use std::sync::Arc;

use guestmem::guest::{GuestMemory, Range, total_len};
use guestmem::queue::{Chain, MAX_CHAIN_LEN, MAX_CHAIN_RANGES, Queue, QueueSetup};
use guestmem_driver::{Arena, DriverQueue, RawDescriptor};

use crate::Dice;

mod packed;

/// In bytes.
const PAGE: usize = 4096;

/// The guest's memory: two regions that touch, the second of them far away in the file; then one that stands alone.
/// Columns: guest address behind the base, offset in the arena, length, all in pages.
const REGIONS: [(u64, usize, usize); 3] = [(0, 0, 6), (6, 8, 4), (64, 14, 2)];

/// Pages of the arena that belong to no region, and what is in them.
const UNMAPPED_PAGES: [usize; 3] = [6, 7, 13];
const UNTOUCHED: u8 = 0xa5;

const ARENA_PAGES: usize = 16;

/// Where the tables of indirect descriptors of this target lie: in the first region, across into the second.
const TABLES: u64 = 6 * PAGE as u64 - 512;

/// A guest writes anything anywhere into its rings, between any two steps of the device. The device finds exactly the chains
/// that a second reader finds, from the specification alone; or both say that the driver broke the rules. Nothing
/// outside the regions is touched.
pub fn walk(input: &[u8]) {
    let mut dice = Dice::new(input);
    let mut world = World::new(&mut dice);
    for _ in 0..200 {
        if dice.is_empty() || !world.step(&mut dice) {
            break;
        }
    }
    world.check_untouched();
}

struct World {
    arena: Arc<Arena>,
    base: u64,
    memory: Arc<GuestMemory>,
    /// How many of the regions it has.
    regions: usize,
    driver: DriverQueue,
    queue: Queue,
    chain: Chain,
    /// The device's state, as it has to be: where it goes on, counted in chains modulo 65536. In a packed ring counted in descriptors, modulo
    /// twice the size: there the wrap counter is part of the place.
    next_available: u16,
    seen_available: u16,
    /// In a packed ring, where it gives back, counted likewise.
    next_used: u16,
    /// Names of chains that are out, in the order in which they were taken, and how many places each has taken.
    out: Vec<(u16, u16)>,
    /// How many were taken since one was given back last.
    tail: usize,
}

impl World {
    fn new(dice: &mut Dice<'_>) -> World {
        let arena = Arc::new(Arena::new(ARENA_PAGES * PAGE).expect("an arena"));
        for page in UNMAPPED_PAGES {
            arena.write(page * PAGE, &[UNTOUCHED; PAGE]);
        }
        let base = dice.pick(&[0x4000_0000, 0, u64::MAX - 80 * PAGE as u64]);
        let size = dice.pick(&[8, 1, 2, 16, 64]);
        let (event_index, indirect) = (dice.one_in(2), !dice.one_in(4));
        let start = dice.pick(&[0, 0, 65_530, 32_767]);
        let packed = dice.one_in(2);
        let make = match packed {
            true => DriverQueue::packed,
            false => DriverQueue::new,
        };
        // A packed ring may have any size.
        let size = if packed { size - size / 4 } else { size };
        let mut driver = make(Arc::clone(&arena), base, size, event_index, indirect);
        driver.start_at(start);
        let start = if packed { start % (2 * size) } else { start };
        let memory = Arc::new(regions(&arena, base, REGIONS.len()));
        let queue = Queue::new(driver.setup(), Arc::clone(&memory)).expect("an honest set-up");
        World {
            arena,
            base,
            memory,
            regions: REGIONS.len(),
            driver,
            queue,
            chain: Chain::default(),
            next_available: start,
            seen_available: start,
            next_used: start,
            out: Vec::new(),
            tail: 0,
        }
    }

    fn setup(&self) -> QueueSetup {
        self.driver.setup()
    }

    /// One thing that happens. False when the driver has broken the rules and the line is lost.
    fn step(&mut self, dice: &mut Dice<'_>) -> bool {
        let size = self.setup().size;
        match dice.below(16) {
            0..=3 => {
                let index = dice.below(usize::from(size)) as u16;
                let descriptor = self.any_descriptor(dice);
                self.driver.write_descriptor(index, descriptor);
            }
            4 => {
                let index = dice.below(usize::from(size)) as u16;
                self.driver.write_descriptor(index, self.table(dice));
            }
            5 | 6 if self.setup().packed => self.make_available(dice),
            5 => {
                let head = dice.below(usize::from(size) + 1) as u16;
                let index = self.driver.available_index();
                self.driver.set_available_entry(index, head);
                self.driver.set_available_index(index.wrapping_add(1));
            }
            6 => {
                let ahead = dice.below(usize::from(size) + 2) as u16;
                self.driver
                    .set_available_index(self.next_available.wrapping_add(ahead));
            }
            7 => {
                // Anywhere in the first page, where the rings are.
                let bytes = dice.take(8);
                let offset = dice.below(PAGE - 8);
                self.arena.write(offset, bytes);
            }
            8..=11 => return self.pop(dice),
            12 => self.complete(dice),
            13 => {
                self.queue.publish();
            }
            14 => {
                if dice.one_in(2) {
                    self.queue.disable_notifications();
                } else {
                    let any = match self.setup().packed {
                        true => self.is_available(),
                        false => {
                            self.driver.available_index() != self.next_available
                                || self.seen_available != self.next_available
                        }
                    };
                    assert_eq!(self.queue.enable_notifications(), any);
                }
            }
            _ if dice.one_in(2) => self.rewind(dice),
            _ => self.replace_memory(dice),
        }
        true
    }

    fn any_descriptor(&self, dice: &mut Dice<'_>) -> RawDescriptor {
        let (page, _, pages) = dice.pick(&REGIONS);
        let edge = match dice.one_in(2) {
            true => page,
            false => page + pages as u64,
        };
        let near = u64::from(dice.byte()).wrapping_sub(dice.pick(&[0, 128, 256]));
        let address = match dice.below(8) {
            0 => dice.quad(),
            _ => (self.base + edge * PAGE as u64).wrapping_add(near),
        };
        let len = match dice.below(6) {
            0 => dice.edgy(),
            1 => dice.pick(&[PAGE as u32, 4 * PAGE as u32, 10 * PAGE as u32, 0]),
            _ => u32::from(dice.byte()),
        };
        let flags = match dice.below(8) {
            0 => dice.word(),
            _ => dice.word() & 3,
        };
        let next = dice.below(usize::from(self.setup().size) + 1) as u16;
        RawDescriptor {
            address,
            len,
            flags,
            next,
        }
    }

    /// Writes an indirect table, and gives a descriptor of it.
    fn table(&self, dice: &mut Dice<'_>) -> RawDescriptor {
        let entries = dice.pick(&[1, 2, 3, 20, 0]);
        let offset = TABLES as usize + dice.pick(&[0, 16, 5, 400]);
        for entry in 0..entries {
            let mut descriptor = self.any_descriptor(dice);
            if !dice.one_in(8) {
                descriptor.next = entry + 1;
            }
            // Half a table lies in the second region, two pages further on in the arena.
            let bytes = match self.setup().packed {
                true => descriptor.to_packed_bytes(),
                false => descriptor.to_bytes(),
            };
            for (index, byte) in bytes.into_iter().enumerate() {
                let at = offset + 16 * usize::from(entry) + index;
                let gap = if at < 6 * PAGE { 0 } else { 2 * PAGE };
                self.arena.write(at + gap, &[byte]);
            }
        }
        let odd = dice.pick(&[0, 0, 0, 1, 8]);
        RawDescriptor {
            address: self.base + offset as u64,
            len: match dice.below(10) {
                0 => dice.edgy(),
                _ => 16 * u32::from(entries) + odd,
            },
            flags: RawDescriptor::INDIRECT | if dice.one_in(10) { dice.word() } else { 0 },
            next: dice.word(),
        }
    }

    fn pop(&mut self, dice: &mut Dice<'_>) -> bool {
        let expected = self.expected();
        let before = self.chain.clone();
        match (self.queue.pop(&mut self.chain), expected) {
            (Ok(false), Ok(None)) => assert_eq!(self.chain, before),
            (Ok(true), Ok(Some((head, readable, writable)))) => {
                assert_eq!(self.chain.head, head);
                assert_eq!(self.chain.readable, readable);
                assert_eq!(self.chain.writable, writable);
                let step = match self.setup().packed {
                    true => self.chain.entries,
                    false => 1,
                };
                self.next_available = self.moved(self.next_available, i32::from(step));
                self.out.push((head, step));
                self.tail += 1;
                self.use_chain(dice);
            }
            (Err(error), Err(why)) => {
                assert!(!error.to_string().is_empty(), "{why}");
                return false;
            }
            (found, expected) => panic!("the queue says {found:?}, expected {expected:?}"),
        }
        assert_eq!(self.queue.ring_base(), self.expected_base());
        assert_eq!(usize::from(self.queue.in_flight()), self.out.len());
        true
    }

    /// What was found can be read and written to, all of it, and not a byte more.
    fn use_chain(&self, dice: &mut Dice<'_>) {
        let total = total_len(&self.chain.readable);
        let len = total.min(300);
        let offset = dice.below(total - len + 1);
        let mut copy = vec![0; len];
        let read = self.memory.read(&self.chain.readable, offset, &mut copy);
        read.expect("what was popped is mapped");
        assert!(
            self.memory
                .read(&self.chain.readable, total, &mut [0])
                .is_err()
        );
        let total = total_len(&self.chain.writable);
        let written = [0; 3];
        let len = total.min(3);
        let wrote = self
            .memory
            .write(&self.chain.writable, total - len, &written[..len]);
        wrote.expect("what was popped is mapped");
        assert!(
            self.memory
                .write(&self.chain.writable, total - len, &[0; 4])
                .is_err()
        );
    }

    fn complete(&mut self, dice: &mut Dice<'_>) {
        if !self.out.is_empty() {
            let (head, step) = self.out.remove(dice.below(self.out.len()));
            self.queue.complete(head, dice.edgy());
            self.next_used = self.moved(self.next_used, i32::from(step));
            self.tail = 0;
        }
    }

    /// The device gives up what it took last and has not given back.
    fn rewind(&mut self, dice: &mut Dice<'_>) {
        let count = dice.below(self.tail + 1);
        self.queue.rewind(count as u16);
        let forgotten = self.out.split_off(self.out.len() - count);
        self.tail -= count;
        let steps: i32 = forgotten.iter().map(|(_, step)| i32::from(*step)).sum();
        self.next_available = self.moved(self.next_available, -steps);
    }

    fn replace_memory(&mut self, dice: &mut Dice<'_>) {
        let count = 1 + dice.below(REGIONS.len());
        let memory = Arc::new(regions(&self.arena, self.base, count));
        // The rings are in the first region, which stays.
        let replaced = self.queue.replace_memory(Arc::clone(&memory));
        replaced.expect("the rings are where they were");
        (self.memory, self.regions) = (memory, count);
    }
}

// ---- The second reader ----

/// A chain as it has to be found.
type Found = (u16, Vec<Range>, Vec<Range>);

/// What is wrong, for a person who looks into a failure.
type Wrong = &'static str;

impl World {
    /// What the next pop must give (virtio 1.2, sections 2.7.13 and 2.8.21).
    fn expected(&mut self) -> Result<Option<Found>, Wrong> {
        let setup = self.setup();
        if setup.packed {
            return self.expected_packed();
        }
        if self.next_available == self.seen_available {
            let index = self.field(setup.available + 2);
            if index.wrapping_sub(self.next_available) > setup.size {
                return Err("more chains than entries");
            }
            self.seen_available = index;
            if index == self.next_available {
                return Ok(None);
            }
        }
        let slot = u64::from(self.next_available % setup.size);
        let head = self.field(setup.available + 4 + 2 * slot);
        if head >= setup.size {
            return Err("no such head");
        }
        if self.out.iter().any(|(out, _)| *out == head) {
            return Err("the device has it already");
        }
        let mut found = Collector::new(self);
        found.table(head, u32::from(setup.size), false, |index| {
            let mut bytes = [0; 16];
            let place = setup.descriptors - self.arena.base() + 16 * u64::from(index);
            self.arena.read(place as usize, &mut bytes);
            Some(bytes)
        })?;
        Ok(Some((head, found.readable, found.writable)))
    }

    /// A field of a ring, by its front-end address.
    fn field(&self, address: u64) -> u16 {
        let mut bytes = [0; 2];
        self.arena
            .read((address - self.arena.base()) as usize, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// Where a guest address lies in the arena, and how many bytes follow it in its region.
    fn place(&self, address: u64) -> Option<(usize, u64)> {
        let offset = address.checked_sub(self.base)?;
        REGIONS[..self.regions].iter().find_map(|region| {
            let (page, start, pages) = *region;
            let inside = offset.checked_sub(page * PAGE as u64)?;
            let left = (pages * PAGE) as u64;
            let left = left.checked_sub(inside).filter(|left| *left > 0)?;
            Some((start * PAGE + inside as usize, left))
        })
    }

    /// A byte of the guest's, by its guest address.
    fn byte(&self, address: u64) -> Option<u8> {
        let (place, _) = self.place(address)?;
        let mut byte = [0];
        self.arena.read(place, &mut byte);
        Some(byte[0])
    }

    fn check_untouched(&self) {
        for page in UNMAPPED_PAGES {
            let mut bytes = [0; PAGE];
            self.arena.read(page * PAGE, &mut bytes);
            assert_eq!(bytes, [UNTOUCHED; PAGE], "page {page} is in no region");
        }
    }
}

struct Collector<'a> {
    world: &'a World,
    readable: Vec<Range>,
    writable: Vec<Range>,
    descriptors: usize,
    bytes: u64,
}

impl<'a> Collector<'a> {
    fn new(world: &'a World) -> Collector<'a> {
        Collector {
            world,
            readable: Vec::new(),
            writable: Vec::new(),
            descriptors: 0,
            bytes: 0,
        }
    }

    /// Follows a chain through a table.
    fn table(
        &mut self,
        first: u16,
        entries: u32,
        is_indirect: bool,
        entry: impl Fn(u16) -> Option<[u8; 16]>,
    ) -> Result<(), Wrong> {
        let mut index = first;
        for _ in 0..entries {
            let raw = u128::from_le_bytes(entry(index).ok_or("no table there")?);
            let (address, len) = (raw as u64, (raw >> 64) as u32);
            let (flags, next) = ((raw >> 96) as u16, (raw >> 112) as u16);
            if flags & RawDescriptor::INDIRECT != 0 {
                if is_indirect || flags & RawDescriptor::NEXT != 0 {
                    return Err("an indirect table may be the last of a ring's descriptors only");
                }
                return self.indirect(address, len);
            }
            self.descriptor(address, len, flags & RawDescriptor::WRITE != 0)?;
            if flags & RawDescriptor::NEXT == 0 {
                return Ok(());
            }
            if u32::from(next) >= entries {
                return Err("no such next");
            }
            index = next;
        }
        Err("a loop")
    }

    fn indirect(&mut self, address: u64, len: u32) -> Result<(), Wrong> {
        let world = self.world;
        let entries = len / 16;
        if !world.setup().indirect {
            return Err("indirect tables were not negotiated");
        }
        if entries == 0 || entries as usize > MAX_CHAIN_LEN || len % 16 != 0 {
            return Err("no table has that length");
        }
        address.checked_add(u64::from(len)).ok_or("no such place")?;
        let entry = |index| {
            let start = address + 16 * u64::from(index);
            let mut bytes = [0; 16];
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = world.byte(start + at as u64)?;
            }
            Some(bytes)
        };
        match world.setup().packed {
            true => self.packed_table(entries, entry),
            false => self.table(0, entries, true, entry),
        }
    }

    fn descriptor(&mut self, address: u64, len: u32, is_writable: bool) -> Result<(), Wrong> {
        self.descriptors += 1;
        if self.descriptors > MAX_CHAIN_LEN {
            return Err("too many descriptors");
        }
        if len == 0 {
            return Ok(());
        }
        self.bytes += u64::from(len);
        if self.bytes > 1 << 32 {
            return Err("more bytes than 32 bits address");
        }
        if !is_writable && !self.writable.is_empty() {
            return Err("readable behind writable");
        }
        let (mut address, mut left) = (address, u64::from(len));
        while left > 0 {
            let (_, room) = self.world.place(address).ok_or("not mapped")?;
            let len = left.min(room);
            let list = match is_writable {
                true => &mut self.writable,
                false => &mut self.readable,
            };
            let piece = Range {
                address,
                len: len as u32,
            };
            list.push(piece);
            if self.readable.len() + self.writable.len() > MAX_CHAIN_RANGES {
                return Err("too many ranges");
            }
            left -= len;
            if left > 0 {
                address = address.checked_add(len).ok_or("not mapped")?;
            }
        }
        Ok(())
    }
}

/// The first `count` of the regions.
fn regions(arena: &Arena, base: u64, count: usize) -> GuestMemory {
    let specs = REGIONS[..count].iter().map(|(page, start, pages)| {
        let address = base + page * PAGE as u64;
        let part = arena.part(address, start * PAGE, pages * PAGE);
        part.expect("a descriptor can be duplicated")
    });
    GuestMemory::with_regions(specs.collect()).expect("they do not overlap")
}

// ---- Set-up ----

/// A VMM says anything about where a queue is. Either that is a queue, and it can be used, or it is refused.
pub fn setup(input: &[u8]) {
    let mut dice = Dice::new(input);
    let arena = Arc::new(Arena::new(ARENA_PAGES * PAGE).expect("an arena"));
    let count = dice.below(REGIONS.len() + 1);
    let memory = Arc::new(regions(&arena, 0, count));
    let setup = any_setup(&arena, &mut dice);
    let is_placed = |(address, len, alignment): &(u64, u64, u64)| {
        let inside = REGIONS[..count].iter().any(|(_, start, pages)| {
            let start = arena.base() + (start * PAGE) as u64;
            let end = start + (pages * PAGE) as u64;
            *address >= start && address.checked_add(*len).is_some_and(|last| last <= end)
        });
        inside && address % alignment == 0
    };
    let sized = match setup.packed {
        true => (1..=32_768).contains(&setup.size) && packed::is_base(&setup),
        false => setup.size.is_power_of_two(),
    };
    let good = sized && areas(&setup).iter().all(is_placed);
    match Queue::new(setup, memory) {
        Ok(mut queue) => {
            assert!(good, "{setup:x?} was accepted");
            let mut chain = Chain::default();
            while queue.pop(&mut chain) == Ok(true) {
                queue.complete(chain.head, 0);
            }
            queue.enable_notifications();
            queue.publish();
            queue.driver_digest();
        }
        Err(error) => assert!(!good, "{setup:x?} was refused: {error}"),
    }
}

fn any_setup(arena: &Arena, dice: &mut Dice<'_>) -> QueueSetup {
    let size = match dice.below(4) {
        0 => dice.word(),
        _ => 1 << dice.below(16),
    };
    let mut place = || match dice.below(6) {
        0 => dice.quad(),
        _ => {
            let (_, start, pages) = dice.pick(&REGIONS);
            let page = start + dice.below(pages + 1);
            let near = u64::from(dice.byte()).wrapping_sub(dice.pick(&[0, 0, 128]));
            (arena.base() + (page * PAGE) as u64).wrapping_add(near)
        }
    };
    let [descriptors, available, used] = [place(), place(), place()];
    let base = u32::from(dice.word());
    let event_index = dice.one_in(2);
    let packed = dice.one_in(2);
    QueueSetup {
        size,
        descriptors,
        available,
        used,
        ring_base: match packed {
            true if dice.one_in(3) => base | base << 16,
            true => base | u32::from(dice.word()) << 16,
            false => base,
        },
        event_index,
        indirect: true,
        packed,
    }
}

/// Address, length and alignment of a queue's areas (virtio 1.2, sections 2.7 and 2.8).
fn areas(setup: &QueueSetup) -> [(u64, u64, u64); 3] {
    let size = u64::from(setup.size);
    let event = if setup.event_index { 2 } else { 0 };
    let [available, used] = match setup.packed {
        true => [(4, 4), (4, 4)],
        false => [(4 + 2 * size + event, 2), (4 + 8 * size + event, 4)],
    };
    [
        (setup.descriptors, 16 * size, 16),
        (setup.available, available.0, available.1),
        (setup.used, used.0, used.1),
    ]
}
