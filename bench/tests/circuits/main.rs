//! Zero-copy circuits on a real daemon, with its own windows: programs of the host use the library, and the guests are in user space, with
//! a test that says what an agent would.

// All of this is tests, where a failure is a panic.
#![allow(clippy::unwrap_used)]

mod hostile;
mod traffic;
mod world;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bench::guest::{Received, State};
use circuit::Connector;
use wire::switchboard::link::{FromAgent, FromDaemon, PORT};
use wire::switchboard::{self};
use wire::vsock::SocketType;

use traffic::*;
use world::*;

/// Set for a child process that this test starts of itself: where the circuits are.
const CHILD_SOCKET: &str = "RINGDOWN_TEST_CIRCUITS_OF_A_CHILD";

#[test]
fn a_guest_and_a_program_of_the_host_share_a_window_cycle_after_cycle() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let mut agent = Agent::new(&house, "web", &mut guest, 1000);
    house.wait_for_states("web", &mut guest, &["free", "free"]);
    let mut generations = std::collections::HashSet::new();
    for cycle in 0..20 {
        let host = host_echo(&house);
        let connection = agent.call(&mut guest, cycle, 40_001, (2, HOST_PORT));
        let given = agent.hear_circuit(&mut guest);
        assert_eq!((given.id, given.side), (cycle, switchboard::Side::First));
        assert_eq!(given.peer.to_string(), format!("host:{HOST_PORT}"));
        assert!(
            generations.insert((given.uuid, given.generation)),
            "it is used again"
        );
        let listed = house.listed(HOST_PORT);
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(listed[0]["kind"], "zero-copy");
        assert_eq!(listed[0]["from"]["vm"], "web");

        let (circuit, mut pump) = agent.map(&given);
        let program = std::thread::spawn(move || send_and_compare(circuit, 3 << 20, cycle));
        finish(program, &mut guest, |guest| pump.pump(guest, connection));
        agent.release(&mut guest, &given);
        let was_zero_copy = finish(host, &mut guest, |guest| pump.pump(guest, connection));
        assert!(was_zero_copy);
        house.wait_for_states("web", &mut guest, &["free", "free"]);
        wait_for("the end of the circuit", &mut guest, |guest| {
            pump.pump(guest, connection);
            house.listed(HOST_PORT).is_empty()
        });
    }
    let (_, metrics) = house.request("GET", "/v1/metrics");
    assert!(
        metrics.contains("ringdown_switchboard_events_total{event=\"zero_copy\"} 20"),
        "{metrics}"
    );
}

#[test]
fn a_program_of_the_host_calls_a_guest_and_shares_a_window() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let mut agent = Agent::new(&house, "web", &mut guest, 1000);
    agent.listen(&house, "web", &mut guest);
    let connector = house.circuits();
    let host = std::thread::spawn(move || {
        let circuit = connector.connect(&format!("web:{GUEST_PORT}")).unwrap();
        assert!(circuit.is_zero_copy());
        send_and_compare(circuit, 3 << 20, 7);
    });
    let connection = agent.accept(&mut guest, 1);
    let given = agent.hear_circuit(&mut guest);
    assert_eq!(given.side, switchboard::Side::Second);
    let (circuit, mut pump) = agent.map(&given);
    let program = std::thread::spawn(move || echo(circuit));
    finish(host, &mut guest, |guest| pump.pump(guest, connection));
    finish(program, &mut guest, |guest| pump.pump(guest, connection));
    agent.release(&mut guest, &given);
    house.wait_for_states("web", &mut guest, &["free", "free"]);
}

