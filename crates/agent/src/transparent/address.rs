//! IPv4 and IPv6 socket addresses as programs have them in their memory.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;

const AF_UNSPEC: u16 = 0;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// The lengths of `sockaddr_in`, of the oldest and the present form of `sockaddr_in6`, in bytes.
const IPV4_LEN: usize = 16;
const IPV6_MIN_LEN: usize = 24;
const IPV6_LEN: usize = 28;

/// The longest address that is read, in bytes: what the kernel takes at most (`sockaddr_storage`).
pub(crate) const MAX_ADDRESS_LEN: usize = 128;

/// The family of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// `AF_INET`.
    V4,
    /// `AF_INET6`.
    V6,
}

impl Family {
    /// By its number.
    pub(crate) fn of(number: u64) -> Option<Family> {
        // The kernel reads an int.
        match number as u32 {
            number if number == u32::from(AF_INET) => Some(Family::V4),
            number if number == u32::from(AF_INET6) => Some(Family::V6),
            _ => None,
        }
    }

    /// Its number.
    pub(crate) fn number(self) -> u16 {
        match self {
            Family::V4 => AF_INET,
            Family::V6 => AF_INET6,
        }
    }

    /// No address of this family.
    pub(crate) fn unspecified(self) -> SocketAddr {
        match self {
            Family::V4 => (Ipv4Addr::UNSPECIFIED, 0).into(),
            Family::V6 => (Ipv6Addr::UNSPECIFIED, 0).into(),
        }
    }

    /// The form of an address that a socket of this family shows.
    pub(crate) fn shown(self, address: SocketAddr) -> SocketAddr {
        match (self, address.ip()) {
            (Family::V6, IpAddr::V4(ip)) => (ip.to_ipv6_mapped(), address.port()).into(),
            _ => address,
        }
    }
}

/// What a program has given as an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    /// An address.
    Address(SocketAddr),
    /// `AF_UNSPEC`: none any more.
    Unspecified,
    /// An address of another family.
    Foreign,
}

/// Reads an address for a socket of this family.
///
/// # Errors
/// What the kernel says of such an address.
pub(crate) fn parse(bytes: &[u8], family: Family) -> Result<Given, Errno> {
    let Some((number, rest)) = bytes.split_first_chunk() else {
        return Err(Errno::INVAL);
    };
    let port = |rest: &[u8]| rest.first_chunk().map(|port| u16::from_be_bytes(*port));
    match (u16::from_ne_bytes(*number), family) {
        (AF_UNSPEC, _) => Ok(Given::Unspecified),
        (AF_INET, Family::V4) if bytes.len() < IPV4_LEN => Err(Errno::INVAL),
        (AF_INET6, Family::V6) if bytes.len() < IPV6_MIN_LEN => Err(Errno::INVAL),
        (AF_INET, Family::V4) => {
            let ip: Option<&[u8; 4]> = rest[2..].first_chunk();
            let both = ip.zip(port(rest)).ok_or(Errno::INVAL)?;
            Ok(Given::Address((Ipv4Addr::from(*both.0), both.1).into()))
        }
        (AF_INET6, Family::V6) => {
            let ip: Option<&[u8; 16]> = rest[6..].first_chunk();
            let both = ip.zip(port(rest)).ok_or(Errno::INVAL)?;
            Ok(Given::Address((Ipv6Addr::from(*both.0), both.1).into()))
        }
        (AF_INET | AF_INET6, _) => Err(Errno::AFNOSUPPORT),
        _ => Ok(Given::Foreign),
    }
}

/// As `sockaddr_in` or `sockaddr_in6`.
pub(crate) fn to_bytes(address: SocketAddr) -> Vec<u8> {
    let port = address.port().to_be_bytes();
    match address.ip() {
        IpAddr::V4(ip) => {
            let mut bytes = [&AF_INET.to_ne_bytes()[..], &port, &ip.octets()].concat();
            bytes.resize(IPV4_LEN, 0);
            bytes
        }
        IpAddr::V6(ip) => {
            let (flow, octets) = ([0; 4], ip.octets());
            let mut bytes = [&AF_INET6.to_ne_bytes()[..], &port, &flow, &octets].concat();
            bytes.resize(IPV6_LEN, 0);
            bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_was_written() {
        for (text, family) in [
            ("192.0.2.7:443", Family::V4),
            ("[2001:db8::7]:65535", Family::V6),
        ] {
            let address: SocketAddr = text.parse().unwrap();
            let bytes = to_bytes(address);
            assert_eq!(parse(&bytes, family), Ok(Given::Address(address)));
            let mut longer = bytes.clone();
            longer.resize(MAX_ADDRESS_LEN, 0xff);
            assert_eq!(parse(&longer, family), Ok(Given::Address(address)));
        }
    }

    #[test]
    fn every_beginning_of_an_address_has_an_answer() {
        for text in ["192.0.2.7:443", "[2001:db8::7]:443"] {
            let bytes = to_bytes(text.parse().unwrap());
            for family in [Family::V4, Family::V6] {
                for len in 0..bytes.len() {
                    let _ = parse(&bytes[..len], family);
                }
                assert_eq!(parse(&bytes[..1], family), Err(Errno::INVAL));
            }
        }
        let short = to_bytes("192.0.2.7:443".parse().unwrap());
        assert_eq!(parse(&short[..15], Family::V4), Err(Errno::INVAL));
        assert_eq!(parse(&short, Family::V6), Err(Errno::AFNOSUPPORT));
        assert_eq!(parse(&[0, 0], Family::V4), Ok(Given::Unspecified));
        assert_eq!(parse(&[1, 0, b'/'], Family::V4), Ok(Given::Foreign));
    }
}
