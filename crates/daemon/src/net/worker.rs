//! The thread that switches frames, and the handle by which the control plane reaches it.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use device::CaptureOptions;
use device::net::{
    ModerationSetting, NetFabric, NetPortConfig, NetPortSnapshot, NetworkSnapshot, PortCounters,
};
use station::{Host, Ipv4Settings, StationConfig};
use switch::bridge::{self, PortId};

use super::{
    MacStatus, Moderation, NetError, NetHost, NetWorker, NetworkSpec, NetworkStatus, PortOwner,
    PortSpec, PortStatus, UplinkDevice, refused_counters, switch_counters,
};
use crate::capture::CaptureSender;
use crate::line::Counters;
use crate::orders::Orders;

/// How long a guest may use an address before it asks again. It gets the same one each time; the renewals tell it of other changes.
const LEASE: Duration = Duration::from_secs(12 * 3600);

/// Switches frames, on a thread that begins with the first network.
pub struct NetThread {
    spin: Duration,
    batch: Option<usize>,
    running: Mutex<Option<Running>>,
}

struct Running {
    orders: Orders<NetFabric>,
    thread: JoinHandle<()>,
    /// By full name: ports depend on their networks.
    networks: BTreeMap<String, NetworkSpec>,
}

impl NetThread {
    /// Without networks. While frames come quickly the thread looks for up to `spin` before it sleeps; it takes up to
    /// `batch` of them from a ring at a time, or as many as is best.
    pub fn new(spin: Duration, batch: Option<usize>) -> NetThread {
        NetThread {
            spin,
            batch,
            running: Mutex::default(),
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        // Nothing panics while it holds the lock.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread do something to a network that exists.
    fn tell<T: Send + 'static>(
        &self,
        network: &str,
        job: impl FnOnce(&mut NetFabric, &NetworkSpec) -> Result<T, device::net::NetError>
        + Send
        + 'static,
    ) -> Result<T, NetError> {
        let running = self.running();
        let unknown = || NetError::UnknownNetwork {
            network: network.to_owned(),
        };
        let running = running.as_ref().ok_or_else(unknown)?;
        let spec = running.networks.get(network).ok_or_else(unknown)?.clone();
        let done = running.orders.ask(move |fabric| job(fabric, &spec));
        done.ok_or_else(stopped)?.map_err(net_error)
    }
}

impl Running {
    fn start(spin: Duration, batch: Option<usize>) -> io::Result<Running> {
        let mut fabric = NetFabric::new()?;
        fabric.set_spin(spin);
        fabric.set_batch(batch.unwrap_or(NetFabric::MAX_BATCH));
        let (orders, thread) = Orders::start("net", fabric)?;
        Ok(Running {
            orders,
            thread,
            networks: BTreeMap::new(),
        })
    }

    fn add_network(&mut self, spec: NetworkSpec) -> Result<(), NetError> {
        let name = spec.full_name();
        let (network, wanted) = (name.clone(), spec.clone());
        let added = self.orders.ask(move |fabric| {
            fabric.add_network(&network, wanted.bridge_limits())?;
            let station = (wanted.station_port(), station_config(&wanted));
            let furnished = fabric
                .set_station(&network, station)
                .and_then(|()| set_uplink(fabric, &wanted));
            furnished.inspect_err(|_| {
                // It was added a moment ago.
                let _ = fabric.remove_network(&network);
            })
        });
        added.ok_or_else(stopped)?.map_err(net_error)?;
        self.networks.insert(name, spec);
        Ok(())
    }
}

impl NetWorker for NetThread {
    fn add_network(&self, spec: NetworkSpec) -> Result<(), NetError> {
        let mut running = self.running();
        match &mut *running {
            Some(running) => running.add_network(spec),
            none => none
                .insert(Running::start(self.spin, self.batch)?)
                .add_network(spec),
        }
    }

    fn configure_network(&self, spec: NetworkSpec) -> Result<(), NetError> {
        let name = spec.full_name();
        let (network, station) = (name.clone(), (spec.station_port(), station_config(&spec)));
        self.tell(&name, move |fabric, _| {
            fabric.set_station(&network, station)
        })?;
        if let Some(running) = &mut *self.running() {
            running.networks.insert(name, spec);
        }
        Ok(())
    }

    fn restore_uplink(&self, network: &str) -> Result<(), NetError> {
        let name = network.to_owned();
        self.tell(network, move |fabric, _| fabric.restore_uplink(&name))
    }

    fn remove_network(&self, network: &str) -> Result<(), NetError> {
        let name = network.to_owned();
        self.tell(network, move |fabric, _| fabric.remove_network(&name))?;
        if let Some(running) = &mut *self.running() {
            running.networks.remove(network);
        }
        Ok(())
    }

    fn set_hosts(&self, network: &str, hosts: Vec<NetHost>) -> Result<(), NetError> {
        let hosts = hosts.into_iter().map(|host| Host {
            name: host.name,
            aliases: host.aliases,
            mac: host.mac,
            ipv4: host.ipv4,
            ipv6: host.ipv6,
            isolated: host.isolated,
        });
        let (name, hosts) = (network.to_owned(), hosts.collect());
        self.tell(network, move |fabric, _| fabric.set_hosts(&name, hosts))
    }

