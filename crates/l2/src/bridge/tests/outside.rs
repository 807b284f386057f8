//! Whose an IPv6 address is that may be in use behind an uplink.

mod questions;

use super::*;

const UPLINK: PortId = PortId(2);
/// The MAC address of the router behind the uplink.
const ROUTER: u8 = 99;

/// Two guests that may use any prefix, and an uplink.
fn world() -> World {
    let mut world = World::new();
    let any = |address: Ipv6Addr, len| Ipv6Prefix { address, len };
    for number in [1, 2] {
        world.add(PortConfig {
            ipv6_guard: Some(Ipv6Guard {
                prefixes: vec![any(own(0), 64), any(Ipv6Addr::UNSPECIFIED, 0)],
                ..Ipv6Guard::default()
            }),
            ..PortConfig::guest(mac(number))
        });
    }
    world.add(PortConfig::uplink());
    world
}

/// An address of the network's own prefix.
fn own(number: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, 1, 0, 0, 0, number)
}

/// An address of another prefix.
fn far(number: u16) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, number)
}

fn data(from: u8, source: Ipv6Addr) -> Vec<u8> {
    ipv6_packet(group(), mac(from), source, 17, &udp((5, 5)))
}

/// An unsolicited advertisement that overrides what its receivers have stored.
fn advertise(from: u8, address: Ipv6Addr) -> Vec<u8> {
    let mut message = neighbour(136, address, Some(mac(from)));
    message[4] = 0x20;
    ipv6_packet(group(), mac(from), address, 58, &message)
}

/// A host asks for another one.
fn solicit(from: u8, source: Ipv6Addr) -> Vec<u8> {
    let message = neighbour(135, ipv6(77), Some(mac(from)));
    ipv6_packet(group(), mac(from), source, 58, &message)
}

fn router_advertisement(from: u8, source: Ipv6Addr, lifetime: u16) -> Vec<u8> {
    let mut message = icmpv6(134);
    message.truncate(16);
    message[6..8].copy_from_slice(&lifetime.to_be_bytes());
    ipv6_packet(group(), mac(from), source, 58, &message)
}

/// Duplicate address detection as RFC 4862, section 5.4.2 has it, with its checksum.
fn ask(from: u8, target: Ipv6Addr) -> Vec<u8> {
    let [.., a, b, c] = target.octets();
    let to = MacAddress([0x33, 0x33, 0xff, a, b, c]);
    let message = neighbour(135, target, None);
    let mut frame = ipv6_packet(to, mac(from), Ipv6Addr::UNSPECIFIED, 58, &message);
    let solicited = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c];
    frame[38..54].copy_from_slice(&solicited);
    let words = frame[22..].chunks(2);
    let sum = words.map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum = sum.sum::<u32>() + 24 + 58;
    let sum = (sum & 0xffff) + (sum >> 16);
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[56..58].copy_from_slice(&checksum.to_be_bytes());
    frame
}

fn owner(world: &World, address: Ipv6Addr) -> Option<PortId> {
    let mut entries = world.bridge.ipv6_bindings(world.now);
    entries
        .find(|entry| entry.address == address)
        .map(|entry| entry.port)
}

const TAKEN: Option<Refusal> = Some(Refusal::Ipv6Taken);

/// What takes a router's or a resolver's address: an advertisement, with or without the flag to override, or any packet.
#[test]
fn an_address_in_use_outside_is_not_for_guests_to_take() {
    for address in [ipv6(200), own(200), far(200)] {
        let in_use = [
            advertise(ROUTER, address),
            solicit(ROUTER, address),
            ipv6_packet(group(), mac(ROUTER), address, 58, &icmpv6(133)[..8]),
            ask(ROUTER, address),
        ];
        for seen in in_use {
            let mut world = world();
            assert_eq!(world.refusal(UPLINK, &seen), None);
            for thief in [1, 2] {
                let port = PortId(u16::from(thief) - 1);
                world.now += 10 * SECOND;
                assert_eq!(world.refusal(port, &advertise(thief, address)), TAKEN);
                assert_eq!(world.refusal(port, &data(thief, address)), TAKEN);
                assert_eq!(world.refusal(port, &solicit(thief, address)), TAKEN);
                // It may ask, so that the owner can answer.
                assert!(
                    world
                        .receivers(port, &ask(thief, address))
                        .contains(&UPLINK)
                );
                assert_eq!(world.refusal(port, &advertise(thief, address)), TAKEN);
            }
            assert_eq!(owner(&world, address), Some(UPLINK));
            assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, address)), None);
            // Its traffic keeps it.
            for _ in 0..3 {
                world.now += world.bridge.limits().ageing - 2 * SECOND;
                assert_eq!(world.refusal(UPLINK, &data(ROUTER, address)), None);
                assert_eq!(world.refusal(A, &advertise(1, address)), TAKEN);
            }
        }
    }
}

