//! Between guests: cut to the receiver's buffers, with credit from end to end, and never held up by a third.

use bench::frontend::FEATURE_INDIRECT;
use bench::guest::{Connection, GuestConfig, Layout, ReceiveLayout, Received, VirtualGuest};
use bench::host::Echo;

use crate::support::{
    assert_no_violations, connect, daemon, guest, guest_with, pattern, read_to_end, transfer,
    wait_for,
};

#[test]
fn what_one_guest_sends_is_cut_to_the_buffers_of_the_other() {
    let daemon = daemon();
    for layout in Layout::ALL {
        for receive_layout in [
            ReceiveLayout::One,
            ReceiveLayout::HeaderApart,
            ReceiveLayout::Cut,
        ] {
            let mut web = guest_with(&daemon, "web", GuestConfig::with_layout(layout));
            let config = GuestConfig {
                receive_layout,
                ..GuestConfig::default()
            };
            let mut db = guest_with(&daemon, "db", config);
            db.listen(1);
            let (near, far) = connect(&mut web, &mut db, 1);
            for (index, size) in [1, 4052, 4053, 65_536, 300_000].into_iter().enumerate() {
                let bytes = pattern(size, index as u64);
                transfer(&mut web, near, &mut db, far, &bytes);
                transfer(&mut db, far, &mut web, near, &bytes);
            }
            assert_no_violations(&[&web, &db]);
        }
    }
}

#[test]
fn buffers_for_one_byte_each_take_a_stream() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    let config = GuestConfig {
        receive_layout: ReceiveLayout::Tiny,
        ..GuestConfig::default()
    };
    let mut db = guest_with(&daemon, "db", config);
    db.listen(1);
    let (near, far) = connect(&mut web, &mut db, 1);
    transfer(&mut web, near, &mut db, far, &pattern(5000, 1));
    assert_no_violations(&[&web, &db]);
}

#[test]
fn both_ways_at_once() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    let (near, far) = connect(&mut web, &mut db, 1);
    let sent = [pattern(4 << 20, 1), pattern(4 << 20, 2)];
    let mut rest = [&sent[0][..], &sent[1][..]];
    let mut arrived = [Vec::new(), Vec::new()];
    wait_for("both", &mut [&mut web, &mut db], |guests| {
        for (index, end) in [near, far].into_iter().enumerate() {
            let len = guests[index].try_send(end, rest[index]).unwrap();
            rest[index] = &rest[index][len..];
            while let Received::Bytes(_) =
                guests[index].try_receive(end, usize::MAX, &mut arrived[1 - index])
            {}
        }
        arrived.iter().all(|bytes| bytes.len() == 4 << 20)
    });
    assert!(arrived == sent);
    assert_no_violations(&[&web, &db]);
}

/// Sends on every circuit until its credit is used up, while only the sender is serviced. Returns what was sent on each.
fn fill(web: &mut VirtualGuest, circuits: &[Connection], piece: usize) -> Vec<Vec<u8>> {
    let mut sent: Vec<Vec<u8>> = circuits.iter().map(|_| Vec::new()).collect();
    wait_for("every credit's end", &mut [web], |guests| {
        for (index, circuit) in circuits.iter().enumerate() {
            let len = piece.min(guests[0].credit(*circuit) as usize);
            let bytes = pattern(len, (index * 1_000_003 + sent[index].len()) as u64);
            let taken = guests[0].try_send(*circuit, &bytes).unwrap();
            sent[index].extend_from_slice(&bytes[..taken]);
        }
        circuits
            .iter()
            .all(|circuit| guests[0].credit(*circuit) == 0)
            && guests[0].packets_queued() == 0
    });
    sent
}

fn read_everything(
    web: &mut VirtualGuest,
    db: &mut VirtualGuest,
    ends: &[Connection],
    sent: &[Vec<u8>],
) {
    let mut arrived: Vec<Vec<u8>> = ends.iter().map(|_| Vec::new()).collect();
    wait_for("everything", &mut [web, db], |guests| {
        for (end, bytes) in ends.iter().zip(&mut arrived) {
            guests[1].try_receive(*end, usize::MAX, bytes);
        }
        let len = |lists: &[Vec<u8>]| lists.iter().map(Vec::len).sum::<usize>();
        len(&arrived) >= len(sent)
    });
    assert!(arrived == sent);
}

