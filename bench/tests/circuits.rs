//! Zero-copy circuits on a real daemon, with its own windows: programs of the host use the library, and the guests are in user space, with
//! a test that says what an agent would.

// All of this is tests, where a failure is a panic.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bench::daemon::Daemon;
use bench::guest::{Connection, Received, State, VirtualGuest, drive};
use circuit::{Circuit, Connector};
use memory::circuit::{Identity, Kind, Side, Window, WindowSpec};
use serde_json::Value;
use wire::switchboard::link::{FromAgent, FromDaemon, PORT};
use wire::switchboard::{self, Hex16};
use wire::vsock::SocketType;

/// How long anything may take. Nothing here waits that long unless it is broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the device of a guest begins in a window's file, and how long a page of it is.
const PAGE_LEN: u64 = 2 << 20;

const RING: u64 = 2 << 20;

/// Where the tests' host programs listen, and their guests.
const HOST_PORT: u32 = 5432;
const GUEST_PORT: u32 = 7000;

/// Set for a child process that this test starts of itself: where the circuits are.
const CHILD_SOCKET: &str = "RINGDOWN_TEST_CIRCUITS_OF_A_CHILD";

struct House {
    daemon: Daemon,
    directory: tempfile::TempDir,
}

impl House {
    /// A daemon with web, which has two windows, and db, which has one.
    fn new(rules: &str) -> House {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("ringdown.toml");
        let house = House::configure(&config, rules);
        let program = Path::new(env!("CARGO_BIN_EXE_ringdown-under-test"));
        let daemon = Daemon::start(program, &[], &["--config", house.to_str().unwrap()]);
        House {
            daemon: daemon.expect("the daemon starts"),
            directory,
        }
    }

    fn configure(config: &Path, rules: &str) -> PathBuf {
        let vms = "[[vm]]\nname = \"web\"\ncid = 3\nwindows = \"2x8M\"\n\n[[vm]]\nname = \"db\"\ncid = 4\nwindows = \"1x8M\"\n";
        std::fs::write(config, format!("{vms}\n{rules}")).unwrap();
        config.to_owned()
    }

    fn enforce(&self, rules: &str) {
        House::configure(&self.directory.path().join("ringdown.toml"), rules);
        let done = self.daemon.command(&["reload", "--enforce-existing"]);
        assert!(done.unwrap());
    }

    fn circuits(&self) -> Connector {
        Connector::new().socket(self.daemon.control_socket().with_file_name("circuit.sock"))
    }

