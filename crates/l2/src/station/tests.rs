//! Guests whose stacks and clients share nothing with the servers, and frames by hand where such a guest never says what has to be tested.

mod captured;
mod connections;
mod guest;

use std::time::Duration;

use smoltcp::iface::SocketHandle;
use smoltcp::socket::{dhcpv4, tcp};
use smoltcp::wire::DnsQueryType;

use super::*;
use crate::config::slaac_address;
use crate::config::tests::{OWN, OWN_IPV6, OWN_MAC, config, guest_mac, host};
use crate::neighbour::{ALL_ROUTERS, solicited_node};
use crate::stack::{CONNECTIONS, CONNECTIONS_EACH, IDLE_TIME};
use guest::{Guest, Wire};

const SECOND: Duration = Duration::from_secs(1);

/// The port of the guest with this number.
fn asker(number: u8) -> Asker {
    Asker {
        port: number.into(),
        guest: Some(guest_mac(number)),
        isolated: false,
    }
}

fn configured(
    guest: &mut Guest,
    handle: SocketHandle,
) -> Option<(Ipv4Addr, u8, Vec<Ipv4Addr>, Option<Ipv4Addr>)> {
    match guest.socket::<dhcpv4::Socket>(handle).poll()? {
        dhcpv4::Event::Configured(config) => Some((
            config.address.address(),
            config.address.prefix_len(),
            config.dns_servers.to_vec(),
            config.router,
        )),
        dhcpv4::Event::Deconfigured => None,
    }
}

#[test]
fn a_guest_on_the_list_gets_its_address_and_keeps_it() {
    let mut wire = Wire::new(config(), vec![host(2), host(3)]);
    let mut guest = Guest::new(guest_mac(3));
    let handle = guest.dhcp();
    let address = Ipv4Addr::new(10, 0, 0, 3);
    let got = wire.until(&mut guest, 20 * SECOND, |guest| configured(guest, handle));
    assert_eq!(got, Some((address, 24, vec![OWN], None)));
    assert_eq!(wire.station.counters().dhcp_offers, 1);

    // Half of its hour later it asks again, from the address that it has, and the answer goes there.
    guest.add(smoltcp::wire::IpCidr::new(address.into(), 24));
    wire.now += 1800 * SECOND;
    let lost = wire.until(&mut guest, 10 * SECOND, |guest| {
        let counters = guest.socket::<dhcpv4::Socket>(handle).poll();
        matches!(counters, Some(dhcpv4::Event::Deconfigured)).then_some(())
    });
    assert_eq!(lost, None);
    assert_eq!(wire.station.counters().dhcp_acknowledgements, 2);
    let answer = wire
        .sent
        .iter()
        .rev()
        .find(|frame| frame[12..14] == [8, 0])
        .unwrap();
    assert_eq!(answer[30..34], address.octets());
    assert_eq!(wire.station.poll_at(), None);
}

#[test]
fn with_a_gateway_a_guest_is_told_the_way_out() {
    let gateway = Ipv4Addr::new(10, 0, 0, 254);
    let config = StationConfig {
        gateway: Some(gateway),
        ..config()
    };
    let mut wire = Wire::new(config, vec![host(2)]);
    let mut guest = Guest::new(guest_mac(2));
    let handle = guest.dhcp();
    let got = wire.until(&mut guest, 20 * SECOND, |guest| configured(guest, handle));
    assert_eq!(got.unwrap().3, Some(gateway));
}

#[test]
fn a_guest_that_is_not_on_the_list_gets_an_address_only_from_a_pool() {
    let mut wire = Wire::new(config(), vec![host(2)]);
    let mut guest = Guest::new(guest_mac(9));
    let handle = guest.dhcp();
    let got = wire.until(&mut guest, 20 * SECOND, |guest| configured(guest, handle));
    assert_eq!(got, None);
    assert!(wire.sent.is_empty() && wire.station.counters().dhcp_ignored > 0);

    let pool = [10, 0, 0, 100].into()..=[10, 0, 0, 101].into();
    let config = StationConfig {
        pool: Some(pool),
        ..config()
    };
    let mut wire = Wire::new(config, vec![host(2)]);
    let mut addresses = Vec::new();
    for number in 10..13 {
        let mut guest = Guest::new(guest_mac(number));
        let handle = guest.dhcp();
        let got = wire.until(&mut guest, 20 * SECOND, |guest| configured(guest, handle));
        addresses.extend(got.map(|got| got.0));
    }
    addresses.sort();
    assert_eq!(
        addresses,
        [Ipv4Addr::new(10, 0, 0, 100), Ipv4Addr::new(10, 0, 0, 101)]
    );
    let leases = wire.station.leases(wire.now);
    assert_eq!(
        leases.iter().map(|lease| lease.address).collect::<Vec<_>>(),
        addresses
    );
    assert!(wire.station.leases(wire.now + 3600 * SECOND).is_empty());
}

