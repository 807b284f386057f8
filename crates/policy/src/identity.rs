//! Which rule of one policy is which of another.

use std::collections::HashMap;

use crate::{CalleePattern, CallerPattern, Policy, PortRange, Rule, RuleId, RuleLimits, Verdict};

/// What makes a rule the same one in another policy: its name, or without one everything that it says, wherever it stands.
#[derive(PartialEq, Eq, Hash)]
enum Identity<'a> {
    Name(&'a str),
    Content {
        from: &'a [CallerPattern],
        to: &'a [CalleePattern],
        ports: &'a [PortRange],
        verdict: &'a Verdict,
        limits: RuleLimits,
    },
}

impl Identity<'_> {
    fn of(rule: &Rule) -> Identity<'_> {
        match rule.is_named {
            true => Identity::Name(&rule.label),
            false => Identity::Content {
                from: &rule.from,
                to: &rule.to,
                ports: &rule.ports,
                verdict: &rule.verdict,
                limits: rule.limits,
            },
        }
    }
}

impl Policy {
    /// Where each rule goes on in the policy that replaces this one: what has been counted of it and is left of its limits belongs to that rule. Of
    /// several that are the same it is the first.
    pub fn places_in(&self, next: &Policy) -> Vec<Option<RuleId>> {
        let mut places = HashMap::new();
        for (index, rule) in next.rules().iter().enumerate() {
            places
                .entry(Identity::of(rule))
                .or_insert(RuleId(index as u32));
        }
        let place = |rule| places.get(&Identity::of(rule)).copied();
        self.rules().iter().map(place).collect()
    }
}
