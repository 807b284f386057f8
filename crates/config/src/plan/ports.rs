//! Ports: sockets and addresses that have one owner each.
//!
//! What a VM is given depends on its networks, and what a network gives depends on the other VMs. So all ports are worked out anew
//! whenever anything changes; what is remembered keeps the result the same for those that did not change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::path::PathBuf;

use wire::ethernet::MacAddress;

use super::Plan;
use crate::addresses::Addresses;
use crate::input::{InputError, check_socket_path, did_you_mean};
use crate::line::LineSpec;
use crate::net::{NetHost, NetworkSpec, PortSpec, hears_station};
use crate::network::is_label;
use crate::pattern::malformed;
use crate::{PortRequest, VmRequest};

/// The most ports of VMs in networks, over all VMs of a daemon.
pub const MAX_PORTS: usize = 2048;

/// Addresses that have an owner.
#[derive(Debug, Clone, Default)]
pub(super) struct Occupied {
    /// Its owner: a VM in a network.
    macs: BTreeMap<MacAddress, Owner>,
    /// By network, and then by address.
    ipv4: BTreeMap<(String, Ipv4Addr), Owner>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Owner {
    network: String,
    /// Empty for the network itself.
    vm: String,
}

/// A port that cannot be had, and why.
pub(super) struct PortRefusal {
    /// Full name of its VM.
    pub(super) vm: String,
    /// Where a file names its network.
    pub(super) place: Option<String>,
    pub(super) error: InputError,
}

/// A port on its way from a request to a specification.
struct Wanted {
    /// Full name of the VM.
    vm: String,
    domain: String,
    name: String,
    /// Full name of the network.
    network: String,
    request: PortRequest,
    ipv4: Option<Ipv4Addr>,
    /// The VM's number in the network.
    number: Option<u32>,
}

impl Occupied {
    /// The VM that has an address in a network.
    pub(super) fn vm_with(&self, network: &str, address: Ipv4Addr) -> Option<&str> {
        let owner = self.ipv4.get(&(network.to_owned(), address))?;
        Some(owner.vm.as_str()).filter(|vm| !vm.is_empty())
    }

    /// Adds the addresses of a network itself.
    fn insert_network(&mut self, network: &NetworkSpec) {
        let name = network.full_name();
        let owner = Owner {
            network: name.clone(),
            vm: String::new(),
        };
        if let Some(subnet) = network.station.ipv4 {
            self.ipv4.insert((name, subnet.own), owner.clone());
        }
        self.macs.insert(network.station.mac, owner);
    }
}

impl Plan {
    /// The same plan, with what is remembered of networks.
    pub fn remembering(mut self, addresses: Addresses) -> Plan {
        self.addresses = addresses;
        self
    }

    /// What is remembered of networks and the VMs in them, also of those that are away.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// The guests that a network gives addresses to, and whose names it knows: those of its own VLAN.
    pub fn net_hosts(&self, network: &str) -> Vec<NetHost> {
        let port = |line: &LineSpec| {
            let mut ports = line.ports.iter();
            let is_heard = |port: &&PortSpec| port.network == network && hears_station(&port.vlan);
            ports.find(is_heard).cloned()
        };
        let members: Vec<(&LineSpec, PortSpec)> = self
            .lines
            .values()
            .filter_map(|line| Some((line, port(line)?)))
            .collect();
        // Names before aliases, so that no alias takes the name of another VM.
        let mut taken = BTreeSet::new();
        let mut label = |name: &str| {
            // A dot would make two labels of a name. Two VMs may come to the same name then, and the second has none.
            let label = name.replace('.', "-");
            (is_label(&label) && taken.insert(label.clone())).then_some(label)
        };
        let names: Vec<Option<String>> =
            members.iter().map(|(line, _)| label(&line.name)).collect();
        let mut hosts = Vec::new();
        for ((line, port), name) in members.into_iter().zip(names) {
            let mut names = name
                .into_iter()
                .chain(line.aliases.iter().filter_map(|alias| label(alias)));
            // A host has a name: that of its MAC address, if no other is left.
            let name = names
                .next()
                .unwrap_or_else(|| port.mac.to_string().replace(':', "-"));
            hosts.push(NetHost {
                name,
                aliases: names.collect(),
                mac: port.mac,
                ipv4: port.ipv4,
                ipv6: port.ipv6,
                isolated: port.isolated,
            });
        }
        hosts
    }

