use super::*;
use crate::config::tests::{OWN_IPV6, config};

/// Byte for byte, by RFC 4861, 4.2 and 4.6 and RFC 8106, 5.1 and 5.2.
#[test]
fn an_advertisement_says_all_of_it() {
    let message = message(&config(), OWN_IPV6);
    let mut expected = vec![134, 0, 0, 0];
    // Hop limit not specified; neither DHCPv6 flag; no default router; times not specified.
    expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([1, 1, 0x52, 0x54, 0, 0, 0, 1]);
    expected.extend([5, 1, 0, 0, 0, 0, 0x05, 0xdc]);
    // On the link, and for addresses that guests make; for ever.
    expected.extend([
        3, 4, 64, 0xc0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0,
    ]);
    expected.extend([0xfd, 0, 0, 1, 0, 2, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([25, 3, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    expected.extend([0xfd, 0, 0, 1, 0, 2, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1]);
    expected.extend([
        31, 2, 0, 0, 0xff, 0xff, 0xff, 0xff, 3, b'l', b'a', b'n', 0, 0, 0, 0,
    ]);
    assert_eq!(message, expected);
}

#[test]
fn without_dns_no_resolver_is_named() {
    let config = StationConfig {
        dns: false,
        ..config()
    };
    assert_eq!(message(&config, OWN_IPV6).len(), 16 + 8 + 8 + 32);
}

#[test]
fn the_longest_domain_fits() {
    let domain = ["a".repeat(49), "b".repeat(50)].join(".");
    let config = StationConfig { domain, ..config() };
    let message = message(&config, OWN_IPV6);
    assert_eq!(message.len() % 8, 0);
    assert_eq!(message[16 + 8 + 8 + 32 + 24..][..2], [31, 14]);
}
