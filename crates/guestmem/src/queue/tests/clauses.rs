//! Clauses of virtio 1.2, each over every case there is within stated bounds.
//!
//! A test here is a proof by enumeration: its first sentence is the clause, its bounds are in the loops, and why the bounds are enough is
//! said beside them. What is expected is computed from the clause alone, in other words than the code's. `make proofs` runs them with the
//! optimiser and, where the text says so, over a larger space.

use super::*;

const NEXT: u16 = RawDescriptor::NEXT;
const WRITE: u16 = RawDescriptor::WRITE;
const INDIRECT: u16 = RawDescriptor::INDIRECT;

/// Sequences of `len` digits below `base`, all of them.
pub(super) fn sequences(base: usize, len: u32) -> impl Iterator<Item = Vec<usize>> {
    (0..base.pow(len)).map(move |mut number| {
        (0..len)
            .map(|_| {
                let digit = number % base;
                number /= base;
                digit
            })
            .collect()
    })
}

impl Pair {
    /// What the device makes of this head. It is given back at once.
    fn offer(&mut self, head: u16) -> Result<Chain, QueueError> {
        let index = self.queue.ring_base() as u16;
        self.driver.set_available_entry(index, head);
        self.driver.set_available_index(index.wrapping_add(1));
        assert!(self.queue.pop(&mut self.chain)?, "one is available");
        assert_eq!(self.chain.head, head);
        self.queue.complete(head, 0);
        self.queue.publish();
        Ok(self.chain.clone())
    }
}

/// The memory of descriptor `index`: a stretch of its own, with a length of its own.
fn place(index: usize, flags: u16, next: usize) -> RawDescriptor {
    RawDescriptor {
        address: BASE + 0x8000 + 0x100 * index as u64,
        len: 1 + index as u32,
        flags,
        next: next as u16,
    }
}

fn range(descriptor: &RawDescriptor) -> Range {
    Range {
        address: descriptor.address,
        len: descriptor.len,
    }
}

/// What a chain of these descriptors, in this order, has for the device to read and to write; nothing if a readable one follows a writable.
pub(super) fn split(chain: &[RawDescriptor]) -> Option<(Vec<Range>, Vec<Range>)> {
    let (mut readable, mut writable) = (Vec::new(), Vec::new());
    for descriptor in chain.iter().filter(|descriptor| descriptor.len > 0) {
        if descriptor.flags & WRITE != 0 {
            writable.push(range(descriptor));
        } else if writable.is_empty() {
            readable.push(range(descriptor));
        } else {
            return None;
        }
    }
    Some((readable, writable))
}

/// The descriptors from `head` on, in order; nothing if there is no end or no such descriptor.
fn follow(table: &[RawDescriptor], head: usize) -> Option<Vec<RawDescriptor>> {
    let (mut index, mut seen, mut chain) = (head, vec![false; table.len()], Vec::new());
    loop {
        let descriptor = table.get(index)?;
        if std::mem::replace(&mut seen[index], true) {
            return None;
        }
        chain.push(*descriptor);
        if descriptor.flags & NEXT == 0 {
            return Some(chain);
        }
        index = usize::from(descriptor.next);
    }
}

fn check(found: Result<Chain, QueueError>, expected: Option<Vec<RawDescriptor>>, entries: usize) {
    match (found, expected.as_deref().and_then(split)) {
        (Ok(chain), Some((readable, writable))) => {
            assert_eq!((chain.readable, chain.writable), (readable, writable));
            assert_eq!(usize::from(chain.entries), entries);
        }
        (Err(_), None) => {}
        (found, expected) => panic!("{found:?} where {expected:?} was expected"),
    }
}

/// Loops in the descriptor chain are forbidden; a chain goes where `next` says, if and only if NEXT is set.
///
/// Every table of four descriptors: each readable or writable, with or without NEXT, its `next` anything up to one behind the end; from every
/// head. Larger tables have no other kinds of steps, and no other kinds of loops than those of one to four.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_7_5_2_chains_are_followed_to_their_end_and_have_no_loops() {
    let mut pair = Pair::new(4, true, false);
    let kinds: Vec<(u16, usize)> = [0, WRITE]
        .into_iter()
        .map(|flags| (flags, 0))
        .chain((0..=4).flat_map(|next| [(NEXT, next), (NEXT | WRITE, next)]))
        .collect();
    for choice in sequences(kinds.len(), 4) {
        let table: Vec<RawDescriptor> = choice
            .iter()
            .enumerate()
            .map(|(index, kind)| place(index, kinds[*kind].0, kinds[*kind].1))
            .collect();
        for (index, descriptor) in table.iter().enumerate() {
            pair.driver.write_descriptor(index as u16, *descriptor);
        }
        for head in 0..4 {
            let expected = follow(&table, head);
            let entries = expected.as_ref().map_or(0, Vec::len);
            check(pair.offer(head as u16), expected, entries);
        }
        let outside = pair.offer(4);
        assert_eq!(
            outside,
            Err(QueueError::HeadOutOfRange { head: 4, size: 4 })
        );
    }
}

