//! ARP and neighbour discovery: whose address is that?
//!
//! Both are answered for the station's own addresses only, and also to guests that merely want to know whether such an address is still free
//! (RFC 5227 for ARP, RFC 4862, 5.4 for IPv6), so that no guest takes one by mistake.

use core::net::{Ipv4Addr, Ipv6Addr};

use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetProtocol, Icmpv6Message,
    Icmpv6Packet, Ipv6Packet, NdiscNeighborFlags, NdiscRepr, RawHardwareAddress,
};
use wire::ethernet::MacAddress;

use crate::frame::{self, Path};

pub(crate) const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
#[cfg(test)]
pub(crate) const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

/// The frame that answers an ARP packet, if it asks for `own`.
pub(crate) fn answer_arp(packet: &[u8], path: Path, own: Ipv4Addr) -> Option<Vec<u8>> {
    let ArpRepr::EthernetIpv4 {
        operation,
        source_hardware_addr,
        source_protocol_addr,
        target_protocol_addr,
        ..
    } = ArpRepr::parse(&ArpPacket::new_checked(packet).ok()?).ok()?
    else {
        return None;
    };
    // The answer goes to the sender; an ARP packet that says it is from another is a lie, or a proxy's, which is not needed here.
    let is_honest = source_hardware_addr.0 == path.destination.0 && source_protocol_addr != own;
    if operation != ArpOperation::Request || target_protocol_addr != own || !is_honest {
        return None;
    }
    let reply = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: EthernetAddress(path.source.0),
        source_protocol_addr: own,
        target_hardware_addr: source_hardware_addr,
        target_protocol_addr: source_protocol_addr,
    };
    let mut bytes = vec![0; reply.buffer_len()];
    reply.emit(&mut ArpPacket::new_unchecked(&mut bytes[..]));
    Some(frame::ethernet(path, EthernetProtocol::Arp, &bytes))
}

/// A message of neighbour discovery that concerns the station.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Solicitation {
    /// A solicitation of routers.
    Router { source: Ipv6Addr },
    /// A solicitation of the owner of an address.
    Neighbour { source: Ipv6Addr, target: Ipv6Addr },
}

/// Whether the packet, which is one of ICMPv6, is neighbour discovery, which is never passed on to the IP stack.
pub(crate) fn is_neighbour_discovery(message: &[u8]) -> bool {
    // Router and neighbour solicitation and advertisement, and redirect.
    message
        .first()
        .is_some_and(|kind| (133..=137).contains(kind))
}

/// What is asked for, if the packet passes the checks of RFC 4861, 6.1.1 and 7.1.1.
pub(crate) fn parse_solicitation(packet: &Ipv6Packet<&[u8]>) -> Option<Solicitation> {
    let (source, destination) = (packet.src_addr(), packet.dst_addr());
    let message = Icmpv6Packet::new_checked(packet.payload()).ok()?;
    if packet.hop_limit() != 255
        || message.msg_code() != 0
        || !message.verify_checksum(&source, &destination)
    {
        return None;
    }
    if !matches!(
        message.msg_type(),
        Icmpv6Message::RouterSolicit | Icmpv6Message::NeighborSolicit
    ) {
        return None;
    }
    match NdiscRepr::parse(&message).ok()? {
        // One without an address cannot say where it is to be found.
        NdiscRepr::RouterSolicit { lladdr: Some(_) }
        | NdiscRepr::NeighborSolicit {
            lladdr: Some(_), ..
        } if source.is_unspecified() => None,
        NdiscRepr::RouterSolicit { .. } => Some(Solicitation::Router { source }),
        NdiscRepr::NeighborSolicit {
            target_addr: target,
            ..
        } => {
            let is_probe_elsewhere =
                source.is_unspecified() && destination != solicited_node(target);
            (!target.is_multicast() && !is_probe_elsewhere)
                .then_some(Solicitation::Neighbour { source, target })
        }
        _ => None,
    }
}

/// The frame that says that `target` is the station's.
pub(crate) fn advertise(
    path: Path,
    source: Ipv6Addr,
    target: Ipv6Addr,
    is_router: bool,
) -> Vec<u8> {
    let is_probe = source.is_unspecified();
    let mut flags = NdiscNeighborFlags::OVERRIDE;
    flags.set(NdiscNeighborFlags::SOLICITED, !is_probe);
    // Guests forget what a router advertised when it says that it is none any more.
    flags.set(NdiscNeighborFlags::ROUTER, is_router);
    let advertisement = NdiscRepr::NeighborAdvert {
        flags,
        target_addr: target,
        lladdr: Some(RawHardwareAddress::from_bytes(&path.source.0)),
    };
    let mut bytes = vec![0; advertisement.buffer_len()];
    advertisement.emit(&mut Icmpv6Packet::new_unchecked(&mut bytes[..]));
    // A prober has no address to which the answer could go. The frame goes to that guest alone all the same (RFC 6085): no other asked.
    let destination = if is_probe { ALL_NODES } else { source };
    frame::neighbour_discovery(path, target, destination, &bytes)
}

/// The group in which the owner of an address listens.
pub(crate) fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    Ipv6Addr::new(
        0xff02,
        0,
        0,
        0,
        0,
        1,
        0xff00 | u16::from(a),
        u16::from_be_bytes([b, c]),
    )
}

/// The MAC address of a group.
pub(crate) fn group_mac(group: Ipv6Addr) -> MacAddress {
    let [.., a, b, c, d] = group.octets();
    MacAddress([0x33, 0x33, a, b, c, d])
}