#[test]
fn who_does_not_ask_for_a_window_is_a_stream_to_who_does() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let mut agent = Agent::new(&house, "web", &mut guest, 1000);
    // A program of the guest that does not speak the protocol of circuits.
    let host = host_echo(&house);
    let connection = guest.dial_from(40_001, 2, HOST_PORT, SocketType::Stream);
    wait_for("an answer", &mut guest, |guest| {
        guest.state(connection) == State::Connected
    });
    guest.send(connection, b"plain words").unwrap();
    assert_eq!(guest.receive(connection, 11).unwrap(), b"plain words");
    assert_eq!(house.listed(HOST_PORT)[0]["kind"], "stream");
    guest.close(connection);
    assert!(!finish(host, &mut guest, |_| {}), "it is a stream");

    // Programs of the host that have not, to one of the guest that has.
    agent.listen(&house, "web", &mut guest);
    let path = house.daemon.host_socket("web");
    let plain = std::thread::spawn(move || {
        let (mut stream, answer) = bench::host::call(&path, GUEST_PORT).unwrap();
        assert!(answer.starts_with("OK "), "{answer}");
        let mut bytes = [0; 5];
        stream.read_exact(&mut bytes).unwrap();
        bytes
    });
    let connection = agent.accept(&mut guest, 2);
    let told = agent.hear(&mut guest);
    assert!(matches!(told, FromDaemon::Stream { id: 2, .. }), "{told}");
    guest.send(connection, b"hello").unwrap();
    assert_eq!(&finish(plain, &mut guest, |_| {}), b"hello");
    assert_eq!(house.states("web"), ["free", "free"]);
}

#[test]
fn two_guests_without_a_window_between_them_get_streams() {
    let house = House::new("[[rule]]\nfrom = \"web\"\nto = \"db\"\naction = \"allow\"\n");
    let (mut web, mut db) = (house.guest("web"), house.guest("db"));
    let mut caller = Agent::new(&house, "web", &mut web, 1000);
    let mut callee = Agent::new(&house, "db", &mut db, 1000);
    callee.listen(&house, "db", &mut db);
    caller.say(
        &mut web,
        &FromAgent::Dial {
            id: 5,
            port: 40_001,
            kind: switchboard::Kind::Bytes,
            ring: RING,
        },
    );
    let near = web.dial_from(40_001, 4, GUEST_PORT, SocketType::Stream);
    let far = callee.accept(&mut db, 6);
    wait_for("an answer", &mut web, |web| {
        web.state(near) == State::Connected
    });
    let dialled = FromAgent::Dialled {
        id: 5,
        cid: 4,
        port: GUEST_PORT,
    };
    caller.say(&mut web, &dialled);
    assert_eq!(
        caller.hear(&mut web).to_string(),
        format!("STREAM id=5 peer=db:{GUEST_PORT}\n")
    );
    assert_eq!(
        callee.hear(&mut db).to_string(),
        "STREAM id=6 peer=web:40001\n"
    );
    // The pair was found, and only the window was missing.
    let (_, metrics) = house.request("GET", "/v1/metrics");
    assert!(
        metrics.contains("events_total{event=\"no_window\"} 1"),
        "{metrics}"
    );
    web.send(near, b"words").unwrap();
    assert_eq!(db.receive(far, 5).unwrap(), b"words");
}

#[test]
fn an_agent_that_speaks_of_circuits_of_others_gets_nothing() {
    let house = House::new("");
    let (mut web, mut db) = (house.guest("web"), house.guest("db"));
    let mut honest = Agent::new(&house, "web", &mut web, 1000);
    let mut liar = Agent::new(&house, "db", &mut db, 1000);
    let host = host_echo(&house);
    let kind = switchboard::Kind::Bytes;
    // The very words of web's agent, before web's agent can say them.
    let dial = FromAgent::Dial {
        id: 1,
        port: 40_001,
        kind,
        ring: RING,
    };
    let dialled = FromAgent::Dialled {
        id: 1,
        cid: 2,
        port: HOST_PORT,
    };
    liar.say(&mut db, &dial);
    liar.say(&mut db, &dialled);
    assert_eq!(
        liar.hear(&mut db).to_string(),
        format!("STREAM id=1 peer=host:{HOST_PORT}\n")
    );
    honest.say(&mut web, &dial);
    let connection = web.dial_from(40_001, 2, HOST_PORT, SocketType::Stream);
    wait_for("an answer", &mut web, |web| {
        web.state(connection) == State::Connected
    });
    liar.say(&mut db, &dial);
    liar.say(&mut db, &dialled);
    assert!(matches!(liar.hear(&mut db), FromDaemon::Stream { .. }));
    // And windows of others, and words about them.
    let (uuid, _) = honest.windows[0].clone();
    liar.say(&mut db, &FromAgent::Window { uuid, len: 6 << 20 });
    honest.say(&mut web, &dialled);
    let given = honest.hear_circuit(&mut web);
    liar.release(&mut db, &given);
    liar.say(&mut db, &dial);
    liar.say(&mut db, &dialled);
    assert!(
        matches!(liar.hear(&mut db), FromDaemon::Stream { .. }),
        "it has arrived"
    );
    let mut states = house.states("web");
    states.sort();
    assert_eq!(states, ["free", "in use"]);
    let (circuit, mut pump) = honest.map(&given);
    let program = std::thread::spawn(move || send_and_compare(circuit, 1 << 20, 3));
    finish(program, &mut web, |web| pump.pump(web, connection));
    assert!(finish(host, &mut web, |web| pump.pump(web, connection)));
}

