//! `[hosts]`: names whose addresses are written down rather than looked up, for egress and for services.

use std::collections::HashMap;
use std::net::IpAddr;

use toml::de::DeValue;
use wire::destination::Host;

use super::ConfigError;
use super::source::{Source, Value};
use crate::input::InputError;

/// The most names in `[hosts]`.
pub const MAX_HOSTS: usize = 4096;

/// Addresses by name, in lower case and without a dot at the end.
pub type Hosts = HashMap<String, Vec<IpAddr>>;

impl Source<'_> {
    pub(super) fn hosts(&self, value: &Value<'_>) -> Result<Hosts, ConfigError> {
        let DeValue::Table(table) = value.get_ref() else {
            let expected = "a table, as in deb.example = \"192.0.2.1\"";
            return Err(self.wrong_type("hosts", expected, value));
        };
        if table.len() > MAX_HOSTS {
            let too_many = InputError::TooMany {
                what: "names in [hosts]",
                limit: MAX_HOSTS,
            };
            return self.refuse(value.span(), Err(too_many));
        }
        let mut hosts = Hosts::new();
        for (key, value) in table.iter() {
            let text = key.get_ref().as_ref();
            let Ok(Host::Name(name)) = Host::parse(text) else {
                let host = text.to_owned();
                return self.refuse(key.span(), Err(InputError::HostName { host }));
            };
            let mut addresses = Vec::new();
            for (span, text) in self.strings("an address", value, false)? {
                let address = text.parse::<IpAddr>().map_err(|_| InputError::HostAddress {
                    address: text.to_owned(),
                });
                addresses.push(self.refuse(span, address)?);
            }
            if hosts.insert(name, addresses).is_some() {
                let key = text.to_owned();
                return self.refuse(value.span(), Err(InputError::RepeatedKey { key }));
            }
        }
        Ok(hosts)
    }
}
