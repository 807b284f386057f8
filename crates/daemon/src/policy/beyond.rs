//! What egress adds to the rules about a place beyond the host: the same that it does when a guest calls.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use api::{Finding, FindingKind, PolicyAnswer, PolicyVerdict};
use config::ServiceTarget;
use config::input::nearest_full_name;
use policy::{Callee, CalleePattern, Caller, NamePattern, Policy, Rule, RuleId, Verdict};
use wire::destination::DestinationError;

use super::Rulebook;
use super::findings::{Found, Suggestions};
use super::listing::network_words;
use hostside::proxy::egress::{
    EgressError, View, allowed, is_network, means, means_name, must_be_named, none_is_published,
    permitted,
};
use hostside::proxy::own::OwnListeners;

/// The most names that a finding shows.
const MAX_NAMED: usize = 4;

impl Rulebook {
    /// Says what egress does where the rules alone allow a call, and returns whether other rules could change it. A name of `[hosts]` is asked about with its
    /// addresses, any other before it is looked up.
    pub(super) fn as_egress_does(
        &self,
        answer: &mut PolicyAnswer,
        from: &Caller<'_>,
        to: &Callee<'_>,
    ) -> bool {
        let Callee::Address { address, name } = *to else {
            return true;
        };
        let port = u16::try_from(answer.port).ok().filter(|port| *port != 0);
        if answer.verdict == PolicyVerdict::Denied {
            return port.is_some();
        }
        let Some(port) = port else {
            self.deny(answer, None, DestinationError::Port.to_string());
            return false;
        };
        match self.reached(from, (address, name), port) {
            Ok((rule, addresses)) => {
                let rule = self.rule(rule.0);
                answer.why = format!("rule {} is the first that matches", rule.words());
                answer.rule = Some(rule);
                answer.notes.extend(name.map(|_| note(&addresses)));
                true
            }
            Err(error) => {
                self.deny(answer, error.rule(), error.to_string());
                let is_for_rules = !matches!(
                    error,
                    EgressError::Published { .. } | EgressError::NotForPort(_)
                );
                if let (EgressError::Special { .. }, Some(name)) = (&error, name) {
                    let note = format!(
                        "[hosts] lists the name: a rule with to = \"name:{name}\", before rules about every name or all below a domain, opens its addresses"
                    );
                    answer.notes.push(note);
                }
                is_for_rules
            }
        }
    }

    /// Whether egress opens an address, or a name, by a rule that allows it: special ones have to be named.
    pub(super) fn opens(&self, rule: &Rule, address: Option<IpAddr>, name: Option<&str>) -> bool {
        let listed = name.and_then(|name| self.hosts.get(name));
        let listed = listed.into_iter().flatten().map(|listed| listed.address);
        let addresses = address.into_iter().chain(listed);
        let addresses: Vec<IpAddr> = addresses.filter(|one| must_be_named(*one)).collect();
        let named = Named {
            name,
            addresses,
            words: String::new(),
        };
        named.is_named_by(rule)
    }

    /// Which rule lets a call pass, and to which addresses; none if they are not known yet.
    fn reached(
        &self,
        from: &Caller<'_>,
        to: (Option<IpAddr>, Option<&str>),
        port: u16,
    ) -> Result<(RuleId, Vec<IpAddr>), EgressError> {
        let (rule, addresses) = self.allowed(from, to, port)?;
        let own = OwnListeners::default();
        own.expect(self.publishes.iter().map(|publish| &publish.value.listen));
        let called = addresses
            .iter()
            .map(|address| SocketAddr::new(*address, port));
        none_is_published(&own, &called.collect::<Vec<_>>())?;
        Ok((rule, addresses))
    }

    /// The same as far as the rules go.
    fn allowed(
        &self,
        from: &Caller<'_>,
        (address, name): (Option<IpAddr>, Option<&str>),
        port: u16,
    ) -> Result<(RuleId, Vec<IpAddr>), EgressError> {
        let policy = &*self.policy;
        let view = View::of(policy, &self.hosts, from);
        let Some(name) = name else {
            let judge = |address| permitted(policy, view.address(address, None, port));
            return allowed(address.as_slice(), judge);
        };
        let rule = permitted(policy, view.name(name, port))?;
        match self.hosts.addresses(name, port) {
            None => Ok((rule, Vec::new())),
            Some(listed) if listed.is_empty() => {
                Err(EgressError::NotForPort(self.hosts.ports_words(name)))
            }
            Some(listed) => allowed(&listed, |address| {
                permitted(policy, view.address(address, Some(name), port))
            }),
        }
    }

