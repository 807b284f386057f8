//! A switch for tests: its ports have real sockets and no VMs behind them, and no frame moves. What a capture shows, tests make up.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use config::net::{NetHost, NetworkSpec, PortSpec};
use device::{CaptureOptions, SocketFile};

use super::capture::FakeCapture;
use daemon::capture::CaptureSender;
use daemon::line::Counters;
use daemon::net::{
    MacStatus, NetChange, NetError, NetFault, NetWorker, NetworkStatus, PlacedPort, PortOwner,
    PortStatus,
};
use hostside::offers::Commit;
use runtime::directory::listen_privately;

/// By full name.
type Networks = Arc<Mutex<BTreeMap<String, Network>>>;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct FakeNet {
    networks: Networks,
    captures: Mutex<Vec<FakeCapture>>,
}

#[derive(Debug)]
struct Network {
    spec: NetworkSpec,
    hosts: Vec<NetHost>,
    /// By VM.
    ports: BTreeMap<String, Port>,
}

#[derive(Debug)]
struct Port {
    spec: PortSpec,
    status: PortStatus,
    /// While the link is up.
    listener: Option<(UnixListener, SocketFile)>,
}

impl FakeNet {
    /// A network as it was added or changed last.
    pub fn network(&self, name: &str) -> Option<NetworkSpec> {
        let networks = self.lock();
        networks.get(name).map(|network| network.spec.clone())
    }

    /// The hosts that a network was sent last.
    pub fn hosts(&self, name: &str) -> Vec<NetHost> {
        let networks = self.lock();
        networks
            .get(name)
            .map(|network| network.hosts.clone())
            .unwrap_or_default()
    }

    /// The ports of a network, by VM.
    pub fn ports(&self, name: &str) -> Vec<PortSpec> {
        let networks = self.lock();
        let ports = networks.get(name).into_iter();
        let ports = ports.flat_map(|network| network.ports.values());
        ports.map(|port| port.spec.clone()).collect()
    }

    /// Lets a VMM be at a port, and the guest's driver run, and so many frames have come, of which every other was refused.
    pub fn set_state(&self, network: &str, vm: &str, attached: bool, frames: u64) {
        let mut networks = self.lock();
        let network = networks.get_mut(network);
        if let Some(port) = network.and_then(|network| network.ports.get_mut(vm)) {
            port.status.attached = attached;
            port.status.driver_ready = attached;
            port.status.counters.insert("received_frames", frames);
            port.status.refused.insert("other_source", frames / 2);
        }
    }

    /// Has a port remember why its last VMM's connection ended.
    pub fn set_fault(&self, network: &str, vm: &str, fault: &str) {
        let mut networks = self.lock();
        let network = networks.get_mut(network);
        if let Some(port) = network.and_then(|network| network.ports.get_mut(vm)) {
            port.status.last_fault = Some(fault.to_owned());
            port.status.last_fault_at = Some(SystemTime::now());
        }
    }

    /// The captures that were asked for since the last time.
    pub fn take_captures(&self) -> Vec<FakeCapture> {
        let mut captures = self.captures.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *captures)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Network>> {
        lock(&self.networks)
    }

    /// Does something with a network that is there.
    fn with<T>(
        &self,
        name: &str,
        act: impl FnOnce(&mut Network) -> Result<T, NetError>,
    ) -> Result<T, NetError> {
        let mut networks = self.lock();
        let network = name.to_owned();
        let found = networks.get_mut(name);
        act(found.ok_or(NetError::UnknownNetwork { network })?)
    }
}

impl Network {
    fn port(&mut self, vm: &str) -> Result<&mut Port, NetError> {
        let network = self.spec.full_name();
        let unknown = NetError::UnknownPort {
            network,
            vm: vm.to_owned(),
        };
        self.ports.get_mut(vm).ok_or(unknown)
    }
}

impl Port {
    fn listen(&mut self) -> Result<(), NetError> {
        self.listener = Some(listen_privately(&self.spec.socket)?);
        Ok(())
    }

    fn close(&mut self) {
        self.listener = None;
    }
}

/// What has been opened and is neither committed nor undone.
struct Prepared {
    networks: Networks,
    change: NetChange,
}

impl Prepared {
    fn with_network(&self, name: &str, act: impl FnOnce(&mut Network)) {
        if let Some(network) = lock(&self.networks).get_mut(name) {
            act(network);
        }
    }

