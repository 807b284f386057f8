//! Packets of TCP and UDP, made and taken apart by an implementation that is not ours.

use std::net::Ipv6Addr;

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TcpHeader, TransportSlice};
use wire::net_header::{
    FLAG_NEEDS_CHECKSUM, GSO_ECN, GSO_NONE, GSO_TCP4, GSO_TCP6, GSO_UDP, NetHeader,
};

use super::setup::Guest;

/// The first sequence number, so near the end that it wraps in a long packet.
pub(super) const SEQUENCE: u32 = u32::MAX - 5000;

/// A packet on its way from one guest to another.
#[derive(Debug, Clone)]
pub(super) struct Packet {
    /// As its sender hands it over that leaves the checksum to others.
    pub(super) frame: Vec<u8>,
    /// With the checksum.
    pub(super) whole: Vec<u8>,
    pub(super) payload: Vec<u8>,
    gso_type: u8,
    /// Where the header behind IP begins, in bytes.
    layer4: usize,
    header_len: usize,
    checksum_offset: usize,
}

/// What a packet says that has arrived with all its checksums right.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Arrived {
    pub(super) sequence: u32,
    pub(super) fin: bool,
    pub(super) psh: bool,
    pub(super) cwr: bool,
    pub(super) vlan: Option<u16>,
    pub(super) payload: Vec<u8>,
}

fn last(guest: &Guest) -> u8 {
    guest.mac.0[5]
}

fn ipv6(guest: &Guest) -> [u8; 16] {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last(guest))).octets()
}

fn payload(len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| ((index * 31) ^ (index >> 8)) as u8)
        .collect()
}

impl Packet {
    pub(super) fn tcp4(from: &Guest, to: &Guest, len: usize) -> Packet {
        Packet::new(from, to, len, GSO_TCP4)
    }

    pub(super) fn udp4(from: &Guest, to: &Guest, len: usize) -> Packet {
        Packet::new(from, to, len, GSO_NONE)
    }

    /// One of each kind that can be cut, each with so much payload.
    pub(super) fn of_each_kind(from: &Guest, to: &Guest, len: usize) -> Vec<Packet> {
        let kind = |kind| Packet::new(from, to, len, kind);
        // The last is UDP over IPv6, which has the same number as UDP over IPv4.
        let mut packets: Vec<_> = [GSO_TCP4, GSO_TCP6, GSO_TCP4 | GSO_ECN, GSO_UDP]
            .map(kind)
            .into();
        packets.push(Packet::make(from, to, payload(len), GSO_UDP, true));
        packets
    }

    fn new(from: &Guest, to: &Guest, len: usize, gso_type: u8) -> Packet {
        let is_ipv6 = gso_type & !GSO_ECN == GSO_TCP6;
        Packet::make(from, to, payload(len), gso_type, is_ipv6)
    }

    fn make(from: &Guest, to: &Guest, payload: Vec<u8>, gso_type: u8, is_ipv6: bool) -> Packet {
        let builder = PacketBuilder::ethernet2(from.mac.0, to.mac.0);
        let builder = match is_ipv6 {
            true => builder.ipv6(ipv6(from), ipv6(to), 64),
            false => builder.ipv4([10, 0, 0, last(from)], [10, 0, 0, last(to)], 64),
        };
        let is_tcp = matches!(gso_type & !GSO_ECN, GSO_TCP4 | GSO_TCP6);
        let mut whole = Vec::new();
        match is_tcp {
            true => {
                let mut header = TcpHeader::new(1000, 2000, SEQUENCE, 512);
                (header.ack, header.psh, header.fin) = (true, true, true);
                header.cwr = gso_type & GSO_ECN != 0;
                let builder = builder.tcp_header(header);
                builder.write(&mut whole, &payload).unwrap();
            }
            false => builder.udp(1000, 2000).write(&mut whole, &payload).unwrap(),
        }
        let layer4 = 14 + if is_ipv6 { 40 } else { 20 };
        let (layer4_len, checksum_offset) = if is_tcp { (20, 16) } else { (8, 6) };
        let mut packet = Packet {
            frame: whole.clone(),
            whole,
            payload,
            gso_type,
            layer4,
            header_len: layer4 + layer4_len,
            checksum_offset,
        };
        let sum = pseudo_sum(&packet.whole, layer4);
        let place = layer4 + checksum_offset;
        packet.frame[place..place + 2].copy_from_slice(&sum.to_be_bytes());
        packet
    }

    /// The header of a packet that leaves its checksum to others.
    pub(super) fn to_be_summed(&self) -> NetHeader {
        NetHeader {
            flags: FLAG_NEEDS_CHECKSUM,
            checksum_start: self.layer4 as u16,
            checksum_offset: self.checksum_offset as u16,
            ..NetHeader::default()
        }
    }

