//! Which rule decides about a call, and why.

use std::collections::BTreeSet;
use std::net::IpAddr;

use api::{PolicyAnswer, PolicyRule, PolicyVerdict};
use policy::{Callee, Caller, Decision, Redirect, Verdict, is_own_port};
use vsock::Reason;
use wire::agent::forward::Place;

use config::input::{InputError, did_you_mean, parse_full_name};
use config::{
    GuestPort, LineSpec, Publish, Service, ServiceTarget, full_name, groups_of, parse_dns_name,
    parse_user, parse_user_group,
};
use wire::destination::Host;

use super::Rulebook;
use super::meant::Stands;

/// The most places in a guest that a note names.
const MAX_PLACES: usize = 16;

/// The first of some things, in words, and how many more there are; nothing of none.
fn first_of(all: &[String]) -> Option<String> {
    let shown = all.get(..all.len().min(MAX_PLACES))?.join(", ");
    match all.len().saturating_sub(MAX_PLACES) {
        _ if all.is_empty() => None,
        0 => Some(shown),
        more => Some(format!("{shown} and {more} more")),
    }
}

/// Why a question has no answer.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(
        "{to:?} is not a VM, and a program of the host calls VMs alone through Ringdown: ask about a VM"
    )]
    NotThroughUs { to: String },
    #[error(transparent)]
    NoAddress(InputError),
    #[error("the port is missing: give the port that is called; only a service has one of its own")]
    NoPort,
    #[error(
        "there is no VM named {name:?}{}: add it, or ask about one that exists",
        did_you_mean(nearest)
    )]
    UnknownVm {
        name: String,
        /// One that exists and may be meant.
        nearest: Option<String>,
    },
    #[error(
        "there is no VM named {name:?}, and {name:?} is a published port: ask about what it leads to, as in `ringdown why host {vm} {port}`"
    )]
    Published {
        name: String,
        vm: String,
        port: GuestPort,
    },
    #[error(
        "there is no service named {name:?}{}: ask about one that exists",
        did_you_mean(nearest)
    )]
    UnknownService {
        name: String,
        /// One that exists and may be meant.
        nearest: Option<String>,
    },
}

/// A possible caller.
pub(super) enum From<'a> {
    Vm(&'a LineSpec),
    Program {
        uid: u32,
        gids: Vec<u32>,
    },
    /// A program of which nothing is known, or a peer at a published port.
    Host,
}

impl From<'_> {
    /// It, as the rules see it.
    fn asked(&self) -> Caller<'_> {
        match self {
            From::Vm(line) => line.as_caller(),
            From::Program { uid, gids } => Caller::Program { uid: *uid, gids },
            From::Host => Caller::Published,
        }
    }
}

/// A possible callee.
pub(super) enum To<'a> {
    Vm(&'a LineSpec),
    Service(&'a Service),
    Listener,
    Address(IpAddr),
    Name(String),
}

impl To<'_> {
    /// It, as the rules see it.
    fn asked(&self) -> Callee<'_> {
        let (address, name) = match self {
            To::Vm(line) => return line.as_callee(),
            To::Service(service) => return service.as_callee(),
            To::Listener => return Callee::Listener,
            To::Address(address) => (Some(*address), None),
            To::Name(name) => (None, Some(name.as_str())),
        };
        Callee::Address { address, name }
    }
}

impl Rulebook {
    /// Says what becomes of a call. A service may be asked about without a port: it is called at its own.
    ///
    /// # Errors
    /// [`AskError`] when the words name no caller or no callee, or the port is missing.
    pub fn ask_at(
        &self,
        from: &str,
        to: &str,
        port: Option<u32>,
    ) -> Result<PolicyAnswer, AskError> {
        let port = match port {
            Some(port) => port,
            None => match self.callee(to)? {
                To::Service(service) => service.port,
                _ => return Err(AskError::NoPort),
            },
        };
        self.ask(from, to, port)
    }

