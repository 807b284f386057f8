//! The client against the agent's own session code, through a host socket whose connections can be cut.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use agent::config::Config;
use agent::session::Options;
use tempfile::TempDir;
use wire::agent::PORT;

use super::logs::{LogOptions, write};
use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

/// The host socket of a guest whose agent works.
struct Guest {
    directory: TempDir,
    connections: Arc<Mutex<Vec<UnixStream>>>,
}

impl Guest {
    fn new(config: Config) -> Guest {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("web.sock")).unwrap();
        let connections: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
        let all = Arc::clone(&connections);
        let options = Options::new().with_config(config);
        thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                all.lock().unwrap().push(connection.try_clone().unwrap());
                let options = options.clone();
                thread::spawn(move || {
                    let mut line = vec![0; format!("CONNECT {PORT}\n").len()];
                    // A connection that was cut at once has nothing to be served.
                    if connection.read_exact(&mut line).is_ok()
                        && connection.write_all(b"OK 1073741824\n").is_ok()
                    {
                        let _ = agent::session::serve(&connection.into(), &options);
                    }
                });
            }
        });
        Guest {
            directory,
            connections,
        }
    }

    fn socket(&self) -> PathBuf {
        self.path("web.sock")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Every connection breaks.
    fn cut(&self) {
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

/// What was written so far, also while it goes on; writing fails once it is made to.
#[derive(Clone, Default)]
struct Output {
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Output {
    fn text(&self) -> String {
        String::from_utf8(self.bytes.lock().unwrap().clone()).unwrap()
    }

    fn wait_for(&self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.text().contains(text) {
            assert!(
                Instant::now() < deadline,
                "no {text:?} in {:?}",
                self.text()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn following(files: Vec<PathBuf>) -> LogOptions {
    LogOptions {
        files,
        follow: true,
        retry: PATIENCE,
        ..LogOptions::default()
    }
}

fn append(path: &Path, text: &str) {
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

/// A follower in the background; it goes on until the test's process ends.
fn follow(guest: &Guest, options: LogOptions) -> Output {
    let (output, socket) = (Output::default(), guest.socket());
    let mut out = output.clone();
    thread::spawn(move || write(Agent::at(&socket), &options, &mut out, &mut |_| {}));
    output
}

#[test]
fn a_log_that_is_followed_through_cuts_and_rotations_loses_and_doubles_nothing() {
    let guest = Guest::new(Config::default());
    let log = guest.path("log");
    append(&log, "line 0\n");
    let output = follow(&guest, following(vec![log.clone()]));
    output.wait_for("line 0\n");
    let mut expected = "line 0\n".to_owned();
    for number in 1..=400 {
        let line = format!("line {number} {}\n", "x".repeat(number % 90));
        append(&log, &line);
        expected.push_str(&line);
        match number % 40 {
            0 => guest.cut(),
            20 => {
                let _ = std::fs::rename(guest.path("log.1"), guest.path("log.2"));
                std::fs::rename(&log, guest.path("log.1")).unwrap();
            }
            // The next rotation must not find the file before last gone: at most two are kept here.
            19 => output.wait_for(&format!("line {} ", number - 1)),
            _ => {}
        }
    }
    append(&log, "end\n");
    expected.push_str("end\n");
    output.wait_for("end\n");
    assert_eq!(output.text(), expected);
}

#[test]
fn what_is_written_before_anything_was_seen_is_not_lost_either() {
    let guest = Guest::new(Config::default());
    let log = guest.path("log");
    append(&log, "old\n");
    let options = LogOptions {
        lines: Some(0),
        ..following(vec![log.clone(), guest.path("later")])
    };
    let (output, socket) = (Output::default(), guest.socket());
    let (mut out, (sender, notes)) = (output.clone(), std::sync::mpsc::channel());
    thread::spawn(move || {
        write(Agent::at(&socket), &options, &mut out, &mut |words| {
            let _ = sender.send(words.to_owned());
        })
    });
    // The second file is said to be missing once both have been read.
    let words = notes.recv_timeout(PATIENCE).unwrap();
    assert!(words.contains("waiting for it"), "{words}");
    guest.cut();
    append(&log, "new\n");
    append(&guest.path("later"), "first\n");
    output.wait_for("new\n");
    output.wait_for("first\n");
    assert!(!output.text().contains("old"), "{}", output.text());
}

#[test]
fn a_log_ends_with_its_file_and_is_resumed_too() {
    let guest = Guest::new(Config::default());
    let log = guest.path("log");
    let text: String = (0..20_000)
        .map(|number| format!("line {number}\n"))
        .collect();
    std::fs::write(&log, &text).unwrap();
    let options = LogOptions {
        follow: false,
        ..following(vec![log])
    };
    let mut output = Output::default();
    write(
        Agent::at(&guest.socket()),
        &options,
        &mut output,
        &mut |words| panic!("{words}"),
    )
    .unwrap();
    assert_eq!(output.text(), text);
}

#[test]
fn a_guest_that_does_not_come_back_is_given_up() {
    let guest = Guest::new(Config::default());
    let log = guest.path("log");
    append(&log, "one\n");
    let options = LogOptions {
        retry: Duration::from_secs(1),
        ..following(vec![log])
    };
    let (mut out, socket) = (Output::default(), guest.socket());
    let output = out.clone();
    let ended = thread::spawn(move || write(Agent::at(&socket), &options, &mut out, &mut |_| {}));
    output.wait_for("one\n");
    std::fs::remove_file(guest.socket()).unwrap();
    guest.cut();
    let error = ended.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("cannot connect"), "{error}");
    assert_eq!(output.text(), "one\n");
}

fn with_search_path(directory: &Path) -> Config {
    let mut config = Config::default();
    config.search_path = directory.into();
    config
}

/// A program of the guest with this script, found in its search path.
fn tool(guest_directory: &Path, name: &str, script: &str) -> Config {
    use std::os::unix::fs::PermissionsExt;
    let path = guest_directory.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    with_search_path(guest_directory)
}

#[test]
fn the_journal_is_resumed_behind_the_last_record() {
    // A journal of ten records. It notes how it was called, gives what comes behind the place, and goes on for ever.
    let script = r#"
        after=0
        for word; do case $word in --after-cursor=c*) after=${word#--after-cursor=c};; esac; done
        echo "$*" >> $(dirname $0)/calls
        n=$after
        while [ $n -lt 10 ]; do
            n=$((n + 1))
            printf '__CURSOR=c%s\n__REALTIME_TIMESTAMP=%s\nMESSAGE=record %s\nSYSLOG_IDENTIFIER=test\n\n' $n $n $n
            [ $n -eq 5 ] && [ $after -lt 5 ] && break
        done
        exec sleep 1000"#;
    let directory = tempfile::tempdir().unwrap();
    let mut config = tool(directory.path(), "journalctl", script);
    config.search_path.push(":/bin:/usr/bin");
    let guest = Guest::new(config);
    let output = follow(&guest, following(Vec::new()));
    output.wait_for("record 5\n");
    guest.cut();
    output.wait_for("record 10\n");
    let text = output.text();
    let records: Vec<&str> = text
        .lines()
        .map(|line| line.split("test: ").nth(1).unwrap())
        .collect();
    let expected: Vec<String> = (1..=10).map(|number| format!("record {number}")).collect();
    assert_eq!(records, expected);
    let calls = std::fs::read_to_string(directory.path().join("calls")).unwrap();
    assert_eq!(calls.lines().count(), 2);
    assert!(
        calls.lines().all(|call| call.contains("--follow")),
        "{calls}"
    );
}

#[test]
fn a_guest_without_a_journal_says_what_else_there_is() {
    let empty = tempfile::tempdir().unwrap();
    let guest = Guest::new(with_search_path(empty.path()));
    let error = write(
        Agent::at(&guest.socket()),
        &LogOptions::default(),
        &mut Output::default(),
        &mut |_| {},
    )
    .unwrap_err();
    assert!(error.to_string().contains("name the file"), "{error}");
    let directory = tempfile::tempdir().unwrap();
    let failing = tool(
        directory.path(),
        "journalctl",
        "echo no such unit >&2; exit 1",
    );
    let guest = Guest::new(failing);
    let error = write(
        Agent::at(&guest.socket()),
        &LogOptions::default(),
        &mut Output::default(),
        &mut |_| {},
    )
    .unwrap_err();
    assert!(error.to_string().contains("no such unit"), "{error}");
}

#[test]
fn what_is_switched_off_is_neither_announced_nor_done() {
    let guest = Guest::new(Config::default().without("stats"));
    let ask = Ask::Stats {
        interval_ms: 1000,
        count: 1,
    };
    let error = Job::ask(Agent::at(&guest.socket()), ask.clone()).unwrap_err();
    assert!(
        matches!(&error, GuestError::Unsupported(words) if words.contains("stats is off in its /etc/ringdown/agent.toml")),
        "{error}"
    );
    // A host that asks all the same.
    let mut job = Job {
        connection: Connection::open(&guest.socket(), "logs").unwrap(),
    };
    job.say(ask).unwrap();
    match job.answer().unwrap_err() {
        GuestError::Agent(report) => {
            assert_eq!(report.kind, wire::agent::ErrorKind::Forbidden);
            assert!(report.message.contains("agent.toml"), "{}", report.message);
        }
        other => panic!("{other}"),
    }
}

#[test]
fn figures_come_at_their_interval() {
    let guest = Guest::new(Config::default());
    let mut reports = 0;
    stats::watch(
        Agent::at(&guest.socket()),
        Duration::from_millis(100),
        3,
        |before, now| {
            assert!(now.uptime_ms >= before.uptime_ms && now.memory.total > 0);
            reports += 1;
            true
        },
    )
    .unwrap();
    assert_eq!(reports, 3);
    stats::watch(
        Agent::at(&guest.socket()),
        Duration::from_millis(100),
        0,
        |_, _| false,
    )
    .unwrap();
}

#[test]
fn the_clock_of_the_same_machine_is_not_off() {
    let guest = Guest::new(Config::default());
    let (before, after) = time::measure(Agent::at(&guest.socket()), false).unwrap();
    assert!(
        before.ns.unsigned_abs() <= before.uncertainty.as_nanos() as u64 + 1_000_000,
        "{before:?}"
    );
    assert_eq!(after, None);
}

/// An agent that begins a frame and goes on byte by byte, each time a moment later.
#[test]
fn an_agent_that_drips_its_answer_is_given_up_at_one_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let agent = thread::spawn(move || {
        let mut host = listener.accept().unwrap().0;
        let mut line = vec![0; format!("CONNECT {PORT}\n").len()];
        host.read_exact(&mut line).unwrap();
        host.write_all(b"OK 1073741824\n").unwrap();
        host.write_all(&[1, 0, 0, 0, 0, 16, 0, 0]).unwrap();
        host.set_read_timeout(Some(Duration::from_millis(10)))
            .unwrap();
        while host.write_all(&[1]).is_ok() {
            let _ = host.read(&mut [0; 100]);
        }
    });
    let ask = Ask::Power {
        action: wire::agent::job::Power::Shutdown,
        force_after_ms: None,
    };
    let at = Agent {
        host_socket: &path,
        patience: Duration::from_millis(100),
    };
    let error = Job::ask_silently(at, ask).unwrap_err();
    assert!(matches!(error, GuestError::NoAnswer { .. }), "{error}");
    agent.join().unwrap();
}