/// Device-writable elements come after device-readable ones; an element of no bytes is neither.
///
/// Every chain of eight, each element with or without bytes, readable or writable.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_7_4_2_writable_elements_come_after_readable_ones() {
    let mut pair = Pair::new(8, true, false);
    for choice in sequences(4, 8) {
        let table: Vec<RawDescriptor> = choice
            .iter()
            .enumerate()
            .map(|(index, kind)| {
                let next = if index < 7 { NEXT } else { 0 };
                let writable = if kind & 1 != 0 { WRITE } else { 0 };
                let mut descriptor = place(index, next | writable, index + 1);
                descriptor.len *= (kind >> 1) as u32;
                descriptor
            })
            .collect();
        for (index, descriptor) in table.iter().enumerate() {
            pair.driver.write_descriptor(index as u16, *descriptor);
        }
        check(pair.offer(0), Some(table), 8);
    }
}

/// A chain is at most 2^32 bytes long in total.
///
/// Every chain of three with lengths from either side of what overflows: a sum of 32 bits, and the limit itself.
#[test]
#[cfg_attr(miri, ignore = "takes four gigabytes there")]
fn spec_2_7_5_2_a_chain_has_at_most_two_to_the_32_bytes() {
    let mut pair = Pair::new(4, true, false);
    // Mapped and never touched: no page of it is ever there.
    let far = Arena::new(1 << 32).unwrap();
    let mut memory = GuestMemory::clone(&pair.memory);
    let start = 1 << 40;
    memory.add_region(far.region(start).unwrap()).unwrap();
    pair.queue.replace_memory(Arc::new(memory)).unwrap();
    let lens = [0, 1, 2, 1 << 31, (1 << 31) + 1, u32::MAX - 1, u32::MAX];
    for choice in sequences(lens.len(), 3) {
        for (index, len) in choice.iter().map(|digit| lens[*digit]).enumerate() {
            let descriptor = RawDescriptor {
                address: start,
                len,
                flags: if index < 2 { NEXT } else { 0 },
                next: index as u16 + 1,
            };
            pair.driver.write_descriptor(index as u16, descriptor);
        }
        let total: u64 = choice.iter().map(|digit| u64::from(lens[*digit])).sum();
        assert_eq!(pair.offer(0).is_ok(), total <= 1 << 32, "{total:#x} bytes");
    }
}

/// What follows from a descriptor in the queue's table and a table of two that it may refer to.
fn indirect(
    outer: &RawDescriptor,
    inner: &[RawDescriptor],
    negotiated: bool,
) -> Option<Vec<RawDescriptor>> {
    if outer.flags & INDIRECT == 0 {
        // The table is bytes like others. A `next` would be the outer one itself.
        return (outer.flags & NEXT == 0).then(|| vec![*outer]);
    }
    let entries = outer.len as usize / 16;
    let sound = negotiated && outer.flags & NEXT == 0 && outer.len % 16 == 0 && entries > 0;
    let chain = follow(inner.get(..entries)?, 0).filter(|_| sound)?;
    let nested = |descriptor: &RawDescriptor| descriptor.flags & INDIRECT != 0;
    (!chain.iter().any(nested)).then_some(chain)
}

/// INDIRECT is for drivers with it, never within a table, never together with NEXT; the device ignores WRITE on the descriptor that
/// refers to a table, and takes a table's first descriptor first (2.7.5.3).
///
/// Every combination of flags of the outer descriptor and of a table's two, each with every `next` up to one behind the end, and lengths of
/// the table on either side of one and two descriptors.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_7_5_3_indirect_tables() {
    for negotiated in [true, false] {
        let mut pair = Pair::new(1, true, negotiated);
        let table = pair.arena.allocate(48, 16);
        for choice in sequences(24, 2) {
            let inner: Vec<RawDescriptor> = choice
                .iter()
                .enumerate()
                .map(|(index, kind)| place(index, (kind % 8) as u16, kind / 8))
                .collect();
            for (index, descriptor) in inner.iter().enumerate() {
                pair.arena.write(table + 16 * index, &descriptor.to_bytes());
            }
            for (flags, len) in
                (0..8).flat_map(|flags| [0, 1, 15, 16, 17, 31, 32, 33].map(|len| (flags, len)))
            {
                let outer = RawDescriptor {
                    address: BASE + table as u64,
                    len,
                    flags,
                    next: 0,
                };
                pair.driver.write_descriptor(0, outer);
                check(pair.offer(0), indirect(&outer, &inner, negotiated), 1);
            }
        }
    }
}