    /// The header of one that is to be cut into segments of this payload.
    pub(super) fn to_be_cut(&self, size: u16) -> NetHeader {
        NetHeader {
            gso_type: self.gso_type,
            gso_size: size,
            header_len: self.header_len as u16,
            ..self.to_be_summed()
        }
    }

    /// What of it has to arrive when it is cut.
    pub(super) fn cut(&self, size: usize) -> Vec<Arrived> {
        let is_tcp = self.checksum_offset == 16;
        let pieces: Vec<_> = self.payload.chunks(size).collect();
        let arrived = |(index, piece): (usize, &&[u8])| Arrived {
            sequence: match is_tcp {
                true => SEQUENCE.wrapping_add((index * size) as u32),
                false => 0,
            },
            fin: is_tcp && index + 1 == pieces.len(),
            psh: is_tcp && index + 1 == pieces.len(),
            cwr: self.gso_type & GSO_ECN != 0 && index == 0,
            vlan: None,
            payload: piece.to_vec(),
        };
        pieces.iter().enumerate().map(arrived).collect()
    }
}

/// The same frame with a tag.
pub(super) fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    let tag = [&[0x81, 0x00][..], &vlan.to_be_bytes()].concat();
    [&frame[..12], &tag, &frame[12..]].concat()
}

/// The same header for a frame with a tag.
pub(super) fn behind_tag(mut header: NetHeader) -> NetHeader {
    if header.flags & FLAG_NEEDS_CHECKSUM != 0 {
        header.checksum_start += 4;
    }
    if header.gso_type != GSO_NONE {
        header.header_len += 4;
    }
    header
}

/// The sum of RFC 1071, by the book.
fn sum(bytes: &[u8]) -> u32 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    bytes.chunks(2).map(word).sum()
}

fn folded(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The sum of the pseudo-header of what begins there.
fn pseudo_sum(frame: &[u8], layer4: usize) -> u16 {
    let (addresses, protocol) = match frame[12..14] == [0x08, 0x00] {
        true => (&frame[layer4 - 8..layer4], frame[layer4 - 11]),
        false => (&frame[layer4 - 32..layer4], frame[layer4 - 34]),
    };
    let len = (frame.len() - layer4) as u32;
    folded(sum(addresses) + u32::from(protocol) + (len & 0xffff) + (len >> 16))
}

/// Takes apart a packet that has arrived, and looks whether every sum and length in it is right.
pub(super) fn arrived(frame: &[u8]) -> Arrived {
    let sliced = SlicedPacket::from_ethernet(frame).unwrap();
    let vlan = sliced.vlan().map(|vlan| match vlan {
        etherparse::VlanSlice::SingleVlan(tag) => tag.vlan_identifier().value(),
        etherparse::VlanSlice::DoubleVlan(_) => panic!("there is one tag"),
    });
    let layer3 = if vlan.is_some() { 18 } else { 14 };
    let (addresses, protocol, layer4) = match sliced.net.as_ref().unwrap() {
        NetSlice::Ipv4(ip) => {
            let header = ip.header();
            assert_eq!(usize::from(header.total_len()), frame.len() - layer3);
            assert_eq!(
                folded(sum(header.slice())),
                0xffff,
                "the sum of IPv4's header"
            );
            (
                &frame[layer3 + 12..layer3 + 20],
                header.protocol().0,
                layer3 + 20,
            )
        }
        NetSlice::Ipv6(ip) => {
            let header = ip.header();
            assert_eq!(
                usize::from(header.payload_length()),
                frame.len() - layer3 - 40
            );
            (
                &frame[layer3 + 8..layer3 + 40],
                header.next_header().0,
                layer3 + 40,
            )
        }
        _ => panic!("IP in, IP out"),
    };
    let len = (frame.len() - layer4) as u32;
    let pseudo = sum(addresses) + u32::from(protocol) + len;
    assert_eq!(
        folded(sum(&frame[layer4..]) + pseudo),
        0xffff,
        "the sum of what IP carries"
    );
    match sliced.transport.as_ref().unwrap() {
        TransportSlice::Tcp(tcp) => Arrived {
            sequence: tcp.sequence_number(),
            fin: tcp.fin(),
            psh: tcp.psh(),
            cwr: tcp.cwr(),
            vlan,
            payload: tcp.payload().to_vec(),
        },
        TransportSlice::Udp(udp) => {
            assert_eq!(usize::from(udp.length()), frame.len() - layer4);
            Arrived {
                vlan,
                payload: udp.payload().to_vec(),
                ..Arrived::default()
            }
        }
        _ => panic!("TCP or UDP in, the same out"),
    }
}
