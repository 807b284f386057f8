//! Frames of a guest: what a switch makes of them, and what a receiver does.

use std::net::Ipv4Addr;
use std::ops::ControlFlow;
use std::time::Duration;

use l2::bridge::{
    Bridge, BridgeLimits, Ipv6Guard, PortConfig, PortId, Tagging, Verdict, Vlan, VlanId,
};
use wire::ethernet::{Head, Layer3, MacAddress, Neighbour, SNAPSHOT_LEN, Transport};
use wire::net_header::{Finish, NET_HEADER_LEN, NetHeader, Offload, Offloads};
use wire::offload::{complete_checksum, segment};

use crate::Dice;

const ATTACKER: MacAddress = MacAddress([0x52, 0x54, 0, 0, 0, 1]);
const VICTIM: MacAddress = MacAddress([0x52, 0x54, 0, 0, 0, 2]);
const OWN_IPV4: [u8; 4] = [10, 0, 0, 1];

/// A frame and its header are whatever they are: nothing panics, a snapshot shows less than the frame but nothing else, what is finished in software
/// keeps all that a filter has seen, and what reaches another guest is nothing that filters are to keep from it, however that guest reads it.
pub fn frame(input: &[u8]) {
    let mut dice = Dice::new(input);
    let header = some_header(&mut dice);
    let frame = some_frame(&mut dice);
    let snapshot = &frame[..frame.len().min(SNAPSHOT_LEN)];
    compare_views(snapshot, &frame);
    let Ok(offload) = header.check(snapshot, frame.len(), Offloads::ALL) else {
        return;
    };
    assert_eq!(
        offload
            .header(1)
            .check(snapshot, frame.len(), Offloads::ALL),
        Ok(offload),
        "what a receiver gets is what was checked"
    );
    let finished = finish(&frame, &offload);
    classify(snapshot, &frame, &offload, &finished);
    leave(&frame);
}

fn some_header(dice: &mut Dice<'_>) -> NetHeader {
    let mut bytes = [0; NET_HEADER_LEN];
    let taken = dice.take(NET_HEADER_LEN);
    bytes[..taken.len()].copy_from_slice(taken);
    let mut header = NetHeader::decode(&bytes);
    assert_eq!(header.encode(), bytes);
    // Most random ones would be refused at once.
    header.header_len %= 512;
    header.checksum_offset = dice.pick(&[16, 6, 2, header.checksum_offset]);
    header.checksum_start = dice.pick(&[34, 54, 38, 58, header.checksum_start]);
    header.gso_type = dice.pick(&[0, 1, 4, 5, 0x81, header.gso_type]);
    header
}

/// A frame that begins as an honest one does and goes on with any bytes.
fn some_frame(dice: &mut Dice<'_>) -> Vec<u8> {
    let to = dice.pick(&[
        VICTIM,
        MacAddress::BROADCAST,
        MacAddress([0x33, 0x33, 0, 0, 0, 1]),
    ]);
    let mut frame = [&to.0[..], &ATTACKER.0].concat();
    for _ in 0..dice.below(3) {
        let tag = dice.pick(&[
            [0x81, 0, 0, 0],
            [0x81, 0, 0, 1],
            [0x81, 0, 0, 20],
            [0x88, 0xa8, 0, 0],
            [0x88, 0xa8, 0, 20],
            [0x91, 0, 0, 20],
        ]);
        frame.extend(tag);
    }
    if dice.one_in(8) {
        frame.extend([0, 80, 0xaa, 0xaa, 3, 0, 0, 0]);
    }
    let kind = dice.below(6);
    let protocol = dice.pick(&[6, 17, 58, 0, 44, 60, 43, dice.clone().byte()]);
    let rest = dice.rest();
    let len = rest.len() as u16;
    match kind {
        0 => frame.extend([8, 6]),
        1 | 2 => {
            frame.extend([8, 0, 0x45, 0]);
            frame.extend((len + 20).to_be_bytes());
            frame.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
            frame.extend(OWN_IPV4);
            frame.extend([10, 0, 0, 2]);
        }
        3 | 4 => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(len.to_be_bytes());
            frame.extend([protocol, 255, 0xfe, 0x80, 0, 0, 0, 0, 0, 0]);
            frame.extend([0, 0, 0, 0, 0, 0, 0, 9, 0xff, 2, 0, 0, 0, 0, 0, 0]);
            frame.extend([0, 0, 0, 0, 0, 0, 0, 1]);
        }
        _ => {}
    }
    frame.extend(rest);
    frame
}

