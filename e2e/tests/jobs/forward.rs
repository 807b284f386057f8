//! `ringdown forward` and `ringdown shell`.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;

use e2e::pattern::Pattern;
use e2e::terminal::{read_until, terminal};
use e2e::{host, spawn};

use super::{Background, eventually, scene, scene_alone};

/// How much passes each way, in bytes.
const CARRIED_BYTES: u64 = 3_000_000;

#[test]
fn ports_and_sockets_of_the_host_lead_into_the_guest() {
    let scene = scene();
    for guest in &scene.guests {
        // One connection after the other, each answered with its own bytes.
        let server = guest
            .start("exec socat TCP-LISTEN:8000,fork,reuseaddr EXEC:cat")
            .unwrap();
        guest
            .wait_until("netstat -ltn | grep -q :8000", super::PATIENCE)
            .unwrap();
        let socket = spawn::scratch_directory().unwrap().join("there");
        let port = own_port();
        let _forward = Background::start(
            &scene.daemon,
            &[
                "forward",
                guest.name(),
                &format!("{port}:8000"),
                "-L",
                &format!("{}:127.0.0.1:8000", socket.display()),
            ],
        );
        eventually("the forward listens", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let writer = stream.try_clone().unwrap();
        echoed(stream, writer, |writer| {
            writer.shutdown(Shutdown::Write).unwrap()
        });
        let stream = UnixStream::connect(&socket).unwrap();
        let writer = stream.try_clone().unwrap();
        echoed(stream, writer, |writer| {
            writer.shutdown(Shutdown::Write).unwrap()
        });
        server.kill();
    }
}

#[test]
fn ports_of_the_guest_lead_to_the_host() {
    let scene = scene();
    for guest in &scene.guests {
        let path = spawn::scratch_directory().unwrap().join("here");
        let listener = UnixListener::bind(&path).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port();
        let _forward = Background::start(
            &scene.daemon,
            &[
                "forward",
                guest.name(),
                "-R",
                &format!("9000:127.0.0.1:{port}"),
                "-R",
                &format!("9001:{}", path.display()),
            ],
        );
        guest
            .wait_until(
                "netstat -ltn | grep -q :9000 && netstat -ltn | grep -q :9001",
                super::PATIENCE,
            )
            .unwrap();
        let client = guest
            .start("echo from the guest | socat -t 60 - TCP:127.0.0.1:9000")
            .unwrap();
        let (mut stream, _) = tcp.accept().unwrap();
        stream.write_all(b"from the host").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut received = String::new();
        stream.read_to_string(&mut received).unwrap();
        assert_eq!(received, "from the guest\n");
        assert_eq!(client.wait().unwrap().text(), "from the host");

        guest
            .write_file(
                "/tmp/forwarded",
                Pattern::new(0).take(CARRIED_BYTES as usize),
                0o600,
            )
            .unwrap();
        let client = guest
            .start("socat -u OPEN:/tmp/forwarded TCP:127.0.0.1:9001")
            .unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        host::bound(&stream).unwrap();
        assert_eq!(
            host::drain(&mut stream, &mut Pattern::new(0)).unwrap(),
            CARRIED_BYTES
        );
        drop(stream);
        assert_eq!(client.wait().unwrap().code, 0);
    }
}

#[test]
fn forwarding_goes_on_after_the_agent_was_killed() {
    let scene = scene_alone();
    for guest in &scene.guests {
        let server = guest
            .start("exec socat TCP-LISTEN:8100,fork,reuseaddr EXEC:cat")
            .unwrap();
        guest
            .wait_until("netstat -ltn | grep -q :8100", super::PATIENCE)
            .unwrap();
        let port = own_port();
        let _forward = Background::start(
            &scene.daemon,
            &["forward", guest.name(), &format!("{port}:8100")],
        );
        let answers = || {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
                return false;
            };
            let mut answer = [0; 5];
            stream.set_read_timeout(Some(super::PATIENCE)).unwrap();
            stream.write_all(b"hello").is_ok()
                && stream.read_exact(&mut answer).is_ok()
                && &answer == b"hello"
        };
        eventually("it forwards", answers);
        guest.shell("killall -9 ringdown-agent").unwrap();
        eventually("it forwards again", answers);
        server.kill();
    }
}

#[test]
fn a_shell_has_a_terminal_of_its_own() {
    let scene = scene();
    for guest in &scene.guests {
        let (mut screen, terminal) = terminal().unwrap();
        let mut child = scene
            .daemon
            .command(&["shell", guest.name()])
            .unwrap()
            .stdin(terminal.try_clone().unwrap())
            .stdout(terminal.try_clone().unwrap())
            .stderr(terminal.try_clone().unwrap())
            .spawn()
            .unwrap();
        let mut shown = String::new();
        screen.write_all(b"echo $((6 * 7)) $0; tty\n").unwrap();
        read_until(&mut screen, &mut shown, "/dev/pts/").unwrap();
        assert!(shown.contains("\n42 "), "{shown}");
        screen.write_all(b"exit 5\n").unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(5));
    }
}

fn echoed<S: Read + Write + Send + 'static>(mut reader: S, mut writer: S, half_close: fn(&S)) {
    let feeder = thread::spawn(move || {
        host::send(&mut writer, &mut Pattern::new(1), CARRIED_BYTES).unwrap();
        half_close(&writer);
    });
    let received = host::drain(&mut reader, &mut Pattern::new(1)).unwrap();
    feeder.join().unwrap();
    assert_eq!(received, CARRIED_BYTES);
}

/// A port for each call: below those that the system gives to programs by itself, and by the number of this process.
fn own_port() -> u16 {
    static CALLS: AtomicU16 = AtomicU16::new(0);
    let first = 16_000 + (std::process::id() % 1_600) as u16 * 10;
    first + CALLS.fetch_add(1, Ordering::Relaxed)
}
