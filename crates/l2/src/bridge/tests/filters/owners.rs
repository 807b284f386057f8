//! IPv6 addresses that guests have given themselves.

use super::*;

#[test]
fn a_guest_keeps_to_its_prefixes() {
    let mut world = World::new();
    let prefix = Ipv6Prefix {
        address: "fd00:1::".parse().unwrap(),
        len: 64,
    };
    let guard = Ipv6Guard {
        prefixes: vec![prefix],
        ..Ipv6Guard::default()
    };
    let assigned: Ipv6Addr = "fd00:2::5".parse().unwrap();
    world.add(PortConfig {
        ipv6_guard: Some(guard),
        addresses: vec![assigned.into()],
        ..PortConfig::guest(mac(1))
    });
    world.add(PortConfig::guest(mac(2)));
    for (source, expected) in [
        ("fd00:1::1", None),
        ("fd00:1::ffff:ffff:ffff:ffff", None),
        ("fd00:1:0:1::1", Some(Refusal::Ipv6Source)),
        ("fd00:2::5", None),
        ("fd00:2::6", Some(Refusal::Ipv6Source)),
        ("fe80::1", None),
        ("febf::1", None),
        ("fec0::1", Some(Refusal::Ipv6Source)),
        ("ff02::1", Some(Refusal::Ipv6Source)),
        ("::1", Some(Refusal::Ipv6Source)),
    ] {
        let packet = ipv6_packet(mac(2), mac(1), source.parse().unwrap(), 17, &udp((5, 5)));
        assert_eq!(world.refusal(A, &packet), expected, "{source}");
    }
    // Another may not use the assigned one, guarded or not.
    let packet = ipv6_packet(mac(1), mac(2), assigned, 17, &udp((5, 5)));
    assert_eq!(world.refusal(B, &packet), Some(Refusal::Ipv6Taken));
    // A prefix of everything does not make a host of a group.
    let everything = Ipv6Prefix {
        address: Ipv6Addr::UNSPECIFIED,
        len: 0,
    };
    let guard = Ipv6Guard {
        prefixes: vec![everything],
        ..Ipv6Guard::default()
    };
    let config = PortConfig {
        ipv6_guard: Some(guard),
        ..PortConfig::guest(mac(1))
    };
    world.bridge.configure_port(world.now, A, config).unwrap();
    for (source, expected) in [
        ("2001:db8::1", None),
        ("ff02::1", Some(Refusal::Ipv6Source)),
        ("::1", Some(Refusal::Ipv6Source)),
    ] {
        let packet = ipv6_packet(mac(2), mac(1), source.parse().unwrap(), 17, &udp((5, 5)));
        assert_eq!(world.refusal(A, &packet), expected, "{source}");
    }
    // The network's bounds: all of a prefix of 0, one of a prefix of 128.
    assert!(
        Ipv6Prefix {
            address: assigned,
            len: 0
        }
        .contains(ipv6(1))
    );
    assert!(
        Ipv6Prefix {
            address: assigned,
            len: 128
        }
        .contains(assigned)
    );
    assert!(
        !Ipv6Prefix {
            address: assigned,
            len: 128
        }
        .contains(ipv6(1))
    );
}

#[test]
fn an_ipv6_address_is_whoevers_was_first() {
    let mut world = world();
    let packet = |from: u8, source| ipv6_packet(mac(9), mac(from), source, 17, &udp((5, 5)));
    assert_eq!(world.refusal(A, &packet(1, ipv6(50))), None);
    assert_eq!(
        world.refusal(B, &packet(2, ipv6(50))),
        Some(Refusal::Ipv6Taken)
    );
    assert_eq!(
        world.refusal(C, &packet(3, ipv6(50))),
        Some(Refusal::Ipv6Taken)
    );
    assert_eq!(
        world.refusal(UPLINK, &packet(99, ipv6(50))),
        Some(Refusal::Ipv6Taken)
    );
    let entry = world.bridge.ipv6_bindings(world.now).next().unwrap();
    assert_eq!((entry.address, entry.port), (ipv6(50), A));
    world.now += world.bridge.limits().ageing;
    assert_eq!(world.bridge.ipv6_bindings(world.now).count(), 0);
    assert_eq!(world.refusal(B, &packet(2, ipv6(50))), None);
    assert_eq!(
        world.refusal(A, &packet(1, ipv6(50))),
        Some(Refusal::Ipv6Taken)
    );
    // Whose link goes down holds nothing back.
    world.bridge.set_link(B, false);
    assert_eq!(world.refusal(A, &packet(1, ipv6(50))), None);
}

