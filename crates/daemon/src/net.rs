//! What the control plane asks of the part of the data plane that switches frames: networks, and the VMs' ports in them.
//!
//! As with lines, the control plane knows it only through a trait, [`NetWorker`]. Everything that a specification says has been
//! validated, and is complete: defaults are filled in.

mod apply;
mod change;
mod counters;
mod error;
mod homes;
mod status;
mod worker;

use std::fmt;
use std::io;
use std::time::{Duration, SystemTime};

use config::net::UplinkDevice;
use device::CaptureOptions;
use l2::bridge::VlanId;
use wire::ethernet::MacAddress;

use crate::capture::CaptureSender;
use crate::line::{Counters, SocketError};
use hostside::offers::Commit;
use runtime::directory::RuntimeError;

pub use change::{NetChange, NetFault, PlacedPort};
pub use counters::{refused_counters, switch_counters};
pub use worker::NetThreads;

/// What the worker knows about a network at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkStatus {
    /// Its full name.
    pub name: String,
    /// The name of the thread that switches its frames.
    pub thread: String,
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
    /// Why the last VMM's connection, or the guest's card, ended as it should not, until another VMM speaks or a driver runs again.
    pub last_fault: Option<String>,
    /// When that was.
    pub last_fault_at: Option<SystemTime>,
    /// What has happened at it since it was added: what [`switch_counters`] names, and of a VM's port `dropped_frames` (that were for the
    /// guest, which had no room for them, or no driver), `interrupts` and `kicks`, and `interrupts_saved` and `kicks_saved` (for as many batches none was
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
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error("cannot use {device}: {error}; {remedy}")]
    Uplink {
        /// What it is to be.
        device: UplinkDevice,
        error: io::Error,
        remedy: &'static str,
    },
    #[error("there is no network named {network:?}: `ringdown net ls` shows those that exist")]
    UnknownNetwork { network: String },
    #[error(
        "VM {vm:?} has no port in the network {network:?}: `ringdown net show {network}` shows who has"
    )]
    UnknownPort {
        /// Full name of the network.
        network: String,
        /// Full name of the VM.
        vm: String,
    },
    #[error("{0}")]
    Refused(String),
    #[error("the network could not be changed: {0}")]
    Io(#[from] io::Error),
}

/// The switching part of the data plane as the control plane sees it. Every method may be called from any thread and returns soon.
/// Networks and VMs are named by their full names.
pub trait NetWorker: Send + Sync + 'static {
    /// Opens what a change adds, and holds all frames of the networks that it touches, and of those on the same threads, until the commit that is returned is called, which makes the rest of the change before any
    /// frame passes, or dropped, which undoes it. To call it does not wait; [`settle`](Self::settle) does. Ports that cannot be opened are left out, and
    /// it is returned why.
    ///
    /// # Errors
    /// [`NetFault`] says which network or uplink cannot be opened. Nothing of the change remains then, and nothing is held.
    fn prepare(&self, change: NetChange) -> Result<(Commit, Vec<NetFault>), NetFault>;

    /// Waits until a change that was committed or dropped is made or undone. What failed of it is in the log.
    fn settle(&self);

    /// Takes a port's link down, which drops the VM's frames and closes the connection of its VMM, so that the guest sees that there is no
    /// carrier; or up again.
    ///
    /// # Errors
    /// [`NetError::UnknownNetwork`], [`NetError::UnknownPort`], [`NetError::Socket`] when the socket was taken meanwhile.
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
