//! What senders leave to others: passed on to receivers that take it, done for those that do not. And tags, which move it.

use l2::bridge::{PortConfig, Vlan, VlanId, VlanSet};
use wire::net_header::NetHeader;

use super::packets::{Arrived, Packet, arrived, behind_tag, tagged};
use super::setup::{Driver, LINUX, PLAIN, Setup, frame, mac};

/// The feature of segments that say that congestion was answered.
const GUEST_ECN: u64 = 1 << 9;

fn vlan(number: u16) -> VlanId {
    VlanId::new(number).unwrap()
}

/// A port in one VLAN.
fn access(number: u8, id: u16) -> PortConfig {
    PortConfig {
        vlan: Vlan::Access(vlan(id)),
        ..PortConfig::guest(mac(number))
    }
}

/// A port in two, with tags.
fn trunk(number: u8) -> PortConfig {
    let allowed: VlanSet = [vlan(10), vlan(20)].into_iter().collect();
    PortConfig {
        vlan: Vlan::Trunk {
            native: None,
            allowed,
        },
        ..PortConfig::guest(mac(number))
    }
}

#[test]
fn large_packets_pass_uncut_to_those_who_take_them() {
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver.clone());
        let mut db = setup.guest_with(2, driver);
        for len in [1, 1448, 1449, 20_000, 65_535 - 60] {
            for packet in Packet::of_each_kind(&web, &db, len) {
                let header = packet.to_be_cut(1400);
                web.send_with(header, &packet.frame);
                setup.settle();
                let received = db.received();
                let buffers = (packet.frame.len() + 12).div_ceil(2048) as u16;
                assert_eq!(received, [(NetHeader { buffers, ..header }, packet.frame)]);
            }
        }
        assert_eq!(setup.counters(&db).segmented, 0);
    }
}

#[test]
fn large_packets_are_cut_for_those_who_take_none() {
    for kind in Driver::of_each_kind() {
        let driver = Driver {
            features: PLAIN,
            ring_size: 128,
            ..kind
        };
        let mut setup = Setup::new();
        let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
        for (len, size) in [
            (1, 1400),
            (1400, 1400),
            (1401, 1400),
            (60_000, 1432),
            (3001, 1000),
        ] {
            for packet in Packet::of_each_kind(&web, &db, len) {
                web.send_with(packet.to_be_cut(size), &packet.frame);
                setup.settle();
                let received = db.received();
                for (header, _) in &received {
                    assert_eq!(*header, super::setup::done(1), "nothing is left to be done");
                }
                let received: Vec<_> = received.iter().map(|(_, frame)| arrived(frame)).collect();
                assert_eq!(received, packet.cut(size.into()), "{len} bytes by {size}");
            }
        }
        assert_eq!(setup.counters(&db).segmented, 25);
        assert_eq!(setup.counters(&db).dropped_without_buffers, 0);
    }
}

#[test]
fn what_says_that_congestion_was_answered_is_cut_for_those_who_do_not_take_that() {
    let driver = Driver {
        features: LINUX & !GUEST_ECN,
        ..Driver::default()
    };
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
    let packets = Packet::of_each_kind(&web, &db, 5000);
    let (plain, answered) = (&packets[0], &packets[2]);
    web.send_with(plain.to_be_cut(1400), &plain.frame);
    setup.settle();
    assert_eq!(db.frames(), std::slice::from_ref(&plain.frame));
    web.send_with(answered.to_be_cut(1400), &answered.frame);
    setup.settle();
    let received: Vec<_> = db.frames().iter().map(|frame| arrived(frame)).collect();
    assert_eq!(received, answered.cut(1400));
}

#[test]
fn checksums_are_left_to_those_who_take_that_and_completed_for_the_others() {
    let mut setup = Setup::new();
    let mut web = setup.guest(1);
    let mut linux = setup.guest_with(2, Driver::default());
    let mut plain = setup.guest_with(3, Driver::plain());
    for len in [1, 2, 73, 74, 75, 1000, 1001, 1400] {
        for packet in Packet::of_each_kind(&web, &linux, len) {
            let header = packet.to_be_summed();
            web.send_with(header, &packet.frame);
            setup.settle();
            let expected = NetHeader {
                buffers: 1,
                ..header
            };
            assert_eq!(linux.received(), [(expected, packet.frame)], "{len} bytes");
        }
        for packet in Packet::of_each_kind(&web, &plain, len) {
            web.send_with(packet.to_be_summed(), &packet.frame);
            setup.settle();
            let received = plain.received();
            assert_eq!(
                received,
                [(super::setup::done(1), packet.whole)],
                "{len} bytes"
            );
            arrived(&received[0].1);
        }
    }
    assert_eq!(setup.counters(&linux).checksummed, 0);
    assert_eq!(setup.counters(&plain).checksummed, 40);
}

#[test]
fn one_packet_reaches_everybody_as_each_takes_it() {
    let mut setup = Setup::new();
    let mut web = setup.guest(1);
    let mut linux = setup.guest_with(2, Driver::default());
    let mut plain = setup.guest_with(3, Driver::plain());
    let mut other = setup.guest_with(4, Driver::plain());
    let mut packet = Packet::tcp4(&web, &linux, 4000);
    packet.frame[..6].fill(0xff);
    web.send_with(packet.to_be_cut(1400), &packet.frame);
    setup.settle();
    assert_eq!(linux.frames(), [packet.frame.clone()]);
    for guest in [&mut plain, &mut other] {
        let received: Vec<_> = guest.frames().iter().map(|frame| arrived(frame)).collect();
        assert_eq!(received, packet.cut(1400));
    }
}

