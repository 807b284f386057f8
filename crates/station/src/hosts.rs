//! The operator's list of hosts, found by MAC address, address or name.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};

use crate::config::{Host, HostError, StationConfig, is_label, is_unicast};
use wire::ethernet::MacAddress;

/// How many hosts a network has at most.
pub const MAX_HOSTS: usize = 16_384;

/// A list of hosts in which nothing occurs twice.
#[derive(Debug, Default)]
pub(crate) struct Hosts {
    list: Vec<Host>,
    by_mac: HashMap<MacAddress, usize>,
    by_address: HashMap<IpAddr, usize>,
    /// Names and aliases, in lower case.
    by_name: HashMap<String, usize>,
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

    pub fn with_mac(&self, mac: MacAddress) -> Option<&Host> {
        self.by_mac.get(&mac).map(|index| &self.list[*index])
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
