//! `[hosts]`: names whose addresses are written down rather than looked up, for egress and for services.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use toml::de::{DeTable, DeValue};
use wire::destination::Host;

use crate::input::InputError;
use crate::source::{Reading, Source, Value};

/// The most names in `[hosts]`.
pub const MAX_HOSTS: usize = 4096;

/// The most addresses of a name, written down or looked up.
pub const MAX_ADDRESSES: usize = 16;

/// An address that is written down for a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedAddress {
    /// The address, never an IPv4 address in the guise of an IPv6 one.
    pub address: IpAddr,
    /// The only port that it is for; none if it is for all.
    pub port: Option<u16>,
}

/// The names of `[hosts]` with their addresses. Names are in lower case and without a dot at the end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hosts(BTreeMap<String, Vec<ListedAddress>>);

impl Hosts {
    /// The addresses of a name for a port, in order. None of a name that is not listed; of one that is, there may be none for this port.
    pub fn addresses(&self, name: &str, port: u16) -> Option<Vec<IpAddr>> {
        let listed = self.get(name)?.iter();
        let of_port = listed.filter(|listed| listed.port.is_none_or(|of| of == port));
        Some(of_port.map(|listed| listed.address).collect())
    }

    /// For which ports a name is listed, in words, if it is listed for some alone.
    pub fn ports_words(&self, name: &str) -> String {
        let listed = self.get(name).unwrap_or_default().iter();
        let ports: BTreeSet<u16> = listed.filter_map(|listed| listed.port).collect();
        let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
        let name = name.strip_suffix('.').unwrap_or(name);
        format!("[hosts] lists {name} for port {} alone", ports.join(", "))
    }

    /// The names with their addresses.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[ListedAddress])> {
        let listed = self.0.iter();
        listed.map(|(name, addresses)| (name.as_str(), addresses.as_slice()))
    }

    /// Adds what another source lists, which wins.
    pub(super) fn extend(&mut self, later: Hosts) {
        self.0.extend(later.0);
    }

    /// What is listed of a name, which may have a dot at the end.
    pub fn get(&self, name: &str) -> Option<&[ListedAddress]> {
        let name = name.strip_suffix('.').unwrap_or(name);
        self.0.get(name).map(Vec::as_slice)
    }
}

impl FromIterator<(String, Vec<ListedAddress>)> for Hosts {
    fn from_iter<T: IntoIterator<Item = (String, Vec<ListedAddress>)>>(listed: T) -> Hosts {
        Hosts(listed.into_iter().collect())
    }
}

impl Source<'_> {
    pub(super) fn hosts(&self, key: &str, value: &Value<'_>) -> Reading<Hosts> {
        let expected = "a table, as in \"deb.example\" = \"192.0.2.1\"";
        let table = self.table(key, value, expected)?;
        let table = table.get_ref();
        if table.len() > MAX_HOSTS {
            let too_many = InputError::TooMany {
                what: "names in [hosts]",
                limit: MAX_HOSTS,
            };
            return self.refuse(value.span(), Err(too_many));
        }
        let mut hosts = Hosts::default();
        for (key, value) in table.iter() {
            let text = key.get_ref().as_ref();
            if let DeValue::Table(below) = value.get_ref() {
                let host = dotted(text, below);
                return self.refuse(key.span(), Err(InputError::HostWithoutQuotes { host }));
            }
            let Ok(Host::Name(name)) = Host::parse(text) else {
                let host = text.to_owned();
                return self.refuse(key.span(), Err(InputError::HostName { host }));
            };
            let addresses = self.addresses_of_host(value)?;
            if hosts.0.insert(name, addresses).is_some() {
                let key = text.to_owned();
                return self.refuse(value.span(), Err(InputError::RepeatedKey { key }));
            }
        }
        Ok(hosts)
    }

    fn addresses_of_host(&self, value: &Value<'_>) -> Reading<Vec<ListedAddress>> {
        let strings = self.strings("addresses of a name", value, false)?;
        if strings.len() > MAX_ADDRESSES {
            let too_many = InputError::TooMany {
                what: "addresses of one name",
                limit: MAX_ADDRESSES,
            };
            return self.refuse(value.span(), Err(too_many));
        }
        let mut addresses: Vec<ListedAddress> = Vec::with_capacity(strings.len());
        for (span, text) in strings {
            let listed = self.refuse(span, parse_listed(text))?;
            if !addresses.contains(&listed) {
                addresses.push(listed);
            }
        }
        Ok(addresses)
    }
}

/// `192.0.2.1`, or `192.0.2.1:80` for one port.
fn parse_listed(text: &str) -> Result<ListedAddress, InputError> {
    let of_port = |to: SocketAddr| (to.ip(), Some(to.port()));
    let (address, port) = match text.parse::<IpAddr>() {
        Ok(address) => Some((address, None)),
        Err(_) => text.parse().ok().map(of_port),
    }
    .filter(|(_, port)| *port != Some(0))
    .ok_or_else(|| InputError::HostAddress {
        address: text.chars().take(128).collect(),
    })?;
    Ok(ListedAddress {
        address: address.to_canonical(),
        port,
    })
}

/// A name that was written without quotes, so that TOML reads each part as a table.
fn dotted(first: &str, below: &DeTable<'_>) -> String {
    let mut name = first.to_owned();
    let mut below = Some(below);
    while let Some((key, value)) = below.and_then(|table| table.iter().next()) {
        name = format!("{name}.{}", key.get_ref());
        below = match value.get_ref() {
            DeValue::Table(table) if name.len() < 256 => Some(table),
            _ => None,
        };
    }
    name
}
