//! Guests and VMMs that pause, restart, and go.

use std::io::{Read, Write};

use bench::frontend::{FEATURE_EVENT_INDEX, RX, TX, Vmm};
use bench::guest::{GuestConfig, Received, State, VirtualGuest};
use bench::host::{self, Echo};
use guestmem::queue::QueueSetup;
use rustix::event::{EventfdFlags, eventfd};

use crate::support::{
    assert_no_violations, connect, daemon, guest, guest_with, pattern, transfer, wait_for,
    wait_until,
};

#[test]
fn a_vmm_that_shares_no_memory_is_told_of_until_a_guest_runs() {
    let daemon = daemon();
    let mut vmm = Vmm::connect(&daemon.vhost_socket("web")).unwrap();
    vmm.set_features(vmm.offered_features()).unwrap();
    let setup = QueueSetup {
        size: 128,
        descriptors: 0x1000,
        available: 0x2000,
        used: 0x3000,
        ring_base: 0,
        event_index: true,
        indirect: true,
        packed: false,
    };
    let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    assert!(vmm.start_ring(TX, &setup, &event(), &event()).is_err());
    drop(vmm);
    let fault = || daemon.vm_status("web").unwrap()["last_fault"].clone();
    wait_until("the fault", || {
        let fault = fault();
        let said = fault.as_str().unwrap_or_default();
        said.contains("the VMM shares no memory") && said.contains("share=on")
    });
    let status = daemon.vm_status("web").unwrap();
    assert_eq!(status["state"], "waiting");
    assert_eq!(status["cut_off"], true);
    assert!(daemon.vm_status("db").unwrap()["last_fault"].is_null());
    let _web = guest(&daemon, "web");
    wait_until("a guest that runs", || fault().is_null());
    assert!(daemon.vm_status("web").unwrap()["cut_off"].is_null());
}

#[test]
fn a_guest_whose_memory_is_not_shared_is_told_of_until_one_is_seen() {
    let daemon = daemon();
    let config = GuestConfig {
        private_memory: true,
        ..GuestConfig::default()
    };
    let status = |member: &str| daemon.vm_status("web").unwrap()[member].clone();
    let mut web = guest_with(&daemon, "web", config);
    assert_eq!(status("state"), "booted");
    // As Linux does when its driver has posted its buffers.
    web.notify(RX);
    wait_until("the fault", || !status("last_fault").is_null());
    let fault = status("last_fault");
    let fault = fault.as_str().unwrap();
    assert!(
        fault.contains("memory is probably not shared") && fault.contains("share=on"),
        "{fault}"
    );
    assert_eq!(status("state"), "attached");
    assert!(daemon.vm_status("db").unwrap()["last_fault"].is_null());
    daemon.wait_for_log(fault, 1);
    // Programs get the refusal at once.
    let (_, answer) = host::call(&daemon.host_socket("web"), 80).unwrap();
    assert!(!answer.starts_with("OK"), "{answer}");
    web.disconnect();
    wait_until("the VMM's end", || status("state") == "waiting");
    assert!(!status("last_fault").is_null());
    let _web = guest(&daemon, "web");
    wait_until("a guest that runs", || status("last_fault").is_null());
    assert_eq!(status("state"), "booted");
}

#[test]
fn a_kick_of_an_empty_ring_is_no_fault_of_a_guest_that_is_seen() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    for ring in [RX, TX, RX] {
        web.notify(ring);
    }
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    let circuit = web.connect(2, 7).unwrap();
    web.send(circuit, b"seen").unwrap();
    assert_eq!(web.receive(circuit, 4).unwrap(), b"seen");
    assert!(daemon.vm_status("web").unwrap()["last_fault"].is_null());
    web.disconnect();
    // What was logged before is there by then.
    daemon.wait_for_log("VMM disconnected vm=\"web\"", 1);
    assert!(!daemon.log().contains("not shared"), "{}", daemon.log());
}

