//! Which rules are about a caller, and which about a callee.
//!
//! Patterns are looked up, not tried: names and numbers in hash tables, beginnings and ends of names and networks among keys
//! that nest ([`crate::nested`]). Every pattern costs at most 32 bytes for its rule ([`Members`]) and once, however many rules
//! say the same, its own text and place in a table.

use std::collections::{BTreeMap, HashMap};

use crate::nested::Nested;
use ipnet::IpNet;

use crate::rule::{Callee, CalleePattern, Caller, CallerPattern, NamePattern, Rule, VmPattern};
use crate::set::{Members, RuleSet};

/// Rules by their callers.
#[derive(Debug, Clone, Default)]
pub(super) struct CallerIndex {
    machines: Machines,
    host: Members,
    users: HashMap<u32, Members>,
    user_groups: HashMap<u32, Members>,
}

impl CallerIndex {
    /// The callers of these rules.
    pub(super) fn new(rules: &[Rule]) -> CallerIndex {
        let mut index = CallerIndex::default();
        for (rule, number) in rules.iter().zip(0_u32..) {
            for pattern in &rule.from {
                index.members(pattern).insert(number, rules.len());
            }
        }
        index
    }

    fn members(&mut self, pattern: &CallerPattern) -> &mut Members {
        match pattern {
            CallerPattern::Vms(vms) => self.machines.members(vms),
            CallerPattern::Host => &mut self.host,
            CallerPattern::User(user) => self.users.entry(*user).or_default(),
            CallerPattern::UserGroup(group) => self.user_groups.entry(*group).or_default(),
        }
    }

    /// Adds the rules that are about a caller.
    pub(super) fn join_about(&self, caller: &Caller<'_>, set: &mut RuleSet) {
        match caller {
            Caller::Vm {
                domain,
                name,
                groups,
            } => self.machines.join_about(domain, Some(name), groups, set),
            Caller::Program { uid, gids } => {
                self.host.join_to(set);
                join_found(self.users.get(uid), set);
                for gid in *gids {
                    join_found(self.user_groups.get(gid), set);
                }
            }
            Caller::Published => self.host.join_to(set),
        }
    }

    /// Adds the rules that are about all callers that a pattern is about.
    pub(super) fn join_around(&self, pattern: &CallerPattern, set: &mut RuleSet) {
        match pattern {
            CallerPattern::Vms(vms) => self.machines.join_around(vms, set),
            CallerPattern::Host => self.host.join_to(set),
            CallerPattern::User(user) => {
                self.host.join_to(set);
                join_found(self.users.get(user), set);
            }
            CallerPattern::UserGroup(group) => {
                self.host.join_to(set);
                join_found(self.user_groups.get(group), set);
            }
        }
    }
}

/// Rules by their callees.
#[derive(Debug, Clone)]
pub(super) struct CalleeIndex {
    machines: Machines,
    /// By domain.
    services: HashMap<String, Names>,
    listeners: Members,
    networks: Nested<IpNet>,
    names: Names,
}

impl CalleeIndex {
    /// The callees of these rules.
    pub(super) fn new(rules: &[Rule]) -> CalleeIndex {
        let mut machines = Machines::default();
        let mut services: HashMap<String, NamesBuilder> = HashMap::new();
        let mut listeners = Members::default();
        let mut networks: BTreeMap<IpNet, Members> = BTreeMap::new();
        let mut names = NamesBuilder::default();
        for (rule, number) in rules.iter().zip(0_u32..) {
            for pattern in &rule.to {
                let members = match pattern {
                    CalleePattern::Vms(vms) => machines.members(vms),
                    CalleePattern::Service { domain, name } => {
                        services.entry(domain.clone()).or_default().members(name)
                    }
                    CalleePattern::Listeners => &mut listeners,
                    CalleePattern::Name(name) => names.members(name),
                    // Those of a rule are united first, below.
                    CalleePattern::Network(_) => continue,
                };
                members.insert(number, rules.len());
            }
            // Two halves of a network are around what the whole is around.
            let networks_of_rule: Vec<IpNet> = rule.to.iter().filter_map(network_of).collect();
            for network in IpNet::aggregate(&networks_of_rule) {
                let members = networks.entry(network).or_default();
                members.insert(number, rules.len());
            }
        }
        CalleeIndex {
            machines,
            services: services
                .into_iter()
                .map(|(domain, names)| (domain, names.build()))
                .collect(),
            listeners,
            networks: Nested::new(networks),
            names: names.build(),
        }
    }

    /// Adds the rules that are about a callee.
    pub(super) fn join_about(&self, callee: &Callee<'_>, set: &mut RuleSet) {
        match callee {
            Callee::Vm {
                domain,
                name,
                groups,
            } => self.machines.join_about(domain, Some(name), groups, set),
            Callee::Service { domain, name } => {
                if let Some(names) = self.services.get(*domain) {
                    names.join_about(name, set);
                }
            }
            Callee::Listener => self.listeners.join_to(set),
            Callee::Address { address, name } => {
                if let Some(address) = address {
                    self.networks.join_around(&IpNet::from(*address), set);
                }
                if let Some(name) = name {
                    self.names.join_about(name, set);
                }
            }
        }
    }

