//! From the networks that are to those that are to be.

use std::collections::{BTreeMap, BTreeSet};

use config::Plan;
use config::net::{NetHost, NetworkSpec, PortSpec};

use super::NetError;
use crate::line::SocketError;
use device::Bound;
use keeper::Keeper;
use runtime::directory::{RuntimeError, check_directory, remove_stale_socket};

/// What has to be done so that networks are as another plan has them.
///
/// It is carried out in one order ([`NetWorker::prepare`](super::NetWorker::prepare)): what is added comes first, as it can fail and is undone then; then what changes; then what is
/// no longer named goes. Removals come last, so that what they occupy is occupied until then: a plan never gives it to another at the same time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetChange {
    /// Networks that come.
    pub added_networks: Vec<NetworkSpec>,
    /// Networks that stay, and are described otherwise.
    pub changed_networks: Vec<NetworkSpec>,
    /// Networks whose uplink is left out, as its device cannot be had.
    pub missing_uplinks: BTreeSet<String>,
    /// Networks that stay, and whose uplink was left out until now.
    pub added_uplinks: Vec<NetworkSpec>,
    /// Networks that stay, and have an uplink.
    pub kept_uplinks: Vec<String>,
    /// Networks that go, by their names.
    pub removed_networks: Vec<String>,
    /// Ports that come.
    pub added_ports: Vec<PlacedPort>,
    /// Ports that stay, and are described otherwise.
    pub changed_ports: Vec<PlacedPort>,
    /// Ports that go.
    pub removed_ports: Vec<PortSpec>,
    /// Networks that get other hosts than before.
    pub hosts: Vec<(String, Vec<NetHost>)>,
}

/// A port, and the network that it is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedPort {
    /// Where it is.
    pub network: NetworkSpec,
    /// The port.
    pub port: PortSpec,
}

/// Why a network or a port could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {error}")]
pub struct NetFault {
    /// The VM whose port it is, by full name, if it is one's.
    pub vm: Option<String>,
    /// Which, in words.
    pub what: String,
    /// What stands in the way.
    pub error: NetError,
}

impl NetChange {
    /// What makes the networks of one plan those of another.
    pub fn between(current: &Plan, next: &Plan) -> NetChange {
        let mut change = NetChange::default();
        let old: BTreeMap<String, &NetworkSpec> = by_name(current);
        let new: BTreeMap<String, &NetworkSpec> = by_name(next);
        for (name, spec) in &new {
            let before = old.get(name);
            let is_changed = before.is_some_and(|before| before != spec);
            if before.is_none() {
                change.added_networks.push((*spec).clone());
            } else if is_changed {
                change.changed_networks.push((*spec).clone());
            }
            if before.is_some() && spec.uplink.is_some() {
                change.kept_uplinks.push(name.clone());
            }
            let hosts = next.net_hosts(name);
            if is_changed || hosts != current.net_hosts(name) {
                change.hosts.push((name.clone(), hosts));
            }
            let placed = |port: &PortSpec| PlacedPort {
                network: (*spec).clone(),
                port: port.clone(),
            };
            let before = ports(current, name);
            for (vm, port) in ports(next, name) {
                match before.get(vm) {
                    None => change.added_ports.push(placed(port)),
                    Some(before) if *before != port => change.changed_ports.push(placed(port)),
                    Some(_) => {}
                }
            }
        }
        for name in old.keys() {
            let after = ports(next, name);
            let gone = ports(current, name).into_iter();
            let gone = gone.filter(|(vm, _)| !after.contains_key(vm));
            change
                .removed_ports
                .extend(gone.map(|(_, port)| port.clone()));
        }
        let removed = old.keys().filter(|name| !new.contains_key(*name));
        change.removed_networks = removed.cloned().collect();
        change
    }

    /// Leaves out the uplinks of some networks, and adds those that were left out before and are not any more.
    pub fn without_uplinks(
        mut self,
        before: BTreeSet<String>,
        after: BTreeSet<String>,
        next: &Plan,
    ) -> NetChange {
        self.kept_uplinks
            .retain(|name| !before.contains(name) && !after.contains(name));
        let added = before.difference(&after);
        let added = added.filter_map(|name| next.network(name));
        self.added_uplinks = added.cloned().collect();
        self.missing_uplinks = after;
        self
    }

