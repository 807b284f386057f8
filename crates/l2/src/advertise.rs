//! Router advertisements: what a guest without configuration learns about IPv6 on this network.
//!
//! A guest that comes up asks (RFC 4861, 6.3.7; three times, and Linux goes on until it is answered), and it gets an answer of its own. There are no
//! periodic advertisements, although RFC 4861, 6.2.4 has routers send them: their purpose is to renew lifetimes, and to reach hosts that
//! were answered by no one. Here nothing runs out (a lifetime of 2³²-1 seconds is "for ever", for a prefix in RFC 4861, 4.6.2, for a resolver and a search
//! domain in RFC 8106, 5.1 and 5.2), and a network without wake-ups is worth more. What changes is advertised once, to all.
//!
//! The *router lifetime* is zero: the station leads nowhere, so no guest makes a default route of it (RFC 4861, 4.2), and takes the rest all the same. If
//! there is an uplink with a router of IPv6, that one advertises itself.

use core::net::Ipv6Addr;

use smoltcp::time::Duration;
use smoltcp::wire::{
    Icmpv6Packet, NdiscPrefixInfoFlags, NdiscPrefixInformation, NdiscRepr, NdiscRouterFlags,
    RawHardwareAddress,
};

use crate::config::StationConfig;

/// "For ever" in every lifetime of 32 bits.
const INFINITY_SECONDS: u32 = u32::MAX;

const PREFIX_LEN: u8 = 64;
const OPTION_RECURSIVE_SERVERS: u8 = 25;
const OPTION_SEARCH_LIST: u8 = 31;

/// The message, with its checksum still to be filled in.
pub(crate) fn message(config: &StationConfig, address: Ipv6Addr) -> Vec<u8> {
    let for_ever = Duration::from_secs(INFINITY_SECONDS.into());
    let mut prefix = address.octets();
    prefix[8..].fill(0);
    let advertisement = NdiscRepr::RouterAdvert {
        // Zero: not specified by this router.
        hop_limit: 0,
        flags: NdiscRouterFlags::empty(),
        router_lifetime: Duration::ZERO,
        reachable_time: Duration::ZERO,
        retrans_time: Duration::ZERO,
        lladdr: Some(RawHardwareAddress::from_bytes(&config.mac.0)),
        mtu: Some(config.mtu.into()),
        prefix_info: Some(NdiscPrefixInformation {
            prefix_len: PREFIX_LEN,
            flags: NdiscPrefixInfoFlags::ON_LINK | NdiscPrefixInfoFlags::ADDRCONF,
            valid_lifetime: for_ever,
            preferred_lifetime: for_ever,
            prefix: prefix.into(),
        }),
    };
    let mut bytes = vec![0; advertisement.buffer_len()];
    advertisement.emit(&mut Icmpv6Packet::new_unchecked(&mut bytes[..]));
    if config.dns {
        bytes.extend(lasting_option(OPTION_RECURSIVE_SERVERS, &address.octets()));
        bytes.extend(lasting_option(
            OPTION_SEARCH_LIST,
            &encoded_domain(&config.domain),
        ));
    }
    bytes
}

/// An option of RFC 8106: type, length in units of eight bytes, two reserved bytes, a lifetime, and what it is about, padded with zeros.
fn lasting_option(kind: u8, about: &[u8]) -> Vec<u8> {
    let len = (8 + about.len()).next_multiple_of(8);
    // A domain has 100 characters at most.
    let units = u8::try_from(len / 8).expect("an option of some 110 bytes");
    let mut option = vec![kind, units, 0, 0];
    option.extend(INFINITY_SECONDS.to_be_bytes());
    option.extend(about);
    option.resize(len, 0);
    option
}

/// A domain as DNS writes it: every label behind its length, and an empty one at the end.
pub(crate) fn encoded_domain(domain: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(domain.len() + 2);
    for label in domain.split('.') {
        // The configuration was checked: labels of 1 to 63 bytes.
        bytes.push(label.len() as u8);
        bytes.extend(label.bytes());
    }
    bytes.push(0);
    bytes
}

#[cfg(test)]
mod tests;
