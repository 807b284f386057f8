//! A VM whose VMM has a vsock device of its own, by an implementation of that convention that knows nothing of Ringdown: the
//! program `vhost-device-vsock`, which serves a guest in QEMU and speaks with the host by UNIX sockets. `make hybrid`
//! installs it and runs these scenarios; `$RINGDOWN_PEER` says where it is.
//!
//! It does not carry half-closes, and it mixes bytes up when both directions of a connection are full at once, also without Ringdown. So these
//! conversations end otherwise and are short; tests with a VMM of our own have the rest.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use e2e::{Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Shared, SharedGuard, ShowLogs, spawn};

/// How long anything may take that is no boot.
const PATIENCE: Duration = Duration::from_secs(60);

/// The hybrid VM `fc` (9), which the peer serves, and the VM `web` (3) of the usual kind.
struct Scene {
    fc: Guest,
    web: Guest,
    daemon: Daemon,
    /// Its VMM's socket.
    path: PathBuf,
    /// What the service `registry` received.
    registry: Registry,
    _peer: Peer,
}

impl ShowLogs for Scene {
    fn show_logs(&self) {
        self.daemon.show_log();
        self.fc.show_logs();
        self.web.show_logs();
    }
}

struct Peer(Mutex<Child>);

impl Drop for Peer {
    fn drop(&mut self) {
        if let Ok(child) = self.0.get_mut() {
            // It may have ended by itself, which a test will have noticed.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A service that answers each line with its length and hangs up.
struct Registry {
    port: u16,
}

impl Registry {
    fn start() -> Registry {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // It ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                thread::spawn(move || answer(&stream));
            }
        });
        Registry { port }
    }
}

fn answer(mut stream: &TcpStream) -> Option<()> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    writeln!(stream, "{} bytes", line.len()).ok()
}

static SCENE: Shared<Scene> = Shared::new();