    /// What of it is about some networks.
    pub(crate) fn part(&self, is_of: impl Fn(&str) -> bool) -> NetChange {
        let of_spec = |spec: &NetworkSpec| is_of(&spec.full_name());
        let of_port = |placed: &PlacedPort| is_of(&placed.port.network);
        let mut part = self.clone();
        part.added_networks.retain(of_spec);
        part.changed_networks.retain(of_spec);
        part.added_uplinks.retain(of_spec);
        part.kept_uplinks.retain(|name| is_of(name));
        part.removed_networks.retain(|name| is_of(name));
        part.added_ports.retain(of_port);
        part.changed_ports.retain(of_port);
        part.removed_ports.retain(|port| is_of(&port.network));
        part.hosts.retain(|(name, _)| is_of(name));
        part
    }

    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        let NetChange {
            missing_uplinks, ..
        } = self;
        let nothing = NetChange {
            missing_uplinks: missing_uplinks.clone(),
            ..NetChange::default()
        };
        *self == nothing
    }

    /// Checks the directories of new ports' sockets, and removes stale ones. Leaves out the ports whose sockets cannot be made, and returns why.
    pub fn clear_sockets(&mut self, keeper: Option<&Keeper>) -> Vec<NetFault> {
        let mut faults = Vec::new();
        self.added_ports.retain(|PlacedPort { port, .. }| {
            let cleared = clear_socket(port, keeper);
            let fault = cleared.map_err(|error| NetFault::of_port(port, error));
            fault.map_err(|fault| faults.push(fault)).is_ok()
        });
        faults
    }
}

impl NetChange {
    /// Makes the sockets of new ports. Leaves out those that cannot be had, and returns why.
    pub(crate) fn make_sockets(&mut self, bound: &mut Bound) -> Vec<NetFault> {
        let mut faults = Vec::new();
        self.added_ports.retain(|PlacedPort { port, .. }| {
            let made = bound.add_vmm(&port.socket, (&port.vm, Some(&port.network)));
            let made = made.map_err(|error| SocketError::at(port.socket.clone(), error));
            let fault = made.map_err(|error| NetFault::of_port(port, NetError::from(error)));
            fault.map_err(|fault| faults.push(fault)).is_ok()
        });
        faults
    }
}

impl NetFault {
    pub(crate) fn of_network(spec: &NetworkSpec, error: NetError) -> NetFault {
        NetFault {
            vm: None,
            what: format!("network {:?}", spec.full_name()),
            error,
        }
    }

    /// What stands in the way of this port.
    pub fn of_port(port: &PortSpec, error: impl Into<NetError>) -> NetFault {
        NetFault {
            vm: Some(port.vm.clone()),
            what: format!("VM {:?} in the network {:?}", port.vm, port.network),
            error: error.into(),
        }
    }

    /// Nothing of the change can be done.
    pub(crate) fn of_all(error: NetError) -> NetFault {
        NetFault {
            vm: None,
            what: "the networks".to_owned(),
            error,
        }
    }
}

fn clear_socket(port: &PortSpec, keeper: Option<&Keeper>) -> Result<(), RuntimeError> {
    let directory = port.socket.parent();
    check_directory(directory.unwrap_or("/".as_ref()), "vhost-user = \"PATH\"")?;
    if keeper.is_some_and(|keeper| device::is_kept(keeper, &port.socket)) {
        return Ok(());
    }
    if remove_stale_socket(&port.socket)? {
        tracing::warn!(
            vm = port.vm,
            network = port.network,
            socket = %port.socket.display(),
            "took over the stale socket of a daemon that has died"
        );
    }
    Ok(())
}

fn by_name(plan: &Plan) -> BTreeMap<String, &NetworkSpec> {
    let networks = plan.networks();
    networks.map(|spec| (spec.full_name(), spec)).collect()
}

/// The ports in a network, by VM.
fn ports<'a>(plan: &'a Plan, network: &str) -> BTreeMap<&'a str, &'a PortSpec> {
    let ports = plan.lines().flat_map(|line| &line.ports);
    let ports = ports.filter(|port| port.network == network);
    ports.map(|port| (port.vm.as_str(), port)).collect()
}
