//! Frames are made here byte by byte, and every rule is shown by name; `simulation` holds all of them at once against a model.

mod addresses;
mod filters;
mod outside;
#[path = "../../../vsock/src/tests/random.rs"]
mod random;
mod rates;
mod shortcut;
mod simulation;
mod vlans;

use core::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use wire::ethernet::SNAPSHOT_LEN;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const BROADCAST: MacAddress = MacAddress::BROADCAST;

/// The address of the guest with this number.
fn mac(number: u8) -> MacAddress {
    MacAddress([0x52, 0x54, 0, 0, 0, number])
}

fn ipv4(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, number)
}

/// A link-local address that is not made of a MAC address.
fn ipv6(number: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfe80, 0, 0, 0, 1, 2, 3, number.into())
}

/// The address that a host makes of its MAC address.
fn made_of(mac: MacAddress) -> Ipv6Addr {
    let mut octets = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    octets[8..].copy_from_slice(&mac.interface_identifier());
    octets.into()
}

/// A frame of this type.
fn frame(to: MacAddress, from: MacAddress, ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &ethertype.to_be_bytes(), payload].concat()
}

/// A frame of a type that no filter knows.
fn plain(to: MacAddress, from: MacAddress) -> Vec<u8> {
    frame(to, from, 0x88b5, &[0; 46])
}

/// The same frame with a tag.
fn tagged(mut frame: Vec<u8>, control: u16) -> Vec<u8> {
    let [high, low] = control.to_be_bytes();
    frame.splice(12..12, [0x81, 0, high, low]);
    frame
}

fn arp(
    to: MacAddress,
    from: MacAddress,
    sender: (MacAddress, Ipv4Addr),
    target: Ipv4Addr,
) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 1];
    packet.extend(sender.0.0);
    packet.extend(sender.1.octets());
    packet.extend([0; 6]);
    packet.extend(target.octets());
    frame(to, from, 0x0806, &packet)
}

/// An IPv4 packet, with what stands in its field for fragments.
fn ipv4_part(
    to: MacAddress,
    from: MacAddress,
    source: Ipv4Addr,
    part: u16,
    protocol: u8,
    payload: &[u8],
) -> Vec<u8> {
    let mut packet = vec![0x45, 0];
    packet.extend((20 + payload.len() as u16).to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(part.to_be_bytes());
    packet.extend([64, protocol, 0, 0]);
    packet.extend(source.octets());
    packet.extend([10, 0, 0, 99]);
    packet.extend(payload);
    frame(to, from, 0x0800, &packet)
}

fn udp4(to: MacAddress, from: MacAddress, source: Ipv4Addr, ports: (u16, u16)) -> Vec<u8> {
    ipv4_part(to, from, source, 0, 17, &udp(ports))
}

fn udp(ports: (u16, u16)) -> Vec<u8> {
    let mut header = ports.0.to_be_bytes().to_vec();
    header.extend(ports.1.to_be_bytes());
    header.extend([0, 8, 0, 0]);
    header
}

fn ipv6_packet(
    to: MacAddress,
    from: MacAddress,
    source: Ipv6Addr,
    next_header: u8,
    payload: &[u8],
) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((payload.len() as u16).to_be_bytes());
    packet.extend([next_header, 255]);
    packet.extend(source.octets());
    packet.extend(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).octets());
    packet.extend(payload);
    frame(to, from, 0x86dd, &packet)
}

/// An ICMPv6 message of which only the type matters.
fn icmpv6(kind: u8) -> Vec<u8> {
    let mut message = vec![0; 40];
    message[0] = kind;
    message
}

/// A message of neighbour discovery, with an option that names `link_layer`.
fn neighbour(kind: u8, target: Ipv6Addr, link_layer: Option<MacAddress>) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    message.extend(target.octets());
    if let Some(mac) = link_layer {
        message.extend([if kind == 135 { 1 } else { 2 }, 1]);
        message.extend(mac.0);
    }
    message
}

fn group() -> MacAddress {
    MacAddress([0x33, 0x33, 0, 0, 0, 1])
}

/// A network, and the time in it.
struct World {
    bridge: Bridge,
    now: Time,
}

