//! Internet addresses at which published ports listen, and what leads there.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::PublishListen;

/// What is spoken at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spoken {
    /// Connections.
    Tcp,
    /// Datagrams.
    Udp,
}

/// The internet address of a published port, if it has one.
pub fn listener(listen: &PublishListen) -> Option<(Spoken, SocketAddr)> {
    let (spoken, address) = match listen {
        PublishListen::Tcp(address) => (Spoken::Tcp, address),
        PublishListen::Udp(address) => (Spoken::Udp, address),
        PublishListen::Unix { .. } => return None,
    };
    Some((spoken, address.parse().ok()?))
}

/// Whether a server that is written down like this is at a listener: by an address, since what a name means is known only when it is called.
pub fn leads_to(listener: SocketAddr, server: &str) -> bool {
    let server = server.parse().map(as_connected);
    server.is_ok_and(|server| is_at(listener, server, is_loopback(server)))
}

/// The address that is called: for that of no host the system takes the loopback address.
pub fn as_connected(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

/// Whether a listener is at this address, which is the host's own or not.
pub fn is_at(listener: SocketAddr, address: SocketAddr, is_own_host: bool) -> bool {
    let (listens, is) = (listener.ip().to_canonical(), address.ip().to_canonical());
    // A listener at all IPv6 addresses is one at all IPv4 addresses, too.
    let is_any = listens.is_unspecified() && (listens.is_ipv6() || is.is_ipv4());
    listener.port() == address.port() && (listens == is || is_any && is_own_host)
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_known_by_every_address_that_leads_there() {
        for (listener, server, leads) in [
            ("127.0.0.1:80", "127.0.0.1:80", true),
            ("127.0.0.1:80", "127.0.0.1:81", false),
            ("127.0.0.1:80", "127.0.0.2:80", false),
            ("127.0.0.1:80", "[::ffff:127.0.0.1]:80", true),
            ("127.0.0.1:80", "0.0.0.0:80", true),
            ("127.0.0.1:80", "[::1]:80", false),
            ("0.0.0.0:80", "127.7.7.7:80", true),
            ("0.0.0.0:80", "192.0.2.1:80", false),
            ("0.0.0.0:80", "[::1]:80", false),
            ("[::]:80", "127.0.0.1:80", true),
            ("[::]:80", "[::1]:80", true),
            ("[::]:80", "[::]:80", true),
            ("[::1]:80", "[::]:80", true),
            ("192.0.2.1:80", "192.0.2.1:80", true),
            ("127.0.0.1:80", "localhost:80", false),
        ] {
            let found = leads_to(listener.parse().unwrap(), server);
            assert_eq!(found, leads, "{listener} {server}");
        }
    }
}
