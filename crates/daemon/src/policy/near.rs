//! Rules that nearly decided otherwise about a call: what a person looks for who expected another answer.

use api::{PassedOver, PolicyAnswer, PolicyVerdict};
use policy::{
    Callee, CalleePattern, Caller, CallerPattern, Decision, NamePattern, Rule, Verdict, VmPattern,
};

use super::Rulebook;
use super::listing::info;
use hostside::proxy::egress::is_network;

/// The most rules that an answer names.
const MAX_PASSED_OVER: usize = 4;

impl Rulebook {
    /// Rules before the one that decided that say otherwise and match in all but one regard: those first that differ in the port, then in the
    /// caller, then in the callee. A call that is allowed is compared with rules that name its caller or callee.
    pub(super) fn passed_over(
        &self,
        answer: &PolicyAnswer,
        decision: &Decision<'_>,
        from: &Caller<'_>,
        to: &Callee<'_>,
    ) -> Vec<PassedOver> {
        let end = decision.rule.map(|(id, _)| id.0 as usize);
        let rules = self.policy.rules();
        let mut passed_over = Vec::new();
        for (index, rule) in rules.iter().take(end.unwrap_or(rules.len())).enumerate() {
            let verdict = PolicyVerdict::from(&rule.verdict);
            let Some(differs_in) = differs_in(rule, from, to, answer.port) else {
                continue;
            };
            let helps = match answer.verdict {
                PolicyVerdict::Denied => {
                    verdict != PolicyVerdict::Denied && self.would_open(rule, to, differs_in)
                }
                _ => verdict != answer.verdict && names_an_end(rule, from, to),
            };
            if helps {
                passed_over.push((index as u32, verdict, differs_in));
            }
        }
        passed_over.sort_by_key(|(.., differs_in)| {
            ["port", "from", "to"]
                .iter()
                .position(|key| key == differs_in)
        });
        passed_over.truncate(MAX_PASSED_OVER);
        let passed_over = passed_over.into_iter();
        let in_words = passed_over.filter_map(|(index, verdict, differs_in)| {
            let words = info(index, self.rules.get(index as usize)?);
            let has = match differs_in {
                "port" => words.ports,
                "from" => words.from,
                _ => words.to,
            };
            Some(PassedOver {
                rule: self.rule(index),
                verdict,
                differs_in: differs_in.to_owned(),
                has,
            })
        });
        in_words.collect()
    }

    /// Whether a rule that matched in this regard, too, would open the callee. Egress redirects nothing, and special addresses have to be named; one that would be
    /// added to a rule's "to" is.
    fn would_open(&self, rule: &Rule, to: &Callee<'_>, differs_in: &str) -> bool {
        let Callee::Address { address, name } = *to else {
            return true;
        };
        let is_allow = matches!(rule.verdict, Verdict::Allow);
        is_allow && (differs_in == "to" || self.opens(rule, address, name))
    }
}

/// The one key in which a rule does not match, if it is one, and if the rule could be about such a caller and such a callee.
fn differs_in(rule: &Rule, from: &Caller<'_>, to: &Callee<'_>, port: u32) -> Option<&'static str> {
    let has_port = rule.ports.is_empty() || rule.ports.iter().any(|range| range.contains(&port));
    let fits = [
        (rule.from.iter().any(|pattern| pattern.covers(from)), "from"),
        (rule.to.iter().any(|pattern| pattern.covers(to)), "to"),
        (has_port, "port"),
    ];
    let mut misses = fits.iter().filter(|(fits, _)| !fits);
    let (Some((_, key)), None) = (misses.next(), misses.next()) else {
        return None;
    };
    let is_kin = match *key {
        "from" => rule
            .from
            .iter()
            .any(|pattern| is_caller_like(pattern, from)),
        "to" => rule.to.iter().any(|pattern| is_callee_like(pattern, to)),
        _ => true,
    };
    is_kin.then_some(*key)
}

fn is_caller_like(pattern: &CallerPattern, from: &Caller<'_>) -> bool {
    let is_program = matches!(
        pattern,
        CallerPattern::Host | CallerPattern::User(_) | CallerPattern::UserGroup(_)
    );
    is_program != matches!(from, Caller::Vm { .. })
}

fn is_callee_like(pattern: &CalleePattern, to: &Callee<'_>) -> bool {
    match pattern {
        CalleePattern::Vms(_) => matches!(to, Callee::Vm { .. }),
        CalleePattern::Service { .. } => matches!(to, Callee::Service { .. }),
        CalleePattern::Listeners => *to == Callee::Listener,
        CalleePattern::Network(_) | CalleePattern::Name(_) => matches!(to, Callee::Address { .. }),
    }
}

/// Whether a rule names the caller or the callee, rather than all of their kind.
fn names_an_end(rule: &Rule, from: &Caller<'_>, to: &Callee<'_>) -> bool {
    let names_caller = |pattern: &CallerPattern| {
        let is_all = matches!(
            pattern,
            CallerPattern::Vms(VmPattern::Any { .. }) | CallerPattern::Host
        );
        !is_all && pattern.covers(from)
    };
    let names_callee = |pattern: &CalleePattern| {
        let is_all = match pattern {
            CalleePattern::Vms(VmPattern::Any { .. }) | CalleePattern::Listeners => true,
            CalleePattern::Service { name, .. } | CalleePattern::Name(name) => {
                *name == NamePattern::Any
            }
            CalleePattern::Network(network) => !is_network(network.prefix_len()),
            CalleePattern::Vms(_) => false,
        };
        !is_all && pattern.covers(to)
    };
    rule.from.iter().any(names_caller) || rule.to.iter().any(names_callee)
}