fn scene() -> SharedGuard<Scene> {
    SCENE.get(|| {
        let directory = spawn::scratch_directory().unwrap();
        let path = directory.join("v.sock");
        let vhost = directory.join("v.vhost");
        let registry = Registry::start();
        let config = directory.join("ringdown.toml");
        fs::write(&config, configuration(registry.port)).unwrap();
        let daemon = DaemonSpec::new().vm("web", 3).arguments(&[
            "--config",
            &config.display().to_string(),
            "--vm",
            &format!("name=fc,cid=9,hybrid={}", path.display()),
        ]);
        let daemon = Daemon::start(daemon).unwrap();
        let program = std::env::var_os("RINGDOWN_PEER").expect("run this by `make hybrid`");
        let log = File::create(directory.join("peer.log")).unwrap();
        // As docs/hybrid.md has it.
        let words = ["--guest-cid", "9", "--uds-path"].map(str::to_owned);
        let words = words.into_iter().chain([path.display().to_string()]);
        let words = words.chain(["--socket".to_owned(), vhost.display().to_string()]);
        let peer = spawn::spawn(PathBuf::from(program), words, move |command| {
            command.stdout(log.try_clone().unwrap()).stderr(log);
        });
        let peer = Peer(Mutex::new(peer.unwrap()));
        let until = Instant::now() + PATIENCE;
        while !vhost.exists() {
            assert!(Instant::now() < until, "the peer does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        // The device is the peer's: Ringdown has nothing to print for it.
        let chardev = format!("socket,id=peer,path={}", vhost.display());
        let fc = GuestSpec::new("fc", Kernel::V6_12).with_tools();
        let memory = format!(
            "memory-backend-memfd,id=mem0,size={}M,share=on",
            fc.memory_mib
        );
        let fc = fc
            .qemu(&["-object", &memory, "-machine", "memory-backend=mem0"])
            .qemu(&["-chardev", &chardev])
            .qemu(&["-device", "vhost-user-vsock-pci,chardev=peer"]);
        let web = GuestSpec::new("web", Kernel::V6_1)
            .with_tools()
            .attached(&daemon);
        let guests: [Guest; 2] = Guest::boot_all(vec![fc, web]).unwrap().try_into().unwrap();
        let [fc, web] = guests;
        Scene {
            fc,
            web,
            daemon,
            path,
            registry,
            _peer: peer,
        }
    })
}

fn configuration(registry_port: u16) -> String {
    format!(
        r#"
        [[service]]
        name = "registry"
        port = 5000
        to = "tcp:127.0.0.1:{registry_port}"

        [[service]]
        name = "secret"
        port = 5001
        to = "tcp:127.0.0.1:{registry_port}"

        [[rule]]
        from = "*"
        to = "service:registry"
        action = "allow"

        [[rule]]
        from = "web"
        to = "fc"
        action = "allow"

        [[rule]]
        from = "fc"
        to = "host"
        port = 5432
        redirect = "web:80"
        "#
    )
}

/// Sends a line from the guest to a port and gives what comes back before the other side hangs up.
fn ask(guest: &Guest, cid: u32, port: u32, line: &str) -> String {
    ask_within(guest, (cid, port), line, 50)
}

/// The same with a client that does not hang up by itself: it is closed after some seconds of silence.
fn ask_within(guest: &Guest, (cid, port): (u32, u32), line: &str, seconds: u32) -> String {
    let address = format!("VSOCK-CONNECT:{cid}:{port},shut-none");
    let command = format!("echo '{line}' | socat -t {seconds} - {address}");
    guest.run(&command).unwrap().text()
}

/// The same, of a server that may have yet to come up.
fn ask_when_open(guest: &Guest, cid: u32, port: u32, line: &str) -> String {
    let until = Instant::now() + PATIENCE;
    loop {
        let answer = ask(guest, cid, port, line);
        if !answer.is_empty() {
            return answer;
        }
        assert!(Instant::now() < until, "no answer at port {port}");
    }
}

/// Lets a guest answer at a port, by this shell line.
fn listen(guest: &Guest, port: u32, line: &str) -> e2e::Running {
    let command = format!("exec socat VSOCK-LISTEN:{port},fork SYSTEM:'{line}'");
    guest.start(&command).unwrap()
}

/// Calls a port of the guest at its VMM's own socket until there is a listener.
fn dial(path: &Path, port: u32) -> UnixStream {
    let until = Instant::now() + PATIENCE;
    loop {
        let mut stream = UnixStream::connect(path).unwrap();
        // To give up before the answer would end the peer's service for this guest: it panics.
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // In one write: the peer hangs up on a request in pieces.
        let request = format!("CONNECT {port}\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut byte = [0];
        let mut said = Vec::new();
        while matches!(stream.read(&mut byte), Ok(1)) && byte != *b"\n" {
            said.push(byte[0]);
        }
        if said.starts_with(b"OK ") {
            return stream;
        }
        assert!(Instant::now() < until, "nothing listens on port {port}");
    }
}

#[test]
#[ignore = "needs the peer: `make hybrid`"]
fn exec_reaches_the_guests_agent() {
    let scene = scene();
    let script = "cat; echo err >&2; exit 7";
    let input = scene.daemon.runtime_directory().join("input");
    let bytes: Vec<u8> = (0..2000_u32).map(|index| (index % 251) as u8).collect();
    fs::write(&input, &bytes).unwrap();
    let output = scene
        .daemon
        .command(&["exec", "fc", "--", "sh", "-c", script])
        .unwrap()
        .stdin(File::open(&input).unwrap())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(output.stdout == bytes, "{} bytes", output.stdout.len());
    assert_eq!(output.stderr, b"err\n");
    let list = scene.daemon.run(&["vm", "ls"]).unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    let line = list.lines().find(|line| line.starts_with("fc ")).unwrap();
    assert!(
        line.contains(" hybrid ") && line.contains(" ready "),
        "{list}"
    );
    // The table has the socket for programs; that of the VMM is in JSON.
    let list = scene.daemon.run(&["vm", "ls", "--json"]).unwrap();
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    let mut vms = list["vms"].as_array().unwrap().iter();
    let vm = vms.find(|vm| vm["name"] == "fc").unwrap();
    assert_eq!(vm["hybrid"].as_str(), scene.path.to_str(), "{vm}");
}

#[test]
#[ignore = "needs the peer: `make hybrid`"]
fn the_guest_reaches_a_service_that_it_may_call_and_no_other() {
    let scene = scene();
    assert!(scene.registry.port > 0);
    assert_eq!(ask(&scene.fc, 2, 5000, "hello"), "6 bytes");
    assert_eq!(ask(&scene.fc, 2, 5001, "hello"), "");
    let status = scene.daemon.run(&["vm", "ls", "--json"]).unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("\"ended_denied\":1") || status.contains("\"ended_denied\": 1"));
}

#[test]
#[ignore = "needs the peer: `make hybrid`"]
fn the_guest_reaches_another_vm_by_a_redirection_and_is_seen_as_itself() {
    let scene = scene();
    let server = listen(
        &scene.web,
        80,
        "read line; echo \"$line for $SOCAT_PEERADDR\"",
    );
    assert_eq!(ask_when_open(&scene.fc, 2, 5432, "hello"), "hello for 9");
    server.kill();
}

#[test]
#[ignore = "needs the peer: `make hybrid`"]
fn another_vm_reaches_the_guest_by_its_identifier() {
    let scene = scene();
    let server = listen(&scene.fc, 7000, "read line; echo \"got $line\"");
    assert_eq!(ask_when_open(&scene.web, 9, 7000, "hello"), "got hello");
    server.kill();
    // The peer is silent about a port without a listener, for as long as its guest is: the caller gets a reset at last.
    assert_eq!(ask(&scene.web, 9, 7001, "hello"), "");
}

#[test]
#[ignore = "needs the peer: `make hybrid`"]
fn who_closes_one_direction_hears_no_more() {
    let scene = scene();
    // One answers to a line, the other to the end of what it is sent.
    let of_line = listen(&scene.fc, 7003, "read line; echo \"got $line\"");
    let of_end = listen(&scene.fc, 7004, "cat > /dev/null; echo end");
    for port in [7003, 7004] {
        drop(dial(&scene.path, port));
    }
    let host = scene.daemon.runtime_directory().join("fc.sock");
    let answer = |port: u32, closes: bool| {
        let mut stream = UnixStream::connect(&host).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "CONNECT {port}\nhi\n").unwrap();
        if closes {
            stream.shutdown(Shutdown::Write).unwrap();
        }
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        let (first, rest) = said.split_once('\n').unwrap();
        assert!(first.starts_with("OK "), "{said}");
        rest.to_owned()
    };
    assert_eq!(answer(7004, true), "");
    assert_eq!(answer(7003, false), "got hi\n");
    of_line.kill();
    of_end.kill();
}

#[test]
#[ignore = "needs the peer: `make hybrid`"]
fn the_directory_tells_the_guest_who_it_is() {
    let scene = scene();
    let answer = ask_within(&scene.fc, (2, 1006), "WHOAMI", 10);
    assert_eq!(answer.lines().next(), Some("OK fc default 9"));
}

#[test]
#[ignore = "needs the peer: `make hybrid`"]
fn a_megabyte_arrives_as_it_was() {
    let scene = scene();
    let server = listen(&scene.fc, 7002, "head -c 1000000 | sha256sum");
    let bytes: Vec<u8> = (0..1_000_000_u32)
        .map(|index| (index % 249) as u8)
        .collect();
    let path = scene.daemon.runtime_directory().join("megabyte");
    fs::write(&path, &bytes).unwrap();
    let mut stream = dial(&scene.path, 7002);
    stream.write_all(&bytes).unwrap();
    let mut said = String::new();
    BufReader::new(&mut stream).read_line(&mut said).unwrap();
    let expected = std::process::Command::new("sha256sum")
        .stdin(File::open(&path).unwrap())
        .output()
        .unwrap();
    assert_eq!(said.as_bytes(), expected.stdout);
    // The same from a guest with rings, through the daemon.
    scene.web.write_file("/tmp/megabyte", bytes, 0o600).unwrap();
    let command = "socat -t 50 - VSOCK-CONNECT:9:7002,shut-none < /tmp/megabyte";
    assert_eq!(scene.web.shell(command).unwrap(), said.trim_end());
    server.kill();
}
