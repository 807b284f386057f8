//! Which addresses ports use, for a bridge that goes on after this one: another port could take them there otherwise.

use core::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use policy::Time;
use wire::ethernet::MacAddress;

use super::filter::made_of;
use super::{Bridge, PortConfig, PortId, PortKind, VlanId, learned_key};

/// An address that a port uses without an operator's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UsedAddress {
    /// One that was learned.
    Mac(MacAddress),
    /// One that a guest, or a host behind an uplink, has given itself.
    Ipv6(Ipv6Addr),
}

/// Such an address, in its VLAN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Used {
    /// The VLAN.
    pub vlan: VlanId,
    /// The address.
    pub address: UsedAddress,
}

impl Used {
    pub(super) fn mac(key: u64) -> Option<Used> {
        let address = UsedAddress::Mac(MacAddress::from_u64(key));
        let vlan = VlanId::new((key >> 48) as u16)?;
        Some(Used { vlan, address })
    }

    pub(super) fn ipv6((vlan, address): (VlanId, Ipv6Addr)) -> Used {
        let address = UsedAddress::Ipv6(address);
        Used { vlan, address }
    }

    /// Whether a port that is like this may use it if no other does.
    pub(super) fn is_allowed(&self, config: &PortConfig) -> bool {
        config.vlan.contains(self.vlan)
            && match self.address {
                UsedAddress::Mac(_) => config.learns(),
                UsedAddress::Ipv6(address) => config
                    .ipv6_guard
                    .as_ref()
                    .is_some_and(|guard| config.kind == PortKind::Uplink || guard.allows(address)),
            }
    }
}

impl Bridge {
    /// From now on [`take_changed`](Self::take_changed) says what changes.
    pub fn record_changes(&mut self) {
        self.learned.record_changes();
        self.bindings.record_changes();
    }

    /// Addresses whose user may be another one than when this was called last.
    pub fn take_changed(&mut self) -> impl Iterator<Item = Used> {
        let macs = self.learned.take_changed().into_iter();
        let addresses = self.bindings.take_changed().into_iter();
        macs.filter_map(Used::mac).chain(addresses.map(Used::ipv6))
    }

    /// Which port uses an address, and for how long it stays that port's also if it is silent.
    pub fn user(&self, now: Time, used: &Used) -> Option<(PortId, Duration)> {
        match used.address {
            UsedAddress::Mac(mac) => self.learned.user(now, learned_key(used.vlan, mac)),
            UsedAddress::Ipv6(address) => self.bindings.user(now, (used.vlan, address)),
        }
    }

    /// Has a port go on with an address that it used in the bridge before this one, unless it may not, or another has it.
    pub fn inherit(&mut self, now: Time, id: PortId, used: &Used, kept: Duration) {
        let Some(port) = self.ports.get(id.0.into()) else {
            return;
        };
        let config = &port.config;
        if !used.is_allowed(config) {
            return;
        }
        let until = now.saturating_add(kept);
        match used.address {
            UsedAddress::Mac(mac) => {
                let bound = config.bound(config.learned_max);
                let key = learned_key(used.vlan, mac);
                if !self.stations.contains_key(&mac.to_u64()) {
                    self.learned.claim(now, key, id, bound);
                    self.learned.keep(now, key, id, until);
                }
            }
            UsedAddress::Ipv6(address) => {
                let guard = config.ipv6_guard.as_ref();
                let bound = config.bound(guard.map_or(0, |guard| guard.addresses_max));
                let key = (used.vlan, address);
                let assigned = self
                    .assigned
                    .contains_key(&(used.vlan, IpAddr::V6(address)));
                let station = made_of(address).and_then(|mac| self.stations.get(&mac.to_u64()));
                if bound.max > 0 && !assigned && station.is_none_or(|port| *port == id) {
                    self.bindings.claim(now, key, id, bound);
                    self.bindings.keep(now, key, id, until);
                }
            }
        }
    }
}
