//! What an operator says about a network and its ports.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use thiserror::Error;
use wire::ethernet::MacAddress;

use super::owners::Bound;
use super::{PortId, Vlan, VlanId};

/// Limits of one network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeLimits {
    /// Ports, up to [`BridgeLimits::PORTS_MAX`].
    pub ports_max: u16,
    /// Addresses that all ports together may have learned, of either kind. Each port's own bounds are reserved of it when it is added, so none can take another's.
    pub learned_max: u32,
    /// How long an address stays learned that is not seen.
    pub ageing: Duration,
    /// The longest packet in a frame, in bytes: without the Ethernet header.
    pub mtu: u16,
}

impl BridgeLimits {
    /// The most ports that a network can have.
    pub const PORTS_MAX: u16 = 1024;
}

impl Default for BridgeLimits {
    fn default() -> BridgeLimits {
        BridgeLimits {
            ports_max: BridgeLimits::PORTS_MAX,
            learned_max: 65_536,
            ageing: Duration::from_secs(300),
            mtu: 1500,
        }
    }
}

/// What is behind a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PortKind {
    /// A VM, which is not trusted.
    Guest,
    /// The world outside. Frames never go from one uplink to another: without a spanning tree that could close a loop.
    Uplink,
    /// The network itself: the addresses at which it answers.
    Station,
}

/// A port, as its operator wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortConfig {
    /// What is behind it.
    pub kind: PortKind,
    /// Its address: it may use no other, and no other may use this one, in any VLAN.
    pub mac: Option<MacAddress>,
    /// How many addresses may be learned behind it. None are where it has an address of its own.
    pub learned_max: u16,
    /// Its place among the VLANs.
    pub vlan: Vlan,
    /// Whether it reaches only uplinks and stations.
    pub isolated: bool,
    /// Its IPv4 address: a guest may use no other, and no other may use it in the VLAN of this port's frames without a tag.
    pub ipv4: Option<Ipv4Addr>,
    /// Further addresses that no other port may use in that VLAN, up to [`PortConfig::ADDRESSES_MAX`]. Those behind an uplink that also is in
    /// [`VlanId::DEFAULT`] are addresses there.
    pub addresses: Vec<IpAddr>,
    /// Which further IPv6 addresses a guest may use; without one, any that are not another port's. Of an uplink, how many are
    /// kept for the hosts behind it that use them.
    pub ipv6_guard: Option<Ipv6Guard>,
    /// How much it may send.
    pub rates: Rates,
}

impl PortConfig {
    /// The most further addresses of its own.
    pub const ADDRESSES_MAX: usize = 16;

    /// A guest with this address.
    pub fn guest(mac: MacAddress) -> PortConfig {
        PortConfig {
            kind: PortKind::Guest,
            mac: Some(mac),
            learned_max: 0,
            vlan: Vlan::default(),
            isolated: false,
            ipv4: None,
            addresses: Vec::new(),
            ipv6_guard: None,
            rates: Rates::guest(),
        }
    }

    /// A guest whose addresses are learned. The IPv6 address that it was first to use is its own all the same, whatever it is.
    pub fn learning_guest() -> PortConfig {
        PortConfig {
            mac: None,
            learned_max: 16,
            ipv6_guard: Some(Ipv6Guard {
                prefixes: vec![Ipv6Prefix::ANY],
                ..Ipv6Guard::default()
            }),
            ..PortConfig::guest(MacAddress::ZERO)
        }
    }

    /// An uplink.
    pub fn uplink() -> PortConfig {
        PortConfig {
            kind: PortKind::Uplink,
            learned_max: 8192,
            ipv6_guard: Some(Ipv6Guard {
                addresses_max: 8192,
                ..Ipv6Guard::default()
            }),
            rates: Rates::uplink(),
            ..PortConfig::learning_guest()
        }
    }

    /// The network itself, with this address.
    pub fn station(mac: MacAddress) -> PortConfig {
        PortConfig {
            kind: PortKind::Station,
            rates: Rates::uplink(),
            ..PortConfig::guest(mac)
        }
    }

    /// How many addresses are learned behind it at most, of either kind.
    pub(super) fn reserved(&self) -> u32 {
        let bindings = self
            .ipv6_guard
            .as_ref()
            .map_or(0, |guard| guard.addresses_max);
        u32::from(self.learned_max) + u32::from(bindings)
    }

    /// So many addresses of one kind, of which it may have `max`. Behind an uplink are many hosts, and none is to lose its address to another's flood.
    pub(super) fn bound(&self, max: u16) -> Bound {
        let known = match self.kind {
            PortKind::Uplink => max - max.div_ceil(4),
            PortKind::Guest | PortKind::Station => 0,
        };
        Bound { max, known }
    }

    /// The VLAN in which its addresses are its own.
    pub(super) fn home(&self) -> Option<VlanId> {
        match self.kind {
            PortKind::Uplink if self.vlan.contains(VlanId::DEFAULT) => Some(VlanId::DEFAULT),
            _ => self.vlan.untagged(),
        }
    }

