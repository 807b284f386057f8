//! VLANs and their tags.

use super::*;

fn vlan(number: u16) -> VlanId {
    VlanId::new(number).unwrap()
}

fn access(address: u8, number: u16) -> PortConfig {
    PortConfig {
        vlan: Vlan::Access(vlan(number)),
        ..PortConfig::guest(mac(address))
    }
}

fn trunk(address: u8, native: Option<u16>, allowed: &[u16]) -> PortConfig {
    let allowed = allowed.iter().copied().map(vlan).collect();
    PortConfig {
        vlan: Vlan::Trunk {
            native: native.map(vlan),
            allowed,
        },
        ..PortConfig::guest(mac(address))
    }
}

#[test]
fn numbers_of_vlans_have_bounds() {
    let valid: Vec<u16> = (0..=u16::MAX)
        .filter(|number| VlanId::new(*number).is_some())
        .collect();
    assert_eq!((valid.len(), valid[0], valid[4093]), (4094, 1, 4094));
    assert_eq!(VlanSet::all().iter().count(), 4094);
    assert_eq!(VlanSet::none().iter().count(), 0);
    let some: VlanSet = [vlan(1), vlan(63), vlan(64), vlan(4094)]
        .into_iter()
        .collect();
    assert_eq!(
        some.iter().map(VlanId::get).collect::<Vec<_>>(),
        [1, 63, 64, 4094]
    );
}

#[test]
fn access_ports_meet_only_in_their_vlan() {
    let mut world = World::new();
    for (address, number) in [(1, 10), (2, 10), (3, 20)] {
        world.add(access(address, number));
    }
    assert_eq!(
        world.send(A, &plain(mac(2), mac(1))),
        Verdict::Port(B, Tagging::Keep)
    );
    assert_eq!(
        world.refusal(A, &plain(mac(3), mac(1))),
        Some(Refusal::DestinationVlan)
    );
    assert_eq!(world.receivers(A, &plain(BROADCAST, mac(1))), [B]);
    assert_eq!(
        world.refusal(C, &plain(BROADCAST, mac(3))),
        Some(Refusal::NoReceiver)
    );
}

#[test]
fn an_access_port_has_no_tags_but_those_for_priority() {
    let mut world = World::new();
    world.add(access(1, 10));
    world.add(access(2, 10));
    world.add(trunk(3, None, &[10, 20]));
    for number in [10, 20, 4095] {
        let frame = tagged(plain(mac(2), mac(1)), number);
        assert_eq!(
            world.refusal(A, &frame),
            Some(Refusal::WrongVlan),
            "{number}"
        );
    }
    let priority = tagged(plain(mac(2), mac(1)), 0xe000);
    assert_eq!(world.send(A, &priority), Verdict::Port(B, Tagging::Strip));
    let to_trunk = tagged(plain(mac(3), mac(1)), 0xe000);
    let replaced = Tagging::Replace(TagControl(0xe00a));
    assert_eq!(
        world.send(A, &to_trunk),
        Verdict::Port(C, replaced),
        "its priority is kept"
    );
}

#[test]
fn a_trunk_tells_vlans_apart_by_tags() {
    let mut world = World::new();
    world.add(access(1, 10));
    world.add(access(2, 20));
    let native = world.add(trunk(3, Some(10), &[20]));
    let strict = world.add(trunk(4, None, &[10, 20]));
    let insert = |number| Tagging::Insert(TagControl(number));
    let cases = [
        (A, plain(mac(4), mac(1)), Verdict::Port(strict, insert(10))),
        (
            A,
            plain(mac(3), mac(1)),
            Verdict::Port(native, Tagging::Keep),
        ),
        (B, plain(mac(3), mac(2)), Verdict::Port(native, insert(20))),
        (
            native,
            plain(mac(1), mac(3)),
            Verdict::Port(A, Tagging::Keep),
        ),
        (
            native,
            tagged(plain(mac(1), mac(3)), 10),
            Verdict::Port(A, Tagging::Strip),
        ),
        (
            native,
            tagged(plain(mac(2), mac(3)), 20),
            Verdict::Port(B, Tagging::Strip),
        ),
        (
            native,
            plain(mac(4), mac(3)),
            Verdict::Port(strict, insert(10)),
        ),
        (
            native,
            tagged(plain(mac(4), mac(3)), 20),
            Verdict::Port(strict, Tagging::Keep),
        ),
        (
            strict,
            tagged(plain(mac(3), mac(4)), 10),
            Verdict::Port(native, Tagging::Strip),
        ),
        (
            strict,
            tagged(plain(mac(2), mac(4)), 0x6014),
            Verdict::Port(B, Tagging::Strip),
        ),
        (
            strict,
            tagged(plain(mac(1), mac(4)), 20),
            Verdict::Drop(Refusal::DestinationVlan),
        ),
        (
            strict,
            tagged(plain(mac(1), mac(4)), 30),
            Verdict::Drop(Refusal::WrongVlan),
        ),
        (
            strict,
            plain(mac(1), mac(4)),
            Verdict::Drop(Refusal::WrongVlan),
        ),
        (
            strict,
            tagged(plain(mac(1), mac(4)), 0),
            Verdict::Drop(Refusal::WrongVlan),
        ),
    ];
    for (index, (from, frame, expected)) in cases.into_iter().enumerate() {
        assert_eq!(world.send(from, &frame), expected, "case {index}");
    }
    assert_eq!(
        world.send(strict, &tagged(plain(BROADCAST, mac(4)), 20)),
        Verdict::Flood
    );
    let flood = [(B, Tagging::Strip), (native, Tagging::Keep)];
    assert_eq!(world.bridge.flood_ports(), flood);
}

