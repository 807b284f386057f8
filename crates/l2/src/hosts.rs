//! The operator's list of hosts, found by MAC address, address or name, and which IPv6 addresses they were heard to use.
//!
//! IPv6 addresses are the guests' own choice: most make one of their MAC address, some a random one that stays (RFC 7217), and some have none. A name
//! that leads to an unused address is worse than none, as IPv6 is what programs try first. So the operator's list says what is likely, and the
//! guest itself what is so: before it uses an address it asks whether it is taken (RFC 4862, 5.4), and the station sees that. Only a host without an
//! IPv4 address is believed to have the likely one before it was heard.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::HashMap;

use wire::ethernet::MacAddress;

use crate::config::{
    Host, HostError, MAX_HOSTS, StationConfig, is_label, is_unicast, slaac_address,
};

/// A list of hosts in which nothing occurs twice.
#[derive(Debug, Default)]
pub(crate) struct Hosts {
    list: Vec<Host>,
    by_mac: HashMap<MacAddress, usize>,
    by_address: HashMap<IpAddr, usize>,
    /// Names and aliases, in lower case.
    by_name: HashMap<String, usize>,
    /// The IPv6 addresses of hosts that were heard; no more than there are hosts.
    heard: HashMap<MacAddress, Heard>,
    /// Whose these are, but for inferred ones.
    by_heard: HashMap<Ipv6Addr, MacAddress>,
}

#[derive(Clone, Copy, Debug)]
struct Heard {
    address: Ipv6Addr,
    /// It was not heard itself: it follows from the guest's link-local address.
    is_inferred: bool,
}

/// What a guest was heard to do with an address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Use {
    /// It asks whether it may have it.
    Probes,
    /// It speaks from it.
    Speaks,
}

impl Hosts {
    pub fn new(list: Vec<Host>, config: &StationConfig) -> Result<Self, HostError> {
        if list.len() > MAX_HOSTS {
            return Err(HostError::TooMany(list.len()));
        }
        let mut hosts = Self::default();
        for (index, host) in list.iter().enumerate() {
            hosts.enter(index, host, config)?;
        }
        hosts.list = list;
        Ok(hosts)
    }

    fn enter(
        &mut self,
        index: usize,
        host: &Host,
        config: &StationConfig,
    ) -> Result<(), HostError> {
        for name in std::iter::once(&host.name).chain(&host.aliases) {
            if !is_label(name) {
                return Err(HostError::Name(name.clone()));
            }
            if self
                .by_name
                .insert(name.to_ascii_lowercase(), index)
                .is_some()
            {
                return Err(HostError::NameTwice(name.clone()));
            }
        }
        if host.mac == config.mac || self.by_mac.insert(host.mac, index).is_some() {
            return Err(HostError::MacTwice(host.name.clone()));
        }
        for address in host
            .ipv4
            .map(IpAddr::V4)
            .into_iter()
            .chain(host.ipv6.map(IpAddr::V6))
        {
            if !can_have(address, config) {
                return Err(HostError::Address(host.name.clone(), address));
            }
            let is_own = config.ipv4.is_some_and(|own| address == own.address)
                || config.ipv6.is_some_and(|own| address == own);
            if is_own || self.by_address.insert(address, index).is_some() {
                return Err(HostError::AddressTwice(host.name.clone(), address));
            }
        }
        Ok(())
    }

    /// Keeps in mind what was heard of hosts that were on the list before.
    pub fn remember(&mut self, before: Self) {
        self.heard = before.heard;
        self.heard.retain(|mac, _| self.by_mac.contains_key(mac));
        self.by_heard = before.by_heard;
        self.by_heard.retain(|_, mac| self.by_mac.contains_key(mac));
    }

    /// A guest was heard to use an address, in a network with the prefix of `own`.
    pub fn hear(&mut self, mac: MacAddress, address: Ipv6Addr, usage: Use, own: Ipv6Addr) {
        let Some(host) = self.with_mac(mac) else {
            return;
        };
        let likely = host.ipv6;
        if address.is_unicast_link_local() {
            // It has just come up, and whatever it had may have changed.
            if usage == Use::Probes {
                self.forget(mac);
            }
            // A guest that makes this address of its MAC address makes the other one so, too.
            if address == slaac_address(address, mac) {
                if let Some(address) = likely {
                    let is_inferred = true;
                    self.heard.entry(mac).or_insert(Heard {
                        address,
                        is_inferred,
                    });
                }
            }
            return;
        }
        let is_anothers = self
            .with_address(address.into())
            .is_some_and(|owner| owner.mac != mac);
        if address.segments()[..4] != own.segments()[..4] || address == own || is_anothers {
            return;
        }
        // The switch lets one guest at a time have an address: the other has lost it.
        if let Some(other) = self.by_heard.get(&address).filter(|other| **other != mac) {
            self.forget(*other);
        }
        // The first is the one that stays: those that change for privacy's sake (RFC 8981) are made after it.
        let known = self.heard.get(&mac);
        if known.is_none_or(|known| known.is_inferred || Some(address) == likely) {
            self.forget(mac);
            let is_inferred = false;
            let heard = Heard {
                address,
                is_inferred,
            };
            self.heard.insert(mac, heard);
            self.by_heard.insert(address, mac);
        }
    }

    fn forget(&mut self, mac: MacAddress) {
        let heard = self.heard.remove(&mac);
        if let Some(heard) = heard.filter(|heard| !heard.is_inferred) {
            self.by_heard.remove(&heard.address);
        }
    }

    /// The IPv6 address that leads to a host, as far as one knows.
    pub fn ipv6_of(&self, host: &Host) -> Option<Ipv6Addr> {
        let heard = self.heard.get(&host.mac).map(|heard| heard.address);
        heard.or(host.ipv6.filter(|_| host.ipv4.is_none()))
    }

    pub fn with_mac(&self, mac: MacAddress) -> Option<&Host> {
        self.by_mac.get(&mac).map(|index| &self.list[*index])
    }

    /// The host that is heard from this address, beside those that have it by the list.
    pub fn heard_from(&self, address: Ipv6Addr) -> Option<&Host> {
        self.with_mac(*self.by_heard.get(&address)?)
    }

    pub fn with_address(&self, address: IpAddr) -> Option<&Host> {
        self.by_address
            .get(&address)
            .map(|index| &self.list[*index])
    }

    /// `name` is a single label in lower case.
    pub fn with_name(&self, name: &str) -> Option<&Host> {
        self.by_name.get(name).map(|index| &self.list[*index])
    }

    pub fn have(&self, address: Ipv4Addr) -> bool {
        self.by_address.contains_key(&IpAddr::V4(address))
    }
}

/// A host of the network can have this address. Of IPv6 only what makes no sense at all is refused: hosts may have addresses of several prefixes.
fn can_have(address: IpAddr, config: &StationConfig) -> bool {
    match address {
        IpAddr::V4(address) => {
            is_unicast(address) && config.ipv4.is_some_and(|own| own.has_host(address))
        }
        IpAddr::V6(address) => {
            !(address.is_multicast() || address.is_unspecified() || address.is_loopback())
        }
    }
}

#[cfg(test)]
mod tests;