/// A reload of the configuration gives no guest the chance to take what another uses.
#[test]
fn a_port_that_changes_keeps_the_addresses_that_it_may_still_use() {
    let mut world = world();
    let packet = |from: u8, source| ipv6_packet(mac(9), mac(from), source, 17, &udp((5, 5)));
    let link_local: Ipv6Addr = "fe80::50".parse().unwrap();
    assert_eq!(world.refusal(A, &packet(1, ipv6(50))), None);
    world.now += SECOND;
    assert_eq!(world.refusal(A, &packet(1, link_local)), None);
    let mut slower = guarded(1);
    slower.rates.broadcasts_per_second = 7;
    let mut configure = |config| {
        let now = world.now;
        world.bridge.configure_port(now, A, config).unwrap();
        [ipv6(50), link_local].map(|source| world.refusal(B, &packet(2, source)))
    };
    let taken = Some(Refusal::Ipv6Taken);
    assert_eq!(configure(slower), [taken, taken]);
    // As many as are allowed from now on: the oldest is another's to take.
    let mut fewer = guarded(1);
    fewer.ipv6_guard.as_mut().unwrap().addresses_max = 1;
    assert_eq!(configure(fewer), [None, taken]);
    // In another VLAN it has none.
    let mut elsewhere = guarded(1);
    elsewhere.vlan = Vlan::Access(VlanId::new(7).unwrap());
    assert_eq!(configure(elsewhere), [None, None]);
}

#[test]
fn the_address_made_of_a_mac_address_is_its_owners_from_the_start() {
    let mut world = world();
    let packet = |from: u8, source| ipv6_packet(mac(9), mac(from), source, 17, &udp((5, 5)));
    assert_eq!(
        world.refusal(A, &packet(1, made_of(mac(2)))),
        Some(Refusal::Ipv6Taken)
    );
    assert_eq!(world.refusal(B, &packet(2, made_of(mac(2)))), None);
    // Also of a port that comes later.
    assert_eq!(world.refusal(A, &packet(1, made_of(mac(7)))), None);
    let late = world.add(guarded(7));
    assert_eq!(
        world.refusal(A, &packet(1, made_of(mac(7)))),
        Some(Refusal::Ipv6Taken)
    );
    assert_eq!(world.refusal(late, &packet(7, made_of(mac(7)))), None);
}

#[test]
fn a_guest_at_its_bound_gives_up_its_own_oldest_address() {
    let mut world = world();
    let packet = |from: u8, source| ipv6_packet(mac(9), mac(from), source, 17, &udp((5, 5)));
    assert_eq!(world.refusal(B, &packet(2, ipv6(200))), None);
    for number in 0..=Ipv6Guard::default().addresses_max {
        assert_eq!(world.refusal(A, &packet(1, ipv6(number as u8))), None);
    }
    assert_eq!(world.bridge.bindings.count(A), 16);
    assert_eq!(
        world.refusal(B, &packet(2, ipv6(0))),
        None,
        "the oldest is free"
    );
    assert_eq!(
        world.refusal(B, &packet(2, ipv6(1))),
        Some(Refusal::Ipv6Taken)
    );
    assert_eq!(
        world.refusal(A, &packet(1, ipv6(200))),
        Some(Refusal::Ipv6Taken)
    );
}

#[test]
fn who_asks_for_an_address_first_gets_it_and_who_has_it_can_say_so() {
    let mut world = world();
    let ask = |from: u8, target| {
        ipv6_packet(
            group(),
            mac(from),
            Ipv6Addr::UNSPECIFIED,
            58,
            &neighbour(135, target, None),
        )
    };
    assert_eq!(world.refusal(A, &ask(1, ipv6(50))), None);
    // Another that asks at once would have both give it up.
    world.now += 2 * SECOND;
    assert_eq!(
        world.refusal(B, &ask(2, ipv6(50))),
        Some(Refusal::Ipv6Taken)
    );
    // Later the owner is asked, and answers; the address stays its own.
    world.now += 2 * SECOND;
    assert!(world.receivers(B, &ask(2, ipv6(50))).contains(&A));
    let answer = ipv6_packet(
        group(),
        mac(1),
        ipv6(50),
        58,
        &neighbour(136, ipv6(50), Some(mac(1))),
    );
    assert_eq!(world.refusal(A, &answer), None);
    let uses = ipv6_packet(mac(9), mac(2), ipv6(50), 17, &udp((5, 5)));
    assert_eq!(world.refusal(B, &uses), Some(Refusal::Ipv6Taken));
    // No guest gets an address outside its prefixes.
    let outside = "2001:db8::1".parse().unwrap();
    assert_eq!(
        world.refusal(A, &ask(1, outside)),
        Some(Refusal::Ipv6Source)
    );
}
