//! What the operator says about a network and its hosts, checked before it is used.

use core::net::{Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::time::Duration;

use smoltcp::wire::Ipv4Cidr;
use wire::ethernet::MacAddress;

/// How many addresses a pool has at most.
pub const MAX_POOL_ADDRESSES: usize = 4096;

/// How many hosts a network has at most.
pub const MAX_HOSTS: usize = 16_384;

/// The longest search domain: with it the longest answer to a question of DNS, about a host with a name of 63 characters, still fits into the
/// 512 bytes that every resolver takes.
const MAX_DOMAIN_LEN: usize = 100;

/// A lease that is shorter has guests renew all the time, and is a mistake of units.
const MIN_LEASE: Duration = Duration::from_secs(60);

/// The least that every link of IPv4 carries; of IPv6 it is 1280.
const MIN_MTU: u16 = 576;
const MIN_IPV6_MTU: u16 = 1280;

/// The station's IPv4 address and the network around it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ipv4Settings {
    /// The station's own address.
    pub address: Ipv4Addr,
    /// How many leading bits the addresses of the network have in common: 8 to 30.
    pub prefix_len: u8,
}

impl Ipv4Settings {
    pub(crate) fn cidr(self) -> Ipv4Cidr {
        Ipv4Cidr::new(self.address, self.prefix_len)
    }

    /// The address is one that a host of this network can have.
    pub(crate) fn has_host(self, address: Ipv4Addr) -> bool {
        let cidr = self.cidr();
        cidr.contains_addr(&address)
            && address != cidr.network().address()
            && Some(address) != cidr.broadcast()
    }
}

/// What the station is made of.
#[derive(Clone, Debug)]
pub struct StationConfig {
    /// The station's own MAC address.
    pub mac: MacAddress,
    /// Its IPv4 address; without one it neither answers ARP nor DHCP.
    pub ipv4: Option<Ipv4Settings>,
    /// Its IPv6 address, whose first 64 bits are the prefix that it advertises. Without one it is silent in IPv6.
    pub ipv6: Option<Ipv6Addr>,
    /// The domain of the network's names, which guests search, for example `lan`.
    pub domain: String,
    /// The largest IP packet that the network carries.
    pub mtu: u16,
    /// Whether it answers DHCP.
    pub dhcp: bool,
    /// Whether it advertises its prefix to hosts asking for routers.
    pub advertise: bool,
    /// Whether it answers DNS, and advertises that.
    pub dns: bool,
    /// How long a guest may use an address before it asks again. `Duration::MAX` is for ever.
    pub lease: Duration,
    /// The way out of the network. There is none without an uplink; then guests get no default route.
    pub gateway: Option<Ipv4Addr>,
    /// Addresses for guests that are not on the list of hosts. Without them such guests get no answer.
    pub pool: Option<RangeInclusive<Ipv4Addr>>,
    /// A random number, from which the first sequence numbers of TCP connections are made.
    pub seed: u64,
}

impl StationConfig {
    pub(crate) fn check(&self) -> Result<(), StationConfigError> {
        if !self.mac.is_assignable() {
            return Err(StationConfigError::Mac);
        }
        if let Some(ipv4) = self.ipv4 {
            self.check_ipv4(ipv4)?;
        } else if self.dhcp || self.gateway.is_some() || self.pool.is_some() {
            return Err(StationConfigError::DhcpWithoutAddress);
        }
        if let Some(address) = self.ipv6 {
            if address.is_multicast() || address.is_unicast_link_local() || is_reserved(address) {
                return Err(StationConfigError::Ipv6Address(address));
            }
        } else if self.advertise {
            return Err(StationConfigError::AdvertisesWithoutAddress);
        }
        if !is_domain(&self.domain) {
            return Err(StationConfigError::Domain(self.domain.clone()));
        }
        let min_mtu = match self.ipv6 {
            Some(_) => MIN_IPV6_MTU,
            None => MIN_MTU,
        };
        if self.mtu < min_mtu {
            return Err(StationConfigError::Mtu(self.mtu, min_mtu));
        }
        if self.lease < MIN_LEASE {
            return Err(StationConfigError::Lease(self.lease));
        }
        Ok(())
    }

