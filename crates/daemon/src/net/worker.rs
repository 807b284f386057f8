//! The thread that switches frames, and the handle by which the control plane reaches it.

use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use device::net::{NetFabric, NetPortSnapshot, NetworkSnapshot, PortCounters};
use device::{Bound, CaptureOptions};
use keeper::Keeper;
use l2::bridge::{self, PortId};

use super::{
    MacStatus, NetChange, NetError, NetFault, NetWorker, NetworkStatus, PortOwner, PortStatus,
    UplinkDevice, apply, refused_counters, switch_counters,
};
use crate::capture::CaptureSender;
use crate::line::{Counters, SocketError};
use crate::worker::SOCKETS_PATIENCE;
use device::Orders;
use hostside::offers::Commit;

/// Switches frames, on a thread that begins with the first network.
pub struct NetThread {
    spin: Duration,
    batch: Option<usize>,
    keeper: Option<Arc<Keeper>>,
    running: Mutex<Option<Running>>,
}

struct Running {
    orders: Orders<NetFabric>,
    thread: JoinHandle<()>,
}

impl NetThread {
    /// Without networks. While frames come quickly the thread looks for up to `spin` before it sleeps; it takes up to
    /// `batch` of them from a ring at a time, or as many as is best.
    /// Where there is a keeper, VMMs' connections are kept for the next daemon.
    pub fn new(spin: Duration, batch: Option<usize>, keeper: Option<Arc<Keeper>>) -> NetThread {
        NetThread {
            spin,
            batch,
            keeper,
            running: Mutex::default(),
        }
    }

    /// Has the thread do something to a network.
    fn tell<T: Send + 'static>(
        &self,
        network: &str,
        job: impl FnOnce(&mut NetFabric) -> Result<T, device::net::NetError> + Send + 'static,
    ) -> Result<T, NetError> {
        let running = sys::lock(&self.running);
        let unknown = || NetError::UnknownNetwork {
            network: network.to_owned(),
        };
        let done = running.as_ref().ok_or_else(unknown)?.orders.ask(job);
        done.ok_or_else(stopped)?.map_err(net_error)
    }
}

impl Running {
    fn start(of: &NetThread) -> io::Result<Running> {
        let mut fabric = NetFabric::new()?;
        fabric.set_spin(of.spin);
        fabric.set_batch(of.batch.unwrap_or(NetFabric::MAX_BATCH));
        // One that has ended keeps nothing.
        if let Some(keeper) = of.keeper.as_ref().filter(|keeper| keeper.lives()) {
            fabric.set_keeper(keeper.clone())?;
        }
        let (orders, thread) = Orders::start("net", fabric)?;
        Ok(Running { orders, thread })
    }
}

impl NetWorker for NetThread {
    fn prepare(&self, mut change: NetChange) -> Result<(Commit, Vec<NetFault>), NetFault> {
        if change.is_empty() {
            return Ok((Box::new(|| {}), Vec::new()));
        }
        let mut left_out = change.clear_sockets(self.keeper.as_deref());
        let mut running = sys::lock(&self.running);
        let running = match &mut *running {
            Some(running) => running,
            none => {
                let started = Running::start(self);
                none.insert(started.map_err(|error| NetFault::of_all(error.into()))?)
            }
        };
        let mut bound = Bound::new(None, self.keeper.clone());
        left_out.extend(change.make_sockets(&mut bound));
        let (opened, is_open) = channel();
        let (commit, committed) = channel();
        running.orders.order(move |fabric| {
            fabric.set_bound(bound);
            let result = apply::open(&mut change, fabric);
            // Ports that were taken off listen nowhere, nor does what was not opened.
            fabric.set_bound(Bound::default());
            let failed = result.is_err();
            // The asker waits for it.
            let _ = opened.send(result);
            if failed {
                return;
            }
            match committed.recv() {
                Ok(()) => apply::settle(change, fabric),
                Err(_) => apply::undo(&change, fabric),
            }
        });
        let opened = is_open.recv();
        left_out.extend(opened.unwrap_or_else(|_| Err(NetFault::of_all(stopped())))?);
        let commit = Box::new(move || {
            // A thread that has ended passes no frames.
            let _ = commit.send(());
        });
        Ok((commit, left_out))
    }

    fn settle(&self) {
        if let Some(running) = &*sys::lock(&self.running) {
            let done = running.orders.ask(NetFabric::all_done);
            let _ = done.map(|done| done.recv_timeout(SOCKETS_PATIENCE));
        }
    }

