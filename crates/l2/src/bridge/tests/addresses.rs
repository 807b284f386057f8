//! Whose an address is.

use super::*;

fn learning() -> PortConfig {
    PortConfig::learning_guest()
}

#[test]
fn an_assigned_address_cannot_be_taken() {
    let mut world = World::guests(2);
    let guest = world.add(learning());
    let uplink = world.add(PortConfig::uplink());
    assert_eq!(
        world.refusal(A, &plain(mac(2), mac(9))),
        Some(Refusal::OtherSource)
    );
    for thief in [guest, uplink] {
        assert_eq!(
            world.refusal(thief, &plain(mac(2), mac(1))),
            Some(Refusal::SourceTaken)
        );
        assert_eq!(world.receivers(B, &plain(mac(1), mac(2))), [A]);
    }
}

#[test]
fn an_address_that_is_assigned_later_is_taken_from_whoever_learned_it() {
    let mut world = World::new();
    world.add(learning());
    let uplink = world.add(PortConfig::uplink());
    assert_eq!(world.receivers(uplink, &plain(BROADCAST, mac(1))), [A]);
    let owner = world.add(PortConfig::guest(mac(1)));
    assert_eq!(world.bridge.macs(world.now).count(), 1);
    assert_eq!(world.receivers(A, &plain(mac(1), mac(5))), [owner]);
}

#[test]
fn groups_and_zero_are_nobodys() {
    let mut world = World::new();
    world.add(learning());
    world.add(PortConfig::guest(mac(2)));
    for source in [BROADCAST, group(), MacAddress::ZERO] {
        let mut udp = udp4(mac(2), source, ipv4(1), (5, 5));
        udp.resize(60, 0);
        for frame in [plain(mac(2), source), udp] {
            assert_eq!(world.refusal(A, &frame), Some(Refusal::InvalidSource));
        }
        let error = world.bridge.add_port(PortConfig::guest(source));
        assert_eq!(error, Err(AddPortError::InvalidMac(source)));
    }
}

#[test]
fn frames_to_unknown_addresses_go_where_addresses_are_learned() {
    let mut world = World::guests(1);
    let (first, second) = (world.add(learning()), world.add(learning()));
    let uplink = world.add(PortConfig::uplink());
    assert_eq!(
        world.receivers(first, &plain(mac(99), mac(50))),
        [second, uplink]
    );
    // The answerer is known from then on.
    assert_eq!(world.receivers(second, &plain(mac(50), mac(99))), [first]);
    assert_eq!(world.receivers(first, &plain(mac(99), mac(50))), [second]);
    assert_eq!(world.receivers(A, &plain(mac(99), mac(1))), [second]);
    // A frame never goes back to where it came from.
    let again = world.refusal(second, &plain(mac(99), mac(98)));
    assert_eq!(again, Some(Refusal::SamePort));
}

#[test]
fn learned_addresses_age() {
    let mut world = World::new();
    world.add(learning());
    world.add(learning());
    world.add(learning());
    let _ = world.send(B, &plain(BROADCAST, mac(2)));
    let ageing = world.bridge.limits().ageing;
    world.now += ageing - Duration::from_nanos(1);
    assert_eq!(world.receivers(A, &plain(mac(2), mac(1))), [B]);
    let age = world
        .bridge
        .macs(world.now)
        .find(|entry| entry.mac == mac(2))
        .unwrap()
        .age;
    assert_eq!(age, Some(ageing - Duration::from_nanos(1)));
    world.now += Duration::from_nanos(1);
    assert_eq!(
        world.receivers(A, &plain(mac(2), mac(1))),
        [B, C],
        "unknown again"
    );
    assert!(
        world
            .bridge
            .macs(world.now)
            .all(|entry| entry.mac != mac(2))
    );
    // Use keeps it, to within the coarseness of a second.
    for _ in 0..10 {
        let _ = world.send(B, &plain(BROADCAST, mac(2)));
        world.now += ageing - 2 * SECOND;
        assert_eq!(world.receivers(A, &plain(mac(2), mac(1))), [B]);
    }
}

#[test]
fn a_learned_address_stays_with_the_first_until_that_falls_silent() {
    let mut world = World::new();
    world.add(learning());
    world.add(learning());
    let uplink = world.add(PortConfig::uplink());
    let gateway = mac(200);
    let _ = world.send(uplink, &plain(BROADCAST, gateway));
    assert_eq!(
        world.refusal(B, &plain(BROADCAST, gateway)),
        Some(Refusal::SourceTaken)
    );
    assert_eq!(world.receivers(A, &plain(gateway, mac(1))), [uplink]);
    let _ = world.send(A, &plain(BROADCAST, mac(1)));
    assert_eq!(
        world.refusal(uplink, &plain(BROADCAST, mac(1))),
        Some(Refusal::SourceTaken)
    );
    world.now += world.bridge.limits().ageing;
    assert_eq!(world.refusal(B, &plain(BROADCAST, gateway)), None);
    assert_eq!(world.receivers(A, &plain(gateway, mac(1))), [B]);
    // A port that goes, or whose link does, holds nothing back.
    world.bridge.set_link(B, false);
    assert_eq!(world.refusal(uplink, &plain(BROADCAST, gateway)), None);
}