/// Guests without a list of prefixes claim nothing, and take nothing either.
#[test]
fn nor_is_it_for_guests_that_may_use_any() {
    let mut world = world();
    let plain = world.add(PortConfig::guest(mac(4)));
    let learning = world.add(PortConfig::learning_guest());
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, ipv6(200))), None);
    for (port, number) in [(plain, 4), (learning, 50)] {
        assert_eq!(world.refusal(port, &advertise(number, ipv6(200))), TAKEN);
        assert_eq!(world.refusal(port, &data(number, ipv6(200))), TAKEN);
    }
}

#[test]
fn a_router_keeps_its_address_as_long_as_it_says_that_it_is_one() {
    let mut world = world();
    let address = ipv6(200);
    assert_eq!(
        world.refusal(UPLINK, &router_advertisement(ROUTER, address, 1800)),
        None
    );
    world.now += 1799 * SECOND;
    assert_eq!(world.refusal(A, &advertise(1, address)), TAKEN);
    world.now += SECOND;
    assert_eq!(world.refusal(A, &advertise(1, address)), None);
    // It takes its address back from a guest that was first, also from one that had asked.
    assert_eq!(
        world.refusal(UPLINK, &router_advertisement(ROUTER, address, 0)),
        None
    );
    assert_eq!(owner(&world, address), Some(UPLINK));
    assert_eq!(world.refusal(A, &advertise(1, address)), TAKEN);
    world.now += world.bridge.limits().ageing;
    assert_eq!(world.refusal(A, &ask(1, address)), None);
    world.now += 10 * SECOND;
    // A lifetime of zero says that it is no router (RFC 4861, section 4.2).
    assert_eq!(
        world.refusal(UPLINK, &router_advertisement(ROUTER, address, 0)),
        TAKEN
    );
    assert_eq!(owner(&world, address), Some(A));
    assert_eq!(
        world.refusal(UPLINK, &router_advertisement(ROUTER, address, 1800)),
        None
    );
    assert_eq!(world.refusal(A, &data(1, address)), TAKEN);
    // But only its link-local address, and none that is made of a guest's MAC address.
    for address in [far(1), own(1)] {
        assert_eq!(world.refusal(A, &ask(1, address)), None);
        world.now += 10 * SECOND;
        let advertised = router_advertisement(ROUTER, address, 1800);
        assert_eq!(world.refusal(UPLINK, &advertised), TAKEN);
    }
    let advertised = router_advertisement(ROUTER, made_of(mac(1)), 1800);
    assert_eq!(world.refusal(UPLINK, &advertised), TAKEN);
}

/// A guest that did not ask whether an address is in use outside has it only as long as no host there uses it.
#[test]
fn a_guest_that_has_not_asked_gives_way() {
    let mut world = world();
    for address in [ipv6(200), own(200), far(200)] {
        assert_eq!(world.refusal(A, &advertise(1, address)), None);
        world.now += 100 * SECOND;
        assert_eq!(world.refusal(A, &data(1, address)), None);
        assert_eq!(world.refusal(B, &advertise(2, address)), TAKEN);
        assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, address)), None);
        assert_eq!(world.refusal(A, &data(1, address)), TAKEN);
        assert_eq!(owner(&world, address), Some(UPLINK));
    }
}

/// One that has asked without an answer keeps it whatever is said outside.
#[test]
fn a_guest_that_has_asked_keeps_its_address() {
    let mut world = world();
    let address = own(50);
    assert_eq!(world.refusal(A, &ask(1, address)), None);
    world.now += 4 * SECOND;
    assert_eq!(world.refusal(A, &data(1, address)), None);
    for spoofed in [
        advertise(ROUTER, address),
        solicit(ROUTER, address),
        data(ROUTER, address),
    ] {
        assert_eq!(world.refusal(UPLINK, &spoofed), TAKEN);
    }
    // A host that comes later outside may ask, and the guest answers.
    assert!(world.receivers(UPLINK, &ask(ROUTER, address)).contains(&A));
    assert_eq!(world.refusal(A, &advertise(1, address)), None);
    // Asking again, after the link was down for one, changes nothing.
    world.now += 4 * SECOND;
    assert_eq!(world.refusal(A, &ask(1, address)), None);
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, address)), TAKEN);
    // An answer in time, and the address is the answerer's.
    assert_eq!(world.refusal(A, &ask(1, own(51))), None);
    world.now += SECOND;
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, own(51))), None);
    assert_eq!(world.refusal(A, &data(1, own(51))), TAKEN);
}