    /// What has an owner now.
    pub(super) fn occupied(&self) -> Occupied {
        let mut occupied = Occupied::default();
        self.networks()
            .for_each(|network| occupied.insert_network(network));
        for port in self.lines.values().flat_map(|line| &line.ports) {
            let owner = Owner {
                network: port.network.clone(),
                vm: port.vm.clone(),
            };
            if let Some(ipv4) = port.ipv4 {
                occupied
                    .ipv4
                    .insert((port.network.clone(), ipv4), owner.clone());
            }
            occupied.macs.insert(port.mac, owner);
        }
        occupied
    }

    /// Works out the ports of all VMs. `before` is what had an owner until now: no other gets it at the same time.
    ///
    /// # Errors
    /// [`PortRefusal`] with the VM whose port cannot be had. Then some ports are new and some are old.
    pub(super) fn renew_ports(&mut self, before: &Occupied) -> Result<(), PortRefusal> {
        let mut wanted = self.wanted();
        let refused = |port: &Wanted, error| PortRefusal {
            vm: port.vm.clone(),
            place: port.request.place.clone(),
            error,
        };
        if let Some(beyond) = wanted.get(MAX_PORTS) {
            let (what, limit) = ("ports of VMs in networks", MAX_PORTS);
            return Err(refused(beyond, InputError::TooMany { what, limit }));
        }
        let mut claims = Claims::new(before, self);
        for port in &mut wanted {
            self.claim_given(port, &mut claims)
                .map_err(|error| refused(port, error))?;
        }
        for port in &mut wanted {
            self.claim_number(port, &mut claims)
                .map_err(|error| refused(port, error))?;
        }
        let mut ports: BTreeMap<String, Vec<PortSpec>> = BTreeMap::new();
        for port in wanted {
            let spec = self
                .port(&port, &mut claims)
                .map_err(|error| refused(&port, error))?;
            ports.entry(port.vm).or_default().push(spec);
        }
        for (name, line) in &mut self.lines {
            line.ports = ports.remove(name).unwrap_or_default();
        }
        Ok(())
    }

    fn wanted(&self) -> Vec<Wanted> {
        let of_line = |line: &LineSpec| {
            let wanted = |request: &PortRequest| Wanted {
                vm: line.full_name(),
                domain: line.domain.clone(),
                name: line.name.clone(),
                network: policy::full_name(&line.domain, &request.network),
                request: request.clone(),
                ipv4: None,
                number: None,
            };
            line.port_requests.iter().map(wanted).collect::<Vec<_>>()
        };
        self.lines.values().flat_map(of_line).collect()
    }

    /// Takes what the port asks for by itself.
    fn claim_given(&self, port: &mut Wanted, claims: &mut Claims<'_>) -> Result<(), InputError> {
        let Some(network) = self.network(&port.network) else {
            let names = self
                .networks()
                .filter(|network| network.domain == port.domain);
            let names: Vec<&str> = names.map(|network| network.name.as_str()).collect();
            let meant = did_you_mean(&self.nearest_network(&port.network));
            return Err(InputError::UnknownNetwork {
                name: port.request.network.clone(),
                domain: port.domain.clone(),
                known: match names.as_slice() {
                    [] => format!("{meant}: "),
                    names => format!("{meant}: choose one of {}, or ", names.join(", ")),
                },
            });
        };
        if let Some(mac) = port.request.mac {
            claims.take_mac(mac, port)?;
        }
        let Some(address) = port.request.ipv4 else {
            return Ok(());
        };
        if hears_station(&port.request.vlan) {
            let Some(subnet) = network.station.ipv4 else {
                let (key, beside) = ("ipv4", "in a network without IPv4");
                return Err(InputError::Pointless { key, beside });
            };
            let number = subnet
                .number(address)
                .filter(|number| is_assignable(network, *number));
            let Some(number) = number else {
                let remedy = format!(
                    "the network {:?} is {}/{}, itself {}; choose another of it that is neither behind its uplink nor in its pool",
                    port.network,
                    subnet.base(),
                    subnet.prefix_len,
                    subnet.own
                );
                return Err(malformed(
                    "an address for a VM",
                    &address.to_string(),
                    &remedy,
                ));
            };
            claims.numbers.insert((port.network.clone(), number));
            port.number = Some(number);
        }
        port.ipv4 = Some(address);
        claims.take_ipv4(address, port)
    }

