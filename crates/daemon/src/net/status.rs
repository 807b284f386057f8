//! What a thread's fabric says of its networks, as the control plane has it.

use device::net::{NetPortSnapshot, NetworkSnapshot, PortCounters};
use l2::bridge::{self, PortId};

use super::{MacStatus, NetworkStatus, PortOwner, PortStatus, refused_counters, switch_counters};
use crate::line::Counters;

pub(super) fn macs(snapshot: &NetworkSnapshot) -> Vec<MacStatus> {
    let macs = snapshot.macs.iter().map(|entry| MacStatus {
        mac: entry.mac,
        vlan: entry.vlan,
        owner: owner(snapshot, entry.port),
        age: entry.age,
    });
    macs.collect()
}

pub(super) fn network_status(snapshot: NetworkSnapshot, thread: String) -> NetworkStatus {
    let mut counters = Counters::new();
    let mut ports: Vec<PortStatus> = snapshot.ports.iter().map(port_status).collect();
    if let Some(station) = &snapshot.station {
        let counted = &station.counters;
        counters = Counters::from([
            ("advertisements", counted.advertisements),
            ("dhcp_acknowledgements", counted.dhcp_acknowledgements),
            ("dhcp_declined", counted.dhcp_declined),
            ("dhcp_ignored", counted.dhcp_ignored),
            ("dhcp_offers", counted.dhcp_offers),
            ("dhcp_refusals", counted.dhcp_refusals),
            ("dns_answers", counted.dns_answers),
            ("neighbour_answers", counted.neighbour_answers),
        ]);
        ports.push(PortStatus {
            owner: PortOwner::Station,
            link_up: true,
            attached: true,
            driver_ready: true,
            last_fault: None,
            last_fault_at: None,
            counters: switch_counters(&station.bridge),
            refused: refused_counters(&station.bridge),
        });
    }
    if let Some(uplink) = &snapshot.uplink {
        let counted = &uplink.counters;
        let mut counters = switch_counters(&uplink.bridge);
        counters.extend([
            // What has left, rather than what was to.
            ("sent_frames", counted.sent_frames),
            ("sent_bytes", counted.sent_bytes),
            ("dropped_frames", counted.dropped_frames),
        ]);
        let mut refused = refused_counters(&uplink.bridge);
        if counted.malformed_headers > 0 {
            refused.insert("malformed_header", counted.malformed_headers);
        }
        ports.push(PortStatus {
            owner: PortOwner::Uplink,
            link_up: true,
            attached: uplink.attached,
            driver_ready: uplink.attached,
            last_fault: None,
            last_fault_at: None,
            counters,
            refused,
        });
    }
    NetworkStatus {
        name: snapshot.name,
        thread,
        ports,
        counters,
    }
}

fn port_status(port: &NetPortSnapshot) -> PortStatus {
    PortStatus {
        owner: PortOwner::Vm(port.vm.clone()),
        link_up: port.link,
        attached: port.attached,
        driver_ready: port.driver_ready,
        last_fault: port.last_fault.clone(),
        last_fault_at: port.last_fault_at,
        counters: port_counters(&port.counters, &port.bridge),
        refused: refused(&port.counters, &port.bridge),
    }
}

fn port_counters(counted: &PortCounters, bridge: &bridge::PortCounters) -> Counters {
    let mut counters = switch_counters(bridge);
    let dropped = counted.dropped_without_buffers + counted.dropped_without_driver;
    // A frame that passes unannounced has saved its announcement.
    let kicks_saved = counted.frames_from_guest.saturating_sub(counted.kicks);
    let interrupts_saved = counted.frames_to_guest.saturating_sub(counted.interrupts);
    counters.extend([
        // What has arrived, rather than what was to go there.
        ("sent_frames", counted.frames_to_guest),
        ("sent_bytes", counted.bytes_to_guest),
        ("dropped_frames", dropped),
        ("segmented_frames", counted.segmented),
        ("checksummed_frames", counted.checksummed),
        ("kicks", counted.kicks),
        ("kicks_saved", kicks_saved),
        ("interrupts", counted.interrupts),
        ("interrupts_saved", interrupts_saved),
    ]);
    counters
}

fn refused(counted: &PortCounters, bridge: &bridge::PortCounters) -> Counters {
    let mut refused = refused_counters(bridge);
    if counted.malformed_headers > 0 {
        refused.insert("malformed_header", counted.malformed_headers);
    }
    refused
}

fn owner(snapshot: &NetworkSnapshot, id: PortId) -> PortOwner {
    let port = snapshot.ports.iter().find(|port| port.id == id);
    match port {
        Some(port) => PortOwner::Vm(port.vm.clone()),
        None if snapshot
            .station
            .as_ref()
            .is_some_and(|known| known.id == id) =>
        {
            PortOwner::Station
        }
        None => PortOwner::Uplink,
    }
}