    fn open(&self) -> Result<(), NetFault> {
        for spec in &self.change.added_networks {
            let network = Network {
                spec: spec.clone(),
                hosts: Vec::new(),
                ports: BTreeMap::new(),
            };
            lock(&self.networks).insert(spec.full_name(), network);
        }
        for PlacedPort { port: spec, .. } in &self.change.added_ports {
            let mut port = Port {
                status: PortStatus {
                    owner: PortOwner::Vm(spec.vm.clone()),
                    link_up: true,
                    attached: false,
                    driver_ready: false,
                    last_fault: None,
                    last_fault_at: None,
                    counters: Counters::from([("received_frames", 0), ("sent_frames", 0)]),
                    refused: Counters::new(),
                },
                spec: spec.clone(),
                listener: None,
            };
            let listens = port.listen();
            listens.map_err(|error| NetFault::of_port(spec, error))?;
            self.with_network(&spec.network, |network| {
                network.ports.insert(spec.vm.clone(), port);
            });
        }
        Ok(())
    }

    fn commit(mut self) {
        let change = std::mem::take(&mut self.change);
        for spec in change.changed_networks {
            let name = spec.full_name();
            self.with_network(&name, |network| {
                network.spec = spec;
                network.hosts.clear();
            });
        }
        for PlacedPort { port: spec, .. } in change.changed_ports {
            self.with_network(&spec.network.clone(), |network| {
                if let Ok(port) = network.port(&spec.vm) {
                    port.spec = spec;
                }
            });
        }
        for (name, hosts) in change.hosts {
            self.with_network(&name, |network| network.hosts = hosts);
        }
        self.remove(&change.removed_ports, &change.removed_networks);
    }

    fn remove(&self, ports: &[PortSpec], networks: &[String]) {
        for spec in ports {
            self.with_network(&spec.network, |network| {
                if let Some(mut port) = network.ports.remove(&spec.vm) {
                    port.close();
                }
            });
        }
        for name in networks {
            lock(&self.networks).remove(name);
        }
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let placed = std::mem::take(&mut self.change.added_ports);
        let ports: Vec<PortSpec> = placed.into_iter().map(|placed| placed.port).collect();
        let networks = self.change.added_networks.iter();
        let networks: Vec<String> = networks.map(NetworkSpec::full_name).collect();
        self.remove(&ports, &networks);
    }
}

fn lock(networks: &Networks) -> MutexGuard<'_, BTreeMap<String, Network>> {
    networks.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NetWorker for FakeNet {
    fn prepare(&self, mut change: NetChange) -> Result<(Commit, Vec<NetFault>), NetFault> {
        let left_out = change.clear_sockets(None);
        let networks = self.networks.clone();
        let prepared = Prepared { networks, change };
        prepared.open()?;
        Ok((Box::new(move || prepared.commit()), left_out))
    }

    fn settle(&self) {}

    fn set_link(&self, network: &str, vm: &str, up: bool) -> Result<(), NetError> {
        self.with(network, |network| {
            let port = network.port(vm)?;
            match up {
                true if port.listener.is_none() => port.listen()?,
                true => {}
                false => port.close(),
            }
            port.status.link_up = up;
            port.status.attached &= up;
            Ok(())
        })
    }

    fn networks(&self) -> Vec<NetworkStatus> {
        let networks = self.lock();
        let status = |(name, network): (&String, &Network)| {
            let station = PortStatus {
                owner: PortOwner::Station,
                link_up: true,
                attached: true,
                driver_ready: true,
                last_fault: None,
                last_fault_at: None,
                counters: Counters::from([("received_frames", 0)]),
                refused: Counters::new(),
            };
            let ports = network.ports.values().map(|port| port.status.clone());
            NetworkStatus {
                name: name.clone(),
                thread: "net".to_owned(),
                ports: ports.chain([station]).collect(),
                counters: Counters::from([("station_frames", 0)]),
            }
        };
        networks.iter().map(status).collect()
    }

    fn macs(&self, network: &str) -> Result<Vec<MacStatus>, NetError> {
        self.with(network, |network| {
            let given = network.ports.values().map(|port| MacStatus {
                mac: port.spec.mac,
                vlan: None,
                owner: PortOwner::Vm(port.spec.vm.clone()),
                age: None,
            });
            Ok(given.collect())
        })
    }

    fn capture(
        &self,
        network: &str,
        vm: Option<&str>,
        options: CaptureOptions,
        sender: CaptureSender,
    ) -> Result<(), NetError> {
        self.with(network, |network| match vm {
            Some(vm) => network.port(vm).map(|_| ()),
            None => Ok(()),
        })?;
        let mut captures = self.captures.lock().unwrap_or_else(PoisonError::into_inner);
        captures.push(FakeCapture {
            network: Some(network.to_owned()),
            vm: vm.map(str::to_owned),
            port: None,
            options,
            sender,
        });
        Ok(())
    }

    fn stop(&self) {
        for mut network in std::mem::take(&mut *self.lock()).into_values() {
            network.ports.values_mut().for_each(Port::close);
        }
    }
}