    /// Gives the port the number that its VM had before, or one that is free.
    fn claim_number(&self, port: &mut Wanted, claims: &mut Claims<'_>) -> Result<(), InputError> {
        let Some(network) = self
            .network(&port.network)
            .filter(|_| port.number.is_none())
        else {
            return Ok(());
        };
        let subnet = network.station.ipv4;
        let is_free = |number: u32| {
            let address = subnet.and_then(|subnet| subnet.host(number));
            is_assignable(network, number)
                && !claims.numbers.contains(&(port.network.clone(), number))
                && address.is_none_or(|address| claims.ipv4_is_free(address, port).is_ok())
        };
        let Wanted { domain, name, .. } = &*port;
        let had = self
            .addresses
            .host(domain, &network.name, name)
            .filter(|had| is_free(*had));
        let number = had.or_else(|| self.addresses.free_number(domain, &network.name, is_free));
        let number = number.ok_or_else(|| InputError::NetworkFull {
            network: port.network.clone(),
        })?;
        claims.numbers.insert((port.network.clone(), number));
        port.number = Some(number);
        let address = subnet.and_then(|subnet| subnet.host(number));
        if let Some(address) = address.filter(|_| hears_station(&port.request.vlan)) {
            port.ipv4 = Some(address);
            claims.take_ipv4(address, port)?;
        }
        Ok(())
    }

    /// Fills in the rest.
    fn port(&mut self, port: &Wanted, claims: &mut Claims<'_>) -> Result<PortSpec, InputError> {
        let request = &port.request;
        let number = port.number.unwrap_or_default();
        let Wanted { domain, name, .. } = port;
        let lines = &self.lines;
        let in_use = |domain: &str, network: &str, vm: &str| {
            let line = lines.get(&policy::full_name(domain, vm));
            line.is_some_and(|line| {
                line.port_requests
                    .iter()
                    .any(|port| port.network == network)
            })
        };
        self.addresses
            .remember_host((domain, &request.network, name), number, in_use);
        let made = self.addresses.mac(domain, &request.network, number);
        let mac = request.mac.unwrap_or(made);
        if request.mac.is_none() {
            claims.take_mac(mac, port)?;
        }
        let socket = self.port_socket(&port.vm, request);
        check_socket_path(&socket)?;
        if let Some(owner) = claims
            .paths
            .insert(socket.clone(), format!("VM {:?}", port.vm))
        {
            return Err(InputError::DuplicatePath {
                path: socket,
                owner,
            });
        }
        // Found when what it asks for was taken.
        let network = &self.networks[&port.network];
        let prefix = network
            .spec
            .station
            .ipv6
            .filter(|_| hears_station(&request.vlan));
        Ok(PortSpec {
            network: port.network.clone(),
            vm: port.vm.clone(),
            socket,
            mac,
            ipv4: port.ipv4,
            ipv6: prefix.map(|prefix| prefix.of_mac(mac)),
            vlan: request.vlan.clone(),
            isolated: request.isolated.unwrap_or(network.isolated),
            learn: request.learn,
            rates: request.rates,
            queue_pairs: request.queue_pairs,
            moderation: request.moderation.unwrap_or(network.moderation),
        })
    }

    /// Whether the ports that a VM keeps have the sockets and queues that they had, which their VMM is connected to.
    pub(super) fn keeps_ports(&self, line: &LineSpec, request: &VmRequest) -> bool {
        let vm = line.full_name();
        line.ports.iter().all(|port| {
            let mut wanted = request.ports.iter();
            let wanted = wanted
                .find(|wanted| port.network == policy::full_name(&line.domain, &wanted.network));
            wanted.is_none_or(|wanted| {
                wanted.queue_pairs == port.queue_pairs
                    && self.port_socket(&vm, wanted) == port.socket
            })
        })
    }

