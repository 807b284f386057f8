//! What the control plane asks of the part of the data plane that switches frames: networks, and the VMs' ports in them.
//!
//! As with lines, the control plane knows it only through a trait, [`NetWorker`]. Everything that a specification says has been
//! validated, and is complete: defaults are filled in.

mod apply;
mod bridge;
mod change;
mod subnet;
mod worker;

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use device::CaptureOptions;
use switch::bridge::{Rates, Vlan, VlanId};
use wire::ethernet::MacAddress;

use crate::capture::CaptureSender;
use crate::config::full_name;
use crate::line::Counters;
use crate::offers::Commit;

pub use bridge::{refused_counters, switch_counters};
pub(crate) use change::PlacedPort;
pub use change::{NetChange, NetFault, NetFaultCause};
pub use subnet::{Ipv4Subnet, Ipv6Subnet};
pub use worker::NetThread;

/// A network: one switch, the station that answers for it, and its way out if it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkSpec {
    /// The domain that its VMs are of.
    pub domain: String,
    /// Its name, of which there is one in its domain.
    pub name: String,
    /// The largest IP packet that it carries, in bytes.
    pub mtu: u16,
    /// What it answers itself.
    pub station: StationSpec,
    /// Its way out.
    pub uplink: Option<UplinkSpec>,
}

impl NetworkSpec {
    /// The name by which the daemon and people tell it from networks of other domains: `lan`, or `red/lan`.
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.name)
    }
}

/// What a network answers itself, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StationSpec {
    /// Its MAC address.
    pub mac: MacAddress,
    /// Its IPv4 address and those around it. Without them there is neither DHCP nor a pool.
    pub ipv4: Option<Ipv4Subnet>,
    /// Its IPv6 address and the prefix. Without them nothing is advertised.
    pub ipv6: Option<Ipv6Subnet>,
    /// The domain of the names that it knows.
    pub dns_domain: String,
    /// It gives addresses to guests that ask (DHCPv4).
    pub dhcp: bool,
    /// It answers questions about names (DNS).
    pub dns: bool,
    /// It advertises the IPv6 prefix to guests that ask.
    pub router_advertisements: bool,
    /// Addresses for guests whose MAC address is not the one that their port was given.
    pub pool: Option<RangeInclusive<Ipv4Addr>>,
    /// Where packets for elsewhere go.
    pub gateway: Option<Ipv4Addr>,
}

/// A network's way out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UplinkSpec {
    /// What it is on the host.
    pub device: UplinkDevice,
    /// The VLANs that go out of it.
    pub vlan: Vlan,
    /// Addresses of hosts behind it, beside the gateway's, that no guest may use.
    pub addresses: Vec<IpAddr>,
}

/// What an uplink is on the host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum UplinkDevice {
    /// A tap device of this name. It is made if it is not there.
    Tap(String),
    /// An interface that is there, whose frames are taken and given with a packet socket.
    Interface(String),
}

impl UplinkDevice {
    /// The name of its interface.
    pub fn name(&self) -> &str {
        match self {
            UplinkDevice::Tap(name) | UplinkDevice::Interface(name) => name,
        }
    }
}

impl fmt::Display for UplinkDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UplinkDevice::Tap(name) => write!(formatter, "tap {name}"),
            UplinkDevice::Interface(name) => write!(formatter, "interface {name}"),
        }
    }
}

/// The VLANs of a port in words: `1`, or `trunk 10,20 native 1`.
pub fn vlan_in_words(vlan: &Vlan) -> String {
    match vlan {
        Vlan::Access(vlan) => vlan.to_string(),
        Vlan::Trunk { native, allowed } => {
            let allowed: Vec<String> = allowed.iter().map(|vlan| vlan.to_string()).collect();
            let native = native.map(|vlan| format!(" native {vlan}"));
            format!("trunk {}{}", allowed.join(","), native.unwrap_or_default())
        }
    }
}

/// Whether frames of a port without a tag are of the VLAN in which the network itself answers.
pub fn hears_station(vlan: &Vlan) -> bool {
    vlan.untagged() == Some(VlanId::DEFAULT)
}

/// When a guest is interrupted for frames that came for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Moderation {
    /// At once while it is idle, and at most once in a window that grows with the load.
    #[default]
    Adaptive,
    /// For each batch.
    Off,
    /// At once while it is idle, and at most once in this window.
    Window(Duration),
}

impl fmt::Display for Moderation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Moderation::Adaptive => formatter.write_str("adaptive"),
            Moderation::Off => formatter.write_str("off"),
            Moderation::Window(window) => write!(formatter, "{}us", window.as_micros()),
        }
    }
}

/// A VM's port in a network, of which it has one at most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortSpec {
    /// Full name of the network.
    pub network: String,
    /// Full name of the VM.
    pub vm: String,
    /// Where the VMM connects: the vhost-user socket of this port.
    pub socket: PathBuf,
    /// The guest's MAC address, of which there is one in the daemon.
    pub mac: MacAddress,
    /// The guest's IPv4 address, of which there is one in the network. None where the network does not know the guest's addresses: it has
    /// no IPv4, or the port is not of the station's VLAN.
    pub ipv4: Option<Ipv4Addr>,
    /// The IPv6 address that the guest makes for itself, if it does so by the common rule.
    pub ipv6: Option<Ipv6Addr>,
    /// Its VLANs.
    pub vlan: Vlan,
    /// It reaches the uplink and the station only.
    pub isolated: bool,
    /// It may send from other addresses than its own, which the switch learns: for guests with guests.
    pub learn: bool,
    /// How much it may send.
    pub rates: Rates,
    /// How many pairs of queues the guest may use.
    pub queue_pairs: u16,
    /// When it is interrupted.
    pub moderation: Moderation,
}

