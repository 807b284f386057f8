//! The first line: a guest and its host talk both ways, over stock kernels and with foreign clients.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use e2e::{Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Shared, SharedGuard, ShowLogs};

struct Scene {
    web: Guest,
    db: Guest,
    daemon: Daemon,
}

impl ShowLogs for Scene {
    fn show_logs(&self) {
        self.daemon.show_log();
        self.web.show_console();
        self.db.show_console();
    }
}

/// One daemon and a guest of either kernel, for all tests of this file.
static SCENE: Shared<Scene> = Shared::new();

fn scene() -> SharedGuard<Scene> {
    SCENE.get(|| {
        let daemon =
            Daemon::start(DaemonSpec::new().vm("web", 3).vm("db", 4).vm("mortal", 5)).unwrap();
        let spec = |name, kernel| GuestSpec::new(name, kernel).with_tools().attached(&daemon);
        let mut guests =
            Guest::boot_all(vec![spec("web", Kernel::V6_1), spec("db", Kernel::V6_12)]).unwrap();
        let db = guests.pop().unwrap();
        let web = guests.pop().unwrap();
        Scene { web, db, daemon }
    })
}

/// Dials a guest as Firecracker's clients do, and returns the socket behind the answer.
fn dial(host: &Path, port: u32) -> Result<UnixStream, String> {
    let mut stream = UnixStream::connect(host).map_err(|error| error.to_string())?;
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    stream
        .write_all(format!("CONNECT {port}\n").as_bytes())
        .unwrap();
    let mut answer = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).map_err(|error| error.to_string())? == 1 && byte[0] != b'\n' {
        answer.push(byte[0]);
    }
    let answer = String::from_utf8(answer).unwrap();
    match answer.starts_with("OK ") {
        true => Ok(stream),
        false => Err(answer),
    }
}

#[test]
fn a_host_program_reaches_a_guest_service() {
    let scene = scene();
    for guest in [&scene.web, &scene.db] {
        let server = guest
            .start("exec socat VSOCK-LISTEN:5000,fork EXEC:cat")
            .unwrap();
        guest
            .wait_until(
                "grep -q . /dev/null || socat -u OPEN:/dev/null VSOCK-CONNECT:1:5000",
                Duration::from_secs(10),
            )
            .ok();
        let mut stream = dial(&scene.daemon.host_socket(guest.name()), 5000).unwrap();
        stream.write_all(b"hello\n").unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        assert_eq!(line, "hello\n");
        server.kill();
    }
}

#[test]
fn a_guest_program_reaches_a_host_service() {
    let scene = scene();
    for guest in [&scene.web, &scene.db] {
        let listener = UnixListener::bind(scene.daemon.listener_path(guest.name(), 6000)).unwrap();
        let client = guest
            .start("echo from the guest | socat - VSOCK-CONNECT:2:6000")
            .unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"from the host\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert_eq!(text, "from the guest\n");
        drop(stream);
        assert_eq!(client.wait().unwrap().text(), "from the host");
    }
}

#[test]
fn a_program_that_reads_sees_a_reset_when_its_vm_dies() {
    let scene = scene();
    let guest = e2e::Guest::boot(
        GuestSpec::new("mortal", Kernel::V6_1)
            .with_tools()
            .attached(&scene.daemon),
    )
    .unwrap();
    guest
        .start("exec socat VSOCK-LISTEN:5000,fork SYSTEM:'echo some; sleep 1000'")
        .unwrap();
    let host = scene.daemon.host_socket("mortal");
    let mut stream = loop {
        match dial(&host, 5000) {
            Ok(stream) => break stream,
            Err(answer) => assert!(answer.contains("refused"), "{answer}"),
        }
    };
    let mut some = [0; 5];
    stream.read_exact(&mut some).unwrap();
    guest.kill().unwrap();
    let error = stream.read(&mut some).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}