    /// Says what becomes of a call. The words are those of rules, for one caller and one callee.
    ///
    /// # Errors
    /// [`AskError`] when they name no caller or no callee.
    pub fn ask(&self, from: &str, to: &str, port: u32) -> Result<PolicyAnswer, AskError> {
        let caller = self.caller(from)?;
        let callee = match self.service_called(from, to, port) {
            Some(service) => To::Service(service),
            None => self.callee(to)?,
        };
        let to_a_vm = matches!(callee, To::Vm(_));
        if !matches!(caller, From::Vm(_)) && !to_a_vm {
            return Err(AskError::NotThroughUs { to: to.to_owned() });
        }
        let (asked_from, asked_to) = (caller.asked(), callee.asked());
        let decision = self.policy.decide(
            &self.policy.callers(&asked_from),
            &self.policy.callees(&asked_to),
            port,
        );
        let mut answer = self.answer(&decision, &caller, &callee);
        let by_the_rules = answer.why.clone();
        self.keep_own_ports(&mut answer, &decision, &caller, (&callee, port));
        self.keep_to_ways(&mut answer, &decision, &caller, (&callee, port));
        let is_for_rules = answer.why == by_the_rules;
        answer.from = from.to_owned();
        answer.to = to.to_owned();
        answer.port = port;
        let is_for_rules = self.as_egress_does(&mut answer, &asked_from, &asked_to) && is_for_rules;
        if is_for_rules {
            answer.passed_over = self.passed_over(&answer, &decision, &asked_from, &asked_to);
        }
        if matches!(callee, To::Address(_) | To::Name(_)) {
            answer.notes.extend(self.egress_note(from, &asked_from));
        }
        match (&caller, &callee) {
            (From::Vm(line), To::Vm(called)) => {
                answer.notes.extend(host_only_note(line, to, port));
                answer.notes.extend(networks_note(line, called));
            }
            (From::Host, To::Vm(line)) => answer.notes.extend(self.published_as(line, port)),
            _ => {}
        }
        Ok(answer)
    }

    fn answer(&self, decision: &Decision<'_>, caller: &From<'_>, callee: &To<'_>) -> PolicyAnswer {
        let mut answer = PolicyAnswer {
            from: String::new(),
            to: String::new(),
            port: 0,
            verdict: PolicyVerdict::Denied,
            redirect: None,
            rule: None,
            why: String::new(),
            notes: Vec::new(),
            passed_over: Vec::new(),
        };
        let Some((id, verdict)) = decision.rule else {
            let (verdict, why) = without_a_rule(caller, callee);
            answer.verdict = verdict;
            answer.why = format!("no rule matches, and {why}");
            return answer;
        };
        let rule = self.rule(id.0);
        answer.verdict = PolicyVerdict::from(verdict);
        if let Verdict::Redirect(to) = verdict {
            answer.redirect = Some(redirect_words(to));
        }
        answer.why = format!("rule {} is the first that matches", rule.words());
        if let Verdict::Redirect(Redirect::Vm { domain, name, .. }) = verdict {
            if self.plan.find(domain, name).is_none() {
                let name = full_name(domain, name);
                answer
                    .notes
                    .push(format!("there is no VM named {name:?}, so the call fails"));
            }
        }
        answer.rule = Some(rule);
        answer
    }

