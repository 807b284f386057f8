//! From the networks that are to those that are to be.

use std::collections::BTreeMap;

use super::{NetError, NetHost, NetWorker, NetworkSpec, PortSpec};
use crate::config::Plan;
use crate::runtime::{RuntimeError, check_directory, remove_stale_socket};

/// What has to be done so that networks are as another plan has them.
///
/// It is carried out in three steps: [`open`](Self::open) does what can fail, and undoes it then; [`settle`](Self::settle) changes what
/// goes on; [`close`](Self::close) removes what is no longer named. Removals come last, so that what they occupy is occupied until then: a
/// plan never gives it to somebody else at the same time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetChange {
    added_networks: Vec<NetworkSpec>,
    changed_networks: Vec<NetworkSpec>,
    /// Networks that stay, and have an uplink.
    kept_uplinks: Vec<String>,
    removed_networks: Vec<String>,
    added_ports: Vec<PortSpec>,
    changed_ports: Vec<PortSpec>,
    removed_ports: Vec<PortSpec>,
    /// Networks that are told other hosts than before.
    hosts: Vec<(String, Vec<NetHost>)>,
}

/// Why a network or a port could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {error}")]
pub struct NetFault {
    /// Which, in words.
    pub what: String,
    /// What stands in the way.
    pub error: NetFaultCause,
}

/// What stands in the way of a network or a port.
#[derive(Debug, thiserror::Error)]
pub enum NetFaultCause {
    /// A directory or a socket is not as it should be.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The data plane refuses.
    #[error(transparent)]
    Net(#[from] NetError),
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
        }
        let removed = old.keys().filter(|name| !new.contains_key(*name));
        change.removed_networks = removed.cloned().collect();
        let (old, new) = (ports(current), ports(next));
        for (key, port) in &new {
            match old.get(key) {
                None => change.added_ports.push((*port).clone()),
                Some(before) if before != port => change.changed_ports.push((*port).clone()),
                Some(_) => {}
            }
        }
        let removed = old.iter().filter(|(key, _)| !new.contains_key(*key));
        change.removed_ports = removed.map(|(_, port)| (*port).clone()).collect();
        change
    }

    /// Adds what is new. When it fails, nothing of it remains.
    ///
    /// # Errors
    /// [`NetFault`].
    pub fn open(&self, worker: &dyn NetWorker) -> Result<(), NetFault> {
        let mut opened = NetChange::default();
        let result = self.open_all(worker, &mut opened);
        if result.is_err() {
            opened.undo(worker);
        }
        result
    }

    fn open_all(&self, worker: &dyn NetWorker, opened: &mut NetChange) -> Result<(), NetFault> {
        for spec in &self.added_networks {
            let added = worker.add_network(spec.clone());
            added.map_err(|error| NetFault {
                what: format!("network {:?}", spec.full_name()),
                error: error.into(),
            })?;
            opened.added_networks.push(spec.clone());
        }
        for spec in &self.added_ports {
            open_port(worker, spec).map_err(|error| NetFault {
                what: format!("VM {:?} in the network {:?}", spec.vm, spec.network),
                error,
            })?;
            opened.added_ports.push(spec.clone());
        }
        Ok(())
    }

    /// Removes what [`open`](Self::open) has added.
    pub fn undo(&self, worker: &dyn NetWorker) {
        for port in &self.added_ports {
            tell(&port.network, worker.remove_port(&port.network, &port.vm));
        }
        for network in &self.added_networks {
            let name = network.full_name();
            tell(&name, worker.remove_network(&name));
        }
    }

    /// Changes what goes on, and looks for devices of uplinks that were removed. What fails is told by the log: the worker refuses none of it unless it
    /// has stopped, or a device is still not there.
    pub fn settle(&self, worker: &dyn NetWorker) {
        for network in &self.changed_networks {
            let name = network.full_name();
            tell(&name, worker.configure_network(network.clone()));
        }
        for name in &self.kept_uplinks {
            tell(name, worker.restore_uplink(name));
        }
        for port in &self.changed_ports {
            tell(&port.network, worker.configure_port(port.clone()));
        }
        for (name, hosts) in &self.hosts {
            tell(name, worker.set_hosts(name, hosts.clone()));
        }
    }

    /// Removes what is no longer named.
    pub fn close(&self, worker: &dyn NetWorker) {
        for port in &self.removed_ports {
            tell(&port.network, worker.remove_port(&port.network, &port.vm));
        }
        for name in &self.removed_networks {
            tell(name, worker.remove_network(name));
        }
    }
}

/// Checks the directory of a port's socket, takes over a stale one, and has the port added.
fn open_port(worker: &dyn NetWorker, spec: &PortSpec) -> Result<(), NetFaultCause> {
    let directory = spec.socket.parent();
    check_directory(directory.unwrap_or("/".as_ref()), "vhost-user = \"PATH\"")?;
    if remove_stale_socket(&spec.socket)? {
        tracing::warn!(
            vm = spec.vm,
            network = spec.network,
            socket = %spec.socket.display(),
            "took over the stale socket of a daemon that has died"
        );
    }
    Ok(worker.add_port(spec.clone())?)
}

fn tell(network: &str, result: Result<(), NetError>) {
    if let Err(error) = result {
        tracing::error!(network, %error, "a network is not as it should be");
    }
}

fn by_name(plan: &Plan) -> BTreeMap<String, &NetworkSpec> {
    let networks = plan.networks();
    networks.map(|spec| (spec.full_name(), spec)).collect()
}

fn ports(plan: &Plan) -> BTreeMap<(&str, &str), &PortSpec> {
    let ports = plan.lines().flat_map(|line| &line.ports);
    let keyed = |port| -> ((&str, &str), &PortSpec) {
        let port: &PortSpec = port;
        ((&port.network, &port.vm), port)
    };
    ports.map(keyed).collect()
}
