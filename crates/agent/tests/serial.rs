//! The agent over a serial line: a UNIX socket stands for the port, and this test for the host.

#![allow(
    clippy::unwrap_used,
    reason = "these are tests, though not marked as such one by one"
)]

mod common;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use common::{Client, PATIENCE, command, shell, words};
use serial::{Driver, Handle, Options, PeerEvent, Port, Refusal, RefusalKind};
use tempfile::TempDir;
use wire::agent::{
    CALLERS_KNOWN, CALLERS_PROVE, ErrorKind, ExitStatus, Frame, Hello, Secret, Stream,
};

/// What the agent and the guest's programs dial.
const ECHO: u32 = 77;

/// What a word from the line means, and the channels that the guest opens.
struct HostPort {
    lines: Receiver<OwnedFd>,
    events: Sender<PeerEvent>,
    uplinks: Sender<UnixStream>,
}

impl Port for HostPort {
    fn open(&mut self, _: Instant) -> io::Result<OwnedFd> {
        let none = |_| io::ErrorKind::WouldBlock.into();
        self.lines.try_recv().map_err(none)
    }

    fn accept(&mut self, port: u32) -> Result<serial::Stream, Refusal> {
        let (theirs, mut ours) = UnixStream::pair().unwrap();
        match port {
            wire::agent::PORT => self.uplinks.send(ours).unwrap(),
            ECHO => drop(thread::spawn(move || {
                let mut reader = ours.try_clone().unwrap();
                let _ = io::copy(&mut reader, &mut ours);
                let _ = ours.shutdown(std::net::Shutdown::Write);
            })),
            _ => {
                return Err(Refusal::new(RefusalKind::Forbidden, "no rule allows it"));
            }
        }
        Ok(theirs.into())
    }

    fn on_peer(&mut self, event: PeerEvent) {
        // The test may be over.
        let _ = self.events.send(event);
    }
}

/// A host, and an agent at the other end of its line.
struct House {
    directory: TempDir,
    listener: UnixListener,
    host: Handle,
    lines: Sender<OwnedFd>,
    events: Receiver<PeerEvent>,
    uplinks: Receiver<UnixStream>,
    agent: Child,
}

impl House {
    fn new() -> House {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("port")).unwrap();
        let (lines, receiver) = channel();
        let (sender, events) = channel();
        let (uplink_sender, uplinks) = channel();
        let port = HostPort {
            lines: receiver,
            events: sender,
            uplinks: uplink_sender,
        };
        House {
            host: Driver::start("host", Box::new(port), Options::default()).unwrap(),
            agent: start_agent(&directory),
            directory,
            listener,
            lines,
            events,
            uplinks,
        }
    }

    /// Lets the agent reach the host directly.
    fn connect(&self) {
        let (line, _) = self.listener.accept().unwrap();
        self.lines.send(line.into()).unwrap();
    }

    fn connected() -> House {
        let house = House::new();
        house.connect();
        house.wait_for(&PeerEvent::Came);
        house
    }

    fn wait_for(&self, event: &PeerEvent) {
        while self.events.recv_timeout(PATIENCE).as_ref().unwrap() != event {}
    }

    fn try_dial(&self, port: u32) -> Result<UnixStream, Refusal> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (sender, receiver) = channel();
        let answered = move |answer| sender.send(answer).unwrap();
        self.host.dial(port, theirs.into(), Box::new(answered));
        receiver.recv_timeout(PATIENCE).unwrap().map(|()| ours)
    }

    /// The agent's own call.
    fn uplink(&self) -> Client {
        Client::new(self.uplinks.recv_timeout(PATIENCE).unwrap())
    }

    /// The agent's own call, answered, and the secret that it brings.
    fn answered(&self) -> (Client, Secret) {
        let mut uplink = self.uplink();
        let hello = uplink.answer_as_host(&[CALLERS_PROVE]);
        assert!(hello.can("proof"));
        let secret = uplink.expect_secret();
        (uplink, secret)
    }

    /// A connection to the agent on which nothing was said.
    fn caller(&self) -> Client {
        Client::new(self.try_dial(wire::agent::PORT).unwrap())
    }

    fn client(&self, secret: &Secret) -> Client {
        let mut client = self.caller();
        client.send(&Frame::Secret(secret.clone()));
        client.greet();
        client
    }

    /// What a program of the guest sees that calls the host.
    fn call_host(&self, request: &str) -> (String, UnixStream) {
        let socket = self.directory.path().join("run/host.sock");
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut line = String::new();
        let mut byte = [0];
        while !line.ends_with('\n') && stream.read(&mut byte).unwrap() == 1 {
            line.push(char::from(byte[0]));
        }
        (line, stream)
    }
}