    /// Rules that allow an address or a name and never open it, by their positions: a rule before each decides first, and does not name what
    /// has to be named.
    pub(super) fn not_opened(&self) -> BTreeMap<u32, Finding> {
        let mut findings = BTreeMap::new();
        let kinds: [fn(&CalleePattern) -> bool; 2] = [
            |pattern| matches!(pattern, CalleePattern::Network(_)),
            |pattern| matches!(pattern, CalleePattern::Name(_)),
        ];
        let rules = self.policy.rules();
        for is_of_kind in kinds {
            let of_kind = rules.iter().map(|rule| Rule {
                to: rule
                    .to
                    .iter()
                    .filter(|to| is_of_kind(to))
                    .cloned()
                    .collect(),
                ..rule.clone()
            });
            for covered in Policy::new(of_kind.collect()).unreachable() {
                let id = covered.rule.0;
                let Some(rule) = rules.get(id as usize) else {
                    continue;
                };
                let mut named = rule.to.iter().filter(|to| is_of_kind(to));
                let before = || std::iter::once(&covered.covered_by).chain(&covered.together_with);
                let hidden = named.find_map(|pattern| {
                    let named = self.named(pattern)?;
                    let by = before().find(|by| {
                        let by = self.policy.rule(**by);
                        by.is_some_and(|by| by.verdict == Verdict::Allow && !named.is_named_by(by))
                    })?;
                    Some((named.words, *by))
                });
                if let (Some((words, by)), Some(written), Verdict::Allow) =
                    (hidden, self.rules.get(id as usize), &rule.verdict)
                {
                    let (name, by) = (self.rule(id).words(), self.rule(by.0).words());
                    let message = format!(
                        "rule {name} does not open {words}: rule {by} comes before it and decides, and does not name it, so that egress refuses it"
                    );
                    let remedy = format!("move it up, before rule {by}");
                    let found = Found::new(FindingKind::NotOpened, message, remedy);
                    findings.entry(id).or_insert_with(|| found.at(written));
                }
            }
        }
        findings
    }

