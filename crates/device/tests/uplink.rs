//! A network's way out, with the kernel's own stack at its other end: in a network namespace of its own, so that nothing of the host is touched.

#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, Ipv6Addr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use device::net::{
    ModerationSetting, NetError, NetFabric, NetPortConfig, UplinkDevice, UplinkSnapshot,
};
use l2::{
    Ipv4Settings, StationConfig,
    bridge::{AddPortError, BridgeLimits, PortConfig, Refusal, Vlan, VlanId, VlanSet},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::ethernet::{Opened, open_packet_socket, open_tap};
use wire::ethernet::MacAddress;
use wire::net_header::{FLAG_NEEDS_CHECKSUM, GSO_UDP_FRAGMENTS, NetHeader};

const NETWORK: &str = "lan";
const OWN: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const OWN6: Ipv6Addr = Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 1);
const MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);
/// Of the host at the other end of the wire.
const HOST: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);

/// How long anything may take. Nothing takes that long unless it is broken.
const PATIENCE: Duration = Duration::from_secs(20);

/// Says inside the namespace what to test.
const WHAT: &str = "RINGDOWN_TEST_UPLINK";

#[test]
fn the_host_reaches_a_network_through_a_tap() {
    in_namespace("tap");
}

#[test]
fn the_host_reaches_a_network_through_an_interface() {
    in_namespace("interface");
}

/// The system takes tags off what comes to a packet socket. They are put back, so that a frame of another VLAN of the wire is one.
#[test]
fn the_host_reaches_a_network_through_a_trunk() {
    in_namespace("trunk");
}

/// The system throws a packet away whose offload no virtio header can express, and says so to the reader.
#[test]
fn a_packet_that_cannot_be_read_costs_itself_alone() {
    in_namespace("unreadable");
}

/// What is in use behind the uplink is not given away meanwhile.
#[test]
fn an_uplink_whose_device_was_removed_keeps_its_port_and_comes_back() {
    in_namespace("tap-gone");
    in_namespace("interface-gone");
}

/// Runs [`inside`] in a new network namespace.
fn in_namespace(what: &str) {
    let may = Command::new("unshare").args(["--net", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: this user may not make a network namespace");
        return;
    }
    let output = Command::new("unshare")
        .arg("--net")
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "inside", "--nocapture"])
        .env(WHAT, what)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    assert!(said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "the others run it, in a network namespace"]
fn inside() {
    let Ok(what) = std::env::var(WHAT) else {
        return;
    };
    match what.as_str() {
        "unreadable" => return unreadable(),
        "tap-gone" => return gone(&UplinkDevice::Tap("rdtap0".to_owned()), "rdtap0"),
        "interface-gone" => {
            return gone(&UplinkDevice::Interface("rdinner".to_owned()), "rdouter");
        }
        _ => {}
    }
    let device = match what.as_str() {
        "tap" => UplinkDevice::Tap("rdtap0".to_owned()),
        _ => {
            make_pair();
            UplinkDevice::Interface("rdinner".to_owned())
        }
    };
    let mut fabric = fabric();
    let one = VlanSet::from_iter([VlanId::DEFAULT]);
    let port = PortConfig {
        vlan: match what.as_str() {
            "trunk" => Vlan::Trunk {
                native: None,
                allowed: one,
            },
            _ => Vlan::default(),
        },
        ..PortConfig::uplink()
    };
    fabric.set_uplink(NETWORK, &device, port).unwrap();
    let waker = fabric.waker();
    let is_over = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&is_over);
    let thread = std::thread::spawn(move || {
        while !told.load(Ordering::Relaxed) {
            fabric.turn(Some(Duration::from_secs(1))).unwrap();
        }
        fabric
    });
    let host = if what == "tap" { "rdtap0" } else { "rdouter" };
    ip(&format!("link set {host} address 02:00:00:00:00:02 up"));
    ip(&format!("addr add 10.99.0.2/24 dev {host}"));
    ip(&format!("addr add fd99::2/64 dev {host} nodad"));
    if what != "trunk" {
        run("ping -c 3 -W 10 10.99.0.1");
        run("ping -c 3 -W 10 fd99::1");
        // Longer than a snapshot, and with the longest payload that the MTU allows.
        run("ping -c 3 -W 10 -s 1472 10.99.0.1");
        // Its checksum is left to us.
        TcpStream::connect((OWN, 53)).unwrap();
    }
    if what != "tap" {
        tags(host, what == "trunk");
    }
    is_over.store(true, Ordering::Relaxed);
    waker.wake();
    let fabric = thread.join().unwrap();
    let uplink = fabric.networks().remove(0).uplink.unwrap();
    let least = if what == "trunk" { 2 } else { 9 };
    assert!(
        uplink.counters.sent_frames >= least,
        "{:?}",
        uplink.counters
    );
    assert_eq!(uplink.counters.malformed_headers, 0);
    if what != "tap" {
        let wrong = uplink.bridge.refused(Refusal::WrongVlan);
        assert!(wrong >= 2, "{:?}", uplink.bridge);
    }
}

