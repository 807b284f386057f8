//! In which order rows stand.

use std::cmp::Ordering;

use clap::ValueEnum;

use super::app::{CircuitRow, VmRow};

/// By what rows are sorted: the largest first, names from a to z.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Bytes a second, both ways together
    Rate,
    /// Bytes a second that the guest, or the caller, sends
    Sent,
    /// Bytes a second that the guest, or the caller, receives
    Received,
    /// Bytes that wait for their receiver
    Queued,
    /// Bytes since the VM or the circuit came, both ways together
    Bytes,
    /// Circuits that a VM has
    Circuits,
    /// How long a circuit has been there
    Age,
    /// The VM's name, or the caller's
    Name,
    /// Who is called
    To,
    /// The rule that allows a circuit
    Rule,
    /// How far a VM or a circuit has come
    State,
}

impl Sort {
    /// What VMs can be sorted by, in the order in which the key goes through them.
    pub(super) const OF_VMS: &[Sort] = &[
        Sort::Rate,
        Sort::Sent,
        Sort::Received,
        Sort::Queued,
        Sort::Bytes,
        Sort::Circuits,
        Sort::Name,
        Sort::State,
    ];

    /// The same of circuits.
    pub(super) const OF_CIRCUITS: &[Sort] = &[
        Sort::Rate,
        Sort::Sent,
        Sort::Received,
        Sort::Queued,
        Sort::Bytes,
        Sort::Age,
        Sort::Name,
        Sort::To,
        Sort::Rule,
        Sort::State,
    ];

    /// In a word or two.
    pub(super) fn word(self) -> &'static str {
        match self {
            Sort::Rate => "rate",
            Sort::Sent => "sent",
            Sort::Received => "received",
            Sort::Queued => "queued",
            Sort::Bytes => "bytes",
            Sort::Circuits => "circuits",
            Sort::Age => "age",
            Sort::Name => "name",
            Sort::To => "to",
            Sort::Rule => "rule",
            Sort::State => "state",
        }
    }

    fn is_of_names(self) -> bool {
        matches!(self, Sort::Name | Sort::To | Sort::Rule | Sort::State)
    }
}

/// An order, and whether it is turned round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) sort: Sort,
    pub(super) is_reversed: bool,
}

impl Order {
    /// This order if rows of the sort can stand in it, else by rate.
    pub(super) fn among(sort: Sort, all: &[Sort]) -> Order {
        Order {
            sort: if all.contains(&sort) {
                sort
            } else {
                Sort::Rate
            },
            is_reversed: false,
        }
    }

    /// The next of these, or the one before.
    pub(super) fn step(&mut self, all: &[Sort], back: bool) {
        let position = all.iter().position(|sort| *sort == self.sort).unwrap_or(0);
        let step = if back { all.len() - 1 } else { 1 };
        *self = Order::among(all[(position + step) % all.len()], all);
    }

    /// An arrow that points down where the largest is on top.
    pub(super) fn arrow(self) -> char {
        match self.sort.is_of_names() == self.is_reversed {
            true => '▼',
            false => '▲',
        }
    }

    pub(super) fn of_vms(self, one: &VmRow<'_>, other: &VmRow<'_>) -> Ordering {
        let largest_first = |value: fn(&VmRow<'_>) -> f64| value(other).total_cmp(&value(one));
        let ordering = match self.sort {
            Sort::Sent => largest_first(|row| row.rate_of(0)),
            Sort::Received => largest_first(|row| row.rate_of(1)),
            Sort::Queued => other.of.queued.cmp(&one.of.queued),
            Sort::Bytes => sum(other.of.bytes).cmp(&sum(one.of.bytes)),
            Sort::Circuits => other.of.circuits.cmp(&one.of.circuits),
            Sort::State => one.of.state.word().cmp(other.of.state.word()),
            Sort::Name => Ordering::Equal,
            Sort::Rate | Sort::Age | Sort::To | Sort::Rule => largest_first(|row| row.both()),
        };
        self.turned(ordering.then_with(|| one.of.name.cmp(&other.of.name)))
    }

    pub(super) fn of_circuits(self, one: &CircuitRow<'_>, other: &CircuitRow<'_>) -> Ordering {
        let largest_first = |value: fn(&CircuitRow<'_>) -> f64| value(other).total_cmp(&value(one));
        let (a, b) = (one.of, other.of);
        let ordering = match self.sort {
            Sort::Sent => largest_first(|row| row.rate_of(0)),
            Sort::Received => largest_first(|row| row.rate_of(1)),
            Sort::Queued => sum(b.queued).cmp(&sum(a.queued)),
            Sort::Bytes => sum(b.bytes).cmp(&sum(a.bytes)),
            Sort::Age => b.age.cmp(&a.age),
            Sort::Name => a.from.long.cmp(&b.from.long),
            Sort::To => a.to.long.cmp(&b.to.long),
            Sort::Rule => a.rule.cmp(&b.rule),
            Sort::State => a.state.cmp(&b.state),
            Sort::Rate | Sort::Circuits => largest_first(|row| row.both()),
        };
        // Numbers of circuits are of two parts, of which the shorter is the smaller.
        let by_id = || (a.id.len(), &a.id).cmp(&(b.id.len(), &b.id));
        self.turned(ordering.then_with(by_id))
    }

    fn turned(self, ordering: Ordering) -> Ordering {
        match self.is_reversed {
            true => ordering.reverse(),
            false => ordering,
        }
    }
}

fn sum([one, other]: [u64; 2]) -> u64 {
    one.saturating_add(other)
}