    /// Whether it may use MAC addresses that were not assigned to it.
    pub(super) fn learns(&self) -> bool {
        self.learned_max > 0
    }
}

/// Which IPv6 addresses a guest may use: link-local ones and those of some prefixes, each for the first to use it (in the spirit of RFC 6620).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ipv6Guard {
    /// The network's prefixes, up to [`Ipv6Guard::PREFIXES_MAX`]. One of length 0 stands for those that routers behind uplinks advertise,
    /// whichever they are.
    pub prefixes: Vec<Ipv6Prefix>,
    /// How many addresses a guest may hold at a time. One more, and it gives up the one it has not used for longest.
    pub addresses_max: u16,
}

impl Ipv6Guard {
    /// The most prefixes.
    pub const PREFIXES_MAX: usize = 8;

    /// Whether a guest may use this address if no other does.
    pub(super) fn allows(&self, address: Ipv6Addr) -> bool {
        Ipv6Prefix::LINK_LOCAL.contains(address)
            || self.prefixes.iter().any(|prefix| prefix.contains(address))
    }
}

impl Default for Ipv6Guard {
    /// No prefix, and room for the link-local address and for what Linux keeps of temporary ones.
    fn default() -> Ipv6Guard {
        Ipv6Guard {
            prefixes: Vec::new(),
            addresses_max: 16,
        }
    }
}

/// IPv6 addresses with the same beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Prefix {
    /// Any of them.
    pub address: Ipv6Addr,
    /// How much they have in common, in bits, up to 128.
    pub len: u8,
}

impl Ipv6Prefix {
    /// All addresses.
    pub const ANY: Ipv6Prefix = Ipv6Prefix {
        address: Ipv6Addr::UNSPECIFIED,
        len: 0,
    };

    /// Link-local addresses.
    pub const LINK_LOCAL: Ipv6Prefix = Ipv6Prefix {
        address: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0),
        len: 10,
    };

    /// Whether an address is one of them.
    pub fn contains(&self, address: Ipv6Addr) -> bool {
        let differing = self.address.to_bits() ^ address.to_bits();
        differing.leading_zeros() >= u32::from(self.len)
    }
}

/// How much a port may send.
///
/// Frames and bytes are not thrown away when there are too many: the port is in debt, and [`throttled_until`](super::Bridge::throttled_until)
/// says how long its frames are to be left where they are. What goes to many ports at once is thrown away beyond its
/// rate, as it would otherwise hold up the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rates {
    /// Frames of any kind.
    pub frames_per_second: Option<u32>,
    /// Bytes of frames.
    pub bytes_per_second: Option<u64>,
    /// Broadcast frames.
    pub broadcasts_per_second: u32,
    /// Frames to groups.
    pub multicasts_per_second: u32,
    /// Frames to unknown addresses.
    pub unknown_per_second: u32,
}

impl Rates {
    /// For a guest. One that looks for every neighbour of a /22 sends 1,000 ARP requests; a group with a stream of 20 Mbit/s gets 2,000 frames a
    /// second; a frame to an unknown address is answered, and then it is known. With a thousand ports one guest can
    /// so cause 4 million copies a second at worst, a part of what one processor copies.
    pub fn guest() -> Rates {
        Rates {
            frames_per_second: None,
            bytes_per_second: None,
            broadcasts_per_second: 1000,
            multicasts_per_second: 2000,
            unknown_per_second: 1000,
        }
    }

    /// For an uplink: as for ten guests, as many hosts are behind it.
    pub fn uplink() -> Rates {
        Rates {
            broadcasts_per_second: 10_000,
            multicasts_per_second: 20_000,
            unknown_per_second: 10_000,
            ..Rates::guest()
        }
    }
}

/// Why a port cannot be as its operator wants it.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AddPortError {
    #[error(
        "the network has {ports_max} ports, as many as it may: remove one first, or add a network"
    )]
    TooManyPorts {
        /// As many as it may have.
        ports_max: u16,
    },
    #[error(
        "{wanted} learned addresses are wanted and {free} of the network's {learned_max} are free: give this port or others fewer"
    )]
    TooManyAddresses {
        wanted: u32,
        /// Not reserved by other ports.
        free: u32,
        learned_max: u32,
    },
    #[error("a port needs an address of its own, or to learn at least one")]
    NoAddress,
    #[error("{0} is no address of one interface: groups and zero are not")]
    InvalidMac(MacAddress),
    #[error("{0} is no address of one host")]
    InvalidAddress(IpAddr),
    #[error("{mac} is the address of another port already")]
    MacTaken { mac: MacAddress, port: PortId },
    #[error("{address} is the address of another port in this VLAN already")]
    AddressTaken { address: IpAddr, port: PortId },
    #[error("{count} {what} are wanted, a port can have {max}")]
    TooMany {
        what: &'static str,
        count: usize,
        /// How many there may be.
        max: usize,
    },
    #[error("there is no such port")]
    NoSuchPort,
}