    fn check_ipv4(&self, ipv4: Ipv4Settings) -> Result<(), StationConfigError> {
        if !(8..=30).contains(&ipv4.prefix_len) {
            return Err(StationConfigError::PrefixLen(ipv4.prefix_len));
        }
        let usable = |address: Ipv4Addr| match ipv4.has_host(address) {
            true => Ok(()),
            false => Err(StationConfigError::NotInNetwork(
                address,
                ipv4.cidr().network().to_string(),
            )),
        };
        if !is_unicast(ipv4.address) {
            return Err(StationConfigError::Ipv4Address(ipv4.address));
        }
        usable(ipv4.address)?;
        if let Some(gateway) = self.gateway {
            usable(gateway)?;
        }
        if let Some(pool) = &self.pool {
            usable(*pool.start())?;
            usable(*pool.end())?;
            let (first, last) = (pool.start().to_bits(), pool.end().to_bits());
            if first > last || (last - first) as usize >= MAX_POOL_ADDRESSES {
                return Err(StationConfigError::Pool(*pool.start(), *pool.end()));
            }
        }
        Ok(())
    }

    /// The station's address on the link itself, from which advertisements have to come.
    pub(crate) fn link_local(&self) -> Ipv6Addr {
        slaac_address(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), self.mac)
    }
}

/// A host of the network: what the operator wrote down about a guest.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Host {
    /// Its name: one label of letters, digits, `-` and `_`.
    pub name: String,
    /// Other names that it has.
    pub aliases: Vec<String>,
    /// Its MAC address.
    pub mac: MacAddress,
    /// Its IPv4 address, which DHCP gives it.
    pub ipv4: Option<Ipv4Addr>,
    /// Its likely IPv6 address, [`slaac_address`] for most. DNS names the one that it is heard to use.
    pub ipv6: Option<Ipv6Addr>,
    /// The switch keeps it apart from other guests: neither learns of the other.
    pub isolated: bool,
}

/// The address that a guest makes for itself from a prefix of 64 bits and its MAC address (RFC 4291, appendix A).
pub fn slaac_address(prefix: Ipv6Addr, mac: MacAddress) -> Ipv6Addr {
    let mut octets = prefix.octets();
    octets[8..].copy_from_slice(&mac.interface_identifier());
    Ipv6Addr::from(octets)
}

/// What is wrong with a configuration.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StationConfigError {
    #[error(
        "the MAC address of a station must be that of one machine: not zero, and the first byte even"
    )]
    Mac,
    #[error("{0} cannot be a station's address: expected one of a single host, such as 10.0.0.1")]
    Ipv4Address(Ipv4Addr),
    #[error("a network has a prefix of 8 to 30 bits, found {0}")]
    PrefixLen(u8),
    #[error("{0} is not the address of a host in {1}")]
    NotInNetwork(Ipv4Addr, String),
    #[error("a pool has 1 to {MAX_POOL_ADDRESSES} addresses, the lowest first; found {0} to {1}")]
    Pool(Ipv4Addr, Ipv4Addr),
    #[error(
        "DHCP, a gateway and a pool need an IPv4 address of the station: give it one, or leave them out"
    )]
    DhcpWithoutAddress,
    #[error(
        "{0} cannot be a station's IPv6 address: expected a global or unique local one, such as fd00::1"
    )]
    Ipv6Address(Ipv6Addr),
    #[error(
        "to advertise a prefix the station needs an IPv6 address: give it one, or leave it out"
    )]
    AdvertisesWithoutAddress,
    #[error(
        "{0:?} is no domain: expected labels of letters, digits, '-' and '_' with dots between them, {MAX_DOMAIN_LEN} characters at most"
    )]
    Domain(String),
    #[error("an MTU of {0} is too small: expected {1} or more")]
    Mtu(u16, u16),
    #[error("a lease of {0:?} is too short: expected {MIN_LEASE:?} or more")]
    Lease(Duration),
}

/// What is wrong with a list of hosts.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    #[error("{0:?} is no name for a host: expected 1 to 63 letters, digits, '-' and '_'")]
    Name(String),
    #[error(
        "two hosts are called {0:?}: names and aliases must differ, also in more than upper and lower case"
    )]
    NameTwice(String),
    #[error("{0:?} and another host have the same MAC address")]
    MacTwice(String),
    #[error("{0:?} has an address that the station or another host has as well: {1}")]
    AddressTwice(String, core::net::IpAddr),
    #[error("{0:?} has the address {1}, which no host of this network can have")]
    Address(String, core::net::IpAddr),
    #[error("a network has {MAX_HOSTS} hosts at most, found {0}")]
    TooMany(usize),
}

pub(crate) fn is_label(label: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=63).contains(&label.len()) && label.bytes().all(is_allowed)
}

fn is_domain(domain: &str) -> bool {
    domain.len() <= MAX_DOMAIN_LEN && domain.split('.').all(is_label)
}

pub(crate) fn is_unicast(address: Ipv4Addr) -> bool {
    !(address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || address.is_broadcast())
}

fn is_reserved(address: Ipv6Addr) -> bool {
    address.is_unspecified() || address.is_loopback() || address.to_ipv4_mapped().is_some()
}

#[cfg(test)]
pub(crate) mod tests;
