//! Headers of layer 4, as far as filters and offloads need them.

/// Numbers of protocols and of IPv6 extension headers (IANA: protocol numbers).
pub mod protocol {
    /// IPv6 hop-by-hop options.
    pub const HOP_BY_HOP: u8 = 0;
    /// Internet Group Management Protocol.
    pub const IGMP: u8 = 2;
    /// Transmission Control Protocol.
    pub const TCP: u8 = 6;
    /// User Datagram Protocol.
    pub const UDP: u8 = 17;
    /// IPv6 routing header.
    pub const ROUTING: u8 = 43;
    /// IPv6 fragment header.
    pub const FRAGMENT: u8 = 44;
    /// Authentication header.
    pub const AUTHENTICATION: u8 = 51;
    /// Internet Control Message Protocol for IPv6.
    pub const ICMPV6: u8 = 58;
    /// IPv6 destination options.
    pub const DESTINATION_OPTIONS: u8 = 60;
    /// Mobility header.
    pub const MOBILITY: u8 = 135;
    /// Host Identity Protocol.
    pub const HOST_IDENTITY: u8 = 139;
    /// Shim6.
    pub const SHIM6: u8 = 140;
}

/// What the header behind IP says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp {
        /// The sender's port.
        source_port: u16,
        /// The receiver's port.
        destination_port: u16,
        /// Length of the header with its options, in bytes.
        header_len: usize,
    },
    /// UDP.
    Udp {
        /// The sender's port.
        source_port: u16,
        /// The receiver's port.
        destination_port: u16,
    },
    /// ICMP for IPv6.
    Icmpv6 {
        /// The message's type.
        kind: u8,
        /// What it means within that type.
        code: u8,
    },
    /// A protocol that is not looked into, or a later fragment.
    None,
    /// The header is there, beyond the snapshot or behind too many extension headers.
    Hidden,
    /// The packet ends before the header that it announces.
    Cut,
}

impl Transport {
    /// The header of `protocol` at `offset` of the IP packet `bytes`, of which there are `total_len` bytes in truth.
    #[inline]
    pub(super) fn parse(protocol: u8, bytes: &[u8], offset: usize, total_len: usize) -> Transport {
        let len = match protocol {
            protocol::TCP => 20,
            protocol::UDP => 8,
            protocol::ICMPV6 => 4,
            _ => return Transport::None,
        };
        if total_len < offset + len {
            return Transport::Cut;
        }
        // Of a TCP header that reaches beyond the snapshot, the part that is needed may still be inside.
        let header = bytes.get(offset..).unwrap_or_default();
        match (protocol, header) {
            (protocol::TCP, [s0, s1, d0, d1, _, _, _, _, _, _, _, _, o, ..]) => {
                let header_len = usize::from(o >> 4) * 4;
                if header_len < len || offset + header_len > total_len {
                    return Transport::Cut;
                }
                Transport::Tcp {
                    source_port: u16::from_be_bytes([*s0, *s1]),
                    destination_port: u16::from_be_bytes([*d0, *d1]),
                    header_len,
                }
            }
            (protocol::UDP, [s0, s1, d0, d1, ..]) => Transport::Udp {
                source_port: u16::from_be_bytes([*s0, *s1]),
                destination_port: u16::from_be_bytes([*d0, *d1]),
            },
            (protocol::ICMPV6, [kind, code, ..]) => Transport::Icmpv6 {
                kind: *kind,
                code: *code,
            },
            _ => Transport::Hidden,
        }
    }
}
