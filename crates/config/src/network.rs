//! `[[network]]`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use l2::bridge::PortConfig;
use policy::{DEFAULT_DOMAIN, full_name};
use toml::de::DeValue;

use crate::input::InputError;
use crate::net::{Ipv4Subnet, Ipv6Subnet, Moderation, UplinkDevice, UplinkSpec, VLAN_BOUNDS};
use crate::pattern::{malformed, parse_ipv4};
use crate::port::{parse_moderation, vlan_of};
use crate::source::{Reading, Source, Table, Value};

/// The most networks of one daemon.
pub const MAX_NETWORKS: usize = 64;

/// The MTU of a network, when nothing else is said.
pub const DEFAULT_MTU: u16 = 1500;

/// The least and the most that it can be: what IPv6 needs, and what an IP packet can have.
pub const MTU_BOUNDS: RangeInclusive<u64> = 1280..=65_535;

/// The most addresses of a pool.
pub const MAX_POOL_ADDRESSES: u32 = 4096;

/// The shortest and the longest prefix of an IPv4 subnet: more hosts than a network has ports are no use, and fewer than two no network.
const PREFIX_LEN_BOUNDS: RangeInclusive<u8> = 16..=30;

/// The longest domain for names: with it an answer about any VM fits into the smallest packet that every resolver takes.
const MAX_DNS_DOMAIN_LEN: usize = 100;

const UPLINK_DEVICES: [&str; 2] = ["tap", "interface"];

/// The most addresses behind an uplink that can be said: a port's, without the gateway.
const MAX_UPLINK_ADDRESSES: usize = PortConfig::ADDRESSES_MAX;

/// Addresses as a person asked for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AddressRequest<T> {
    /// Nothing was said.
    #[default]
    Default,
    /// There are to be none.
    None,
    /// These.
    Given(T),
}

impl<T> AddressRequest<T> {
    /// Whether there are to be none.
    pub fn is_none(&self) -> bool {
        matches!(self, AddressRequest::None)
    }
}

/// A network as a person described it: what was left out is still open. What is there has been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkRequest {
    /// The domain that its VMs are of.
    pub domain: String,
    /// Its name.
    pub name: String,
    /// Its IPv4 addresses; by default a /24 that is made from the name.
    pub ipv4: AddressRequest<Ipv4Subnet>,
    /// Its IPv6 addresses; by default a unique local prefix.
    pub ipv6: AddressRequest<Ipv6Subnet>,
    /// The largest IP packet that it carries, in bytes.
    pub mtu: u16,
    /// Whether it gives addresses to guests; by default where it has IPv4.
    pub dhcp: Option<bool>,
    /// Whether it answers questions about names.
    pub dns: bool,
    /// Whether it advertises its prefix; by default where it has IPv6.
    pub router_advertisements: Option<bool>,
    /// The domain of its names; by default its own name.
    pub dns_domain: Option<String>,
    /// Addresses for guests that are not known.
    pub pool: Option<RangeInclusive<Ipv4Addr>>,
    /// Whether its ports are isolated, unless they say otherwise.
    pub isolated: bool,
    /// When the guests of its ports are interrupted, unless they say otherwise.
    pub moderation: Moderation,
    /// Its way out.
    pub uplink: Option<UplinkSpec>,
    /// Where packets for elsewhere go, behind the uplink.
    pub gateway: Option<Ipv4Addr>,
}

impl NetworkRequest {
    /// A network of this name in the [`DEFAULT_DOMAIN`], of which nothing else is said.
    pub fn named(name: &str) -> NetworkRequest {
        NetworkRequest {
            domain: DEFAULT_DOMAIN.to_owned(),
            name: name.to_owned(),
            ipv4: AddressRequest::Default,
            ipv6: AddressRequest::Default,
            mtu: DEFAULT_MTU,
            dhcp: None,
            dns: true,
            router_advertisements: None,
            dns_domain: None,
            pool: None,
            isolated: false,
            moderation: Moderation::default(),
            uplink: None,
            gateway: None,
        }
    }