/// With less of a frame one may not know what is behind, but never sees something else there.
fn compare_views(snapshot: &[u8], frame: &[u8]) {
    let (Some(head), Some(whole)) = (Head::parse(snapshot), Head::parse(frame)) else {
        return;
    };
    assert_eq!(head, whole);
    let less = head.layer3(snapshot, frame.len());
    match (less, head.layer3(frame, frame.len())) {
        (Layer3::Ipv4(less), Layer3::Ipv4(more)) => {
            assert_eq!((less.source, less.fragment), (more.source, more.fragment));
            assert!(less.transport == more.transport || less.transport == Transport::Hidden);
        }
        (Layer3::Ipv6(less), Layer3::Ipv6(more)) => {
            assert_eq!(less.source, more.source);
            if less.transport != Transport::Hidden {
                assert_eq!(
                    (less.transport, less.fragment),
                    (more.transport, more.fragment)
                );
                compare_neighbours(&head, snapshot, frame);
            }
        }
        (less, more) => assert_eq!(less, more),
    }
}

fn neighbour(head: &Head, bytes: &[u8], frame_len: usize) -> Option<Neighbour> {
    match head.layer3(bytes, frame_len) {
        Layer3::Ipv6(ip) => Neighbour::parse(head, &ip, bytes),
        _ => None,
    }
}

fn compare_neighbours(head: &Head, snapshot: &[u8], frame: &[u8]) {
    if let Some(less) = neighbour(head, snapshot, frame.len()).filter(|less| less.complete) {
        assert_eq!(Some(less), neighbour(head, frame, frame.len()));
    }
}

/// The frames that a receiver without offloads gets. Filters have read what came; what leaves may not say anything else to them.
fn finish(frame: &[u8], offload: &Offload) -> Vec<Vec<u8>> {
    let mut copy = frame.to_vec();
    let mut finished = Vec::new();
    match offload.finish_for(Offloads::NONE) {
        Finish::Nothing => finished.push(copy),
        Finish::Checksum(checksum) => {
            assert_eq!(
                complete_checksum(&mut copy, checksum),
                Ok(()),
                "it was checked"
            );
            finished.push(copy);
        }
        Finish::Segments => {
            let longest = offload.longest_segment_len(frame.len());
            let count = segment(&mut copy, offload, |piece| {
                assert!(piece.len() <= longest, "no longer than was said");
                finished.push(piece.to_vec());
                ControlFlow::Continue(())
            });
            assert_eq!(count, Ok(finished.len()), "it was checked");
            let header_len = offload
                .segmentation
                .map_or(0, |found| usize::from(found.header_len));
            let payload: Vec<u8> = finished
                .iter()
                .flat_map(|piece| piece[header_len..].to_vec())
                .collect();
            assert_eq!(
                payload,
                frame[header_len..],
                "every byte, once and in order"
            );
        }
    }
    compare_finished(frame, &finished);
    finished
}

