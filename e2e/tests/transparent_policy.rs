//! What the policy refuses to an unmodified program under `ringdown-agent run`: it learns so at once, the audit has it, and neither a name that moves nor an address in any spelling gets past.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use e2e::{CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, spawn};

/// How long a program may take. Python is slow in a guest that is emulated.
const DEADLINE: Duration = Duration::from_secs(120);

/// So many refusals are timed. How long the quickest took is printed: a busy machine delays some.
const REFUSALS: usize = 10;

/// Where the allowed names lead, and where nothing may come.
const ALLOWED: &str = "127.0.0.1";
const INSIDE: &str = "127.0.0.2";

struct Scene {
    // Ends last.
    daemon: Daemon,
    guest: Guest,
    port: u16,
    /// How many have come to the address where nothing may come.
    strays: Arc<AtomicUsize>,
}

/// `moving.allowed.test` leads to this address.
fn configuration(port: u16, moving: &str) -> String {
    format!(
        r#"
audit = "audit.jsonl"

[hosts]
"web.allowed.test" = "{ALLOWED}"
"moving.allowed.test" = "{moving}"
"inside.allowed.test" = "{INSIDE}"
"other.denied.test" = "{ALLOWED}"

[[vm]]
name = "box"
cid = 3

[[service]]
name = "egress"
port = 3128
egress = true

[[rule]]
from = "box"
to = "service:egress"
action = "allow"

[[rule]]
name = "names"
from = "box"
to = ["name:*.allowed.test", "address:{ALLOWED}"]
port = {port}
action = "allow"
"#
    )
}

/// Says a line to every caller.
fn serve(listener: TcpListener, said: &'static str) -> Arc<AtomicUsize> {
    let callers = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&callers);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            count.fetch_add(1, Ordering::Relaxed);
            // A caller that goes away does not matter here.
            let _ = std::io::Write::write_all(&mut stream, said.as_bytes());
        }
    });
    callers
}

fn scene() -> Scene {
    let allowed = TcpListener::bind((ALLOWED, 0)).unwrap();
    let port = allowed.local_addr().unwrap().port();
    serve(allowed, "allowed\n");
    let strays = serve(TcpListener::bind((INSIDE, port)).unwrap(), "inside\n");
    let directory = spawn::scratch_directory().unwrap();
    let file = directory.join("ringdown.toml");
    fs::write(&file, configuration(port, ALLOWED)).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    let daemon = Daemon::start(spec).unwrap();
    let spec = GuestSpec::new("box", Kernel::V6_12)
        .memory_mib(512)
        .attached(&daemon)
        .layer("net");
    let guest = Guest::boot(spec).unwrap();
    Scene {
        daemon,
        guest,
        port,
        strays,
    }
}

/// Calls each address that is given, and prints what became of it and how many milliseconds `connect` took. A name is looked up when it is named first, and its address is
/// kept. `wait` waits until the file it names is there.
const CALLS: &str = r#"
import errno, os, socket, sys, time
known = {}
def find(host, port):
    if host not in known:
        known[host] = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)[0]
    family, _, _, _, to = known[host]
    return family, (to[0], port) + to[2:]
def call(host, port, blocks):
    family, to = find(host, port)
    s = socket.socket(family, socket.SOCK_STREAM)
    s.settimeout(None if blocks else 60)
    begun = time.monotonic()
    try:
        s.connect(to)
        said = s.recv(100).decode().strip()
    except OSError as error:
        said = errno.errorcode.get(error.errno, str(error))
    return said, 1000 * (time.monotonic() - begun)
port = int(sys.argv[1])
for word in sys.argv[2:]:
    if word.startswith("wait:"):
        while not os.path.exists(word[5:]):
            time.sleep(0.05)
        continue
    for blocks in (True, False):
        said, ms = call(word, port, blocks)
        print(word, said, "%.1f" % ms, flush=True)
"#;

impl Scene {
    fn command(&self, words: &str) -> CommandSpec {
        let line = format!(
            "ringdown-agent run -- python3 /tmp/calls.py {} {words}",
            self.port
        );
        CommandSpec::new(line).deadline(DEADLINE)
    }

    /// What became of each call: its destination, the answer, and how long it took.
    fn calls(&self, words: &str) -> Vec<(String, String, f64)> {
        parse(&self.guest.run_spec(self.command(words)).unwrap().text())
    }

