//! Networks and the VMs' ports in them as they are planned: complete, with every default filled in.

mod bridge;
mod subnet;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use l2::bridge::{Rates, Vlan, VlanId};
use wire::ethernet::MacAddress;

use crate::full_name;

pub use subnet::{Ipv4Subnet, Ipv6Subnet};

/// The VLANs that there are: 0 and 4095 mean something else (IEEE 802.1Q).
pub const VLAN_BOUNDS: RangeInclusive<u64> = 1..=4094;

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
    /// The address that DNS answers with.
    pub ipv6: Option<Ipv6Addr>,
    /// Its port is isolated.
    pub isolated: bool,
}
