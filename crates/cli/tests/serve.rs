//! The daemon as a process: its ready line, its word to the service manager, its end by signals and its death.
//!
//! Each test runs this same test program again as the daemon, with a fake worker, because signals, the umask and
//! environment variables belong to a whole process.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use daemon::config::{Config, parse_vm_option};
use daemon::fake::FakeWorker;
use rustix::process::{Pid, Signal, kill_process};

const DIRECTORY: &str = "RINGDOWN_TEST_DIRECTORY";
const SOCKETS: [&str; 3] = ["control.sock", "web.sock", "web.vhost"];

#[test]
#[ignore = "the other tests run it as a process of its own"]
fn daemon_process() {
    let directory = std::env::var_os(DIRECTORY).expect("the other tests name a directory");
    let directory = Path::new(&directory);
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let config = Config {
        runtime_dir: Some(directory.to_owned()),
        vms: vec![parse_vm_option("name=web", directory).unwrap()],
        rules: Vec::new(),
    };
    let start = |arrivals| -> std::io::Result<Arc<dyn daemon::line::LineWorker>> {
        Ok(Arc::new(FakeWorker::new(arrivals)))
    };
    daemon::serve::serve(&config, Box::new(start), std::io::stdout()).unwrap();
}

/// A daemon process. It is killed when the test fails before it has ended.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // It has ended already when all went well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Daemon {
    fn start(directory: &Path, notify: &Path) -> Daemon {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["daemon_process", "--exact", "--ignored", "--nocapture"]);
        command
            .env(DIRECTORY, directory)
            .env("NOTIFY_SOCKET", notify);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Daemon(command.spawn().unwrap())
    }

    /// Reads up to the ready line, and fails when the daemon ends without one.
    fn wait_until_ready(&mut self) {
        let out = BufReader::new(self.0.stdout.take().unwrap());
        let mut lines = out.lines().map(|line| line.unwrap());
        // The test program has words of its own before it; the daemon's line may stand behind them.
        assert!(
            lines.any(|line| line.ends_with("ready")),
            "the daemon ended before it was ready"
        );
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Waits for the end, and returns whether it was a clean one, and the log.
    fn wait(&mut self) -> (bool, String) {
        let mut log = String::new();
        self.0
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut log)
            .unwrap();
        (self.0.wait().unwrap().success(), log)
    }
}

fn notify_socket(directory: &Path) -> UnixDatagram {
    let socket = UnixDatagram::bind(directory.join("notify")).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    socket
}

fn word(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 256];
    let count = socket.recv(&mut buffer).unwrap();
    String::from_utf8_lossy(&buffer[..count]).trim().to_owned()
}

#[test]
fn it_says_when_it_is_ready_and_a_signal_ends_it_cleanly() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("ringdown");
        let notify = notify_socket(parent.path());
        let mut daemon = Daemon::start(&directory, &parent.path().join("notify"));
        daemon.wait_until_ready();
        assert_eq!(word(&notify), "READY=1");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&directory), 0o700);
        for name in SOCKETS {
            assert_eq!(mode(&directory.join(name)), 0o600, "{name}");
            UnixStream::connect(directory.join(name)).unwrap();
        }
        daemon.signal(signal);
        assert_eq!(word(&notify), "STOPPING=1");
        let (clean, log) = daemon.wait();
        assert!(clean, "{log}");
        for name in SOCKETS {
            assert!(
                !directory.join(name).exists(),
                "{name} is left after {signal:?}"
            );
        }
    }
}

#[test]
fn the_sockets_of_a_killed_daemon_are_taken_over_and_the_log_says_so() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("ringdown");
    let notify = parent.path().join("nobody");
    let mut first = Daemon::start(&directory, &notify);
    first.wait_until_ready();
    first.signal(Signal::KILL);
    assert!(!first.wait().0);
    for name in SOCKETS {
        assert!(directory.join(name).exists(), "{name}");
    }
    let mut second = Daemon::start(&directory, &notify);
    second.wait_until_ready();
    for name in SOCKETS {
        UnixStream::connect(directory.join(name)).unwrap();
    }
    second.signal(Signal::TERM);
    let (clean, log) = second.wait();
    assert!(clean, "{log}");
    for name in SOCKETS {
        let said = |line: &&str| line.contains("took over the stale socket") && line.contains(name);
        assert!(
            log.lines().any(|line| said(&line)),
            "nothing about {name} in {log}"
        );
    }
    // A service manager that is not there is no reason to end.
    assert!(log.contains("cannot tell the service manager"), "{log}");
}
