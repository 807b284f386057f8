//! The IPv6 header and its extensions (RFC 8200).

use std::net::Ipv6Addr;

use super::{Fragment, Transport, be16, protocol};

/// How many extension headers are read; with more of them, what follows is [hidden](Transport::Hidden).
pub const MAX_EXTENSION_HEADERS: usize = 8;

/// What an IPv6 header and its extensions say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6 {
    /// The claimed sender.
    pub source: Ipv6Addr,
    /// Its receiver.
    pub destination: Ipv6Addr,
    /// How many routers it may still pass.
    pub hop_limit: u8,
    /// What it carries behind the extensions that could be read, by its number.
    pub next_header: u8,
    /// Length of the header with these extensions, in bytes.
    pub header_len: usize,
    /// Length of header and payload, in bytes; the frame may go on with padding.
    pub total_len: usize,
    /// Which part of a packet it is.
    pub fragment: Fragment,
    /// The header of what it carries.
    pub transport: Transport,
}

impl Ipv6 {
    /// The fixed part of the header, in bytes.
    pub const HEADER_LEN: usize = 40;

    /// `len` is how long the packet and what pads it is in truth.
    #[inline]
    pub(super) fn parse(bytes: &[u8], len: usize) -> Option<Ipv6> {
        let fixed = bytes.first_chunk::<{ Ipv6::HEADER_LEN }>()?;
        let payload_len = usize::from(u16::from_be_bytes([fixed[4], fixed[5]]));
        let total_len = Ipv6::HEADER_LEN + payload_len;
        if fixed[0] >> 4 != 6 || total_len > len {
            return None;
        }
        let mut ip = Ipv6 {
            source: address(fixed, 8),
            destination: address(fixed, 24),
            hop_limit: fixed[7],
            next_header: fixed[6],
            header_len: Ipv6::HEADER_LEN,
            total_len,
            fragment: Fragment::Whole,
            transport: Transport::None,
        };
        ip.transport = match ip.next_header {
            protocol::TCP | protocol::UDP | protocol::ICMPV6 => {
                Transport::parse(ip.next_header, bytes, ip.header_len, total_len)
            }
            _ => ip.walk(bytes),
        };
        Some(ip)
    }

    /// Reads the extension headers, one by one, and the header behind them.
    fn walk(&mut self, bytes: &[u8]) -> Transport {
        for _ in 0..MAX_EXTENSION_HEADERS {
            let Some(step) = self.step(bytes) else {
                return match self.fragment {
                    Fragment::Later => Transport::None,
                    _ => Transport::parse(self.next_header, bytes, self.header_len, self.total_len),
                };
            };
            match step {
                Ok((next_header, len)) => {
                    self.next_header = next_header;
                    self.header_len += len;
                }
                Err(transport) => return transport,
            }
        }
        match self.fragment {
            Fragment::Later => Transport::None,
            _ if is_extension(self.next_header) => Transport::Hidden,
            _ => Transport::parse(self.next_header, bytes, self.header_len, self.total_len),
        }
    }

    /// One extension header: what follows it and its length. Nothing if there is none here.
    fn step(&mut self, bytes: &[u8]) -> Option<Result<(u8, usize), Transport>> {
        // Behind the header of a later fragment there is payload, whatever its header says.
        if self.fragment == Fragment::Later || !is_extension(self.next_header) {
            return None;
        }
        if self.header_len + 8 > self.total_len {
            return Some(Err(Transport::Cut));
        }
        let Some(extension) = bytes
            .get(self.header_len..)
            .and_then(<[u8]>::first_chunk::<8>)
        else {
            return Some(Err(Transport::Hidden));
        };
        let len = match self.next_header {
            protocol::FRAGMENT => {
                let place = be16(extension, 2).unwrap_or_default();
                // A fragment that is all of its packet is one all the same (RFC 6946): what follows is in plain sight.
                self.fragment = if place >> 3 != 0 {
                    Fragment::Later
                } else {
                    Fragment::First
                };
                8
            }
            protocol::AUTHENTICATION => (usize::from(extension[1]) + 2) * 4,
            _ => (usize::from(extension[1]) + 1) * 8,
        };
        if self.header_len + len > self.total_len {
            return Some(Err(Transport::Cut));
        }
        Some(Ok((extension[0], len)))
    }
}

fn address(header: &[u8; Ipv6::HEADER_LEN], offset: usize) -> Ipv6Addr {
    let mut octets = [0; 16];
    octets.copy_from_slice(&header[offset..offset + 16]);
    Ipv6Addr::from(octets)
}

/// Headers behind which another one follows in plain sight.
fn is_extension(next_header: u8) -> bool {
    matches!(
        next_header,
        protocol::HOP_BY_HOP
            | protocol::ROUTING
            | protocol::FRAGMENT
            | protocol::AUTHENTICATION
            | protocol::DESTINATION_OPTIONS
            | protocol::MOBILITY
            | protocol::HOST_IDENTITY
            | protocol::SHIM6
    )
}