    /// Adds the rules that are about all callees that a pattern is about.
    pub(super) fn join_around(&self, pattern: &CalleePattern, set: &mut RuleSet) {
        match pattern {
            CalleePattern::Vms(vms) => self.machines.join_around(vms, set),
            CalleePattern::Service { domain, name } => {
                if let Some(names) = self.services.get(domain) {
                    names.join_around(name, set);
                }
            }
            CalleePattern::Listeners => self.listeners.join_to(set),
            CalleePattern::Network(network) => self.networks.join_around(network, set),
            CalleePattern::Name(name) => self.names.join_around(name, set),
        }
    }
}

fn network_of(pattern: &CalleePattern) -> Option<IpNet> {
    match pattern {
        CalleePattern::Network(network) => Some(*network),
        _ => None,
    }
}

/// Rules by VMs, of every domain for itself.
#[derive(Debug, Clone, Default)]
struct Machines {
    domains: HashMap<String, Domain>,
}

#[derive(Debug, Clone, Default)]
struct Domain {
    any: Members,
    vms: HashMap<String, Members>,
    groups: HashMap<String, Members>,
}

impl Machines {
    fn members(&mut self, vms: &VmPattern) -> &mut Members {
        let (VmPattern::Any { domain }
        | VmPattern::One { domain, .. }
        | VmPattern::Group { domain, .. }) = vms;
        let of_domain = self.domains.entry(domain.to_owned()).or_default();
        match vms {
            VmPattern::Any { .. } => &mut of_domain.any,
            VmPattern::One { name, .. } => of_domain.vms.entry(name.to_owned()).or_default(),
            VmPattern::Group { name, .. } => of_domain.groups.entry(name.to_owned()).or_default(),
        }
    }

    fn join_about(&self, domain: &str, name: Option<&str>, groups: &[String], set: &mut RuleSet) {
        let Some(domain) = self.domains.get(domain) else {
            return;
        };
        domain.any.join_to(set);
        join_found(name.and_then(|name| domain.vms.get(name)), set);
        for group in groups {
            join_found(domain.groups.get(group), set);
        }
    }

    fn join_around(&self, vms: &VmPattern, set: &mut RuleSet) {
        match vms {
            VmPattern::Any { domain } => self.join_about(domain, None, &[], set),
            VmPattern::One { domain, name } => self.join_about(domain, Some(name), &[], set),
            VmPattern::Group { domain, name } => {
                self.join_about(domain, None, std::slice::from_ref(name), set);
            }
        }
    }
}

/// Rules by patterns of names.
#[derive(Debug, Clone)]
struct Names {
    any: Members,
    exact: HashMap<String, Members>,
    starts: Nested<Vec<u8>>,
    /// Read backwards.
    ends: Nested<Vec<u8>>,
}

#[derive(Default)]
struct NamesBuilder {
    any: Members,
    exact: HashMap<String, Members>,
    starts: BTreeMap<Vec<u8>, Members>,
    ends: BTreeMap<Vec<u8>, Members>,
}

impl NamesBuilder {
    fn members(&mut self, pattern: &NamePattern) -> &mut Members {
        match pattern {
            NamePattern::Any => &mut self.any,
            // Every name begins with nothing.
            NamePattern::Prefix(start) if start.is_empty() => &mut self.any,
            NamePattern::Exact(name) => self.exact.entry(name.clone()).or_default(),
            NamePattern::Prefix(start) => self.starts.entry(start.clone().into()).or_default(),
            NamePattern::Suffix(end) => self.ends.entry(backwards(end.as_bytes())).or_default(),
        }
    }

    fn build(self) -> Names {
        Names {
            any: self.any,
            exact: self.exact,
            starts: Nested::new::<[u8]>(self.starts),
            ends: Nested::new::<[u8]>(self.ends),
        }
    }
}

impl Names {
    fn join_about(&self, name: &str, set: &mut RuleSet) {
        self.any.join_to(set);
        join_found(self.exact.get(name), set);
        self.starts.join_around(name.as_bytes(), set);
        // A name that ends in a pattern is longer than it: what is behind its first byte may be the pattern as a whole.
        if let Some((_, rest)) = name.as_bytes().split_first() {
            self.ends.join_around(&backwards(rest)[..], set);
        }
    }

    /// Adds the rules that are about all names that a pattern is about. Of a rule that is about all names but the empty one
    /// (those that end in nothing) it says so only where the pattern is about a name, or an end.
    fn join_around(&self, pattern: &NamePattern, set: &mut RuleSet) {
        match pattern {
            NamePattern::Any => self.any.join_to(set),
            NamePattern::Exact(name) => self.join_about(name, set),
            NamePattern::Prefix(start) => {
                self.any.join_to(set);
                self.starts.join_around(start.as_bytes(), set);
            }
            NamePattern::Suffix(end) => {
                self.any.join_to(set);
                self.ends.join_around(&backwards(end.as_bytes())[..], set);
            }
        }
    }
}

fn join_found(members: Option<&Members>, set: &mut RuleSet) {
    if let Some(members) = members {
        members.join_to(set);
    }
}

fn backwards(text: &[u8]) -> Vec<u8> {
    text.iter().rev().copied().collect()
}
