//! The parties: the domains, each with names, context identifiers and services of its own.
//!
//! A guest knows others by numbers of its own domain only. A VM of another domain gets one there, an *alias*, when a rule
//! brings the two together; it is made from the VM's name, so that it is the same each time as long as it is free.

use std::collections::HashMap;

use slab::Slab;

use crate::address::Address;
use crate::compiled::Policy;
use crate::ids::{LineId, ServiceId};
use crate::rule::Callee;
use crate::set::RuleSet;

/// Aliases are in this range: above what operators give out by hand, below the identifiers with a meaning of their own.
const FIRST_ALIAS: u32 = 1 << 30;

/// A service of the host that guests of a domain can call, if a rule allows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceEntry {
    /// Its number.
    pub id: ServiceId,
    /// The domain that it is offered to.
    pub domain: String,
    /// Its name, of which there is one in its domain.
    pub name: String,
    /// Its port, of which there is one in its domain.
    pub port: u32,
}

/// A service, and the rules about it.
#[derive(Debug)]
pub struct Service {
    /// Its name and place.
    pub entry: ServiceEntry,
    /// The rules that can match when it is called.
    pub callees: RuleSet,
}

#[derive(Debug)]
struct Domain {
    name: String,
    by_name: HashMap<String, LineId>,
    /// Other names. A VM's own name goes before another's other name.
    by_other_name: HashMap<String, LineId>,
    /// With the aliases.
    by_cid: HashMap<u32, LineId>,
    /// The aliases, by the VM meant.
    aliases: HashMap<LineId, u32>,
    /// By port.
    services: HashMap<u32, Service>,
}

/// The number of a domain, as long as it has a VM or a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DomainId(usize);

/// Every domain that has a VM or a service.
#[derive(Debug, Default)]
pub struct Directory {
    domains: Slab<Domain>,
}

/// Why a VM cannot be entered.
#[derive(Debug)]
pub enum Taken {
    /// A VM of the domain has its context identifier.
    Cid(LineId),
    /// A VM of the domain has its name.
    Name,
}

impl Directory {
    /// The number of the domain of this name.
    pub fn domain(&self, name: &str) -> Option<DomainId> {
        let mut domains = self.domains.iter();
        domains.find_map(|(id, domain)| (domain.name == name).then_some(DomainId(id)))
    }

    fn domain_or_new(&mut self, name: &str) -> DomainId {
        self.domain(name).unwrap_or_else(|| {
            DomainId(self.domains.insert(Domain {
                name: name.to_owned(),
                by_name: HashMap::new(),
                by_other_name: HashMap::new(),
                by_cid: HashMap::new(),
                aliases: HashMap::new(),
                services: HashMap::new(),
            }))
        })
    }

    /// Whether a VM could be entered.
    pub fn admits(&self, address: &Address) -> Result<(), Taken> {
        let Some(id) = self.domain(&address.domain) else {
            return Ok(());
        };
        let domain = &self.domains[id.0];
        match domain.by_cid.get(&address.cid) {
            // An alias gives way: it is no VM's own.
            Some(line) if !domain.aliases.contains_key(line) => return Err(Taken::Cid(*line)),
            _ => {}
        }
        if domain.by_name.contains_key(&address.name) {
            return Err(Taken::Name);
        }
        Ok(())
    }

    /// Enters a VM that has been admitted.
    pub fn enter(&mut self, address: &Address, line: LineId) -> DomainId {
        let id = self.domain_or_new(&address.domain);
        let domain = &mut self.domains[id.0];
        if let Some(stranger) = domain.by_cid.insert(address.cid, line) {
            domain.aliases.remove(&stranger);
        }
        domain.by_name.insert(address.name.clone(), line);
        id
    }

    /// Gives VMs of these domains these other names, and no others.
    pub fn set_other_names(&mut self, of: Vec<(DomainId, LineId, Vec<String>)>) {
        for (_, domain) in &mut self.domains {
            domain
                .by_other_name
                .retain(|_, named| of.iter().all(|(_, line, _)| line != named));
        }
        for (domain, line, names) in of {
            let names = names.into_iter().map(|name| (name, line));
            self.domains[domain.0].by_other_name.extend(names);
        }
    }

    /// Strikes a VM out, and its aliases.
    pub fn strike(&mut self, line: LineId) {
        for (_, domain) in &mut self.domains {
            domain.by_name.retain(|_, of| *of != line);
            domain.by_other_name.retain(|_, of| *of != line);
            domain.by_cid.retain(|_, of| *of != line);
            domain.aliases.remove(&line);
        }
        self.forget_empty();
    }

    fn forget_empty(&mut self) {
        self.domains
            .retain(|_, domain| !domain.by_name.is_empty() || !domain.services.is_empty());
    }

    /// Replaces all services. Of two at one port, or of one name, the later one holds.
    pub fn set_services(&mut self, services: Vec<ServiceEntry>, policy: &Policy) {
        for (_, domain) in &mut self.domains {
            domain.services.clear();
        }
        for entry in services {
            let id = self.domain_or_new(&entry.domain);
            let callees = RuleSet::default();
            let services = &mut self.domains[id.0].services;
            services.retain(|_, known| known.entry.name != entry.name);
            services.insert(entry.port, Service { entry, callees });
        }
        self.forget_empty();
        self.subject_to(policy);
    }

