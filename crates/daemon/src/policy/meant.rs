//! What may have been meant by an unknown name.

use std::collections::BTreeSet;
use std::net::IpAddr;

use config::full_name;
use config::input::nearest_full_name;

use super::Rulebook;

/// Where a name stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stands {
    /// As a caller in a rule.
    From,
    /// As a callee in a rule.
    To,
    /// As a VM, and nothing else can stand there.
    Vm,
    /// As the callee that a question is about.
    Asked,
}

impl Rulebook {
    /// What may be meant by a name that no VM has, as it is to be written there: a VM, or something else of this name.
    pub(super) fn meant(&self, domain: &str, name: &str, stands: Stands) -> Option<String> {
        let full = full_name(domain, name);
        let is_callee = matches!(stands, Stands::To | Stands::Asked);
        let services = self.service_names();
        if is_callee && services.contains(&full) {
            return Some(format!("service:{full}"));
        }
        // "10.0.0.0/8" reads as the VM "8" of the domain "10.0.0.0".
        let address = if domain.parse::<IpAddr>().is_ok() {
            &full
        } else {
            name
        };
        let (start, _) = address.split_once('/').unwrap_or((address, ""));
        if is_callee && start.parse::<IpAddr>().is_ok() {
            return Some(format!("address:{address}"));
        }
        let may_be_group = matches!(stands, Stands::From | Stands::To);
        if may_be_group && self.group_names().contains(&full) {
            return Some(full_name(domain, &format!("@{name}")));
        }
        let vm = self.plan.nearest_vm(&full);
        if vm.is_some() || !is_callee {
            return vm;
        }
        let service = self
            .nearest_service(&full)
            .map(|service| format!("service:{service}"));
        // A name of the world has a dot, which a VM's may have too.
        service.or_else(|| name.contains('.').then(|| format!("name:{name}")))
    }

    pub(super) fn nearest_service(&self, name: &str) -> Option<String> {
        nearest_full_name(name, &self.service_names())
    }

    pub(super) fn nearest_group(&self, name: &str) -> Option<String> {
        nearest_full_name(name, &self.group_names())
    }

    fn service_names(&self) -> Vec<String> {
        let services = self.services.iter();
        services.map(|service| service.value.full_name()).collect()
    }

    fn group_names(&self) -> Vec<String> {
        let of_lines = self.plan.lines().flat_map(|line| {
            let groups = line.groups.iter();
            groups.map(|group| full_name(&line.domain, group))
        });
        let declared = self.groups.iter().map(|group| &group.value);
        let declared = declared.map(|group| full_name(&group.domain, &group.name));
        let names: BTreeSet<String> = of_lines.chain(declared).collect();
        names.into_iter().collect()
    }
}
