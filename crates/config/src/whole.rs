//! What can only be seen of a whole configuration: names, ports and addresses that are given twice, and sums that are too large.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use crate::files::check_files;
use crate::input::InputError;
use crate::pattern::malformed;
use crate::{
    Config, ConfigError, Hosts, MAX_RULES, Publish, PublishListen, ServiceTarget, Written,
    full_name, refuse,
};

/// Checks a configuration from all its sources together. VMs are checked where their lines are planned.
///
/// # Errors
/// [`ConfigError::Input`] with the place of what is there twice or too much.
pub fn check_whole(config: &Config) -> Result<(), ConfigError> {
    if let Some(rule) = config.all_rules().nth(MAX_RULES) {
        let (what, limit) = ("rules", MAX_RULES);
        return refuse(&rule.place, Err(InputError::TooMany { what, limit }));
    }
    unique(&config.networks, |network| {
        ("the network", network.full_name())
    })?;
    unique(&config.groups, |group| {
        ("the group", full_name(&group.domain, &group.name))
    })?;
    unique(&config.services, |service| {
        ("the service", service.full_name())
    })?;
    // Before the names: a port without one is named after its address.
    check_listeners(&config.publishes)?;
    unique(&config.publishes, |publish| {
        ("the published port", publish.name.clone())
    })?;
    check_files(config)?;
    let mut ports = BTreeMap::new();
    for service in &config.services {
        let of = &service.value;
        let owner = ports.insert((of.domain.clone(), of.port), of.full_name());
        let what = format!("port {} of the host", of.port);
        taken(&service.place, what, owner)?;
        if let ServiceTarget::Tcp(server) | ServiceTarget::Udp(server) = &of.target {
            refuse(&service.place, check_server(server, &config.hosts))?;
        }
    }
    Ok(())
}

/// Refuses a published port that listens where another does: at the same place, or at its port of all addresses.
fn check_listeners(publishes: &[Written<Publish>]) -> Result<(), ConfigError> {
    let mut places = BTreeSet::new();
    let mut addresses: BTreeMap<(bool, u16), Vec<(IpAddr, &PublishListen)>> = BTreeMap::new();
    for publish in publishes {
        let listen = &publish.value.listen;
        let clash = |other: &PublishListen| {
            let (listen, other) = (listen.to_string(), other.to_string());
            refuse(
                &publish.place,
                Err(InputError::SharedListener { listen, other }),
            )
        };
        if !places.insert(listen.to_string()) {
            return clash(listen);
        }
        let (is_tcp, written) = match listen {
            PublishListen::Tcp(written) => (true, written),
            PublishListen::Udp(written) => (false, written),
            PublishListen::Unix { .. } => continue,
        };
        let Ok(address) = written.parse::<SocketAddr>() else {
            continue;
        };
        let there = addresses.entry((is_tcp, address.port())).or_default();
        let overlaps = |other: &IpAddr| {
            let is_all = other.is_unspecified() || address.ip().is_unspecified();
            is_all && other.is_ipv4() == address.is_ipv4()
        };
        match there.iter().find(|(other, _)| overlaps(other)) {
            Some((_, other)) if address.port() != 0 => return clash(other),
            _ => there.push((address.ip(), listen)),
        }
    }
    Ok(())
}

/// Refuses a server whose name `[hosts]` lists for other ports alone.
fn check_server(server: &str, hosts: &Hosts) -> Result<(), InputError> {
    let Some((name, port)) = server.rsplit_once(':') else {
        return Ok(());
    };
    let (name, port) = (name.to_ascii_lowercase(), port.parse().unwrap_or_default());
    if hosts.addresses(&name, port).is_none_or(|of| !of.is_empty()) {
        return Ok(());
    }
    let remedy = format!(
        "{}; change either, or list an address without a port",
        hosts.ports_words(&name)
    );
    Err(malformed("a server that [hosts] knows", server, &remedy))
}

fn unique<T>(
    all: &[Written<T>],
    name: impl Fn(&T) -> (&'static str, String),
) -> Result<(), ConfigError> {
    let mut seen = BTreeSet::new();
    for one in all {
        let (what, name) = name(&one.value);
        if !seen.insert(name.clone()) {
            return refuse(&one.place, Err(InputError::Duplicate { what, name }));
        }
    }
    Ok(())
}

fn taken(place: &str, what: String, owner: Option<String>) -> Result<(), ConfigError> {
    match owner {
        Some(owner) => refuse(place, Err(InputError::Taken { what, owner })),
        None => Ok(()),
    }
}
