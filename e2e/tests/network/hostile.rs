//! A hostile guest: what it may not send is refused and counted, and others go on as if it were not there.
//!
//! `box` is the hostile one. Its kernel is stock; root in it sends frames past its stack.

use std::net::{Ipv4Addr, Ipv6Addr};

use e2e::{CommandSpec, Running, Scene, probe::PROGRAM};

use super::packet::{arp, ethernet, ipv4, ipv6, udp};
use super::transfer::{fetch, offer};
use super::{PATIENCE, address_of, assert_answers, counted, finished, port, scene};

const ALL: &str = "ff:ff:ff:ff:ff:ff";
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

/// How often each frame of the table is sent.
const TIMES: u64 = 5;

/// Sends frames through a guest's card in `lan`: each line a number and a frame.
fn send(scene: &Scene, guest: &str, lines: String) -> Running {
    let line = format!("exec {PROGRAM} frames eth0");
    let spec = CommandSpec::new(line).stdin(lines).deadline(PATIENCE);
    scene.guest(guest).start_spec(spec).unwrap()
}

fn refused(scene: &Scene, reason: &str) -> u64 {
    port(scene, "lan", "box")["refused"][reason]
        .as_u64()
        .unwrap_or(0)
}

/// Addresses of a VM in `lan`.
struct Host {
    mac: String,
    ipv4: Ipv4Addr,
    ipv6: Ipv6Addr,
}

fn host(scene: &Scene, name: &str) -> Host {
    let of = |kind| address_of(scene, "lan", name, kind);
    Host {
        mac: of("mac"),
        ipv4: of("ipv4").parse().unwrap(),
        ipv6: of("ipv6").parse().unwrap(),
    }
}

/// Frames that no guest may send, and the reason for which each is refused.
fn forbidden(own: &Host, victim: &Host) -> Vec<(&'static str, String)> {
    let nodes: Ipv6Addr = "ff02::1".parse().unwrap();
    let link_local = {
        let mut octets = own.ipv6.octets();
        octets[..8].copy_from_slice(&[0xfe, 0x80, 0, 0, 0, 0, 0, 0]);
        Ipv6Addr::from(octets)
    };
    let honest = ipv4(own.ipv4, victim.ipv4, UDP, &udp(1, 9, b"hello"));
    let claim = [
        [136, 0, 0, 0, 0x20, 0, 0, 0].as_slice(),
        &victim.ipv6.octets(),
    ]
    .concat();
    // It has its own address, and says that it is behind another card's.
    let elsewhere = [
        [136, 0, 0, 0, 0x20, 0, 0, 0].as_slice(),
        &own.ipv6.octets(),
        &[2, 1, 2, 0x11, 0x22, 0x33, 0x44, 0x55],
    ]
    .concat();
    let advertisement = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    let offer = ipv4(own.ipv4, Ipv4Addr::BROADCAST, UDP, &udp(67, 68, &[2; 240]));
    let tagged = [[0, 10, 8, 0].as_slice(), &honest].concat();
    let mut broken = honest.clone();
    broken[0] = 0x44;
    let to_victim = |from: &str, kind, payload: &[u8]| ethernet(&victim.mac, from, kind, payload);
    let from_own = |kind, payload: &[u8]| to_victim(&own.mac, kind, payload);
    vec![
        (
            "other_source",
            to_victim("02:11:22:33:44:55", IPV4, &honest),
        ),
        ("other_source", to_victim(&victim.mac, IPV4, &honest)),
        (
            "other_source",
            to_victim("03:11:22:33:44:55", IPV4, &honest),
        ),
        (
            "ipv4_source",
            from_own(IPV4, &ipv4(victim.ipv4, victim.ipv4, UDP, &udp(1, 9, b""))),
        ),
        (
            "arp_sender",
            ethernet(ALL, &own.mac, ARP, &arp(2, &own.mac, victim.ipv4, own.ipv4)),
        ),
        (
            "arp_sender",
            ethernet(ALL, &own.mac, ARP, &arp(1, &victim.mac, own.ipv4, own.ipv4)),
        ),
        (
            "ipv6_taken",
            from_own(IPV6, &ipv6(victim.ipv6, own.ipv6, UDP, &udp(1, 9, b""))),
        ),
        (
            "ipv6_taken",
            from_own(IPV6, &ipv6(own.ipv6, nodes, ICMPV6, &claim)),
        ),
        (
            "neighbour_address",
            from_own(IPV6, &ipv6(own.ipv6, nodes, ICMPV6, &elsewhere)),
        ),
        (
            "rogue_router",
            from_own(IPV6, &ipv6(link_local, nodes, ICMPV6, &advertisement)),
        ),
        ("rogue_dhcp", ethernet(ALL, &own.mac, IPV4, &offer)),
        ("wrong_vlan", from_own(0x8100, &tagged)),
        ("malformed", from_own(IPV4, &broken)),
        (
            "reserved",
            ethernet("01:80:c2:00:00:00", &own.mac, 0x0027, &[0x42, 0x42, 3, 0]),
        ),
    ]
}

