//! What a rulebook says that can hardly be meant: rules that never match, names that do not exist, groups without members.

use std::collections::BTreeSet;

use switch::{
    Callee, CalleePattern, CallerPattern, NamePattern, Redirect, Rule, Verdict, is_own_port,
};

use super::Rulebook;
use crate::api::types::{Finding, FindingKind, PolicyReport};
use crate::config::{ServiceTarget, Written, full_name};
use crate::input::nearest;

/// The most findings that are told.
pub const MAX_FINDINGS: usize = 1000;

/// Why no other caller is let through there.
const OWN_PORTS_ARE: &str = "ports 1005 to 1007 of a VM are for programs of its host that call them directly (its agent is at 1007)";

/// The most rules that a finding names as those which cover another together.
const MAX_NAMED_RULES: usize = 4;

impl Rulebook {
    /// What a person is told who asks for a check.
    pub fn report(&self) -> PolicyReport {
        PolicyReport {
            rules: self.rules.len(),
            findings: self.check(),
        }
    }

    /// Looks for what can hardly be meant. At most [`MAX_FINDINGS`].
    pub fn check(&self) -> Vec<Finding> {
        let mut findings = self.unreachable();
        findings.extend(self.check_names());
        findings.truncate(MAX_FINDINGS);
        findings
    }

    /// The same without what takes long to find out: rules that never match.
    pub fn check_names(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for rule in &self.rules {
            for (kind, message) in self.names_of_nobody(&rule.value) {
                findings.push(finding(kind, rule, message));
            }
        }
        findings.extend(self.own_ports());
        findings.extend(self.groups_of_nobody());
        findings.extend(self.offers_to_nobody());
        findings.truncate(MAX_FINDINGS);
        findings
    }

    pub(super) fn nearest_vm(&self, name: &str) -> Option<String> {
        let names: Vec<String> = self
            .plan
            .lines()
            .flat_map(|line| {
                let aliases = line
                    .aliases
                    .iter()
                    .map(|alias| full_name(&line.domain, alias));
                std::iter::once(line.full_name()).chain(aliases)
            })
            .collect();
        nearest_name(name, &names)
    }

    pub(super) fn nearest_service(&self, name: &str) -> Option<String> {
        let services = self.services.iter();
        let names: Vec<String> = services.map(|service| service.value.full_name()).collect();
        nearest_name(name, &names)
    }

