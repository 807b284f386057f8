//! `ringdown hold` at the limit of its descriptors.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};

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