#[test]
fn nobody_speaks_for_others() {
    let scene = scene();
    let (own, victim) = (host(&scene, "box"), host(&scene, "web"));
    for (reason, frame) in forbidden(&own, &victim) {
        let before = refused(&scene, reason);
        let sent = send(&scene, "box", format!("{TIMES} {frame}\n"));
        finished(sent).unwrap();
        let what = format!("{reason} of {frame}");
        super::eventually(&what, || refused(&scene, reason) >= before + TIMES);
        assert_eq!(refused(&scene, reason), before + TIMES, "{reason}: {frame}");
    }
    // Others know each other as before, and the honest frames of the guest pass.
    assert_answers(scene.guest("db"), "web");
    assert_answers(scene.guest("box"), "web");
}

#[test]
fn floods_and_storms_do_not_hold_up_others() {
    let scene = scene();
    let (own, victim) = (host(&scene, "box"), host(&scene, "web"));
    let reasons = ["other_source", "broadcast_rate", "unknown_rate"];
    let before = reasons.map(|reason| refused(&scene, reason));
    let honest = ipv4(own.ipv4, victim.ipv4, UDP, &udp(1, 9, b""));
    let lines = [
        ethernet(&victim.mac, "02:xx:xx:xx:00:01", IPV4, &honest),
        ethernet(ALL, &own.mac, ARP, &arp(1, &own.mac, own.ipv4, own.ipv4)),
        ethernet("02:xx:xx:xx:00:01", &own.mac, IPV4, &honest),
    ];
    let lines: Vec<String> = lines
        .iter()
        .map(|frame| format!("8000 {frame}\n"))
        .collect();
    let expected = offer(scene.guest("web"), 8);
    let flood = send(&scene, "box", lines.concat());
    let address = address_of(&scene, "lan", "web", "ipv4");
    assert_eq!(fetch(scene.guest("db"), &address), expected);
    finished(flood).unwrap();
    for (reason, before) in reasons.into_iter().zip(before) {
        super::eventually(reason, || refused(&scene, reason) >= before + 1000);
    }
    assert_answers(scene.guest("db"), "web");
    assert_answers(scene.guest("box"), "db");
}

#[test]
fn a_guest_that_takes_nothing_holds_up_nobody() {
    let scene = scene();
    let (deaf, sender) = (host(&scene, "box"), host(&scene, "web"));
    let before = counted(&scene, "lan", "box", "dropped_frames");
    // Its driver fills no buffer up again until the card is up.
    scene.guest("box").shell("ip link set eth0 down").unwrap();
    let datagram = ipv4(sender.ipv4, deaf.ipv4, UDP, &udp(1, 9, b"hello"));
    let frame = ethernet(&deaf.mac, &sender.mac, IPV4, &datagram);
    let expected = offer(scene.guest("web"), 4);
    let flood = send(&scene, "web", format!("4000 {frame}\n"));
    let address = address_of(&scene, "lan", "web", "ipv4");
    assert_eq!(fetch(scene.guest("db"), &address), expected);
    finished(flood).unwrap();
    let dropped = || counted(&scene, "lan", "box", "dropped_frames") - before;
    super::eventually("frames are dropped", || dropped() > 1000);
    super::address(scene.guest("box"), "eth0");
    assert_answers(scene.guest("box"), "web");
}
