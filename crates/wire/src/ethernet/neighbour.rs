//! Neighbour discovery for IPv6, as far as a guard needs it (RFC 4861).

use std::net::Ipv6Addr;

use super::protocol;
use super::{Fragment, Head, Ipv6, MacAddress, Transport, be16};
use crate::checksum::{fold, length_sum, sum_of};

/// Which message it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeighbourMessage {
    /// A host asks for routers.
    RouterSolicitation,
    /// A router says that it is one.
    RouterAdvertisement {
        /// For how long, in seconds; 0 if it no longer is.
        lifetime: u16,
    },
    /// A request for the owner of the target, or a probe whether it has one.
    Solicitation,
    /// The sender says that it has the target.
    Advertisement,
    /// A router names a better one.
    Redirect,
}

/// A message of neighbour discovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// Which one.
    pub message: NeighbourMessage,
    /// What it is about, in solicitations, advertisements and redirects.
    pub target: Option<Ipv6Addr>,
    /// The link-layer address that its options name: of the source, or of the target in an advertisement.
    pub link_layer: Option<MacAddress>,
    /// Whether all of its options could be read. If not, `link_layer` may be missing or contradicted.
    pub complete: bool,
}

impl Neighbour {
    /// Options in one message that are read.
    pub const MAX_OPTIONS: usize = 8;

    /// Whether the type of an ICMPv6 message is one of these.
    pub fn has_type(kind: u8) -> bool {
        (133..=137).contains(&kind)
    }

    /// Reads the message in a frame, if it is one of these; nothing also for one whose fixed part is not in the snapshot.
    pub fn parse(head: &Head, ip: &Ipv6, snapshot: &[u8]) -> Option<Neighbour> {
        let Transport::Icmpv6 { kind, .. } = ip.transport else {
            return None;
        };
        let start = head.layer3 + ip.header_len;
        let end = head.layer3 + ip.total_len;
        let (message, options) = match kind {
            133 => (NeighbourMessage::RouterSolicitation, 8),
            134 => (
                NeighbourMessage::RouterAdvertisement {
                    lifetime: be16(snapshot, start + 6)?,
                },
                16,
            ),
            135 => (NeighbourMessage::Solicitation, 24),
            136 => (NeighbourMessage::Advertisement, 24),
            137 => (NeighbourMessage::Redirect, 40),
            _ => return None,
        };
        let visible = &snapshot[..end.min(snapshot.len())];
        let target = match options {
            24 | 40 => {
                let octets = visible.get(start + 8..)?.first_chunk::<16>()?;
                Some(Ipv6Addr::from(*octets))
            }
            _ => None,
        };
        let mut neighbour = Neighbour {
            message,
            target,
            link_layer: None,
            complete: false,
        };
        neighbour.read_options(visible, start + options, end);
        Some(neighbour)
    }

    /// The address in question, if this is duplicate address detection that each host with that address receives and answers
    /// (RFC 4861, section 7.1.1; RFC 4862, section 5.4.3): sent to its group, with nothing that would have it thrown away.
    pub fn question(head: &Head, ip: &Ipv6, snapshot: &[u8]) -> Option<Ipv6Addr> {
        let neighbour = Neighbour::parse(head, ip, snapshot)?;
        let target = neighbour.target?;
        let [.., a, b, c] = target.octets();
        let group = Ipv6Addr::from_bits(
            0xff02 << 112 | 0x01_ff00_0000 | u128::from(u32::from_be_bytes([0, a, b, c])),
        );
        let is_asked = neighbour.message == NeighbourMessage::Solicitation
            && neighbour.complete
            && neighbour.link_layer.is_none()
            && ip.source.is_unspecified()
            && ip.destination == group
            && head.destination == MacAddress([0x33, 0x33, 0xff, a, b, c])
            && matches!(ip.transport, Transport::Icmpv6 { code: 0, .. })
            && ip.header_len == Ipv6::HEADER_LEN
            && ip.fragment == Fragment::Whole
            && ip.hop_limit == 255;
        let message = snapshot.get(head.layer3 + ip.header_len..head.layer3 + ip.total_len)?;
        let addresses = snapshot.get(head.layer3 + 8..head.layer3 + Ipv6::HEADER_LEN)?;
        let pseudo_header =
            sum_of(addresses) + length_sum(message.len()) + length_sum(protocol::ICMPV6.into());
        let is_intact = fold(sum_of(message) + pseudo_header) == u16::MAX;
        (is_asked && is_intact).then_some(target)
    }

    fn read_options(&mut self, visible: &[u8], mut at: usize, end: usize) {
        for _ in 0..Neighbour::MAX_OPTIONS {
            if at == end {
                self.complete = true;
                return;
            }
            let Some([kind, units, ..]) = visible.get(at..) else {
                return;
            };
            let len = usize::from(*units) * 8;
            if len == 0 || at + len > end {
                return;
            }
            // 1 is the source's address, 2 the target's.
            if matches!(kind, 1 | 2) {
                let address = visible.get(at + 2..).and_then(<[u8]>::first_chunk);
                let Some(address) = address.copied().map(MacAddress) else {
                    return;
                };
                // Two that differ are a contradiction, which no honest message has.
                if self.link_layer.is_some_and(|other| other != address) {
                    return;
                }
                self.link_layer = Some(address);
            }
            at += len;
        }
        self.complete = at == end;
    }
}
