//! The ports of Ringdown's own, and the rules that name them.
//!
//! At the host the daemon itself answers there, and every guest may call. At a VM they belong to its host: no rule opens them to guests
//! or to callers of published ports, and no redirection leads to them.

use crate::rule::{CalleePattern, CallerPattern, PortRange, Redirect, Rule, Verdict};

/// The ports: of the host every guest may call them, whatever the rules say; of a VM its host alone.
pub const OWN_PORTS: [u32; 3] = [
    wire::switchboard::link::PORT,
    wire::directory::PORT,
    wire::agent::PORT,
];

const _: () = assert!(OWN_PORTS[1] == OWN_PORTS[0] + 1 && OWN_PORTS[2] == OWN_PORTS[0] + 2);

/// The same as one range.
const OWN_RANGE: PortRange = OWN_PORTS[0]..=OWN_PORTS[2];

/// Whether a port is one of [`OWN_PORTS`].
pub fn is_own_port(port: u32) -> bool {
    OWN_RANGE.contains(&port)
}

impl Rule {
    /// The ports of VMs' own that this rule names for callers that never reach them: guests, and callers that are redirected. A rule without
    /// ports names none.
    pub fn own_ports_named(&self) -> Vec<u32> {
        let (port, is_for_others) = match &self.verdict {
            Verdict::Deny | Verdict::Redirect(Redirect::Service { .. }) => return Vec::new(),
            Verdict::Redirect(Redirect::Vm { port, .. }) => (*port, true),
            Verdict::Allow => (
                None,
                self.to
                    .iter()
                    .any(|callee| matches!(callee, CalleePattern::Vms(_)))
                    && self
                        .from
                        .iter()
                        .any(|caller| matches!(caller, CallerPattern::Vms(_))),
            ),
        };
        let is_named = |own: &u32| match port {
            Some(port) => port == *own,
            None => self.ports.iter().any(|ports| ports.contains(own)),
        };
        let own = OWN_PORTS.into_iter().filter(|_| is_for_others);
        own.filter(is_named).collect()
    }

    /// Whether no call of a guest that this rule puts through can end anywhere but at such a port of a VM.
    pub fn leads_to_own_ports_only(&self) -> bool {
        let all_own = || {
            let own = |ports: &PortRange| {
                OWN_RANGE.contains(ports.start()) && OWN_RANGE.contains(ports.end())
            };
            !self.ports.is_empty() && self.ports.iter().all(own)
        };
        match &self.verdict {
            Verdict::Redirect(Redirect::Vm {
                port: Some(port), ..
            }) => is_own_port(*port),
            Verdict::Allow | Verdict::Redirect(Redirect::Vm { port: None, .. }) => all_own(),
            Verdict::Deny | Verdict::Redirect(Redirect::Service { .. }) => false,
        }
    }
}
