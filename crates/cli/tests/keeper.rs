//! `ringdown hold`: at the limit of its descriptors, stopped, and released.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod program;

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use program::{Running, keeper_at, ringdown, run_with};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn a_keeper_without_descriptors_keeps_what_it_has() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keeper");
    let ringdown = env!("CARGO_BIN_EXE_ringdown");
    let mut keeper = Command::new("sh")
        .args([
            "-c",
            "ulimit -n 9; exec \"$0\" hold --socket \"$1\"",
            ringdown,
        ])
        .arg(&path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(keeper.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");

    let address = SocketAddrUnix::new(&path).unwrap();
    let call = |_| {
        let caller = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&caller, &address).unwrap();
        caller
    };
    let callers: Vec<_> = (0..8).map(call).collect();
    let mut log = BufReader::new(keeper.stderr.take().unwrap()).lines();
    let refused = log.find(|line| line.as_ref().unwrap().contains("cannot accept a caller"));
    assert!(refused.is_some(), "it ended");
    drop(callers);
    let released = Command::new(ringdown)
        .args(["hold", "--release", "--socket"])
        .arg(&path)
        .status();
    assert!(released.unwrap().success());
    assert!(keeper.wait().unwrap().success());
}

#[test]
fn a_release_removes_the_sockets_and_a_stopped_keeper_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let keeper_path = at("keeper");
    let keeper = keeper_at(&keeper_path);
    let id = Pid::from_child(&keeper.0);
    let mut serve = ringdown(&["serve", "--vm", "name=web", "--keeper"]);
    serve.arg(&keeper_path).arg("--runtime-dir").arg(at("run"));
    let mut daemon = Running::start(serve);
    daemon.wait_until_ready();

    kill_process(id, Signal::STOP).unwrap();
    let words = format!("`kill -CONT {id}`", id = id.as_raw_nonzero());
    let check = run_with(&at("run"), &["check"]).out;
    assert!(check.contains(&words), "{check}");
    let last = check.lines().last().unwrap();
    assert!(last.starts_with("1 error, "), "{check}");
    let release = || {
        let socket = keeper_path.to_str().unwrap();
        run_with(&at("run"), &["hold", "--release", "--socket", socket])
    };
    let refused = release();
    assert_eq!(refused.code, Some(1));
    assert!(refused.err.contains(&words), "{}", refused.err);
    kill_process(id, Signal::CONT).unwrap();

    assert!(release().err.contains("stop that first"));
    kill_process(Pid::from_child(&daemon.0), Signal::TERM).unwrap();
    daemon.0.wait().unwrap();
    UnixStream::connect(at("run/web.vhost")).unwrap();
    let released = release();
    assert_eq!(released.code, Some(0), "{}", released.err);
    assert!(!at("run/web.vhost").exists() && !keeper_path.exists());
}
