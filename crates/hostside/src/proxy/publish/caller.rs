//! Who calls a published port: what one caller holds is counted, so that it keeps no other out.

use std::net::{IpAddr, SocketAddr};

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

/// The caller at a TCP port, as its connections are counted.
pub(super) fn at_address(peer: Option<SocketAddr>) -> String {
    peer.map(|peer| network_of(peer).to_string())
        .unwrap_or_default()
}

/// The caller at a UNIX socket, as its connections are counted.
pub(super) fn of_user(user: Option<u32>) -> String {
    user.map(|user| format!("user {user}")).unwrap_or_default()
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
}
