//! Agents that mean to hold up programs of the host which are not theirs.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bench::guest::{State, VirtualGuest};
use wire::switchboard;
use wire::switchboard::link::{FromAgent, PORT};
use wire::vsock::SocketType;

use super::traffic::finish;
use super::world::*;

/// Announces a call from this port, and makes it.
fn announce_and_call(
    agent: &Agent,
    guest: &mut VirtualGuest,
    id: u64,
    port: u32,
) -> bench::guest::Connection {
    let kind = switchboard::Kind::Bytes;
    let ring = RING;
    agent.say(
        guest,
        &FromAgent::Dial {
            id,
            port,
            kind,
            ring,
        },
    );
    guest.dial_from(port, 2, HOST_PORT, SocketType::Stream)
}

#[test]
fn an_agent_that_never_stops_talking_holds_up_no_program_of_the_host() {
    let house = House::new("");
    let mut guest = house.guest("db");
    let agent = Agent::new(&house, "db", &mut guest, 1000);
    let mut listener = house.circuits().listen(HOST_PORT).unwrap();
    listener.set_timeout(Some(PATIENCE));
    announce_and_call(&agent, &mut guest, 1, 40_001);
    let accepted =
        std::thread::spawn(move || listener.accept().map(|circuit| circuit.is_zero_copy()));
    // Nothing that changes anything, and more of it than is ever read.
    let words = FromAgent::Unlisten { port: 1 }.to_string().repeat(4096);
    let mut said = 0;
    let is_zero_copy = finish(accepted, &mut guest, |guest| {
        let sent = guest.try_send(agent.session, &words.as_bytes()[said..]);
        said = (said + sent.unwrap()) % words.len();
    });
    assert!(!is_zero_copy.expect("the call arrives"));
}

#[test]
fn an_agent_that_goes_unheard_leaves_its_calls_as_streams() {
    let house = House::new("");
    let mut guest = house.guest("db");
    let agent = Agent::new(&house, "db", &mut guest, 1000);
    let mut listener = house.circuits().listen(HOST_PORT).unwrap();
    listener.set_timeout(Some(PATIENCE));
    // More than is read in a second.
    let words = FromAgent::Unlisten { port: 1 }.to_string().repeat(10_000);
    guest.send(agent.session, words.as_bytes()).unwrap();
    announce_and_call(&agent, &mut guest, 1, 40_001);
    wait_for("the call", &mut guest, |_| {
        house.listed(HOST_PORT).len() == 1
    });
    guest.abort(agent.session);
    let accepted =
        std::thread::spawn(move || listener.accept().map(|circuit| circuit.is_zero_copy()));
    let is_zero_copy = finish(accepted, &mut guest, |_| {});
    assert!(!is_zero_copy.expect("the call arrives"));
}

#[test]
fn a_vmm_that_does_not_answer_holds_up_one_arrival_of_its_agent() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    std::thread::spawn(move || {
        let mut silent = Vec::new();
        for stream in listener.incoming() {
            silent.push(stream);
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let house = House::new(&format!(
        "[[vm]]\nname = \"mute\"\ncid = 5\nwindows = \"1x8M\"\nqmp = \"{}\"\n",
        path.display()
    ));
    let mut guest = house.guest("mute");
    let mut sessions = 0;
    for source in 1..=32 {
        let session = guest.dial_from(source, 2, PORT, SocketType::Stream);
        wait_for("an answer", &mut guest, |guest| {
            guest.state(session) != State::Connecting
        });
        if guest.state(session) == State::Connected {
            sessions += 1;
            let hello = FromAgent::Hello { version: 1 }.to_string();
            guest.send(session, hello.as_bytes()).unwrap();
            // At once, so that the answer cannot be given, and the session ends.
            guest.abort(session);
        }
    }
    wait_for(
        "a question of each session but the last",
        &mut guest,
        |_| sessions <= asked.load(Ordering::SeqCst) + 1,
    );
}

#[test]
fn a_program_at_the_path_of_a_port_goes_before_one_at_circuit_sock() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let _member = house.circuits().listen(HOST_PORT).unwrap();
    let mut path = house.daemon.host_socket("web").into_os_string();
    path.push(format!("_{HOST_PORT}"));
    let owner = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let connection = guest.dial_from(40_001, 2, HOST_PORT, SocketType::Stream);
    wait_for("an answer", &mut guest, |guest| {
        guest.state(connection) == State::Connected
    });
    guest.send(connection, b"password").unwrap();
    let heard = std::thread::spawn(move || {
        let mut bytes = [0; 8];
        let (mut stream, _) = owner.accept().unwrap();
        stream.read_exact(&mut bytes).unwrap();
        bytes
    });
    assert_eq!(&finish(heard, &mut guest, |_| {}), b"password");
}

#[test]
fn a_vm_leaves_others_room_at_a_program_that_listens() {
    let house = House::new("");
    let (mut web, mut db) = (house.guest("web"), house.guest("db"));
    let agent = Agent::new(&house, "web", &mut web, 1000);
    let _listener = house.circuits().listen(HOST_PORT).unwrap();
    // Calls of which the other half never comes: as many as wait for one program.
    let calls: Vec<_> = (0..64)
        .map(|index| announce_and_call(&agent, &mut web, index, 40_000 + index as u32))
        .collect();
    wait_for("an answer to each", &mut web, |web| {
        calls
            .iter()
            .all(|call| web.state(*call) != State::Connecting)
    });
    let taken = calls
        .iter()
        .filter(|call| web.state(**call) == State::Connected)
        .count();
    assert_eq!(taken, 16, "a quarter of the places");
    let others = db.connect(2, HOST_PORT);
    assert!(others.is_ok(), "{others:?}");
}