#[test]
fn an_address_made_of_a_mac_address_is_the_ports_where_that_is() {
    let mut world = world();
    // Of one that was seen outside, before its owner has spoken IPv6.
    assert_eq!(world.refusal(UPLINK, &plain(BROADCAST, mac(ROUTER))), None);
    assert_eq!(world.refusal(A, &advertise(1, made_of(mac(ROUTER)))), TAKEN);
    assert_eq!(
        world.refusal(UPLINK, &advertise(ROUTER, made_of(mac(ROUTER)))),
        None
    );
    // Of one that is a guest's, before that has.
    for spoofed in [advertise, solicit, data] {
        let frame = spoofed(ROUTER, made_of(mac(1)));
        assert_eq!(world.refusal(UPLINK, &frame), TAKEN);
    }
    assert_eq!(world.refusal(A, &advertise(1, made_of(mac(1)))), None);
}

/// Packets come from everywhere by way of a router: only those that cannot have passed one name hosts on this link.
#[test]
fn what_comes_from_afar_claims_nothing() {
    let mut world = world();
    let mut passed_a_router = advertise(ROUTER, own(50));
    passed_a_router[21] = 254;
    for frame in [
        data(ROUTER, far(50)),
        data(ROUTER, own(50)),
        passed_a_router,
    ] {
        assert_eq!(world.refusal(UPLINK, &frame), None);
    }
    assert_eq!(world.bridge.ipv6_bindings(world.now).count(), 0);
    assert_eq!(world.refusal(A, &ask(1, own(50))), None);
}

/// A guest that says it has the address of a host on the Internet cuts no other guest off from that.
#[test]
fn what_a_guest_claims_of_other_prefixes_stops_no_packets_from_afar() {
    let mut world = world();
    assert_eq!(world.refusal(A, &ask(1, far(80))), None);
    world.now += 10 * SECOND;
    assert_eq!(world.refusal(A, &data(1, far(80))), None);
    assert_eq!(world.refusal(UPLINK, &data(ROUTER, far(80))), None);
    // In the network's own prefix, and on the link, only a forger would send them.
    for address in [own(80), ipv6(80)] {
        assert_eq!(world.refusal(A, &data(1, address)), None);
        assert_eq!(world.refusal(UPLINK, &data(ROUTER, address)), TAKEN);
    }
}

#[test]
fn a_flood_from_outside_costs_guests_nothing() {
    let mut world = world();
    for number in 0..8 {
        assert_eq!(world.refusal(A, &ask(1, own(number))), None);
        assert_eq!(world.refusal(B, &ask(2, ipv6(number as u8))), None);
    }
    world.now += 4 * SECOND;
    for number in 0..20_000_u16 {
        let _ = world.send(UPLINK, &advertise(ROUTER, own(number)));
        let _ = world.send(UPLINK, &advertise(ROUTER, ipv6(number as u8)));
        world.now += Duration::from_millis(1);
    }
    let max = PortConfig::uplink().ipv6_guard.unwrap().addresses_max;
    assert_eq!(world.bridge.bindings.count(UPLINK), u32::from(max));
    for number in 0..8 {
        assert_eq!(owner(&world, own(number)), Some(A));
        assert_eq!(owner(&world, ipv6(number as u8)), Some(B));
    }
}

#[test]
fn a_flood_from_outside_takes_no_address_from_a_host_that_goes_on_speaking() {
    let mut world = world();
    let host = ipv6(200);
    for _ in 0..2 {
        assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, host)), None);
        world.now += 2 * SECOND;
    }
    for number in 0..20_000_u16 {
        let _ = world.send(UPLINK, &advertise(ROUTER, own(number)));
    }
    assert_eq!(owner(&world, host), Some(UPLINK));
    assert_eq!(world.refusal(A, &advertise(1, host)), TAKEN);
}

