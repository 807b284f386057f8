//! Why a frame goes nowhere.

use thiserror::Error;

/// A reason, in words that an operator can act upon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
#[repr(u8)]
pub enum Refusal {
    /// The port is gone.
    #[error("the port does not exist")]
    NoSuchPort,
    /// The port's link is down.
    #[error("the port's link is down")]
    LinkDown,
    /// Shorter than an Ethernet header.
    #[error("the frame is shorter than its header")]
    TooShort,
    /// Longer than the network's MTU allows.
    #[error("the frame is longer than the network's MTU allows")]
    TooLong,
    /// From a group, or from zero.
    #[error("the source is no address of one interface")]
    InvalidSource,
    /// From an address other than the port's.
    #[error("the source is not the port's address")]
    OtherSource,
    /// From an address that another port has.
    #[error("the source is another port's address")]
    SourceTaken,
    /// With a tag, or without one, that the port may not use.
    #[error("the frame's VLAN is not the port's")]
    WrongVlan,
    /// To an address that is for the next switch only.
    #[error("the destination is for the next switch only (01:80:c2:00:00:00 to :0f)")]
    Reserved,
    /// Headers that contradict themselves.
    #[error("the frame's headers contradict themselves or its length")]
    Malformed,
    /// Wrapped so that a receiver would look further than the filters: inner tags, SNAP.
    #[error("the frame is wrapped so that filters cannot look into it (inner tags, SNAP)")]
    Wrapped,
    /// Headers that are too far inside to be seen, or in fragments.
    #[error("headers that filters have to see are too far inside, or in fragments")]
    HiddenHeaders,
    /// ARP in the name of another.
    #[error("the sender of the ARP packet is not the port's address")]
    ArpSender,
    /// IPv4 from an address other than the port's.
    #[error("the IPv4 source is not the port's address")]
    Ipv4Source,
    /// IPv6 from an address that the port may not use.
    #[error("the IPv6 source is none that the port may use")]
    Ipv6Source,
    /// IPv6 from an address that another port uses.
    #[error("the IPv6 address is in use by another port")]
    Ipv6Taken,
    /// Neighbour discovery with another's link-layer address.
    #[error("the neighbour message names a link-layer address that is not the frame's source")]
    NeighbourAddress,
    /// A DHCP server's answer from a port that is none.
    #[error("an answer of a DHCP server, from a port that may not be one")]
    RogueDhcp,
    /// A router's advertisement or redirect from a port that is none.
    #[error("a router's advertisement or redirect, from a port that may not be one")]
    RogueRouter,
    /// Too many broadcast frames.
    #[error("more broadcasts than the port's rate allows")]
    BroadcastRate,
    /// Too many frames to groups.
    #[error("more multicasts than the port's rate allows")]
    MulticastRate,
    /// Too many frames to unknown addresses.
    #[error("more frames to unknown addresses than the port's rate allows")]
    UnknownRate,
    /// To the port it came from.
    #[error("the destination is where the frame came from")]
    SamePort,
    /// Between ports of which one is isolated.
    #[error("the ports are isolated from each other")]
    Isolated,
    /// From one uplink to another.
    #[error("frames do not go from one uplink to another")]
    Transit,
    /// The one it is for is not in the frame's VLAN.
    #[error("the destination is not in the frame's VLAN")]
    DestinationVlan,
    /// The link of the port it is for is down.
    #[error("the link of the destination's port is down")]
    DestinationDown,
    /// No port is left that it could go to.
    #[error("there is no port that the frame could go to")]
    NoReceiver,
}

impl Refusal {
    /// How many there are.
    pub const COUNT: usize = Refusal::ALL.len();

    /// Every one, in the order of their numbers.
    pub const ALL: [Refusal; 28] = [
        Refusal::NoSuchPort,
        Refusal::LinkDown,
        Refusal::TooShort,
        Refusal::TooLong,
        Refusal::InvalidSource,
        Refusal::OtherSource,
        Refusal::SourceTaken,
        Refusal::WrongVlan,
        Refusal::Reserved,
        Refusal::Malformed,
        Refusal::Wrapped,
        Refusal::HiddenHeaders,
        Refusal::ArpSender,
        Refusal::Ipv4Source,
        Refusal::Ipv6Source,
        Refusal::Ipv6Taken,
        Refusal::NeighbourAddress,
        Refusal::RogueDhcp,
        Refusal::RogueRouter,
        Refusal::BroadcastRate,
        Refusal::MulticastRate,
        Refusal::UnknownRate,
        Refusal::SamePort,
        Refusal::Isolated,
        Refusal::Transit,
        Refusal::DestinationVlan,
        Refusal::DestinationDown,
        Refusal::NoReceiver,
    ];

    /// Its name, for metrics and machines.
    pub fn name(self) -> &'static str {
        match self {
            Refusal::NoSuchPort => "no_such_port",
            Refusal::LinkDown => "link_down",
            Refusal::TooShort => "too_short",
            Refusal::TooLong => "too_long",
            Refusal::InvalidSource => "invalid_source",
            Refusal::OtherSource => "other_source",
            Refusal::SourceTaken => "source_taken",
            Refusal::WrongVlan => "wrong_vlan",
            Refusal::Reserved => "reserved",
            Refusal::Malformed => "malformed",
            Refusal::Wrapped => "wrapped",
            Refusal::HiddenHeaders => "hidden_headers",
            Refusal::ArpSender => "arp_sender",
            Refusal::Ipv4Source => "ipv4_source",
            Refusal::Ipv6Source => "ipv6_source",
            Refusal::Ipv6Taken => "ipv6_taken",
            Refusal::NeighbourAddress => "neighbour_address",
            Refusal::RogueDhcp => "rogue_dhcp",
            Refusal::RogueRouter => "rogue_router",
            Refusal::BroadcastRate => "broadcast_rate",
            Refusal::MulticastRate => "multicast_rate",
            Refusal::UnknownRate => "unknown_rate",
            Refusal::SamePort => "same_port",
            Refusal::Isolated => "isolated",
            Refusal::Transit => "transit",
            Refusal::DestinationVlan => "destination_vlan",
            Refusal::DestinationDown => "destination_down",
            Refusal::NoReceiver => "no_receiver",
        }
    }
}