#[test]
fn guests_find_each_other_by_name() {
    let mut wire = Wire::new(config(), vec![host(2), host(3)]);
    let mut guest = Guest::with_addresses(2);
    let other = host(3);
    // Before it was heard, its IPv6 address is not resolved.
    assert_eq!(
        guest.resolve(&mut wire, OWN.into(), "guest3.lan", DnsQueryType::Aaaa),
        None
    );
    let probed = other.ipv6.unwrap();
    let probe = neighbour_solicitation(probed, &[]);
    let mut probe = discovery(Ipv6Addr::UNSPECIFIED, solicited_node(probed), &probe);
    probe[6..12].copy_from_slice(&other.mac.0);
    assert!(wire.say(&probe).is_empty());
    for server in [IpAddr::V4(OWN), IpAddr::V6(OWN_IPV6)] {
        for name in ["guest3.lan", "GUEST3.Lan", "guest3"] {
            let ipv4 = guest.resolve(&mut wire, server, name, DnsQueryType::A);
            assert_eq!(ipv4, Some(vec![other.ipv4.unwrap().into()]), "{name}");
            let ipv6 = guest.resolve(&mut wire, server, name, DnsQueryType::Aaaa);
            assert_eq!(ipv6, Some(vec![other.ipv6.unwrap().into()]), "{name}");
        }
        assert_eq!(
            guest.resolve(&mut wire, server, "guest4.lan", DnsQueryType::A),
            None
        );
        assert_eq!(
            guest.resolve(&mut wire, server, "example.org", DnsQueryType::A),
            None
        );
    }
    assert_eq!(wire.station.poll_at(), None);

    wire.station.set_hosts(vec![host(2)]).unwrap();
    assert_eq!(
        guest.resolve(&mut wire, OWN.into(), "guest3.lan", DnsQueryType::A),
        None
    );
}

#[test]
fn it_answers_pings_of_every_size_and_kind() {
    let config = StationConfig {
        mtu: 9000,
        ..config()
    };
    let mut wire = Wire::new(config, Vec::new());
    let mut guest = Guest::with_addresses(2);
    let link_local = slaac_address("fe80::".parse().unwrap(), OWN_MAC);
    for target in [IpAddr::V4(OWN), OWN_IPV6.into(), link_local.into()] {
        for len in [0, 56, 1472, 8900] {
            assert_eq!(
                guest.ping(&mut wire, target, len),
                Some(target),
                "{len} bytes"
            );
        }
    }
    // All on the link are asked, and the answer is from an address of its own.
    let answer = guest.ping(&mut wire, ALL_NODES.into(), 56);
    assert!(
        answer == Some(link_local.into()) || answer == Some(OWN_IPV6.into()),
        "{answer:?}"
    );
    assert_eq!(guest.ping(&mut wire, [10, 0, 0, 3].into(), 56), None);
    assert_eq!(wire.station.poll_at(), None);
}

fn arp(source: MacAddress, sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let mut frame = [[0xff; 6], source.0].concat();
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(source.0);
    frame.extend(sender);
    frame.extend([0; 6]);
    frame.extend(target);
    frame
}