    /// Its full name.
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.name)
    }

    /// Refuses what means nothing without addresses, or lies outside of them.
    fn check(&self) -> Result<(), InputError> {
        let pointless = |key, beside| Err(InputError::Pointless { key, beside });
        if self.ipv4.is_none() {
            let beside = "in a network without IPv4";
            if self.dhcp == Some(true) {
                return pointless("dhcp", beside);
            }
            if self.pool.is_some() {
                return pointless("pool", beside);
            }
            if self.gateway.is_some() {
                return pointless("gateway", beside);
            }
        }
        if self.pool.is_some() && self.dhcp == Some(false) {
            return pointless("pool", "in a network without DHCP");
        }
        if self.ipv6.is_none() && self.router_advertisements == Some(true) {
            let beside = "in a network without IPv6";
            return pointless("router-advertisements", beside);
        }
        Ok(())
    }
}

impl Source<'_> {
    pub(super) fn network(&self, table: &Table<'_>) -> Reading<NetworkRequest> {
        let mut keys = self.keys(table);
        let name = keys.name("a network")?;
        let domain = keys.domain()?;
        let ipv4 = keys.read("ipv4", |of, key, value| {
            of.subnet(key, value, parse_ipv4_subnet)
        })?;
        let ipv6 = keys.read("ipv6", |of, key, value| {
            of.subnet(key, value, parse_ipv6_subnet)
        })?;
        let mtu = keys.read("mtu", |of, key, value| of.number(key, value, MTU_BOUNDS))?;
        let request = NetworkRequest {
            domain,
            name: String::new(),
            ipv4: ipv4.unwrap_or_default(),
            ipv6: ipv6.unwrap_or_default(),
            // The bounds fit.
            mtu: mtu.map_or(DEFAULT_MTU, |mtu| mtu as u16),
            dhcp: keys.read("dhcp", Source::boolean)?,
            dns: keys.read("dns", Source::boolean)?.unwrap_or(true),
            router_advertisements: keys.read("router-advertisements", Source::boolean)?,
            dns_domain: keys.parsed("dns-domain", parse_dns_domain)?,
            pool: keys.parsed("pool", parse_pool)?,
            isolated: keys.read("isolated", Source::boolean)?.unwrap_or_default(),
            moderation: keys
                .parsed("moderation", parse_moderation)?
                .unwrap_or_default(),
            uplink: None,
            gateway: None,
        };
        let uplink = keys.read("uplink", Source::uplink)?;
        keys.end()?;
        let name = keys.required(name, "this [[network]]", "name", "name = \"lan\"")?;
        let (uplink, gateway) = uplink.unzip();
        let gateway = gateway.flatten();
        let request = NetworkRequest {
            name,
            uplink,
            gateway,
            ..request
        };
        keys.refuse(request.check())?;
        Ok(request)
    }

    /// Addresses, or `false` for none. `true` is what holds when nothing is said.
    fn subnet<T>(
        &self,
        key: &str,
        value: &Value<'_>,
        parse: impl Fn(&str) -> Result<T, InputError>,
    ) -> Reading<AddressRequest<T>> {
        match value.get_ref() {
            DeValue::Boolean(false) => Ok(AddressRequest::None),
            DeValue::Boolean(true) => Ok(AddressRequest::Default),
            DeValue::String(text) => {
                let subnet = self.refuse(value.span(), parse(text))?;
                Ok(AddressRequest::Given(subnet))
            }
            _ => Err(self.wrong_type(key, "a network such as \"10.1.2.0/24\", or false", value)),
        }
    }

    fn uplink(&self, key: &str, value: &Value<'_>) -> Reading<(UplinkSpec, Option<Ipv4Addr>)> {
        let expected = "a table, as in { tap = \"rd0\" } or { interface = \"eth1\" }";
        let table = self.table(key, value, expected)?;
        let mut keys = self.keys(&table);
        let tap = keys.parsed("tap", parse_interface)?;
        let interface = keys.parsed("interface", parse_interface)?;
        let gateway = keys.parsed("gateway", parse_ipv4)?;
        let addresses = keys.read("addresses", Source::addresses)?;
        let vlan = keys.read("vlan", Source::vlan)?;
        let trunk = keys.read("trunk", Source::vlans)?;
        let native = keys.read("native", Source::vlan)?;
        keys.end()?;
        let one = InputError::ExactlyOne {
            what: "this uplink",
            keys: &UPLINK_DEVICES,
            found: tap.is_some(),
            example: "write tap = \"rd0\" for a tap device, or interface = \"eth1\" for an interface that is there",
        };
        let device = match (tap, interface) {
            (Some(name), None) => UplinkDevice::Tap(name),
            (None, Some(name)) => UplinkDevice::Interface(name),
            _ => return keys.refuse(Err(one)),
        };
        let uplink = UplinkSpec {
            device,
            vlan: keys.refuse(vlan_of(vlan, trunk, native))?,
            addresses: addresses.unwrap_or_default(),
        };
        Ok((uplink, gateway))
    }

    /// Addresses of hosts, each of which is written once.
    fn addresses(&self, key: &'static str, value: &Value<'_>) -> Reading<Vec<IpAddr>> {
        let mut addresses = Vec::new();
        for element in self.elements(key, value, false)? {
            let text = self.string(key, element)?;
            let address = self.refuse(element.span(), parse_host(text))?;
            if addresses.contains(&address) {
                let (what, name) = ("an address behind the uplink", text.to_owned());
                return self.refuse(element.span(), Err(InputError::Duplicate { what, name }));
            }
            addresses.push(address);
        }
        if addresses.len() > MAX_UPLINK_ADDRESSES {
            let (what, limit) = ("addresses behind the uplink", MAX_UPLINK_ADDRESSES);
            return self.refuse(value.span(), Err(InputError::TooMany { what, limit }));
        }
        Ok(addresses)
    }

    pub(super) fn vlan(&self, key: &'static str, value: &Value<'_>) -> Reading<u64> {
        self.number(key, value, VLAN_BOUNDS)
    }

    pub(super) fn vlans(&self, key: &'static str, value: &Value<'_>) -> Reading<Vec<u64>> {
        self.numbers(key, value, VLAN_BOUNDS)
    }
}

