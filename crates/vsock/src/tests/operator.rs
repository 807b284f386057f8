//! The operator decides: by name, by rule, once for each call.

mod bytes;
mod decided;
mod domains;
mod figures;
mod limits;
mod own_ports;
mod redirect;
mod reload;
mod services;

use std::time::Duration;

use policy::{
    Address, CalleePattern, CallerPattern, DEFAULT_DOMAIN, LineId, NamePattern, Redirect, Rule,
    RuleLimits, Verdict, VmPattern,
};
use wire::vsock::SocketType;

use super::model::{Call, Plan, World, sleeps};
use crate::{Limits, Reason};

/// A full name, in its parts.
fn parts(name: &str) -> (String, String) {
    let (domain, name) = name.split_once('/').unwrap_or((DEFAULT_DOMAIN, name));
    (domain.to_owned(), name.to_owned())
}

/// `web`, `red/*`, `@group`, `host`, `user:7` or `users:8`.
fn caller(text: &str) -> CallerPattern {
    if let Some(uid) = text.strip_prefix("user:") {
        return CallerPattern::User(uid.parse().expect("a number"));
    }
    if let Some(gid) = text.strip_prefix("users:") {
        return CallerPattern::UserGroup(gid.parse().expect("a number"));
    }
    let (domain, name) = parts(text);
    match name.as_str() {
        "host" => CallerPattern::Host,
        "*" => CallerPattern::Vms(VmPattern::Any { domain }),
        _ => match name.strip_prefix('@') {
            Some(group) => CallerPattern::Vms(VmPattern::Group {
                domain,
                name: group.to_owned(),
            }),
            None => CallerPattern::Vms(VmPattern::One { domain, name }),
        },
    }
}

/// `db`, `red/*`, `@group`, `listeners`, `service:registry` or `service:git-*`.
fn callee(text: &str) -> CalleePattern {
    if let Some(service) = text.strip_prefix("service:") {
        let (domain, name) = parts(service);
        let name = match name.strip_suffix('*') {
            Some("") => NamePattern::Any,
            Some(start) => NamePattern::Prefix(start.to_owned()),
            None => NamePattern::Exact(name),
        };
        return CalleePattern::Service { domain, name };
    }
    let (domain, name) = parts(text);
    match name.as_str() {
        "listeners" => CalleePattern::Listeners,
        "*" => CalleePattern::Vms(VmPattern::Any { domain }),
        _ => match name.strip_prefix('@') {
            Some(group) => CalleePattern::Vms(VmPattern::Group {
                domain,
                name: group.to_owned(),
            }),
            None => CalleePattern::Vms(VmPattern::One { domain, name }),
        },
    }
}

pub(super) fn rule(from: &str, to: &str, verdict: Verdict) -> Rule {
    Rule {
        from: vec![caller(from)],
        to: vec![callee(to)],
        ports: Vec::new(),
        verdict,
        limits: RuleLimits::default(),
        label: format!("{from} to {to}"),
        is_named: true,
    }
}

pub(super) fn allow(from: &str, to: &str) -> Rule {
    rule(from, to, Verdict::Allow)
}

pub(super) fn deny(from: &str, to: &str) -> Rule {
    rule(from, to, Verdict::Deny)
}

/// To a VM, at the same port or at another, or to `service:registry`.
pub(super) fn redirect(from: &str, to: &str, target: &str, port: Option<u32>) -> Rule {
    let redirect = match target.strip_prefix("service:") {
        Some(service) => {
            let (domain, name) = parts(service);
            Redirect::Service { domain, name }
        }
        None => {
            let (domain, name) = parts(target);
            Redirect::Vm { domain, name, port }
        }
    };
    rule(from, to, Verdict::Redirect(redirect))
}

/// What a rule says besides its parties.
pub(super) trait Narrowed {
    fn at(self, port: u32) -> Self;
    fn within(self, limits: RuleLimits) -> Self;
}

impl Narrowed for Rule {
    fn at(mut self, port: u32) -> Rule {
        self.ports.push(port..=port);
        self
    }

    fn within(mut self, limits: RuleLimits) -> Rule {
        self.limits = limits;
        self
    }
}

/// A world with these VMs, given by full name and CID, all running, and these rules.
fn world_of(vms: &[(&str, u32)], rules: Vec<Rule>) -> (World, Vec<LineId>) {
    let mut world = World::new(Limits::default());
    world.set_rules(rules);
    let lines = vms.iter().map(|(name, cid)| add(&mut world, name, *cid));
    let lines = lines.collect();
    (world, lines)
}

fn add(world: &mut World, name: &str, cid: u32) -> LineId {
    let (domain, name) = parts(name);
    world.add_vm(Address {
        domain,
        ..Address::new(&name, cid)
    })
}

/// Each of these guests takes calls at this port, and its programs do this.
fn listen(world: &mut World, lines: &[LineId], port: u32, plan: Plan) {
    for line in lines {
        world.guest(*line).listen(port, SocketType::Stream, plan);
    }
}

/// What becomes of a call from a guest. A circuit that comes of it stays.
fn call(world: &mut World, line: LineId, cid: u32, port: u32) -> Result<u32, Reason> {
    let (before, start) = (world.reports.len(), world.now);
    let socket = world.connect_to(line, cid, port, sleeps());
    world.settle();
    if world.is_established(line, socket) {
        assert_eq!(world.reports.len(), before);
        return Ok(socket);
    }
    assert!(
        world.now - start < Duration::from_millis(2),
        "it is notified at once"
    );
    let reported = &world.reports[before..];
    assert_eq!(reported.len(), 1, "{reported:?}");
    Err(reported[0].2)
}

/// What becomes of a call from a program of the host.
fn call_guest(world: &mut World, line: LineId, port: u32) -> Result<u64, Reason> {
    let token = world.dial(line, port, SocketType::Stream, sleeps());
    world.settle();
    match world.programs[&token].call {
        Call::Open => Ok(token),
        Call::Rejected(reason) => Err(reason),
        other => panic!("neither put through nor refused: {other:?}"),
    }
}