    fn set_link(&self, network: &str, vm: &str, up: bool) -> Result<(), NetError> {
        let (name, vm) = (network.to_owned(), vm.to_owned());
        self.tell(network, move |fabric| fabric.set_link(&name, &vm, up))
    }

    fn networks(&self) -> Vec<NetworkStatus> {
        let running = sys::lock(&self.running);
        let networks = running
            .as_ref()
            .and_then(|running| running.orders.ask(|fabric| fabric.networks()));
        let networks = networks.unwrap_or_default().into_iter();
        networks.map(network_status).collect()
    }

    fn macs(&self, network: &str) -> Result<Vec<MacStatus>, NetError> {
        let name = network.to_owned();
        let snapshot = self.tell(network, move |fabric| {
            let found = fabric.network(&name);
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
        self.tell(network, move |fabric| {
            fabric.capture(&name, vm.as_deref(), options, Box::new(sender))
        })
    }

    fn stop(&self) {
        let Some(running) = sys::lock(&self.running).take() else {
            return;
        };
        running.orders.ask(NetFabric::stop);
        // It was asked to end; if it panicked, that has been printed.
        let _ = running.thread.join();
    }
}

impl Drop for NetThread {
    fn drop(&mut self) {
        self.stop();
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
        io::ErrorKind::ResourceBusy => "another process has it open: choose another name",
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

pub(super) fn net_error(error: device::net::NetError) -> NetError {
    use device::net::NetError as Device;
    match error {
        Device::NoNetwork(network) => NetError::UnknownNetwork { network },
        Device::NoPort { vm, network } => NetError::UnknownPort { network, vm },
        Device::Socket { path, error } => SocketError::at(path, error).into(),
        Device::Uplink { device, error } => uplink_error(device, error),
        other => NetError::Refused(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{Cids, Config, NetworkRequest, Plan, Written};

    fn plan(networks: &[&str]) -> Plan {
        let network = |name: &&str| Written {
            place: String::new(),
            value: NetworkRequest::named(name),
        };
        let config = Config {
            networks: networks.iter().map(network).collect(),
            ..Config::default()
        };
        Plan::from_config("/run/ringdown".into(), &config, Cids::default()).unwrap()
    }

    fn names(net: &NetThread) -> Vec<String> {
        let networks = net.networks().into_iter();
        networks.map(|network| network.name).collect()
    }

    fn commit(net: &NetThread, current: &Plan, next: &Plan) -> Commit {
        let (commit, left_out) = net.prepare(NetChange::between(current, next)).unwrap();
        assert!(left_out.is_empty(), "{left_out:?}");
        commit
    }

    #[test]
    fn networks_stand_still_until_a_change_is_committed() {
        let net = NetThread::new(Duration::ZERO, None, None);
        let (none, lan, dmz) = (plan(&[]), plan(&["lan"]), plan(&["dmz"]));
        commit(&net, &none, &lan)();
        let commit = commit(&net, &lan, &dmz);
        // What waits for its turn has it only when all of the change is made.
        let (seen, wait) = channel();
        let running = sys::lock(&net.running);
        let orders = running.as_ref().unwrap().orders.clone();
        orders.order(move |fabric| seen.send(fabric.networks()).unwrap());
        drop(running);
        commit();
        let networks = wait.recv().unwrap().into_iter();
        let networks: Vec<String> = networks.map(|network| network.name).collect();
        assert_eq!(networks, ["dmz"]);
    }

    #[test]
    fn a_change_that_is_dropped_is_undone() {
        let net = NetThread::new(Duration::ZERO, None, None);
        let (none, lan, dmz) = (plan(&[]), plan(&["lan"]), plan(&["dmz"]));
        commit(&net, &none, &lan)();
        drop(commit(&net, &lan, &dmz));
        net.settle();
        assert_eq!(names(&net), ["lan"]);
        commit(&net, &lan, &dmz)();
        net.settle();
        assert_eq!(names(&net), ["dmz"]);
    }

    #[test]
    fn nothing_to_change_holds_nothing_up() {
        let net = NetThread::new(Duration::ZERO, None, None);
        let lan = plan(&["lan"]);
        commit(&net, &plan(&[]), &lan)();
        let commit = commit(&net, &lan, &lan);
        assert_eq!(names(&net), ["lan"]);
        commit();
    }
}
