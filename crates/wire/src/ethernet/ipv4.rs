//! The IPv4 header (RFC 791).

use std::net::Ipv4Addr;

use super::Transport;

/// Which part of a packet this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fragment {
    /// All of it.
    Whole,
    /// Its beginning, with the header of what it carries.
    First,
    /// A later part: there is no further header to see.
    Later,
}

/// What an IPv4 header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv4 {
    /// The claimed sender.
    pub source: Ipv4Addr,
    /// Its receiver.
    pub destination: Ipv4Addr,
    /// What it carries, by its number.
    pub protocol: u8,
    /// Length of the header with its options, in bytes.
    pub header_len: usize,
    /// Length of header and payload, in bytes; the frame may go on with padding.
    pub total_len: usize,
    /// Which part of a packet it is.
    pub fragment: Fragment,
    /// The header of what it carries.
    pub transport: Transport,
}

impl Ipv4 {
    /// The fixed part of the header, in bytes.
    pub const HEADER_LEN: usize = 20;

    /// `len` is how long the packet and what pads it is in truth.
    #[inline]
    pub(super) fn parse(bytes: &[u8], len: usize) -> Option<Ipv4> {
        let fixed = bytes.first_chunk::<{ Ipv4::HEADER_LEN }>()?;
        let header_len = usize::from(fixed[0] & 0x0f) * 4;
        let total_len = usize::from(u16::from_be_bytes([fixed[2], fixed[3]]));
        let valid = fixed[0] >> 4 == 4 && header_len >= Ipv4::HEADER_LEN;
        if !valid || total_len < header_len || total_len > len {
            return None;
        }
        let place = u16::from_be_bytes([fixed[6], fixed[7]]);
        let (more, offset) = (place & 0x2000 != 0, place & 0x1fff);
        let fragment = match (more, offset) {
            (false, 0) => Fragment::Whole,
            (true, 0) => Fragment::First,
            _ => Fragment::Later,
        };
        let protocol = fixed[9];
        let transport = match fragment {
            Fragment::Later => Transport::None,
            _ => Transport::parse(protocol, bytes, header_len, total_len),
        };
        Some(Ipv4 {
            source: Ipv4Addr::new(fixed[12], fixed[13], fixed[14], fixed[15]),
            destination: Ipv4Addr::new(fixed[16], fixed[17], fixed[18], fixed[19]),
            protocol,
            header_len,
            total_len,
            fragment,
            transport,
        })
    }
}
