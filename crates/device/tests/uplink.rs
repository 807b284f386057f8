//! A network's way out, with the kernel's own stack at its other end: in a network namespace of its own, so that nothing of the host is touched.

#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, Ipv6Addr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use device::net::{NetFabric, UplinkDevice};
use memory::ethernet::{Opened, open_packet_socket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use station::{Ipv4Settings, StationConfig};
use switch::bridge::{BridgeLimits, PortConfig, Refusal, Vlan, VlanId, VlanSet};
use wire::ethernet::MacAddress;
use wire::net_header::{FLAG_NEEDS_CHECKSUM, NetHeader};

const NETWORK: &str = "lan";
const OWN: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const OWN6: Ipv6Addr = Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 1);
const MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

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
    let device = match what.as_str() {
        "tap" => UplinkDevice::Tap("rdtap0".to_owned()),
        _ => {
            ip("link add rdouter type veth peer name rdinner");
            ip("link set rdinner up");
            UplinkDevice::Interface("rdinner".to_owned())
        }
    };
    let mut fabric = NetFabric::new().unwrap();
    fabric
        .add_network(NETWORK, BridgeLimits::default())
        .unwrap();
    let config = station();
    let port = PortConfig {
        ipv4: Some(OWN),
        addresses: vec![OWN6.into()],
        ..PortConfig::station(MAC)
    };
    fabric.set_station(NETWORK, (port, config)).unwrap();
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

/// Frames of several VLANs on one wire: those of the network are answered, and no others.
fn tags(host: &str, is_trunk: bool) {
    let wire = open_packet_socket(host).unwrap();
    let none = NetHeader::default();
    let (own, wrong) = match is_trunk {
        true => (Some([0x81, 0, 0, 1]), [Some([0x81, 0, 0, 20]), None]),
        false => (None, [Some([0x81, 0, 0, 20]), Some([0x81, 0, 0, 1])]),
    };
    for tag in wrong {
        send(&wire, none, &arp(tag, 3));
    }
    send(&wire, none, &arp(own, 4));
    // Frames do not overtake each other.
    let (answer, tag) = receive(&wire, |frame| frame[12..14] == [8, 6]);
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
    let from = [2, 0, 0, 0, 0, 2];
    [&to[..], &from, &tag, &kind.to_be_bytes()].concat()
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
    let mut frame = ethernet(MAC.0, tag, 0x800);
    let udp_len = 8 + QUESTION.len() as u16;
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
    frame.extend(QUESTION);
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
        let timeout = Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
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