    /// Whether the audit comes to have a line that holds each of these.
    fn audited(&self, parts: &[&str]) {
        let path = self.daemon.runtime_directory().join("audit.jsonl");
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let text = fs::read_to_string(&path).unwrap();
            let has_all = |line: &str| parts.iter().all(|part| line.contains(part));
            if text.lines().any(has_all) {
                return;
            }
            assert!(Instant::now() < until, "{parts:?} in {text}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn parse(printed: &str) -> Vec<(String, String, f64)> {
    let parse = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        (
            words[0].to_owned(),
            words[1].to_owned(),
            words[2].parse().unwrap(),
        )
    };
    printed.lines().map(parse).collect()
}

fn refusals_take_milliseconds(scene: &Scene) {
    let names = ["other.denied.test"; REFUSALS].join(" ");
    let called = scene.calls(&names);
    assert_eq!(called.len(), 2 * REFUSALS, "{called:?}");
    assert!(
        called.iter().all(|(_, said, _)| said == "EACCES"),
        "{called:?}"
    );
    // First those of each way to connect that blocks, then those that do not.
    for way in 0..2 {
        let times = called.iter().skip(way).step_by(2).map(|call| call.2);
        let quickest = times.fold(f64::INFINITY, f64::min);
        println!("the quickest refusal took {quickest:.1} ms");
    }
    scene.audited(&[
        "\"denied\"",
        "other.denied.test",
        "\"box\"",
        "no rule allows it",
    ]);
}

/// Addresses of the host and its metadata service, in each spelling that leads out of the guest, and some of the range that stands for names.
const LITERALS: [(&str, &str); 9] = [
    ("169.254.169.254", "EACCES"),
    ("10.0.0.1", "EACCES"),
    ("192.0.2.1", "EACCES"),
    ("::ffff:10.0.0.1", "EACCES"),
    ("64:ff9b::7f00:2", "EACCES"),
    ("2002:7f00:2::1", "EACCES"),
    ("fe80::1", "EACCES"),
    // They stand for no name yet.
    ("198.19.200.1", "EHOSTUNREACH"),
    ("fd72:696e:6764::4d4d", "EHOSTUNREACH"),
];

fn no_address_gets_past(scene: &Scene) {
    // The guest's own list of names is the guest's: what it leads to is an address.
    let hosts = "cat /etc/hosts > /tmp/hosts; echo 10.0.0.1 web.allowed.test >> /etc/hosts";
    scene.guest.shell(hosts).unwrap();
    let called = scene.calls("web.allowed.test");
    scene.guest.shell("cat /tmp/hosts > /etc/hosts").unwrap();
    assert!(
        called.iter().all(|(_, said, _)| said == "EACCES"),
        "{called:?}"
    );
    let words = LITERALS.map(|(address, _)| address).join(" ");
    let called = scene.calls(&words);
    assert_eq!(called.len(), 2 * LITERALS.len());
    for (called, said, _) in &called {
        let expected = LITERALS.iter().find(|(address, _)| address == called);
        assert_eq!(said, expected.unwrap().1, "{called}");
    }
    for address in ["169.254.169.254", "64:ff9b::7f00:2", "2002:7f00:2::1"] {
        scene.audited(&["\"denied\"", address]);
    }
    // The guest's own loopback stays inside, in each spelling.
    let called = scene.calls("127.0.0.1 127.0.0.2 ::1 ::ffff:127.0.0.2 0.0.0.0");
    for (called, said, _) in &called {
        assert_eq!(said, "ECONNREFUSED", "{called}");
    }
}

fn no_name_leads_inside(scene: &Scene) {
    let called = scene.calls("inside.allowed.test");
    assert!(
        called.iter().all(|(_, said, _)| said == "EACCES"),
        "{called:?}"
    );
    scene.audited(&["\"denied\"", "inside.allowed.test", INSIDE]);
    // The program looks the name up once, and calls the address that it got before and after the name has moved.
    let words = "moving.allowed.test wait:/tmp/moved moving.allowed.test web.allowed.test";
    let running = scene.guest.start_spec(scene.command(words)).unwrap();
    scene.audited(&["\"allowed\"", "moving.allowed.test"]);
    // The second of its first two calls.
    let count = || {
        let path = scene.daemon.runtime_directory().join("audit.jsonl");
        let text = fs::read_to_string(path).unwrap();
        let of_name = |line: &&str| line.contains("moving.allowed.test");
        text.lines().filter(of_name).count()
    };
    while count() < 2 {
        thread::sleep(Duration::from_millis(20));
    }
    reload(&scene.daemon, &configuration(scene.port, INSIDE));
    scene.guest.shell("touch /tmp/moved").unwrap();
    let output = running.wait().unwrap();
    let said: Vec<_> = parse(&output.text())
        .into_iter()
        .map(|call| call.1)
        .collect();
    let expected = [
        "allowed", "allowed", "EACCES", "EACCES", "allowed", "allowed",
    ];
    assert_eq!(said, expected, "{}", output.error_text());
    scene.audited(&["\"denied\"", "moving.allowed.test", INSIDE]);
}

fn reload(daemon: &Daemon, configuration: &str) {
    let file: &Path = &daemon.runtime_directory().join("ringdown.toml");
    fs::write(file, configuration).unwrap();
    let output = daemon.run(&["reload"]).unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words}");
}

#[test]
fn what_is_refused_is_refused_at_once_and_nothing_gets_past() {
    let scene = scene();
    scene
        .guest
        .write_file("/tmp/calls.py", CALLS, 0o644)
        .unwrap();
    refusals_take_milliseconds(&scene);
    no_address_gets_past(&scene);
    no_name_leads_inside(&scene);
    assert_eq!(scene.strays.load(Ordering::Relaxed), 0);
}
