//! Callers of the ports of Ringdown's own ([`OWN_PORTS`](policy::OWN_PORTS)).
//!
//! At a VM they belong to its host: the agent listens there and does for its caller what root does. So only a program of the host reaches
//! them that called that very VM at that very port, and the daemon, for published ports that the agent connects.

use policy::is_own_port;

use crate::Reason;
use crate::call::Destination;
use crate::event::HostCaller;

/// Refuses a call that would end at such a port of a VM, unless a program of the host or the daemon called exactly that. No
/// other program gets what the daemon sends to an agent.
pub(crate) fn check(
    host: Option<HostCaller>,
    dialled: (Destination, u32),
    reached: (Destination, u32),
) -> Result<(), Reason> {
    if is_direct(host, dialled, reached) {
        return Ok(());
    }
    let is_a_vms = matches!(reached.0, Destination::Line(_)) && is_own_port(reached.1);
    match is_a_vms || matches!(host, Some(HostCaller::ForPublished(_))) {
        true => Err(Reason::OwnPort),
        false => Ok(()),
    }
}

/// Whether a program of the host, or the daemon, called what it got.
pub(crate) fn is_direct(
    host: Option<HostCaller>,
    dialled: (Destination, u32),
    reached: (Destination, u32),
) -> bool {
    let is_host = matches!(
        host,
        Some(HostCaller::Program(_) | HostCaller::ForPublished(_))
    );
    is_host && reached == dialled
}
