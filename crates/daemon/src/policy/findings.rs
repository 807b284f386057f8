//! What a rulebook says that can hardly be meant: rules that never match, names that do not exist, groups without members.

use std::cell::Cell;

use api::{Finding, FindingKind, PolicyReport};
use config::input::did_you_mean;
use config::{GuestPort, Publish, ServiceTarget, Written, full_name};
use policy::{
    Callee, CalleePattern, Caller, CallerPattern, NamePattern, Redirect, Rule, Unreachable,
    Verdict, VmPattern, is_own_port,
};

use super::Rulebook;
use super::meant::Stands;
use super::nothing::agent_only_words;
use super::ways::is_agent_only;

/// The most findings shown.
pub const MAX_FINDINGS: usize = 1000;

/// The most unknown names with a suggestion each: it compares the name with every other.
pub(super) const MAX_SUGGESTIONS: usize = 10;

/// The most rules that are compared with each other whenever a configuration comes into force: it takes some milliseconds.
const MAX_RULES_AT_ONCE: usize = 2000;

/// Why no other caller is let through there.
const OWN_PORTS_ARE: &str = "ports 1005 to 1007 of a VM are for programs of its host that call them directly (its agent is at 1007)";

/// The most rules that a finding names as those which cover another together.
const MAX_NAMED_RULES: usize = 4;

impl Rulebook {
    /// What a person gets from a check.
    pub fn report(&self) -> PolicyReport {
        PolicyReport {
            rules: self.rules.len(),
            findings: self.check(),
        }
    }

    /// Looks for what can hardly be meant. At most [`MAX_FINDINGS`].
    pub fn check(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let not_opened = self.not_opened();
        for found in self.policy.unreachable() {
            if !not_opened.contains_key(&found.rule.0) {
                findings.extend(self.unreachable(&found));
            }
        }
        findings.extend(not_opened.into_values());
        findings.extend(self.denials_past_the_daemon());
        findings.extend(self.check_names());
        findings.truncate(MAX_FINDINGS);
        findings
    }

    /// The same when a configuration comes into force: of more than [`MAX_RULES_AT_ONCE`] rules without what takes long to find out.
    pub fn check_at_once(&self) -> Vec<Finding> {
        match self.rules.len() <= MAX_RULES_AT_ONCE {
            true => self.check(),
            false => self.check_names(),
        }
    }

    /// What is found by checking each rule, service and published port by itself.
    pub(super) fn check_names(&self) -> Vec<Finding> {
        let suggestions = Suggestions::default();
        let of_rules = self.rules.iter().flat_map(|rule| {
            let found = self.names_of_nobody(&rule.value, &suggestions);
            found.map(|found| found.at(rule))
        });
        let mut findings: Vec<Finding> = of_rules.take(MAX_FINDINGS).collect();
        let others: [&dyn Fn() -> Vec<Finding>; 6] = [
            &|| self.own_ports(),
            &|| self.opens_nothing(),
            &|| self.groups_of_nobody(&suggestions),
            &|| self.offers_to_nobody(&suggestions),
            &|| self.listed_for_nobody(),
            &|| self.nearly_listed(&suggestions),
        ];
        for other in others {
            if findings.len() < MAX_FINDINGS {
                findings.extend(other());
            }
        }
        findings.truncate(MAX_FINDINGS);
        findings
    }

    fn unreachable(&self, found: &Unreachable) -> Option<Finding> {
        let rule = self.rules.get(found.rule.0 as usize)?;
        let earlier: Vec<String> = std::iter::once(&found.covered_by)
            .chain(&found.together_with)
            .take(MAX_NAMED_RULES)
            .map(|by| self.rule(by.0).words())
            .collect();
        let (earlier, verb) = match earlier.as_slice() {
            [one] => (format!("rule {one}"), "comes before it and matches"),
            several => (
                format!("rules {}", several.join(" and ")),
                "come before it and together match",
            ),
        };
        let message = format!(
            "rule {} never matches: {earlier} {verb} everything that it would",
            self.rule(found.rule.0).words()
        );
        let remedy = "remove it, or move it up";
        Some(Found::new(FindingKind::Unreachable, message, remedy).at(rule))
    }

