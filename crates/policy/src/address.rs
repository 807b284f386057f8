//! What VMs are called.

use crate::rule::{Callee, Caller, DEFAULT_DOMAIN};

/// A VM as the directory knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The domain it belongs to.
    pub domain: String,
    /// Its name, of which there is one in its domain.
    pub name: String,
    /// Its context identifier, of which there is one in its domain.
    pub cid: u32,
    /// The groups it is in.
    pub groups: Vec<String>,
}

impl Address {
    /// The address of a VM in the [`DEFAULT_DOMAIN`] and in no group.
    pub fn new(name: &str, cid: u32) -> Address {
        Address {
            domain: DEFAULT_DOMAIN.to_owned(),
            name: name.to_owned(),
            cid,
            groups: Vec::new(),
        }
    }

    /// It, as it calls.
    pub fn as_caller(&self) -> Caller<'_> {
        Caller::vm(&self.domain, &self.name, &self.groups)
    }

    /// It, as it is called.
    pub fn as_callee(&self) -> Callee<'_> {
        Callee::vm(&self.domain, &self.name, &self.groups)
    }

    /// The name by which people and programs of the host tell it from VMs of other domains: `web` in the
    /// [`DEFAULT_DOMAIN`], else as in `red/web`.
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.name)
    }
}

/// The name of something in a domain as people write it: without the domain if that is the [`DEFAULT_DOMAIN`].
pub fn full_name(domain: &str, name: &str) -> String {
    match domain {
        DEFAULT_DOMAIN => name.to_owned(),
        domain => format!("{domain}/{name}"),
    }
}
