//! The frames that ports send each other.
//!
//! A frame is made once for each slot of a sender's ring and then only numbered anew. From its content (its sender, slot and number) the receiver
//! derives what should have come.

use std::net::Ipv4Addr;

/// Length of the header in front of a frame in a virtqueue (virtio 1.2, section 5.1.6).
pub const NET_HEADER_LEN: usize = 12;

/// Payload of a segment: what fits into 1500 bytes behind the headers.
const SEGMENT_LEN: usize = 1448;
/// Segments of a frame that is to be segmented: as many as fit into an IPv4 packet.
const SEGMENTS: usize = 45;

const ETHERNET_LEN: usize = 14;
const IPV4_LEN: usize = 20;
const UDP_LEN: usize = 8;
/// With time stamps, as Linux sends it.
const TCP_LEN: usize = 32;
/// Where TCP's checksum lies in its header.
const TCP_CHECKSUM: usize = 16;

/// Where TCP's checksum lies in a frame.
pub const TCP_CHECKSUM_PLACE: std::ops::Range<usize> =
    ETHERNET_LEN + IPV4_LEN + TCP_CHECKSUM..ETHERNET_LEN + IPV4_LEN + TCP_CHECKSUM + 2;

/// Length of a frame of 45 segments.
pub const SEGMENTED_LEN: usize = ETHERNET_LEN + IPV4_LEN + TCP_LEN + SEGMENTS * SEGMENT_LEN;

/// The most of a frame's beginning that is read in a sample: all headers and the number.
pub const HEAD_LEN: usize = 80;

/// What is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// UDP, in frames of this length.
    Plain(usize),
    /// TCP, in frames that may be cut into segments later.
    Segmented,
}

impl Kind {
    /// Length of a frame, in bytes.
    pub fn len(self) -> usize {
        match self {
            Kind::Plain(len) => len,
            Kind::Segmented => SEGMENTED_LEN,
        }
    }

    /// Never.
    pub fn is_empty(self) -> bool {
        false
    }

    /// Where what the frame says about itself begins.
    fn body(self) -> usize {
        ETHERNET_LEN
            + IPV4_LEN
            + match self {
                Kind::Plain(_) => UDP_LEN,
                Kind::Segmented => TCP_LEN,
            }
    }

    /// Where the frame's number lies: eight bytes, the least significant first.
    pub fn number_place(self) -> usize {
        (self.body() + 4).next_multiple_of(8)
    }

    /// The header in front of the frame, as a driver writes it.
    pub fn net_header(self) -> [u8; NET_HEADER_LEN] {
        let mut header = [0; NET_HEADER_LEN];
        if self == Kind::Segmented {
            // The checksum is to be completed; TCP over IPv4.
            (header[0], header[1]) = (1, 1);
            let fields = [
                self.body(),
                SEGMENT_LEN,
                ETHERNET_LEN + IPV4_LEN,
                TCP_CHECKSUM,
            ];
            for (place, field) in header[2..10].chunks_exact_mut(2).zip(fields) {
                place.copy_from_slice(&(field as u16).to_le_bytes());
            }
        }
        header
    }
}

/// A port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// Its number, from zero on.
    pub port: u8,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Its IPv4 address.
    pub ipv4: Ipv4Addr,
}

impl Address {
    /// Of the port with this number, unless it was given another.
    pub fn of(port: usize) -> Address {
        let port = port as u8;
        Address {
            port,
            mac: [0x52, 0x54, 0, 0x10, 0, port + 1],
            ipv4: Ipv4Addr::new(10, 77, 0, port + 10),
        }
    }
}

