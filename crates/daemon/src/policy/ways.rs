//! Where a call can lead at all: what no rule opens, and what none closes.

use switch::{Decision, Redirect, Verdict, is_own_port};

use super::Rulebook;
use super::answer::{From, To};
use crate::api::types::{PolicyAnswer, PolicyVerdict};
use crate::config::Service;
use crate::input::parse_full_name;

impl Rulebook {
    /// The service that a guest calls, if it calls the host at a port where one of its domain is.
    pub fn service_called(&self, from: &str, to: &str, port: u32) -> Option<&Service> {
        if to != "host" || from == "host" || from.contains(':') {
            return None;
        }
        let (domain, _) = parse_full_name("a VM", from).ok()?;
        let mut services = self.services.iter().map(|service| &service.value);
        services.find(|service| service.domain == domain && service.port == port)
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
        let obstacle = self.obstacle(decision, caller, callee);
        if let Some(obstacle) = obstacle.filter(|_| answer.verdict != PolicyVerdict::Denied) {
            answer.verdict = PolicyVerdict::Denied;
            answer.redirect = None;
            answer.why = format!("{}, but {obstacle}", answer.why);
        }
    }

    /// Why a call fails although a rule lets it pass, if it does.
    fn obstacle(
        &self,
        decision: &Decision<'_>,
        caller: &From<'_>,
        callee: &To<'_>,
    ) -> Option<&'static str> {
        let redirect = match decision.rule {
            Some((_, Verdict::Redirect(redirect))) => Some(redirect),
            _ => None,
        };
        let reached = match (redirect, callee) {
            (Some(Redirect::Vm { domain, name, .. }), _) => self.plan.find(domain, name),
            (None, To::Vm(line)) => Some(*line),
            _ => None,
        };
        match (caller, redirect, callee) {
            (From::Vm(from), _, _)
                if reached.is_some_and(|line| line.full_name() == from.full_name()) =>
            {
                Some("no rule lets a VM call itself")
            }
            (From::Vm(from), None, To::Service { domain, .. }) if *domain != from.domain => Some(
                "a guest calls services of its own domain, and others only where a rule redirects a port of the host to them",
            ),
            (From::Program { .. } | From::Host, Some(Redirect::Service { .. }), _) => {
                Some("programs of the host, and published ports, call VMs only")
            }
            _ => None,
        }
    }
}
