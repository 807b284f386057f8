//! Why a call is decided as it is.

use crate::compiled::Policy;
use crate::rule::{Callee, CalleePattern, Caller, CallerPattern, PortRange, Rule, RuleId, Verdict};

/// As many rules that nearly match are named.
pub const MAX_NEAR: usize = 5;

/// Why a call is decided as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation<'a> {
    /// The rule that decides, if any does.
    pub decided_by: Option<RuleMatch<'a>>,
    /// The first [`MAX_NEAR`] of the rules before it (or, if none decides, of all) that are about the caller and the callee, but not
    /// the port.
    pub near: Vec<RuleId>,
    /// How many such rules there are in all.
    pub near_count: usize,
}

/// What in a rule matches a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleMatch<'a> {
    /// The rule.
    pub rule: RuleId,
    /// What it says.
    pub verdict: &'a Verdict,
    /// The first of its patterns that is about the caller.
    pub from: &'a CallerPattern,
    /// The first of its patterns that is about the callee.
    pub to: &'a CalleePattern,
    /// The first of its ranges that the port is in; none if the rule is about all ports.
    pub ports: Option<&'a PortRange>,
}

impl Policy {
    /// Why a call is decided as it is. It says what [`Policy::decide`] decides, and takes longer: it is meant for people.
    pub fn explain(&self, caller: &Caller<'_>, callee: &Callee<'_>, port: u32) -> Explanation<'_> {
        let from = self.callers(caller);
        let to = self.callees(callee);
        let decided = self.decide(&from, &to, port).rule;
        let decider = decided.map(|(rule, _)| rule);
        let mut near = self
            .between(&from, &to)
            .take_while(|rule| Some(*rule) != decider);
        let first: Vec<RuleId> = near.by_ref().take(MAX_NEAR).collect();
        Explanation {
            decided_by: decider
                .and_then(|rule| RuleMatch::find(rule, self.rule(rule)?, caller, callee, port)),
            near_count: first.len() + near.count(),
            near: first,
        }
    }
}

impl<'a> RuleMatch<'a> {
    /// What in a rule matches a call, if it does.
    fn find(
        id: RuleId,
        rule: &'a Rule,
        caller: &Caller<'_>,
        callee: &Callee<'_>,
        port: u32,
    ) -> Option<RuleMatch<'a>> {
        let ports = rule.ports.iter().find(|range| range.contains(&port));
        if ports.is_none() && !rule.ports.is_empty() {
            return None;
        }
        Some(RuleMatch {
            rule: id,
            verdict: &rule.verdict,
            from: rule.from.iter().find(|pattern| pattern.covers(caller))?,
            to: rule.to.iter().find(|pattern| pattern.covers(callee))?,
            ports,
        })
    }
}
