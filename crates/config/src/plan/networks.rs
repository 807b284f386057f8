//! Networks: names, addresses and uplinks that have one owner each.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::Plan;
use super::ports::{Occupied, taken};
use crate::addresses::STATION_NUMBER;
use crate::input::{InputError, nearest_full_name};
use crate::net::{Ipv4Subnet, Ipv6Subnet, Moderation, NetworkSpec, StationSpec};
use crate::network::AddressRequest;
use crate::network::parse_dns_domain;
use crate::pattern::malformed;
use crate::{Config, ConfigError, NetworkRequest, refuse};

/// A network, and what its ports are unless they say otherwise.
#[derive(Debug, Clone)]
pub(super) struct PlannedNetwork {
    pub(super) spec: NetworkSpec,
    pub(super) isolated: bool,
    pub(super) moderation: Moderation,
}

impl Plan {
    /// The networks, by full name.
    pub fn networks(&self) -> impl Iterator<Item = &NetworkSpec> {
        self.networks.values().map(|network| &network.spec)
    }

    /// The network with this full name.
    pub fn network(&self, full_name: &str) -> Option<&NetworkSpec> {
        self.networks.get(full_name).map(|network| &network.spec)
    }

    /// Of the networks, the one that may be meant by another name.
    pub fn nearest_network(&self, full_name: &str) -> Option<String> {
        let names: Vec<String> = self.networks.keys().cloned().collect();
        nearest_full_name(full_name, &names)
    }

    /// Makes the networks those of a configuration. `before` is what had an owner until now: none becomes a network's own.
    ///
    /// # Errors
    /// [`ConfigError::Input`] with the place of the network that collides with another, or that would have to change what cannot change.
    pub(super) fn change_networks(
        &mut self,
        config: &Config,
        before: &Occupied,
    ) -> Result<(), ConfigError> {
        let names: BTreeSet<String> = config
            .networks
            .iter()
            .map(|network| network.value.full_name())
            .collect();
        for network in &config.networks {
            let NetworkRequest { domain, name, .. } = &network.value;
            let in_use =
                |domain: &str, name: &str| names.contains(&policy::full_name(domain, name));
            self.addresses.remember_network(domain, name, in_use);
        }
        let mut planned: BTreeMap<String, PlannedNetwork> = BTreeMap::new();
        // Those that were asked for are given first, so that a default one never takes what a later network names.
        let (given, default): (Vec<_>, Vec<_>) = config
            .networks
            .iter()
            .partition(|network| matches!(network.value.ipv4, AddressRequest::Given(_)));
        for network in given.into_iter().chain(default) {
            let request = &network.value;
            let spec = refuse(
                &network.place,
                self.resolve_network(request, &planned, before),
            )?;
            let network = PlannedNetwork {
                spec,
                isolated: request.isolated,
                moderation: request.moderation,
            };
            planned.insert(request.full_name(), network);
        }
        self.networks = planned;
        Ok(())
    }

    fn resolve_network(
        &mut self,
        request: &NetworkRequest,
        planned: &BTreeMap<String, PlannedNetwork>,
        before: &Occupied,
    ) -> Result<NetworkSpec, InputError> {
        let NetworkRequest { domain, name, .. } = request;
        let ipv4 = self.subnet(request, planned)?;
        let ipv6 = match request.ipv6 {
            AddressRequest::None => None,
            AddressRequest::Given(subnet) => Some(subnet),
            AddressRequest::Default => Some(self.addresses.default_ipv6(domain, name)),
        };
        for (owner, other) in planned {
            if let (Some(ours), Some(theirs)) = (ipv6, other.spec.station.ipv6) {
                if ours.prefix() == theirs.prefix() {
                    return Err(taken(format!("the prefix of {ours}"), owner));
                }
            }
            if let (Some(ours), Some(theirs)) = (&request.uplink, &other.spec.uplink) {
                if ours.device.name() == theirs.device.name() {
                    return Err(taken(format!("the {}", ours.device), owner));
                }
            }
        }
        if let Some(subnet) = ipv4 {
            if let Some(vm) = before.vm_with(&request.full_name(), subnet.own) {
                return Err(taken(format!("the address {}", subnet.own), vm));
            }
        }
        check_outside(request, ipv4, ipv6)?;
        check_gateway_and_pool(request, ipv4)?;
        let dns_domain = match &request.dns_domain {
            Some(domain) => domain.clone(),
            None => parse_dns_domain(name)?,
        };
        let spec = NetworkSpec {
            domain: domain.clone(),
            name: name.clone(),
            mtu: request.mtu,
            station: StationSpec {
                mac: self.addresses.mac(domain, name, STATION_NUMBER),
                ipv4,
                ipv6,
                dns_domain,
                dhcp: request.dhcp.unwrap_or(true) && ipv4.is_some(),
                dns: request.dns,
                router_advertisements: request.router_advertisements.unwrap_or(true)
                    && ipv6.is_some(),
                pool: request.pool.clone(),
                gateway: request.gateway,
            },
            uplink: request.uplink.clone(),
        };
        self.check_fixed(&spec)?;
        Ok(spec)
    }