    /// Ports of Ringdown's own at a VM are for its host alone, whatever the rules say.
    fn keep_own_ports(
        &self,
        answer: &mut PolicyAnswer,
        decision: &Decision<'_>,
        caller: &From<'_>,
        (callee, port): (&To<'_>, u32),
    ) {
        let dialled = match callee {
            To::Vm(line) => Some((*line, port)),
            // Egress follows no redirect.
            To::Address(_) | To::Name(_) => return,
            To::Service(_) | To::Listener => None,
        };
        let reached = match decision.rule {
            Some((
                _,
                Verdict::Redirect(Redirect::Vm {
                    domain,
                    name,
                    port: to,
                }),
            )) => self
                .plan
                .find(domain, name)
                .map(|line| (line, to.unwrap_or(port))),
            Some((_, Verdict::Deny | Verdict::Redirect(Redirect::Service { .. }))) => None,
            Some((_, Verdict::Allow)) | None => dialled,
        };
        if let (From::Host, Some((line, wire::agent::PORT)), Some(_)) =
            (caller, dialled, &answer.redirect)
        {
            if !reached.is_some_and(|(to, port)| is_agent_of(line, to, port)) {
                let note = "what the daemon calls there for a published port with \"tcp:\" or \"unix:\" is not redirected, but refused";
                answer.notes.push(note.to_owned());
            }
        }
        let Some((line, port)) = reached.filter(|(_, port)| is_own_port(*port)) else {
            return;
        };
        let is_direct = dialled
            .is_some_and(|(dialled, at)| (dialled.full_name(), at) == (line.full_name(), port));
        match caller {
            From::Program { .. } if is_direct => return,
            From::Host if is_direct => {
                let name = line.full_name();
                answer.notes.push(match port {
                    wire::agent::PORT => format!(
                        "a published port leads there by to = \"{name}:tcp:PORT\" or \"{name}:unix:PATH\": {}",
                        self.published_by_agent(line)
                    ),
                    _ => "a published port does not lead there: this port of a VM is for programs of its host that call it directly".to_owned(),
                });
                return;
            }
            From::Vm(_) | From::Program { .. } | From::Host => {}
        }
        answer.verdict = PolicyVerdict::Denied;
        answer.why = match (&answer.redirect, decision.rule) {
            (Some(to), _) => format!("{}, and leads to {to}, but {}", answer.why, Reason::OwnPort),
            (None, Some(_)) => format!("{}, but {}", answer.why, Reason::OwnPort),
            (None, None) => Reason::OwnPort.to_string(),
        };
        answer.redirect = None;
    }

    /// Published ports of a VM.
    fn published<'a>(&'a self, line: &'a LineSpec) -> impl Iterator<Item = &'a Publish> {
        let publishes = self.publishes.iter().map(|publish| &publish.value);
        publishes.filter(|publish| {
            let found = self.plan.find(&publish.to.domain, &publish.to.vm);
            found.is_some_and(|of| of.full_name() == line.full_name())
        })
    }

    /// The published ports that another rulebook has not, in words.
    pub fn published_beside(&self, other: &Rulebook) -> Vec<String> {
        let words = |publish: &Publish| {
            let (at, to) = (listens_at(publish), &publish.to);
            format!("{at} to {}:{}", to.full_name(), to.port)
        };
        let others: Vec<&Publish> = other.publishes.iter().map(|own| &own.value).collect();
        let own = self.publishes.iter().map(|own| &own.value);
        own.filter(|own| !others.contains(own)).map(words).collect()
    }

    /// The names of the published ports that lead to a place in the VM of this name.
    pub fn published_to<'a>(&'a self, vm: &str, place: &'a Place) -> impl Iterator<Item = &'a str> {
        let line = match self.callee(vm) {
            Ok(To::Vm(line)) => Some(line),
            _ => None,
        };
        let of_line = line.into_iter().flat_map(|line| self.published(line));
        let of_place = of_line
            .filter(move |publish| matches!(&publish.to.port, GuestPort::Agent(to) if to == place));
        of_place.map(|publish| publish.name.as_str())
    }

    /// What to ask about in place of the name of a published port, if it is one.
    fn published_by_name(&self, name: &str) -> Option<AskError> {
        let mut publishes = self.publishes.iter().map(|publish| &publish.value);
        let publish = publishes.find(|publish| publish.name == name)?;
        Some(AskError::Published {
            name: name.to_owned(),
            vm: full_name(&publish.to.domain, &publish.to.vm),
            port: publish.to.port.clone(),
        })
    }

    /// By which names a vsock port of a VM is published, in words.
    fn published_as(&self, line: &LineSpec, port: u32) -> Option<String> {
        let of_port = self.published(line);
        let of_port = of_port.filter(|publish| publish.to.port == GuestPort::Vsock(port));
        let places: Vec<String> = of_port.map(listens_at).collect();
        Some(format!("it is published at {}", first_of(&places)?))
    }

    /// What of a VM is published by its agent, in words.
    fn published_by_agent(&self, line: &LineSpec) -> String {
        let of_agent = self.published(line);
        let of_agent = of_agent.filter(|publish| matches!(publish.to.port, GuestPort::Agent(_)));
        let places: Vec<String> = of_agent
            .map(|publish| {
                format!(
                    "{} leads to {} in the guest",
                    listens_at(publish),
                    publish.to.port
                )
            })
            .collect();
        match first_of(&places) {
            None => "there is none".to_owned(),
            Some(places) => places,
        }
    }

    /// Whether the caller can reach an egress service at all: a rule about an address alone opens nothing.
    fn egress_note(&self, from: &str, caller: &Caller<'_>) -> Option<String> {
        let services = self.services.iter().map(|service| &service.value);
        let egress: Vec<&Service> = services
            .filter(|service| service.target == ServiceTarget::Egress)
            .collect();
        let Some(first) = egress.first() else {
            let note = "there is no egress service: add a [[service]] with egress = true";
            return Some(note.to_owned());
        };
        let callers = self.policy.callers(caller);
        let reaches = egress.iter().any(|service| {
            let callees = self.policy.callees(&service.as_callee());
            let decision = self.policy.decide(&callers, &callees, service.port);
            matches!(decision.rule, Some((_, Verdict::Allow)))
        });
        (!reaches).then(|| {
            format!(
                "{from} may not call an egress service: it needs a rule with to = \"service:{}\" too",
                first.full_name()
            )
        })
    }

    pub(super) fn rule(&self, index: u32) -> PolicyRule {
        let written = self.rules.get(index as usize);
        PolicyRule {
            index,
            label: written.map_or_else(String::new, |rule| rule.value.label.clone()),
            place: written.map_or_else(String::new, |rule| rule.place.clone()),
        }
    }

    fn caller(&self, text: &str) -> Result<From<'_>, AskError> {
        match text.split_once(':') {
            Some(("user", user)) => {
                let uid = parse_user(user)?;
                let gids = groups_of(uid)?;
                Ok(From::Program { uid, gids })
            }
            Some(("users", group)) => Ok(From::Program {
                // None: only the group is asked about.
                uid: u32::MAX,
                gids: vec![parse_user_group(group)?],
            }),
            None if text == "host" => Ok(From::Host),
            None => Ok(From::Vm(self.vm(text, Stands::Vm)?)),
            Some(_) => Err(InputError::Malformed {
                expected: "one caller",
                found: text.chars().take(128).collect(),
                remedy: "write a VM, \"host\", \"user:NAME\" or \"users:GROUP\"".to_owned(),
            }
            .into()),
        }
    }

