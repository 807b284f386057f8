//! Why a frame goes nowhere.

use thiserror::Error;

/// A reason, in words that an operator can act upon.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
#[repr(u8)]
pub enum Refusal {
    #[error("the port does not exist")]
    NoSuchPort,
    #[error("the port's link is down")]
    LinkDown,
    #[error("the frame is shorter than its header")]
    TooShort,
    #[error("the frame is longer than the network's MTU allows")]
    TooLong,
    #[error("the source is no address of one interface")]
    InvalidSource,
    #[error("the source is not the port's address")]
    OtherSource,
    #[error("the source is another port's address")]
    SourceTaken,
    #[error("the frame's VLAN is not the port's")]
    WrongVlan,
    #[error("the destination is for the next switch only (01:80:c2:00:00:00 to :0f)")]
    Reserved,
    #[error("the frame's headers contradict themselves or its length")]
    Malformed,
    #[error("the frame is wrapped so that filters cannot look into it (inner tags, SNAP)")]
    Wrapped,
    #[error("headers that filters have to see are too far inside, or in fragments")]
    HiddenHeaders,
    #[error("the sender of the ARP packet is not the port's address")]
    ArpSender,
    #[error("the IPv4 source is not the port's address")]
    Ipv4Source,
    #[error("the IPv6 source is none that the port may use")]
    Ipv6Source,
    #[error("the IPv6 address is in use by another port")]
    Ipv6Taken,
    #[error("the neighbour message names a link-layer address that is not the frame's source")]
    NeighbourAddress,
    #[error("an answer of a DHCP server, from a port that may not be one")]
    RogueDhcp,
    #[error("a router's advertisement or redirect, from a port that may not be one")]
    RogueRouter,
    #[error("more broadcasts than the port's rate allows")]
    BroadcastRate,
    #[error("more multicasts than the port's rate allows")]
    MulticastRate,
    #[error("more frames to unknown addresses than the port's rate allows")]
    UnknownRate,
    #[error("the destination is where the frame came from")]
    SamePort,
    #[error("the ports are isolated from each other")]
    Isolated,
    #[error("frames do not go from one uplink to another")]
    Transit,
    #[error("the destination is not in the frame's VLAN")]
    DestinationVlan,
    #[error("the link of the destination's port is down")]
    DestinationDown,
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
