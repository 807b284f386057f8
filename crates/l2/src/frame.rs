//! Frames as the station writes them: the headers below what it has to say.

use core::net::{Ipv4Addr, Ipv6Addr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, Icmpv6Packet, IpProtocol, Ipv4Packet,
    Ipv4Repr, Ipv6Packet, Ipv6Repr, UdpPacket, UdpRepr,
};
use wire::ethernet::MacAddress;

pub(crate) const HEADER_LEN: usize = 14;
const IPV4_HEADER_LEN: usize = 20;
const IPV6_HEADER_LEN: usize = 40;
const UDP_HEADER_LEN: usize = 8;

/// The longest frame that makes sense here: the longest IP packet, and its Ethernet header.
pub(crate) const MAX_FRAME_LEN: usize = IPV6_HEADER_LEN + 65_535 + HEADER_LEN;

/// A frame's sender and receiver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    pub source: MacAddress,
    pub destination: MacAddress,
}

/// A frame around a packet.
pub(crate) fn ethernet(path: Path, protocol: EthernetProtocol, packet: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_LEN + packet.len()];
    let mut frame = EthernetFrame::new_unchecked(&mut bytes[..]);
    frame.set_dst_addr(EthernetAddress(path.destination.0));
    frame.set_src_addr(EthernetAddress(path.source.0));
    frame.set_ethertype(protocol);
    frame.payload_mut().copy_from_slice(packet);
    bytes
}

/// A frame around a datagram of UDP over IPv4.
pub(crate) fn udp(
    path: Path,
    source: (Ipv4Addr, u16),
    destination: (Ipv4Addr, u16),
    payload: &[u8],
) -> Vec<u8> {
    let checksums = ChecksumCapabilities::default();
    let mut packet = vec![0; IPV4_HEADER_LEN + UDP_HEADER_LEN + payload.len()];
    let ip = Ipv4Repr {
        src_addr: source.0,
        dst_addr: destination.0,
        next_header: IpProtocol::Udp,
        payload_len: UDP_HEADER_LEN + payload.len(),
        hop_limit: 64,
    };
    ip.emit(&mut Ipv4Packet::new_unchecked(&mut packet[..]), &checksums);
    let datagram = UdpRepr {
        src_port: source.1,
        dst_port: destination.1,
    };
    datagram.emit(
        &mut UdpPacket::new_unchecked(&mut packet[IPV4_HEADER_LEN..]),
        &source.0.into(),
        &destination.0.into(),
        payload.len(),
        |space| space.copy_from_slice(payload),
        &checksums,
    );
    ethernet(path, EthernetProtocol::Ipv4, &packet)
}

/// A frame around a message of neighbour discovery, whose checksum is filled in. The hop limit of 255 proves that no router passed it on.
pub(crate) fn neighbour_discovery(
    path: Path,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    message: &[u8],
) -> Vec<u8> {
    let mut packet = vec![0; IPV6_HEADER_LEN + message.len()];
    let ip = Ipv6Repr {
        src_addr: source,
        dst_addr: destination,
        next_header: IpProtocol::Icmpv6,
        payload_len: message.len(),
        hop_limit: 255,
    };
    ip.emit(&mut Ipv6Packet::new_unchecked(&mut packet[..]));
    packet[IPV6_HEADER_LEN..].copy_from_slice(message);
    Icmpv6Packet::new_unchecked(&mut packet[IPV6_HEADER_LEN..])
        .fill_checksum(&source, &destination);
    ethernet(path, EthernetProtocol::Ipv6, &packet)
}
