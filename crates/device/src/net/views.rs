//! Networks and their ports as they stand, for queries.

use std::time::SystemTime;

use l2::bridge::{MacEntry, PortId};

use super::{NetFabric, Network, PortCounters, UplinkCounters};

/// A port as it stands.
#[derive(Debug, Clone)]
pub struct NetPortSnapshot {
    /// The VM's full name.
    pub vm: String,
    /// Its number in the bridge, as [`MacEntry`] names it.
    pub id: PortId,
    /// Whether a VMM is connected.
    pub attached: bool,
    /// Whether the guest's driver is running.
    pub driver_ready: bool,
    /// Why its last VMM's connection, or the guest's card, ended as it should not; as [`LineSnapshot::last_fault`](crate::LineSnapshot::last_fault).
    pub last_fault: Option<String>,
    /// When that was.
    pub last_fault_at: Option<SystemTime>,
    /// Whether the link is up, as far as the operator says.
    pub link: bool,
    /// What passed.
    pub counters: PortCounters,
    /// What the bridge has counted.
    pub bridge: l2::bridge::PortCounters,
}

/// A network as it stands.
#[derive(Debug, Clone)]
pub struct NetworkSnapshot {
    /// Its full name.
    pub name: String,
    /// Its VMs' ports, by their names.
    pub ports: Vec<NetPortSnapshot>,
    /// The network's own port, if it answers anything.
    pub station: Option<StationSnapshot>,
    /// The way out, if there is one.
    pub uplink: Option<UplinkSnapshot>,
    /// The addresses that it knows.
    pub macs: Vec<MacEntry>,
}

/// A network's own port as it stands.
#[derive(Debug, Clone)]
pub struct StationSnapshot {
    /// Its number in the bridge.
    pub id: PortId,
    /// What the station has done.
    pub counters: l2::StationCounters,
    /// What the bridge has counted.
    pub bridge: l2::bridge::PortCounters,
}

/// A network's way out as it stands.
#[derive(Debug, Clone)]
pub struct UplinkSnapshot {
    /// Its number in the bridge.
    pub id: PortId,
    /// Its device is there.
    pub attached: bool,
    /// What passed.
    pub counters: UplinkCounters,
    /// What the bridge has counted.
    pub bridge: l2::bridge::PortCounters,
}

impl NetFabric {
    /// Every network, as it stands, by name. Without the addresses that guests have used.
    pub fn networks(&self) -> Vec<NetworkSnapshot> {
        let networks = self.networks.iter();
        let mut networks: Vec<_> = networks
            .map(|(index, network)| self.snapshot(index, network))
            .collect();
        networks.sort_by(|a, b| a.name.cmp(&b.name));
        networks
    }

    /// One network, as it stands, with the addresses that its guests have used.
    pub fn network(&self, name: &str) -> Option<NetworkSnapshot> {
        let mut networks = self.networks.iter();
        let (index, network) = networks.find(|(_, network)| network.name == name)?;
        Some(NetworkSnapshot {
            macs: network.bridge.macs(self.now).collect(),
            ..self.snapshot(index, network)
        })
    }

    fn snapshot(&self, index: usize, network: &Network) -> NetworkSnapshot {
        let ports = self.ports_of(index).map(|number| {
            let port = &self.ports[number];
            NetPortSnapshot {
                vm: port.vm.clone(),
                id: port.id,
                attached: port.attached,
                driver_ready: port.driver_runs(),
                last_fault: port.last_fault.text(),
                last_fault_at: port.last_fault.at(),
                link: port.frontend.is_some(),
                counters: port.counters,
                bridge: network.bridge_counters(port.id),
            }
        });
        let mut ports: Vec<_> = ports.collect();
        ports.sort_by(|a, b| a.vm.cmp(&b.vm));
        let station = network.station.as_ref().map(|known| StationSnapshot {
            id: known.id,
            counters: known.station.counters(),
            bridge: network.bridge_counters(known.id),
        });
        let uplink = network.uplink.as_ref().map(|uplink| UplinkSnapshot {
            id: uplink.id,
            attached: !uplink.is_gone,
            counters: uplink.counters,
            bridge: network.bridge_counters(uplink.id),
        });
        NetworkSnapshot {
            uplink,
            name: network.name.clone(),
            ports,
            station,
            macs: Vec::new(),
        }
    }
}