    /// The IPv4 addresses that a network asks for, or others; none that are another's.
    fn subnet(
        &mut self,
        request: &NetworkRequest,
        planned: &BTreeMap<String, PlannedNetwork>,
    ) -> Result<Option<Ipv4Subnet>, InputError> {
        let owner = |subnet: Ipv4Subnet| {
            let overlaps = |other: &PlannedNetwork| {
                let other = other.spec.station.ipv4;
                other.is_some_and(|other| other.overlaps(subnet))
            };
            let mut planned = planned.iter();
            planned.find(|(_, other)| overlaps(other))
        };
        Ok(match request.ipv4 {
            AddressRequest::None => None,
            AddressRequest::Given(subnet) => match owner(subnet) {
                Some((owner, _)) => return Err(taken(format!("a part of {subnet}"), owner)),
                None => Some(subnet),
            },
            AddressRequest::Default => {
                let NetworkRequest { domain, name, .. } = request;
                let is_free = |subnet| owner(subnet).is_none();
                Some(self.addresses.default_subnet(domain, name, is_free))
            }
        })
    }

    /// Refuses what cannot change of a network that is there.
    fn check_fixed(&self, spec: &NetworkSpec) -> Result<(), InputError> {
        if let Some(before) = self.network(&spec.full_name()) {
            let fixed = [
                ("mtu", before.mtu == spec.mtu),
                (
                    "uplink",
                    before.uplink == spec.uplink && before.station.gateway == spec.station.gateway,
                ),
            ];
            if let Some((key, _)) = fixed.into_iter().find(|(_, same)| !same) {
                let network = spec.full_name();
                return Err(InputError::FixedOfNetwork { key, network });
            }
        }
        Ok(())
    }
}

/// Refuses addresses behind the uplink that are the network's own, the gateway's once more, or in the pool.
fn check_outside(
    request: &NetworkRequest,
    ipv4: Option<Ipv4Subnet>,
    ipv6: Option<Ipv6Subnet>,
) -> Result<(), InputError> {
    let own = [
        ipv4.map(|subnet| IpAddr::V4(subnet.own)),
        ipv6.map(|subnet| IpAddr::V6(subnet.own)),
        request.gateway.map(IpAddr::V4),
    ];
    let is_given = |address: &&IpAddr| match address {
        IpAddr::V4(address) => {
            let pool = request.pool.as_ref();
            pool.is_some_and(|pool| pool.contains(address))
        }
        IpAddr::V6(_) => false,
    };
    let mut outside = request.uplink.iter().flat_map(|uplink| &uplink.addresses);
    match outside.find(|address| own.contains(&Some(**address)) || is_given(address)) {
        Some(address) => Err(malformed(
            "an address behind this network's uplink",
            &address.to_string(),
            "it is the network's own, its gateway's or in its pool: leave it out",
        )),
        None => Ok(()),
    }
}

/// Refuses a gateway or a pool that is not one of this network's.
fn check_gateway_and_pool(
    request: &NetworkRequest,
    subnet: Option<Ipv4Subnet>,
) -> Result<(), InputError> {
    let Some(subnet) = subnet else {
        return Ok(());
    };
    let is_host = |address| subnet.number(address).is_some() && address != subnet.own;
    let remedy = format!(
        "the network {:?} is {}/{}, itself {}: choose among its other addresses, or set ipv4",
        request.name,
        subnet.base(),
        subnet.prefix_len,
        subnet.own
    );
    if let Some(gateway) = request.gateway.filter(|gateway| !is_host(*gateway)) {
        return Err(malformed(
            "a gateway of this network",
            &gateway.to_string(),
            &remedy,
        ));
    }
    if let Some(pool) = &request.pool {
        let (first, last) = (*pool.start(), *pool.end());
        let is_inside = is_host(first) && is_host(last) && !pool.contains(&subnet.own);
        let has_gateway = request
            .gateway
            .is_some_and(|gateway| pool.contains(&gateway));
        if !is_inside || has_gateway {
            return Err(malformed(
                "a pool of this network",
                &format!("{first}-{last}"),
                &remedy,
            ));
        }
    }
    Ok(())
}
