//! What goes over the control socket about networks.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use config::full_name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use wire::ethernet::MacAddress;

/// The media type of a capture: pcapng.
pub const CAPTURE_MEDIA_TYPE: &str = "application/x-pcapng";

/// A network as the daemon sees it now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkInfo {
    /// Its name, of which there is one in its domain.
    pub name: String,
    /// The domain that its VMs are of.
    pub domain: String,
    /// The largest IP packet that it carries, in bytes.
    pub mtu: u16,
    /// Its own MAC address.
    #[schema(value_type = String)]
    pub mac: MacAddress,
    /// Its own IPv4 address and the length of the prefix, as in `10.64.0.1/24`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<String>,
    /// The same of IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<String>,
    /// The domain of its names.
    pub dns_domain: String,
    /// It gives addresses to guests.
    pub dhcp: bool,
    /// It answers questions about names.
    pub dns: bool,
    /// It advertises its IPv6 prefix.
    pub router_advertisements: bool,
    /// Addresses for guests that are not known, as in `10.64.0.200-10.64.0.250`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Where packets for elsewhere go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub gateway: Option<Ipv4Addr>,
    /// Its way out, in words: `tap rd0` or `interface eth1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// The daemon's thread that switches its frames, as `ps -L` has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<String>,
    /// How many VMs have a port in it.
    pub vms: usize,
    /// Of how many of them a VMM is connected.
    pub attached: usize,
    /// What has happened in it, by name: at the ports of all VMs together, and what is no port's.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
    /// Frames of VMs that went nowhere, by the name of the reason.
    #[serde(default)]
    pub refused: BTreeMap<String, u64>,
}

impl NetworkInfo {
    /// The name by which people tell it from networks of other domains: `lan`, or `red/lan`.
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.name)
    }
}

/// The answer to `GET /v1/networks`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkList {
    /// The networks, by name.
    pub networks: Vec<NetworkInfo>,
}

/// The answer to `GET /v1/networks/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkDetails {
    /// The network.
    #[serde(flatten)]
    pub network: NetworkInfo,
    /// Its ports: those of VMs by name, then the uplink's and its own.
    pub ports: Vec<NetworkPort>,
}

/// What a port is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PortKind {
    /// A VM's.
    Vm,
    /// The network's way out.
    Uplink,
    /// The network's own.
    Station,
}

/// A port of a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkPort {
    /// What it is.
    pub kind: PortKind,
    /// Full name of its VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// What it is for a VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attachment: Option<VmPort>,
    /// A VMM is connected; of an uplink, its device is there.
    pub attached: bool,
    /// The guest's driver runs its rings.
    pub driver_ready: bool,
    /// The operator has not taken the link down.
    pub link_up: bool,
    /// What has happened at it, by name.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
    /// Frames that came from it and went nowhere, by the name of the reason.
    #[serde(default)]
    pub refused: BTreeMap<String, u64>,
}

/// A VM's port in a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmPort {
    /// Full name of the network.
    pub network: String,
    /// Where the VMM connects: the vhost-user socket.
    #[schema(value_type = String)]
    pub vhost_user: PathBuf,
    /// The guest's MAC address, which its VMM has to give it.
    #[schema(value_type = String)]
    pub mac: MacAddress,
    /// The guest's IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub ipv4: Option<Ipv4Addr>,
    /// The IPv6 address that the guest makes for itself, if it does so by the common rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub ipv6: Option<Ipv6Addr>,
    /// Why its last VMM's connection ended, or the guest's card failed, if that was no orderly end. Forgotten when another VMM speaks vhost-user
    /// there, and when a guest's driver runs again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 256)]
    pub last_fault: Option<String>,
    /// When that was, as RFC 3339 has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_fault_time: Option<String>,
    /// The network's MTU.
    pub mtu: u16,
    /// How many pairs of queues the device may have.
    pub queue_pairs: u16,
    /// Its VLANs in words: `1`, or `trunk 10,20 native 1`.
    pub vlan: String,
    /// It reaches the uplink and the network itself only.
    pub isolated: bool,
    /// It may send from other addresses than its own.
    pub learn: bool,
    /// When the guest is interrupted: `adaptive`, `off`, or a time such as `50us`.
    pub moderation: String,
}

/// The answer to `GET /v1/networks/NAME/macs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MacList {
    /// The addresses that the network knows, in their order.
    pub macs: Vec<MacInfo>,
}

/// An address that a network knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MacInfo {
    /// The address.
    #[schema(value_type = String)]
    pub mac: MacAddress,
    /// The VLAN in which it was learned; one that was given is its port's in every one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// What the port is behind which it is.
    pub kind: PortKind,
    /// Full name of that port's VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// It was given and stays; else it was learned.
    pub fixed: bool,
    /// How long ago it was last heard of, if it was learned, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u64>,
}

/// The body of `PUT /v1/networks/NAME/ports/VM/link`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LinkRequest {
    /// Whether the link is to be up.
    pub up: bool,
}

impl fmt::Display for PortKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            PortKind::Vm => "vm",
            PortKind::Uplink => "(uplink)",
            PortKind::Station => "(network)",
        })
    }
}
