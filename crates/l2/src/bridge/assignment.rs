//! What is a port's by its operator's word: checked before anything changes, so that a port is added as a whole or not at all.

use core::net::IpAddr;

use policy::Time;
use wire::ethernet::MacAddress;

use super::filter::made_of;
use super::{AddPortError, Bridge, Ipv6Guard, PortConfig, PortId, Used};

/// Whose an IP address is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Assigned {
    pub(super) port: PortId,
    /// When the port itself asked last whether it is in use.
    pub(super) asked: Option<Time>,
}

/// The part of a learned address' key that is the address.
const MAC_BITS: u64 = (1 << 48) - 1;

impl Bridge {
    /// Whether a port can be like this; `id` is the port that is to be changed, if it is not a new one.
    pub(super) fn check_config(
        &self,
        config: &PortConfig,
        id: Option<PortId>,
    ) -> Result<(), AddPortError> {
        check_numbers(config)?;
        let other = |owner: &&PortId| Some(**owner) != id;
        if let Some(mac) = config.mac {
            if let Some(port) = self.stations.get(&mac.to_u64()).filter(other) {
                return Err(AddPortError::MacTaken { mac, port: *port });
            }
        }
        if let Some(vlan) = config.home() {
            for address in addresses(config) {
                let assigned = self.assigned.get(&(vlan, address));
                if let Some(port) = assigned.map(|assigned| &assigned.port).filter(other) {
                    let port = *port;
                    return Err(AddPortError::AddressTaken { address, port });
                }
            }
        }
        let own = id.map_or(0, |id| self.ports[id.0.into()].config.reserved());
        let free = self.limits.learned_max - (self.reserved - own);
        let wanted = config.reserved();
        if wanted > free {
            return Err(AddPortError::TooManyAddresses {
                wanted,
                free,
                learned_max: self.limits.learned_max,
            });
        }
        Ok(())
    }

    /// Gives a port what its configuration says, which was checked. Another port that has learned or taken any of it loses it.
    pub(super) fn assign(&mut self, id: PortId, config: &PortConfig) {
        self.reserved += config.reserved();
        if let Some(mac) = config.mac {
            let bits = mac.to_u64();
            self.stations.insert(bits, id);
            self.learned.forget_keys(|key| key & MAC_BITS == bits);
            self.bindings
                .forget_keys(|(_, address)| made_of(*address) == Some(mac));
        }
        if let Some(vlan) = config.home() {
            for address in addresses(config) {
                let assigned = Assigned {
                    port: id,
                    asked: None,
                };
                self.assigned.insert((vlan, address), assigned);
                if let IpAddr::V6(address) = address {
                    self.bindings.forget_keys(|key| *key == (vlan, address));
                }
            }
        }
    }

    /// Forgets what a port uses and could not as `config` has it. What it may use is its own as before: another guest could take it otherwise.
    pub(super) fn forget_what_is_not_of(&mut self, now: Time, id: PortId, config: &PortConfig) {
        let before = &self.ports[id.0.into()].config;
        if (before.kind, before.mac) != (config.kind, config.mac) {
            self.learned.forget(id);
            self.bindings.forget(id);
            return;
        }
        let is_allowed = |used: Used| used.is_allowed(config);
        self.learned.retain(now, id, config.learned_max, |key| {
            Used::mac(*key).is_some_and(is_allowed)
        });
        let guard = config.ipv6_guard.as_ref();
        let max = guard.map_or(0, |guard| guard.addresses_max);
        self.bindings
            .retain(now, id, max, |key| is_allowed(Used::ipv6(*key)));
    }

    /// Takes from a port what is assigned to it.
    pub(super) fn unassign(&mut self, id: PortId) {
        let Some(port) = self.ports.get(id.0.into()) else {
            return;
        };
        let config = &port.config;
        self.reserved -= config.reserved();
        if let Some(mac) = config.mac {
            self.stations.remove(&mac.to_u64());
        }
        if let Some(vlan) = config.home() {
            for address in addresses(config) {
                self.assigned.remove(&(vlan, address));
            }
        }
    }
}

/// The IP addresses that are assigned to a port.
fn addresses(config: &PortConfig) -> impl Iterator<Item = IpAddr> + '_ {
    let ipv4 = config.ipv4.map(IpAddr::V4);
    ipv4.into_iter().chain(config.addresses.iter().copied())
}

fn check_numbers(config: &PortConfig) -> Result<(), AddPortError> {
    let at_most = |what, count, max| match count > max {
        true => Err(AddPortError::TooMany { what, count, max }),
        false => Ok(()),
    };
    at_most(
        "addresses",
        config.addresses.len(),
        PortConfig::ADDRESSES_MAX,
    )?;
    if let Some(guard) = &config.ipv6_guard {
        let count = guard.prefixes.len();
        at_most("IPv6 prefixes", count, Ipv6Guard::PREFIXES_MAX)?;
    }
    match config.mac {
        Some(mac) if !MacAddress::is_assignable(mac) => {
            return Err(AddPortError::InvalidMac(mac));
        }
        None if config.learned_max == 0 => return Err(AddPortError::NoAddress),
        _ => {}
    }
    let unusable = |address: &IpAddr| {
        let broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
        address.is_unspecified() || address.is_multicast() || broadcast
    };
    match addresses(config).find(unusable) {
        Some(address) => Err(AddPortError::InvalidAddress(address)),
        None => Ok(()),
    }
}