#[test]
fn a_session_ends_at_what_is_no_word_of_an_agent_and_the_next_one_may_begin() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let refused = guest.dial_from(1024, 2, PORT, SocketType::Stream);
    wait_for("a refusal", &mut guest, |guest| {
        guest.state(refused) != State::Connecting
    });
    assert_ne!(
        guest.state(refused),
        State::Connected,
        "an unprivileged port"
    );
    let hello = "HELLO version=1\n";
    let long = format!("{hello}{}\n", "a".repeat(512));
    let hostile: [&[u8]; 8] = [
        b"\n",
        b"HELLO version=2\n",
        b"LISTEN port=1\n",
        b"HELLO version=1\nHELLO version=1\n",
        b"HELLO version=1\nLISTEN port=4294967295\n",
        b"HELLO version=1\nDIAL id=1 port=5 kind=bytes ring=5000\n",
        b"HELLO version=1\n\xff\xfe\n",
        long.as_bytes(),
    ];
    for (index, words) in hostile.into_iter().enumerate() {
        let port = 900 + index as u32;
        let mut session = None;
        // The one before may not be over yet.
        wait_for("a session", &mut guest, |guest| {
            let connection =
                *session.get_or_insert_with(|| guest.dial_from(port, 2, PORT, SocketType::Stream));
            match guest.state(connection) {
                State::Connecting => false,
                State::Connected => true,
                _ => {
                    guest.abort(connection);
                    session = None;
                    false
                }
            }
        });
        let session = session.unwrap();
        guest.send(session, words).unwrap();
        let (_, ended) = guest.receive_to_end(session);
        assert_ne!(
            ended,
            Received::Nothing,
            "{:?}",
            String::from_utf8_lossy(words)
        );
        guest.close(session);
    }
    Agent::new(&house, "web", &mut guest, 1001);
    house.wait_for_states("web", &mut guest, &["free", "free"]);
}

#[test]
fn an_ended_circuit_is_reset_on_both_sides_and_its_window_comes_back() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let mut agent = Agent::new(&house, "web", &mut guest, 1000);
    let host = host_echo(&house);
    let connection = agent.call(&mut guest, 1, 40_001, (2, HOST_PORT));
    let given = agent.hear_circuit(&mut guest);
    let (circuit, pump) = agent.map(&given);
    let listed = house.listed(HOST_PORT);
    let id = listed[0]["id"].as_str().unwrap();
    assert!(house.daemon.command(&["circuit", "end", id]).unwrap());
    let revoke = FromDaemon::Revoke {
        uuid: given.uuid,
        generation: given.generation,
    };
    assert_eq!(agent.hear(&mut guest), revoke);
    wait_for("a reset", &mut guest, |guest| {
        guest.state(connection) != State::Connected
    });
    assert!(
        finish(host, &mut guest, |_| {}),
        "the program of the host has ended"
    );
    assert_eq!(
        house
            .states("web")
            .iter()
            .filter(|state| *state == "in use")
            .count(),
        1
    );
    drop((circuit, pump));
    agent.release(&mut guest, &given);
    house.wait_for_states("web", &mut guest, &["free", "free"]);
    assert_eq!(
        house.request("DELETE", &format!("/v1/circuits/{id}")).0,
        404
    );
    for wrong in ["0", "a-b", "1-", "-1", "1-2-3", "4294967296-0"] {
        assert_eq!(
            house.request("DELETE", &format!("/v1/circuits/{wrong}")).0,
            404,
            "{wrong}"
        );
    }
}

