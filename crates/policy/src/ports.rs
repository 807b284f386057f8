//! Which rules are about a port.
//!
//! The first and last ports of all rules' ranges cut the ports into intervals within which nothing changes. Each interval
//! has a row: one bit for every rule that is about its ports, those without ports among them. A row of its own for every
//! interval would cost rules × intervals: 25 MB for 10,000 ranges that overlap. But from one interval to the next, only
//! the rules change whose ranges begin or end there. So a row is made of chunks of 512 rules, and a row whose
//! chunk is as it was in the row before has that very chunk.
//!
//! A row costs four bytes for its first port and four a chunk, and at most one new chunk of 64 bytes for every end of a
//! range. A range has two ends: with `n` rules it costs at most `136 + 8 * ceil(n / 512)` bytes, 392 with 16,384 rules.
//! 10,000 rules of one range each take no more than 3 MB.

use crate::rule::{PortRange, Rule};
use crate::set::{self, Chunk, RuleSet};

/// Ports from the first to the last, the first not behind the last.
pub(super) type Span = (u32, u32);

/// The same ports in fewest spans: in order, with ports between them that are in none. No ranges at all are all ports.
/// (A range whose last port is before its first has none, so that there may be ranges, but no ports.)
pub(super) fn spans(ranges: &[PortRange]) -> Vec<Span> {
    if ranges.is_empty() {
        return vec![(0, u32::MAX)];
    }
    united(
        ranges
            .iter()
            .filter(|range| !range.is_empty())
            .map(|range| (*range.start(), *range.end()))
            .collect(),
    )
}

/// The same ports in fewest spans.
pub(super) fn united(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut united: Vec<Span> = Vec::with_capacity(spans.len());
    for (first, last) in spans {
        match united.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => united.push((first, last)),
        }
    }
    united
}

/// Every rule's ports.
#[derive(Debug, Clone)]
pub(super) struct PortIndex {
    /// The first port of every interval, from 0 on.
    firsts: Vec<u32>,
    /// The chunks of every interval's row, one row after the other.
    rows: Vec<u32>,
    /// How many chunks a row has.
    row_chunks: usize,
    chunks: Vec<Chunk>,
}

impl PortIndex {
    /// The ports of these rules.
    pub(super) fn new(rules: &[Rule]) -> PortIndex {
        let mut current = RuleSet::none(rules.len());
        let mut changes: Vec<Change> = Vec::new();
        for (rule, number) in rules.iter().zip(0_u32..) {
            for (first, last) in spans(&rule.ports) {
                if first == 0 {
                    current.insert(number);
                } else {
                    changes.push((first, number, true));
                }
                if let Some(after) = last.checked_add(1) {
                    changes.push((after, number, false));
                }
            }
        }
        changes.sort_unstable();

        let row_chunks = set::chunks(rules.len());
        let mut index = PortIndex {
            firsts: vec![0],
            rows: (0_u32..).take(row_chunks).collect(),
            row_chunks,
            chunks: current.chunks().to_vec(),
        };
        for changes in changes.chunk_by(|(left, ..), (right, ..)| left == right) {
            index.push_row(changes, &mut current);
        }
        index
    }

    /// The rules that are about a port, from the first rule on.
    pub(super) fn at(&self, port: u32) -> impl Iterator<Item = &Chunk> {
        // Interval 0 begins at port 0, so that there is always one before.
        let interval = self.firsts.partition_point(|first| *first <= port) - 1;
        self.rows[interval * self.row_chunks..][..self.row_chunks]
            .iter()
            .map(|chunk| &self.chunks[*chunk as usize])
    }

    /// How many bytes it takes.
    #[cfg(test)]
    pub(super) fn size(&self) -> usize {
        size_of_val(&*self.firsts) + size_of_val(&*self.rows) + size_of_val(&*self.chunks)
    }

