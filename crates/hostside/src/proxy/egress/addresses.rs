//! Addresses that are special on every host: those that are not of the public Internet. [`routes`](super::routes) knows those of this host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Ranges of IPv4 that are not the public Internet's (IANA's registry of special-purpose addresses, RFC 6890): base and prefix length.
const SPECIAL_IPV4: [(Ipv4Addr, u32); 17] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),        // this network
    (Ipv4Addr::new(10, 0, 0, 0), 8),       // private
    (Ipv4Addr::new(100, 64, 0, 0), 10),    // carrier-grade NAT
    (Ipv4Addr::new(127, 0, 0, 0), 8),      // loopback
    (Ipv4Addr::new(169, 254, 0, 0), 16),   // link-local, and the metadata services of clouds
    (Ipv4Addr::new(168, 63, 129, 16), 32), // Azure's services for its machines, metadata among them
    (Ipv4Addr::new(172, 16, 0, 0), 12),    // private
    (Ipv4Addr::new(192, 0, 0, 0), 24),     // protocol assignments
    (Ipv4Addr::new(192, 0, 2, 0), 24),     // documentation
    (Ipv4Addr::new(192, 31, 196, 0), 24),  // AS112
    (Ipv4Addr::new(192, 88, 99, 0), 24),   // relays of 6to4
    (Ipv4Addr::new(192, 168, 0, 0), 16),   // private
    (Ipv4Addr::new(198, 18, 0, 0), 15),    // benchmarks
    (Ipv4Addr::new(198, 51, 100, 0), 24),  // documentation
    (Ipv4Addr::new(203, 0, 113, 0), 24),   // documentation
    (Ipv4Addr::new(224, 0, 0, 0), 4),      // multicast
    (Ipv4Addr::new(240, 0, 0, 0), 4),      // reserved, and broadcast
];

/// All that has been given out of IPv6 so far (RFC 4291, section 2.4), and ranges of it that are not the public Internet's. Those that carry an
/// IPv4 address are judged by it, below.
const PUBLIC_IPV6: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);
const SPECIAL_IPV6: [(Ipv6Addr, u32); 3] = [
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23), // protocol assignments, Teredo
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32), // documentation
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20), // documentation
];

/// Whether a name that leads to this address has to be allowed to by a rule about the address.
pub(crate) fn is_special(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_special_ipv4(address),
        IpAddr::V6(address) => is_special_ipv6(address),
    }
}

fn is_special_ipv4(address: Ipv4Addr) -> bool {
    SPECIAL_IPV4
        .iter()
        .any(|(base, prefix)| (address.to_bits() ^ base.to_bits()) >> (32 - prefix) == 0)
}

fn is_special_ipv6(address: Ipv6Addr) -> bool {
    let is_in = |(base, prefix): &(Ipv6Addr, u32)| {
        (address.to_bits() ^ base.to_bits()) >> (128 - prefix) == 0
    };
    match translated_ipv4(address) {
        Some(address) => is_special_ipv4(address),
        None => !is_in(&PUBLIC_IPV6) || SPECIAL_IPV6.iter().any(is_in),
    }
}

/// The IPv4 address that a translator would make of an IPv6 one.
pub(crate) fn translated(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => translated_ipv4(address).map(IpAddr::V4),
    }
}

/// NAT64 (RFC 6052) has it at the end, 6to4 (RFC 3056) behind its prefix.
fn translated_ipv4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    match address.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn special(text: &str) -> bool {
        is_special(text.parse().expect("an address"))
    }

    #[test]
    fn addresses_of_the_host_and_its_networks_are_special() {
        for text in [
            "0.0.0.0",
            "0.255.255.255",
            "10.0.0.0",
            "10.255.255.255",
            "100.64.0.0",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.255",
            "169.254.169.254",
            "168.63.129.16",
            "172.16.0.0",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.168.0.0",
            "192.168.255.255",
            "198.18.0.0",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.7",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:127.0.0.1",
            "::ffff:10.1.1.1",
            "64:ff9b::7f00:1",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::1",
            "100::3",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a00:1::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fdff::1",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
            "::ffff:0:7f00:1",
            "1fff::1",
            "4000::1",
            "fbff::1",
        ] {
            assert!(special(text), "{text}");
        }
    }

    #[test]
    fn addresses_of_the_internet_are_not() {
        for text in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "168.63.129.15",
            "168.63.129.17",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "::ffff:1.1.1.1",
            "64:ff9b::1.1.1.1",
            "2002:101:101::1",
            "2606:4700::1111",
            "2001:200::1",
            "2a00:1450::1",
            "3ffe::1",
        ] {
            assert!(!special(text), "{text}");
        }
    }
}