#[test]
fn a_policy_that_is_enforced_takes_windows_away() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let mut agent = Agent::new(&house, "web", &mut guest, 1000);
    let host = host_echo(&house);
    agent.call(&mut guest, 1, 40_001, (2, HOST_PORT));
    let given = agent.hear_circuit(&mut guest);
    house.enforce("[[rule]]\nfrom = \"db\"\nto = \"host\"\naction = \"deny\"\n");
    assert_eq!(
        house.listed(HOST_PORT)[0]["kind"],
        "zero-copy",
        "it is still allowed"
    );
    house.enforce("[[rule]]\nfrom = \"web\"\nto = \"host\"\naction = \"deny\"\n");
    assert!(matches!(agent.hear(&mut guest), FromDaemon::Revoke { .. }));
    assert!(finish(host, &mut guest, |_| {}));
    agent.release(&mut guest, &given);
    house.wait_for_states("web", &mut guest, &["free", "free"]);
}

#[test]
fn a_window_whose_agent_goes_is_nobodys_until_the_next_agent_has_shown_it() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let mut agent = Agent::new(&house, "web", &mut guest, 1000);
    let host = host_echo(&house);
    let connection = agent.call(&mut guest, 1, 40_001, (2, HOST_PORT));
    agent.hear_circuit(&mut guest);
    guest.close(agent.session);
    guest.close(connection);
    assert!(finish(host, &mut guest, |_| {}));
    wait_for("a window that is not free", &mut guest, |_| {
        house.states("web").iter().all(|state| state != "free")
    });
    Agent::new(&house, "web", &mut guest, 1001);
    house.wait_for_states("web", &mut guest, &["free", "free"]);
}

#[test]
fn a_half_that_never_comes_leaves_a_stream() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let agent = Agent::new(&house, "web", &mut guest, 1000);
    agent.listen(&house, "web", &mut guest);
    let connector = house.circuits();
    let started = Instant::now();
    let host = std::thread::spawn(move || connector.connect(&format!("web:{GUEST_PORT}")).unwrap());
    // The guest's agent takes the call and never says so.
    let circuit = finish(host, &mut guest, |_| {});
    assert!(!circuit.is_zero_copy());
    assert!(
        started.elapsed() >= Duration::from_secs(5),
        "it was waited for"
    );
}

#[test]
fn what_a_program_of_the_host_cannot_have_it_is_told_why() {
    let house = House::new("[[rule]]\nfrom = \"host\"\nto = \"db\"\naction = \"deny\"\n");
    let mut guest = house.guest("web");
    let _db = house.guest("db");
    let refusal = |to: &str| {
        let (connector, to) = (house.circuits(), to.to_owned());
        std::thread::spawn(move || connector.connect(&to).err().map(|error| error.to_string()))
    };
    let cases = [
        ("nobody:1", "no VM named nobody"),
        ("host:1", "no VM named host"),
        ("db:1", "no rule allows it"),
        ("web:1", "nothing listens on that port"),
        ("3:1", "nothing listens on that port"),
    ];
    for (to, expected) in cases {
        let words = finish(refusal(to), &mut guest, |_| {}).expect("a refusal");
        assert!(words.contains(expected), "{to}: {words}");
    }
    let _first = house.circuits().listen(HOST_PORT).unwrap();
    for port in [HOST_PORT, 1005, 1006, 1007] {
        assert!(house.circuits().listen(port).is_err(), "{port}");
    }
    let _only = house.circuits().listen_to_vm(HOST_PORT, "web").unwrap();
    assert!(house.circuits().listen_to_vm(HOST_PORT, "nobody").is_err());

    let path = house.daemon.control_socket().with_file_name("circuit.sock");
    let say = |words: &[u8]| {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(words).unwrap();
        let mut answer = String::new();
        // A daemon that has not read everything ends the connection with an error.
        let _ = stream.read_to_string(&mut answer);
        answer
    };
    let fits = format!("{}\n", "a".repeat(511));
    assert!(say(fits.as_bytes()).starts_with("ERROR code=invalid expected a line that begins"));
    let too_long = format!("{}\n", "a".repeat(512));
    assert!(
        say(too_long.as_bytes()).starts_with("ERROR code=invalid expected a line of at most 512")
    );
    assert!(
        say(b"CONNECT to=web:1 kind=bytes ring=4096 and=more\n").starts_with("ERROR code=invalid")
    );
    let both = say(b"LISTEN port=9 kind=bytes ring=4096\nmore");
    assert!(both.starts_with("ERROR code=invalid"), "{both}");
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
        .write_all(b"LISTEN port=9 kind=bytes ring=4096\n")
        .unwrap();
    let mut answer = [0; 17];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"LISTENING port=9\n");
    stream.write_all(b"more").unwrap();
    let mut answer = [0; 18];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"ERROR code=invalid");
}

