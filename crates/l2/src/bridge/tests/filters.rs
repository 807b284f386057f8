//! What a guest may say of itself and to others.

mod owners;

use super::*;

/// A guest that is to use these addresses only.
fn guarded(number: u8) -> PortConfig {
    PortConfig {
        ipv4: Some(ipv4(number)),
        ipv6_guard: Some(Ipv6Guard::default()),
        ..PortConfig::guest(mac(number))
    }
}

/// Two guarded guests, a plain one and an uplink.
fn world() -> World {
    let mut world = World::new();
    world.add(guarded(1));
    world.add(guarded(2));
    world.add(PortConfig::guest(mac(3)));
    world.add(PortConfig::uplink());
    world
}

const UPLINK: PortId = PortId(3);

fn check(world: &mut World, from: PortId, frame: &[u8], expected: Option<Refusal>) {
    assert_eq!(world.refusal(from, frame), expected, "{from} {frame:02x?}");
}

#[test]
fn arp_is_in_the_senders_own_name() {
    let mut world = world();
    let cases = [
        (A, 1, (mac(1), ipv4(1)), None),
        // A probe before an address is used, RFC 5227.
        (A, 1, (mac(1), Ipv4Addr::UNSPECIFIED), None),
        (A, 1, (mac(1), ipv4(2)), Some(Refusal::ArpSender)),
        (A, 1, (mac(1), ipv4(77)), Some(Refusal::ArpSender)),
        (A, 1, (mac(2), ipv4(1)), Some(Refusal::ArpSender)),
        // Without an address of its own a guest may have any but those of others.
        (C, 3, (mac(3), ipv4(77)), None),
        (C, 3, (mac(3), ipv4(2)), Some(Refusal::ArpSender)),
        (C, 3, (mac(9), ipv4(77)), Some(Refusal::ArpSender)),
        // And so may those outside.
        (UPLINK, 99, (mac(99), ipv4(77)), None),
        (UPLINK, 99, (mac(98), ipv4(77)), None),
        (UPLINK, 99, (mac(99), ipv4(1)), Some(Refusal::ArpSender)),
    ];
    for (from, source, sender, expected) in cases {
        check(
            &mut world,
            from,
            &arp(BROADCAST, mac(source), sender, ipv4(9)),
            expected,
        );
    }
    let whole = arp(BROADCAST, mac(1), (mac(1), ipv4(1)), ipv4(9));
    check(
        &mut world,
        A,
        &whole[..whole.len() - 1],
        Some(Refusal::Malformed),
    );
}

#[test]
fn ipv4_comes_from_the_senders_own_address() {
    let mut world = world();
    let none = Ipv4Addr::UNSPECIFIED;
    let cases = [
        (A, udp4(mac(2), mac(1), ipv4(1), (5, 5)), None),
        (
            A,
            udp4(mac(2), mac(1), ipv4(2), (5, 5)),
            Some(Refusal::Ipv4Source),
        ),
        (
            A,
            udp4(mac(2), mac(1), none, (5, 5)),
            Some(Refusal::Ipv4Source),
        ),
        (A, udp4(BROADCAST, mac(1), none, (68, 67)), None),
        (
            A,
            udp4(BROADCAST, mac(1), none, (68, 69)),
            Some(Refusal::Ipv4Source),
        ),
        (
            A,
            ipv4_part(BROADCAST, mac(1), none, 0x2000, 17, &udp((68, 67))),
            Some(Refusal::Ipv4Source),
        ),
        (A, ipv4_part(group(), mac(1), none, 0, 2, &[0; 8]), None),
        // Later fragments say where they are from as others do.
        (A, ipv4_part(mac(2), mac(1), ipv4(1), 3, 17, &[0; 8]), None),
        (
            A,
            ipv4_part(mac(2), mac(1), ipv4(9), 3, 17, &[0; 8]),
            Some(Refusal::Ipv4Source),
        ),
        (C, udp4(mac(2), mac(3), ipv4(50), (5, 5)), None),
        (
            C,
            udp4(mac(2), mac(3), ipv4(1), (5, 5)),
            Some(Refusal::Ipv4Source),
        ),
        (UPLINK, udp4(mac(2), mac(99), ipv4(50), (5, 5)), None),
        (
            UPLINK,
            udp4(mac(2), mac(99), ipv4(1), (5, 5)),
            Some(Refusal::Ipv4Source),
        ),
    ];
    for (from, frame, expected) in cases {
        check(&mut world, from, &frame, expected);
    }
}