fn compare_finished(frame: &[u8], finished: &[Vec<u8>]) {
    let Some(head) = Head::parse(frame) else {
        return;
    };
    for piece in finished {
        assert_eq!(Head::parse(piece), Some(head));
        match (
            head.layer3(frame, frame.len()),
            head.layer3(piece, piece.len()),
        ) {
            (Layer3::Ipv4(before), Layer3::Ipv4(after)) => {
                let seen = (
                    before.source,
                    before.destination,
                    before.transport,
                    before.fragment,
                );
                assert_eq!(
                    seen,
                    (
                        after.source,
                        after.destination,
                        after.transport,
                        after.fragment
                    )
                );
            }
            (Layer3::Ipv6(before), Layer3::Ipv6(after)) => {
                let seen = (
                    before.source,
                    before.destination,
                    before.transport,
                    before.fragment,
                );
                assert_eq!(
                    seen,
                    (
                        after.source,
                        after.destination,
                        after.transport,
                        after.fragment
                    )
                );
                let neighbours = (
                    neighbour(&head, frame, frame.len()),
                    neighbour(&head, piece, piece.len()),
                );
                assert_eq!(neighbours.0, neighbours.1);
            }
            (before, after) => assert_eq!(before, after),
        }
    }
}

/// What a guarded guest sends to another one, and what that one finds in it.
fn classify(snapshot: &[u8], frame: &[u8], offload: &Offload, finished: &[Vec<u8>]) {
    let mut bridge = Bridge::new(
        BridgeLimits {
            mtu: u16::MAX,
            ..BridgeLimits::default()
        },
        1,
    );
    let attacker = PortConfig {
        ipv4: Some(OWN_IPV4.into()),
        ipv6_guard: Some(Ipv6Guard::default()),
        ..PortConfig::guest(ATTACKER)
    };
    let victim = PortConfig {
        ipv4: Some(Ipv4Addr::new(10, 0, 0, 2)),
        ..PortConfig::guest(VICTIM)
    };
    let from = bridge.add_port(attacker).expect("there is room");
    let to = bridge.add_port(victim).expect("there is room");
    let segment_len = offload.longest_segment_len(frame.len());
    let now = Duration::from_secs(1);
    let tagging = match bridge.classify(now, from, snapshot, frame.len(), segment_len) {
        Verdict::Drop(_) => return,
        Verdict::Port(port, tagging) => {
            assert_eq!(port, to, "there is no other receiver");
            tagging
        }
        Verdict::Flood => only_port(&bridge, to),
    };
    for piece in finished {
        let mut arrived = piece.clone();
        match tagging {
            Tagging::Keep => {}
            Tagging::Strip => drop(arrived.drain(12..16)),
            Tagging::Insert(_) | Tagging::Replace(_) => panic!("a tag for a guest that has none"),
        }
        Receiver {
            frame: &arrived,
            is_guarded: true,
        }
        .read();
    }
}

/// What a guest with tags sends out of an uplink that is in one VLAN: it has no tag there, and is no server's.
fn leave(frame: &[u8]) {
    let mut bridge = Bridge::new(BridgeLimits::default(), 1);
    let vlan = |number| VlanId::new(number).expect("a VLAN");
    let trunk = PortConfig {
        vlan: Vlan::Trunk {
            native: Some(vlan(1)),
            allowed: [vlan(1), vlan(20)].into_iter().collect(),
        },
        ..PortConfig::guest(ATTACKER)
    };
    let from = bridge.add_port(trunk).expect("there is room");
    let uplink = bridge
        .add_port(PortConfig::uplink())
        .expect("there is room");
    let snapshot = &frame[..frame.len().min(SNAPSHOT_LEN)];
    let now = Duration::from_secs(1);
    let tagging = match bridge.classify(now, from, snapshot, frame.len(), frame.len()) {
        Verdict::Drop(_) => return,
        Verdict::Port(..) => panic!("no address was learned"),
        Verdict::Flood => only_port(&bridge, uplink),
    };
    let mut left = frame.to_vec();
    match tagging {
        Tagging::Keep => {}
        Tagging::Strip => drop(left.drain(12..16)),
        Tagging::Insert(_) | Tagging::Replace(_) => panic!("a tag where there is one VLAN"),
    }
    let receiver = Receiver {
        frame: &left,
        is_guarded: false,
    };
    let tags = [0x8100, 0x88a8, 0x9100, 0x9200, 0x9300];
    assert!(receiver.word(12).is_none_or(|kind| !tags.contains(&kind)));
    receiver.read();
}

