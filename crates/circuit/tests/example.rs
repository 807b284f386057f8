//! The example is run, against a switchboard that gives windows and one that does not.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use test_switchboard::{Form, Switchboard};

/// Where cargo put it: beside the directory of this test.
fn program(switchboard: &Switchboard) -> Command {
    let test = std::env::current_exe().unwrap();
    let directory = test.parent().unwrap().parent().unwrap();
    let path: PathBuf = directory.join("examples/circuit_copy");
    assert!(
        path.is_file(),
        "{} is not there: run this with `cargo test -p ringdown-circuit`, which builds it",
        path.display()
    );
    let mut command = Command::new(path);
    command.env("RINGDOWN_CIRCUIT_SOCKET", switchboard.path());
    command
}

fn start(command: &mut Command) -> (Child, BufReader<ChildStdout>) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let said = BufReader::new(child.stdout.take().unwrap());
    (child, said)
}

fn line(said: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// What it says, which has these words.
fn run(command: &mut Command, words: &[&str]) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complained}");
    for word in words {
        assert!(said.contains(word), "{word}: {said}");
    }
    said
}

#[test]
fn the_example_copies_echoes_and_goes_round() {
    for (form, kind) in [
        (Form::Window, "kind=zero-copy"),
        (Form::Stream, "kind=stream"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let switchboard = Switchboard::start(directory.path(), form).unwrap();
        let (mut receiver, mut received) = start(program(&switchboard).args(["receive", "5", "2"]));
        assert_eq!(line(&mut received), "listening port=5");
        for (bytes, seed) in [("20000003", "7"), ("0", "8")] {
            let sent = run(
                program(&switchboard).args(["send", "db:5", bytes, seed]),
                &["sent", kind, &format!("bytes={bytes}"), "checksum="],
            );
            let checksum = sent.split(' ').find(|word| word.starts_with("checksum="));
            let served = line(&mut received);
            assert!(served.contains(checksum.unwrap()), "{served}");
            assert!(served.contains(kind), "{served}");
        }
        assert!(receiver.wait().unwrap().success());

        let (mut echo, mut echoed) = start(program(&switchboard).args(["echo", "6", "6"]));
        assert_eq!(line(&mut echoed), "listening port=6");
        let rounds = ["ping", "db:6", "100", "1000"];
        run(program(&switchboard).args(rounds), &["pinged", "count=100"]);
        let zero_copy = match form {
            Form::Window => "zero-copy=5",
            Form::Stream => "zero-copy=0",
        };
        let cycles = ["cycle", "db:6", "5"];
        run(program(&switchboard).args(cycles), &["count=5", zero_copy]);
        assert!(echo.wait().unwrap().success());
    }
}

#[test]
fn the_example_says_how_a_circuit_ends() {
    let directory = tempfile::tempdir().unwrap();
    let switchboard = Switchboard::start(directory.path(), Form::Window).unwrap();
    let mut listener = circuit::Connector::new()
        .socket(switchboard.path())
        .listen(7)
        .unwrap();
    let (mut holding, mut held) = start(program(&switchboard).args(["hold", "db:7"]));
    let callee = listener.accept().unwrap();
    assert!(line(&mut held).starts_with("holding kind=zero-copy"));
    switchboard.revoke_all().unwrap();
    // A byte on the wake channel: the other side checks its rings.
    drop(callee);
    let ended = line(&mut held);
    assert!(ended.contains("revoked"), "{ended}");
    assert!(holding.wait().unwrap().success());
}