#[test]
fn an_address_outside_moves_between_uplinks_at_once() {
    let mut world = World::guests(1);
    let (first, second) = (
        world.add(PortConfig::uplink()),
        world.add(PortConfig::uplink()),
    );
    for uplink in [first, second, first] {
        assert_eq!(world.receivers(uplink, &plain(BROADCAST, mac(9))), [A]);
        assert_eq!(world.receivers(A, &plain(mac(9), mac(1))), [uplink]);
    }
}

#[test]
fn a_port_at_its_bound_gives_up_its_own_oldest() {
    let mut world = World::new();
    world.add(PortConfig {
        learned_max: 3,
        ..learning()
    });
    let other = world.add(PortConfig {
        learned_max: 1,
        ..learning()
    });
    let _ = world.send(other, &plain(BROADCAST, mac(100)));
    for number in 1..=3 {
        let _ = world.send(A, &plain(BROADCAST, mac(number)));
        world.now += 2 * SECOND;
    }
    // The first was used again, so the second is the oldest now.
    let _ = world.send(A, &plain(BROADCAST, mac(1)));
    let _ = world.send(A, &plain(BROADCAST, mac(4)));
    let mut known: Vec<u8> = world
        .bridge
        .macs(world.now)
        .map(|entry| entry.mac.0[5])
        .collect();
    known.sort();
    assert_eq!(known, [1, 3, 4, 100]);
}

#[test]
fn a_flood_of_addresses_costs_nobody_else_theirs() {
    let mut world = World::new();
    let config = PortConfig {
        learned_max: 16,
        ..learning()
    };
    let (attacker, victim) = (world.add(config.clone()), world.add(config));
    let bystander = world.add(PortConfig::guest(mac(1)));
    let _ = world.send(victim, &plain(BROADCAST, mac(2)));
    for number in 0..100_000_u64 {
        let source = MacAddress::from_u64(0x0200_0000_0000 + number);
        let _ = world.send(attacker, &plain(mac(1), source));
        world.now += Duration::from_millis(1);
        if number % 1000 == 0 {
            let _ = world.send(victim, &plain(mac(1), mac(2)));
            assert_eq!(world.receivers(bystander, &plain(mac(2), mac(1))), [victim]);
            let (attackers, all) = world
                .bridge
                .macs(world.now)
                .fold((0, 0), |(attackers, all), entry| {
                    (attackers + u32::from(entry.port == attacker), all + 1)
                });
            assert!(attackers <= 16 && all <= 18, "{attackers} {all}");
        }
    }
    assert_eq!(world.bridge.learned.count(attacker), 16);
}

/// Behind one uplink, a host that sends from ever new addresses costs those that go on speaking nothing.
#[test]
fn a_flood_of_addresses_behind_an_uplink_costs_no_known_host_its_own() {
    let mut world = World::new();
    let uplink = world.add(PortConfig::uplink());
    let guest = world.add(learning());
    let max = PortConfig::uplink().learned_max;
    let flood = |world: &mut World| {
        for number in 0..2 * u64::from(max) {
            let source = MacAddress::from_u64(0x0600_0000_0000 + number);
            let _ = world.send(uplink, &plain(mac(1), source));
        }
    };
    let host = mac(9);
    for _ in 0..2 {
        let _ = world.send(uplink, &plain(BROADCAST, host));
        world.now += 2 * SECOND;
    }
    flood(&mut world);
    assert_eq!(world.receivers(guest, &plain(host, mac(2))), [uplink]);
    let taken = Some(Refusal::SourceTaken);
    assert_eq!(world.refusal(guest, &plain(BROADCAST, host)), taken);
    // All of the flood goes on speaking. The first ones speak within the time, and stay.
    for _ in 0..3 {
        world.now += 100 * SECOND;
        let _ = world.send(uplink, &plain(BROADCAST, host));
        flood(&mut world);
        assert_eq!(world.refusal(guest, &plain(BROADCAST, host)), taken);
    }
    assert_eq!(world.bridge.learned.count(uplink), u32::from(max));
    // What falls silent makes room.
    world.now += 400 * SECOND;
    assert_eq!(world.refusal(guest, &plain(BROADCAST, host)), None);
    for _ in 0..2 {
        let _ = world.send(uplink, &plain(BROADCAST, mac(10)));
        world.now += 2 * SECOND;
    }
    flood(&mut world);
    assert_eq!(world.refusal(guest, &plain(BROADCAST, mac(10))), taken);
}

