//! The peer, as a party may name it.

use device::Endpoint;
use policy::{DEFAULT_DOMAIN, full_name};
use wire::switchboard::Place;

/// How a party may name an end of its circuit: a VM of its own domain by its name alone. The host itself names VMs in full.
pub(super) fn place(end: &Endpoint, viewer_domain: Option<&str>, port: u32) -> Place {
    let name = match end {
        Endpoint::Vm { domain, name, .. } => match viewer_domain {
            Some(viewer) if viewer == domain => name.clone(),
            Some(_) => format!("{domain}/{name}"),
            None => full_name(domain, name),
        },
        _ => "host".to_owned(),
    };
    named(&name, port)
}

/// How a VM that calls is named to a host's program.
pub(crate) fn caller_name(vm: &policy::Address, port: u32) -> Place {
    named(&vm.full_name(), port)
}

/// A party of which an agent has said a number only.
pub(super) fn fallback((cid, port): (u32, u32)) -> Place {
    match cid {
        wire::vsock::HOST_CID => named("host", port),
        cid => named(&cid.to_string(), port),
    }
}

pub(super) fn named(name: &str, port: u32) -> Place {
    // Names of VMs and numbers are names, and no circuit has the port that stands for any.
    Place::new(name, port).unwrap_or_else(|| Place::new("host", 0).expect("a name and a port"))
}

pub(super) fn domain_of(vm: &str) -> &str {
    vm.split_once('/')
        .map_or(DEFAULT_DOMAIN, |(domain, _)| domain)
}