/// A guest as the station knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetHost {
    /// Its name: a single label of DNS.
    pub name: String,
    /// Its other names, labels as well. No two hosts have a name in common.
    pub aliases: Vec<String>,
    /// Its MAC address.
    pub mac: MacAddress,
    /// The address that DHCP gives it.
    pub ipv4: Option<Ipv4Addr>,
    /// The address that DNS tells.
    pub ipv6: Option<Ipv6Addr>,
    /// Its port is isolated.
    pub isolated: bool,
}

/// What the worker knows about a network at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkStatus {
    /// Its full name.
    pub name: String,
    /// Its ports: those of VMs, and those of the station and the uplink.
    pub ports: Vec<PortStatus>,
    /// What has happened in it since it was added, and is no port's.
    pub counters: Counters,
}

/// Whose a port is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PortOwner {
    /// That of the VM with this full name.
    Vm(String),
    /// The way out.
    Uplink,
    /// The network's own.
    Station,
}

impl fmt::Display for PortOwner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            PortOwner::Vm(name) => name,
            PortOwner::Uplink => "(uplink)",
            PortOwner::Station => "(network)",
        })
    }
}

/// What the worker knows about a port at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortStatus {
    /// Whose it is.
    pub owner: PortOwner,
    /// The operator has not taken the link down.
    pub link_up: bool,
    /// A VMM is connected; of an uplink, its device is there.
    pub attached: bool,
    /// The guest's driver runs its rings.
    pub driver_ready: bool,
    /// Why the last VMM's connection, or the guest's card, ended as it should not, until a driver runs again.
    pub last_fault: Option<String>,
    /// What has happened at it since it was added: what [`switch_counters`] names, and of a VM's port `dropped_frames` (that were for the
    /// guest, which had no room for them), `interrupts` and `kicks`, and `interrupts_saved` and `kicks_saved` (for as many batches none was
    /// needed).
    pub counters: Counters,
    /// Frames that came from it and went nowhere, by the name of the reason. Reasons that never came up may be left out.
    pub refused: Counters,
}

/// An address that a network knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MacStatus {
    /// The address.
    pub mac: MacAddress,
    /// The VLAN in which it was learned; one that the operator gave is its port's in every one.
    pub vlan: Option<VlanId>,
    /// The port behind which it is.
    pub owner: PortOwner,
    /// How long ago it was last heard of; none for one that the operator gave and that stays.
    pub age: Option<Duration>,
}

/// Why the data plane did not do what it was asked about a network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// Somebody listens on the socket already.
    #[error("another process listens on {}: choose another path", path.display())]
    AddressInUse {
        /// The socket.
        path: PathBuf,
    },
    /// The socket cannot be made in its directory.
    #[error("cannot make a socket at {}: {error}; choose another path", path.display())]
    Directory {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The uplink cannot be had.
    #[error("cannot use {device}: {error}; {remedy}")]
    Uplink {
        /// What it is to be.
        device: UplinkDevice,
        /// What the system said.
        error: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// There is no such network.
    #[error("there is no network named {network:?}: `ringdown net ls` shows those that exist")]
    UnknownNetwork {
        /// Its full name.
        network: String,
    },
    /// The VM has no port there.
    #[error(
        "VM {vm:?} has no port in the network {network:?}: `ringdown net show {network}` shows who has"
    )]
    UnknownPort {
        /// Full name of the network.
        network: String,
        /// Full name of the VM.
        vm: String,
    },
    /// The switch does not take it: a table is full, or an address is another's.
    #[error("{0}")]
    Refused(String),
    /// The system refused something else.
    #[error("the network could not be changed: {0}")]
    Io(#[from] io::Error),
}

/// The switching part of the data plane as the control plane sees it. Every method may be called from any thread and returns soon.
/// Networks and VMs are named by their full names.
pub trait NetWorker: Send + Sync + 'static {
    /// Opens what a change adds, and holds all frames of all networks until what is returned is called, which makes the rest of the change before any frame
    /// passes, or dropped, which undoes it. To call it does not wait; [`settle`](Self::settle) does.
    ///
    /// # Errors
    /// [`NetFault`] says what cannot be opened. Nothing of the change remains then, and nothing is held.
    fn prepare(&self, change: NetChange) -> Result<Commit, NetFault>;

    /// Waits until a change that was committed or dropped is made or undone. What failed of it is in the log.
    fn settle(&self);

    /// Takes a port's link down, which drops the VM's frames and closes the connection of its VMM, so that the guest sees that there is no
    /// carrier; or up again.
    ///
    /// # Errors
    /// [`NetError::UnknownNetwork`], [`NetError::UnknownPort`], [`NetError::AddressInUse`] when the socket was taken meanwhile.
    fn set_link(&self, network: &str, vm: &str, up: bool) -> Result<(), NetError>;

    /// The networks and their state, in any order.
    fn networks(&self) -> Vec<NetworkStatus>;

    /// The addresses that a network knows, in any order.
    ///
    /// # Errors
    /// [`NetError::UnknownNetwork`].
    fn macs(&self, network: &str) -> Result<Vec<MacStatus>, NetError>;

    /// Captures the frames of a network, or of one VM's port, until the sender's reader is dropped, or network or port are removed, or it has
    /// as many as it wants.
    ///
    /// # Errors
    /// [`NetError::UnknownNetwork`], [`NetError::UnknownPort`], [`NetError::Refused`] when there are too many captures already.
    fn capture(
        &self,
        network: &str,
        vm: Option<&str>,
        options: CaptureOptions,
        sender: CaptureSender,
    ) -> Result<(), NetError>;

    /// Removes every network and ends what serves them.
    fn stop(&self);
}
