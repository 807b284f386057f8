//! Cut is not end, for what people run: the program, or the guest that it is connected to, is gone in the middle, and neither the receiver nor what
//! waits for the program takes half for all.

#![allow(clippy::unwrap_used)]

mod program;
mod ready_guest;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use agent::session::Options;
use fake_daemon::FakeDaemon;
use program::{Running, ringdown};

const PATIENCE: Duration = Duration::from_secs(30);

/// A guest with the real agent, whose connections can be cut.
struct Guest {
    daemon: FakeDaemon,
    connections: Receiver<UnixStream>,
    _uplink: UnixStream,
}

impl Guest {
    fn start() -> Guest {
        let daemon = FakeDaemon::start(&["name=web"], &[]);
        let (shown, connections) = channel();
        let show = move |stream: &UnixStream| drop(shown.send(stream.try_clone().unwrap()));
        let uplink = ready_guest::announce_with(&daemon, "web", Options::new(), show);
        Guest {
            daemon,
            connections,
            _uplink: uplink,
        }
    }

    /// The VM, its agent or the daemon is killed, as the other side of the host socket sees it.
    fn cut(&self) {
        for connection in self.connections.try_iter() {
            // It may be over.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    fn run(&self, arguments: &[&str]) -> Running {
        let mut command = ringdown(arguments);
        command.env("RINGDOWN_RUNTIME_DIR", self.daemon.runtime_dir());
        command.stdin(Stdio::piped()).stderr(Stdio::piped());
        Running::start(command)
    }

    /// `ringdown forward`, and where it listens.
    fn forward(&self, option: &str, to: &TcpListener) -> (Running, String) {
        let place = format!("0:{}", to.local_addr().unwrap());
        let mut running = self.run(&["forward", "web", option, &place]);
        let mut said = String::new();
        let errors = running.0.stderr.take().unwrap();
        BufReader::new(errors).read_line(&mut said).unwrap();
        let place = said.split(' ').nth(1).unwrap_or_else(|| panic!("{said}"));
        (running, place.to_owned())
    }
}

fn patient(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

#[test]
fn a_forwarded_connection_has_no_end_when_the_guest_or_the_program_is_gone() {
    for option in ["-L", "-R"] {
        for is_killed in [false, true] {
            let guest = Guest::start();
            let server = TcpListener::bind("127.0.0.1:0").unwrap();
            let (mut running, place) = guest.forward(option, &server);
            let mut near = patient(TcpStream::connect(&place).unwrap());
            let mut far = patient(server.accept().unwrap().0);
            // Half of something each way.
            near.write_all(b"half of it").unwrap();
            far.read_exact(&mut [0; 10]).unwrap();
            far.write_all(b"half of it").unwrap();
            near.read_exact(&mut [0; 10]).unwrap();
            match is_killed {
                true => running.0.kill().unwrap(),
                false => guest.cut(),
            }
            for mut receiver in [near, far] {
                let error = receiver.read(&mut [0]).expect_err("no end");
                assert_eq!(
                    error.kind(),
                    ErrorKind::ConnectionReset,
                    "{option} {is_killed}"
                );
            }
        }
    }
}

#[test]
fn a_command_whose_guest_is_gone_in_the_middle_of_its_output_is_a_failure() {
    let guest = Guest::start();
    let script = "echo half of it; sleep 1000";
    let mut running = guest.run(&["exec", "web", "--", "sh", "-c", script]);
    let mut out = BufReader::new(running.0.stdout.take().unwrap());
    let mut half = String::new();
    out.read_line(&mut half).unwrap();
    guest.cut();
    let mut said = String::new();
    let mut errors = running.0.stderr.take().unwrap();
    errors.read_to_string(&mut said).unwrap();
    assert!(
        said.contains("the connection to the guest broke before it reported the end"),
        "{said}"
    );
    let code = running.0.wait().unwrap().code();
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
}

/// What the command in the guest sees of its input when the program on the host is killed.
#[test]
fn a_command_whose_caller_is_killed_sees_no_end_of_its_input() {
    let guest = Guest::start();
    let directory = tempfile::tempdir().unwrap();
    let (begun, end) = (directory.path().join("begun"), directory.path().join("end"));
    let script = format!(
        "trap '' HUP; echo $$ > {}; cat >/dev/null; echo all of it > {}",
        begun.display(),
        end.display()
    );
    let mut running = guest.run(&["exec", "web", "--", "sh", "-c", &script]);
    let mut input = running.0.stdin.take().unwrap();
    input.write_all(b"half of it").unwrap();
    let process = wait_for(|| {
        let text = std::fs::read_to_string(&begun).unwrap_or_default();
        text.strip_suffix('\n')
            .map(|pid| PathBuf::from(format!("/proc/{pid}")))
    });
    running.0.kill().unwrap();
    wait_for(|| (!process.exists()).then_some(()));
    assert!(
        !end.exists(),
        "the command took half of its input for all of it"
    );
}

fn wait_for<T>(mut what: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(what) = what() {
            return what;
        }
        assert!(Instant::now() < until, "it never came");
        std::thread::yield_now();
    }
}