impl World {
    fn new() -> World {
        World::with(BridgeLimits::default())
    }

    fn with(limits: BridgeLimits) -> World {
        World {
            bridge: Bridge::new(limits, 7),
            now: SECOND,
        }
    }

    /// Guests with the addresses 1, 2 and so on, at the ports 0, 1 and so on.
    fn guests(count: u8) -> World {
        let mut world = World::new();
        for number in 1..=count {
            world.add(PortConfig::guest(mac(number)));
        }
        world
    }

    fn add(&mut self, config: PortConfig) -> PortId {
        self.bridge.add_port(config).unwrap()
    }

    /// Sends a frame. What is to leave by an uplink does.
    fn send(&mut self, from: PortId, frame: &[u8]) -> Verdict {
        let verdict = self.classify(from, frame);
        let is_uplink = |(port, _): &(PortId, Tagging)| {
            self.bridge.config(*port).unwrap().kind == PortKind::Uplink
        };
        if verdict == Verdict::Flood && self.bridge.flood_ports().iter().any(is_uplink) {
            let snapshot = &frame[..frame.len().min(SNAPSHOT_LEN)];
            self.bridge
                .note_sent_out(self.now, from, snapshot, frame.len());
        }
        verdict
    }

    fn classify(&mut self, from: PortId, frame: &[u8]) -> Verdict {
        let snapshot = &frame[..frame.len().min(SNAPSHOT_LEN)];
        self.bridge
            .classify(self.now, from, snapshot, frame.len(), frame.len())
    }

    /// The ports that get a frame.
    fn receivers(&mut self, from: PortId, frame: &[u8]) -> Vec<PortId> {
        match self.send(from, frame) {
            Verdict::Drop(_) => Vec::new(),
            Verdict::Port(to, _) => vec![to],
            Verdict::Flood => self
                .bridge
                .flood_ports()
                .iter()
                .map(|(port, _)| *port)
                .collect(),
        }
    }

    /// Why a frame is refused.
    fn refusal(&mut self, from: PortId, frame: &[u8]) -> Option<Refusal> {
        let before = self.bridge.counters(from).unwrap_or_default();
        let refusal = match self.send(from, frame) {
            Verdict::Drop(refusal) => refusal,
            _ => return None,
        };
        let after = self.bridge.counters(from).unwrap_or_default();
        // Of a port that is gone nothing is counted.
        let counted = if refusal == Refusal::NoSuchPort { 0 } else { 1 };
        assert_eq!(after.refused(refusal), before.refused(refusal) + counted);
        assert_eq!(after.refused_total(), before.refused_total() + counted);
        Some(refusal)
    }
}

const A: PortId = PortId(0);
const B: PortId = PortId(1);
const C: PortId = PortId(2);

#[test]
fn every_refusal_has_a_number_and_a_name_of_its_own() {
    for (number, refusal) in Refusal::ALL.into_iter().enumerate() {
        assert_eq!(refusal as usize, number);
        let namesake = Refusal::ALL
            .iter()
            .filter(|other| other.name() == refusal.name());
        assert_eq!(namesake.count(), 1);
    }
}

#[test]
fn frames_go_where_their_address_is() {
    let mut world = World::guests(3);
    assert_eq!(
        world.send(A, &plain(mac(2), mac(1))),
        Verdict::Port(B, Tagging::Keep)
    );
    assert_eq!(
        world.send(C, &plain(mac(1), mac(3))),
        Verdict::Port(A, Tagging::Keep)
    );
    assert_eq!(world.receivers(B, &plain(BROADCAST, mac(2))), [A, C]);
    assert_eq!(world.receivers(B, &plain(group(), mac(2))), [A, C]);
    let counters = world.bridge.counters(B).unwrap();
    assert_eq!(
        (counters.received_frames, counters.received_bytes),
        (2, 120)
    );
    assert_eq!((counters.sent_frames, counters.sent_bytes), (1, 60));
    assert_eq!(counters.flooded_frames, 2);
    assert_eq!(world.bridge.counters(A).unwrap().sent_frames, 3);
}