/// Two interfaces that are each other's wire. The inner one is up.
fn make_pair() {
    ip("link add rdouter type veth peer name rdinner");
    ip("link set rdinner up");
}

/// A network that answers, without an uplink.
fn fabric() -> NetFabric {
    let mut fabric = NetFabric::new().unwrap();
    fabric
        .add_network(NETWORK, BridgeLimits::default())
        .unwrap();
    let port = PortConfig {
        ipv4: Some(OWN),
        addresses: vec![OWN6.into()],
        ..PortConfig::station(MAC)
    };
    fabric.set_station(NETWORK, (port, station())).unwrap();
    fabric
}

fn uplink(fabric: &NetFabric) -> UplinkSnapshot {
    fabric.networks().remove(0).uplink.unwrap()
}

/// Turns until this is so.
fn turn_until(fabric: &mut NetFabric, mut is_so: impl FnMut(&NetFabric) -> bool) {
    let start = Instant::now();
    while !is_so(fabric) {
        assert!(start.elapsed() < PATIENCE, "it never comes to that");
        fabric.turn(Some(Duration::from_millis(10))).unwrap();
    }
}

/// The interface is the other side of a tap of ours: what is written there comes in as from a wire.
fn unreadable() {
    let wire = open_tap("rdtap1").unwrap();
    ip("link set rdtap1 up");
    let mut fabric = fabric();
    let device = UplinkDevice::Interface("rdtap1".to_owned());
    let port = PortConfig::uplink();
    fabric.set_uplink(NETWORK, &device, port).unwrap();
    let question = udp(None, &[7; 3000]);
    let fragments = NetHeader {
        flags: FLAG_NEEDS_CHECKSUM,
        gso_type: GSO_UDP_FRAGMENTS,
        gso_size: 1400,
        header_len: 42,
        checksum_start: 34,
        checksum_offset: 6,
        ..NetHeader::default()
    };
    for _ in 0..3 {
        send(&wire, fragments, &question);
    }
    turn_until(&mut fabric, |fabric| {
        uplink(fabric).counters.dropped_frames == 3
    });
    turn_until(&mut fabric, |_| is_answered(&wire, None, 4));
    assert!(uplink(&fabric).attached);
}

