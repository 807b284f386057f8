//! Daemons that end in any way while a keeper has what VMMs hold on to: the next one goes on with the same guests.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

use e2e::{
    CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, hold, ringdown_program, spawn,
};

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);

const CONFIGURATION: &str = r#"
[[network]]
name = "lan"

[[vm]]
name = "web"
cid = 3
networks = ["lan"]

[[rule]]
from = "web"
to = "db"
port = [5000, 5001]
action = "allow"
"#;

/// A directory with a keeper; the daemons come and go.
struct Host {
    directory: PathBuf,
    keeper: Child,
}

impl Host {
    fn start() -> Host {
        let directory = spawn::scratch_directory().unwrap();
        fs::write(directory.join("ringdown.toml"), CONFIGURATION).unwrap();
        let keeper = hold(&directory.join("keeper")).unwrap();
        Host { directory, keeper }
    }

    fn daemon(&self) -> Daemon {
        let file = |name: &str| self.directory.join(name).display().to_string();
        let mut spec = DaemonSpec::new().arguments(&[
            "--config",
            &file("ringdown.toml"),
            "--keeper",
            &file("keeper"),
        ]);
        spec.runtime_directory = Some(self.directory.clone());
        Daemon::start(spec).unwrap()
    }

    /// The daemon ends, and another one follows.
    fn next(&self, daemon: Daemon, round: u32) -> Daemon {
        match round % 2 {
            0 => daemon.kill().unwrap(),
            _ => daemon.stop().unwrap(),
        }
        drop(daemon);
        self.daemon()
    }

    fn release(&mut self) {
        let socket = self.directory.join("keeper");
        let arguments = [
            "hold",
            "--release",
            "--socket",
            &socket.display().to_string(),
        ];
        let mut released = spawn::spawn(
            ringdown_program().unwrap(),
            arguments.map(str::to_owned),
            |_| {},
        )
        .unwrap();
        assert!(released.wait().unwrap().success());
        assert!(self.keeper.wait().unwrap().success());
    }
}

fn guests(daemon: &Daemon) -> Vec<Guest> {
    let spec = |name: &str, kernel| GuestSpec::new(name, kernel).layer("lan").with_tools();
    let guests = vec![
        spec("web", Kernel::V6_1).attached(daemon),
        // Of the two cards one has packed rings.
        spec("db", Kernel::V6_12)
            .card_property("lan", "packed=on")
            .attached(daemon),
    ];
    let guests = Guest::boot_all(guests).unwrap();
    for guest in &guests {
        guest.shell("modprobe virtio_net && ip link set eth0 up && udhcpc -i eth0 -n -q -t 20 -T 1 2>&1").unwrap();
    }
    guests
}

fn ringdown(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = daemon.run(arguments).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Host to guest, guest to guest over a circuit, and over the network.
fn everything_works(daemon: &Daemon, guests: &[Guest]) {
    for guest in guests {
        let said = ringdown(
            daemon,
            &["exec", "--wait", "60", guest.name(), "--", "hostname"],
        );
        assert_eq!(said.trim(), guest.name());
    }
    let [web, db] = guests else {
        panic!("two guests")
    };
    let server = listen(db, "5000", "");
    web.shell("echo hello | socat -u STDIN VSOCK-CONNECT:4:5000")
        .unwrap();
    assert_eq!(server.wait().unwrap().text().trim(), "hello");
    web.shell("for try in 1 2 3 4 5; do ping -c 1 -W 5 db && exit 0; done; exit 1")
        .unwrap();
}

#[test]
fn a_killed_daemons_successor_goes_on_with_the_same_guests() {
    let mut host = Host::start();
    let mut daemon = host.daemon();
    // No file names it.
    ringdown(&daemon, &["vm", "add", "db", "--cid", "4", "--net", "lan"]);
    let guests = guests(&daemon);
    everything_works(&daemon, &guests);
    for round in 0..2 {
        daemon = host.next(daemon, round);
        everything_works(&daemon, &guests);
    }
    // Under load, and with one that waits.
    guests[0].shell("mkfifo /tmp/go /tmp/step").unwrap();
    let waits = listen(&guests[1], "5001", "");
    let speaks = start(
        &guests[0],
        "(sleep 1; echo first; cat /tmp/go; echo last) | socat -u STDIN VSOCK-CONNECT:4:5001",
    );
    let receives = listen(&guests[1], "5000", "| sha256sum");
    // Each step of the sender's begins a part of the stream, in which the daemon ends.
    let parts = |between: &str| {
        format!(
            "for part in 1 2 3 4 5 6 7 8 9 10; do seq ${{part}}000000 ${{part}}300000; {between} done"
        )
    };
    let sending = parts("read word < /tmp/step;");
    let sends = start(
        &guests[0],
        &format!("({sending}) | socat -u STDIN VSOCK-CONNECT:4:5000; echo sent"),
    );
    wait_for_circuit(&daemon, "5000");
    wait_for_circuit(&daemon, "5001");
    for round in 0..10 {
        guests[0].shell("echo on > /tmp/step").unwrap();
        daemon = host.next(daemon, round);
    }
    assert!(sends.wait().unwrap().text().contains("sent"));
    let expected = guests[0]
        .shell(&format!("({}) | sha256sum", parts("")))
        .unwrap();
    assert_eq!(receives.wait().unwrap().text().trim(), expected.trim());
    guests[0].shell("echo > /tmp/go").unwrap();
    speaks.wait().unwrap();
    assert_eq!(waits.wait().unwrap().text(), "first\n\nlast");
    everything_works(&daemon, &guests);
    daemon.stop().unwrap();
    host.release();
    drop(guests);
}

fn start(guest: &Guest, command: &str) -> e2e::Running {
    let spec = CommandSpec::new(command).deadline(PATIENCE);
    guest.start_spec(spec).unwrap()
}

/// Starts a server that takes one circuit, and waits until it listens.
fn listen(guest: &Guest, port: &str, behind: &str) -> e2e::Running {
    let log = format!("/tmp/listens-{port}");
    guest.shell(&format!("rm -f {log}")).unwrap();
    let server = start(
        guest,
        &format!("socat -d -d -u VSOCK-LISTEN:{port} STDOUT 2>{log} {behind}"),
    );
    guest
        .wait_until(&format!("grep -q 'listening on' {log}"), PATIENCE)
        .unwrap();
    server
}

fn wait_for_circuit(daemon: &Daemon, port: &str) {
    let until = std::time::Instant::now() + PATIENCE;
    while !ringdown(daemon, &["ls"]).contains(port) {
        assert!(std::time::Instant::now() < until, "no circuit");
        std::thread::sleep(Duration::from_millis(50));
    }
}