    /// Makes a request of the control API: the status and the body.
    fn request(&self, method: &str, target: &str) -> (u16, String) {
        let mut stream = UnixStream::connect(self.daemon.control_socket()).unwrap();
        write!(
            stream,
            "{method} {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    fn get(&self, target: &str) -> Value {
        let (status, body) = self.request("GET", target);
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Circuits called at this port.
    fn listed(&self, port: u32) -> Vec<Value> {
        let list = self.get(&format!("/v1/circuits?port={port}"));
        list["circuits"].as_array().unwrap().clone()
    }

    /// How the windows of a VM stand, in order of their UUIDs.
    fn states(&self, vm: &str) -> Vec<String> {
        let list = self.get("/v1/windows");
        let windows = list["windows"].as_array().unwrap().iter();
        let of_vm = windows.filter(|window| {
            window["between"]
                .as_array()
                .unwrap()
                .contains(&Value::from(vm))
        });
        of_vm
            .map(|window| window["state"].as_str().unwrap().to_owned())
            .collect()
    }

    fn wait_for_states(&self, vm: &str, guest: &mut VirtualGuest, expected: &[&str]) {
        wait_for(&format!("windows that are {expected:?}"), guest, |_| {
            let mut states = self.states(vm);
            states.sort();
            states == expected
        });
    }

    /// The window files of a VM, by the UUIDs in their info blocks.
    fn files(&self, vm: &str) -> Vec<(Hex16, PathBuf)> {
        let status = self.daemon.vm_status(vm).unwrap();
        let files = status["windows"]["files"].as_array().unwrap();
        let file = |path: &Value| {
            let path = PathBuf::from(path.as_str().unwrap());
            let mut uuid = [0; 16];
            let file = File::open(&path).unwrap();
            file.read_exact_at(&mut uuid, 4096 + 16).unwrap();
            (Hex16(uuid), path)
        };
        files.iter().map(file).collect()
    }

    fn guest(&self, name: &str) -> VirtualGuest {
        VirtualGuest::attach(&self.daemon.vhost_socket(name)).expect("the guest attaches")
    }
}

fn wait_for(
    what: &str,
    guest: &mut VirtualGuest,
    mut holds: impl FnMut(&mut VirtualGuest) -> bool,
) {
    let held = drive(&mut [guest], PATIENCE, |guests| {
        holds(guests[0]).then_some(())
    });
    assert!(held.is_ok(), "it never came: {what}");
}

/// What an agent says and hears.
struct Agent {
    session: Connection,
    heard: Vec<u8>,
    windows: Vec<(Hex16, PathBuf)>,
}

impl Agent {
    /// The agent of a guest, which has shown the VM's windows.
    fn new(house: &House, vm: &str, guest: &mut VirtualGuest, source_port: u32) -> Agent {
        let session = guest.dial_from(source_port, 2, PORT, SocketType::Stream);
        wait_for("a session", guest, |guest| {
            guest.state(session) == State::Connected
        });
        let mut agent = Agent {
            session,
            heard: Vec::new(),
            windows: house.files(vm),
        };
        agent.say(guest, &FromAgent::Hello { version: 1 });
        assert_eq!(agent.hear(guest), FromDaemon::Welcome { version: 1 });
        for (uuid, path) in agent.windows.clone() {
            let len = std::fs::metadata(path).unwrap().len() - PAGE_LEN;
            agent.say(guest, &FromAgent::Window { uuid, len });
        }
        agent
    }

    fn say(&self, guest: &mut VirtualGuest, words: &FromAgent) {
        guest
            .send(self.session, words.to_string().as_bytes())
            .unwrap();
    }

    fn hear(&mut self, guest: &mut VirtualGuest) -> FromDaemon {
        let (session, heard) = (self.session, &mut self.heard);
        wait_for("a line", guest, |guest| {
            let received = guest.try_receive(session, usize::MAX, heard);
            assert!(!matches!(received, Received::Reset), "the session is over");
            heard.contains(&b'\n')
        });
        let end = self.heard.iter().position(|byte| *byte == b'\n').unwrap();
        let line: Vec<u8> = self.heard.drain(..=end).collect();
        FromDaemon::parse(&line[..end]).unwrap()
    }

    fn hear_circuit(&mut self, guest: &mut VirtualGuest) -> switchboard::link::Circuit {
        match self.hear(guest) {
            FromDaemon::Circuit(circuit) => circuit,
            other => panic!("{other}"),
        }
    }

    /// Calls for a program, which wants a window.
    fn call(&mut self, guest: &mut VirtualGuest, id: u64, from: u32, to: (u32, u32)) -> Connection {
        let kind = switchboard::Kind::Bytes;
        self.say(
            guest,
            &FromAgent::Dial {
                id,
                port: from,
                kind,
                ring: RING,
            },
        );
        let connection = guest.dial_from(from, to.0, to.1, SocketType::Stream);
        wait_for("an answer", guest, |guest| {
            guest.state(connection) != State::Connecting
        });
        assert_eq!(guest.state(connection), State::Connected);
        let (cid, port) = to;
        self.say(guest, &FromAgent::Dialled { id, cid, port });
        connection
    }

    /// Takes a call for a program.
    fn accept(&mut self, guest: &mut VirtualGuest, id: u64) -> Connection {
        let mut taken = None;
        wait_for("a call", guest, |guest| {
            taken = guest.try_accept(GUEST_PORT);
            taken.is_some()
        });
        let connection = taken.unwrap();
        let (local, cid, port) = guest.addresses(connection).unwrap();
        self.say(
            guest,
            &FromAgent::Accepted {
                id,
                cid,
                port,
                local,
                kind: switchboard::Kind::Bytes,
                ring: RING,
            },
        );
        connection
    }

    fn listen(&self, guest: &mut VirtualGuest) {
        guest.listen(GUEST_PORT);
        self.say(guest, &FromAgent::Listen { port: GUEST_PORT });
    }

    /// The guest's program has let go of the window.
    fn release(&self, guest: &mut VirtualGuest, circuit: &switchboard::link::Circuit) {
        self.say(
            guest,
            &FromAgent::Released {
                uuid: circuit.uuid,
                generation: circuit.generation,
            },
        );
    }

    /// Maps a window as the guest's program does: that of the guest's device begins where the device does.
    fn map(&self, given: &switchboard::link::Circuit) -> (Circuit, Pump) {
        let (_, path) = self
            .windows
            .iter()
            .find(|(uuid, _)| *uuid == given.uuid)
            .unwrap();
        let file = File::options().read(true).write(true).open(path).unwrap();
        let spec = WindowSpec {
            identity: Identity {
                generation: given.generation,
                nonce: given.nonce.0,
            },
            kind: Kind::Bytes,
            ring_len: given.ring,
            page_len: PAGE_LEN,
        };
        let window = Window::attach(&file, PAGE_LEN, &spec).unwrap();
        let side = match given.side {
            switchboard::Side::First => Side::First,
            switchboard::Side::Second => Side::Second,
        };
        let (program, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let circuit = Circuit::from_parts(window, side, program.into(), Duration::ZERO);
        (circuit, Pump { socket: ours })
    }
}

/// Carries the wake-ups of a guest's program, whose socket is one of the test's, to its vsock connection and back.
struct Pump {
    socket: UnixStream,
}

impl Pump {
    fn pump(&mut self, guest: &mut VirtualGuest, connection: Connection) {
        let mut bytes = [0; 4096];
        match self.socket.read(&mut bytes) {
            Ok(0) => guest.close(connection),
            Ok(read) => drop(guest.send(connection, &bytes[..read])),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // The program has left wake-ups unread.
            Err(_) => guest.close(connection),
        }
        let mut arrived = Vec::new();
        match guest.try_receive(connection, bytes.len(), &mut arrived) {
            // What finds no room is one wake-up of many.
            Received::Bytes(_) => drop(self.socket.write(&arrived)),
            Received::Nothing => {}
            _ => drop(self.socket.shutdown(std::net::Shutdown::Write)),
        }
    }
}

/// Bytes that are different everywhere.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// A program that sends, and wants the same back.
fn send_and_compare(mut circuit: Circuit, len: usize, seed: u64) {
    let sent = pattern(len, seed);
    let mut back = Vec::new();
    for piece in sent.chunks(256 * 1024) {
        circuit.writer().write_all(piece).unwrap();
        let mut bytes = vec![0; piece.len()];
        circuit.reader().read_exact(&mut bytes).unwrap();
        back.extend(bytes);
    }
    assert!(back == sent, "what came back is not what was sent");
}

/// A program that sends back what comes, to the end.
fn echo(mut circuit: Circuit) {
    let mut bytes = vec![0; 64 * 1024];
    loop {
        match circuit.reader().read(&mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(read) => {
                if circuit.writer().write_all(&bytes[..read]).is_err() {
                    return;
                }
            }
        }
    }
}

/// A program of the host that listens, takes one circuit, says whether it has a window, and sends back what comes.
fn host_echo(house: &House) -> JoinHandle<bool> {
    let mut listener = house.circuits().listen(HOST_PORT).unwrap();
    listener.set_timeout(Some(PATIENCE));
    std::thread::spawn(move || {
        let circuit = listener.accept().unwrap();
        assert_eq!(circuit.peer().unwrap().to_string(), "web:40001");
        let is_zero_copy = circuit.is_zero_copy();
        echo(circuit);
        is_zero_copy
    })
}

/// Waits for a thread, and carries wake-ups meanwhile.
fn finish<T>(
    thread: JoinHandle<T>,
    guest: &mut VirtualGuest,
    mut pumping: impl FnMut(&mut VirtualGuest),
) -> T {
    wait_for("the end of a program", guest, |guest| {
        pumping(guest);
        thread.is_finished()
    });
    thread.join().unwrap()
}

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
    agent.listen(&mut guest);
    house.wait_for_states("web", &mut guest, &["free", "free"]);
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
    // A program of the guest that has never heard of circuits.
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
    agent.listen(&mut guest);
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
    callee.listen(&mut db);
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
        "it has been heard"
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
    agent.listen(&mut guest);
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
        "nobody there could say from which port it calls"
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
    agent.listen(&mut guest);
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
