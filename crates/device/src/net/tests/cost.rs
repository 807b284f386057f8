//! Frames that cost much: cut into many segments, long, or for an uplink. Their sender must not keep others waiting.

use std::sync::Arc;
use std::time::Duration;

use guestmem_driver::Arena;
use l2::bridge::{BridgeLimits, PortConfig};
use wire::net_header::NetHeader;

use super::packets::Packet;
use super::setup::{Driver, Guest, LAN, Setup, TRANSMIT, frame, mac};
use super::uplinks::{OUTSIDE, datagram, flooder, narrow_uplink, on_the_wire, wide_uplink};

/// Another network, with an uplink of its own.
const DMZ: &str = "dmz";

/// The most that may be done for one guest while another waits, as docs/threat-model.md has it: bytes copied, segments made,
/// system calls.
const MOST_BYTES: usize = 4 << 20;
const MOST_SEGMENTS: usize = 4096;
const MOST_CALLS: u64 = 512;
const MOST_DESCRIPTORS: usize = 1 << 15;

/// A guest in the other network.
fn guest_of_dmz(setup: &mut Setup, number: u8) -> Guest {
    let driver = Driver::default();
    let mut config = setup.port_config(number, PortConfig::guest(mac(number)), &driver);
    config.network = DMZ.to_owned();
    setup.fabric.add_port(config).unwrap();
    let arena = Arc::new(Arena::new(32 << 20).unwrap());
    setup.guest_of(DMZ, number, driver, arena)
}

fn sent_by(setup: &Setup, network: &str) -> u64 {
    let networks = setup.fabric.networks();
    let found = networks.iter().find(|found| found.name == network);
    found.unwrap().uplink.as_ref().unwrap().counters.sent_frames
}

/// Lets a guest send this frame without pause. Has another one begin to wait after the first turn, and turns until it is served.
/// Returns how many frames were taken from the first one meanwhile, and how many the uplink was given.
fn flood(
    setup: &mut Setup,
    flooder: &mut Guest,
    (header, frame): (NetHeader, &[u8]),
    wait: impl FnOnce(),
    mut is_served: impl FnMut() -> bool,
) -> (usize, u64) {
    let mut before = (0, 0);
    let mut wait = Some(wait);
    let counted = |setup: &Setup, flooder: &Guest| {
        let taken = setup.counters(flooder).frames_from_guest;
        (taken as usize, sent_by(setup, LAN))
    };
    setup.settle();
    for _ in 0..100_000 {
        while flooder.try_enqueue(TRANSMIT, header, frame, &[]) {}
        flooder.kick();
        setup.fabric.turn(Some(Duration::ZERO)).unwrap();
        if let Some(wait) = wait.take() {
            before = counted(setup, flooder);
            wait();
        } else if is_served() {
            let after = counted(setup, flooder);
            return (after.0 - before.0, after.1 - before.1);
        }
    }
    panic!("the other one is never served");
}

#[test]
fn segments_for_an_uplink_do_not_keep_the_uplink_of_another_network_waiting() {
    let mut setup = Setup::new();
    let limits = BridgeLimits::default();
    setup.fabric.add_network(DMZ, limits).unwrap();
    let mut flooder = flooder(&mut setup);
    let outside = wide_uplink(&mut setup, LAN);
    outside
        .send(&on_the_wire(&frame(mac(1), OUTSIDE, 60)))
        .unwrap();
    let wire = narrow_uplink(&mut setup, DMZ);
    let mut waiting = guest_of_dmz(&mut setup, 2);
    let packet = datagram(&flooder, 128 * 500);
    let sent = frame(waiting.mac, OUTSIDE, 60);
    let (taken, calls) = flood(
        &mut setup,
        &mut flooder,
        (packet.to_be_cut(500), &packet.frame),
        || {
            rustix::io::write(&wire, &on_the_wire(&sent)).unwrap();
        },
        || waiting.frames() == [sent.clone()],
    );
    assert!(calls <= MOST_CALLS, "{calls} system calls");
    assert!(taken * 128 <= MOST_SEGMENTS, "{taken} frames");
}

#[test]
fn segments_for_a_guest_do_not_keep_another_guest_waiting() {
    for (len, size) in [(1366, 1), (60_000, 48), (60_000, 1400)] {
        let mut setup = Setup::new();
        let _outside = wide_uplink(&mut setup, LAN);
        let (mut flooder, plain) = (flooder(&mut setup), setup.guest_with(2, Driver::plain()));
        let (mut web, mut db) = (setup.guest(3), setup.guest(4));
        let packet = Packet::tcp4(&flooder, &plain, len);
        let sent = frame(db.mac, web.mac, 60);
        let (taken, _) = flood(
            &mut setup,
            &mut flooder,
            (packet.to_be_cut(size), &packet.frame),
            || web.send(&sent),
            || db.frames() == [sent.clone()],
        );
        let segments = taken * len.div_ceil(size.into());
        assert!(segments <= MOST_SEGMENTS, "{segments} of {size} bytes");
    }
}

#[test]
fn long_frames_do_not_keep_another_guest_waiting() {
    let mut setup = Setup::with_mtu(u16::MAX);
    let _outside = wide_uplink(&mut setup, LAN);
    let (mut flooder, other) = (flooder(&mut setup), setup.guest(2));
    let (mut web, mut db) = (setup.guest(3), setup.guest(4));
    let long = frame(other.mac, flooder.mac, 65_000);
    let sent = frame(db.mac, web.mac, 60);
    let (taken, _) = flood(
        &mut setup,
        &mut flooder,
        (NetHeader::default(), &long),
        || web.send(&sent),
        || db.frames() == [sent.clone()],
    );
    assert!(taken * long.len() <= MOST_BYTES, "{taken} frames");
}