    /// Rules that are to lead where only a VM's host gets.
    fn own_ports(&self) -> Vec<Finding> {
        let found = self.rules.iter().enumerate().filter_map(|(index, rule)| {
            let ports = rule.value.own_ports_named();
            let ports: Vec<String> = ports.iter().map(u32::to_string).collect();
            let name = self.rule(index as u32).words();
            let message = format!(
                "rule {name} names port {}, which no call by it reaches: {OWN_PORTS_ARE}",
                ports.join(", ")
            );
            let remedy = "leave the port out of the rule";
            (!ports.is_empty()).then(|| Found::new(FindingKind::OwnPort, message, remedy).at(rule))
        });
        found.collect()
    }

    fn names_of_nobody<'a>(
        &'a self,
        rule: &'a Rule,
        suggestions: &'a Suggestions,
    ) -> impl Iterator<Item = Found> + use<'a> {
        let callers = rule.from.iter().filter_map(|pattern| match pattern {
            CallerPattern::Vms(VmPattern::One { domain, name }) => {
                self.no_vm(domain, name, Stands::From, suggestions)
            }
            CallerPattern::Vms(VmPattern::Group { domain, name }) => {
                self.no_group(domain, name, suggestions)
            }
            _ => None,
        });
        let callees = rule.to.iter().filter_map(|pattern| match pattern {
            CalleePattern::Vms(VmPattern::One { domain, name }) => {
                self.no_vm(domain, name, Stands::To, suggestions)
            }
            CalleePattern::Vms(VmPattern::Group { domain, name }) => {
                self.no_group(domain, name, suggestions)
            }
            CalleePattern::Service { domain, name } => self.no_service(domain, name, suggestions),
            _ => None,
        });
        let redirect = std::iter::once_with(|| match &rule.verdict {
            Verdict::Redirect(Redirect::Vm { domain, name, .. }) => {
                self.no_vm(domain, name, Stands::Vm, suggestions)
            }
            Verdict::Redirect(Redirect::Service { domain, name }) => {
                let name = NamePattern::Exact(name.clone());
                self.no_service(domain, &name, suggestions)
            }
            _ => None,
        });
        callers.chain(callees).chain(redirect.flatten())
    }

    fn no_vm(
        &self,
        domain: &str,
        name: &str,
        stands: Stands,
        suggestions: &Suggestions,
    ) -> Option<Found> {
        if self.plan.find(domain, name).is_some() {
            return None;
        }
        let meant = suggestions.next(|| self.meant(domain, name, stands));
        let name = full_name(domain, name);
        let message = format!("there is no VM named {name:?}{meant}");
        let remedy = "correct the name, or add the VM: the rule holds for it then";
        Some(Found::new(FindingKind::UnknownVm, message, remedy))
    }

    fn no_group(&self, domain: &str, name: &str, suggestions: &Suggestions) -> Option<Found> {
        let mut lines = self.plan.lines().filter(|line| line.domain == domain);
        if lines.any(|line| line.groups.iter().any(|group| group == name)) {
            return None;
        }
        let is_declared = self
            .groups
            .iter()
            .any(|group| group.value.domain == domain && group.value.name == name);
        let name = full_name(domain, name);
        if is_declared {
            let message = format!("no VM is in the group {name:?}, so the rule matches no VM");
            let remedy = "add members that exist to the group, or remove the rule";
            return Some(Found::new(FindingKind::EmptyGroup, message, remedy));
        }
        let meant = suggestions.next(|| self.nearest_group(&name));
        let message = format!("there is no group named {name:?}{meant}");
        let remedy = "correct the name, or put VMs into the group";
        Some(Found::new(FindingKind::UnknownGroup, message, remedy))
    }

    fn no_service(
        &self,
        domain: &str,
        pattern: &NamePattern,
        suggestions: &Suggestions,
    ) -> Option<Found> {
        let mut services = self.services.iter().map(|service| &service.value);
        if services.any(|service| service.domain == domain && pattern.covers(&service.name)) {
            return None;
        }
        let message = match pattern {
            NamePattern::Exact(name) => {
                let name = full_name(domain, name);
                let meant = suggestions.next(|| self.nearest_service(&name));
                format!("there is no service named {name:?}{meant}")
            }
            NamePattern::Prefix(start) => {
                let start = full_name(domain, start);
                format!("no service is named {:?}", format!("{start}*"))
            }
            NamePattern::Suffix(end) => {
                let end = full_name(domain, &format!("*{end}"));
                format!("no service is named {end:?}")
            }
            // Every service of a domain, also of one that has none yet.
            NamePattern::Any => return None,
        };
        let remedy = "correct the name, or add a [[service]] with this name";
        Some(Found::new(FindingKind::UnknownService, message, remedy))
    }

    /// Groups that were written down with members that do not exist, or without any.
    fn groups_of_nobody(&self, suggestions: &Suggestions) -> Vec<Finding> {
        let mut findings = Vec::new();
        for group in &self.groups {
            let name = full_name(&group.value.domain, &group.value.name);
            if group.value.members.is_empty() {
                let message = format!("the group {name:?} has no members");
                let remedy = "add members, or remove the group";
                findings.push(Found::new(FindingKind::EmptyGroup, message, remedy).at(group));
            }
            for member in &group.value.members {
                let domain = &group.value.domain;
                if self.plan.find(domain, member).is_none() {
                    let meant = suggestions.next(|| self.meant(domain, member, Stands::Vm));
                    let member = full_name(domain, member);
                    let message = format!(
                        "the group {name:?} has a member {member:?}, and there is no VM of this name{meant}"
                    );
                    let remedy = "correct the name, or add the VM: it is in the group then";
                    findings.push(Found::new(FindingKind::UnknownVm, message, remedy).at(group));
                }
            }
        }
        findings
    }

    /// Services that no rule lets a caller use, and published ports of VMs that do not exist.
    fn offers_to_nobody(&self, suggestions: &Suggestions) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut egress = None;
        for written in &self.services {
            let service = &written.value;
            if service.target == ServiceTarget::Egress {
                egress = Some(written);
            }
            let callee = service.as_callee();
            if !self.rules.iter().any(|rule| opens(&rule.value, &callee)) {
                let name = service.full_name();
                let message = format!("no rule allows calls to the service {name:?}");
                let remedy = format!(
                    "add a [[rule]] with from = \"VM\", to = \"service:{name}\" and action = \"allow\""
                );
                findings.push(Found::new(FindingKind::Unused, message, remedy).at(written));
            }
        }
        let mut beyond = self.rules.iter().filter(|rule| {
            let is_address = |pattern: &CalleePattern| {
                matches!(pattern, CalleePattern::Network(_) | CalleePattern::Name(_))
            };
            rule.value.verdict == Verdict::Allow && rule.value.to.iter().any(is_address)
        });
        // "any" is about addresses too, and means them only where there is egress.
        let is_any = |rule: &&Written<Rule>| {
            let mut to = rule.value.to.iter();
            to.any(|pattern| matches!(pattern, CalleePattern::Vms(VmPattern::Any { .. })))
        };
        let beyond = match egress {
            Some(_) => beyond.next(),
            None => beyond.find(|rule| !is_any(rule)),
        };
        match (egress, beyond) {
            (Some(service), None) => {
                let message =
                    "nothing is reached through egress: no rule allows a name or an address";
                let remedy = "add a [[rule]] with to = \"name:…\" or \"address:…\"";
                findings.push(Found::new(FindingKind::Unused, message, remedy).at(service));
            }
            (None, Some(rule)) => {
                let message =
                    "there is no egress service through which the address could be reached";
                let remedy = "add a [[service]] with egress = true";
                findings.push(Found::new(FindingKind::UnknownService, message, remedy).at(rule));
            }
            _ => {}
        }
        let published = self.publishes.iter();
        let in_vain = published.filter_map(|publish| self.published_in_vain(publish, suggestions));
        findings.extend(in_vain);
        findings
    }

    /// A published port by which no connection gets anywhere.
    fn published_in_vain(
        &self,
        publish: &Written<Publish>,
        suggestions: &Suggestions,
    ) -> Option<Finding> {
        let (name, to) = (&publish.value.name, &publish.value.to);
        let vm = to.full_name();
        let Some(line) = self.plan.find(&to.domain, &to.vm) else {
            let meant = suggestions.next(|| self.meant(&to.domain, &to.vm, Stands::Vm));
            let message = format!(
                "the published port {name:?} leads to the VM {vm:?}, and there is none of this name{meant}"
            );
            let remedy =
                "correct the name in its \"to\", or add the VM: calls are refused until then";
            return Some(Found::new(FindingKind::UnknownVm, message, remedy).at(publish));
        };
        let callee = line.as_callee();
        let port = to.port.called();
        // Its own ports have a finding of their own.
        if is_agent_only(line, port) && !is_own_port(port) {
            let message = format!(
                "the published port {name:?} leads to port {port} of {vm:?} and every call is refused: {}",
                agent_only_words(line)
            );
            let remedy = format!(
                "publish \"{vm}:tcp:PORT\" or \"{vm}:unix:PATH\", to which the guest's agent connects"
            );
            return Some(Found::new(FindingKind::Unused, message, remedy).at(publish));
        }
        let callers = self.policy.callers(&Caller::Published);
        let callees = self.policy.callees(&callee);
        let (rule, verdict) = self.policy.decide(&callers, &callees, port).rule?;
        let is_refused = match (verdict, &to.port) {
            (Verdict::Deny, _) => true,
            (Verdict::Redirect(to), GuestPort::Agent(_)) => {
                let Redirect::Vm { domain, name, port } = to else {
                    return None;
                };
                (domain, name) != (&line.domain, &line.name)
                    || port.is_some_and(|port| port != wire::agent::PORT)
            }
            _ => false,
        };
        let rule = self.rule(rule.0).words();
        let message = format!(
            "no connection to the published port {name:?} gets to {vm}:{}: rule {rule} is about its calls of port {port} of {vm:?}, and stands in the way",
            to.port
        );
        let remedy = format!(
            "put a [[rule]] before it with from = \"host\", to = \"{vm}\", port = {port} and action = \"allow\""
        );
        is_refused.then(|| Found::new(FindingKind::Unused, message, remedy).at(publish))
    }
}

