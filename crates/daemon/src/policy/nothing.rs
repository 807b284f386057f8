//! Rules that open nothing by what they say themselves: a service at a port that is not its own, a name of `[hosts]` at a port for which it is not
//! listed, a VM that is to call itself, a VM whose line does not carry such calls.

use api::{Finding, FindingKind};
use config::{LineSpec, full_name};
use policy::{
    CalleePattern, CallerPattern, NamePattern, Redirect, Rule, Verdict, VmPattern, is_own_port,
};

use super::Rulebook;
use super::findings::Found;

impl Rulebook {
    /// A finding for each such pattern of a rule, and for each rule about a VM's calls to itself alone.
    pub(super) fn opens_nothing(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        // With names for aliases.
        let rules = self.policy.rules().iter().zip(&self.rules);
        for ((rule, written), index) in rules.zip(0..) {
            let words = self.rule(index).words();
            let at_services = rule.to.iter().filter_map(|to| self.not_at_port(to, rule));
            for (what, ports) in at_services {
                let (kind, does) = match rule.verdict {
                    Verdict::Deny => (FindingKind::Unreachable, "never matches calls to"),
                    _ => (FindingKind::NotOpened, "does not open"),
                };
                let message = format!("rule {words} {does} {what}, which is called at {ports}");
                let remedy = "correct the port in the rule, or leave it out";
                findings.push(Found::new(kind, message, remedy).at(written));
            }
            if rule.verdict == Verdict::Allow {
                let names = rule.to.iter().filter_map(|to| self.not_listed(to, rule));
                for name in names {
                    let listed = self.hosts.ports_words(name);
                    let message = format!("rule {words} does not open {name:?}: {listed}");
                    let remedy = "correct the port in the rule, or in [hosts]";
                    findings.push(Found::new(FindingKind::NotOpened, message, remedy).at(written));
                }
            }
            if let Some(vm) = calls_itself(rule) {
                let message =
                    format!("rule {words} opens nothing: no rule lets a VM call itself ({vm:?})");
                let remedy = "correct a name, or remove the rule";
                findings.push(Found::new(FindingKind::NotOpened, message, remedy).at(written));
            }
            if let Some((nothing, remedy)) = self.not_carried(rule) {
                let message = format!("rule {words} {nothing}");
                findings.push(Found::new(FindingKind::NotOpened, message, remedy).at(written));
            }
        }
        findings
    }

    /// What the line of a VM that the rule names does not carry, and the remedy.
    fn not_carried(&self, rule: &Rule) -> Option<(String, String)> {
        if rule.verdict == Verdict::Deny {
            return None;
        }
        if let Verdict::Redirect(Redirect::Vm { domain, name, port }) = &rule.verdict {
            let line = self.plan.find(domain, name);
            if let Some(line) =
                line.filter(|line| line.serial().is_some() && !port.is_some_and(is_own_port))
            {
                let nothing = format!(
                    "leads to {:?}: {}",
                    line.full_name(),
                    agent_only_words(line)
                );
                let remedy = "lead it to a VM with another line, or publish a port of the guest with \"tcp:\" or \"unix:\"";
                return Some((nothing, remedy.to_owned()));
            }
        }
        let is_vm = |to: &CalleePattern| matches!(to, CalleePattern::Vms(_));
        let calls_vms = !rule.to.is_empty() && rule.to.iter().all(is_vm);
        let from = rule.from.iter().filter_map(|from| match from {
            CallerPattern::Vms(VmPattern::One { domain, name }) => self.plan.find(domain, name),
            _ => None,
        });
        let host_only = from
            .filter_map(|line| Some((line, line.host_only_kind()?)))
            .next();
        if let (Some((line, kind)), true) = (host_only, calls_vms) {
            let nothing = format!(
                "opens nothing to {:?}: its line is {kind}, so its guest calls its host alone",
                line.full_name()
            );
            let remedy = "name the host in \"to\", with a port and a redirection to the VM";
            return Some((nothing, remedy.to_owned()));
        }
        if rule.verdict != Verdict::Allow {
            return None;
        }
        let mut to = rule.to.iter().filter_map(|to| match to {
            CalleePattern::Vms(VmPattern::One { domain, name }) => self.plan.find(domain, name),
            _ => None,
        });
        let line = to.find(|line| line.serial().is_some() && !opens_the_agent(rule))?;
        let nothing = format!(
            "opens nothing of {:?}: {}",
            line.full_name(),
            agent_only_words(line)
        );
        let remedy = format!(
            "publish \"{0}:tcp:PORT\" or \"{0}:unix:PATH\", or use `ringdown forward`: in rules both are calls of the host to port {1}",
            line.full_name(),
            wire::agent::PORT
        );
        Some((nothing, remedy))
    }

