//! Unmodified programs in a guest without a network card: `ringdown-agent run` makes circuits of their TCP connections, by the names that they ask for, and the policy decides.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use e2e::pattern::Pattern;
use e2e::{
    CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Output, Shared, SharedGuard,
    ShowLogs, host, spawn, web,
};

/// What is fetched, in bytes.
const FILE_BYTES: u64 = 3 << 20;

/// How long a program may take. Python is slow in a guest that is emulated.
const DEADLINE: Duration = Duration::from_secs(300);

/// A port of the host at which nothing listens.
const CLOSED: u16 = 1;

struct Scene {
    daemon: Daemon,
    guest: Guest,
    files: PathBuf,
    port: u16,
    closed: u16,
}

impl ShowLogs for Scene {
    fn show_logs(&self) {
        self.daemon.show_log();
        self.guest.show_logs();
    }
}

static NEW: Shared<Scene> = Shared::new();
static OLD: Shared<Scene> = Shared::new();

/// One test at a time: names in the guest are shared.
static ALONE: Mutex<()> = Mutex::new(());

fn scene() -> (MutexGuard<'static, ()>, SharedGuard<Scene>) {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    (alone, NEW.get(|| start(Kernel::V6_12)))
}

fn old_scene() -> (MutexGuard<'static, ()>, SharedGuard<Scene>) {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    (alone, OLD.get(|| start(Kernel::V6_1)))
}

fn start(kernel: Kernel) -> Scene {
    let files = spawn::scratch_directory().unwrap();
    let mut bytes = vec![0; FILE_BYTES as usize];
    Pattern::new(0).fill(&mut bytes);
    fs::write(files.join("file"), bytes).unwrap();
    let (port, closed) = (serve(&files), CLOSED);

    let directory = spawn::scratch_directory().unwrap();
    let file = directory.join("ringdown.toml");
    fs::write(&file, configuration(port, closed)).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    let daemon = Daemon::start(spec).unwrap();
    let spec = GuestSpec::new("box", kernel)
        .memory_mib(768)
        .attached(&daemon)
        .layer("net");
    let guest = Guest::boot(spec).unwrap();
    Scene {
        daemon,
        guest,
        files,
        port,
        closed,
    }
}

/// `box` may call every name below allowed.test.
fn configuration(port: u16, closed: u16) -> String {
    format!(
        r#"
audit = "audit.jsonl"

[hosts]
"web.allowed.test" = "127.0.0.1"
"git.allowed.test" = "127.0.0.1"
"other.denied.test" = "127.0.0.1"

[[vm]]
name = "box"
cid = 3

[[service]]
name = "egress"
port = 3128
egress = true

[[rule]]
name = "egress"
from = "box"
to = "service:egress"
action = "allow"

[[rule]]
name = "names"
from = "box"
to = ["name:*.allowed.test", "address:127.0.0.1"]
port = [{port}, {closed}]
action = "allow"
"#
    )
}

/// Serves files over HTTP.
fn serve(files: &Path) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let files = files.to_path_buf();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let files = files.clone();
            // A client that goes away in the middle does not matter here.
            thread::spawn(move || web::answer(stream, &files));
        }
    });
    port
}

impl Scene {
    fn run(&self, line: &str) -> Output {
        let spec = CommandSpec::new(line).deadline(DEADLINE);
        self.guest.run_spec(spec).unwrap()
    }

    fn url(&self, host: &str, path: &str) -> String {
        format!("http://{host}:{}/{path}", self.port)
    }

    /// Runs a line that must succeed.
    fn good(&self, line: &str) -> String {
        let output = self.run(line);
        assert_eq!(output.code, 0, "{line}: {}", output.error_text());
        output.text()
    }