#[test]
fn a_pause_keeps_circuits_and_what_is_sent_meanwhile() {
    let daemon = daemon();
    let listener = host::listen(&daemon.listener_path("web", 80)).unwrap();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    let circuit = web.connect(2, 80).unwrap();
    let mut program = host::accept(&listener).unwrap();
    let (near, far) = connect(&mut web, &mut db, 1);
    for round in 0..20 {
        let bases = web.stop_rings().unwrap();
        let sent = pattern(10_000, round);
        program.write_all(&sent).unwrap();
        db.send(far, &sent).unwrap();
        web.resume_rings(bases).unwrap();
        assert!(web.receive(circuit, sent.len()).unwrap() == sent);
        assert!(web.receive(near, sent.len()).unwrap() == sent);
        web.send(circuit, &sent).unwrap();
        let mut arrived = vec![0; sent.len()];
        program.read_exact(&mut arrived).unwrap();
        assert!(arrived == sent);
    }
    assert_no_violations(&[&web, &db]);
}

/// A VM may be paused with packets in its ring that the device has not read.
#[test]
fn packets_in_the_ring_survive_a_pause() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    let mut web = guest(&daemon, "web");
    let circuit = web.connect(2, 7).unwrap();
    let sent = pattern(200_000, 1);
    for round in 0..20 {
        assert_eq!(web.try_send(circuit, &sent), Ok(sent.len()), "{round}");
        let bases = web.stop_rings().unwrap();
        web.resume_rings(bases).unwrap();
        assert!(web.receive(circuit, sent.len()).unwrap() == sent);
    }
    assert_no_violations(&[&web]);
}

fn check_fresh_start(restart: impl Fn(&mut VirtualGuest)) {
    let daemon = daemon();
    let listener = host::listen(&daemon.listener_path("web", 80)).unwrap();
    let idle = daemon.descriptor_count();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    let attached = daemon.descriptor_count();
    db.listen(1);
    for round in 0..5 {
        web.connect(2, 80).unwrap();
        let mut program = host::accept(&listener).unwrap();
        let (_, far) = connect(&mut web, &mut db, 1);
        restart(&mut web);
        // Both ends of earlier circuits get a reset.
        let mut rest = Vec::new();
        // Where nothing was unread, a UNIX socket can only show an end.
        let _ = program.read_to_end(&mut rest);
        assert_eq!(rest, b"");
        wait_for("the reset", &mut [&mut db], |guests| {
            guests[0].state(far) == State::Reset
        });
        // Ports may be used again at once.
        let circuit = web.connect(2, 80).unwrap();
        let mut program = host::accept(&listener).unwrap();
        web.send(circuit, b"back").unwrap();
        let mut bytes = [0; 4];
        program.read_exact(&mut bytes).unwrap();
        let (near, far) = connect(&mut web, &mut db, 1);
        transfer(&mut web, near, &mut db, far, &pattern(100_000, round));
        web.close(circuit);
        web.close(near);
        db.close(far);
        drop(program);
        wait_for("no socket", &mut [&mut web, &mut db], |guests| {
            guests[0].socket_count() == 0
        });
    }
    wait_until("as many descriptors as at first", || {
        daemon.descriptor_count() == attached
    });
    web.disconnect();
    db.disconnect();
    wait_until("as many descriptors as without a guest", || {
        daemon.descriptor_count() == idle
    });
    assert_no_violations(&[&web, &db]);
}

#[test]
fn a_reboot_resets_what_was_and_begins_anew() {
    check_fresh_start(|web| web.reboot().unwrap());
}

#[test]
fn a_reset_of_the_device_resets_what_was_and_begins_anew() {
    check_fresh_start(|web| web.reset_device().unwrap());
}

#[test]
fn another_vmm_on_the_same_line_begins_anew() {
    check_fresh_start(|web| web.reconnect().unwrap());
}