/// The device handles zero or more normal chained descriptors followed by a single one that refers to a table.
///
/// Every number of normal ones that a queue of eight has, then a table of every length up to four; the writable ones begin anywhere.
#[test]
fn spec_2_7_5_3_2_a_table_may_follow_ordinary_descriptors() {
    let mut pair = Pair::new(8, true, true);
    let table = pair.arena.allocate(64, 16);
    for (ordinary, inner) in
        (0..8_usize).flat_map(|ordinary| (1..=4).map(move |inner| (ordinary, inner)))
    {
        for first_writable in 0..=ordinary + inner {
            let flags = |index: usize| if index < first_writable { 0 } else { WRITE };
            let chain: Vec<RawDescriptor> = (0..ordinary + inner)
                .map(|index| place(index, flags(index), 0))
                .collect();
            for (index, descriptor) in chain[..ordinary].iter().enumerate() {
                let linked = place(index, descriptor.flags | NEXT, index + 1);
                pair.driver.write_descriptor(index as u16, linked);
            }
            for (index, descriptor) in chain[ordinary..].iter().enumerate() {
                let next = if index + 1 < inner { NEXT } else { 0 };
                let linked = RawDescriptor {
                    flags: descriptor.flags | next,
                    next: index as u16 + 1,
                    ..*descriptor
                };
                pair.arena.write(table + 16 * index, &linked.to_bytes());
            }
            let outer = RawDescriptor {
                address: BASE + table as u64,
                len: 16 * inner as u32,
                flags: INDIRECT,
                next: 0,
            };
            pair.driver.write_descriptor(ordinary as u16, outer);
            check(pair.offer(0), Some(chain), ordinary + 1);
        }
    }
}

/// The driver never takes back what it made available: an index behind the last one, or ahead by more than the ring has entries, is refused.
///
/// Every index, from five places of which two are at the wrap. All that is computed is a difference modulo 65536, which is the same from
/// every other place.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_7_6_1_the_available_index_never_goes_back() {
    for size in [1, 2, 8, 256] {
        for from in [0, 1, 32_767, 32_768, 65_535] {
            let pair = Pair::starting_at(from, size, true, false);
            for ahead in 0..=u16::MAX {
                let to = from.wrapping_add(ahead);
                pair.driver.set_available_index(to);
                let expected = match ahead {
                    0 => Ok(false),
                    ahead if ahead <= size => Ok(true),
                    _ => Err(QueueError::AvailableIndexJump { from, to, size }),
                };
                assert_eq!(pair.queue.pending(), expected);
            }
        }
    }
}

/// An event is due if the entry with the wanted index was written: if it is among `old`, `old` + 1, ..., `new` - 1.
///
/// The function sees its three numbers in two differences only, so that adding the same to all of them changes nothing; it is enough to
/// look at `old` = 0, where the clause reads `wanted` < `new`. With the optimiser: all 2^32 pairs. Without: all that are wanted, for the
/// first and the last advances and those in the middle.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_7_7_2_an_event_is_due_when_its_index_was_written() {
    let thorough = !cfg!(debug_assertions);
    let near = |edge: u16, new: u16| new.wrapping_sub(edge).wrapping_add(40) < 80;
    for new in (0..=u16::MAX).filter(|new| thorough || near(0, *new) || near(32_768, *new)) {
        for wanted in 0..=u16::MAX {
            assert_eq!(
                needs_event(wanted, 0, new),
                wanted < new,
                "{wanted} in 0..{new}"
            );
        }
    }
    // The differences are what matters: a check of what the argument above says.
    for shift in [1, 255, 32_767, 32_768, 65_535_u16] {
        for (wanted, new) in (0..64).flat_map(|wanted| (0..64).map(move |new| (wanted, new))) {
            let unmoved = needs_event(wanted, 0, new);
            let moved = needs_event(wanted.wrapping_add(shift), shift, new.wrapping_add(shift));
            assert_eq!(moved, unmoved);
        }
    }
}