#[test]
fn arp_is_answered_for_its_own_address_only_and_also_for_probes() {
    let mut wire = Wire::new(config(), vec![host(2)]);
    for sender in [[10, 0, 0, 2], [0; 4]] {
        let answers = wire.say(&arp(guest_mac(2), sender, OWN.octets()));
        let mut expected = [guest_mac(2).0, OWN_MAC.0].concat();
        expected.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
        expected.extend(OWN_MAC.0);
        expected.extend(OWN.octets());
        expected.extend(guest_mac(2).0);
        expected.extend(sender);
        assert_eq!(answers, [expected]);
    }
    // Another's address; a claim to the station's; a sender for another.
    assert!(
        wire.say(&arp(guest_mac(2), [10, 0, 0, 2], [10, 0, 0, 3]))
            .is_empty()
    );
    assert!(
        wire.say(&arp(guest_mac(2), OWN.octets(), OWN.octets()))
            .is_empty()
    );
    let mut lie = arp(guest_mac(2), [10, 0, 0, 2], OWN.octets());
    lie[22..28].copy_from_slice(&guest_mac(3).0);
    assert!(wire.say(&lie).is_empty());
    assert_eq!(wire.station.counters().neighbour_answers, 2);
}

/// A frame with a message of neighbour discovery, whose checksum is filled in.
fn discovery(source: Ipv6Addr, destination: Ipv6Addr, message: &[u8]) -> Vec<u8> {
    let path = Path {
        source: guest_mac(2),
        destination: neighbour::group_mac(destination),
    };
    frame::neighbour_discovery(path, source, destination, message)
}

fn neighbour_solicitation(target: Ipv6Addr, options: &[u8]) -> Vec<u8> {
    [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets(), options].concat()
}

const LINK_LAYER_OPTION: [u8; 8] = [1, 1, 0x52, 0x54, 0, 0, 1, 2];

#[test]
fn neighbours_are_answered_by_the_book() {
    let mut wire = Wire::new(config(), vec![host(2)]);
    let guest: Ipv6Addr = host(2).ipv6.unwrap();
    let question = neighbour_solicitation(OWN_IPV6, &LINK_LAYER_OPTION);
    // First to the group, and later, to see whether it is still there, to the address itself.
    for destination in [solicited_node(OWN_IPV6), OWN_IPV6] {
        let answers = wire.say(&discovery(guest, destination, &question));
        assert_eq!(answers.len(), 1);
        let answer = &answers[0];
        assert_eq!(answer[..6], guest_mac(2).0);
        assert_eq!(
            (answer[21], &answer[22..38], &answer[38..54]),
            (255, &OWN_IPV6.octets()[..], &guest.octets()[..])
        );
        // An advertisement, from a router, solicited, to override what was known; the target, and where it is.
        assert_eq!((answer[54], answer[58]), (136, 0xe0));
        assert_eq!(answer[62..78], OWN_IPV6.octets());
        assert_eq!(answer[78..], [&[2, 1][..], &OWN_MAC.0].concat());
    }
    // A host without address asks for this one: the answer is for all, and not solicited.
    let probe = neighbour_solicitation(OWN_IPV6, &[]);
    let answers = wire.say(&discovery(
        Ipv6Addr::UNSPECIFIED,
        solicited_node(OWN_IPV6),
        &probe,
    ));
    assert_eq!(
        (&answers[0][..6], &answers[0][38..54]),
        (&guest_mac(2).0[..], &ALL_NODES.octets()[..])
    );
    assert_eq!((answers[0][54], answers[0][58]), (136, 0xa0));
}

#[test]
fn what_is_not_by_the_book_is_ignored() {
    let mut wire = Wire::new(config(), vec![host(2)]);
    let guest = host(2).ipv6.unwrap();
    let unspecified = Ipv6Addr::UNSPECIFIED;
    let group = solicited_node(OWN_IPV6);
    let good = neighbour_solicitation(OWN_IPV6, &LINK_LAYER_OPTION);
    let mut passed_on = discovery(guest, group, &good);
    passed_on[21] = 254;
    let mut damaged = discovery(guest, group, &good);
    damaged[60] ^= 1;
    let mut code = good.clone();
    code[1] = 1;
    let frames = [
        passed_on,
        damaged,
        discovery(guest, group, &code),
        discovery(guest, group, &good[..20]),
        discovery(
            guest,
            group,
            &neighbour_solicitation(OWN_IPV6, &[1, 0, 0, 0, 0, 0, 0, 0]),
        ),
        discovery(guest, group, &neighbour_solicitation(ALL_NODES, &[])),
        discovery(guest, group, &neighbour_solicitation(guest, &[])),
        discovery(unspecified, group, &good),
        discovery(
            unspecified,
            OWN_IPV6,
            &neighbour_solicitation(OWN_IPV6, &[]),
        ),
        discovery(
            unspecified,
            ALL_ROUTERS,
            &[&[133, 0, 0, 0, 0, 0, 0, 0], &LINK_LAYER_OPTION[..]].concat(),
        ),
    ];
    for (index, frame) in frames.iter().enumerate() {
        assert!(wire.say(frame).is_empty(), "frame {index} was answered");
    }
    assert_eq!(
        wire.say(&discovery(guest, group, &good)).len(),
        1,
        "the good one is"
    );
}