/// A device is removed and made again. `host` is where the host is on its wire.
fn gone(device: &UplinkDevice, host: &str) {
    let is_tap = matches!(device, UplinkDevice::Tap(_));
    if !is_tap {
        make_pair();
    }
    let mut fabric = fabric();
    let gateway = Ipv4Addr::new(10, 99, 0, 9);
    let port = PortConfig {
        ipv4: Some(gateway),
        ..PortConfig::uplink()
    };
    fabric.set_uplink(NETWORK, device, port).unwrap();
    asks(&mut fabric, host);
    let before = uplink(&fabric);
    let learned = |fabric: &NetFabric| {
        let macs = fabric.network(NETWORK).expect("it is there").macs;
        macs.iter()
            .any(|entry| entry.mac == HOST && entry.port == before.id)
    };
    assert!(before.attached && learned(&fabric));
    ip(&format!("link del {host}"));
    turn_until(&mut fabric, |fabric| !uplink(fabric).attached);
    assert_eq!(uplink(&fabric).id, before.id);
    assert!(learned(&fabric));
    // Nor is the gateway's address for others.
    let directory = tempfile::tempdir().unwrap();
    let thief = NetPortConfig {
        network: NETWORK.to_owned(),
        vm: "web".to_owned(),
        vhost_user: directory.path().join("web"),
        bridge: PortConfig {
            ipv4: Some(gateway),
            ..PortConfig::guest(MacAddress([2, 0, 0, 0, 0, 3]))
        },
        queue_pairs: 1,
        moderation: ModerationSetting::Off,
    };
    let refused = fabric.add_port(thief).unwrap_err();
    assert!(
        matches!(
            refused,
            NetError::Bridge(AddPortError::AddressTaken { port, .. }) if port == before.id
        ),
        "{refused}"
    );
    if !is_tap {
        let refused = fabric.restore_uplink(NETWORK).unwrap_err();
        assert!(matches!(refused, NetError::Uplink { .. }), "{refused}");
        assert!(!uplink(&fabric).attached);
        make_pair();
    }
    fabric.restore_uplink(NETWORK).unwrap();
    let after = uplink(&fabric);
    assert!(after.attached && after.id == before.id);
    assert!(after.counters.sent_frames >= before.counters.sent_frames);
    asks(&mut fabric, host);
    // There is nothing to do about one that works.
    fabric.restore_uplink(NETWORK).unwrap();
    asks(&mut fabric, host);
}

/// The host asks for the network's address, and is answered.
fn asks(fabric: &mut NetFabric, host: &str) {
    ip(&format!("link set {host} address 02:00:00:00:00:02 up"));
    let wire = open_packet_socket(host).unwrap();
    turn_until(fabric, |_| is_answered(&wire, None, 4));
}

/// Asks for the network's address, and says whether that was answered before. Linux loses what is sent just after an interface was set up.
fn is_answered(wire: &Opened, tag: Option<[u8; 4]>, number: u8) -> bool {
    send(wire, NetHeader::default(), &arp(tag, number));
    let mut buffer = [0; 2048];
    while let Ok((len, _)) = wire.read(&mut buffer) {
        let frame = &buffer[wire.header_len..len];
        if frame[6..14] == [&MAC.0[..], &[8, 6]].concat() {
            assert_eq!(frame[38..42], [10, 99, 0, number]);
            return true;
        }
    }
    false
}

/// Frames of several VLANs on one wire: those of the network are answered, and no others.
fn tags(host: &str, is_trunk: bool) {
    let wire = open_packet_socket(host).unwrap();
    let none = NetHeader::default();
    let (own, wrong) = match is_trunk {
        true => (Some([0x81, 0, 0, 1]), [Some([0x81, 0, 0, 20]), None]),
        false => (None, [Some([0x81, 0, 0, 20]), Some([0x81, 0, 0, 1])]),
    };
    let start = Instant::now();
    while !is_answered(&wire, own, 5) {
        assert!(start.elapsed() < PATIENCE, "it never answers");
        std::thread::sleep(Duration::from_millis(10));
    }
    for tag in wrong {
        send(&wire, none, &arp(tag, 3));
    }
    send(&wire, none, &arp(own, 4));
    // Frames do not overtake each other.
    let is_later = |frame: &[u8]| frame[12..14] == [8, 6] && frame[41] != 5;
    let (answer, tag) = receive(&wire, is_later);
    assert_eq!((&answer[38..42], tag), (&[10, 99, 0, 4][..], own));
    // A checksum that is left to us begins where the frame says, its tag counted.
    let question = question(own);
    let layer4 = (question.len() - QUESTION.len() - 8) as u16;
    let header = NetHeader {
        flags: FLAG_NEEDS_CHECKSUM,
        checksum_start: layer4,
        checksum_offset: 6,
        ..none
    };
    send(&wire, header, &question);
    let (answer, tag) = receive(&wire, |frame| frame[12..14] == [8, 0] && frame[23] == 17);
    assert_eq!((&answer[34..36], tag), (&[0, 53][..], own));
}