#[test]
fn only_uplinks_and_stations_are_dhcp_servers() {
    let mut world = world();
    let station = world.add(PortConfig {
        ipv4: Some(ipv4(254)),
        ..PortConfig::station(mac(254))
    });
    let offer = |from: u8, source| udp4(mac(2), mac(from), ipv4(source), (67, 68));
    check(&mut world, A, &offer(1, 1), Some(Refusal::RogueDhcp));
    check(&mut world, C, &offer(3, 50), Some(Refusal::RogueDhcp));
    check(&mut world, UPLINK, &offer(99, 50), None);
    check(&mut world, station, &offer(254, 254), None);
    // The station's own address is no other's.
    check(
        &mut world,
        UPLINK,
        &offer(99, 254),
        Some(Refusal::Ipv4Source),
    );
    // The beginning of a server's answer in fragments.
    let first = ipv4_part(mac(2), mac(1), ipv4(1), 0x2000, 17, &udp((67, 68)));
    check(&mut world, A, &first, Some(Refusal::RogueDhcp));
    let without_header = ipv4_part(mac(2), mac(1), ipv4(1), 0x2000, 17, &[0, 67, 0]);
    check(&mut world, A, &without_header, Some(Refusal::Malformed));
    let version_six = ipv6_packet(mac(2), mac(1), ipv6(1), 17, &udp((547, 546)));
    check(&mut world, A, &version_six, Some(Refusal::RogueDhcp));
    let asks = ipv6_packet(group(), mac(1), ipv6(1), 17, &udp((546, 547)));
    check(&mut world, A, &asks, None);
}

/// A client takes what comes to its port (RFC 2131, 4.1; RFC 8415, 7.2), whatever port it comes from.
#[test]
fn an_answer_of_a_dhcp_server_is_known_by_the_clients_port() {
    let mut world = world();
    let rogue = Some(Refusal::RogueDhcp);
    for port in [0, 5, 68, 546, 65535] {
        let offer = |from: u8, to| udp4(to, mac(from), ipv4(from), (port, 68));
        check(&mut world, A, &offer(1, mac(2)), rogue);
        check(&mut world, A, &offer(1, BROADCAST), rogue);
        check(&mut world, C, &offer(3, mac(2)), rogue);
        check(&mut world, UPLINK, &offer(99, mac(2)), None);
        let version_six = ipv6_packet(mac(2), mac(1), ipv6(1), 17, &udp((port, 546)));
        check(&mut world, A, &version_six, rogue);
    }
    // In fragments, behind options, behind a tag for priority.
    let first = ipv4_part(mac(2), mac(1), ipv4(1), 0x2000, 17, &udp((5, 68)));
    check(&mut world, A, &first, rogue);
    let mut with_options = udp4(mac(2), mac(1), ipv4(1), (5, 68));
    with_options[14] = 0x46;
    with_options[17] += 4;
    with_options.splice(34..34, [1; 4]);
    check(&mut world, A, &with_options, rogue);
    let offer = udp4(mac(2), mac(1), ipv4(1), (5, 68));
    check(&mut world, A, &tagged(offer, 0xe000), rogue);
    // Behind extension headers and in fragments of IPv6.
    let behind = |header: [u8; 8]| [&header[..], &udp((5, 546))].concat();
    let options = ipv6_packet(
        mac(2),
        mac(1),
        ipv6(1),
        60,
        &behind([17, 0, 1, 4, 0, 0, 0, 0]),
    );
    check(&mut world, A, &options, rogue);
    let fragment = ipv6_packet(
        mac(2),
        mac(1),
        ipv6(1),
        44,
        &behind([17, 0, 0, 1, 0, 0, 0, 7]),
    );
    check(&mut world, A, &fragment, rogue);
}

/// Some receivers look behind any header of LLC for a SNAP access point (RFC 1042), whatever its other bytes say.
#[test]
fn snap_is_known_by_its_access_point() {
    let mut world = world();
    for llc in [
        [0xaa, 0xaa, 3],
        [0xaa, 0xab, 3],
        [0xab, 0xaa, 3],
        [0xaa, 0xaa, 0x13],
    ] {
        let packet = [&llc[..], &[0, 0, 0, 8, 0], &[0; 40]].concat();
        let snap = frame(mac(2), mac(1), packet.len() as u16, &packet);
        check(&mut world, A, &snap, Some(Refusal::Wrapped));
    }
}

