//! Rules made ready for decisions.

use std::fmt;

use crate::index::{CalleeIndex, CallerIndex};
use crate::ports::PortIndex;
use crate::rule::{Callee, Caller, Rule, RuleId, Verdict};
use crate::set::{self, Chunk, RuleSet};

/// What a policy says to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<'a> {
    /// The first rule that matches, and what it says. There may be none: then what holds without a rule holds.
    pub rule: Option<(RuleId, &'a Verdict)>,
}

/// Rules in order. Where none matches, calls between VMs and to services and addresses are refused, and calls to sockets that
/// a program of the host has made for the caller, and of programs of the host to guests, are put through.
///
/// The policy itself takes any number of rules. The parser of the configuration limits them: time and memory below
/// are stated for 16,384, which is as many as the daemon takes.
///
/// *Time*, for `n` rules: [`Policy::decide`] is a binary search for the port and at most `n / 64` steps over three words,
/// whatever the rules are; [`Policy::callers`] and [`Policy::callees`] are a look-up for each name, number or network that the
/// one asked about has (a user and each group; the beginnings and ends of a name; the networks around an address), and at
/// most `n / 64` steps for each that is found.
///
/// *Memory*, beside the rules as they were written: at most 32 bytes for each of a rule's patterns and the text of each
/// different one, and at most 392 bytes for each range of ports. A rule with one of each costs less than 1 KiB, so that
/// 16,384 of them stay under 16 MiB.
#[derive(Clone)]
pub struct Policy {
    rules: Vec<Rule>,
    pub(super) callers: CallerIndex,
    pub(super) callees: CalleeIndex,
    ports: PortIndex,
}

impl Policy {
    /// A policy of these rules.
    pub fn new(rules: Vec<Rule>) -> Policy {
        Policy {
            callers: CallerIndex::new(&rules),
            callees: CalleeIndex::new(&rules),
            ports: PortIndex::new(&rules),
            rules,
        }
    }

    /// Its rules, in order.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The rule at a position.
    pub fn rule(&self, id: RuleId) -> Option<&Rule> {
        self.rules.get(id.0 as usize)
    }

    /// The rules that can match when this caller calls.
    pub fn callers(&self, caller: &Caller<'_>) -> RuleSet {
        let mut rules = RuleSet::none(self.rules.len());
        self.callers.join_about(caller, &mut rules);
        rules
    }

    /// The rules that can match when this callee is called.
    pub fn callees(&self, callee: &Callee<'_>) -> RuleSet {
        let mut rules = RuleSet::none(self.rules.len());
        self.callees.join_about(callee, &mut rules);
        rules
    }

    /// What becomes of a call from one of these callers to one of these callees. Both sets are this policy's: those of another
    /// give an answer about other rules, if any.
    pub fn decide(&self, from: &RuleSet, to: &RuleSet, port: u32) -> Decision<'_> {
        let first = meet(from, to, self.ports.at(port))
            .enumerate()
            .find_map(|(index, common)| Some(index * set::CHUNK_RULES + set::first(&common)?));
        let rule = first.and_then(|first| Some((first, self.rules.get(first)?)));
        Decision {
            rule: rule.map(|(index, rule)| (RuleId(index as u32), &rule.verdict)),
        }
    }

    /// The rules, in order, that match when one of these callers calls one of these callees at this port. The first is the one that
    /// [`Policy::decide`] finds.
    pub fn matching<'a>(
        &'a self,
        from: &'a RuleSet,
        to: &'a RuleSet,
        port: u32,
    ) -> impl Iterator<Item = (RuleId, &'a Rule)> + 'a {
        set::rules(meet(from, to, self.ports.at(port)))
            .map_while(|rule| Some((rule, self.rule(rule)?)))
    }

    /// The rules, in order, that match when one of these callers calls one of these callees at some port. It takes
    /// [`Policy::decide`] to know at which.
    pub fn between<'a>(
        &'a self,
        from: &'a RuleSet,
        to: &'a RuleSet,
    ) -> impl Iterator<Item = RuleId> + 'a {
        let both = from.chunks().iter().zip(to.chunks());
        set::rules(both.map(|(from, to)| set::common(from, to)))
            .take_while(|rule| self.rule(*rule).is_some())
    }
}

impl Default for Policy {
    /// A policy without rules.
    fn default() -> Policy {
        Policy::new(Vec::new())
    }
}

impl fmt::Debug for Policy {
    /// The rules. What is made of them is much more, and says the same.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Policy")
            .field("rules", &self.rules)
            .finish_non_exhaustive()
    }
}

/// What three sets have in common, as far as all of them go.
fn meet<'a>(
    from: &'a RuleSet,
    to: &'a RuleSet,
    ports: impl Iterator<Item = &'a Chunk>,
) -> impl Iterator<Item = Chunk> {
    let both = from.chunks().iter().zip(to.chunks());
    both.zip(ports)
        .map(|((from, to), ports)| set::common(&set::common(from, to), ports))
}
