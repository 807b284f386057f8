//! Where a call can lead at all: what no rule opens, and what none closes.

use std::borrow::Cow;
use std::path::PathBuf;

use api::{Finding, FindingKind, PolicyAnswer, PolicyVerdict};
use config::input::parse_full_name;
use config::{LineSpec, Service};
use policy::{Callee, CalleePattern, Decision, Redirect, Rule, Verdict, VmPattern, is_own_port};
use vsock::{OfferedPorts, Reason};

use super::Rulebook;
use super::answer::{From, To};
use super::findings::Found;

/// The most VMs that a finding names.
const MAX_NAMED_VMS: usize = 4;

impl Rulebook {
    /// The service that a guest calls, if it calls the host at a port where one of its domain is.
    pub(super) fn service_called(&self, from: &str, to: &str, port: u32) -> Option<&Service> {
        if to != "host" || from == "host" || from.contains(':') {
            return None;
        }
        let (domain, _) = parse_full_name("a VM", from).ok()?;
        let mut services = self.services.iter().map(|service| &service.value);
        services.find(|service| service.domain == domain && service.port == port)
    }

    /// The service that is named, or that a guest calls.
    pub fn service_meant(&self, from: &str, to: &str, port: u32) -> Option<&Service> {
        match to.strip_prefix("service:").map(|name| self.service(name)) {
            Some(Ok(To::Service(service))) => Some(service),
            Some(_) => None,
            None => self.service_called(from, to, port),
        }
    }