#[test]
fn tags_come_and_go_and_offloads_move_with_them() {
    let mut setup = Setup::new();
    let mut tags = setup.guest_at(1, trunk(1), Driver::default());
    let mut ten = setup.guest_at(2, access(2, 10), Driver::default());
    let mut plain = setup.guest_at(3, access(3, 10), Driver::plain());
    let mut both = setup.guest_at(4, trunk(4), Driver::plain());
    for len in [1, 1000, 5000] {
        // From the trunk into the VLAN.
        for packet in Packet::of_each_kind(&tags, &ten, len) {
            let header = packet.to_be_cut(900);
            tags.send_with(behind_tag(header), &tagged(&packet.frame, 10));
            setup.settle();
            let buffers = (packet.frame.len() + 12).div_ceil(2048) as u16;
            assert_eq!(
                ten.received(),
                [(NetHeader { buffers, ..header }, packet.frame)]
            );
        }
        for packet in Packet::of_each_kind(&tags, &plain, len) {
            tags.send_with(
                behind_tag(packet.to_be_cut(900)),
                &tagged(&packet.frame, 10),
            );
            setup.settle();
            let received: Vec<_> = plain.frames().iter().map(|frame| arrived(frame)).collect();
            assert_eq!(received, packet.cut(900));
        }
        // And back.
        for packet in Packet::of_each_kind(&ten, &tags, len) {
            let header = packet.to_be_cut(900);
            ten.send_with(header, &packet.frame);
            setup.settle();
            let header = behind_tag(header);
            let buffers = (packet.frame.len() + 16).div_ceil(2048) as u16;
            let expected = (NetHeader { buffers, ..header }, tagged(&packet.frame, 10));
            assert_eq!(tags.received(), [expected]);
        }
        for packet in Packet::of_each_kind(&ten, &both, len) {
            ten.send_with(packet.to_be_cut(900), &packet.frame);
            setup.settle();
            let received: Vec<_> = both.frames().iter().map(|frame| arrived(frame)).collect();
            let cut = packet.cut(900).into_iter();
            let expected: Vec<_> = cut
                .map(|piece| Arrived {
                    vlan: Some(10),
                    ..piece
                })
                .collect();
            assert_eq!(received, expected);
        }
    }
}

#[test]
fn frames_of_every_length_keep_their_bytes_when_tags_come_and_go() {
    let mut setup = Setup::new();
    let mut tags = setup.guest_at(1, trunk(1), Driver::default());
    let mut ten = setup.guest_at(2, access(2, 10), Driver::default());
    let mut twenty = setup.guest_at(3, access(3, 20), Driver::default());
    for len in [
        14, 15, 16, 18, 60, 123, 124, 125, 126, 127, 128, 129, 132, 133, 1514,
    ] {
        let to_ten = frame(ten.mac, tags.mac, len);
        tags.send(&tagged(&to_ten, 10));
        let to_twenty = frame(twenty.mac, tags.mac, len);
        tags.send(&tagged(&to_twenty, 20));
        let to_tags = frame(tags.mac, ten.mac, len);
        ten.send(&to_tags);
        // To VLANs where they are not.
        tags.send(&tagged(&to_ten, 20));
        tags.send(&tagged(&to_ten, 30));
        tags.send(&to_ten);
        setup.settle();
        assert_eq!(ten.frames(), [to_ten], "{len} bytes");
        assert_eq!(twenty.frames(), [to_twenty], "{len} bytes");
        assert_eq!(tags.frames(), [tagged(&to_tags, 10)], "{len} bytes");
    }
}

#[test]
fn one_frame_for_everybody_leaves_with_a_tag_and_without() {
    let mut setup = Setup::new();
    let mut tags = setup.guest_at(1, trunk(1), Driver::default());
    let mut ten = setup.guest_at(2, access(2, 10), Driver::default());
    let mut other = setup.guest_at(3, access(3, 10), Driver::default());
    let mut twenty = setup.guest_at(4, access(4, 20), Driver::default());
    let sent = frame(wire::ethernet::MacAddress::BROADCAST, ten.mac, 127);
    ten.send(&sent);
    setup.settle();
    assert_eq!(tags.frames(), [tagged(&sent, 10)]);
    assert_eq!(other.frames(), [sent]);
    assert_eq!((twenty.frames(), ten.frames()), (vec![], vec![]));
}

#[test]
fn a_tag_cut_short_is_no_tag() {
    let mut setup = Setup::new();
    let mut tags = setup.guest_at(1, trunk(1), Driver::default());
    let mut ten = setup.guest_at(2, access(2, 10), Driver::default());
    let whole = tagged(&frame(ten.mac, tags.mac, 14), 10);
    for len in 14..=whole.len() {
        tags.send(&whole[..len]);
        setup.settle();
        let count = usize::from(len == whole.len());
        assert_eq!(ten.frames().len(), count, "{len} bytes");
    }
    tags.take_sent(super::setup::TRANSMIT);
    assert_eq!(tags.outstanding, 0);
}
