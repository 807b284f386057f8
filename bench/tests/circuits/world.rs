//! The host with its daemon, and what an agent of a guest would say.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bench::daemon::Daemon;
use bench::guest::{Connection, Received, State, VirtualGuest, drive};
use circuit::{Circuit, Connector};
use serde_json::Value;
use shmring::{Identity, Kind, Side, Window, WindowSpec};
use wire::switchboard::link::{FromAgent, FromDaemon, PORT};
use wire::switchboard::{self, Hex16};
use wire::vsock::SocketType;

use super::traffic::Pump;

/// How long anything may take. Nothing here waits that long unless it is broken.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Where the device of a guest begins in a window's file, and how long a page of it is.
pub const PAGE_LEN: u64 = 2 << 20;

pub const RING: u64 = 2 << 20;

/// Where the tests' host programs listen, and their guests.
pub const HOST_PORT: u32 = 5432;
pub const GUEST_PORT: u32 = 7000;

pub struct House {
    pub daemon: Daemon,
    pub directory: tempfile::TempDir,
}

impl House {
    /// A daemon with web, which has two windows, and db, which has one.
    pub fn new(rules: &str) -> House {
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

    pub fn configure(config: &Path, rules: &str) -> PathBuf {
        let vms = "[[vm]]\nname = \"web\"\ncid = 3\nwindows = \"2x8M\"\n\n[[vm]]\nname = \"db\"\ncid = 4\nwindows = \"1x8M\"\n";
        std::fs::write(config, format!("{vms}\n{rules}")).unwrap();
        config.to_owned()
    }

    pub fn enforce(&self, rules: &str) {
        House::configure(&self.directory.path().join("ringdown.toml"), rules);
        let done = self.daemon.command(&["reload", "--enforce-existing"]);
        assert!(done.unwrap());
    }

    pub fn circuits(&self) -> Connector {
        Connector::new().socket(self.daemon.control_socket().with_file_name("circuit.sock"))
    }

    /// Makes a request of the control API: the status and the body.
    pub fn request(&self, method: &str, target: &str) -> (u16, String) {
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

    pub fn get(&self, target: &str) -> Value {
        let (status, body) = self.request("GET", target);
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Circuits called at this port.
    pub fn listed(&self, port: u32) -> Vec<Value> {
        let list = self.get(&format!("/v1/circuits?port={port}"));
        list["circuits"].as_array().unwrap().clone()
    }

    /// How the windows of a VM stand, in order of their UUIDs.
    pub fn states(&self, vm: &str) -> Vec<String> {
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

    pub fn wait_for_states(&self, vm: &str, guest: &mut VirtualGuest, expected: &[&str]) {
        wait_for(&format!("windows that are {expected:?}"), guest, |_| {
            let mut states = self.states(vm);
            states.sort();
            states == expected
        });
    }

    /// The window files of a VM, by the UUIDs in their info blocks.
    pub fn files(&self, vm: &str) -> Vec<(Hex16, PathBuf)> {
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

    pub fn guest(&self, name: &str) -> VirtualGuest {
        VirtualGuest::attach(&self.daemon.vhost_socket(name)).expect("the guest attaches")
    }
}

pub fn wait_for(
    what: &str,
    guest: &mut VirtualGuest,
    mut holds: impl FnMut(&mut VirtualGuest) -> bool,
) {
    let held = drive(&mut [guest], PATIENCE, |guests| {
        holds(guests[0]).then_some(())
    });
    assert!(held.is_ok(), "it never came: {what}");
}

/// What an agent sends and receives.
pub struct Agent {
    pub session: Connection,
    pub heard: Vec<u8>,
    pub windows: Vec<(Hex16, PathBuf)>,
}

impl Agent {
    /// The agent of a guest with a program that takes circuits at [`GUEST_PORT`]. It announces that before it shows the VM's windows: once they are
    /// free the daemon has both.
    pub fn new(house: &House, vm: &str, guest: &mut VirtualGuest, source_port: u32) -> Agent {
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
        agent.say(guest, &FromAgent::Listen { port: GUEST_PORT });
        for (uuid, path) in agent.windows.clone() {
            let len = std::fs::metadata(path).unwrap().len() - PAGE_LEN;
            agent.say(guest, &FromAgent::Window { uuid, len });
        }
        agent
    }

    pub fn say(&self, guest: &mut VirtualGuest, words: &FromAgent) {
        guest
            .send(self.session, words.to_string().as_bytes())
            .unwrap();
    }

    pub fn hear(&mut self, guest: &mut VirtualGuest) -> FromDaemon {
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

    pub fn hear_circuit(&mut self, guest: &mut VirtualGuest) -> switchboard::link::Circuit {
        match self.hear(guest) {
            FromDaemon::Circuit(circuit) => circuit,
            other => panic!("{other}"),
        }
    }

    /// Calls for a program, which wants a window.
    pub fn call(
        &mut self,
        guest: &mut VirtualGuest,
        id: u64,
        from: u32,
        to: (u32, u32),
    ) -> Connection {
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
    pub fn accept(&mut self, guest: &mut VirtualGuest, id: u64) -> Connection {
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

    /// The guest takes calls at [`GUEST_PORT`], and the daemon knows that they may become circuits.
    pub fn listen(&self, house: &House, vm: &str, guest: &mut VirtualGuest) {
        guest.listen(GUEST_PORT);
        house.wait_for_states(vm, guest, &vec!["free"; self.windows.len()]);
    }

    /// The guest's program has let go of the window.
    pub fn release(&self, guest: &mut VirtualGuest, circuit: &switchboard::link::Circuit) {
        self.say(
            guest,
            &FromAgent::Released {
                uuid: circuit.uuid,
                generation: circuit.generation,
            },
        );
    }

    /// Maps a window as the guest's program does: that of the guest's device begins where the device does.
    pub fn map(&self, given: &switchboard::link::Circuit) -> (Circuit, Pump) {
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