impl Drop for House {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

fn start_agent(directory: &TempDir) -> Child {
    let mut child = command()
        .arg(format!("serial-socket:{}/port", directory.path().display()))
        .env(
            "RINGDOWN_HOST_SOCKET",
            directory.path().join("run/host.sock"),
        )
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let log = BufReader::new(child.stderr.take().unwrap());
    // Shown with the test's own output if it fails; and it must not fill the pipe.
    thread::spawn(move || {
        log.lines()
            .map_while(Result::ok)
            .for_each(|line| println!("{line}"))
    });
    child
}

#[test]
fn commands_run_over_the_port_side_by_side() {
    let house = House::connected();
    let (_uplink, secret) = house.answered();
    let mut first = house.client(&secret);
    first.send(&Frame::ExecStart(words(&["cat"])));
    first.grant(Stream::Stdout, 1 << 20);
    first.expect_started();
    let mut second = house.client(&secret);
    second.send(&Frame::ExecStart(shell("echo out; exit 3")));
    second.grant(Stream::Stdout, 1 << 20);
    second.expect_started();
    assert_eq!(second.expect_exit(), ExitStatus::Code(3));
    assert_eq!(second.transcript.stdout, b"out\n");
    first.input(b"still here");
    first.wait_for_output("still here");
    first.send(&Frame::EndOfStream(Stream::Stdin));
    assert_eq!(first.expect_exit(), ExitStatus::Code(0));
    let refusal = house.try_dial(22).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::NobodyListens);
}

#[test]
fn the_agent_calls_the_host_when_it_comes_and_again_after_a_restart() {
    let mut house = House::connected();
    let (mut uplink, secret) = house.answered();
    house.agent.kill().unwrap();
    house.agent.wait().unwrap();
    house.wait_for(&PeerEvent::Disconnected);
    house.agent = start_agent(&house.directory);
    house.connect();
    house.wait_for(&PeerEvent::Came);
    uplink.expect_end();
    let (_uplink, renewed) = house.answered();
    assert_ne!(secret, renewed);
}

/// What a caller receives that sends its hello at once, as every client does, behind this proof or none.
fn refused(house: &House, proof: Option<Secret>) -> (ErrorKind, String) {
    let mut client = house.caller();
    if let Some(secret) = proof {
        client.send(&Frame::Secret(secret));
    }
    client.send(&Frame::Hello(Hello::new("test")));
    client.send(&Frame::ExecStart(words(&["true"])));
    let report = client.expect_refusal();
    (report.kind, report.message)
}

#[test]
fn who_does_not_prove_to_be_the_host_is_refused() {
    let house = House::connected();
    let (uplink, secret) = house.answered();
    let (kind, message) = refused(&house, None);
    assert_eq!(kind, ErrorKind::Forbidden);
    assert!(message.contains("does not prove"), "{message}");
    let (kind, message) = refused(&house, Some(Secret::new([0; 32])));
    assert_eq!(kind, ErrorKind::WrongProof);
    assert!(message.contains("not the one"), "{message}");
    // Another first frame, and the proof too late.
    let mut late = house.caller();
    late.send(&Frame::Hello(Hello::new("test")));
    late.send(&Frame::Secret(secret.clone()));
    assert_eq!(late.expect_refusal().kind, ErrorKind::Forbidden);
    drop(house.client(&secret));

    // The agent calls anew: what its host knew is worth nothing any more.
    drop(uplink);
    let (_uplink, renewed) = house.answered();
    assert_eq!(refused(&house, Some(secret)).0, ErrorKind::WrongProof);
    drop(house.client(&renewed));
}

#[test]
fn a_host_that_does_not_ask_for_proof_of_callers_gets_nothing_over_a_serial_port() {
    for capabilities in [&[][..], &[CALLERS_KNOWN]] {
        let house = House::connected();
        let mut uplink = house.uplink();
        uplink.answer_as_host(capabilities);
        let (kind, message) = refused(&house, None);
        assert_eq!(kind, ErrorKind::Unavailable);
        assert!(message.contains("update the daemon"), "{message}");
    }
}