    /// `web.net-lan.vhost`, or `red.web.net-lan.vhost` in the domain `red`.
    pub(super) fn port_socket(&self, vm: &str, request: &PortRequest) -> PathBuf {
        let default = || {
            let vm = vm.replace('/', ".");
            self.runtime_dir
                .join(format!("{vm}.net-{}.vhost", request.network))
        };
        request.vhost_user.clone().unwrap_or_else(default)
    }
}

/// What the ports of a plan take, one after the other.
struct Claims<'a> {
    before: &'a Occupied,
    now: Occupied,
    /// Numbers in networks.
    numbers: BTreeSet<(String, u32)>,
    /// Every socket, and its owner in words.
    paths: BTreeMap<PathBuf, String>,
}

impl<'a> Claims<'a> {
    fn new(before: &'a Occupied, plan: &Plan) -> Claims<'a> {
        let mut paths = BTreeMap::from([
            (
                crate::directories::control_socket(&plan.runtime_dir),
                "the control API".to_owned(),
            ),
            (
                crate::directories::circuit_socket(&plan.runtime_dir),
                "the switchboard".to_owned(),
            ),
            (
                crate::directories::lock_file(&plan.runtime_dir),
                "the daemon's lock".to_owned(),
            ),
        ]);
        for line in plan.lines.values() {
            let owner = format!("VM {:?}", line.full_name());
            paths.extend(
                line.own_sockets()
                    .map(|path| (path.to_owned(), owner.clone())),
            );
        }
        let mut now = Occupied::default();
        plan.networks()
            .for_each(|network| now.insert_network(network));
        Claims {
            before,
            now,
            numbers: BTreeSet::new(),
            paths,
        }
    }

    fn take_mac(&mut self, mac: MacAddress, port: &Wanted) -> Result<(), InputError> {
        let owner = owner(port);
        let others = [&self.now.macs, &self.before.macs].map(|macs| macs.get(&mac));
        free(format!("the MAC address {mac}"), others, &owner)?;
        self.now.macs.insert(mac, owner);
        Ok(())
    }

    fn take_ipv4(&mut self, address: Ipv4Addr, port: &Wanted) -> Result<(), InputError> {
        self.ipv4_is_free(address, port)?;
        self.now
            .ipv4
            .insert((port.network.clone(), address), owner(port));
        Ok(())
    }

    /// Refuses an address of the port's network that is another's.
    fn ipv4_is_free(&self, address: Ipv4Addr, port: &Wanted) -> Result<(), InputError> {
        let key = (port.network.clone(), address);
        let others = [&self.now.ipv4, &self.before.ipv4].map(|owners| owners.get(&key));
        free(format!("the address {address}"), others, &owner(port))
    }
}

/// Refuses what is another's, by what is asked for or by what is in force.
fn free(what: String, [now, before]: [Option<&Owner>; 2], owner: &Owner) -> Result<(), InputError> {
    let another = |other: &&Owner| *other != owner;
    match (now.filter(another), before.filter(another)) {
        (Some(other), _) => Err(taken(what, other.name())),
        (None, Some(other)) => {
            let owner = other.name().to_owned();
            Err(InputError::Held { what, owner })
        }
        (None, None) => Ok(()),
    }
}

impl Owner {
    fn name(&self) -> &str {
        match self.vm.is_empty() {
            true => &self.network,
            false => &self.vm,
        }
    }
}

fn owner(port: &Wanted) -> Owner {
    Owner {
        network: port.network.clone(),
        vm: port.vm.clone(),
    }
}

pub(super) fn taken(what: String, owner: &str) -> InputError {
    let owner = owner.to_owned();
    InputError::Taken { what, owner }
}

/// Whether a VM may have this number in a network.
fn is_assignable(network: &NetworkSpec, number: u32) -> bool {
    let station = &network.station;
    let Some(subnet) = station.ipv4 else {
        return true;
    };
    let mut outside = network.uplink.iter().flat_map(|uplink| &uplink.addresses);
    subnet.host(number).is_some_and(|address| {
        address != subnet.own
            && station.gateway != Some(address)
            && !outside.any(|outside| *outside == address)
            && !station
                .pool
                .as_ref()
                .is_some_and(|pool| pool.contains(&address))
    })
}