/// More addresses than are kept for an uplink must not make room for a guest at the address of a router.
#[test]
fn a_flood_from_outside_takes_no_address_from_a_router() {
    let mut world = world();
    let max = PortConfig::uplink().ipv6_guard.unwrap().addresses_max;
    let flood = |world: &mut World| {
        for number in 0..=max {
            let _ = world.send(UPLINK, &advertise(ROUTER, own(number)));
        }
    };
    let [first, second] = [200, 201].map(ipv6);
    for address in [first, second] {
        let advertised = router_advertisement(ROUTER, address, 1800);
        assert_eq!(world.refusal(UPLINK, &advertised), None);
    }
    flood(&mut world);
    for address in [first, second] {
        assert_eq!(owner(&world, address), Some(UPLINK));
        assert_eq!(world.refusal(A, &advertise(1, address)), TAKEN);
    }
    let count = |world: &World| world.bridge.bindings.count(UPLINK);
    assert_eq!(count(&world), u32::from(max));
    // One that is no router any more is like others.
    let advertised = router_advertisement(ROUTER, first, 0);
    assert_eq!(world.refusal(UPLINK, &advertised), None);
    flood(&mut world);
    assert_eq!(owner(&world, first), None);
    assert_eq!(owner(&world, second), Some(UPLINK));
    // Hosts that all say that they are routers have no more room together, and cost the first ones nothing.
    for number in 0..=max {
        let [high, low] = number.to_be_bytes();
        let address = Ipv6Addr::new(0xfe80, 0, 0, 0, 9, 9, high.into(), low.into());
        let _ = world.send(UPLINK, &router_advertisement(ROUTER, address, 1800));
    }
    flood(&mut world);
    assert_eq!(owner(&world, second), Some(UPLINK));
    assert_eq!(count(&world), u32::from(max));
    // When their time is over there is room for others.
    world.now += 1800 * SECOND;
    let advertised = router_advertisement(ROUTER, first, 1800);
    assert_eq!(world.refusal(UPLINK, &advertised), None);
    flood(&mut world);
    assert_eq!(owner(&world, first), Some(UPLINK));
}

#[test]
fn an_address_outside_moves_between_uplinks() {
    let mut world = world();
    let other = world.add(PortConfig::uplink());
    for uplink in [UPLINK, other, UPLINK] {
        assert_eq!(world.refusal(uplink, &advertise(ROUTER, own(9))), None);
        assert_eq!(owner(&world, own(9)), Some(uplink));
    }
}

/// What an operator has said is outside is there before it has spoken.
#[test]
fn what_is_assigned_to_an_uplink_is_no_guests() {
    let mut world = World::new();
    world.add(PortConfig {
        ipv6_guard: Some(Ipv6Guard::default()),
        ..PortConfig::guest(mac(1))
    });
    world.add(PortConfig::learning_guest());
    let uplink = world.add(PortConfig {
        addresses: vec![ipv4(1).into(), ipv4(53).into(), ipv6(1).into()],
        ..PortConfig::uplink()
    });
    for (port, number) in [(A, 1), (B, 50)] {
        for address in [ipv4(1), ipv4(53)] {
            let sender = (mac(number), address);
            assert_eq!(
                world.refusal(port, &arp(BROADCAST, mac(number), sender, address)),
                Some(Refusal::ArpSender)
            );
            let packet = udp4(mac(9), mac(number), address, (5, 5));
            assert_eq!(world.refusal(port, &packet), Some(Refusal::Ipv4Source));
        }
        assert_eq!(world.refusal(port, &advertise(number, ipv6(1))), TAKEN);
        assert_eq!(world.refusal(port, &data(number, ipv6(1))), TAKEN);
    }
    assert_eq!(world.refusal(uplink, &advertise(ROUTER, ipv6(1))), None);
    // A trunk's are in the VLAN in which networks have their addresses.
    let trunk = PortConfig {
        vlan: Vlan::Trunk {
            native: VlanId::new(7),
            allowed: VlanSet::all(),
        },
        ..world.bridge.config(uplink).unwrap().clone()
    };
    world
        .bridge
        .configure_port(world.now, uplink, trunk)
        .unwrap();
    assert_eq!(world.refusal(A, &advertise(1, ipv6(1))), TAKEN);
}

/// While an uplink's device is away its hosts are still there.
#[test]
fn what_is_in_use_outside_stays_so_while_the_link_is_down() {
    let mut world = world();
    let learning = world.add(PortConfig::learning_guest());
    let seen = [
        advertise(ROUTER, own(50)),
        router_advertisement(ROUTER, ipv6(200), 1800),
    ];
    for frame in seen {
        assert_eq!(world.refusal(UPLINK, &frame), None);
    }
    world.bridge.set_link(UPLINK, false);
    world.now += world.bridge.limits().ageing - SECOND;
    for address in [own(50), ipv6(200)] {
        assert_eq!(world.refusal(A, &advertise(1, address)), TAKEN);
    }
    let stolen = plain(BROADCAST, mac(ROUTER));
    assert_eq!(world.refusal(learning, &stolen), Some(Refusal::SourceTaken));
    // What has been silent for long is free, but for a router's.
    world.now += SECOND;
    assert_eq!(world.refusal(A, &ask(1, own(50))), None);
    assert_eq!(world.refusal(A, &advertise(1, ipv6(200))), TAKEN);
    // A guest that asked while the link was down gives way.
    world.now += 10 * SECOND;
    world.bridge.set_link(UPLINK, true);
    assert_eq!(world.refusal(UPLINK, &advertise(ROUTER, own(50))), None);
    assert_eq!(owner(&world, own(50)), Some(UPLINK));
}

