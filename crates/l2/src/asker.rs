//! Asker: not what a frame says, but the port by which it came.

use wire::ethernet::MacAddress;

use crate::config::Host;

/// The port of the network by which a frame came, as the switch has it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Asker {
    /// Its number.
    pub port: u16,
    /// The MAC address that was given to the guest behind it, whatever others it uses. None where there is an uplink.
    pub guest: Option<MacAddress>,
    /// It reaches uplinks and the network only.
    pub isolated: bool,
}

impl Asker {
    /// The port, if a guest is behind it and not an uplink, with any number of hosts.
    pub(crate) fn port_of_guest(&self) -> Option<u16> {
        self.guest.map(|_| self.port)
    }

    /// Whether the one behind the port learns of a host: no guest of another one, where the switch keeps one of the two apart.
    pub(crate) fn may_know(&self, host: &Host) -> bool {
        let is_apart = |guest| guest != host.mac && (self.isolated || host.isolated);
        !self.guest.is_some_and(is_apart)
    }
}

#[cfg(test)]
impl Asker {
    /// The guest with this MAC address, at a port of its own; one that is not on the list is behind an uplink.
    pub(crate) fn with_mac(mac: MacAddress, hosts: &crate::hosts::Hosts) -> Asker {
        let host = hosts.with_mac(mac);
        Asker {
            port: mac.0[5].into(),
            guest: host.map(|host| host.mac),
            isolated: host.is_some_and(|host| host.isolated),
        }
    }
}
