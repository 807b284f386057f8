//! Rules that can never match, because earlier rules match whatever they could.
//!
//! A rule matches a caller, a callee and a port that it is about. So an earlier rule covers it if it is about all its
//! callers, all its callees and all its ports, each for itself. Which rules are about all that a pattern is about, the
//! index of the patterns says; which VMs exist, and which groups they are in, does not matter, so that the answer holds for
//! VMs that are yet to come.

use crate::compiled::Policy;
use crate::ports::{self, Span};
use crate::rule::{Rule, RuleId};
use crate::set::RuleSet;

/// As many earlier rules that are about all callers and all callees of a rule, but only some of its ports, are checked for
/// whether they cover it together.
const MAX_TOGETHER: usize = 1024;

/// A rule that can never match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreachable {
    /// The rule.
    pub rule: RuleId,
    /// The first earlier rule that covers it: matches whatever it could match.
    pub covered_by: RuleId,
    /// Earlier rules that cover it only together with that one, each some of its ports. Mostly there are none.
    pub together_with: Vec<RuleId>,
}

impl Policy {
    /// The rules that can never match, in order, because earlier rules cover them. Every rule that is named can indeed never
    /// match. Of those that cannot, every one is named that
    ///
    /// - one earlier rule covers (a rule about a service or DNS name is covered by patterns of names one by one: no one
    ///   counts whether all names are covered by patterns that each leave some out), or
    /// - the first 1,024 earlier rules about all its callers and callees cover together, each some of its ports.
    ///
    /// A rule without callers, callees or ports is not covered by others, and not named.
    ///
    /// For `n` rules this takes `n * n / 2` steps at worst, when all are about the same callers and callees: under a second for
    /// 10,000, in memory of a few bits a rule. It is meant for people, not for every start.
    pub fn unreachable(&self) -> Vec<Unreachable> {
        let spans: Vec<Vec<Span>> = self
            .rules()
            .iter()
            .map(|rule| ports::spans(&rule.ports))
            .collect();
        self.rules()
            .iter()
            .zip(0_u32..)
            .filter_map(|(rule, number)| self.covered(rule, number, &spans))
            .collect()
    }

    fn covered(&self, rule: &Rule, number: u32, spans: &[Vec<Span>]) -> Option<Unreachable> {
        let ours = spans.get(number as usize)?;
        if rule.from.is_empty() || rule.to.is_empty() || ours.is_empty() {
            return None;
        }
        let around = self.around(rule)?;
        let earlier = || {
            around
                .iter()
                .take_while(|earlier| earlier.0 < number)
                .filter_map(|earlier| Some((earlier, spans.get(earlier.0 as usize)?)))
        };
        let alone = earlier().find(|(_, theirs)| covers(theirs, ours));
        let mut covered_by = match alone {
            Some((alone, _)) => vec![alone],
            None => together(ours, earlier().take(MAX_TOGETHER))?,
        }
        .into_iter();
        Some(Unreachable {
            rule: RuleId(number),
            covered_by: covered_by.next()?,
            together_with: covered_by.collect(),
        })
    }

    /// The rules that are about all callers and all callees of a rule, itself among them. The rule has some of both.
    fn around(&self, rule: &Rule) -> Option<RuleSet> {
        let callers = rule.from.iter().map(|pattern| {
            let mut set = RuleSet::none(self.rules().len());
            self.callers.join_around(pattern, &mut set);
            set
        });
        let callees = rule.to.iter().map(|pattern| {
            let mut set = RuleSet::none(self.rules().len());
            self.callees.join_around(pattern, &mut set);
            set
        });
        callers.chain(callees).reduce(|mut all, set| {
            all.meet(&set);
            all
        })
    }
}

/// Whether all these ports are among those of a rule.
fn covers(rule: &[Span], ports: &[Span]) -> bool {
    ports.iter().all(|(first, last)| {
        // Spans are apart: no two of them together have what none of them has alone.
        let after = rule.partition_point(|(begin, _)| begin <= first);
        after > 0 && rule[after - 1].1 >= *last
    })
}

/// Fewest of the earlier rules that have all these ports together, in order. There are none if all of them have not.
fn together<'a>(
    ports: &[Span],
    earlier: impl Iterator<Item = (RuleId, &'a Vec<Span>)>,
) -> Option<Vec<RuleId>> {
    let mut spans: Vec<(u32, u32, RuleId)> = earlier
        .flat_map(|(rule, spans)| spans.iter().map(move |(first, last)| (*first, *last, rule)))
        .collect();
    spans.sort_unstable();
    let mut spans = spans.into_iter().peekable();
    let mut rules = Vec::new();
    // Of the spans that begin in time, the one that goes furthest.
    let mut furthest: Option<(u32, RuleId)> = None;
    for (first, last) in ports {
        let mut next = *first;
        loop {
            while let Some((_, end, rule)) = spans.next_if(|(begin, ..)| *begin <= next) {
                if furthest.is_none_or(|(furthest, _)| furthest < end) {
                    furthest = Some((end, rule));
                }
            }
            let (end, rule) = furthest.filter(|(end, _)| *end >= next)?;
            rules.push(rule);
            if end >= *last {
                break;
            }
            next = end + 1;
        }
    }
    rules.sort_unstable();
    rules.dedup();
    Some(rules)
}

#[cfg(test)]
mod tests;