/// Reads `10.1.2.0/24`, of which the network itself has the first address, or `10.1.2.7/24`, of which it has that one.
///
/// # Errors
/// [`InputError::Malformed`].
fn parse_ipv4_subnet(text: &str) -> Result<Ipv4Subnet, InputError> {
    let wrong = |remedy: &str| malformed("an IPv4 network", text, remedy);
    let example = "write it like \"10.1.2.0/24\", or \"10.1.2.7/24\" for a network that itself has the address 10.1.2.7";
    let (address, prefix_len) = text.split_once('/').ok_or_else(|| wrong(example))?;
    let own: Ipv4Addr = address.parse().map_err(|_| wrong(example))?;
    let prefix_len = parse_digits(prefix_len).ok_or_else(|| wrong(example))?;
    if !PREFIX_LEN_BOUNDS.contains(&prefix_len) {
        return Err(wrong("its prefix must have 16 to 30 bits"));
    }
    let mut subnet = Ipv4Subnet { own, prefix_len };
    if own == subnet.base() {
        subnet.own = Ipv4Addr::from_bits(own.to_bits() + 1);
    }
    if own.is_loopback() || own.is_multicast() || own.octets()[0] == 0 || own.octets()[0] >= 240 {
        return Err(wrong(
            "choose one whose addresses hosts may have, such as one of 10.0.0.0/8",
        ));
    }
    match subnet.number(subnet.own) {
        Some(_) => Ok(subnet),
        None => Err(wrong(
            "the last address of a network is its broadcast address: choose another, or write the first",
        )),
    }
}