/// Whether a rule opens this callee to a caller.
fn opens(rule: &Rule, callee: &Callee<'_>) -> bool {
    let redirected = match (&rule.verdict, callee) {
        (
            Verdict::Redirect(Redirect::Service { domain, name }),
            Callee::Service {
                domain: of,
                name: called,
            },
        ) => domain == of && name == called,
        _ => false,
    };
    redirected
        || rule.verdict == Verdict::Allow && rule.to.iter().any(|pattern| pattern.covers(callee))
}

/// What may be meant by the first unknown names.
#[derive(Default)]
pub(super) struct Suggestions {
    given: Cell<usize>,
}

impl Suggestions {
    /// What a message says after the next such name.
    fn next(&self, meant: impl FnOnce() -> Option<String>) -> String {
        did_you_mean(&self.find(meant))
    }

    /// What may be meant by the next such name.
    pub(super) fn find(&self, meant: impl FnOnce() -> Option<String>) -> Option<String> {
        let given = self.given.get();
        if given == MAX_SUGGESTIONS {
            return None;
        }
        self.given.set(given + 1);
        meant()
    }
}

/// A finding that has no place yet.
pub(super) struct Found {
    kind: FindingKind,
    message: String,
    remedy: String,
}

impl Found {
    pub(super) fn new(
        kind: FindingKind,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Found {
        Found {
            kind,
            message: message.into(),
            remedy: remedy.into(),
        }
    }

    pub(super) fn at<T>(self, written: &Written<T>) -> Finding {
        // The place begins the line: the rule's words need not end with it.
        let place = format!(" ({})", written.place);
        Finding {
            kind: self.kind,
            place: written.place.clone(),
            message: self.message.replace(&place, ""),
            remedy: self.remedy,
        }
    }
}