/// Systems take ARP of IEEE 802 hardware as Ethernet's.
#[test]
fn arp_of_other_lengths_and_kinds_is_refused() {
    let mut world = world();
    let honest = arp(BROADCAST, mac(1), (mac(1), ipv4(1)), ipv4(9));
    for (at, value) in [
        (15, 6),
        (15, 0),
        (16, 0x86),
        (18, 8),
        (18, 0),
        (19, 16),
        (19, 0),
    ] {
        let mut other = honest.clone();
        other[at] = value;
        check(&mut world, A, &other, Some(Refusal::Malformed));
    }
}

#[test]
fn only_uplinks_and_stations_are_routers() {
    let mut world = world();
    let station = world.add(PortConfig::station(mac(254)));
    for kind in [134, 137] {
        let message = |from: u8| ipv6_packet(group(), mac(from), ipv6(from), 58, &icmpv6(kind));
        check(&mut world, A, &message(1), Some(Refusal::RogueRouter));
        check(&mut world, C, &message(3), Some(Refusal::RogueRouter));
        check(&mut world, UPLINK, &message(99), None);
        check(&mut world, station, &message(254), None);
    }
    check(
        &mut world,
        A,
        &ipv6_packet(group(), mac(1), ipv6(1), 58, &icmpv6(128)),
        None,
    );
}

/// Advertisements in every disguise that RFC 7113 names, and others.
#[test]
fn an_advertisement_cannot_be_hidden() {
    let mut world = world();
    let options = |next: u8, units: u8| {
        let mut header = vec![0; 8 * (usize::from(units) + 1)];
        (header[0], header[1]) = (next, units);
        header
    };
    let fragment = |next: u8, place: u16| {
        let [high, low] = place.to_be_bytes();
        vec![next, 0, high, low, 0, 0, 0, 1]
    };
    let send = |world: &mut World, first: u8, headers: &[Vec<u8>], message: &[u8]| {
        let payload = [&headers.concat()[..], message].concat();
        world.refusal(A, &ipv6_packet(group(), mac(1), ipv6(1), first, &payload))
    };
    let (router, echo) = (icmpv6(134), icmpv6(128));
    let mut has =
        |first, headers: &[Vec<u8>], message: &[u8]| send(&mut world, first, headers, message);
    assert_eq!(
        has(60, &[options(58, 0)], &router),
        Some(Refusal::RogueRouter)
    );
    assert_eq!(
        has(0, &[options(60, 0), options(58, 1)], &router),
        Some(Refusal::RogueRouter)
    );
    assert_eq!(has(60, &[options(58, 0)], &echo), None);
    // Beyond the snapshot it could be anything.
    for message in [&router, &echo] {
        assert_eq!(
            has(60, &[options(58, 20)], message),
            Some(Refusal::HiddenHeaders)
        );
    }
    // In fragments: the first one shows what it is, or is refused; a message of neighbour discovery is in none.
    assert_eq!(
        has(44, &[fragment(58, 1)], &router),
        Some(Refusal::RogueRouter)
    );
    assert_eq!(
        has(44, &[fragment(60, 1), options(58, 20)], &router),
        Some(Refusal::HiddenHeaders)
    );
    assert_eq!(has(44, &[fragment(60, 1)], &[]), Some(Refusal::Malformed));
    assert_eq!(
        has(44, &[fragment(60, 1)], &[58, 1, 0, 0, 0, 0, 0, 0]),
        Some(Refusal::Malformed)
    );
    let solicitation = neighbour(135, ipv6(9), None);
    assert_eq!(
        has(44, &[fragment(58, 0)], &solicitation),
        Some(Refusal::HiddenHeaders)
    );
    assert_eq!(
        has(44, &[fragment(58, 8)], &router),
        None,
        "there is no header in a later one"
    );
    assert_eq!(has(58, &[], &solicitation), None);
    // Behind what receivers look through and most filters do not: CVE-2021-27853 and those after it.
    let packet = ipv6_packet(group(), mac(1), ipv6(1), 58, &router);
    let snap = [
        &packet[..12],
        &[0, 100, 0xaa, 0xaa, 3, 0, 0, 0],
        &packet[12..],
    ]
    .concat();
    assert_eq!(world.refusal(A, &snap), Some(Refusal::Wrapped));
    let twice = tagged(tagged(packet.clone(), 0), 0);
    assert_eq!(world.refusal(A, &twice), Some(Refusal::Wrapped));
    assert_eq!(
        world.refusal(A, &tagged(packet.clone(), 0)),
        Some(Refusal::RogueRouter)
    );
    let provider = [&packet[..12], &[0x88, 0xa8, 0, 0], &packet[12..]].concat();
    assert_eq!(world.refusal(A, &provider), Some(Refusal::Wrapped));
    // Packets that are not as long as they say.
    assert_eq!(
        world.refusal(A, &packet[..packet.len() - 1]),
        Some(Refusal::Malformed)
    );
}