    /// Rules that never match, because those before them match whatever they would.
    fn unreachable(&self) -> Vec<Finding> {
        let told = self.policy.unreachable().into_iter().filter_map(|found| {
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
                "rule {} never matches: {earlier} {verb} everything that it would; remove it, or move it up",
                self.rule(found.rule.0).words()
            );
            Some(finding(FindingKind::Unreachable, rule, message))
        });
        told.collect()
    }

    /// Rules and published ports that are to lead where only a VM's host gets.
    fn own_ports(&self) -> Vec<Finding> {
        let of_rules = self.rules.iter().enumerate().filter_map(|(index, rule)| {
            let ports = rule.value.own_ports_named();
            let ports: Vec<String> = ports.iter().map(u32::to_string).collect();
            let name = self.rule(index as u32).words();
            let message = format!(
                "rule {name} names port {}, which no call by it reaches: {OWN_PORTS_ARE}; leave it out",
                ports.join(", ")
            );
            (!ports.is_empty()).then(|| finding(FindingKind::OwnPort, rule, message))
        });
        let of_publishes = self.publishes.iter().filter_map(|publish| {
            let (name, to) = (&publish.value.name, &publish.value.to);
            let message = format!(
                "the published port {name:?} leads to port {} of {:?} and every call is refused: {OWN_PORTS_ARE}; publish another port",
                to.port,
                to.full_name()
            );
            is_own_port(to.port).then(|| finding(FindingKind::OwnPort, publish, message))
        });
        of_rules.chain(of_publishes).collect()
    }

    fn names_of_nobody(&self, rule: &Rule) -> Vec<(FindingKind, String)> {
        let mut found = Vec::new();
        for pattern in &rule.from {
            match pattern {
                CallerPattern::Vm { domain, name } => found.extend(self.no_vm(domain, name)),
                CallerPattern::Group { domain, name } => found.extend(self.no_group(domain, name)),
                _ => {}
            }
        }
        for pattern in &rule.to {
            match pattern {
                CalleePattern::Vm { domain, name } => found.extend(self.no_vm(domain, name)),
                CalleePattern::Group { domain, name } => found.extend(self.no_group(domain, name)),
                CalleePattern::Service { domain, name } => {
                    found.extend(self.no_service(domain, name));
                }
                CalleePattern::Network(_) | CalleePattern::Name(_) => {}
                _ => {}
            }
        }
        match &rule.verdict {
            Verdict::Redirect(Redirect::Vm { domain, name, .. }) => {
                found.extend(self.no_vm(domain, name));
            }
            Verdict::Redirect(Redirect::Service { domain, name }) => {
                found.extend(self.no_service(domain, &NamePattern::Exact(name.clone())));
            }
            _ => {}
        }
        found
    }

    fn no_vm(&self, domain: &str, name: &str) -> Option<(FindingKind, String)> {
        if self.plan.find(domain, name).is_some() {
            return None;
        }
        let name = full_name(domain, name);
        let meant = did_you_mean(self.nearest_vm(&name));
        let message =
            format!("there is no VM named {name:?}{meant}; the rule holds for it once it is added");
        Some((FindingKind::UnknownVm, message))
    }

    fn no_group(&self, domain: &str, name: &str) -> Option<(FindingKind, String)> {
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
            let message = format!("no VM is in the group {name:?}, so nobody is meant by it");
            return Some((FindingKind::EmptyGroup, message));
        }
        let groups: BTreeSet<String> = self
            .plan
            .lines()
            .flat_map(|line| {
                line.groups
                    .iter()
                    .map(|group| full_name(&line.domain, group))
            })
            .chain(
                self.groups
                    .iter()
                    .map(|group| full_name(&group.value.domain, &group.value.name)),
            )
            .collect();
        let groups: Vec<String> = groups.into_iter().collect();
        let meant = did_you_mean(nearest_name(&name, &groups));
        let message = format!("there is no group named {name:?}{meant}");
        Some((FindingKind::UnknownGroup, message))
    }

    fn no_service(&self, domain: &str, pattern: &NamePattern) -> Option<(FindingKind, String)> {
        let mut services = self.services.iter().map(|service| &service.value);
        if services.any(|service| service.domain == domain && pattern.covers(&service.name)) {
            return None;
        }
        let message = match pattern {
            NamePattern::Exact(name) => {
                let name = full_name(domain, name);
                let meant = did_you_mean(self.nearest_service(&name));
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
        Some((FindingKind::UnknownService, message))
    }

    /// Groups that were written down with members that do not exist, or without any.
    fn groups_of_nobody(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for group in &self.groups {
            let name = full_name(&group.value.domain, &group.value.name);
            if group.value.members.is_empty() {
                let message = format!("the group {name:?} has no members");
                findings.push(finding(FindingKind::EmptyGroup, group, message));
            }
            for member in &group.value.members {
                if self.plan.find(&group.value.domain, member).is_none() {
                    let member = full_name(&group.value.domain, member);
                    let meant = did_you_mean(self.nearest_vm(&member));
                    let message = format!(
                        "the group {name:?} has a member {member:?}, and there is no VM of this name{meant}"
                    );
                    findings.push(finding(FindingKind::UnknownVm, group, message));
                }
            }
        }
        findings
    }

    /// Services that no rule lets anybody call, and published ports of VMs that do not exist.
    fn offers_to_nobody(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut egress = None;
        for written in &self.services {
            let service = &written.value;
            if service.target == ServiceTarget::Egress {
                egress = Some(written);
            }
            let callee = Callee::Service {
                domain: &service.domain,
                name: &service.name,
            };
            if !self.rules.iter().any(|rule| opens(&rule.value, &callee)) {
                let name = service.full_name();
                let message = format!(
                    "no rule lets anybody call the service {name:?}: add one with to = \"service:{name}\""
                );
                findings.push(finding(FindingKind::Unused, written, message));
            }
        }
        let beyond = |rule: &Written<Rule>| {
            let is_address = |pattern: &CalleePattern| {
                matches!(pattern, CalleePattern::Network(_) | CalleePattern::Name(_))
            };
            rule.value.verdict == Verdict::Allow && rule.value.to.iter().any(is_address)
        };
        match (egress, self.rules.iter().find(|rule| beyond(rule))) {
            (Some(service), None) => {
                let message = "nothing is reached through egress: no rule allows a \"name:…\" or an \"address:…\"";
                findings.push(finding(FindingKind::Unused, service, message.to_owned()));
            }
            (None, Some(rule)) => {
                let message = "there is no egress service through which the address could be reached: add a [[service]] with egress = true";
                findings.push(finding(
                    FindingKind::UnknownService,
                    rule,
                    message.to_owned(),
                ));
            }
            _ => {}
        }
        for publish in &self.publishes {
            let to = &publish.value.to;
            if self.plan.find(&to.domain, &to.vm).is_none() {
                let meant = did_you_mean(self.nearest_vm(&to.full_name()));
                let message = format!(
                    "the published port {:?} leads to the VM {:?}, and there is none of this name{meant}",
                    publish.value.name,
                    to.full_name()
                );
                findings.push(finding(FindingKind::UnknownVm, publish, message));
            }
        }
        findings
    }
}

/// Whether a rule lets somebody call this callee.
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

fn finding<T>(kind: FindingKind, written: &Written<T>, message: String) -> Finding {
    Finding {
        kind,
        place: written.place.clone(),
        message,
    }
}

fn nearest_name(name: &str, names: &[String]) -> Option<String> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    nearest(name, &names).map(str::to_owned)
}

fn did_you_mean(nearest: Option<String>) -> String {
    nearest
        .map(|name| format!(" (did you mean {name:?}?)"))
        .unwrap_or_default()
}