/// A turn has room for so much work, for any guest.
#[test]
fn many_who_send_long_frames_do_not_keep_an_uplink_waiting() {
    let mut setup = Setup::with_mtu(u16::MAX);
    let wire = narrow_uplink(&mut setup, LAN);
    let mut waiting = setup.guest(1);
    let mut others: Vec<_> = (2..18).map(|number| setup.guest(number)).collect();
    let long = |to: &Guest, from: &Guest| frame(to.mac, from.mac, 65_000);
    setup.settle();
    let refill = |others: &mut Vec<Guest>| {
        for number in 0..others.len() {
            let sent = long(&others[number ^ 1], &others[number]);
            while others[number].try_enqueue(TRANSMIT, NetHeader::default(), &sent, &[]) {}
            others[number].kick();
        }
    };
    let taken = |setup: &Setup, others: &[Guest]| {
        let counters = others.iter().map(|guest| setup.counters(guest));
        counters
            .map(|counters| counters.bytes_from_guest)
            .sum::<u64>()
    };
    refill(&mut others);
    setup.fabric.turn(Some(Duration::ZERO)).unwrap();
    let before = taken(&setup, &others);
    let sent = frame(waiting.mac, OUTSIDE, 60);
    rustix::io::write(&wire, &on_the_wire(&sent)).unwrap();
    while waiting.frames() != [sent.clone()] {
        refill(&mut others);
        setup.fabric.turn(Some(Duration::ZERO)).unwrap();
    }
    let bytes = (taken(&setup, &others) - before) as usize;
    // What was done before the wire was polled, and in that same turn after it.
    assert!(bytes <= 2 * MOST_BYTES, "{bytes} bytes");
}

/// What ends a batch stays in the ring, and comes next.
#[test]
fn frames_arrive_in_their_order_however_much_they_cost() {
    for kind in Driver::of_each_kind() {
        let driver = Driver {
            ring_size: 64,
            ..kind
        };
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver.clone());
        let mut db = setup.guest_with(2, driver);
        let mut expected = Vec::new();
        for (number, (len, size)) in [(1366, 1), (400, 1), (90, 90), (1300, 10)]
            .into_iter()
            .cycle()
            .take(40)
            .enumerate()
        {
            let mut packet = Packet::tcp4(&web, &db, len);
            let last = packet.frame.len() - 1;
            packet.frame[last] = number as u8;
            web.enqueue(packet.to_be_cut(size), &packet.frame);
            expected.push(packet.frame);
        }
        web.kick();
        setup.settle();
        let received = db.frames();
        assert_eq!(received.len(), expected.len());
        assert!(received == expected, "another order");
        setup.rest();
        web.take_sent(TRANSMIT);
        assert_eq!(web.outstanding, 0);
    }
}

/// A driver whose tables of descriptors may be as long as those of any driver.
fn with_tables() -> Driver {
    Driver {
        indirect: true,
        ..Driver::default()
    }
}

#[test]
fn frames_in_many_pieces_do_not_keep_another_guest_waiting() {
    const PIECES: usize = 1000;
    let mut setup = Setup::new();
    let _outside = wide_uplink(&mut setup, LAN);
    let (mut flooder, other) = (setup.guest_with(1, with_tables()), setup.guest(2));
    let (mut web, mut db) = (setup.guest(3), setup.guest(4));
    let cut = frame(other.mac, flooder.mac, PIECES);
    let sent = frame(db.mac, web.mac, 60);
    setup.settle();
    let mut before = None;
    let taken = loop {
        while flooder.try_enqueue(TRANSMIT, NetHeader::default(), &cut, &[1; PIECES]) {}
        flooder.kick();
        setup.fabric.turn(Some(Duration::ZERO)).unwrap();
        let now = setup.counters(&flooder).frames_from_guest as usize;
        match before {
            None => {
                web.send(&sent);
                before = Some(now);
            }
            Some(before) if db.frames() == [sent.clone()] => break now - before,
            Some(before) => assert!((now - before) * PIECES <= MOST_DESCRIPTORS),
        }
    };
    assert!(taken * PIECES <= MOST_DESCRIPTORS, "{taken} frames");
}

/// Frames that a receiver with such buffers is given, and those that it is not, of so many that are sent in one moment.
fn received(buffer: Vec<u32>, frames: usize) -> (usize, u64) {
    let mut setup = Setup::new();
    let receiver = Driver {
        buffer,
        ..with_tables()
    };
    let (mut receiver, mut sender) = (setup.guest_with(1, receiver), setup.guest(2));
    let sent = frame(receiver.mac, sender.mac, 60);
    setup.settle();
    for _ in 0..frames {
        assert!(sender.try_enqueue(TRANSMIT, NetHeader::default(), &sent, &[]));
    }
    sender.kick();
    setup.settle();
    let dropped = setup.counters(&receiver).dropped_without_buffers;
    (receiver.frames().len(), dropped)
}

#[test]
fn a_receiver_with_costly_buffers_gets_few_frames() {
    // A page a piece, as Linux posts them for large frames without mergeable buffers: none is too costly.
    assert_eq!(received(vec![4096; 17], 32), (32, 0));
    // A frame and its header have 72 bytes; the tables have 1,000 descriptors.
    let (given, dropped) = received(vec![1; 1000], 32);
    assert!((1..8).contains(&given), "{given}");
    assert_eq!(given as u64 + dropped, 32);
    let empty = received(vec![0; 1000], 32);
    assert_eq!(empty, (0, 32));
}