#[test]
fn neighbour_messages_are_in_the_senders_own_name() {
    let mut world = world();
    let send = |world: &mut World, from: u8, source, message: &[u8]| {
        let port = PortId(u16::from(from) - 1);
        world.refusal(port, &ipv6_packet(group(), mac(from), source, 58, message))
    };
    let (own, other) = (Some(mac(1)), Some(mac(2)));
    assert_eq!(
        send(&mut world, 1, ipv6(1), &neighbour(135, ipv6(2), own)),
        None
    );
    assert_eq!(
        send(&mut world, 1, ipv6(1), &neighbour(136, ipv6(1), own)),
        None
    );
    assert_eq!(
        send(&mut world, 1, ipv6(1), &neighbour(136, ipv6(1), None)),
        None
    );
    let wrong = Some(Refusal::NeighbourAddress);
    assert_eq!(
        send(&mut world, 1, ipv6(1), &neighbour(135, ipv6(2), other)),
        wrong
    );
    assert_eq!(
        send(&mut world, 1, ipv6(1), &neighbour(136, ipv6(1), other)),
        wrong
    );
    assert_eq!(
        send(&mut world, 3, ipv6(3), &neighbour(136, ipv6(3), other)),
        wrong
    );
    // The target of an advertisement is claimed as a source is.
    assert_eq!(
        send(&mut world, 2, ipv6(2), &neighbour(136, ipv6(2), other)),
        None
    );
    let taken = Some(Refusal::Ipv6Taken);
    assert_eq!(
        send(&mut world, 1, ipv6(1), &neighbour(136, ipv6(2), own)),
        taken
    );
    assert_eq!(
        send(
            &mut world,
            3,
            ipv6(3),
            &neighbour(136, ipv6(2), Some(mac(3)))
        ),
        taken
    );
    // Options that cannot be read to their end.
    let endless = [
        &neighbour(136, ipv6(1), own)[..],
        &[14, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    assert_eq!(
        send(&mut world, 1, ipv6(1), &endless),
        Some(Refusal::HiddenHeaders)
    );
    let short = &neighbour(136, ipv6(1), None)[..23];
    assert_eq!(
        send(&mut world, 1, ipv6(1), short),
        Some(Refusal::HiddenHeaders)
    );
}

#[test]
fn without_an_address_a_host_may_ask_for_one() {
    let mut world = world();
    let none = Ipv6Addr::UNSPECIFIED;
    for (kind, allowed) in [
        (128, false),
        (131, true),
        (132, true),
        (133, true),
        (136, false),
        (143, true),
    ] {
        let refusal = world.refusal(
            A,
            &ipv6_packet(group(), mac(1), none, 58, &icmpv6(kind)[..8]),
        );
        assert_eq!(refusal.is_none(), allowed, "{kind}: {refusal:?}");
    }
    let other = ipv6_packet(group(), mac(1), none, 17, &udp((546, 547)));
    assert_eq!(world.refusal(A, &other), Some(Refusal::Ipv6Source));
}

#[test]
fn what_is_refused_teaches_nothing() {
    let mut world = World::new();
    world.add(PortConfig::learning_guest());
    world.add(PortConfig::learning_guest());
    let rogue = ipv6_packet(group(), mac(50), ipv6(1), 58, &icmpv6(134));
    assert_eq!(world.refusal(A, &rogue), Some(Refusal::RogueRouter));
    assert_eq!(world.bridge.macs(world.now).count(), 0);
}

#[test]
fn other_types_and_what_is_only_long_pass() {
    let mut world = world();
    check(&mut world, A, &plain(mac(2), mac(1)), None);
    let llc = frame(mac(2), mac(1), 46, &[0x42, 0x42, 3, 0, 0]);
    check(&mut world, A, &llc, None);
    let mut padded = udp4(mac(2), mac(1), ipv4(1), (5, 5));
    padded.resize(60, 0);
    check(&mut world, A, &padded, None);
}