    /// Services that a pattern names, if none of them is called at a port of the rule, and where they are called.
    fn not_at_port(&self, to: &CalleePattern, rule: &Rule) -> Option<(String, String)> {
        let CalleePattern::Service { domain, name } = to else {
            return None;
        };
        let what = match name {
            NamePattern::Any => return None,
            NamePattern::Exact(name) => full_name(domain, name),
            NamePattern::Prefix(start) => full_name(domain, &format!("{start}*")),
            NamePattern::Suffix(end) => full_name(domain, &format!("*{end}")),
        };
        let services = self.services.iter().map(|service| &service.value);
        let meant = services.filter(|of| of.domain == *domain && name.covers(&of.name));
        let ports = meant.map(|service| service.port);
        Some((format!("service:{what}"), other_ports(ports, rule)?))
    }

    /// A name that a pattern names, if `[hosts]` lists it and for no port of the rule.
    fn not_listed<'a>(&self, to: &'a CalleePattern, rule: &Rule) -> Option<&'a str> {
        let CalleePattern::Name(NamePattern::Exact(name)) = to else {
            return None;
        };
        let listed = self.hosts.get(name)?.iter();
        let ports: Option<Vec<u32>> = listed.map(|of| of.port.map(u32::from)).collect();
        other_ports(ports?.into_iter(), rule).map(|_| name.as_str())
    }
}

/// Some ports in words, if there are any and the rule is about none of them.
fn other_ports(ports: impl Iterator<Item = u32>, rule: &Rule) -> Option<String> {
    let ports: Vec<u32> = ports.collect();
    let is_meant = |port| rule.ports.is_empty() || rule.ports.iter().any(|of| of.contains(port));
    if ports.is_empty() || ports.iter().any(is_meant) {
        return None;
    }
    let words: Vec<String> = ports.iter().take(4).map(u32::to_string).collect();
    Some(format!("port {}", words.join(", ")))
}

/// Why calls to a serial VM are refused.
pub(super) fn agent_only_words(line: &LineSpec) -> String {
    let name = line.full_name();
    format!("the line of {name:?} is serial, and nothing of its guest but its agent can be called")
}

/// Whether a rule is about calls of programs to agents.
fn opens_the_agent(rule: &Rule) -> bool {
    let is_program = |from: &CallerPattern| {
        matches!(
            from,
            CallerPattern::Host | CallerPattern::User(_) | CallerPattern::UserGroup(_)
        )
    };
    let mut ports = rule.ports.iter();
    rule.from.iter().any(is_program)
        && (rule.ports.is_empty() || ports.any(|of| of.contains(&wire::agent::PORT)))
}

/// The VM of a rule that is about its calls to itself and nothing else.
fn calls_itself(rule: &Rule) -> Option<String> {
    let [CallerPattern::Vms(VmPattern::One { domain, name })] = rule.from.as_slice() else {
        return None;
    };
    let is_itself = |of: &String, called: &String| (of, called) == (domain, name);
    let is_so = match &rule.verdict {
        Verdict::Redirect(Redirect::Vm { domain, name, .. }) => is_itself(domain, name),
        Verdict::Allow => !rule.to.is_empty()
            && rule.to.iter().all(
                |to| matches!(to, CalleePattern::Vms(VmPattern::One { domain, name }) if is_itself(domain, name)),
            ),
        _ => false,
    };
    is_so.then(|| full_name(domain, name))
}
