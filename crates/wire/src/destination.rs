//! Where a client of a proxy wants to go: a host, by name or by address, and a port.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The longest DNS name in text, in bytes, without a dot at the end (RFC 1035, section 2.3.4).
pub const MAX_NAME_LEN: usize = 253;

/// The longest label of a DNS name, in bytes (RFC 1035, section 2.3.4).
const MAX_LABEL_LEN: usize = 63;

/// A host, by name or by address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// A DNS name: lower case, no dot at the end, and nothing that could be read as an address.
    Name(String),
    /// An address. IPv4 addresses that were written as IPv6 ones (RFC 4291, section 2.5.5.2) are IPv4 addresses.
    Address(IpAddr),
}

/// A host and a TCP port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The host.
    pub host: Host,
    /// The port, never 0.
    pub port: u16,
}

/// What is wrong with a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DestinationError {
    /// Neither a name nor an address.
    #[error(
        "the host is neither a DNS name (letters, digits, '-' and '_', at most 253 bytes) nor an address"
    )]
    Host,
    /// No port, or 0.
    #[error("the port is not a number from 1 to 65535")]
    Port,
}

impl Host {
    /// Reads a name or an address, as people write it. An IPv6 address may have brackets.
    ///
    /// Names whose last label is a number are refused: resolvers read `127.1` and `0x7f000001` as addresses, and then a rule
    /// about names would decide about an address.
    pub fn parse(text: &str) -> Result<Host, DestinationError> {
        let bracketed = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        if let Some(inside) = bracketed {
            let address: Ipv6Addr = inside.parse().map_err(|_| DestinationError::Host)?;
            return Ok(Host::from(IpAddr::V6(address)));
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Host::from(address));
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        match is_name(name) {
            true => Ok(Host::Name(name.to_ascii_lowercase())),
            false => Err(DestinationError::Host),
        }
    }
}

impl From<IpAddr> for Host {
    fn from(address: IpAddr) -> Host {
        Host::Address(address.to_canonical())
    }
}

impl Destination {
    /// A destination of a host and a port that is not 0.
    pub fn new(host: Host, port: u16) -> Result<Destination, DestinationError> {
        match port {
            0 => Err(DestinationError::Port),
            port => Ok(Destination { host, port }),
        }
    }

    /// Reads `host:port`. An IPv6 address must have brackets.
    pub fn parse(text: &str) -> Result<Destination, DestinationError> {
        let (host, port) = text.rsplit_once(':').ok_or(DestinationError::Port)?;
        if host.contains(':') && !host.starts_with('[') {
            return Err(DestinationError::Host);
        }
        if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(DestinationError::Port);
        }
        let port = port.parse().map_err(|_| DestinationError::Port)?;
        Destination::new(Host::parse(host)?, port)
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => write!(formatter, "{name}:{}", self.port),
            Host::Address(IpAddr::V4(address)) => write!(formatter, "{address}:{}", self.port),
            Host::Address(IpAddr::V6(address)) => write!(formatter, "[{address}]:{}", self.port),
        }
    }
}

fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=MAX_LABEL_LEN).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    name.len() <= MAX_NAME_LEN
        && name.split('.').all(is_label)
        && !name.rsplit('.').next().is_some_and(is_number)
}

/// Whether a resolver could take this last label for the end of an IPv4 address (the URL standard's "ends in a number").
fn is_number(label: &str) -> bool {
    let hexadecimal = label
        .strip_prefix("0x")
        .or_else(|| label.strip_prefix("0X"));
    label.bytes().all(|byte| byte.is_ascii_digit())
        || hexadecimal.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The IPv4 address of four bytes in network order.
pub(crate) fn ipv4(bytes: [u8; 4]) -> Host {
    Host::from(IpAddr::V4(Ipv4Addr::from(bytes)))
}

/// The IPv6 address of sixteen bytes in network order.
pub(crate) fn ipv6(bytes: [u8; 16]) -> Host {
    Host::from(IpAddr::V6(Ipv6Addr::from(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Host {
        Host::Name(text.to_owned())
    }

    #[test]
    fn names_are_compared_in_one_form() {
        for text in ["deb.debian.org", "DEB.Debian.ORG", "deb.debian.org."] {
            assert_eq!(Host::parse(text), Ok(name("deb.debian.org")));
        }
        assert_eq!(Host::parse("_x-1.y"), Ok(name("_x-1.y")));
        assert_eq!(
            Host::parse("1.2.3.4.in-addr.arpa"),
            Ok(name("1.2.3.4.in-addr.arpa"))
        );
    }

    #[test]
    fn what_a_resolver_would_read_as_an_address_is_no_name() {
        for text in [
            "127.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "a.0x",
            "a.1",
            "1.2.3.4.5",
            "0177.0.0.1",
        ] {
            assert_eq!(Host::parse(text), Err(DestinationError::Host), "{text}");
        }
    }

    #[test]
    fn addresses_in_disguise_are_shown_as_what_they_are() {
        let loopback = Host::Address(IpAddr::from([127, 0, 0, 1]));
        for text in ["127.0.0.1", "::ffff:127.0.0.1", "[::ffff:7f00:1]"] {
            assert_eq!(Host::parse(text).as_ref(), Ok(&loopback), "{text}");
        }
    }

    #[test]
    fn hosts_that_are_neither_are_refused() {
        let label = "a".repeat(MAX_LABEL_LEN + 1);
        for text in [
            "",
            ".",
            "..",
            "a..b",
            ".a",
            "a b",
            "a\n",
            "a/b",
            "a:b",
            "é.de",
            "[127.0.0.1]",
            "[a]",
            "[::1",
            &label,
        ] {
            assert_eq!(Host::parse(text), Err(DestinationError::Host), "{text:?}");
        }
    }

    #[test]
    fn the_longest_name_is_as_long_as_stated() {
        let label = "a".repeat(MAX_LABEL_LEN);
        let longest = format!("{label}.{label}.{label}.{}", "a".repeat(61));
        assert_eq!(longest.len(), MAX_NAME_LEN);
        assert_eq!(Host::parse(&longest), Ok(name(&longest)));
        assert_eq!(Host::parse(&format!("{longest}.")), Ok(name(&longest)));
        assert_eq!(
            Host::parse(&format!("{longest}a")),
            Err(DestinationError::Host)
        );
    }

    #[test]
    fn destinations_are_read_and_written() {
        for text in ["example.org:443", "10.0.0.1:1", "[2001:db8::1]:65535"] {
            assert_eq!(
                Destination::parse(text).map(|it| it.to_string()).as_deref(),
                Ok(text)
            );
        }
        for text in [
            "example.org",
            "example.org:",
            "example.org:0",
            "example.org:65536",
            "example.org:+1",
        ] {
            assert_eq!(
                Destination::parse(text),
                Err(DestinationError::Port),
                "{text}"
            );
        }
        for text in ["2001:db8::1:80", ":80", "[]:80", "::1:80"] {
            assert_eq!(
                Destination::parse(text),
                Err(DestinationError::Host),
                "{text}"
            );
        }
    }
}