    fn add_port(&self, spec: PortSpec) -> Result<(), NetError> {
        self.tell(&spec.network.clone(), move |fabric, network| {
            fabric.add_port(NetPortConfig {
                bridge: spec.bridge_port(network),
                queue_pairs: spec.queue_pairs,
                moderation: moderation(spec.moderation),
                network: spec.network,
                vm: spec.vm,
                vhost_user: spec.socket,
            })
        })
    }

    fn configure_port(&self, spec: PortSpec) -> Result<(), NetError> {
        self.tell(&spec.network.clone(), move |fabric, network| {
            let config = spec.bridge_port(network);
            fabric.configure_port(&spec.network, &spec.vm, config, moderation(spec.moderation))
        })
    }

    fn remove_port(&self, network: &str, vm: &str) -> Result<(), NetError> {
        let (name, vm) = (network.to_owned(), vm.to_owned());
        self.tell(network, move |fabric, _| fabric.remove_port(&name, &vm))
    }

    fn set_link(&self, network: &str, vm: &str, up: bool) -> Result<(), NetError> {
        let (name, vm) = (network.to_owned(), vm.to_owned());
        self.tell(network, move |fabric, _| fabric.set_link(&name, &vm, up))
    }

    fn networks(&self) -> Vec<NetworkStatus> {
        let running = self.running();
        let networks = running
            .as_ref()
            .and_then(|running| running.orders.ask(|fabric| fabric.networks()));
        let networks = networks.unwrap_or_default().into_iter();
        networks.map(network_status).collect()
    }

    fn macs(&self, network: &str) -> Result<Vec<MacStatus>, NetError> {
        let name = network.to_owned();
        let snapshot = self.tell(network, move |fabric, _| {
            let mut networks = fabric.networks().into_iter();
            let found = networks.find(|network| network.name == name);
            found.ok_or(device::net::NetError::NoNetwork(name))
        })?;
        let macs = snapshot.macs.iter().map(|entry| MacStatus {
            mac: entry.mac,
            vlan: entry.vlan,
            owner: owner(&snapshot, entry.port),
            age: entry.age,
        });
        Ok(macs.collect())
    }

    fn capture(
        &self,
        network: &str,
        vm: Option<&str>,
        options: CaptureOptions,
        sender: CaptureSender,
    ) -> Result<(), NetError> {
        let (name, vm) = (network.to_owned(), vm.map(str::to_owned));
        self.tell(network, move |fabric, _| {
            fabric.capture(&name, vm.as_deref(), options, Box::new(sender))
        })
    }

    fn stop(&self) {
        let Some(running) = self.running().take() else {
            return;
        };
        running.orders.ask(NetFabric::stop);
        // It has been told to end; if it panicked, that has been printed.
        let _ = running.thread.join();
    }
}

impl Drop for NetThread {
    fn drop(&mut self) {
        self.stop();
    }
}

fn set_uplink(fabric: &mut NetFabric, spec: &NetworkSpec) -> Result<(), device::net::NetError> {
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

fn network_status(snapshot: NetworkSnapshot) -> NetworkStatus {
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
            counters,
            refused,
        });
    }
    NetworkStatus {
        name: snapshot.name,
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

fn uplink_error(device: device::net::UplinkDevice, error: io::Error) -> NetError {
    let (device, right) = match device {
        device::net::UplinkDevice::Tap(name) => (
            UplinkDevice::Tap(name),
            "make the tap for the daemon's user (`ip tuntap add NAME mode tap user USER`), or give the daemon CAP_NET_ADMIN",
        ),
        device::net::UplinkDevice::Interface(name) => (
            UplinkDevice::Interface(name),
            "give the daemon CAP_NET_RAW, or let it have a tap that is in a bridge with the interface",
        ),
    };
    let remedy = match error.kind() {
        io::ErrorKind::PermissionDenied => right,
        io::ErrorKind::NotFound => "look at `ip link` for the interfaces that there are",
        io::ErrorKind::ResourceBusy => "somebody else has it open: choose another name",
        _ => "look at `ip link show` for its state",
    };
    NetError::Uplink {
        device,
        error,
        remedy,
    }
}

fn stopped() -> NetError {
    NetError::Io(io::Error::other(
        "the thread that switches frames has stopped",
    ))
}

fn net_error(error: device::net::NetError) -> NetError {
    use device::net::NetError as Device;
    match error {
        Device::NoNetwork(network) => NetError::UnknownNetwork { network },
        Device::NoPort { vm, network } => NetError::UnknownPort { network, vm },
        Device::Socket { path, error } if error.kind() == io::ErrorKind::AddrInUse => {
            NetError::AddressInUse { path }
        }
        Device::Socket { path, error } => NetError::Directory { path, error },
        Device::Uplink { device, error } => uplink_error(device, error),
        other => NetError::Refused(other.to_string()),
    }
}