/// The frame of a slot, with the number zero, when slots take turns with so many flows.
pub fn frame(kind: Kind, from: Address, to: Address, flows: u16, slot: u16) -> Vec<u8> {
    let flow = slot % flows;
    let mut frame = Vec::with_capacity(kind.len());
    frame.extend_from_slice(&to.mac);
    frame.extend_from_slice(&from.mac);
    frame.extend_from_slice(&[0x08, 0x00]);
    let packet_len = (kind.len() - ETHERNET_LEN) as u16;
    let protocol = match kind {
        Kind::Plain(_) => 17,
        Kind::Segmented => 6,
    };
    let mut ipv4 = [0; IPV4_LEN];
    ipv4[0] = 0x45;
    ipv4[2..4].copy_from_slice(&packet_len.to_be_bytes());
    (ipv4[6], ipv4[8], ipv4[9]) = (0x40, 64, protocol);
    ipv4[12..16].copy_from_slice(&from.ipv4.octets());
    ipv4[16..20].copy_from_slice(&to.ipv4.octets());
    let checksum = !sum(&ipv4);
    ipv4[10..12].copy_from_slice(&checksum.to_be_bytes());
    frame.extend_from_slice(&ipv4);

    let payload_len = packet_len - IPV4_LEN as u16;
    let ports = [20_000 + flow, 30_000];
    frame.extend(ports.iter().flat_map(|port| port.to_be_bytes()));
    match kind {
        // A checksum of zero: there is none.
        Kind::Plain(_) => {
            frame.extend_from_slice(&payload_len.to_be_bytes());
            frame.extend_from_slice(&[0; 2]);
        }
        Kind::Segmented => {
            // A sum over the pseudo-header stands where the checksum will.
            let mut pseudo = [0; 12];
            pseudo[..8].copy_from_slice(&ipv4[12..20]);
            pseudo[9] = protocol;
            pseudo[10..12].copy_from_slice(&payload_len.to_be_bytes());
            let mut tcp = [0; TCP_LEN - 4];
            (tcp[8], tcp[9], tcp[10]) = (0x80, 0x10, 0xff);
            tcp[12..14].copy_from_slice(&sum(&pseudo).to_be_bytes());
            // Two bytes of nothing, then time stamps.
            (tcp[16], tcp[17], tcp[18], tcp[19]) = (1, 1, 8, 10);
            frame.extend_from_slice(&tcp);
        }
    }
    let [low, high] = slot.to_le_bytes();
    frame.extend_from_slice(&[from.port, flow as u8, low, high]);
    frame.resize(kind.number_place() + 8, 0);
    let mut byte = low ^ from.port;
    while frame.len() < kind.len() {
        byte = byte.wrapping_mul(5).wrapping_add(high | 1);
        frame.push(byte);
    }
    frame
}

/// The sum of 16-bit words in ones' complement (RFC 1071) of an even number of bytes.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2);
    let mut sum: u32 = words
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The slot that a frame says it is from.
pub fn slot_of(kind: Kind, head: &[u8]) -> u16 {
    let place = kind.body() + 2;
    u16::from_le_bytes([head[place], head[place + 1]])
}

/// The number that a frame has.
pub fn number_of(kind: Kind, head: &[u8]) -> u64 {
    let place = kind.number_place();
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&head[place..place + 8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_as_long_as_they_say_and_their_headers_sum_up() {
        for kind in [Kind::Plain(64), Kind::Plain(1500), Kind::Segmented] {
            let frame = frame(kind, Address::of(0), Address::of(1), 3, 259);
            assert_eq!(frame.len(), kind.len());
            assert_eq!(sum(&frame[14..34]), 0xffff);
            let len = u16::from_be_bytes([frame[16], frame[17]]);
            assert_eq!(usize::from(len) + 14, frame.len());
            assert_eq!(slot_of(kind, &frame), 259);
            assert_eq!(number_of(kind, &frame), 0);
            assert!(kind.number_place() + 8 <= HEAD_LEN.min(frame.len()));
        }
    }

    #[test]
    fn a_segmented_frame_says_how_it_is_to_be_cut() {
        let header = Kind::Segmented.net_header();
        assert_eq!(header, [1, 1, 66, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0]);
        assert_eq!(Kind::Plain(64).net_header(), [0; 12]);
    }
}