fn ethernet(to: [u8; 6], tag: Option<[u8; 4]>, kind: u16) -> Vec<u8> {
    let tag = tag.map(Vec::from).unwrap_or_default();
    [&to[..], &HOST.0, &tag, &kind.to_be_bytes()].concat()
}

/// 10.99.0.NUMBER asks who is the network itself.
fn arp(tag: Option<[u8; 4]>, number: u8) -> Vec<u8> {
    let mut frame = ethernet([0xff; 6], tag, 0x806);
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 2]);
    frame.extend([10, 99, 0, number, 0, 0, 0, 0, 0, 0]);
    frame.extend(OWN.octets());
    frame
}

/// Who is `ns.lan`?
const QUESTION: &[u8] = b"\0\x07\x01\0\0\x01\0\0\0\0\0\0\x02ns\x03lan\0\0\x01\0\x01";

fn question(tag: Option<[u8; 4]>) -> Vec<u8> {
    udp(tag, QUESTION)
}

/// A datagram for the network itself, with its checksum left to others.
fn udp(tag: Option<[u8; 4]>, payload: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(MAC.0, tag, 0x800);
    let udp_len = 8 + payload.len() as u16;
    let mut ip = vec![0x45, 0];
    ip.extend((20 + udp_len).to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 99, 0, 2]);
    ip.extend(OWN.octets());
    let sum = |bytes: &[u8], more: u32| {
        let words = bytes
            .chunks(2)
            .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
        let sum = words.sum::<u32>() + more;
        ((sum & 0xffff) + (sum >> 16)) as u16
    };
    let checksum = !sum(&ip, 0);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let pseudo_header = sum(&ip[12..20], 17 + u32::from(udp_len));
    frame.extend(ip);
    frame.extend([0x30, 0x39, 0, 53]);
    frame.extend(udp_len.to_be_bytes());
    frame.extend(pseudo_header.to_be_bytes());
    frame.extend(payload);
    frame
}

fn send(wire: &Opened, header: NetHeader, frame: &[u8]) {
    let bytes = [&header.encode()[..wire.header_len], frame].concat();
    rustix::io::write(&wire.descriptor, &bytes).unwrap();
}

/// The next frame from the network that is meant, and its tag.
fn receive(wire: &Opened, is_meant: impl Fn(&[u8]) -> bool) -> (Vec<u8>, Option<[u8; 4]>) {
    let mut buffer = [0; 2048];
    loop {
        let mut waits = [PollFd::new(&wire.descriptor, PollFlags::IN)];
        let timeout = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(poll(&mut waits, Some(&timeout)), Ok(1), "an answer");
        let (len, tag) = wire.read(&mut buffer).unwrap();
        let frame = &buffer[wire.header_len..len];
        if frame[6..12] == MAC.0 && is_meant(frame) {
            return (frame.to_vec(), tag);
        }
    }
}

fn station() -> StationConfig {
    StationConfig {
        mac: MAC,
        ipv4: Some(Ipv4Settings {
            address: OWN,
            prefix_len: 24,
        }),
        ipv6: Some(OWN6),
        domain: NETWORK.to_owned(),
        mtu: 1500,
        dhcp: false,
        advertise: false,
        dns: true,
        lease: Duration::from_secs(3600),
        gateway: None,
        pool: None,
        seed: 1,
    }
}

fn ip(arguments: &str) {
    run(&format!("ip {arguments}"));
}

fn run(command: &str) {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output();
    let output = output.unwrap_or_else(|error| panic!("{command}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {said}{complained}");
}
