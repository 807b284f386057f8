//! Callers of published ports: what one holds is counted, so that it keeps no other out.

use std::net::{IpAddr, SocketAddr};

use vsock::Outsider;

/// A caller, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caller {
    /// At a TCP or UDP port.
    Address(SocketAddr),
    /// At a UNIX socket.
    User(u32),
    Unknown,
}

/// Users are counted as addresses that no caller has: of the prefix for what is to be discarded (RFC 6666).
const OF_USERS: u128 = 0x100 << 112;

impl Caller {
    /// At an address, if it is known.
    pub(super) fn at(peer: Option<SocketAddr>) -> Caller {
        peer.map_or(Caller::Unknown, Caller::Address)
    }

    /// A user, if it is known.
    pub(super) fn of_user(user: Option<u32>) -> Caller {
        user.map_or(Caller::Unknown, Caller::User)
    }

    /// The address that it came from.
    pub(super) fn peer(self) -> Option<String> {
        match self {
            Caller::Address(peer) => Some(peer.to_string()),
            Caller::User(_) | Caller::Unknown => None,
        }
    }

    /// The owner of its circuits.
    pub(super) fn outsider(self) -> Outsider {
        Outsider(match self {
            Caller::Address(peer) => match network_of(peer) {
                IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
                IpAddr::V6(network) => network.to_bits(),
            },
            Caller::User(user) => OF_USERS | u128::from(user),
            Caller::Unknown => 0,
        })
    }

    /// Whose its connections are that are carried here.
    pub(super) fn holder(self) -> String {
        match self {
            Caller::Address(peer) => network_of(peer).to_string(),
            Caller::User(user) => format!("user {user}"),
            Caller::Unknown => String::new(),
        }
    }
}

/// Whose a connection or session is: all ports of an address are one caller's, and so is an IPv6 /64, of which one host may have every address.
pub(super) fn network_of(peer: SocketAddr) -> IpAddr {
    match peer.ip().to_canonical() {
        IpAddr::V6(address) => {
            let network = address.to_bits() & !u128::from(u64::MAX);
            IpAddr::V6(network.into())
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_is_an_address_or_a_network_of_ipv6() {
        let network = |peer: &str| network_of(peer.parse().unwrap()).to_string();
        assert_eq!(network("192.0.2.1:53"), "192.0.2.1");
        assert_eq!(network("[::ffff:192.0.2.1]:53"), "192.0.2.1");
        assert_eq!(network("[2001:db8:1:2:3:4:5:6]:53"), "2001:db8:1:2::");
    }

    #[test]
    fn callers_are_told_apart_as_they_are_counted() {
        let at = |peer: &str| Caller::at(peer.parse().ok()).outsider();
        assert_eq!(at("192.0.2.1:53"), at("[::ffff:192.0.2.1]:54"));
        assert_eq!(at("[2001:db8:1:2::1]:53"), at("[2001:db8:1:2::2]:53"));
        let outsiders = [
            Caller::Unknown.outsider(),
            Caller::User(0).outsider(),
            Caller::User(u32::MAX).outsider(),
            at("192.0.2.1:53"),
            at("192.0.2.2:53"),
            at("[2001:db8:1:3::1]:53"),
        ];
        let different: std::collections::HashSet<_> = outsiders.into();
        assert_eq!(different.len(), outsiders.len());
    }
}