    fn callee(&self, text: &str) -> Result<To<'_>, AskError> {
        match text.split_once(':') {
            Some(("service", service)) => self.service(service),
            Some(("address", address)) => {
                let parsed = address.parse::<IpAddr>();
                let parsed = parsed.map_err(|_| {
                    AskError::NoAddress(InputError::Malformed {
                        expected: "an address",
                        found: address.chars().take(128).collect(),
                        remedy: "write one, as in \"address:10.1.2.3\"".to_owned(),
                    })
                })?;
                Ok(To::Address(parsed.to_canonical()))
            }
            Some(("name", name)) => {
                let parsed = parse_dns_name(name).map_err(AskError::NoAddress)?;
                match Host::parse(&parsed) {
                    Ok(Host::Name(name)) => Ok(To::Name(name)),
                    _ => Err(AskError::NoAddress(InputError::Malformed {
                        expected: "a DNS name",
                        found: parsed,
                        remedy: "its last part is a number, so that programs take it for an address: ask about \"address:…\"".to_owned(),
                    })),
                }
            }
            None if text == "host" => Ok(To::Listener),
            None => {
                let line = self.vm(text, Stands::Asked);
                let published = |error| self.published_by_name(text).unwrap_or(error);
                Ok(To::Vm(line.map_err(published)?))
            }
            Some(_) => Err(InputError::Malformed {
                expected: "one callee",
                found: text.chars().take(128).collect(),
                remedy:
                    "write a VM, \"host\", \"service:NAME\", \"address:10.1.2.3\" or \"name:deb.debian.org\""
                        .to_owned(),
            }
            .into()),
        }
    }

    fn vm(&self, text: &str, stands: Stands) -> Result<&LineSpec, AskError> {
        let (domain, name) = parse_full_name("a VM", text)?;
        self.plan
            .find(domain, name)
            .ok_or_else(|| AskError::UnknownVm {
                name: full_name(domain, name),
                nearest: self.meant(domain, name, stands),
            })
    }

    pub(super) fn service(&self, text: &str) -> Result<To<'_>, AskError> {
        let (domain, name) = parse_full_name("a service", text)?;
        let mut services = self.services.iter().map(|service| &service.value);
        match services.find(|service| service.domain == domain && service.name == name) {
            Some(service) => Ok(To::Service(service)),
            None => Err(AskError::UnknownService {
                name: full_name(domain, name),
                nearest: self.nearest_service(&full_name(domain, name)),
            }),
        }
    }
}