#[test]
fn who_asks_for_routers_is_told_and_nobody_else() {
    let mut wire = Wire::new(config(), vec![host(2)]);
    let solicitation = [133, 0, 0, 0, 0, 0, 0, 0];
    let link_local = slaac_address("fe80::".parse().unwrap(), guest_mac(2));
    for (source, to) in [(link_local, link_local), (Ipv6Addr::UNSPECIFIED, ALL_NODES)] {
        let answers = wire.say(&discovery(source, ALL_ROUTERS, &solicitation));
        assert_eq!(answers.len(), 1);
        assert_eq!(
            (&answers[0][..6], &answers[0][38..54]),
            (&guest_mac(2).0[..], &to.octets()[..])
        );
        // From the link-local address, which guests insist on.
        let own = slaac_address("fe80::".parse().unwrap(), OWN_MAC);
        assert_eq!(
            (answers[0][21], &answers[0][22..38], answers[0][54]),
            (255, &own.octets()[..], 134)
        );
    }
    assert_eq!(wire.station.poll_at(), None, "nothing is repeated");

    wire.station.link_up();
    let sent = wire.station.transmit().unwrap();
    assert_eq!(
        (&sent[..6], &sent[38..54]),
        (&[0x33, 0x33, 0, 0, 0, 1][..], &ALL_NODES.octets()[..])
    );
    assert_eq!(wire.station.transmit(), None);

    let config = StationConfig {
        advertise: false,
        ..config()
    };
    let mut wire = Wire::new(config, Vec::new());
    wire.station.link_up();
    assert!(
        wire.say(&discovery(link_local, ALL_ROUTERS, &solicitation))
            .is_empty()
    );
}

#[test]
fn frames_that_are_for_others_or_from_nobody_are_ignored() {
    let mut wire = Wire::new(config(), vec![host(2)]);
    let good = arp(guest_mac(2), [10, 0, 0, 2], OWN.octets());
    let with = |destination: MacAddress, source: MacAddress| {
        let mut frame = good.clone();
        frame[..6].copy_from_slice(&destination.0);
        frame[6..12].copy_from_slice(&source.0);
        frame[22..28].copy_from_slice(&source.0);
        frame
    };
    assert_eq!(wire.say(&with(OWN_MAC, guest_mac(2))).len(), 1);
    for (destination, source) in [
        (guest_mac(3), guest_mac(2)),
        (OWN_MAC, OWN_MAC),
        (OWN_MAC, MacAddress::BROADCAST),
        (OWN_MAC, MacAddress::ZERO),
    ] {
        assert!(wire.say(&with(destination, source)).is_empty());
    }
    for len in 0..good.len() {
        assert!(
            wire.say(&good[..len]).is_empty(),
            "{len} bytes are no ARP packet"
        );
    }
    let padded = [&good[..], &[0; 18]].concat();
    assert_eq!(
        wire.say(&padded).len(),
        1,
        "cards fill frames up to 60 bytes"
    );
    let counters = wire.station.counters();
    assert_eq!(
        counters.frames_received,
        counters.frames_ignored + counters.neighbour_answers
    );
}

#[test]
fn answers_that_nobody_fetches_are_limited() {
    let mut wire = Wire::new(config(), vec![host(2)]);
    let question = arp(guest_mac(2), [10, 0, 0, 2], OWN.octets());
    for _ in 0..MAX_QUEUED_FRAMES + 3 {
        wire.station.receive(wire.now, &asker(2), &question);
    }
    assert_eq!(wire.station.counters().frames_dropped, 3);
    assert_eq!(
        std::iter::from_fn(|| wire.station.transmit()).count(),
        MAX_QUEUED_FRAMES
    );
    assert_eq!(wire.say(&question).len(), 1);
}