    /// Corrects what the rules alone would say.
    pub(super) fn keep_to_ways(
        &self,
        answer: &mut PolicyAnswer,
        decision: &Decision<'_>,
        caller: &From<'_>,
        (callee, port): (&To<'_>, u32),
    ) {
        if let (From::Vm(_), To::Listener, true) = (caller, callee, is_own_port(port)) {
            answer.verdict = PolicyVerdict::Allowed;
            (answer.rule, answer.redirect) = (None, None);
            answer.why = format!(
                "port {port} of the host is the daemon's own, and every guest may call it, whatever the rules say"
            );
            return;
        }
        if let To::Service(service) = callee {
            if service.port != port {
                answer.verdict = PolicyVerdict::Denied;
                (answer.rule, answer.redirect) = (None, None);
                answer.why = format!(
                    "the service {:?} is called at port {}, and no call to another port reaches it",
                    service.full_name(),
                    service.port
                );
                return;
            }
        }
        if let (From::Vm(line), To::Listener | To::Service(_)) = (caller, callee) {
            self.keep_to_offers(answer, line, (callee, port));
        }
        let obstacle = self.obstacle(decision, caller, (callee, port));
        match (obstacle, answer.verdict, decision.rule) {
            // What no rule can change comes first.
            (Some(obstacle), PolicyVerdict::Denied, None) => {
                answer.why = format!("{obstacle}; besides, {}", answer.why);
            }
            (None, ..) | (_, PolicyVerdict::Denied, _) => {}
            (Some(obstacle), ..) => {
                answer.verdict = PolicyVerdict::Denied;
                answer.redirect = None;
                answer.why = format!(
                    "{obstacle}; the rules alone would not refuse it: {}",
                    answer.why
                );
            }
        }
    }

    /// What a hybrid VM calls of the host comes to the daemon only where it listens for that. Elsewhere the VMM finds whatever program listens there.
    fn keep_to_offers(
        &self,
        answer: &mut PolicyAnswer,
        line: &LineSpec,
        (callee, port): (&To<'_>, u32),
    ) {
        let Some(path) = vmm_path(line, port) else {
            return;
        };
        let path = path.display();
        if self.offered_to(line).ports.contains(&port) {
            if answer.verdict == PolicyVerdict::Denied {
                answer.notes.push(format!(
                    "this is refused by the daemon, which listens at {path}: a program that listened there before it keeps the socket, and is reached whatever the rules say"
                ));
            }
        } else if answer.rule.is_some() && matches!(callee, To::Listener) {
            answer.verdict = PolicyVerdict::Allowed;
            (answer.rule, answer.redirect) = (None, None);
            answer.why = format!(
                "{}, but the daemon offers nothing at this port and is not asked: the VMM connects to {path}, and reaches whatever program listens there",
                answer.why
            );
        }
    }

    fn offered_to(&self, line: &LineSpec) -> OfferedPorts {
        let services = self.services.iter().map(|service| &service.value);
        let services = services.filter(|service| service.domain == line.domain);
        let ports = services.map(|service| service.port);
        OfferedPorts::to(&line.as_caller(), ports, &self.policy)
    }

    /// Rules that deny hybrid VMs ports of the host at which the daemon does not listen for them.
    pub(super) fn denials_past_the_daemon(&self) -> Vec<Finding> {
        let hybrid = self.plan.lines().filter(|line| line.hybrid().is_some());
        let hybrid: Vec<(&LineSpec, OfferedPorts)> =
            hybrid.map(|line| (line, self.offered_to(line))).collect();
        let mut findings = Vec::new();
        let rules = self.policy.rules().iter().enumerate();
        for (index, rule) in rules.filter(|(_, rule)| denies_the_host(rule)) {
            let is_past = |(line, offered): &&(&LineSpec, OfferedPorts)| {
                let caller = line.as_caller();
                rule.from.iter().any(|pattern| pattern.covers(&caller)) && !has_all(offered, rule)
            };
            let mut names: Vec<String> = hybrid
                .iter()
                .filter(is_past)
                .map(|(line, _)| format!("{:?}", line.full_name()))
                .collect();
            let Some(written) = self.rules.get(index).filter(|_| !names.is_empty()) else {
                continue;
            };
            if let Some(more) = names
                .len()
                .checked_sub(MAX_NAMED_VMS)
                .filter(|more| *more > 0)
            {
                names.truncate(MAX_NAMED_VMS);
                names.push(format!("{more} more"));
            }
            let message = format!(
                "rule {} denies hybrid VMs ports of the host at which the daemon does not listen for them, and their VMMs do not ask it there ({})",
                self.rule(index as u32).words(),
                names.join(", ")
            );
            let remedy = "keep programs from listening at the sockets beside the VMM's, PATH_PORT: only the directory's mode holds these";
            findings.push(Found::new(FindingKind::NotHeld, message, remedy).at(written));
        }
        findings
    }

    /// Why a call fails although a rule lets it pass, if it does.
    fn obstacle(
        &self,
        decision: &Decision<'_>,
        caller: &From<'_>,
        (callee, port): (&To<'_>, u32),
    ) -> Option<Cow<'static, str>> {
        if matches!(callee, To::Address(_) | To::Name(_)) {
            // Egress asks the rules alone.
            return None;
        }
        let redirect = match decision.rule {
            Some((_, Verdict::Redirect(redirect))) => Some(redirect),
            _ => None,
        };
        let (reached, at) = match (redirect, callee) {
            (
                Some(Redirect::Vm {
                    domain,
                    name,
                    port: to,
                }),
                _,
            ) => (self.plan.find(domain, name), to.unwrap_or(port)),
            (None, To::Vm(line)) => (Some(*line), port),
            _ => (None, port),
        };
        match (caller, redirect, callee) {
            (From::Vm(from), _, _)
                if reached.is_some_and(|line| line.full_name() == from.full_name()) =>
            {
                Some("no rule lets a VM call itself".into())
            }
            (From::Vm(from), _, To::Vm(_)) if from.host_only_kind().is_some() => {
                let kind = from.host_only_kind()?;
                Some(format!("no call by CID leaves a guest whose line is {kind}, except to its host").into())
            }
            (From::Vm(from), None, To::Service(service)) if service.domain != from.domain => Some(
                "a guest calls services of its own domain, and others only where a rule redirects a port of the host to them".into(),
            ),
            (From::Program { .. } | From::Host, Some(Redirect::Service { .. }), _) => {
                Some("programs of the host, and published ports, call VMs only".into())
            }
            _ => reached
                .is_some_and(|line| is_agent_only(line, at))
                .then(|| Reason::AgentOnly.to_string().into()),
        }
    }
}

/// Whether the guest refuses calls to this port, since its line carries those to its agent alone.
pub(super) fn is_agent_only(line: &LineSpec, port: u32) -> bool {
    line.serial().is_some() && port != wire::agent::PORT
}

/// Where the VMM of a hybrid VM connects when its guest calls this port of the host.
fn vmm_path(line: &LineSpec, port: u32) -> Option<PathBuf> {
    let mut path = line.hybrid()?.as_os_str().to_owned();
    path.push(format!("_{port}"));
    Some(path.into())
}

/// Whether a rule is a denial that names the host, rather than all callees.
fn denies_the_host(rule: &Rule) -> bool {
    let is_any =
        |pattern: &CalleePattern| matches!(pattern, CalleePattern::Vms(VmPattern::Any { .. }));
    let mut to = rule.to.iter();
    rule.verdict == Verdict::Deny
        && to.any(|pattern| pattern.covers(&Callee::Listener))
        && !rule.to.iter().any(is_any)
}

/// Whether all ports of a rule are offered.
fn has_all(offered: &OfferedPorts, rule: &Rule) -> bool {
    // It ends at the first that is not.
    let mut ports = rule.ports.iter().flat_map(|range| range.clone());
    !rule.ports.is_empty() && ports.all(|port| offered.ports.contains(&port) || is_own_port(port))
}