    /// Runs a line that must fail, and gives all that it said.
    fn bad(&self, line: &str) -> String {
        let output = self.run(line);
        assert_ne!(output.code, 0, "{line}: {}", output.text());
        format!("{}\n{}", output.text(), output.error_text())
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

    /// A program fetches the file to its standard output.
    fn fetches(&self, program: &str) {
        let expected = host::digest_of(FILE_BYTES);
        let line = format!("set -o pipefail; ringdown-agent run -- {program} | sha256sum");
        assert!(self.good(&line).starts_with(&expected), "{program}");
    }
}

/// Fetches with streams of asyncio, several at a time.
const ASYNCIO: &str = r#"
import asyncio, sys
async def fetch(host, port):
    reader, writer = await asyncio.open_connection(host, port)
    assert writer.get_extra_info("peername")[1] == port
    writer.write(b"GET /file HTTP/1.0\r\nHost: x\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    writer.close()
    return body
async def main():
    bodies = await asyncio.gather(*(fetch(sys.argv[1], int(sys.argv[2])) for _ in range(4)))
    assert bodies.count(bodies[0]) == 4
    sys.stdout.buffer.write(bodies[0])
asyncio.run(main())
"#;

/// Connects without blocking, and says what select and SO_ERROR say.
const NONBLOCKING: &str = r#"
import errno, os, select, socket, sys
def dial(host, port):
    to = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
    s = socket.socket()
    s.setblocking(False)
    poll = select.epoll()
    poll.register(s, select.EPOLLOUT)
    begun = s.connect_ex(to)
    assert begun == errno.EINPROGRESS, begun
    for attempt in range(2):
        found = poll.poll(60)
        assert found and found[0][0] == s.fileno(), found
        error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            break
        assert s.getpeername() == to
        assert s.connect_ex(to) == errno.EISCONN
    return s, errno.errorcode.get(error, "connected")
port, closed = int(sys.argv[1]), int(sys.argv[2])
good, said = dial("web.allowed.test", port)
print(said, dial("other.denied.test", port)[1], dial("web.allowed.test", closed)[1], dial("nothing.allowed.test", port)[1])
good.setblocking(True)
good.sendall(b"GET /file HTTP/1.0\r\n\r\n")
assert good.recv(17, socket.MSG_WAITALL) == b"HTTP/1.1 200 OK\r\n"
# A socket that was refused may try again.
s = socket.socket()
for port, expected in ((closed, errno.ECONNREFUSED), (port, 0)):
    to = socket.getaddrinfo("web.allowed.test", port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
    assert s.connect_ex(to) == expected
s.sendall(b"GET /file HTTP/1.0\r\n\r\n")
assert s.recv(17, socket.MSG_WAITALL) == b"HTTP/1.1 200 OK\r\n"
"#;

/// Asks how much there is to be read before it reads.
const COUNTING: &str = r#"
import array, fcntl, socket, sys, termios
def count(s):
    found = array.array("i", [-1])
    fcntl.ioctl(s, termios.FIONREAD, found)
    return found[0]
s = socket.socket()
assert count(s) == 0
s.connect(socket.getaddrinfo("web.allowed.test", sys.argv[1], socket.AF_INET, socket.SOCK_STREAM)[0][4])
assert count(s) == 0
s.sendall(b"GET /file HTTP/1.0\r\n\r\n")
total = 0
while s.recv(1, socket.MSG_PEEK):
    there = count(s)
    assert 0 < there <= 65536, there
    assert len(s.recv(there)) == there
    total += there
assert count(s) == 0
print(total > 3 << 20)
"#;

#[test]
fn what_can_be_read_is_counted() {
    let (_alone, scene) = scene();
    scene.good(&format!("cat > /tmp/count.py <<'END'\n{COUNTING}\nEND"));
    let line = format!("ringdown-agent run -- python3 /tmp/count.py {}", scene.port);
    assert_eq!(scene.good(&line), "True");
}

/// Connects while another thread changes the address in its memory, until both an allowed and a denied one were met.
const RACING: &str = r#"
import ctypes, errno, os, socket, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
port = int(sys.argv[1])
def find(name):
    return socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
good, bad = find("web.allowed.test"), find("other.denied.test")
memory = ctypes.create_string_buffer(struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(good) + bytes(8), 16)
is_over = False
def change():
    turn = 0
    while not is_over:
        turn += 1
        memory[4:8] = socket.inet_aton((good, bad)[turn % 2])
changer = threading.Thread(target=change)
changer.start()
met = {"connected": 0, "EACCES": 0}
while min(met.values()) < 3 and sum(met.values()) < 500:
    s = socket.socket()
    if libc.connect(s.fileno(), memory, 16) == 0:
        assert s.getpeername() == (good, port), s.getpeername()
        s.sendall(b"GET /file HTTP/1.0\r\n\r\n")
        assert s.recv(17, socket.MSG_WAITALL) == b"HTTP/1.1 200 OK\r\n"
        met["connected"] += 1
    else:
        met[errno.errorcode[ctypes.get_errno()]] += 1
    s.close()
is_over = True
changer.join()
print("both" if min(met.values()) >= 3 else met)
"#;

fn programs_fetch(scene: &Scene) {
    assert_eq!(scene.good("ls /sys/class/net"), "lo");
    let url = scene.url("web.allowed.test", "file");
    scene.bad(&format!("curl -sS {url}"));
    scene.fetches(&format!("curl -sS --fail {url}"));
    scene.fetches(&format!("curl -sS --fail -6 {url}"));
    // Static, and with a resolver of its own.
    scene.fetches(&format!("busybox wget -q -O - {url}"));
    scene.audited(&["\"allowed\"", "web.allowed.test", "names"]);
}

#[test]
fn programs_fetch_from_an_allowed_name() {
    let (_alone, scene) = scene();
    programs_fetch(&scene);
    // Behind a shell, whatever its servers are said to be.
    let url = scene.url("web.allowed.test", "file");
    let servers = "mkdir -p /etc && echo nameserver 192.0.2.53 > /etc/resolv.conf";
    scene.good(servers);
    scene.fetches(&format!("sh -c 'curl -sS --fail {url} | cat'"));
    scene.good("rm /etc/resolv.conf");
    let urllib = format!(
        "python3 -c 'import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(\"{url}\").read())'"
    );
    scene.fetches(&urllib);
    scene.good(&format!("cat > /tmp/fetch.py <<'END'\n{ASYNCIO}\nEND"));
    let port = scene.port;
    scene.fetches(&format!("python3 /tmp/fetch.py web.allowed.test {port}"));
    // Many at a time, by threads and one epoll.
    let line = format!(
        "ringdown-agent run -- curl -sS --fail --no-progress-meter -Z --parallel-max 20 --parallel-immediate '{url}?[1-40]' -o '/tmp/part#1' && sha256sum /tmp/part* | cut -d ' ' -f 1 | uniq -c && rm /tmp/part*"
    );
    let said = scene.good(&line);
    let expected = format!("40 {}", host::digest_of(FILE_BYTES));
    assert_eq!(said.trim(), expected);
}

#[test]
fn programs_fetch_under_an_older_kernel() {
    let (_alone, scene) = old_scene();
    programs_fetch(&scene);
}

/// Runs a program as another user.
const AS_NOBODY: &str = r#"
import os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.execvp(sys.argv[1], sys.argv[1:])
"#;

#[test]
fn another_user_has_a_way_out_too() {
    let (_alone, scene) = scene();
    let expected = host::digest_of(FILE_BYTES);
    scene.good(&format!("cat > /tmp/nobody.py <<'END'\n{AS_NOBODY}\nEND"));
    let url = scene.url("web.allowed.test", "file");
    let nobody = "python3 /tmp/nobody.py";
    for line in [
        format!("{nobody} ringdown-agent run -- curl -sS --fail {url}"),
        // Root's program becomes the other user's under its supervisor.
        format!("ringdown-agent run -- {nobody} curl -sS --fail {url}"),
    ] {
        let line = format!("set -o pipefail; {line} | sha256sum");
        assert!(scene.good(&line).starts_with(&expected), "{line}");
    }
    let url = scene.url("other.denied.test", "file");
    let said = scene.bad(&format!(
        "{nobody} ringdown-agent run --verbose -- curl -sS {url}"
    ));
    assert!(said.contains("Permission denied"), "{said}");
}

fn asks_servers(scene: &Scene) {
    scene.good(&format!("cat > /tmp/nobody.py <<'END'\n{AS_NOBODY}\nEND"));
    let nobody = "python3 /tmp/nobody.py";
    // It takes answers of the server only that it has asked.
    for server in ["192.0.2.53", "2001:db8::53", "127.0.0.53"] {
        let dig = format!("dig +short +tries=1 +timeout=60 @{server} web.allowed.test");
        for line in [
            format!("ringdown-agent run -- {dig}"),
            format!("ringdown-agent run -- {nobody} {dig}"),
            format!("{nobody} ringdown-agent run -- {dig}"),
        ] {
            assert_eq!(scene.good(&line), "198.18.0.2", "{line}");
        }
    }
    let elsewhere = "ringdown-agent run -- dig +tries=1 @192.0.2.53 -p 54 web.allowed.test";
    let said = scene.bad(elsewhere);
    assert!(said.contains("network unreachable"), "{said}");
}

#[test]
fn an_answer_comes_from_the_server_that_was_asked() {
    let (_alone, scene) = scene();
    asks_servers(&scene);
}

#[test]
fn an_answer_comes_from_the_server_that_was_asked_under_an_older_kernel() {
    let (_alone, scene) = old_scene();
    asks_servers(&scene);
}

fn connects_without_blocking(scene: &Scene) {
    scene.good(&format!("cat > /tmp/dial.py <<'END'\n{NONBLOCKING}\nEND"));
    let (port, closed) = (scene.port, scene.closed);
    let line = format!("ringdown-agent run -- python3 /tmp/dial.py {port} {closed}");
    let expected = "connected EACCES ECONNREFUSED EHOSTUNREACH";
    assert_eq!(scene.good(&line), expected);
}

#[test]
fn what_is_connected_without_blocking_is_writable_when_it_is_known() {
    let (_alone, scene) = scene();
    connects_without_blocking(&scene);
}

#[test]
fn what_is_connected_without_blocking_is_writable_under_an_older_kernel() {
    let (_alone, scene) = old_scene();
    connects_without_blocking(&scene);
}

#[test]
fn a_refusal_is_an_error_at_once_and_stands_in_the_audit() {
    let (_alone, scene) = scene();
    let run = "ringdown-agent run --verbose --";
    let url = scene.url("other.denied.test", "file");
    let said = scene.bad(&format!("{run} curl -sS -m 60 {url}"));
    assert!(said.contains("Permission denied"), "{said}");
    assert!(said.contains("Failed to connect"), "{said}");
    scene.audited(&["\"denied\"", "other.denied.test", "no rule allows it"]);
    let said = scene.bad(&format!("{run} busybox wget -O /dev/null {url}"));
    assert!(said.contains("Permission denied"), "{said}");
    // Another port of an allowed name is another matter.
    let said = scene.bad(&format!("{run} curl -sS http://web.allowed.test:2/"));
    assert!(said.contains("Permission denied"), "{said}");
    // Nothing listens there.
    let closed = format!("http://web.allowed.test:{}/", scene.closed);
    let said = scene.bad(&format!("{run} curl -sS {closed}"));
    assert!(said.contains("Connection refused"), "{said}");
    // A name that is allowed, and that nothing knows.
    let url = scene.url("nothing.allowed.test", "");
    let said = scene.bad(&format!("{run} curl -sS {url}"));
    assert!(said.contains("No route to host"), "{said}");
    // An address that no rule allows.
    let said = scene.bad(&format!("{run} curl -sS http://192.0.2.1/"));
    assert!(said.contains("Permission denied"), "{said}");
    scene.audited(&["\"denied\"", "192.0.2.1"]);
}

#[test]
fn an_address_that_changes_during_the_call_is_what_was_decided() {
    let (_alone, scene) = scene();
    scene.good(&format!("cat > /tmp/race.py <<'END'\n{RACING}\nEND"));
    let line = format!("ringdown-agent run -- python3 /tmp/race.py {}", scene.port);
    assert_eq!(scene.good(&line), "both");
    let path = scene.daemon.runtime_directory().join("audit.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let denied = text
        .lines()
        .filter(|line| line.contains("other.denied.test"));
    for line in denied {
        assert!(line.contains("\"denied\""), "{line}");
    }
}

#[test]
fn git_clones_from_an_allowed_name() {
    let (_alone, scene) = scene();
    let head = web::repository(&scene.files);
    let url = scene.url("git.allowed.test", "repository.git");
    let line = format!(
        "export HOME=/tmp; ringdown-agent run -- git clone --quiet {url} /tmp/clone \
         && git -C /tmp/clone rev-parse HEAD && git -C /tmp/clone fsck"
    );
    assert!(scene.good(&line).starts_with(head.trim()));
    let url = scene.url("other.denied.test", "repository.git");
    let said = scene.bad(&format!(
        "HOME=/tmp ringdown-agent run -- git clone {url} /tmp/never"
    ));
    assert!(said.contains("other.denied.test"), "{said}");
}

#[test]
fn a_program_without_a_way_out_is_not_started() {
    let (_alone, scene) = scene();
    let said = scene.bad("ringdown-agent run --egress nowhere -- echo started");
    assert!(said.contains("nowhere") && !said.contains("started"));
    let output = scene.run("ringdown-agent run -- sh -c 'exit 7'");
    assert_eq!(output.code, 7, "{}", output.error_text());
    let output = scene.run("ringdown-agent run -- /no/such/program");
    assert_eq!(output.code, 127, "{}", output.error_text());
    // One inside another.
    let said = scene.bad("ringdown-agent run -- ringdown-agent run --egress 3128 -- echo started");
    assert!(said.contains("one supervisor only") && !said.contains("\nstarted"));
}

/// Whether `doctor` says this of a subject.
fn says(report: &str, subject: &str, words: &str) {
    let found = report.lines().find_map(|line| line.strip_prefix(subject));
    assert!(
        found.is_some_and(|found| found.trim().starts_with(words)),
        "{subject}: {report}"
    );
}

fn doctor_examines(scene: &Scene) {
    scene.good(&format!("cat > /tmp/nobody.py <<'END'\n{AS_NOBODY}\nEND"));
    let (doctor, nobody) = ("ringdown-agent doctor", "python3 /tmp/nobody.py");
    let said = scene.good(doctor);
    says(&said, "kernel", "Linux 6.");
    says(&said, "calls", "answered");
    says(&said, "vsock", "yes");
    says(&said, "egress", "vsock port 3128");
    says(&said, "connect", "announced");
    says(&said, "own TCP", "IPv4, IPv6");
    says(&said, "datagrams", "UDP sockets");
    says(&said, "setuid", "programs keep");
    says(&said, "run", "works");
    let said = scene.good(&format!("{nobody} {doctor}"));
    says(
        &said,
        "connect",
        "asked for on the program's socket, as this is not root",
    );
    says(&said, "datagrams", "UDP sockets");
    says(&said, "setuid", "programs run without");
    // Without namespaces for users.
    let switch = "/proc/sys/user/max_user_namespaces";
    let line = format!(
        "before=$(cat {switch}); echo 0 > {switch}; {nobody} {doctor}; \
         {nobody} ringdown-agent run -- curl -sS --fail -o /dev/null {}; code=$?; echo $before > {switch}; exit $code",
        scene.url("web.allowed.test", "file")
    );
    let said = scene.good(&line);
    says(&said, "datagrams", "pairs");
    says(&said, "run", "works");
    // What does not work.
    let said = scene.bad(&format!("ringdown-agent run -- {doctor}"));
    says(&said, "calls", "no: ");
    says(&said, "run", "does not work");
    assert!(said.contains("one supervisor only"), "{said}");
    let said = scene.bad(&format!("{doctor} --egress nowhere"));
    says(&said, "egress", "no: ");
    says(&said, "run", "does not work");
}

#[test]
fn doctor_says_which_ways_there_are_and_why() {
    let (_alone, scene) = scene();
    doctor_examines(&scene);
}

#[test]
fn doctor_says_which_ways_there_are_under_an_older_kernel() {
    let (_alone, scene) = old_scene();
    doctor_examines(&scene);
}

#[test]
fn what_a_drop_in_starts_has_a_way_out() {
    let (_alone, scene) = scene();
    let url = scene.url("web.allowed.test", "file");
    let unit = format!("[Service]\nType=notify\nExecStart=/usr/bin/curl -sS --fail {url}\n");
    scene
        .guest
        .write_file("/tmp/fetch.service", unit, 0o644)
        .unwrap();
    let printed = scene.good("ringdown-agent transparent /tmp/fetch.service");
    assert!(printed.contains("\nNotifyAccess=all"), "{printed}");
    let start = printed
        .lines()
        .rfind(|line| line.starts_with("ExecStart="))
        .unwrap();
    let line = start.trim_start_matches("ExecStart=");
    let line = format!("set -o pipefail; {line} | sha256sum");
    assert!(scene.good(&line).starts_with(&host::digest_of(FILE_BYTES)));
    // Wrapped already.
    let unit = format!("[Service]\n{start}\n");
    scene
        .guest
        .write_file("/tmp/fetch.service", unit, 0o644)
        .unwrap();
    let said = scene.bad("ringdown-agent transparent /tmp/fetch.service");
    assert!(said.contains("one supervisor only"), "{said}");
    let said = scene.bad("ringdown-agent transparent fetch");
    assert!(said.contains("name the path"), "{said}");
}

#[test]
fn the_guests_own_loopback_goes_on_inside() {
    let (_alone, scene) = scene();
    let line = "ringdown-agent run -- sh -c 'mkdir -p /tmp/www && echo inside > /tmp/www/index.html \
                && httpd -p 127.0.0.1:8080 -h /tmp/www && curl -sS --fail http://127.0.0.1:8080/'";
    assert_eq!(scene.good(line), "inside");
    // It can be called without a supervisor, too, and its program has outlived the one it had.
    scene.good("killall httpd");
}

#[test]
fn without_its_supervisor_a_program_fails_and_does_not_hang() {
    let (_alone, scene) = scene();
    let url = scene.url("web.allowed.test", "file");
    // The shell in the background is no child of the supervisor's, and lives on.
    let inner = format!(
        "(touch /tmp/ready; while [ ! -e /tmp/go ]; do usleep 50000; done; curl -sS -m 60 {url} > /tmp/said 2>&1; echo $? > /tmp/code) & sleep 1000"
    );
    let line = format!(
        "ringdown-agent run -- sh -c '{inner}' & while [ ! -e /tmp/ready ]; do usleep 50000; done; \
         kill -9 $!; wait $!; touch /tmp/go; while [ ! -e /tmp/code ]; do usleep 50000; done; cat /tmp/code"
    );
    assert_ne!(scene.good(&line), "0");
}
