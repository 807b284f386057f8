//! Many circuits at once, and nothing left when they are gone.

use std::io::{Read, Write};

use bench::guest::{Received, State};
use bench::host::{self, Echo};
use wire::vsock::SocketType;

use crate::support::{assert_no_violations, connect, daemon, guest, wait_for, wait_until};

const CIRCUITS: usize = 1000;

#[test]
fn a_thousand_circuits_from_a_guest_live_side_by_side_and_leave_nothing() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    let mut web = guest(&daemon, "web");
    let idle = daemon.descriptor_count();
    let circuits: Vec<_> = (0..CIRCUITS)
        .map(|_| web.dial(2, 7, SocketType::Stream))
        .collect();
    wait_for("a thousand answers", &mut [&mut web], |guests| {
        circuits
            .iter()
            .all(|circuit| guests[0].state(*circuit) == State::Connected)
    });
    assert_eq!(daemon.descriptor_count(), idle + CIRCUITS);
    for (index, circuit) in circuits.iter().enumerate() {
        web.send(*circuit, &index.to_le_bytes()).unwrap();
    }
    for (index, circuit) in circuits.iter().enumerate() {
        assert_eq!(web.receive(*circuit, 8).unwrap(), index.to_le_bytes());
    }
    for circuit in &circuits {
        web.close(*circuit);
    }
    wait_for("the end", &mut [&mut web], |guests| {
        guests[0].socket_count() == 0
    });
    wait_until("every descriptor is closed", || {
        daemon.descriptor_count() == idle
    });
    assert_no_violations(&[&web]);
}

#[test]
fn a_thousand_calls_of_programs_live_side_by_side() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    web.listen(80);
    let path = daemon.host_socket("web");
    let programs = std::thread::spawn(move || {
        let mut streams: Vec<_> = (0..CIRCUITS)
            .map(|_| host::call(&path, 80).unwrap().0)
            .collect();
        for (index, stream) in streams.iter_mut().enumerate() {
            stream.write_all(&index.to_le_bytes()).unwrap();
        }
        for (index, stream) in streams.iter_mut().enumerate() {
            let mut bytes = [0; 8];
            stream.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes, index.to_le_bytes());
        }
    });
    let mut accepted = Vec::new();
    wait_for("the programs", &mut [&mut web], |guests| {
        while let Some(circuit) = guests[0].try_accept(80) {
            accepted.push(circuit);
        }
        let mut bytes = Vec::new();
        for circuit in &accepted {
            bytes.clear();
            if let Received::Bytes(_) = guests[0].try_receive(*circuit, 64, &mut bytes) {
                guests[0].send(*circuit, &bytes).unwrap();
            }
        }
        programs.is_finished()
    });
    programs.join().unwrap();
    assert_eq!(accepted.len(), CIRCUITS);
    assert_no_violations(&[&web]);
}

#[test]
fn a_thousand_circuits_between_guests_cost_no_descriptor() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(80);
    let idle = daemon.descriptor_count();
    let circuits: Vec<_> = (0..CIRCUITS)
        .map(|_| connect(&mut web, &mut db, 80))
        .collect();
    for (index, (near, far)) in circuits.iter().enumerate() {
        web.send(*near, &index.to_le_bytes()).unwrap();
        db.send(*far, &(!index).to_le_bytes()).unwrap();
    }
    for (index, (near, far)) in circuits.iter().enumerate() {
        assert_eq!(db.receive(*far, 8).unwrap(), index.to_le_bytes());
        assert_eq!(web.receive(*near, 8).unwrap(), (!index).to_le_bytes());
    }
    assert_eq!(daemon.descriptor_count(), idle);
    for (near, far) in &circuits {
        web.close(*near);
        db.close(*far);
    }
    wait_for("the end", &mut [&mut web, &mut db], |guests| {
        guests.iter().all(|guest| guest.socket_count() == 0)
    });
    assert_no_violations(&[&web, &db]);
}

#[test]
fn dials_and_ends_in_a_loop_leave_nothing() {
    let daemon = daemon();
    let _echo = Echo::start(&daemon.listener_path("web", 7)).unwrap();
    let mut web = guest(&daemon, "web");
    let idle = daemon.descriptor_count();
    for round in 0..300_u32 {
        let circuit = web.connect(2, 7).unwrap();
        web.send(circuit, &round.to_le_bytes()).unwrap();
        assert_eq!(web.receive(circuit, 4).unwrap(), round.to_le_bytes());
        if round % 2 == 0 {
            web.close(circuit);
        } else {
            web.abort(circuit);
        }
    }
    wait_for("the end", &mut [&mut web], |guests| {
        guests[0].socket_count() == 0
    });
    wait_until("every descriptor is closed", || {
        daemon.descriptor_count() == idle
    });
    assert_no_violations(&[&web]);
}
