//! Ports of a network that change while their guests send as fast as they can: what no configuration lets pass does not pass, whenever they change.
//!
//! The daemon is a whole one, and the guests are drivers behind its vhost-user sockets. A test fails only if a frame arrived that every
//! configuration refuses.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bench::daemon::Daemon;
use bench::net::frame::{Address, Kind};
use bench::net::port::{Port, PortOptions};

/// How long anything is waited for that must come.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often the configuration changes, there and back.
const ROUNDS: usize = 100;

const OPTIONS: PortOptions = PortOptions {
    kind: Kind::Plain(64),
    flows: 1,
    packed: false,
    combining: true,
    suppression: true,
    ring_size: 64,
    interrupts: false,
    checked: false,
    touched: false,
};

/// Two VMs in one network, with what is said of the port of each.
fn configuration(ports: [&str; 2]) -> String {
    let mut text = "[[network]]\nname = \"lan\"\nipv4 = \"10.77.0.1/24\"\n".to_owned();
    for (number, port) in ports.into_iter().enumerate() {
        let Address { mac, ipv4, .. } = Address::of(number);
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        text += &format!(
            "[[vm]]\nname = \"vm{number}\"\n[[vm.net]]\nnetwork = \"lan\"\nmac = \"{mac}\"\nipv4 = \"{ipv4}\"\n{port}\n"
        );
    }
    text
}

/// Brings a file into force.
fn reload(socket: &Path, file: &Path, ports: [&str; 2]) {
    fs::write(file, configuration(ports)).unwrap();
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request =
        "POST /v1/reload HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 2"), "{answer}");
}

/// What the guests have done so far.
#[derive(Default)]
struct Counts {
    sent: [AtomicU64; 2],
    received: AtomicU64,
}

impl Counts {
    fn wait(&self, what: &str, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits until frames of both guests have been judged that were sent after this was called.
    fn go_on(&self) {
        let rings = 2 * u64::from(OPTIONS.ring_size);
        for sent in &self.sent {
            let before = sent.load(Ordering::Relaxed);
            let is_so = || sent.load(Ordering::Relaxed) > before + rings;
            self.wait("a guest's frames are not taken", is_so);
        }
    }
}

/// Two guests send each other frames while their ports change between two configurations, each of which keeps them apart, and then to one that does not.
fn stays_apart(first: [&'static str; 2], second: [&'static str; 2], together: [&'static str; 2]) {
    let directory = tempfile::tempdir().unwrap();
    let file: PathBuf = directory.path().join("ringdown.toml");
    fs::write(&file, configuration(first)).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_ringdown-under-test"));
    let daemon = Daemon::start(program, &[], &["--config", file.to_str().unwrap()]).unwrap();
    let attach = |number: usize| {
        let socket = daemon.vhost_socket(&format!("vm{number}.net-lan"));
        let socket = UnixStream::connect(socket).unwrap();
        let (own, partner) = (Address::of(number), Address::of(1 - number));
        Port::attach(socket, OPTIONS, own, partner).unwrap()
    };
    let mut ports = [attach(0), attach(1)];
    let counts: Arc<Counts> = Arc::default();
    let (control, seen) = (daemon.control_socket(), counts.clone());
    let changes = std::thread::spawn(move || {
        for _ in 0..ROUNDS {
            for ports in [second, first] {
                seen.go_on();
                reload(&control, &file, ports);
            }
        }
        seen.go_on();
        let crossed = seen.received.load(Ordering::Relaxed);
        reload(&control, &file, together);
        let arrives = || seen.received.load(Ordering::Relaxed) > crossed;
        seen.wait("no frame arrives where it may", arrives);
        crossed
    });
    while !changes.is_finished() {
        for (port, sent) in ports.iter_mut().zip(&counts.sent) {
            port.turn().unwrap();
            sent.store(port.meters().sent, Ordering::Relaxed);
        }
        let received = ports.iter().map(Port::received).sum();
        counts.received.store(received, Ordering::Relaxed);
        std::thread::yield_now();
    }
    assert_eq!(changes.join().unwrap(), 0, "frames have crossed");
}

#[test]
fn guests_that_swap_their_vlans_never_share_one() {
    let (ten, twenty) = ("vlan = 10", "vlan = 20");
    stays_apart([ten, twenty], [twenty, ten], [ten, ten]);
}

#[test]
fn guests_of_which_one_is_isolated_never_reach_each_other_while_it_becomes_the_other() {
    let (open, isolated) = ("", "isolated = true");
    stays_apart([open, isolated], [isolated, open], [open, open]);
}