#[test]
fn a_program_of_the_host_reaches_a_guest_whose_vmm_has_a_vsock_device_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let vmm = directory.path().join("fc.sock");
    let house = House::new(&format!(
        "[[vm]]\nname = \"fc\"\nhybrid = \"{}\"\n",
        vmm.display()
    ));
    let listener = std::os::unix::net::UnixListener::bind(&vmm).unwrap();
    let connector = house.circuits();
    let program = std::thread::spawn(move || {
        let mut circuit = connector.connect(&format!("fc:{GUEST_PORT}")).unwrap();
        assert!(!circuit.is_zero_copy());
        circuit.writer().write_all(b"to the guest").unwrap();
        let mut bytes = [0; 12];
        circuit.reader().read_exact(&mut bytes).unwrap();
        bytes
    });
    let (mut stream, _) = listener.accept().unwrap();
    let asked = bench::host::read_line(&mut stream).unwrap();
    assert_eq!(asked.trim_end(), format!("CONNECT {GUEST_PORT}"));
    stream.write_all(b"OK 1073741824\n").unwrap();
    let mut bytes = [0; 12];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"to the guest", "and nothing that is not for it");
    stream.write_all(b"and back now").unwrap();
    assert_eq!(&program.join().unwrap(), b"and back now");
    let at_port = directory.path().join(format!("fc.sock_{PORT}"));
    assert!(
        !at_port.exists(),
        "no party there knows the port from which it calls"
    );
}

/// Does nothing but in the child process of the test below: takes a circuit, and holds it until it is killed.
#[test]
fn a_child_that_holds_a_circuit() {
    let Ok(path) = std::env::var(CHILD_SOCKET) else {
        return;
    };
    let circuit = Connector::new()
        .socket(path)
        .connect(&format!("web:{GUEST_PORT}"));
    let mut circuit = circuit.unwrap();
    assert!(circuit.is_zero_copy());
    circuit.writer().write_all(b"held").unwrap();
    // Until it is killed.
    let _ = circuit.reader().read(&mut [0]);
}

fn child(house: &House) -> Child {
    let path = house.daemon.control_socket().with_file_name("circuit.sock");
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_child_that_holds_a_circuit"])
        .env(CHILD_SOCKET, path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn a_program_of_the_host_that_is_killed_has_let_go() {
    let house = House::new("");
    let mut guest = house.guest("web");
    let mut agent = Agent::new(&house, "web", &mut guest, 1000);
    agent.listen(&house, "web", &mut guest);
    let mut child = child(&house);
    let connection = agent.accept(&mut guest, 1);
    let given = agent.hear_circuit(&mut guest);
    let (mut circuit, mut pump) = agent.map(&given);
    let program = std::thread::spawn(move || {
        let mut bytes = [0; 4];
        circuit.reader().read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"held");
        circuit
    });
    let mut circuit = finish(program, &mut guest, |guest| pump.pump(guest, connection));
    child.kill().unwrap();
    child.wait().unwrap();
    let program = std::thread::spawn(move || circuit.reader().read(&mut [0]).is_err());
    let saw_error = finish(program, &mut guest, |guest| pump.pump(guest, connection));
    assert!(
        saw_error,
        "the guest's program sees that its peer is gone, and no end of data"
    );
    agent.release(&mut guest, &given);
    house.wait_for_states("web", &mut guest, &["free", "free"]);
}
