//! Which rule decides about a call, and why.

use std::net::IpAddr;

use switch::{Callee, Caller, Decision, Reason, Redirect, Rule, Verdict, is_own_port};

use super::Rulebook;
use crate::api::types::{PassedOver, PolicyAnswer, PolicyRule, PolicyVerdict};
use crate::config::{
    ServiceTarget, full_name, groups_of, parse_dns_name, parse_user, parse_user_group,
};
use crate::input::{InputError, parse_full_name};
use crate::line::LineSpec;

/// Rules that came near to deciding and are told of in an answer.
const MAX_PASSED_OVER: usize = 8;

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// The words mean nothing.
    #[error(transparent)]
    Input(#[from] InputError),
    /// What a program of the host does not call through Ringdown.
    #[error(
        "{to:?} is not somebody whom a program of the host can call through Ringdown: ask about a VM"
    )]
    NotThroughUs {
        /// Who was asked about.
        to: String,
    },
    /// An address, or a name, that cannot be one.
    #[error(transparent)]
    NoAddress(InputError),
    /// No VM has this name.
    #[error("there is no VM named {name:?}{}: add it, or ask about one that exists", nearest_of(.nearest))]
    UnknownVm {
        /// The name.
        name: String,
        /// One that exists and may be meant.
        nearest: Option<String>,
    },
    /// No service has this name.
    #[error("there is no service named {name:?}{}: ask about one that exists", nearest_of(.nearest))]
    UnknownService {
        /// The name.
        name: String,
        /// One that exists and may be meant.
        nearest: Option<String>,
    },
}

/// Somebody who could call.
pub(super) enum From<'a> {
    Vm(&'a LineSpec),
    Program {
        uid: u32,
        gids: Vec<u32>,
    },
    /// A program of which nothing is known, or whoever comes in by a published port.
    Host,
}

/// Somebody who could be called.
pub(super) enum To<'a> {
    Vm(&'a LineSpec),
    Service { domain: &'a str, name: &'a str },
    Listener,
    Address(IpAddr),
    Name(String),
}

