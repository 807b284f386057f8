//! Figures of rules, and of how long calls took to be put through.
//!
//! Nothing is counted for a packet: what a circuit has carried is known to the circuit, and is added to its rule's figures when it is over, when
//! another policy comes, or when circuits are surveyed.

use std::collections::BTreeMap;
use std::time::Duration;

use policy::RuleId;

use crate::Reason;

/// What has been counted of the calls about which a rule has decided. All only grow. When the policy is set again, they go on with the rule of the same
/// name, whatever it says now; rules that share a name are counted together from then on, by the first of them. A rule without a name goes on
/// where one that says exactly the same stands in the new policy, wherever that is, and begins at zero otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleCounters {
    /// Circuits set up, answered or not.
    pub opened: u64,
    /// Bytes that have arrived, by the side that sent them: the caller's, then the callee's.
    pub bytes: [u64; 2],
    /// Calls that became no circuit, by the reason.
    pub refused: BTreeMap<Reason, u64>,
    /// Circuits that were cut short, by the reason.
    pub cut_short: BTreeMap<Reason, u64>,
}

impl RuleCounters {
    /// Adds another's.
    pub fn add(&mut self, other: &RuleCounters) {
        self.opened += other.opened;
        for (bytes, more) in self.bytes.iter_mut().zip(other.bytes) {
            *bytes += more;
        }
        for (sums, counts) in [
            (&mut self.refused, &other.refused),
            (&mut self.cut_short, &other.cut_short),
        ] {
            for (reason, count) in counts {
                *sums.entry(*reason).or_default() += count;
            }
        }
    }
}

/// The figures of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleReport {
    /// What a person finds the rule by; none for what holds without a rule.
    pub label: Option<String>,
    /// Circuits that it has allowed, in any state.
    pub circuits: u32,
    /// What has been counted.
    pub counters: RuleCounters,
}

/// How long calls took from their coming to their answer, as a histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetUpTimes {
    /// Calls in each class: as long as its bound or shorter, and longer than the bound before. The last has no bound.
    pub counts: [u64; SetUpTimes::BOUNDS.len() + 1],
    /// All times together.
    pub sum: Duration,
}

impl SetUpTimes {
    /// The bounds of the classes: from what a call on an idle machine takes to what makes a person wait.
    pub const BOUNDS: [Duration; 12] = [
        Duration::from_micros(50),
        Duration::from_micros(100),
        Duration::from_micros(250),
        Duration::from_micros(500),
        Duration::from_millis(1),
        Duration::from_micros(2500),
        Duration::from_millis(5),
        Duration::from_millis(10),
        Duration::from_millis(50),
        Duration::from_millis(250),
        Duration::from_secs(1),
        Duration::from_secs(5),
    ];

    /// Counts a call.
    pub(crate) fn count(&mut self, time: Duration) {
        let class = Self::BOUNDS.iter().position(|bound| time <= *bound);
        self.counts[class.unwrap_or(Self::BOUNDS.len())] += 1;
        self.sum += time;
    }

    /// Adds another's.
    pub fn add(&mut self, other: &SetUpTimes) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self.sum += other.sum;
    }
}

/// The figures of all rules.
#[derive(Debug, Default)]
pub(crate) struct RuleFigures {
    /// By the number of the rule.
    pub(crate) rules: Vec<RuleCounters>,
    pub(crate) without_rule: RuleCounters,
}

impl RuleFigures {
    /// Those of a rule, or of what holds without one.
    pub(crate) fn of(&mut self, rule: Option<RuleId>) -> &mut RuleCounters {
        match rule {
            Some(rule) => match self.rules.get_mut(rule.0 as usize) {
                Some(counters) => counters,
                None => &mut self.without_rule,
            },
            None => &mut self.without_rule,
        }
    }

    /// Another policy comes, of so many rules: those that have a place in it hand their figures over.
    pub(crate) fn hand_over(&mut self, places: &[Option<RuleId>], rules: usize) {
        let known = std::mem::take(&mut self.rules);
        self.rules.resize_with(rules, RuleCounters::default);
        for (place, counters) in places.iter().zip(known) {
            if let Some(place) = place {
                self.rules[place.0 as usize].add(&counters);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bound_belongs_to_its_class() {
        for (class, bound) in SetUpTimes::BOUNDS.into_iter().enumerate() {
            let mut times = SetUpTimes::default();
            times.count(bound);
            assert_eq!(times.counts[class], 1, "{bound:?}");
            times.count(bound + Duration::from_nanos(1));
            assert_eq!(times.counts[class + 1], 1, "{bound:?}");
            let mut both = times;
            both.add(&times);
            assert_eq!(both.counts.iter().sum::<u64>(), 4);
            assert_eq!(both.sum, times.sum * 2);
        }
        assert!(SetUpTimes::BOUNDS.is_sorted());
    }
}
