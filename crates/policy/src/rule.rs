//! A rule as it is written, and its parties.

// Of the standard library's network, the switch sees nothing. An address is a number to it.
use core::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// The domain of what names none.
pub const DEFAULT_DOMAIN: &str = "default";

/// The position of a rule in its policy, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RuleId(pub u32);

/// Ports from the first to the last.
pub type PortRange = RangeInclusive<u32>;

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// Callers: any of these.
    pub from: Vec<CallerPattern>,
    /// Callees: any of these.
    pub to: Vec<CalleePattern>,
    /// Which ports are called: any of these. Without one, all.
    pub ports: Vec<PortRange>,
    /// What becomes of the call.
    pub verdict: Verdict,
    /// What all circuits that this rule allows may use together.
    pub limits: RuleLimits,
    /// How a person finds the rule: its name, or the place where it was written.
    pub label: String,
    /// Whether the label is a name. A place says nothing about the rule: with a line more above, it is another one's.
    pub is_named: bool,
}

/// What becomes of a call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It is put through.
    Allow,
    /// It is refused.
    Deny,
    /// It is put through to another callee. The caller does not see that.
    Redirect(Redirect),
}

/// Where a call goes instead.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Redirect {
    /// To a VM.
    Vm {
        /// Its domain.
        domain: String,
        /// Its name.
        name: String,
        /// Its port; without one, the port that was called.
        port: Option<u32>,
    },
    /// To a service of the host.
    Service {
        /// Its domain.
        domain: String,
        /// Its name.
        name: String,
    },
}

/// Limits of a rule. `None` is no limit of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RuleLimits {
    /// Circuits at once.
    pub circuits: Option<u32>,
    /// Calls a second, as many at once after a second of quiet.
    pub connects_per_second: Option<u32>,
    /// Payload of both directions, in bytes a second.
    pub bytes_per_second: Option<u64>,
}

/// VMs that a rule is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum VmPattern {
    /// Every VM of a domain.
    Any {
        /// The domain.
        domain: String,
    },
    /// One VM.
    One {
        /// Its domain.
        domain: String,
        /// Its name.
        name: String,
    },
    /// The VMs of a group.
    Group {
        /// Its domain.
        domain: String,
        /// Its name.
        name: String,
    },
}

/// Callers that a rule is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CallerPattern {
    /// VMs.
    Vms(VmPattern),
    /// Every program of the host, and callers at published ports.
    Host,
    /// Programs of the host that run as this user.
    User(u32),
    /// Programs of the host that run with this group, as their own or a supplementary one.
    UserGroup(u32),
}

/// Callees that a rule is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CalleePattern {
    /// VMs.
    Vms(VmPattern),
    /// Services of the host, by name.
    Service {
        /// Their domain.
        domain: String,
        /// Their names.
        name: NamePattern,
    },
    /// The sockets that programs of the host have made for this very guest, beside its host socket.
    Listeners,
    /// Addresses beyond the host, by number. The bits behind the prefix are zero.
    Network(IpNet),
    /// Addresses beyond the host, by DNS name.
    Name(NamePattern),
}

/// A name, or names that begin or end in a certain way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum NamePattern {
    /// Every name.
    Any,
    /// This name. DNS names are compared in lower case and without a dot at the end.
    Exact(String),
    /// Names that begin so: `git-*` is `git-`.
    Prefix(String),
    /// Names that end so: `*.debian.org` is `.debian.org`, which `debian.org` itself does not.
    Suffix(String),
}

impl NamePattern {
    /// Whether the name is one of these.
    pub fn covers(&self, name: &str) -> bool {
        match self {
            NamePattern::Any => true,
            NamePattern::Exact(exact) => exact == name,
            NamePattern::Prefix(start) => name.starts_with(start.as_str()),
            NamePattern::Suffix(end) => name.len() > end.len() && name.ends_with(end.as_str()),
        }
    }
}