impl Rulebook {
    /// Says what becomes of a call. The words are those of rules, for one caller and one callee.
    ///
    /// # Errors
    /// [`AskError`] when there is nobody who is meant by them.
    pub fn ask(&self, from: &str, to: &str, port: u32) -> Result<PolicyAnswer, AskError> {
        let caller = self.caller(from)?;
        let callee = match self.service_called(from, to, port) {
            Some(service) => To::Service {
                domain: &service.domain,
                name: &service.name,
            },
            None => self.callee(to)?,
        };
        let to_a_vm = matches!(callee, To::Vm(_));
        if !matches!(caller, From::Vm(_)) && !to_a_vm {
            return Err(AskError::NotThroughUs { to: to.to_owned() });
        }
        let gids;
        let asked_from = match &caller {
            From::Vm(line) => Caller::Vm {
                domain: &line.domain,
                name: &line.name,
                groups: &line.groups,
            },
            From::Program { uid, gids: of } => {
                gids = of.clone();
                Caller::Program {
                    uid: *uid,
                    gids: &gids,
                }
            }
            From::Host => Caller::Published,
        };
        let asked_to = match &callee {
            To::Vm(line) => Callee::Vm {
                domain: &line.domain,
                name: &line.name,
                groups: &line.groups,
            },
            To::Service { domain, name } => Callee::Service { domain, name },
            To::Listener => Callee::Listener,
            To::Address(address) => Callee::Address {
                address: Some(*address),
                name: None,
            },
            To::Name(name) => Callee::Address {
                address: None,
                name: Some(name),
            },
        };
        let decision = self.policy.decide(
            &self.policy.callers(&asked_from),
            &self.policy.callees(&asked_to),
            port,
        );
        let passed_over = self.passed_over(&decision, &asked_from, &asked_to, port);
        let mut answer = self.answer(&decision, &caller, &callee);
        self.keep_own_ports(&mut answer, &decision, &caller, (&callee, port));
        self.keep_to_ways(&mut answer, &decision, &caller, (&callee, port));
        answer.from = from.to_owned();
        answer.to = to.to_owned();
        answer.port = port;
        answer.passed_over = passed_over;
        self.as_egress_does(&mut answer, &asked_from, &asked_to);
        if matches!(callee, To::Address(_) | To::Name(_)) {
            answer.notes.extend(self.egress_note(from, &asked_from));
        }
        if matches!(callee, To::Name(_)) && answer.verdict == PolicyVerdict::Allowed {
            let note = "addresses that the name leads to are asked about too: one that a rule denies is not reached, and one of the host, of its \
                        networks or of a special range only if a rule names that address or its network";
            answer.notes.push(note.to_owned());
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
        answer.verdict = match verdict {
            Verdict::Allow => PolicyVerdict::Allowed,
            Verdict::Deny => PolicyVerdict::Denied,
            Verdict::Redirect(to) => {
                answer.redirect = Some(redirect_words(to));
                PolicyVerdict::Redirected
            }
        };
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
            _ => None,
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
        let Some((line, port)) = reached.filter(|(_, port)| is_own_port(*port)) else {
            return;
        };
        let is_direct = dialled
            .is_some_and(|(dialled, at)| (dialled.full_name(), at) == (line.full_name(), port));
        match caller {
            From::Program { .. } if is_direct => return,
            From::Host if is_direct => {
                let note = "a published port does not lead there: this port of a VM is for programs of its host that call it directly";
                return answer.notes.push(note.to_owned());
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

    /// Rules before the one that decided which match in all but one regard: what a person looks for who expected another answer.
    fn passed_over(
        &self,
        decision: &Decision<'_>,
        from: &Caller<'_>,
        to: &Callee<'_>,
        port: u32,
    ) -> Vec<PassedOver> {
        let end = decision
            .rule
            .map_or(self.policy.rules().len(), |(id, _)| id.0 as usize);
        let mut passed_over = Vec::new();
        for (index, rule) in self.policy.rules().iter().take(end).enumerate() {
            let fits = [
                (rule.from.iter().any(|pattern| pattern.covers(from)), "from"),
                (rule.to.iter().any(|pattern| pattern.covers(to)), "to"),
                (covers_port(rule, port), "port"),
            ];
            let mut misses = fits.iter().filter(|(fits, _)| !fits);
            if let (Some((_, key)), None) = (misses.next(), misses.next()) {
                passed_over.push(PassedOver {
                    rule: self.rule(index as u32),
                    differs_in: (*key).to_owned(),
                });
            }
            if passed_over.len() == MAX_PASSED_OVER {
                break;
            }
        }
        passed_over
    }

    /// Whether the caller can reach an egress service at all: a rule about an address alone opens nothing.
    fn egress_note(&self, from: &str, caller: &Caller<'_>) -> Option<String> {
        let mut services = self
            .services
            .iter()
            .map(|service| &service.value)
            .filter(|service| service.target == ServiceTarget::Egress)
            .peekable();
        if services.peek().is_none() {
            return Some(
                "there is no egress service: add a [[service]] with egress = true".to_owned(),
            );
        }
        let callers = self.policy.callers(caller);
        let reaches = services.any(|service| {
            let callee = Callee::Service {
                domain: &service.domain,
                name: &service.name,
            };
            let decision =
                self.policy
                    .decide(&callers, &self.policy.callees(&callee), service.port);
            matches!(decision.rule, Some((_, Verdict::Allow)))
        });
        (!reaches).then(|| {
            format!(
                "{from} may not call an egress service: it needs a rule with to = \"service:…\" too"
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
                // Nobody: only the group is asked about.
                uid: u32::MAX,
                gids: vec![parse_user_group(group)?],
            }),
            None if text == "host" => Ok(From::Host),
            None => Ok(From::Vm(self.vm(text)?)),
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
                let name = parse_dns_name(name).map_err(AskError::NoAddress)?;
                Ok(To::Name(name))
            }
            None if text == "host" => Ok(To::Listener),
            None => Ok(To::Vm(self.vm(text)?)),
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

    fn vm(&self, text: &str) -> Result<&LineSpec, AskError> {
        let (domain, name) = parse_full_name("a VM", text)?;
        self.plan
            .find(domain, name)
            .ok_or_else(|| AskError::UnknownVm {
                name: full_name(domain, name),
                nearest: self.nearest_vm(&full_name(domain, name)),
            })
    }

    fn service(&self, text: &str) -> Result<To<'_>, AskError> {
        let (domain, name) = parse_full_name("a service", text)?;
        let mut services = self.services.iter().map(|service| &service.value);
        match services.find(|service| service.domain == domain && service.name == name) {
            Some(service) => Ok(To::Service {
                domain: &service.domain,
                name: &service.name,
            }),
            None => Err(AskError::UnknownService {
                name: full_name(domain, name),
                nearest: self.nearest_service(&full_name(domain, name)),
            }),
        }
    }
}

impl PolicyRule {
    /// The rule as a sentence names it: by its position from 1, and its name or place.
    pub fn words(&self) -> String {
        match self.label == self.place {
            true => format!("{} ({})", self.index + 1, self.place),
            false => format!("{} {:?} ({})", self.index + 1, self.label, self.place),
        }
    }
}

fn covers_port(rule: &Rule, port: u32) -> bool {
    rule.ports.is_empty() || rule.ports.iter().any(|range| range.contains(&port))
}

fn without_a_rule(caller: &From<'_>, callee: &To<'_>) -> (PolicyVerdict, &'static str) {
    use PolicyVerdict::{Allowed, Denied};
    match (caller, callee) {
        (From::Vm(_), To::Listener) => (
            Allowed,
            "a VM may call the sockets that programs of the host have made for it",
        ),
        (From::Vm(_), To::Vm(_)) => (Denied, "VMs may not call each other without one"),
        (From::Vm(_), To::Service { .. }) => (Denied, "VMs may not call services without one"),
        (From::Vm(_), _) => (Denied, "nothing beyond the host is reached without one"),
        (_, To::Vm(_)) => (
            Allowed,
            "programs of the host, and published ports, may call VMs",
        ),
        _ => (Denied, "programs of the host call VMs only"),
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

fn nearest_of(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map(|name| format!(" (did you mean {name:?}?)"))
        .unwrap_or_default()
}
