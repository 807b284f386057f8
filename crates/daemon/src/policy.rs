//! The rules with the names that they are about: which holds for a call, and which are not what they seem.

mod answer;
mod beyond;
mod findings;
mod listing;
mod meant;
mod near;
mod nothing;
mod ways;

use std::collections::BTreeMap;
use std::sync::Arc;

use config::input::InputError;
use config::{
    Config, ConfigError, GroupRequest, Hosts, LineSpec, Plan, PlanChange, Publish, PublishListen,
    Service, VmRequest, Written, check_dialled, check_dialled_with, check_sockets, check_targets,
    check_whole,
};
use policy::{CalleePattern, CallerPattern, Policy, Redirect, Rule, Verdict, VmPattern};

use hostside::offers::Offer;

pub use answer::AskError;
pub use findings::MAX_FINDINGS;

/// Everything that was configured and is in force together, or would be.
#[derive(Debug, Clone)]
pub struct Rulebook {
    /// The VMs.
    pub plan: Plan,
    rules: Vec<Written<Rule>>,
    groups: Vec<Written<GroupRequest>>,
    services: Vec<Written<Service>>,
    publishes: Vec<Written<Publish>>,
    hosts: Hosts,
    /// The number of each service, by full name.
    numbers: BTreeMap<String, u32>,
    /// The last number that was given to a service.
    last_number: u32,
    policy: Arc<Policy>,
}

impl Rulebook {
    /// A rulebook without rules: VMs reach the host and not each other.
    pub fn without_rules(plan: Plan) -> Rulebook {
        Rulebook {
            plan,
            rules: Vec::new(),
            groups: Vec::new(),
            services: Vec::new(),
            publishes: Vec::new(),
            hosts: Hosts::default(),
            numbers: BTreeMap::new(),
            last_number: 0,
            policy: Arc::default(),
        }
    }

    /// What a configuration makes of an empty plan.
    ///
    /// # Errors
    /// [`ConfigError`] when something in it collides.
    pub fn new(plan: Plan, config: &Config) -> Result<Rulebook, ConfigError> {
        let known = std::collections::BTreeSet::new();
        Ok(Rulebook::without_rules(plan).changed(config, &known)?.0)
    }

    /// What a configuration makes of this one. `known` are the VMs that the last configuration named: those that it no longer names go.
    ///
    /// # Errors
    /// [`ConfigError`] when something in it collides, or would have to change what cannot change.
    pub fn changed(
        &self,
        config: &Config,
        known: &std::collections::BTreeSet<String>,
    ) -> Result<(Rulebook, PlanChange), ConfigError> {
        check_whole(config)?;
        let mut next = self.clone();
        let change = next.plan.change(config, known)?;
        check_targets(config, &next.plan)?;
        check_dialled(config, &next.plan)?;
        next.rules = config.all_rules().cloned().collect();
        next.groups.clone_from(&config.groups);
        next.services.clone_from(&config.services);
        next.publishes.clone_from(&config.publishes);
        next.hosts.clone_from(&config.hosts);
        next.numbers = BTreeMap::new();
        let before = self.services.iter().map(|service| &service.value);
        let before: BTreeMap<String, &Service> = before
            .map(|service| (service.full_name(), service))
            .collect();
        for service in &config.services {
            let name = service.value.full_name();
            // A call that one number allows must not reach what another stands for.
            let known = before.get(&name);
            let known = known.filter(|known| known.is_the_same_to_callers(&service.value));
            let number = known.and_then(|_| self.numbers.get(&name).copied());
            let number = number.unwrap_or_else(|| {
                next.last_number += 1;
                next.last_number
            });
            next.numbers.insert(name, number);
        }
        next.renew_policy();
        Ok((next, change))
    }

    /// Adds a VM.
    ///
    /// # Errors
    /// [`InputError`] when it collides with another VM, as by the socket of its VMM, or a service or a channel leads to a socket of it. What was changed is not undone.
    pub fn add(&mut self, request: &VmRequest) -> Result<LineSpec, InputError> {
        let spec = self.plan.add(request)?;
        check_sockets(&self.services, &self.publishes, &self.plan)?;
        check_dialled_with(&self.publishes, &self.plan, &spec)?;
        if !spec.aliases.is_empty() {
            self.renew_policy();
        }
        Ok(spec)
    }

    /// Makes the rules mean what they say now, after a VM with aliases has come or gone.
    pub fn renew_policy(&mut self) {
        let rules = self.rules.iter().map(|rule| self.resolved(&rule.value));
        self.policy = Arc::new(Policy::new(rules.collect()));
    }

    /// The rules, ready for decisions.
    pub fn policy(&self) -> Arc<Policy> {
        self.policy.clone()
    }

    /// Each VM's groups, by its full name.
    pub fn groups(&self) -> Vec<(String, Vec<String>)> {
        let groups = |line: &LineSpec| (line.full_name(), line.groups.clone());
        self.plan.lines().map(groups).collect()
    }

    /// Each VM's aliases, by its full name.
    pub fn aliases(&self) -> Vec<(String, Vec<String>)> {
        let aliases = |line: &LineSpec| (line.full_name(), line.aliases.clone());
        self.plan.lines().map(aliases).collect()
    }

    /// Where published ports listen.
    pub(crate) fn listens(&self) -> impl Iterator<Item = &PublishListen> {
        self.publishes.iter().map(|publish| &publish.value.listen)
    }

    /// What the host offers.
    pub fn offer(&self) -> Offer {
        let numbered = |service: &Written<Service>| {
            let number = self.numbers.get(&service.value.full_name());
            (number.copied().unwrap_or_default(), service.value.clone())
        };
        let mut publishes: Vec<Publish> = Vec::new();
        for publish in &self.publishes {
            let mut publish = publish.value.clone();
            self.resolve_name(&publish.to.domain, &mut publish.to.vm);
            publishes.push(publish);
        }
        Offer {
            services: self.services.iter().map(numbered).collect(),
            publishes,
            hosts: self.hosts.clone(),
            policy: self.policy(),
            groups: self.groups().into_iter().collect(),
            enforce_existing: false,
        }
    }

    /// How many rules, services and published ports there are.
    pub fn counts(&self) -> [usize; 3] {
        [self.rules.len(), self.services.len(), self.publishes.len()]
    }

    /// A rule in which VMs have their names instead of aliases.
    fn resolved(&self, rule: &Rule) -> Rule {
        let mut rule = rule.clone();
        for pattern in &mut rule.from {
            if let CallerPattern::Vms(VmPattern::One { domain, name }) = pattern {
                self.resolve_name(domain, name);
            }
        }
        for pattern in &mut rule.to {
            if let CalleePattern::Vms(VmPattern::One { domain, name }) = pattern {
                self.resolve_name(domain, name);
            }
        }
        if let Verdict::Redirect(Redirect::Vm { domain, name, .. }) = &mut rule.verdict {
            self.resolve_name(domain, name);
        }
        rule
    }

    fn resolve_name(&self, domain: &str, name: &mut String) {
        if let Some(line) = self.plan.find(domain, name) {
            name.clone_from(&line.name);
        }
    }
}

#[cfg(test)]
mod tests;