    /// A row after the last, of the rules that are current after these changes.
    fn push_row(&mut self, changes: &[Change], current: &mut RuleSet) {
        let before = self.rows.len() - self.row_chunks;
        self.firsts.push(changes[0].0);
        self.rows.extend_from_within(before..);
        for (_, rule, begins) in changes {
            if *begins {
                current.insert(*rule);
            } else {
                current.remove(*rule);
            }
        }
        // Of one port, changes come in the order of rules, and so of chunks.
        let chunk_of = |change: &Change| change.1 as usize / set::CHUNK_RULES;
        for changes in changes.chunk_by(|left, right| chunk_of(left) == chunk_of(right)) {
            let chunk = chunk_of(&changes[0]);
            self.rows[before + self.row_chunks + chunk] = self.chunks.len() as u32;
            self.chunks.push(current.chunks()[chunk]);
        }
    }
}

/// From this port on, this rule is about ports, or is not any more.
type Change = (u32, u32, bool);

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = u32::MAX;

    fn index(ports: &[&[PortRange]]) -> PortIndex {
        let rule = |ports: &&[PortRange]| Rule {
            ports: ports.to_vec(),
            ..Rule::allow_any()
        };
        PortIndex::new(&ports.iter().map(rule).collect::<Vec<_>>())
    }

    fn rules(index: &PortIndex, port: u32) -> Vec<u32> {
        set::rules(index.at(port).copied())
            .map(|rule| rule.0)
            .collect()
    }

    #[test]
    fn ranges_become_fewest_spans() {
        assert_eq!(spans(&[]), [(0, END)]);
        assert_eq!(spans(&[5..=5]), [(5, 5)]);
        assert_eq!(spans(&[7..=9, 1..=3]), [(1, 3), (7, 9)]);
        assert_eq!(spans(&[4..=6, 1..=3]), [(1, 6)], "neighbours");
        assert_eq!(spans(&[5..=6, 1..=3]), [(1, 3), (5, 6)], "a gap of one");
        assert_eq!(spans(&[1..=9, 2..=3]), [(1, 9)], "one in the other");
        assert_eq!(spans(&[0..=END, END..=END]), [(0, END)]);
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = 9..=1;
        assert_eq!(spans(&[reversed]), [], "no ports, which is not all ports");
    }

    #[test]
    fn ranges_begin_and_end_where_they_say() {
        let index = index(&[&[10..=19], &[], &[20..=20, 22..=30], &[0..=0], &[END..=END]]);
        for (port, expected) in [
            (0, &[1, 3][..]),
            (1, &[1]),
            (9, &[1]),
            (10, &[0, 1]),
            (19, &[0, 1]),
            (20, &[1, 2]),
            (21, &[1]),
            (22, &[1, 2]),
            (30, &[1, 2]),
            (31, &[1]),
            (END - 1, &[1]),
            (END, &[1, 4]),
        ] {
            assert_eq!(rules(&index, port), expected, "port {port}");
        }
    }

    #[test]
    fn rows_share_what_does_not_change_and_only_that() {
        // Rule `i` is about ports `i` to `2000 - i`: at port `p`, rules 0 to `p` are current, or to `2000 - p`.
        let ports: Vec<[PortRange; 1]> = (0..1000).map(|rule| [rule..=2000 - rule]).collect();
        let index = index(&ports.iter().map(|ports| &ports[..]).collect::<Vec<_>>());
        for port in 0..2010 {
            let count = (port + 1).min(2001_u32.saturating_sub(port)).min(1000);
            assert_eq!(
                rules(&index, port),
                (0..count).collect::<Vec<_>>(),
                "port {port}"
            );
        }
    }

    #[test]
    fn no_rules_have_no_ports() {
        assert_eq!(rules(&index(&[]), 0), []);
        assert_eq!(rules(&index(&[]), END), []);
    }

    #[test]
    fn ten_thousand_ranges_that_overlap_take_three_megabytes_at_most() {
        let ports: Vec<[PortRange; 1]> =
            (0..10_000).map(|rule| [rule + 1..=30_000 - rule]).collect();
        let index = index(&ports.iter().map(|ports| &ports[..]).collect::<Vec<_>>());
        let bound = 10_000 * (136 + 8 * 10_000_usize.div_ceil(512)) + 10_000;
        assert!(index.size() <= bound, "{} > {bound}", index.size());
        assert!(bound < 3_000_000);
    }
}