/// Reads `fd12:3456:789a:1::/64`, of which the network itself has the first address, or one with that address.
///
/// # Errors
/// [`InputError::Malformed`].
fn parse_ipv6_subnet(text: &str) -> Result<Ipv6Subnet, InputError> {
    let wrong = |remedy: &str| malformed("an IPv6 network", text, remedy);
    let example = "write it like \"fd12:3456:789a:1::/64\"; its prefix always has 64 bits";
    let own: Option<Ipv6Addr> = text.strip_suffix("/64").and_then(|own| own.parse().ok());
    let own = own.ok_or_else(|| wrong(example))?;
    let is_usable = !own.is_multicast()
        && !own.is_unicast_link_local()
        && own.to_ipv4_mapped().is_none()
        && Ipv6Subnet { own }.prefix() != 0;
    if !is_usable {
        return Err(wrong(
            "choose a global prefix, or a unique local one that begins with fd",
        ));
    }
    let has_host = own.to_bits() as u64 != 0;
    let own = Ipv6Addr::from_bits(own.to_bits() | u128::from(!has_host));
    Ok(Ipv6Subnet { own })
}

/// Reads the domain of a network's names.
///
/// # Errors
/// [`InputError::Malformed`].
pub(crate) fn parse_dns_domain(text: &str) -> Result<String, InputError> {
    let is_domain = text.len() <= MAX_DNS_DOMAIN_LEN && text.split('.').all(is_label);
    let remedy = "use letters, digits and '-' with dots between them, 100 characters at most, as in \"lan\" or \"lab.example\"";
    match is_domain {
        true => Ok(text.to_owned()),
        false => Err(malformed("a domain for names", text, remedy)),
    }
}

/// Whether a name can be one label of a name of DNS.
pub(super) fn is_label(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=63).contains(&text.len()) && text.bytes().all(is_allowed)
}

/// An address that one host may have.
fn parse_host(text: &str) -> Result<IpAddr, InputError> {
    let is_hosts = |address: &IpAddr| {
        let broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
        !(address.is_unspecified() || address.is_multicast() || address.is_loopback() || broadcast)
    };
    let address = text.parse().ok().filter(is_hosts);
    address.ok_or_else(|| {
        malformed(
            "the address of a host",
            text,
            "write it like \"10.1.2.3\" or \"fe80::1\"",
        )
    })
}

fn parse_pool(text: &str) -> Result<RangeInclusive<Ipv4Addr>, InputError> {
    let wrong = |remedy: &str| malformed("a range of IPv4 addresses", text, remedy);
    let example = "write it like \"10.1.2.200-10.1.2.250\"";
    let (first, last) = text.split_once('-').ok_or_else(|| wrong(example))?;
    let [first, last] = [first, last].map(|text| text.trim().parse::<Ipv4Addr>());
    let (Ok(first), Ok(last)) = (first, last) else {
        return Err(wrong(example));
    };
    let count = last.to_bits().checked_sub(first.to_bits());
    match count {
        None => Err(wrong("the lower address comes first")),
        Some(count) if count >= MAX_POOL_ADDRESSES => {
            let remedy = format!("it may have {MAX_POOL_ADDRESSES} addresses at most");
            Err(wrong(&remedy))
        }
        Some(_) => Ok(first..=last),
    }
}

/// Reads the name of a network interface of Linux (IFNAMSIZ is 16, with the zero at the end).
fn parse_interface(text: &str) -> Result<String, InputError> {
    let is_name = (1..=15).contains(&text.len())
        && text != "."
        && text != ".."
        && text
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'/' && byte != b':' && byte != b'%');
    let remedy = "use the name of an interface, 1 to 15 characters, as `ip link` shows it";
    match is_name {
        true => Ok(text.to_owned()),
        false => Err(malformed("the name of a network interface", text, remedy)),
    }
}

fn parse_digits(text: &str) -> Option<u8> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}
