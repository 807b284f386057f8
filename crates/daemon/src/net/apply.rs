//! A change of networks, carried out by the thread that switches frames.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use config::net::{Moderation, NetHost, NetworkSpec, PortSpec, UplinkDevice};
use device::net::{ModerationSetting, NetFabric, NetPortConfig};
use l2::bridge::PortConfig;
use l2::{Host, Ipv4Settings, StationConfig};

use super::error::net_error;
use super::{NetChange, NetFault, PlacedPort};

type Result<T> = std::result::Result<T, device::net::NetError>;

/// How long a guest may use an address before it asks again. It gets the same one each time; the renewals bring it other changes.
const LEASE: Duration = Duration::from_secs(12 * 3600);

/// Adds what is new. Ports that cannot be opened are taken from the change, and returned. When something else cannot be, nothing of it remains.
pub(super) fn open(
    change: &mut NetChange,
    fabric: &mut NetFabric,
) -> std::result::Result<Vec<NetFault>, NetFault> {
    let mut opened = NetChange::default();
    if let Err(fault) = open_networks(change, fabric, &mut opened) {
        undo(&opened, fabric);
        return Err(fault);
    }
    let mut left_out = Vec::new();
    change.added_ports.retain(|PlacedPort { network, port }| {
        let config = NetPortConfig {
            network: port.network.clone(),
            vm: port.vm.clone(),
            vhost_user: port.socket.clone(),
            bridge: port.bridge_port(network),
            queue_pairs: port.queue_pairs,
            moderation: moderation(port.moderation),
        };
        let added = fabric.add_port(config).map_err(net_error);
        let fault = added.map_err(|error| NetFault::of_port(port, error));
        fault.map_err(|fault| left_out.push(fault)).is_ok()
    });
    Ok(left_out)
}

fn open_networks(
    change: &NetChange,
    fabric: &mut NetFabric,
    opened: &mut NetChange,
) -> std::result::Result<(), NetFault> {
    for spec in &change.added_networks {
        let has_uplink = !change.missing_uplinks.contains(&spec.full_name());
        add_network(fabric, spec, has_uplink)
            .map_err(|error| NetFault::of_network(spec, net_error(error)))?;
        opened.added_networks.push(spec.clone());
    }
    for spec in &change.added_uplinks {
        set_uplink(fabric, spec).map_err(|error| NetFault::of_network(spec, net_error(error)))?;
        opened.added_uplinks.push(spec.clone());
    }
    Ok(())
}

/// Removes what was added.
pub(super) fn undo(change: &NetChange, fabric: &mut NetFabric) {
    let ports = change.added_ports.iter().map(|placed| &placed.port);
    remove_ports(ports, fabric);
    for spec in &change.added_uplinks {
        let name = spec.full_name();
        report(&name, fabric.remove_uplink(&name));
    }
    for spec in &change.added_networks {
        let name = spec.full_name();
        report(&name, fabric.remove_network(&name));
    }
}

/// Changes what goes on, removes what is no longer named, and opens devices of uplinks that were removed. Only a device that is still not there can fail.
pub(super) fn settle(change: NetChange, fabric: &mut NetFabric) {
    for spec in &change.changed_networks {
        let name = spec.full_name();
        report(&name, fabric.set_station(&name, station_of(spec)));
    }
    for PlacedPort { network, port } in &change.changed_ports {
        let (config, moderation) = (port.bridge_port(network), moderation(port.moderation));
        let changed = fabric.configure_port(&port.network, &port.vm, config, moderation);
        report(&port.network, changed);
    }
    for (name, hosts) in change.hosts {
        let hosts = hosts.into_iter().map(host).collect();
        report(&name, fabric.set_hosts(&name, hosts));
    }
    remove_ports(&change.removed_ports, fabric);
    for name in &change.removed_networks {
        report(name, fabric.remove_network(name));
    }
    for name in &change.kept_uplinks {
        report(name, fabric.restore_uplink(name));
    }
}

fn remove_ports<'a>(ports: impl IntoIterator<Item = &'a PortSpec>, fabric: &mut NetFabric) {
    for port in ports {
        match fabric.remove_port(&port.network, &port.vm) {
            // It was left out.
            Err(device::net::NetError::NoPort { .. }) => {}
            removed => report(&port.network, removed),
        }
    }
}

fn report(network: &str, result: Result<()>) {
    if let Err(error) = result.map_err(net_error) {
        tracing::error!(network, %error, "cannot change a network");
    }
}

fn add_network(fabric: &mut NetFabric, spec: &NetworkSpec, has_uplink: bool) -> Result<()> {
    let name = spec.full_name();
    fabric.add_network(&name, spec.bridge_limits())?;
    let furnished = fabric
        .set_station(&name, station_of(spec))
        .and_then(|()| match has_uplink {
            true => set_uplink(fabric, spec),
            false => Ok(()),
        });
    furnished.inspect_err(|_| {
        // It was added a moment ago.
        let _ = fabric.remove_network(&name);
    })
}

fn station_of(spec: &NetworkSpec) -> (PortConfig, StationConfig) {
    (spec.station_port(), station_config(spec))
}

fn host(host: NetHost) -> Host {
    Host {
        name: host.name,
        aliases: host.aliases,
        mac: host.mac,
        ipv4: host.ipv4,
        ipv6: host.ipv6,
        isolated: host.isolated,
    }
}

fn set_uplink(fabric: &mut NetFabric, spec: &NetworkSpec) -> Result<()> {
    let (Some(uplink), Some(port)) = (&spec.uplink, spec.uplink_port()) else {
        return Ok(());
    };
    let device = match uplink.device.clone() {
        UplinkDevice::Tap(name) => device::net::UplinkDevice::Tap(name),
        UplinkDevice::Interface(name) => device::net::UplinkDevice::Interface(name),
    };
    fabric.set_uplink(&spec.full_name(), &device, port)
}

fn station_config(spec: &NetworkSpec) -> StationConfig {
    let station = spec.station.clone();
    StationConfig {
        mac: station.mac,
        ipv4: station.ipv4.map(|ipv4| Ipv4Settings {
            address: ipv4.own,
            prefix_len: ipv4.prefix_len,
        }),
        ipv6: station.ipv6.map(|ipv6| ipv6.own),
        domain: station.dns_domain,
        mtu: spec.mtu,
        dhcp: station.dhcp && station.ipv4.is_some(),
        advertise: station.router_advertisements && station.ipv6.is_some(),
        dns: station.dns,
        lease: LEASE,
        gateway: station.gateway,
        pool: station.pool,
        seed: RandomState::new().hash_one(spec.full_name()),
    }
}

fn moderation(setting: Moderation) -> ModerationSetting {
    match setting {
        Moderation::Adaptive => ModerationSetting::Adaptive,
        Moderation::Off => ModerationSetting::Off,
        Moderation::Window(window) => ModerationSetting::Window(window),
    }
}