#[test]
fn frames_have_a_shortest_and_a_longest_length() {
    let mut world = World::guests(2);
    let sized = |len: usize| {
        let mut frame = plain(mac(2), mac(1));
        frame.resize(len, 0);
        frame
    };
    for (len, expected) in [
        (0, Some(Refusal::TooShort)),
        (13, Some(Refusal::TooShort)),
        (14, None),
        (1514, None),
        (1515, Some(Refusal::TooLong)),
    ] {
        assert_eq!(world.refusal(A, &sized(len)), expected, "{len}");
    }
    // What is to be segmented may be longer, as long as its segments are not.
    let head = &sized(SNAPSHOT_LEN);
    for (segment_len, fits) in [(1514, true), (1515, false)] {
        let verdict = world
            .bridge
            .classify(world.now, A, head, 60_000, segment_len);
        assert_eq!(verdict == Verdict::Port(B, Tagging::Keep), fits);
    }
    // A tag is not part of the packet.
    let trunk = |number| PortConfig {
        vlan: Vlan::Trunk {
            native: None,
            allowed: VlanSet::all(),
        },
        ..PortConfig::guest(mac(number))
    };
    let (trunk, other) = (world.add(trunk(9)), world.add(trunk(10)));
    let long = |len: usize| {
        let mut frame = tagged(plain(mac(10), mac(9)), 5);
        frame.resize(len, 0);
        frame
    };
    assert_eq!(
        world.send(trunk, &long(1518)),
        Verdict::Port(other, Tagging::Keep)
    );
    assert_eq!(world.refusal(trunk, &long(1519)), Some(Refusal::TooLong));
}

#[test]
fn what_is_for_the_next_switch_goes_no_further() {
    let mut world = World::guests(2);
    for (last, expected) in [
        (0, Some(Refusal::Reserved)),
        (0x0f, Some(Refusal::Reserved)),
        (0x10, None),
    ] {
        let to = MacAddress([0x01, 0x80, 0xc2, 0, 0, last]);
        assert_eq!(world.refusal(A, &plain(to, mac(1))), expected, "{last}");
    }
}

#[test]
fn isolated_ports_reach_only_uplinks_and_stations() {
    let mut world = World::new();
    let isolated = |number| PortConfig {
        isolated: true,
        ..PortConfig::guest(mac(number))
    };
    world.add(isolated(1));
    world.add(isolated(2));
    world.add(PortConfig::guest(mac(3)));
    let uplink = world.add(PortConfig::uplink());
    let station = world.add(PortConfig::station(mac(4)));
    assert_eq!(
        world.refusal(A, &plain(mac(2), mac(1))),
        Some(Refusal::Isolated)
    );
    assert_eq!(
        world.refusal(A, &plain(mac(3), mac(1))),
        Some(Refusal::Isolated)
    );
    assert_eq!(
        world.refusal(C, &plain(mac(1), mac(3))),
        Some(Refusal::Isolated)
    );
    assert_eq!(world.receivers(A, &plain(mac(4), mac(1))), [station]);
    assert_eq!(world.receivers(station, &plain(mac(1), mac(4))), [A]);
    assert_eq!(
        world.receivers(A, &plain(BROADCAST, mac(1))),
        [uplink, station]
    );
    assert_eq!(
        world.receivers(C, &plain(BROADCAST, mac(3))),
        [uplink, station]
    );
    assert_eq!(
        world.receivers(station, &plain(BROADCAST, mac(4))),
        [A, B, C, uplink]
    );
}

#[test]
fn frames_do_not_go_from_uplink_to_uplink() {
    let mut world = World::guests(1);
    let (first, second) = (
        world.add(PortConfig::uplink()),
        world.add(PortConfig::uplink()),
    );
    assert_eq!(world.receivers(first, &plain(BROADCAST, mac(77))), [A]);
    assert_eq!(world.receivers(second, &plain(BROADCAST, mac(78))), [A]);
    assert_eq!(
        world.refusal(first, &plain(mac(78), mac(77))),
        Some(Refusal::Transit)
    );
    assert_eq!(world.receivers(A, &plain(mac(78), mac(1))), [second]);
}

