//! The everyday jobs of the agent's binary: its configuration and hosts that break the rules.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::{Agent, command, wait_until};
use wire::agent::job::{Answer, Ask, FileLog, LogSource, Logs};
use wire::agent::{ErrorKind, Frame, Stream};

#[test]
fn a_configuration_that_cannot_be_meant_keeps_the_agent_from_starting() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("agent.toml");
    std::fs::write(&file, "[methods]\nclipbord = false\n").unwrap();
    let output = command()
        .arg(format!("unix:{}/agent.sock", directory.path().display()))
        .arg("--config")
        .arg(&file)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(words.contains("did you mean \"clipboard\""), "{words}");
    assert!(words.contains("agent.toml"), "{words}");
}

#[test]
fn figures_come_and_a_host_that_talks_meanwhile_is_refused() {
    let agent = Agent::start();
    let mut client = agent.connect();
    assert!(client.greet().can("stats"));
    let ask = Frame::Ask(Ask::Stats {
        interval_ms: 3_600_000,
        count: 0,
    });
    client.send(&ask);
    match client.next() {
        Some(Frame::Answer(Answer::Stats(stats))) => assert!(stats.uptime_ms > 0),
        other => panic!("expected figures, not {other:?}"),
    }
    client.send(&ask);
    assert_eq!(client.expect_error().kind, ErrorKind::Protocol);
}

#[test]
fn a_log_that_is_followed_ends_with_its_host() {
    let agent = Agent::start();
    let log = agent.directory.path().join("log");
    std::fs::write(&log, "one\n").unwrap();
    let ask = |path: &Path| {
        Frame::Ask(Ask::Logs(Logs {
            source: LogSource::Files(vec![FileLog {
                path: std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()).to_vec(),
                cursor: None,
            }]),
            lines: None,
            follow: true,
        }))
    };
    let mut client = agent.connect();
    client.greet();
    client.send(&ask(&log));
    assert!(
        matches!(client.next(), Some(Frame::Answer(Answer::Begin(places))) if places.len() == 1)
    );
    assert!(matches!(client.next(), Some(Frame::Answer(Answer::Log(_)))));
    let threads = || {
        std::fs::read_dir(format!("/proc/{}/task", agent.pid()))
            .unwrap()
            .count()
    };
    let while_following = threads();
    drop(client);
    wait_until("the operation ends", || threads() < while_following);
    let mut client = agent.connect();
    client.greet();
    client.send(&ask(Path::new("relative")));
    assert_eq!(client.expect_error().kind, ErrorKind::InvalidRequest);
}

#[test]
fn a_text_for_the_clipboard_is_as_long_as_announced() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.greet();
    client.send(&Frame::Ask(Ask::ClipboardSet { len: 3 }));
    client.send(&Frame::Data {
        stream: Stream::Stdin,
        bytes: b"four",
    });
    assert_eq!(client.expect_error().kind, ErrorKind::Protocol);
}