    /// What a pattern names that no rule opens without naming it.
    fn named<'a>(&self, pattern: &'a CalleePattern) -> Option<Named<'a>> {
        let (name, listed, words) = match pattern {
            CalleePattern::Network(network) if is_network(network.prefix_len()) => {
                let address = network.addr();
                (None, vec![address], network_words(network))
            }
            CalleePattern::Name(NamePattern::Exact(name)) => {
                let listed = self.hosts.get(name)?.iter().map(|listed| listed.address);
                let words = format!("what [hosts] lists for {name:?}");
                (Some(name.as_str()), listed.collect(), words)
            }
            _ => return None,
        };
        let must_be_named = |address: &IpAddr| must_be_named(*address);
        let addresses: Vec<IpAddr> = listed.into_iter().filter(must_be_named).collect();
        (!addresses.is_empty()).then_some(Named {
            name,
            addresses,
            words,
        })
    }

    /// Names of `[hosts]` that rules allow by a wildcard alone, so that none of their addresses is opened; a finding for each rule.
    pub(super) fn listed_for_nobody(&self) -> Vec<Finding> {
        if !self.has_egress() {
            return Vec::new();
        }
        let rules = self.policy.rules();
        let names = rules.iter().flat_map(|rule| rule.to.iter());
        let exact: BTreeSet<&str> = names
            .filter_map(|pattern| match pattern {
                CalleePattern::Name(NamePattern::Exact(name)) => Some(name.as_str()),
                _ => None,
            })
            .collect();
        let allowing = || {
            rules
                .iter()
                .zip(0_u32..)
                .filter(|(rule, _)| rule.verdict == Verdict::Allow)
        };
        let covers = |rule: &Rule, name: &str| {
            let mut patterns = rule.to.iter();
            patterns.any(|pattern| matches!(pattern, CalleePattern::Name(of) if of.covers(name)))
        };
        let mut by_rule: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
        for (name, listed) in self.hosts.iter() {
            // A rule of its own says what is meant, and a service may be all that the name is for.
            if exact.contains(name) || self.is_name_of_a_service(name) {
                continue;
            }
            let Some((_, rule)) = allowing().find(|(rule, _)| covers(rule, name)) else {
                continue;
            };
            let is_opened = |address| allowing().any(|(rule, _)| means(rule, address));
            let mut addresses = listed.iter().map(|listed| listed.address);
            if addresses.all(|address| !is_opened(address) && must_be_named(address)) {
                by_rule.entry(rule).or_default().push(name);
            }
        }
        let told = by_rule.into_iter().filter_map(|(rule, names)| {
            let written = self.rules.get(rule as usize)?;
            let shown: Vec<String> = names.iter().take(MAX_NAMED).map(|name| format!("{name:?}")).collect();
            let more = match names.len().saturating_sub(MAX_NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let message = format!(
                "rule {} allows {}{more} and does not open what [hosts] lists there: addresses of the host, of its networks or of a special range, which \
                 a rule about many names does not open",
                self.rule(rule).words(),
                shown.join(", "),
            );
            let remedy = format!("add a rule with to = \"name:{}\" before it", names.first()?);
            Some(Found::new(FindingKind::NotOpened, message, remedy).at(written))
        });
        told.collect()
    }

    /// Names of `[hosts]` that no rule allows beside rules with a name that is nearly the same.
    pub(super) fn nearly_listed<'a>(&'a self, suggestions: &Suggestions) -> Vec<Finding> {
        let rules = self.policy.rules();
        let patterns = |rule: &'a Rule| {
            let patterns = rule.to.iter();
            patterns.filter_map(|pattern| match pattern {
                CalleePattern::Name(name) => Some(name),
                _ => None,
            })
        };
        let is_used = |name: &str| {
            let allowing = rules.iter().filter(|rule| rule.verdict == Verdict::Allow);
            let mut allowed = allowing.flat_map(patterns);
            allowed.any(|of| of.covers(name)) || self.is_name_of_a_service(name)
        };
        let listed: Vec<&str> = self.hosts.iter().map(|(name, _)| name).collect();
        let unused = listed.iter().filter(|name| !is_used(name));
        let unused: Vec<String> = unused.map(|name| (*name).to_owned()).collect();
        if unused.is_empty() {
            return Vec::new();
        }
        let written = rules.iter().zip(0_u32..);
        let written = written.flat_map(|(rule, index)| patterns(rule).map(move |of| (of, index)));
        let found = written.filter_map(|(pattern, index)| {
            let NamePattern::Exact(name) = pattern else {
                return None;
            };
            if listed.contains(&name.as_str()) {
                return None;
            }
            let near = suggestions.find(|| nearest_full_name(name, &unused))?;
            let rule = self.rules.get(index as usize)?;
            let message = format!(
                "rule {} names {name:?}, which [hosts] does not list (did you mean {near:?}?)",
                self.rule(index).words()
            );
            let remedy = "correct the name if it is to have an address of [hosts]: it is looked up otherwise";
            Some(Found::new(FindingKind::NotOpened, message, remedy).at(rule))
        });
        found.collect()
    }

    fn has_egress(&self) -> bool {
        let mut services = self.services.iter();
        services.any(|service| service.value.target == ServiceTarget::Egress)
    }

    fn is_name_of_a_service(&self, name: &str) -> bool {
        self.services
            .iter()
            .any(|service| match &service.value.target {
                ServiceTarget::Tcp(server) | ServiceTarget::Udp(server) => {
                    let host = server.rsplit_once(':').map(|(host, _)| host);
                    host.is_some_and(|host| host.eq_ignore_ascii_case(name))
                }
                _ => false,
            })
    }

    fn deny(&self, answer: &mut PolicyAnswer, rule: Option<RuleId>, why: String) {
        answer.verdict = PolicyVerdict::Denied;
        answer.redirect = None;
        answer.rule = rule.map(|rule| self.rule(rule.0));
        // The verdict says it already.
        answer.why = match why.strip_prefix("denied: ") {
            Some(reason) => reason.to_owned(),
            None => why,
        };
    }
}

/// What a rule names that no rule opens without naming it.
struct Named<'a> {
    /// The name of `[hosts]`, if it is one.
    name: Option<&'a str>,
    addresses: Vec<IpAddr>,
    words: String,
}

impl Named<'_> {
    fn is_named_by(&self, rule: &Rule) -> bool {
        self.name.is_some_and(|name| means_name(rule, name))
            || self.addresses.iter().all(|address| means(rule, *address))
    }
}

/// Where a call by a name goes.
fn note(addresses: &[IpAddr]) -> String {
    if addresses.is_empty() {
        return "the addresses that the name leads to are asked about when a guest calls: one that a rule denies is not reached, and one of the host, of its \
                networks or of a special range only if a rule names that address or its network"
            .to_owned();
    }
    let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    format!("[hosts] leads the call to {}", addresses.join(", "))
}