#[test]
fn a_link_that_is_down_takes_and_gives_nothing() {
    let mut world = World::guests(3);
    world.bridge.set_link(B, false);
    assert_eq!(world.bridge.link(B), Some(false));
    assert_eq!(
        world.refusal(B, &plain(mac(1), mac(2))),
        Some(Refusal::LinkDown)
    );
    assert_eq!(
        world.refusal(A, &plain(mac(2), mac(1))),
        Some(Refusal::DestinationDown)
    );
    assert_eq!(world.receivers(A, &plain(BROADCAST, mac(1))), [C]);
    world.bridge.set_link(C, false);
    assert_eq!(
        world.refusal(A, &plain(BROADCAST, mac(1))),
        Some(Refusal::NoReceiver)
    );
    world.bridge.set_link(B, true);
    assert_eq!(world.receivers(A, &plain(mac(2), mac(1))), [B]);
}

#[test]
fn numbers_of_ports_are_used_again_and_nothing_else_of_them() {
    let mut world = World::guests(3);
    let _ = world.send(B, &plain(mac(1), mac(2)));
    assert_eq!(world.bridge.remove_port(B).unwrap().received_frames, 1);
    assert_eq!(world.bridge.remove_port(B), None);
    assert_eq!(
        world.refusal(B, &plain(mac(1), mac(2))),
        Some(Refusal::NoSuchPort)
    );
    assert_eq!(
        world.refusal(PortId(900), &plain(mac(1), mac(2))),
        Some(Refusal::NoSuchPort)
    );
    // The address is free again, and none is learned here.
    assert_eq!(
        world.refusal(A, &plain(mac(2), mac(1))),
        Some(Refusal::NoReceiver)
    );
    assert_eq!(world.add(PortConfig::guest(mac(9))), B);
    assert_eq!(world.bridge.counters(B), Some(PortCounters::default()));
    assert_eq!(world.receivers(A, &plain(mac(9), mac(1))), [B]);
    assert_eq!(world.bridge.ports().collect::<Vec<_>>(), [A, B, C]);
}

#[test]
fn a_network_has_a_last_port() {
    for ports_max in [2, BridgeLimits::PORTS_MAX, u16::MAX] {
        let mut world = World::with(BridgeLimits {
            ports_max,
            ..BridgeLimits::default()
        });
        let room = ports_max.min(BridgeLimits::PORTS_MAX);
        for number in 0..room {
            world.add(PortConfig::guest(MacAddress::from_u64(
                0x0200_0000_0000 + u64::from(number),
            )));
        }
        let error = world
            .bridge
            .add_port(PortConfig::guest(mac(1)))
            .unwrap_err();
        assert_eq!(error, AddPortError::TooManyPorts { ports_max: room });
        assert!(world.bridge.remove_port(A).is_some());
        assert_eq!(world.add(PortConfig::guest(mac(1))), A);
    }
}

#[test]
fn a_port_can_be_changed_as_a_whole_or_not_at_all() {
    let mut world = World::guests(2);
    let taken = world
        .bridge
        .configure_port(world.now, A, PortConfig::guest(mac(2)));
    assert_eq!(
        taken,
        Err(AddPortError::MacTaken {
            mac: mac(2),
            port: B
        })
    );
    assert_eq!(world.receivers(A, &plain(mac(2), mac(1))), [B]);
    assert_eq!(
        world
            .bridge
            .configure_port(world.now, A, PortConfig::guest(mac(7))),
        Ok(())
    );
    assert_eq!(
        world.refusal(A, &plain(mac(2), mac(1))),
        Some(Refusal::OtherSource)
    );
    assert_eq!(world.receivers(A, &plain(mac(2), mac(7))), [B]);
    assert_eq!(world.receivers(B, &plain(mac(7), mac(2))), [A]);
    assert_eq!(
        world
            .bridge
            .configure_port(world.now, C, PortConfig::guest(mac(8))),
        Err(AddPortError::NoSuchPort)
    );
    assert_eq!(
        world.bridge.counters(A).unwrap().received_frames,
        3,
        "it counts on"
    );
}
