//! Uplinks whose other end is this process, in place of the host.

use std::net::{Ipv6Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::Duration;

use etherparse::PacketBuilder;
use l2::bridge::{Ipv6Guard, PortConfig, Verdict};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use sys::ethernet::Opened;
use wire::ethernet::MacAddress;

use super::packets::{Packet, arrived};
use super::setup::{Driver, Guest, LAN, Setup, frame, mac};
use crate::net::{UplinkDevice, UplinkSnapshot};

/// Of a host behind an uplink.
pub(super) const OUTSIDE: MacAddress = MacAddress([2, 0, 0, 0, 9, 9]);

/// The header before a frame on the wire of [`put_uplink`].
const WIRE_HEADER_LEN: usize = 10;

/// Gives a network an uplink that ends at this descriptor.
fn put_uplink(setup: &mut Setup, network: &str, descriptor: OwnedFd) {
    let fabric = &mut setup.fabric;
    let index = fabric.network_named(network).unwrap();
    let port = PortConfig::uplink();
    let id = fabric.networks[index].bridge.add_port(port).unwrap();
    let opened = Opened {
        descriptor,
        header_len: WIRE_HEADER_LEN,
        udp_segments: false,
        tags_beside: false,
    };
    let device = UplinkDevice::Tap("wire".to_owned());
    fabric.put_uplink(index, id, device, opened).unwrap();
}

/// An uplink that takes so many frames as its buffer holds, with its other end.
pub(super) fn narrow_uplink(setup: &mut Setup, network: &str) -> OwnedFd {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let (ours, wire) = pair.unwrap();
    put_uplink(setup, network, ours);
    wire
}

/// An uplink that takes any number of frames: what its other end has no room for is lost on the way.
pub(super) fn wide_uplink(setup: &mut Setup, network: &str) -> UdpSocket {
    let socket = || UdpSocket::bind("127.0.0.1:0").unwrap();
    let (ours, wire) = (socket(), socket());
    ours.connect(wire.local_addr().unwrap()).unwrap();
    wire.connect(ours.local_addr().unwrap()).unwrap();
    ours.set_nonblocking(true).unwrap();
    put_uplink(setup, network, ours.into());
    wire
}

/// A frame as the host gives it to an uplink.
pub(super) fn on_the_wire(frame: &[u8]) -> Vec<u8> {
    [&[0; WIRE_HEADER_LEN], frame].concat()
}

/// A guest with room for many frames.
pub(super) fn flooder(setup: &mut Setup) -> Guest {
    let driver = Driver {
        ring_size: 256,
        ..Driver::default()
    };
    setup.guest_with(1, driver)
}

/// A datagram for a host behind an uplink that is to be cut.
pub(super) fn datagram(from: &Guest, len: usize) -> Packet {
    let mut packet = Packet::of_each_kind(from, from, len).swap_remove(3);
    packet.frame[..6].copy_from_slice(&OUTSIDE.0);
    packet
}

fn uplink(setup: &Setup) -> UplinkSnapshot {
    setup.fabric.networks().remove(0).uplink.unwrap()
}

/// A host that takes no more is not asked again for each segment: of each frame that did not leave as a whole one is counted.
#[test]
fn an_uplink_that_is_full_is_not_asked_for_each_segment() {
    let mut setup = Setup::new();
    let wire = narrow_uplink(&mut setup, LAN);
    let mut web = flooder(&mut setup);
    rustix::io::write(&wire, &on_the_wire(&frame(mac(1), OUTSIDE, 60))).unwrap();
    setup.settle();
    let packet = datagram(&web, 60_000);
    const FRAMES: u64 = 200;
    for _ in 0..FRAMES {
        web.enqueue(packet.to_be_cut(1400), &packet.frame);
    }
    web.kick();
    setup.settle();
    let before = uplink(&setup).counters;
    let (whole, segments) = (before.sent_frames / 43, 60_000_u64.div_ceil(1400));
    assert_eq!(segments, 43);
    assert_eq!(before.dropped_frames, FRAMES - whole);
    // What left is what came, from the first segment on.
    let mut buffer = vec![0; 2048];
    let mut payload = Vec::new();
    for _ in 0..before.sent_frames {
        let len = rustix::io::read(&wire, &mut buffer).unwrap();
        payload.extend(arrived(&buffer[WIRE_HEADER_LEN..len]).payload);
    }
    let expected = packet.payload.repeat(whole as usize + 1);
    assert_eq!(payload, expected[..payload.len()]);
    // There is room again.
    web.enqueue(packet.to_be_cut(1400), &packet.frame);
    web.kick();
    setup.settle();
    let after = uplink(&setup).counters;
    let sent = after.sent_frames - before.sent_frames;
    assert_eq!(sent, segments);
}

/// Duplicate address detection (RFC 4862, section 5.4.2), or an advertisement to all.
fn neighbour(kind: u8, from: MacAddress, source: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let [.., a, b, c] = target.octets();
    let (mac, group) = match kind {
        135 => (
            [0x33, 0x33, 0xff, a, b, c],
            [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c],
        ),
        _ => (
            [0x33, 0x33, 0, 0, 0, 1],
            [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        ),
    };
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(from.0, mac)
        .ipv6(source.octets(), group, 255)
        .icmpv6_raw(kind, 0, [0; 4])
        .write(&mut frame, &target.octets())
        .unwrap();
    frame
}

/// A guest's address is its own once those outside were asked for it, which they were not by a question that the host did not take.
#[test]
fn a_question_that_an_uplink_does_not_take_proves_nothing() {
    for is_full in [true, false] {
        let mut setup = Setup::new();
        let wire = narrow_uplink(&mut setup, LAN);
        let guard = Ipv6Guard::default();
        let config = PortConfig {
            ipv6_guard: Some(guard),
            ..PortConfig::guest(mac(1))
        };
        let mut web = setup.guest_at(1, config, Driver::default());
        rustix::io::write(&wire, &on_the_wire(&frame(mac(1), OUTSIDE, 60))).unwrap();
        setup.settle();
        while is_full && uplink(&setup).counters.dropped_frames == 0 {
            web.send(&frame(OUTSIDE, web.mac, 1500));
            setup.settle();
        }
        let before = uplink(&setup).counters;
        let address = Ipv6Addr::new(0xfe80, 0, 0, 0, 1, 2, 3, 4);
        web.send(&neighbour(135, web.mac, Ipv6Addr::UNSPECIFIED, address));
        setup.settle();
        let after = uplink(&setup).counters;
        let (left, dropped) = (
            after.sent_frames - before.sent_frames,
            after.dropped_frames - before.dropped_frames,
        );
        assert_eq!((left == 1, dropped == 1), (!is_full, is_full));
        // Ten seconds later a host out there has the address.
        let index = setup.fabric.network_named(LAN).unwrap();
        let now = setup.fabric.start.elapsed() + Duration::from_secs(10);
        let frame = neighbour(136, OUTSIDE, address, address);
        let outside = uplink(&setup).id;
        let bridge = &mut setup.fabric.networks[index].bridge;
        let verdict = bridge.classify(now, outside, &frame, frame.len(), frame.len());
        assert_eq!(verdict == Verdict::Flood, is_full, "{verdict:?}");
    }
}