    /// Finds the rules of a policy that the services have to do with.
    pub fn subject_to(&mut self, policy: &Policy) {
        for (_, domain) in &mut self.domains {
            for service in domain.services.values_mut() {
                service.callees = policy.callees(&Callee::Service {
                    domain: &service.entry.domain,
                    name: &service.entry.name,
                });
            }
        }
    }

    /// The VM that guests of a domain know by this identifier, its own or an alias.
    pub fn line_by_cid(&self, domain: DomainId, cid: u32) -> Option<LineId> {
        self.domains.get(domain.0)?.by_cid.get(&cid).copied()
    }

    /// The VM of this name in a domain.
    pub fn line_by_name(&self, domain: &str, name: &str) -> Option<LineId> {
        let domain = &self.domains[self.domain(domain)?.0];
        let line = domain.by_name.get(name);
        line.or_else(|| domain.by_other_name.get(name)).copied()
    }

    /// The service at a port of a domain.
    pub fn service_at(&self, domain: DomainId, port: u32) -> Option<&Service> {
        self.domains.get(domain.0)?.services.get(&port)
    }

    /// The ports of a domain's services.
    pub fn service_ports(&self, domain: DomainId) -> impl Iterator<Item = u32> + '_ {
        let domain = self.domains.get(domain.0).into_iter();
        domain.flat_map(|domain| domain.services.keys().copied())
    }

    /// The service of this name in a domain.
    pub fn service_by_name(&self, domain: &str, name: &str) -> Option<&Service> {
        let domain = self.domain(domain)?;
        let mut services = self.domains[domain.0].services.values();
        services.find(|service| service.entry.name == name)
    }

    /// The service of this number.
    pub fn service(&self, id: ServiceId) -> Option<&ServiceEntry> {
        self.domains.iter().find_map(|(_, domain)| {
            let mut services = domain.services.values();
            let service = services.find(|service| service.entry.id == id);
            service.map(|service| &service.entry)
        })
    }

    /// The rules that can match when the service of this number is called.
    pub fn service_callees(&self, id: ServiceId) -> Option<&RuleSet> {
        self.domains.iter().find_map(|(_, domain)| {
            let mut services = domain.services.values();
            let service = services.find(|service| service.entry.id == id);
            service.map(|service| &service.callees)
        })
    }

    /// The identifier under which guests of a domain know a VM of another.
    pub fn alias(&mut self, viewer: DomainId, line: LineId, address: &Address) -> u32 {
        let Some(domain) = self.domains.get_mut(viewer.0) else {
            return address.cid;
        };
        if let Some(alias) = domain.aliases.get(&line) {
            return *alias;
        }
        let mut alias = FIRST_ALIAS | (hash(&address.full_name()) % FIRST_ALIAS);
        // There are far fewer VMs than aliases, so one is free.
        while domain.by_cid.contains_key(&alias) {
            alias = FIRST_ALIAS | (alias.wrapping_add(1) % FIRST_ALIAS);
        }
        domain.by_cid.insert(alias, line);
        domain.aliases.insert(line, alias);
        alias
    }
}

/// FNV-1a: the same on every machine and in every version, as the standard library's hash is not.
fn hash(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DEFAULT_DOMAIN;

    const WEB: LineId = LineId(0);
    const DB: LineId = LineId(1);
    const SHOP: LineId = LineId(2);

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn another_name_stands_for_the_vm_that_has_it_now() {
        let mut directory = Directory::default();
        let home = directory.enter(&Address::new("web", 3), WEB);
        directory.enter(&Address::new("db", 4), DB);
        let shop = Address {
            domain: "red".to_owned(),
            ..Address::new("shop", 3)
        };
        let red = directory.enter(&shop, SHOP);
        directory.set_other_names(vec![
            (home, WEB, names(&["www", "site"])),
            (red, SHOP, names(&["www"])),
        ]);
        let meant = |directory: &Directory, domain, name| directory.line_by_name(domain, name);
        for (domain, name, line) in [
            (DEFAULT_DOMAIN, "www", Some(WEB)),
            (DEFAULT_DOMAIN, "web", Some(WEB)),
            ("red", "www", Some(SHOP)),
            ("red", "site", None),
            ("blue", "www", None),
        ] {
            assert_eq!(meant(&directory, domain, name), line, "{domain}/{name}");
        }
        // All at once, so that a name can pass from one VM to another.
        directory.set_other_names(vec![
            (home, WEB, names(&["site"])),
            (home, DB, names(&["www"])),
            (red, SHOP, Vec::new()),
        ]);
        assert_eq!(meant(&directory, DEFAULT_DOMAIN, "www"), Some(DB));
        assert_eq!(meant(&directory, DEFAULT_DOMAIN, "site"), Some(WEB));
        assert_eq!(meant(&directory, "red", "www"), None);
    }

    #[test]
    fn a_vms_own_name_goes_before_anothers_other_name() {
        let mut directory = Directory::default();
        let home = directory.enter(&Address::new("web", 3), WEB);
        directory.set_other_names(vec![(home, WEB, names(&["db"]))]);
        let db = Address::new("db", 4);
        assert!(directory.admits(&db).is_ok());
        directory.enter(&db, DB);
        assert_eq!(directory.line_by_name(DEFAULT_DOMAIN, "db"), Some(DB));
        directory.strike(DB);
        assert_eq!(directory.line_by_name(DEFAULT_DOMAIN, "db"), Some(WEB));
    }
}