#[test]
fn a_reboot_in_the_middle_of_a_transfer_harms_nobody() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    for round in 0..10 {
        let (near, far) = connect(&mut web, &mut db, 1);
        // Parked, stored, and in the ring.
        let sent = pattern(200_000, round);
        assert_eq!(web.try_send(near, &sent), Ok(sent.len()));
        match round % 3 {
            0 => web.reboot().unwrap(),
            1 => web.reset_device().unwrap(),
            _ => web.reconnect().unwrap(),
        }
        let (arrived, ended) = db.receive_to_end(far);
        assert!(sent.starts_with(&arrived));
        assert_eq!(ended, Received::Reset);
        db.close(far);
        // The receiver restarts, while something is on its way to it.
        let (near, _) = connect(&mut web, &mut db, 1);
        assert_eq!(web.try_send(near, &sent), Ok(sent.len()));
        db.reboot().unwrap();
        wait_for("the reset", &mut [&mut web, &mut db], |guests| {
            guests[0].state(near) == State::Reset
        });
        web.close(near);
    }
    assert_no_violations(&[&web, &db]);
}

#[test]
fn a_line_that_is_removed_takes_its_circuits_along_and_can_come_back() {
    let daemon = daemon();
    let listener = host::listen(&daemon.listener_path("web", 80)).unwrap();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(1);
    web.connect(2, 80).unwrap();
    let mut program = host::accept(&listener).unwrap();
    let (_, far) = connect(&mut web, &mut db, 1);
    assert!(daemon.command(&["vm", "rm", "web"]).unwrap());
    let mut rest = Vec::new();
    let _ = program.read_to_end(&mut rest);
    assert_eq!(rest, b"");
    wait_for("the reset", &mut [&mut db], |guests| {
        guests[0].state(far) == State::Reset
    });
    assert!(host::call(&daemon.host_socket("web"), 80).is_err());
    assert!(daemon.command(&["vm", "add", "web", "--cid", "3"]).unwrap());
    web.reconnect().unwrap();
    let (near, far) = connect(&mut web, &mut db, 1);
    transfer(&mut web, near, &mut db, far, &pattern(100_000, 1));
    assert_no_violations(&[&web, &db]);
}

#[test]
fn indices_wrap() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    for features in [0, FEATURE_EVENT_INDEX] {
        let config = GuestConfig {
            first_index: 65_500,
            ..GuestConfig::default().without(features)
        };
        let mut web = guest_with(&daemon, "web", config);
        let circuit = web.connect(2, 7).unwrap();
        for value in 0..200_u8 {
            web.send(circuit, &[value]).unwrap();
            assert_eq!(web.receive(circuit, 1).unwrap(), [value]);
        }
        let bases = web.stop_rings().unwrap();
        assert!(bases[1] < 1000, "{bases:?}");
        web.resume_rings(bases).unwrap();
        web.send(circuit, b"on").unwrap();
        assert_eq!(web.receive(circuit, 2).unwrap(), b"on");
        assert_no_violations(&[&web]);
    }
}

#[test]
fn rings_of_every_size_work() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    for ring_size in [2, 4, 256, 1024] {
        let config = GuestConfig {
            ring_size,
            memory_bytes: 128 << 20,
            ..GuestConfig::default()
        };
        let mut web = guest_with(&daemon, "web", config);
        let circuit = web.connect(2, 7).unwrap();
        let sent = pattern(100_000, 1);
        let mut rest = &sent[..];
        let mut arrived = Vec::new();
        wait_for("the echo", &mut [&mut web], |guests| {
            let len = guests[0].try_send(circuit, rest).unwrap();
            rest = &rest[len..];
            guests[0].try_receive(circuit, usize::MAX, &mut arrived);
            arrived.len() >= sent.len()
        });
        assert!(arrived == sent, "in rings of {ring_size}");
        assert_no_violations(&[&web]);
    }
}

/// A guest whose rings have gone on without this daemon knows of circuits that this daemon does not.
#[test]
fn a_guest_that_lives_on_is_told_that_its_circuits_are_gone() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    for (first_index, resets) in [(0, 0), (500, 1)] {
        let config = GuestConfig {
            first_index,
            event_ring: true,
            ..GuestConfig::default()
        };
        let mut web = guest_with(&daemon, "web", config);
        wait_for("the event", &mut [&mut web], |guests| {
            guests[0].counts().transport_resets >= resets
        });
        let circuit = web.connect(2, 7).unwrap();
        web.send(circuit, b"new").unwrap();
        assert_eq!(web.receive(circuit, 3).unwrap(), b"new");
        assert_eq!(web.counts().transport_resets, resets);
        assert_no_violations(&[&web]);
    }
}
