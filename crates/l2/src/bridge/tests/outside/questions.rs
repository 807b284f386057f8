//! Questions for an address in use outside, and what they prove.

use super::*;

/// A question that no host would answer proves nothing (RFC 4861, section 7.1.1).
#[test]
fn a_question_that_nobody_answers_proves_nothing() {
    type Change = fn(&mut Vec<u8>);
    let changes: [(&str, Change); 9] = [
        ("hop limit", |frame| frame[21] = 254),
        ("checksum", |frame| frame[56] ^= 1),
        ("code", |frame| frame[55] = 1),
        ("group", |frame| frame[0..6].copy_from_slice(&group().0)),
        ("one receiver", |frame| {
            frame[0..6].copy_from_slice(&mac(2).0)
        }),
        ("destination", |frame| frame[53] ^= 1),
        ("all nodes", |frame| {
            frame[38..54].copy_from_slice(&Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).octets());
        }),
        ("an address of its own", |frame| {
            frame.extend([1, 1, 0x52, 0x54, 0, 0, 0, 1]);
            frame[19] += 8;
        }),
        ("extension", |frame| {
            frame.splice(54..54, [58, 0, 0xbf, 4, 0, 0, 0, 0]);
            frame[20] = 60;
            frame[19] += 8;
        }),
    ];
    for (what, change) in changes {
        let mut world = world();
        let mut question = ask(1, own(50));
        change(&mut question);
        let _ = world.send(A, &question);
        world.now += 4 * SECOND;
        let _ = world.send(A, &data(1, own(50)));
        let answer = advertise(ROUTER, own(50));
        assert_eq!(world.refusal(UPLINK, &answer), None, "{what}");
    }
    // Nor has one that did not pass for its rate.
    let mut world = world();
    while world.refusal(A, &ask(1, own(49))) != Some(Refusal::MulticastRate) {}
    assert_eq!(
        world.refusal(A, &ask(1, own(50))),
        Some(Refusal::MulticastRate)
    );
    world.now += 4 * SECOND;
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, own(50))), None);
}

/// Nor has one that the host did not take.
#[test]
fn a_question_that_did_not_leave_proves_nothing() {
    let mut world = world();
    assert_eq!(world.classify(A, &ask(1, own(50))), Verdict::Flood);
    assert!(
        world
            .bridge
            .flood_ports()
            .iter()
            .any(|(port, _)| *port == UPLINK)
    );
    world.now += 4 * SECOND;
    assert_eq!(world.refusal(A, &data(1, own(50))), None);
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, own(50))), None);
    assert_eq!(owner(&world, own(50)), Some(UPLINK));
    // One that is asked again and leaves does.
    assert_eq!(world.classify(A, &ask(1, own(51))), Verdict::Flood);
    world.now += SECOND;
    assert_eq!(world.refusal(A, &ask(1, own(51))), None);
    world.now += 4 * SECOND;
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, own(51))), TAKEN);
}

/// Others would take the address for that of the guest that asks: the network itself would give its name to askers for the address's owner.
#[test]
fn a_question_for_anothers_address_gets_to_that_one_alone() {
    let mut world = world();
    let station = world.add(PortConfig::station(mac(254)));
    for (address, asked, seen) in [
        (own(50), A, advertise(1, own(50))),
        (own(51), UPLINK, advertise(ROUTER, own(51))),
    ] {
        assert_eq!(world.refusal(asked, &seen), None);
        world.now += 10 * SECOND;
        let question = ask(2, address);
        assert_eq!(world.receivers(B, &question), [asked]);
        // Also when it is sent to the network itself.
        let direct = [&mac(254).0[..], &question[6..]].concat();
        assert_eq!(world.receivers(B, &direct), [asked]);
    }
    let question = ask(2, own(52));
    assert_eq!(world.receivers(B, &question), [A, UPLINK, station]);
}