#[test]
fn room_for_learned_addresses_is_reserved() {
    let mut world = World::with(BridgeLimits {
        learned_max: 100,
        ..BridgeLimits::default()
    });
    let sized = |learned_max| PortConfig {
        learned_max,
        ipv6_guard: None,
        ..learning()
    };
    let with_guard = PortConfig {
        ipv6_guard: Some(Ipv6Guard {
            addresses_max: 20,
            ..Ipv6Guard::default()
        }),
        ..PortConfig::guest(mac(1))
    };
    world.add(sized(60));
    world.add(with_guard);
    let error = world.bridge.add_port(sized(21)).unwrap_err();
    assert_eq!(
        error,
        AddPortError::TooManyAddresses {
            wanted: 21,
            free: 20,
            learned_max: 100
        }
    );
    world.add(sized(20));
    assert!(
        world
            .bridge
            .configure_port(world.now, A, sized(61))
            .is_err()
    );
    assert_eq!(world.bridge.configure_port(world.now, A, sized(10)), Ok(()));
    assert!(world.bridge.remove_port(B).is_some());
    world.add(sized(70));
    assert_eq!(
        world.bridge.add_port(sized(0)),
        Err(AddPortError::NoAddress)
    );
}

#[test]
fn addresses_are_learned_in_each_vlan_by_itself() {
    let mut world = World::new();
    let in_vlan = |number| PortConfig {
        vlan: Vlan::Access(VlanId::new(number).unwrap()),
        ..learning()
    };
    let (ten, twenty) = (world.add(in_vlan(10)), world.add(in_vlan(20)));
    let (ten_too, twenty_too) = (world.add(in_vlan(10)), world.add(in_vlan(20)));
    let _ = world.send(ten, &plain(BROADCAST, mac(9)));
    let _ = world.send(twenty, &plain(BROADCAST, mac(9)));
    assert_eq!(world.receivers(ten_too, &plain(mac(9), mac(1))), [ten]);
    assert_eq!(
        world.receivers(twenty_too, &plain(mac(9), mac(1))),
        [twenty]
    );
    let mut vlans: Vec<u16> = world
        .bridge
        .macs(world.now)
        .filter(|entry| entry.mac == mac(9))
        .filter_map(|entry| Some(entry.vlan?.get()))
        .collect();
    vlans.sort();
    assert_eq!(vlans, [10, 20]);
}

#[test]
fn assigned_addresses_are_one_ports() {
    let mut world = World::new();
    let first = PortConfig {
        ipv4: Some(ipv4(1)),
        addresses: vec![ipv6(1).into()],
        ..PortConfig::guest(mac(1))
    };
    world.add(first.clone());
    let second = PortConfig {
        mac: Some(mac(2)),
        ..first
    };
    let taken = |address: IpAddr| Err(AddPortError::AddressTaken { address, port: A });
    assert_eq!(world.bridge.add_port(second.clone()), taken(ipv4(1).into()));
    let second = PortConfig {
        ipv4: None,
        ..second
    };
    assert_eq!(world.bridge.add_port(second.clone()), taken(ipv6(1).into()));
    // In another VLAN it is another address.
    world.add(PortConfig {
        vlan: Vlan::Access(VlanId::new(2).unwrap()),
        ..second
    });
    for address in [
        Ipv4Addr::UNSPECIFIED,
        Ipv4Addr::BROADCAST,
        Ipv4Addr::new(224, 0, 0, 1),
    ] {
        let error = world.bridge.add_port(PortConfig {
            ipv4: Some(address),
            ..PortConfig::guest(mac(3))
        });
        assert_eq!(error, Err(AddPortError::InvalidAddress(address.into())));
    }
    let many = |count| PortConfig {
        addresses: (0..count).map(|number| ipv6(100 + number).into()).collect(),
        ..PortConfig::guest(mac(3))
    };
    assert!(matches!(
        world.bridge.add_port(many(17)),
        Err(AddPortError::TooMany {
            count: 17,
            max: 16,
            ..
        })
    ));
    world.add(many(16));
    let prefixes = |count| PortConfig {
        ipv6_guard: Some(Ipv6Guard {
            prefixes: vec![Ipv6Prefix::LINK_LOCAL; count],
            ..Ipv6Guard::default()
        }),
        ..PortConfig::guest(mac(4))
    };
    assert!(matches!(
        world.bridge.add_port(prefixes(9)),
        Err(AddPortError::TooMany {
            count: 9,
            max: 8,
            ..
        })
    ));
    world.add(prefixes(8));
}