/// Whether a call gets to the agent of this VM.
fn is_agent_of(line: &LineSpec, reached: &LineSpec, port: u32) -> bool {
    (line.full_name(), wire::agent::PORT) == (reached.full_name(), port)
}

/// Of a VM whose guest can call its host alone, how it reaches another.
fn host_only_note(line: &LineSpec, to: &str, port: u32) -> Option<String> {
    let kind = line.host_only_kind()?;
    Some(format!(
        "the line of {:?} is {kind}, so its guest calls its host alone: it reaches another VM where a rule redirects a port of the host, as with \
         to = \"host\", port = {port}, redirect = \"{to}:{port}\"",
        line.full_name()
    ))
}

/// Of VMs that have networks in common, that rules say nothing of these.
fn networks_note(line: &LineSpec, called: &LineSpec) -> Option<String> {
    let of = |line: &LineSpec| -> BTreeSet<String> {
        let networks = line.ports.iter().map(|port| port.network.clone());
        networks.collect()
    };
    let shared: Vec<String> = of(line).intersection(&of(called)).cloned().collect();
    let (first, rest) = shared.split_first()?;
    let also = match rest.len() {
        0 => String::new(),
        count => format!(" and {count} more"),
    };
    Some(format!(
        "rules decide about vsock, not about networks: both VMs have a port in {first:?}{also}, where they reach each other unless `isolated` or VLANs keep them apart"
    ))
}

fn without_a_rule(caller: &From<'_>, callee: &To<'_>) -> (PolicyVerdict, &'static str) {
    use PolicyVerdict::{Allowed, Denied};
    match (caller, callee) {
        (From::Vm(_), To::Listener) => (
            Allowed,
            "a VM may call the sockets that programs of the host have made for it",
        ),
        (From::Vm(_), To::Vm(_)) => (Denied, "VMs may not call each other without one"),
        (From::Vm(_), To::Service(_)) => (Denied, "VMs may not call services without one"),
        (From::Vm(_), _) => (Denied, "nothing beyond the host is reached without one"),
        (_, To::Vm(_)) => (
            Allowed,
            "programs of the host, and published ports, may call VMs",
        ),
        _ => (Denied, "programs of the host call VMs only"),
    }
}

/// Where on the host, and the name if it is another.
fn listens_at(publish: &Publish) -> String {
    let listen = publish.listen.to_string();
    match publish.name == listen {
        true => listen,
        false => format!("{listen} ({:?})", publish.name),
    }
}

/// Where a rule sends a call, as it is written in rules.
pub(super) fn redirect_words(redirect: &Redirect) -> String {
    match redirect {
        Redirect::Vm {
            domain,
            name,
            port: Some(port),
        } => format!("{}:{port}", full_name(domain, name)),
        Redirect::Vm { domain, name, .. } => full_name(domain, name),
        Redirect::Service { domain, name } => format!("service:{}", full_name(domain, name)),
    }
}
