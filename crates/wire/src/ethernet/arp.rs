//! ARP for IPv4 over Ethernet (RFC 826).

use std::net::Ipv4Addr;

use super::{EtherType, MacAddress, be16};

/// What an ARP packet says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arp {
    /// 1 asks, 2 answers.
    pub operation: u16,
    /// The sender's address, once more.
    pub sender_mac: MacAddress,
    /// The address that the sender says it has, 0.0.0.0 in a probe (RFC 5227).
    pub sender: Ipv4Addr,
    /// The address that is asked for, or the asker's.
    pub target: Ipv4Addr,
}

impl Arp {
    /// Nothing for packets about other kinds of addresses.
    pub(super) fn parse(bytes: &[u8]) -> Option<Arp> {
        const ETHERNET: u16 = 1;
        let packet = bytes.first_chunk::<28>()?;
        let kinds = be16(packet, 0)? == ETHERNET && be16(packet, 2)? == EtherType::IPV4.0;
        if !kinds || packet[4..6] != [6, 4] {
            return None;
        }
        Some(Arp {
            operation: be16(packet, 6)?,
            sender_mac: MacAddress(*packet[8..].first_chunk()?),
            sender: Ipv4Addr::from(*packet[14..].first_chunk::<4>()?),
            target: Ipv4Addr::from(*packet[24..].first_chunk::<4>()?),
        })
    }
}