/// What is checked must be seen: hosts read neighbour discovery behind any extension, and some of them in fragments.
#[test]
fn nothing_is_said_of_addresses_where_filters_do_not_see_it() {
    // A header of destination options that is `units` of 8 bytes long, all padding.
    let options = |units: u8| {
        let mut header = vec![58, units - 1, 1, units * 8 - 4];
        header.resize(usize::from(units) * 8, 0);
        header
    };
    let behind = |header: &[u8], kind, mut frame: Vec<u8>| {
        frame.splice(54..54, header.iter().copied());
        frame[20] = kind;
        let len = (frame.len() - 54) as u16;
        frame[18..20].copy_from_slice(&len.to_be_bytes());
        frame
    };
    let hidden = Some(Refusal::HiddenHeaders);
    for source in [ipv6(200), Ipv6Addr::UNSPECIFIED] {
        let mut spoofed = advertise(ROUTER, own(50));
        spoofed[22..38].copy_from_slice(&source.octets());
        let mut world = world();
        assert_eq!(world.refusal(A, &ask(1, own(50))), None);
        world.now += 4 * SECOND;
        let seen = behind(&options(4), 60, spoofed.clone());
        assert_eq!(world.refusal(UPLINK, &seen), TAKEN);
        // Its type is not in the snapshot, or is, and its target is not.
        for units in [9, 10, 20] {
            let frame = behind(&options(units), 60, spoofed.clone());
            assert_eq!(world.refusal(UPLINK, &frame), hidden, "{units}");
        }
        for place in [0, 1] {
            let fragment = behind(&[58, 0, 0, place, 0, 0, 0, 1], 44, spoofed.clone());
            assert_eq!(world.refusal(UPLINK, &fragment), hidden);
        }
        // A first fragment that ends before its header does.
        let mut cut = behind(&[58, 0, 0, 1, 0, 0, 0, 1], 44, spoofed.clone());
        cut.truncate(64);
        cut[18..20].copy_from_slice(&10_u16.to_be_bytes());
        assert_eq!(world.refusal(UPLINK, &cut), Some(Refusal::Malformed));
    }
    // Other packets come as they are, and what has passed a router is no neighbour's.
    let mut world = world();
    let mut from_afar = behind(&options(20), 60, advertise(ROUTER, far(50)));
    from_afar[21] = 60;
    assert_eq!(world.refusal(UPLINK, &from_afar), None);
    let mut fragment = behind(&[17, 0, 0, 1, 0, 0, 0, 1], 44, data(ROUTER, far(50)));
    assert_eq!(world.refusal(UPLINK, &fragment), None);
    fragment[21] = 60;
    assert_eq!(world.refusal(UPLINK, &fragment), None);
}

/// Linux and others take ARP for other kinds of hardware (6 is IEEE 802), and some take IP in SNAP frames (CVE-2021-27853).
#[test]
fn no_other_form_says_that_an_address_of_ours_is_outside() {
    let mut world = World::new();
    world.add(PortConfig {
        ipv4: Some(ipv4(1)),
        ..PortConfig::guest(mac(1))
    });
    world.add(PortConfig::guest(mac(2)));
    let uplink = world.add(PortConfig::uplink());
    let spoofed = arp(BROADCAST, mac(ROUTER), (mac(ROUTER), ipv4(1)), ipv4(2));
    assert_eq!(world.refusal(uplink, &spoofed), Some(Refusal::ArpSender));
    for hardware in [6, 7, 15] {
        let mut other = spoofed.clone();
        other[15] = hardware;
        assert_eq!(world.refusal(uplink, &other), Some(Refusal::Malformed));
    }
    let len = (spoofed.len() - 14 + 8) as u16;
    let mut snap = spoofed.clone();
    snap.splice(
        12..12,
        len.to_be_bytes()
            .into_iter()
            .chain([0xaa, 0xaa, 3, 0, 0, 0]),
    );
    assert_eq!(world.refusal(uplink, &snap), Some(Refusal::Wrapped));
}