#[test]
fn programs_of_the_guest_call_the_host_through_the_agent() {
    let house = House::connected();
    // The announcement comes over the same port, and its socket is there before.
    drop(house.uplinks.recv_timeout(PATIENCE).unwrap());
    let (line, mut stream) = house.call_host(&format!("CONNECT {ECHO}\nhello"));
    assert_eq!(line, format!("OK {ECHO}\n"));
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut back = String::new();
    stream.read_to_string(&mut back).unwrap();
    assert_eq!(back, "hello");
    assert_eq!(house.call_host("CONNECT 5\n").0, "ERR no rule allows it\n");
    assert_eq!(
        house.call_host("CONNECT 1007\n").0,
        "ERR port 1007 of the host is for the agent itself\n"
    );
    assert!(
        house
            .call_host("GET / HTTP/1.1\r\n")
            .0
            .starts_with("ERR expected \"CONNECT")
    );
}

/// Carries bytes between the host and the agent, and breaks the line again and again; what it holds then is lost.
struct Middle {
    listener: UnixListener,
    lines: Sender<OwnedFd>,
    random: u64,
}

impl Middle {
    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn carry(&mut self, budget: usize) {
        let Ok((agent, _)) = self.listener.accept() else {
            return;
        };
        let (near, far) = UnixStream::pair().unwrap();
        self.lines.send(far.into()).unwrap();
        let mut sockets = [near, agent];
        for socket in &sockets {
            socket.set_nonblocking(true).unwrap();
        }
        let (mut carried, deadline) = (0, Instant::now() + Duration::from_millis(500));
        let mut buffer = vec![0; 40_000];
        while carried < budget && Instant::now() < deadline {
            let before = carried;
            for from in [0, 1] {
                let len = 1 + self.below(40_000) as usize;
                let Ok(count) = sockets[from].read(&mut buffer[..len]) else {
                    continue;
                };
                carried += count;
                if self.below(50) == 0 {
                    continue;
                }
                let to = &mut sockets[1 - from];
                to.set_nonblocking(false).unwrap();
                to.set_write_timeout(Some(Duration::from_millis(200)))
                    .unwrap();
                let _ = to.write_all(&buffer[..count]);
                to.set_nonblocking(true).unwrap();
            }
            if carried == before {
                thread::sleep(Duration::from_micros(200));
            }
        }
    }
}

/// 64 MiB and 200 breaks in the long form (`RINGDOWN_TORTURE=1`), fewer otherwise.
#[test]
fn a_command_loses_nothing_over_a_line_that_breaks() {
    let is_long = std::env::var_os("RINGDOWN_TORTURE").is_some();
    let (len, breaks) = if is_long {
        (64 << 20, 200)
    } else {
        (3 << 20, 20)
    };
    let seed = match std::env::var("RINGDOWN_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => u64::from(std::process::id()) << 20 | 1,
    };
    println!("seed {seed}; RINGDOWN_SEED={seed} runs it again");
    let house = House::new();
    let mut middle = Middle {
        listener: house.listener.try_clone().unwrap(),
        lines: house.lines.clone(),
        random: seed,
    };
    let is_over = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_over);
    let breaking = thread::spawn(move || {
        let mut times = 0;
        while !seen.load(Ordering::Acquire) {
            middle.carry(3 * len / breaks);
            times += 1;
        }
        times
    });
    house.wait_for(&PeerEvent::Came);
    let (_uplink, secret) = house.answered();
    let mut client = house.client(&secret);
    client.send(&Frame::ExecStart(words(&["cat"])));
    client.expect_started();
    let sent: Vec<u8> = (0..len).map(|at| ((at / 3) ^ (at >> 12)) as u8).collect();
    client.grant(Stream::Stdout, 1 << 20);
    let (mut given, mut granted) = (0, 1 << 20);
    while client.transcript.stdout.len() < len {
        let room = (client.input_credit as usize)
            .min(len - given)
            .min(64 * 1024);
        client.input(&sent[given..given + room]);
        client.input_credit -= room as u32;
        given += room;
        let received = client.transcript.stdout.len();
        if received + (1 << 19) > granted {
            client.grant(Stream::Stdout, 1 << 19);
            granted += 1 << 19;
        }
        assert!(client.take_some(), "seed {seed}: the connection ended");
    }
    assert!(
        client.transcript.stdout == sent,
        "seed {seed}: other bytes came back"
    );
    client.send(&Frame::EndOfStream(Stream::Stdin));
    assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    is_over.store(true, Ordering::Release);
    let times = breaking.join().unwrap();
    let counters = house.host.status().counters;
    println!("{times} connections, {counters:?}");
    assert_eq!(
        (counters.sessions, counters.violations),
        (1, 0),
        "seed {seed}"
    );
    assert!(
        times >= breaks / 2 && counters.connections > 1,
        "seed {seed}"
    );
}