#[test]
fn a_guest_with_guests_has_its_own_addresses_alone() {
    let mut world = World::guests(1);
    let own = world.add(PortConfig {
        mac: Some(mac(5)),
        ipv4: Some(ipv4(77)),
        ..learning()
    });
    let other = world.add(learning());
    let uplink = world.add(PortConfig::uplink());
    for thief in [other, uplink] {
        let as_own = plain(BROADCAST, mac(5));
        assert_eq!(world.refusal(thief, &as_own), Some(Refusal::SourceTaken));
        let claim = arp(BROADCAST, mac(9), (mac(9), ipv4(77)), ipv4(1));
        assert_eq!(world.refusal(thief, &claim), Some(Refusal::ArpSender));
    }
    assert_eq!(world.receivers(A, &plain(mac(5), mac(1))), [own]);
    // It may use them, and others: those are learned.
    for (source, address) in [(5, 77), (5, 78), (50, 79)] {
        let said = arp(
            BROADCAST,
            mac(source),
            (mac(source), ipv4(address)),
            ipv4(1),
        );
        assert_eq!(world.refusal(own, &said), None, "{source} {address}");
    }
    assert_eq!(world.receivers(A, &plain(mac(50), mac(1))), [own]);
}

#[test]
fn the_mac_address_of_a_gateway_is_its_uplinks_whoever_used_it_first() {
    let mut world = World::guests(1);
    let guest = world.add(learning());
    let uplink = world.add(PortConfig {
        ipv4: Some(ipv4(254)),
        addresses: vec![IpAddr::V6(ipv6(254))],
        ..PortConfig::uplink()
    });
    let mut advertisement = neighbour(136, ipv6(254), Some(mac(201)));
    advertisement[4] = 0xe0;
    for (gateway, says) in [
        (
            mac(200),
            arp(mac(1), mac(200), (mac(200), ipv4(254)), ipv4(1)),
        ),
        (
            mac(201),
            ipv6_packet(mac(1), mac(201), ipv6(254), 58, &advertisement),
        ),
    ] {
        assert_eq!(world.refusal(guest, &plain(BROADCAST, gateway)), None);
        assert_eq!(world.receivers(A, &plain(gateway, mac(1))), [guest]);
        // What comes from afar proves nothing.
        let from_afar = udp4(mac(1), gateway, ipv4(9), (5, 5));
        let refused = world.refusal(uplink, &from_afar);
        assert_eq!(refused, Some(Refusal::SourceTaken));
        assert_eq!(world.receivers(uplink, &says), [A]);
        for _ in 0..3 {
            assert_eq!(world.receivers(A, &plain(gateway, mac(1))), [uplink]);
            let refused = world.refusal(guest, &plain(BROADCAST, gateway));
            assert_eq!(refused, Some(Refusal::SourceTaken));
            world.now += 2 * world.bridge.limits().ageing;
        }
    }
}

/// A guest with guests of its own has what it was first to use, as all others.
#[test]
fn an_ipv6_address_of_a_guest_that_learns_is_its_own_while_it_is_in_use() {
    let mut world = World::new();
    let guarded = |number| PortConfig {
        ipv6_guard: Some(Ipv6Guard::default()),
        ..PortConfig::guest(mac(number))
    };
    let attacker = world.add(guarded(1));
    let victim = world.add(PortConfig {
        mac: Some(mac(2)),
        ..PortConfig::learning_guest()
    });
    world.add(guarded(3));
    // Link-local addresses are a guarded guest's to use.
    let address: Ipv6Addr = "fe80::77".parse().unwrap();
    let ask = |from| {
        let question = neighbour(135, address, None);
        ipv6_packet(group(), mac(from), Ipv6Addr::UNSPECIFIED, 58, &question)
    };
    let says = |from| {
        let answer = neighbour(136, address, Some(mac(from)));
        ipv6_packet(group(), mac(from), address, 58, &answer)
    };
    let uses = |from| ipv6_packet(mac(3), mac(from), address, 17, &udp((5, 5)));
    assert_eq!(world.refusal(victim, &ask(2)), None);
    world.now += 5 * SECOND;
    // One of the guests behind it.
    assert_eq!(world.refusal(victim, &says(50)), None);
    for frame in [says(1), uses(1)] {
        let refusal = world.refusal(attacker, &frame);
        assert_eq!(refusal, Some(Refusal::Ipv6Taken));
    }
    for frame in [uses(50), says(2)] {
        assert_eq!(world.refusal(victim, &frame), None);
    }
    // It uses any number of addresses of any prefix, as the guests behind it do, and holds the last of them.
    for host in 0..100 {
        let elsewhere = Ipv6Addr::from_bits(0x2001_0db8_u128 << 96 | host);
        let frame = ipv6_packet(mac(3), mac(2), elsewhere, 17, &udp((5, 5)));
        assert_eq!(world.refusal(victim, &frame), None);
    }
    assert_eq!(world.bridge.bindings.count(victim), 16);
}
