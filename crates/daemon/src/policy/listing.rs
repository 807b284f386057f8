//! The rules in the words in which they are written.

use api::{MAX_LISTED_RULES, PolicyRules, PolicyVerdict, RuleInfo};
use config::{Written, parse_callee, parse_caller};
use policy::{
    CalleePattern, CallerPattern, IpNet, NamePattern, PortRange, RuleLimits, Verdict, VmPattern,
    full_name,
};

use super::Rulebook;
use super::answer::redirect_words;

impl Rulebook {
    /// The rules in force, in the order in which they are asked: the first [`MAX_LISTED_RULES`].
    pub fn listing(&self) -> PolicyRules {
        let listed = self.rules.iter().take(MAX_LISTED_RULES).enumerate();
        PolicyRules {
            rules: listed
                .map(|(index, rule)| info(index as u32, rule))
                .collect(),
            more: self.rules.len().saturating_sub(MAX_LISTED_RULES),
        }
    }
}

pub(super) fn info(index: u32, written: &Written<policy::Rule>) -> RuleInfo {
    let rule = &written.value;
    let redirect = match &rule.verdict {
        Verdict::Redirect(to) => Some(redirect_words(to)),
        Verdict::Allow | Verdict::Deny => None,
    };
    let RuleLimits {
        circuits,
        connects_per_second,
        bytes_per_second,
    } = rule.limits;
    let limits = [
        ("circuits", circuits.map(u64::from)),
        ("connects_per_second", connects_per_second.map(u64::from)),
        ("bytes_per_second", bytes_per_second),
    ];
    RuleInfo {
        index,
        label: rule.label.clone(),
        place: written.place.clone(),
        from: words(&rule.from, parse_caller, caller_words),
        to: words(&rule.to, parse_callee, callee_words),
        ports: match rule.ports.as_slice() {
            [] => vec!["*".to_owned()],
            ports => ports.iter().map(port_words).collect(),
        },
        verdict: PolicyVerdict::from(&rule.verdict),
        redirect,
        limits: limits
            .into_iter()
            .filter_map(|(name, limit)| Some((name.to_owned(), limit?)))
            .collect(),
    }
}

/// Each pattern in words. What `any` stands for in some domain is `any` again, with the domain that it is about.
fn words<T: PartialEq, E>(
    patterns: &[T],
    parse: impl Fn(&str, &str) -> Result<Vec<T>, E>,
    one: impl Fn(&T) -> (String, Option<&str>),
) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = patterns;
    while let Some(first) = rest.first() {
        let (word, domain_of_all) = one(first);
        let everybody = domain_of_all.and_then(|domain| {
            let all = parse("any", domain).ok()?;
            rest.starts_with(&all)
                .then(|| (full_name(domain, "any"), all.len()))
        });
        let (word, len) = everybody.unwrap_or((word, 1));
        words.push(word);
        rest = &rest[len..];
    }
    words
}

/// A caller in words, and the domain if it is every VM of one.
fn caller_words(pattern: &CallerPattern) -> (String, Option<&str>) {
    let word = match pattern {
        CallerPattern::Vms(vms) => return vms_words(vms),
        CallerPattern::Host => "host".to_owned(),
        CallerPattern::User(uid) => format!("user:{uid}"),
        CallerPattern::UserGroup(gid) => format!("users:{gid}"),
    };
    (word, None)
}

fn vms_words(vms: &VmPattern) -> (String, Option<&str>) {
    match vms {
        VmPattern::Any { domain } => (full_name(domain, "*"), Some(domain)),
        VmPattern::One { domain, name } => (full_name(domain, name), None),
        VmPattern::Group { domain, name } => (full_name(domain, &format!("@{name}")), None),
    }
}

/// A callee in words, and the domain if it is every VM of one.
fn callee_words(pattern: &CalleePattern) -> (String, Option<&str>) {
    let word = match pattern {
        CalleePattern::Vms(vms) => return vms_words(vms),
        CalleePattern::Service { domain, name } => {
            format!("service:{}", full_name(domain, &name_words(name)))
        }
        CalleePattern::Listeners => "host".to_owned(),
        CalleePattern::Network(network) => format!("address:{}", network_words(network)),
        CalleePattern::Name(name) => format!("name:{}", name_words(name)),
    };
    (word, None)
}

fn name_words(pattern: &NamePattern) -> String {
    match pattern {
        NamePattern::Any => "*".to_owned(),
        NamePattern::Exact(name) => name.clone(),
        NamePattern::Prefix(start) => format!("{start}*"),
        NamePattern::Suffix(end) => format!("*{end}"),
    }
}

pub(super) fn network_words(network: &IpNet) -> String {
    match network.prefix_len() == network.max_prefix_len() {
        true => network.addr().to_string(),
        false => network.to_string(),
    }
}

fn port_words(range: &PortRange) -> String {
    match range.start() == range.end() {
        true => range.start().to_string(),
        false => format!("{}-{}", range.start(), range.end()),
    }
}
