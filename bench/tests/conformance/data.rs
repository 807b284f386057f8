//! What is sent arrives: every byte, once, in order, whatever the layouts of both sides.

use std::io::{Read, Write};

use bench::frontend::{FEATURE_EVENT_INDEX, FEATURE_INDIRECT};
use bench::guest::{GuestConfig, Layout, ReceiveLayout, VirtualGuest};
use bench::host::{self, Echo};

use crate::support::{assert_no_violations, daemon, guest_with, pattern, wait_for};

/// Sizes around every border: a buffer, a page, a packet, the credit.
const SIZES: [usize; 12] = [
    1, 43, 44, 4051, 4052, 4053, 4096, 65_535, 65_536, 65_537, 262_144, 700_001,
];

fn echo_everything(web: &mut VirtualGuest) {
    let circuit = web.connect(2, 7).unwrap();
    for (index, size) in SIZES.into_iter().enumerate() {
        let sent = pattern(size, index as u64);
        let mut rest = &sent[..];
        let mut arrived = Vec::new();
        wait_for("the echo", &mut [web], |guests| {
            let len = guests[0].try_send(circuit, rest).unwrap();
            rest = &rest[len..];
            guests[0].try_receive(circuit, usize::MAX, &mut arrived);
            arrived.len() >= sent.len()
        });
        assert!(arrived == sent, "{size} bytes came back otherwise");
    }
    web.close(circuit);
    wait_for("the end", &mut [web], |guests| {
        guests[0].socket_count() == 0
    });
    assert_no_violations(&[web]);
}

#[test]
fn every_layout_carries_every_size_both_ways() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    for layout in Layout::ALL {
        for features in [0, FEATURE_INDIRECT, FEATURE_EVENT_INDEX] {
            let config = GuestConfig::with_layout(layout).without(features);
            echo_everything(&mut guest_with(&daemon, "web", config));
        }
    }
}

/// Half of such a ring is nothing: a device that waits for that never takes anything, and never comes to rest.
#[test]
fn a_ring_of_a_single_entry_is_served_and_neighbours_beside_it() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    let _other = Echo::start(&daemon.listener_path("db", 7)).unwrap();
    let config = GuestConfig {
        ring_size: 1,
        ..GuestConfig::with_layout(Layout::Joined)
    };
    let mut web = guest_with(&daemon, "web", config);
    let mut db = guest_with(&daemon, "db", GuestConfig::default());
    let circuit = web.connect(2, 7).unwrap();
    for round in 0..10 {
        let sent = pattern(100, round);
        web.send(circuit, &sent).unwrap();
        assert!(web.receive(circuit, sent.len()).unwrap() == sent);
        let neighbour = db.connect(2, 7).unwrap();
        db.send(neighbour, &sent).unwrap();
        assert!(db.receive(neighbour, sent.len()).unwrap() == sent);
        db.close(neighbour);
    }
    assert_no_violations(&[&web, &db]);
}

#[test]
fn every_receive_layout_takes_every_size() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    for receive_layout in [
        ReceiveLayout::One,
        ReceiveLayout::HeaderApart,
        ReceiveLayout::Cut,
    ] {
        for features in [0, FEATURE_INDIRECT] {
            let config = GuestConfig {
                receive_layout,
                ..GuestConfig::default()
            };
            echo_everything(&mut guest_with(&daemon, "web", config.without(features)));
        }
    }
}

#[test]
fn the_smallest_receive_buffers_take_a_byte_each() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    let config = GuestConfig {
        receive_layout: ReceiveLayout::Tiny,
        ..GuestConfig::default()
    };
    let mut web = guest_with(&daemon, "web", config);
    let circuit = web.connect(2, 7).unwrap();
    let sent = pattern(3000, 1);
    web.send(circuit, &sent).unwrap();
    assert!(web.receive(circuit, sent.len()).unwrap() == sent);
    assert_no_violations(&[&web]);
}

#[test]
fn memory_in_several_regions_is_one_memory() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    for region_by_region in [false, true] {
        let config = GuestConfig {
            regions: 8,
            region_by_region,
            event_ring: true,
            ..GuestConfig::with_layout(Layout::Joined)
        };
        echo_everything(&mut guest_with(&daemon, "web", config));
    }
}

#[test]
fn buffers_of_any_size_are_respected() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    for buffer_bytes in [1, 100, 2000, 70_000, 3 << 20] {
        let config = GuestConfig {
            buffer_bytes,
            ..GuestConfig::default()
        };
        let mut web = guest_with(&daemon, "web", config);
        let circuit = web.connect(2, 7).unwrap();
        let sent = pattern(2000 + buffer_bytes as usize, 3);
        let sent = &sent[..sent.len().min(500_000)];
        let sent = if buffer_bytes == 1 { &sent[..50] } else { sent };
        let mut rest = sent;
        let mut arrived = Vec::new();
        wait_for("the echo", &mut [&mut web], |guests| {
            let len = guests[0].try_send(circuit, rest).unwrap();
            rest = &rest[len..];
            guests[0].try_receive(circuit, usize::MAX, &mut arrived);
            arrived.len() >= sent.len()
        });
        assert!(arrived == sent, "with a buffer of {buffer_bytes}");
        assert_no_violations(&[&web]);
    }
}

#[test]
fn a_reader_that_pauses_gets_everything_later() {
    let daemon = daemon();
    let listener = host::listen(&daemon.listener_path("web", 80)).unwrap();
    let mut web = guest_with(&daemon, "web", GuestConfig::default());
    let circuit = web.connect(2, 80).unwrap();
    let mut program = host::accept(&listener).unwrap();
    // Far more than the socket takes: what is beyond it is stored, up to the credit.
    let sent = pattern(2 << 20, 5);
    let mut rest = &sent[..];
    wait_for("the credit's end", &mut [&mut web], |guests| {
        let len = guests[0].try_send(circuit, rest).unwrap();
        rest = &rest[len..];
        guests[0].credit(circuit) == 0
    });
    assert!(
        rest.len() < sent.len() - 200_000,
        "{} bytes are left",
        rest.len()
    );
    let reader = std::thread::spawn(move || {
        let mut arrived = vec![0; 2 << 20];
        program.read_exact(&mut arrived).unwrap();
        arrived
    });
    web.send(circuit, rest).unwrap();
    wait_for("the reader", &mut [&mut web], |_| reader.is_finished());
    assert!(reader.join().unwrap() == sent);
    assert_no_violations(&[&web]);
}

#[test]
fn a_guest_that_pauses_is_sent_no_more_than_its_credit() {
    let daemon = daemon();
    let mut web = guest_with(&daemon, "web", GuestConfig::default());
    web.listen(80);
    let path = daemon.host_socket("web");
    let sent = pattern(3 << 20, 6);
    let bytes = sent.clone();
    let program = std::thread::spawn(move || {
        let (mut stream, _) = host::call(&path, 80).unwrap();
        stream.write_all(&bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream
    });
    let circuit = web.accept(80).unwrap();
    // Its program does not read; its driver does what it always does.
    wait_for("a full buffer", &mut [&mut web], |guests| {
        guests[0].unread(circuit) > 200_000
    });
    let (arrived, _) = web.receive_to_end(circuit);
    assert!(arrived == sent);
    drop(program.join().unwrap());
    assert_no_violations(&[&web]);
}