/// The caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller<'a> {
    /// A guest.
    Vm {
        /// Its domain.
        domain: &'a str,
        /// Its name.
        name: &'a str,
        /// The groups it is in.
        groups: &'a [String],
    },
    /// A program of the host.
    Program {
        /// The user it runs as.
        uid: u32,
        /// The groups it runs with, its own and the supplementary ones.
        gids: &'a [u32],
    },
    /// A caller at a published port.
    Published,
}

impl<'a> Caller<'a> {
    /// A guest of this domain and name, in these groups.
    pub fn vm(domain: &'a str, name: &'a str, groups: &'a [String]) -> Caller<'a> {
        Caller::Vm {
            domain,
            name,
            groups,
        }
    }
}

/// The callee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callee<'a> {
    /// A guest.
    Vm {
        /// Its domain.
        domain: &'a str,
        /// Its name.
        name: &'a str,
        /// The groups it is in.
        groups: &'a [String],
    },
    /// A service of the host.
    Service {
        /// Its domain.
        domain: &'a str,
        /// Its name.
        name: &'a str,
    },
    /// The socket that a program of the host has made for the calling guest.
    Listener,
    /// An address beyond the host, and the DNS name by which the caller asked for it. A name that is not resolved yet has
    /// no address: then only rules about names can match.
    Address {
        /// The address.
        address: Option<IpAddr>,
        /// The name, in lower case and without a dot at the end.
        name: Option<&'a str>,
    },
}

impl<'a> Callee<'a> {
    /// A guest of this domain and name, in these groups.
    pub fn vm(domain: &'a str, name: &'a str, groups: &'a [String]) -> Callee<'a> {
        Callee::Vm {
            domain,
            name,
            groups,
        }
    }
}

impl Rule {
    /// A rule without a name that allows every VM of the [`DEFAULT_DOMAIN`] to call every other, at any port.
    pub fn allow_any() -> Rule {
        let domain = || DEFAULT_DOMAIN.to_owned();
        Rule {
            from: vec![CallerPattern::Vms(VmPattern::Any { domain: domain() })],
            to: vec![CalleePattern::Vms(VmPattern::Any { domain: domain() })],
            ports: Vec::new(),
            verdict: Verdict::Allow,
            limits: RuleLimits::default(),
            label: "any".to_owned(),
            is_named: false,
        }
    }
}

impl VmPattern {
    fn covers(&self, of: &str, called: &str, groups: &[String]) -> bool {
        match self {
            VmPattern::Any { domain } => domain == of,
            VmPattern::One { domain, name } => domain == of && name == called,
            VmPattern::Group { domain, name } => domain == of && groups.contains(name),
        }
    }
}

impl CallerPattern {
    /// Whether the rule is about this caller.
    pub fn covers(&self, caller: &Caller<'_>) -> bool {
        match (self, caller) {
            (
                CallerPattern::Vms(vms),
                &Caller::Vm {
                    domain,
                    name,
                    groups,
                },
            ) => vms.covers(domain, name, groups),
            (CallerPattern::Host, Caller::Program { .. } | Caller::Published) => true,
            (CallerPattern::User(user), Caller::Program { uid, .. }) => user == uid,
            (CallerPattern::UserGroup(group), Caller::Program { gids, .. }) => gids.contains(group),
            _ => false,
        }
    }
}

impl CalleePattern {
    /// Whether the rule is about this callee.
    pub fn covers(&self, callee: &Callee<'_>) -> bool {
        match (self, callee) {
            (
                CalleePattern::Vms(vms),
                &Callee::Vm {
                    domain,
                    name,
                    groups,
                },
            ) => vms.covers(domain, name, groups),
            (
                CalleePattern::Service { domain, name },
                Callee::Service {
                    domain: of,
                    name: called,
                },
            ) => domain == of && name.covers(called),
            (CalleePattern::Listeners, Callee::Listener) => true,
            (CalleePattern::Network(network), Callee::Address { address, .. }) => {
                address.is_some_and(|address| network.contains(&address))
            }
            (CalleePattern::Name(pattern), Callee::Address { name, .. }) => {
                name.is_some_and(|name| pattern.covers(name))
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
