//! Rules made ready for decisions.

use super::rule::{Callee, Caller, Rule, RuleId, Verdict};

/// Some of a policy's rules: one bit each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleSet {
    words: Box<[u64]>,
}

/// What a policy says to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<'a> {
    /// The first rule that matches, and what it says. There may be none: then what holds without a rule holds.
    pub rule: Option<(RuleId, &'a Verdict)>,
}

/// Rules in order. Where none matches, calls between VMs and to services and addresses are refused, and calls to sockets that
/// a program of the host has made for the caller, and of programs of the host to guests, are put through.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    rules: Vec<Rule>,
}

impl Policy {
    /// A policy of these rules.
    pub fn new(rules: Vec<Rule>) -> Policy {
        Policy { rules }
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
        self.collect(|rule| rule.from.iter().any(|pattern| pattern.covers(caller)))
    }

    /// The rules that can match when this callee is called.
    pub fn callees(&self, callee: &Callee<'_>) -> RuleSet {
        self.collect(|rule| rule.to.iter().any(|pattern| pattern.covers(callee)))
    }

    /// What becomes of a call from one of these callers to one of these callees. Both sets are this policy's.
    pub fn decide(&self, from: &RuleSet, to: &RuleSet, port: u32) -> Decision<'_> {
        let both = from
            .words
            .iter()
            .zip(to.words.iter())
            .map(|(from, to)| from & to);
        for (word, mut bits) in both.enumerate() {
            while bits != 0 {
                let index = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let Some(rule) = self.rules.get(index) else {
                    break;
                };
                if rule.ports.is_empty() || rule.ports.iter().any(|range| range.contains(&port)) {
                    return Decision {
                        rule: Some((RuleId(index as u32), &rule.verdict)),
                    };
                }
            }
        }
        Decision { rule: None }
    }

    /// Whether some rule that does not deny could match a call from one of these callers to one of these callees, at some port.
    pub fn may_pass(&self, from: &RuleSet, to: &RuleSet) -> bool {
        let both = from
            .words
            .iter()
            .zip(to.words.iter())
            .map(|(from, to)| from & to);
        let mut rules = self.rules.chunks(64).zip(both);
        rules.any(|(rules, bits)| {
            let mut rules = rules.iter().enumerate();
            rules.any(|(bit, rule)| bits >> bit & 1 == 1 && rule.verdict != Verdict::Deny)
        })
    }

    fn collect(&self, covers: impl Fn(&Rule) -> bool) -> RuleSet {
        let mut words = vec![0_u64; self.rules.len().div_ceil(64)];
        for (index, _) in self
            .rules
            .iter()
            .enumerate()
            .filter(|(_, rule)| covers(rule))
        {
            words[index / 64] |= 1 << (index % 64);
        }
        RuleSet {
            words: words.into(),
        }
    }
}