/// With event indices the device ignores the flag and interrupts if and only if the wanted entry was written; without them it ignores the index
/// and goes by the flag.
///
/// Every advance that a ring of four has, from either side of the wrap, and every wanted index within twice the ring around it.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_7_7_2_interrupts() {
    for (event_index, flags) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        for old in [0, 1, 4, 65_532, 65_534, 65_535_u16] {
            let mut pair = Pair::starting_at(old.wrapping_sub(1), 4, event_index, false);
            pair.driver.write_descriptor(0, place(0, 0, 0));
            // The first publication of a queue that is taken over always interrupts, since it is unknown what the driver saw.
            pair.offer(0).unwrap();
            for (advance, around) in
                (1..=4_u16).flat_map(|advance| (0..17).map(move |around| (advance, around)))
            {
                let old = pair.queue.ring_base() as u16;
                let wanted = old.wrapping_add(around).wrapping_sub(8);
                pair.driver.set_available_flags(flags);
                pair.driver.set_used_event(wanted);
                for index in 0..advance {
                    pair.driver.write_descriptor(index, place(0, 0, 0));
                    pair.driver
                        .set_available_entry(old.wrapping_add(index), index);
                }
                pair.driver.set_available_index(old.wrapping_add(advance));
                while let Some(head) = pair.pop() {
                    pair.queue.complete(head, 0);
                }
                let written = (0..advance).any(|entry| old.wrapping_add(entry) == wanted);
                let expected = if event_index { written } else { flags == 0 };
                assert_eq!(
                    pair.queue.publish(),
                    expected,
                    "{wanted} in {old} and {advance} more"
                );
            }
        }
    }
}

/// Each entry of the used ring says which chain and how many bytes, at the place that the index stands for, and the index counts them all,
/// modulo 65536.
///
/// A ring of one, two and four entries, of which one to all are given back at a time and in reverse, until every index has come by more than
/// once. The sum of the advances of one round is odd, so that the rounds begin everywhere.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_7_8_the_used_ring_wraps() {
    for (size, advances) in [(1, &[1][..]), (2, &[1, 2]), (4, &[1, 2, 4, 4])] {
        let mut pair = Pair::new(size, true, false);
        for index in 0..size {
            pair.driver.write_descriptor(index, place(0, 0, 0));
        }
        let (mut start, mut wraps) = (0_u16, 0);
        for advance in advances.iter().cycle() {
            for head in 0..*advance {
                let entry = start.wrapping_add(head);
                pair.driver.set_available_entry(entry, head);
            }
            let end = start.wrapping_add(*advance);
            pair.driver.set_available_index(end);
            while pair.pop().is_some() {}
            let written = |head: u16| u32::from(start) << 16 | u32::from(head);
            for head in (0..*advance).rev() {
                pair.queue.complete(head, written(head));
            }
            assert_eq!(pair.driver.used_index(), start, "nothing is published");
            pair.queue.publish();
            assert_eq!(pair.driver.used_index(), end);
            for (entry, head) in (0..*advance).rev().enumerate() {
                let found = pair.driver.used_entry(start.wrapping_add(entry as u16));
                assert_eq!(found, (u32::from(head), written(head)));
            }
            wraps += u32::from(end < start);
            start = end;
            if wraps > advances.iter().map(|advance| u32::from(*advance)).sum() {
                break;
            }
        }
    }
}

/// Without event indices the device sets its flags to 0 or 1; with them to 0, and its wish is the index of the next chain.
///
/// Every sequence of six of the four things that can happen.
#[test]
#[cfg_attr(miri, ignore = "long there")]
fn spec_2_7_10_2_the_device_asks_for_notifications_in_the_way_negotiated() {
    for event_index in [true, false] {
        for steps in sequences(4, 6) {
            let mut pair = Pair::starting_at(65_533, 8, event_index, false);
            for step in steps {
                match step {
                    0 => pair.queue.disable_notifications(),
                    1 => {
                        let pending = pair.queue.pending();
                        assert_eq!(Ok(pair.queue.enable_notifications()), pending);
                        let wish = (pair.driver.used_flags(), pair.driver.available_event());
                        let expected = (0, pair.queue.ring_base() as u16);
                        assert!(wish == expected || !event_index && wish.0 == 0);
                    }
                    2 => {
                        let notified = pair.add(0);
                        let wants = pair.driver.used_flags() == 0;
                        assert!(event_index || notified == wants);
                    }
                    _ => drop(pair.pop()),
                }
                let flags = pair.driver.used_flags();
                assert!(flags == 0 || flags == 1 && !event_index, "{flags}");
            }
        }
    }
}