/// A receiver that does not run must not stop its sender's other circuits, and loses nothing.
#[test]
fn a_paused_receiver_holds_up_nobody_and_loses_nothing() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    // Large packets over one descriptor each, small ones, and so many descriptors that seven packets fill the ring.
    for (layout, without, piece) in [
        (Layout::Apart, 0, 1 << 20),
        (Layout::Apart, 0, 700),
        (Layout::Pages, FEATURE_INDIRECT, 1 << 20),
    ] {
        let config = GuestConfig::with_layout(layout).without(without);
        let mut web = guest_with(&daemon, "web", config);
        let (mut db, mut ci) = (guest(&daemon, "db"), guest(&daemon, "ci"));
        db.listen(1);
        ci.listen(1);
        let (towards, ends): (Vec<_>, Vec<_>) =
            (0..8).map(|_| connect(&mut web, &mut db, 1)).unzip();
        let (near, far) = connect(&mut web, &mut ci, 1);
        // db's rings are not serviced from here on.
        let sent = fill(&mut web, &towards, piece);
        assert!(sent.iter().map(Vec::len).sum::<usize>() > 1 << 20);
        // To another guest and to the host, everything goes on.
        let bytes = pattern(500_000, 9);
        transfer(&mut web, near, &mut ci, far, &bytes);
        let echo = web.connect(2, 7).unwrap();
        web.send(echo, b"still here").unwrap();
        assert_eq!(web.receive(echo, 10).unwrap(), b"still here");
        // It wakes up, and finds everything.
        read_everything(&mut web, &mut db, &ends, &sent);
        assert_no_violations(&[&web, &db, &ci]);
    }
}

/// The same with the receiver's rings stopped, as QEMU does when it pauses a VM, and the sender's too.
#[test]
fn what_waits_for_a_paused_vm_survives_the_pause_of_both() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    let (towards, ends): (Vec<_>, Vec<_>) = (0..4).map(|_| connect(&mut web, &mut db, 1)).unzip();
    let receiver_at = db.stop_rings().unwrap();
    let sent = fill(&mut web, &towards, 1 << 20);
    let sender_at = web.stop_rings().unwrap();
    db.resume_rings(receiver_at).unwrap();
    web.resume_rings(sender_at).unwrap();
    read_everything(&mut web, &mut db, &ends, &sent);
    for (near, far) in towards.iter().zip(&ends) {
        transfer(&mut db, *far, &mut web, *near, &pattern(10_000, 4));
    }
    assert_no_violations(&[&web, &db]);
}

#[test]
fn a_sender_that_closes_and_goes_is_still_heard_to_the_end() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    let (towards, ends): (Vec<_>, Vec<_>) = (0..4).map(|_| connect(&mut web, &mut db, 1)).unzip();
    let sent = fill(&mut web, &towards, 1 << 20);
    for circuit in &towards {
        web.close(*circuit);
    }
    wait_for("nothing queued", &mut [&mut web], |guests| {
        guests[0].packets_queued() == 0
    });
    web.disconnect();
    for (end, bytes) in ends.iter().zip(&sent) {
        let (arrived, ended) = read_to_end(&mut [&mut db], 0, *end);
        assert!(&arrived == bytes);
        assert_eq!(ended, Received::End);
    }
    assert_no_violations(&[&db]);
}

#[test]
fn a_sender_that_goes_without_closing_is_cut_off_by_a_reset() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    let (near, far) = connect(&mut web, &mut db, 1);
    let sent = fill(&mut web, &[near], 1 << 20);
    web.disconnect();
    let (arrived, ended) = read_to_end(&mut [&mut db], 0, far);
    assert!(sent[0].starts_with(&arrived));
    assert_eq!(ended, Received::Reset);
    assert_no_violations(&[&db]);
}