fn only_port(bridge: &Bridge, expected: PortId) -> Tagging {
    match bridge.flood_ports() {
        [(port, tagging)] if *port == expected => *tagging,
        other => panic!("{other:?}"),
    }
}

/// A guest that looks through whatever any system looks through, and finds in it what filters are to keep away.
struct Receiver<'a> {
    frame: &'a [u8],
    /// The sender may use its own addresses only.
    is_guarded: bool,
}

impl Receiver<'_> {
    fn word(&self, at: usize) -> Option<usize> {
        let bytes = self.frame.get(at..at + 2)?;
        Some(usize::from(bytes[0]) << 8 | usize::from(bytes[1]))
    }

    fn read(&self) {
        assert_eq!(self.frame[6..12], ATTACKER.0, "in its own name");
        let mut at = 12;
        loop {
            match self.word(at) {
                // Tags of no VLAN, and of the VLAN that there is.
                Some(0x8100 | 0x88a8) if self.word(at + 2).is_some_and(|tag| tag & 0xfff <= 1) => {
                    at += 4
                }
                Some(0..0x600)
                    if self
                        .frame
                        .get(at + 2)
                        .is_some_and(|dsap| dsap & 0xfe == 0xaa) =>
                {
                    at += 8
                }
                Some(0x800) => return self.ipv4(at + 2),
                Some(0x86dd) => return self.ipv6(at + 2),
                Some(0x806) => return self.arp(at + 2),
                _ => return,
            }
        }
    }

    fn arp(&self, at: usize) {
        let Some(packet) = self.frame.get(at..at + 28) else {
            return;
        };
        if packet[..6] == [0, 1, 8, 0, 6, 4] {
            assert_eq!(packet[8..14], ATTACKER.0, "ARP in its own name");
            assert!(
                !self.is_guarded || packet[14..18] == OWN_IPV4 || packet[14..18] == [0; 4],
                "and for its own address"
            );
        }
    }

    fn ipv4(&self, at: usize) {
        let Some(fixed) = self.frame.get(at..at + 20) else {
            return;
        };
        let unset = fixed[12..16] == [0; 4];
        assert!(
            !self.is_guarded || fixed[0] >> 4 != 4 || unset || fixed[12..16] == OWN_IPV4,
            "its own address"
        );
        let header_len = usize::from(fixed[0] & 15) * 4;
        let first = self.word(at + 6).is_some_and(|place| place & 0x1fff == 0);
        if first && fixed[9] == 17 {
            assert_ne!(self.word(at + header_len), Some(67), "no DHCP server");
            let to = self.word(at + header_len + 2);
            assert_ne!(to, Some(68), "nothing for a DHCP client");
        }
    }

    fn ipv6(&self, at: usize) {
        let Some(fixed) = self.frame.get(at..at + 40) else {
            return;
        };
        if fixed[0] >> 4 != 6 {
            return;
        }
        let (mut next, mut at) = (fixed[6], at + 40);
        loop {
            let Some(header) = self.frame.get(at..at + 8) else {
                return self.upper(next, at);
            };
            let len = match next {
                44 if self.word(at + 2).is_some_and(|place| place >> 3 != 0) => return,
                44 => 8,
                51 => (usize::from(header[1]) + 2) * 4,
                0 | 43 | 60 | 135 | 139 | 140 => (usize::from(header[1]) + 1) * 8,
                _ => return self.upper(next, at),
            };
            (next, at) = (header[0], at + len);
        }
    }

    fn upper(&self, protocol: u8, at: usize) {
        if protocol == 58 {
            let kind = self.frame.get(at);
            assert!(!matches!(kind, Some(134 | 137)), "no router");
            let target = self.frame.get(at + 8..at + 24);
            if let (true, Some(136), Some(target)) = (self.is_guarded, kind, target) {
                assert_eq!(target[..2], [0xfe, 0x80], "an address of the network");
            }
        }
        if protocol == 17 {
            assert_ne!(self.word(at), Some(547), "no DHCPv6 server");
            assert_ne!(self.word(at + 2), Some(546), "nothing for a DHCPv6 client");
        }
    }
}