/// The attack with two tags: the outer one is taken off on a trunk whose native VLAN it names, and the inner one leads on.
#[test]
fn an_inner_tag_never_becomes_the_outer_one_on_a_trunk() {
    let mut world = World::new();
    world.add(access(1, 10));
    world.add(trunk(2, None, &[10, 20]));
    let native = world.add(trunk(3, Some(10), &[20]));
    let strict = world.add(trunk(4, None, &[10, 20]));
    let double = |to, from, outer| tagged(tagged(plain(mac(to), mac(from)), 20), outer);
    assert_eq!(world.refusal(A, &double(3, 1, 0)), Some(Refusal::Wrapped));
    assert_eq!(
        world.refusal(B, &double(3, 2, 10)),
        Some(Refusal::DestinationVlan)
    );
    assert_eq!(
        world.refusal(native, &double(4, 3, 0)),
        None,
        "it keeps its outer tag"
    );
    // Otherwise a VLAN inside a VLAN passes.
    assert_eq!(
        world.send(B, &double(4, 2, 10)),
        Verdict::Port(strict, Tagging::Keep)
    );
    // At an access port it would come out as a frame of whatever VLAN its sender has chosen.
    assert_eq!(
        world.refusal(B, &double(1, 2, 10)),
        Some(Refusal::DestinationVlan)
    );
}

/// A port in one VLAN emits no tag of any kind: the switch or host behind it would take it for its own.
#[test]
fn nothing_with_a_tag_leaves_at_an_access_port() {
    let mut world = World::new();
    world.add(trunk(1, Some(10), &[10, 20]));
    world.add(access(2, 10));
    let uplink = world.add(PortConfig {
        vlan: Vlan::Access(vlan(10)),
        ..PortConfig::uplink()
    });
    let _ = world.send(uplink, &plain(BROADCAST, mac(99)));
    // Also those of providers, and what older switches take for one.
    for kind in [0x8100, 0x88a8, 0x9100, 0x9200, 0x9300_u16] {
        let inner = |to| {
            let mut frame = tagged(plain(to, mac(1)), 20);
            frame[12..14].copy_from_slice(&kind.to_be_bytes());
            frame
        };
        for to in [mac(2), mac(99), BROADCAST] {
            let double = tagged(inner(to), 10);
            assert_eq!(world.receivers(A, &double), [], "{kind:x} inside {to}");
            if kind != 0x8100 {
                assert_eq!(world.receivers(A, &inner(to)), [], "{kind:x} {to}");
            }
        }
        let mut from_outside = tagged(plain(mac(2), mac(99)), 20);
        from_outside[12..14].copy_from_slice(&kind.to_be_bytes());
        assert_eq!(world.receivers(uplink, &from_outside), [], "{kind:x}");
    }
    // A priority alone is taken off.
    let priority = tagged(plain(mac(99), mac(2)), 0xe000);
    assert_eq!(
        world.send(B, &priority),
        Verdict::Port(uplink, Tagging::Strip)
    );
}

#[test]
fn a_tag_inside_that_says_nothing_hides_nothing() {
    let mut world = World::new();
    world.add(trunk(1, None, &[10]));
    world.add(trunk(2, None, &[10]));
    let inner = |control| tagged(tagged(plain(mac(2), mac(1)), control), 10);
    assert_eq!(world.refusal(A, &inner(0)), Some(Refusal::Wrapped));
    assert_eq!(world.refusal(A, &inner(0xe000)), Some(Refusal::Wrapped));
    assert_eq!(world.refusal(A, &inner(5)), None);
    // Nor from outside, where it would hide the use of a guest's address.
    let uplink = world.add(PortConfig {
        kind: PortKind::Uplink,
        ..trunk(3, None, &[10])
    });
    let outside = tagged(tagged(plain(mac(1), mac(3)), 0xe000), 10);
    assert_eq!(world.refusal(uplink, &outside), Some(Refusal::Wrapped));
}