/// Asking for an address while its owner asks, too, would have both give it up (RFC 4862, section 5.4.3; RFC 5227, section 2.1.1).
#[test]
fn no_question_costs_a_guest_its_address_when_it_asks_again() {
    let mut world = World::new();
    world.add(PortConfig {
        ipv4: Some(ipv4(1)),
        addresses: vec![ipv6(1).into()],
        ipv6_guard: Some(Ipv6Guard::default()),
        ..PortConfig::guest(mac(1))
    });
    world.add(PortConfig {
        ipv6_guard: Some(Ipv6Guard::default()),
        ..PortConfig::guest(mac(2))
    });
    let plain_guest = world.add(PortConfig::guest(mac(3)));
    let uplink = world.add(PortConfig::uplink());
    let probe = |number| {
        let sender = (mac(number), Ipv4Addr::UNSPECIFIED);
        arp(BROADCAST, mac(number), sender, ipv4(1))
    };
    let chosen = ipv6(50);
    assert_eq!(world.refusal(A, &ask(1, chosen)), None);
    // It starts anew, again and again.
    for _ in 0..3 {
        world.now += 100 * SECOND;
        for address in [ipv6(1), made_of(mac(1)), chosen] {
            assert_eq!(world.refusal(A, &ask(1, address)), None);
            world.now += Duration::from_millis(900);
            for (port, number) in [(B, 2), (plain_guest, 3), (uplink, ROUTER)] {
                let question = ask(number, address);
                assert!(
                    !world.receivers(port, &question).contains(&A),
                    "{address} {port}"
                );
            }
        }
        assert_eq!(world.refusal(A, &probe(1)), None);
        world.now += SECOND;
        for (port, number) in [(B, 2), (plain_guest, 3), (uplink, ROUTER)] {
            assert!(
                !world.receivers(port, &probe(number)).contains(&A),
                "{port}"
            );
        }
    }
    // Other guests need no answer from its owner for what was assigned: they cannot use it anyway.
    world.now += 100 * SECOND;
    for address in [ipv6(1), made_of(mac(1))] {
        assert_eq!(world.refusal(B, &ask(2, address)), TAKEN);
        assert!(world.receivers(uplink, &ask(ROUTER, address)).contains(&A));
    }
    assert_eq!(world.refusal(B, &probe(2)), Some(Refusal::ArpSender));
    assert!(world.receivers(uplink, &probe(ROUTER)).contains(&A));
    // For one that a guest has chosen its owner answers, once that is settled.
    assert!(world.receivers(B, &ask(2, chosen)).contains(&A));
}

/// A server may send nothing for hours. No other host has used its address meanwhile, so that it need not ask again.
#[test]
fn what_a_guest_has_asked_for_is_its_own_after_silence() {
    let mut world = world();
    assert_eq!(world.refusal(A, &ask(1, own(50))), None);
    world.now += 3600 * SECOND;
    assert_eq!(world.refusal(A, &advertise(1, own(50))), None);
    world.now += SECOND;
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, own(50))), TAKEN);
    // One that was taken meanwhile is another's.
    world.now += 3600 * SECOND;
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, own(50))), None);
    assert_eq!(world.refusal(A, &data(1, own(50))), TAKEN);
}

/// A resolver that comes up again asks again, too.
#[test]
fn no_question_of_a_guest_costs_a_host_outside_its_address() {
    let mut world = world();
    let address = own(53);
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, address)), None);
    world.now += 100 * SECOND;
    assert!(world.receivers(A, &ask(1, address)).contains(&UPLINK));
    assert_eq!(world.refusal(UPLINK, &ask(ROUTER, address)), None);
    world.now += 2 * SECOND;
    assert_eq!(world.refusal(A, &ask(1, address)), TAKEN);
    world.now += 2 * SECOND;
    assert!(world.receivers(A, &ask(1, address)).contains(&UPLINK));
    assert_eq!(owner(&world, address), Some(UPLINK));
}
