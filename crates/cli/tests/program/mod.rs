//! The program, and what becomes of a run of it.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{BufRead, BufReader, ErrorKind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub struct Outcome {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// A command of the program, apart from whatever the environment of the test says.
pub fn ringdown(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdown"));
    command.args(arguments).stdin(Stdio::null());
    command
        .env_remove("RINGDOWN_RUNTIME_DIR")
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("RINGDOWN_LOG");
    command
}

/// A keeper that listens at this socket.
pub fn keeper_at(socket: &Path) -> Running {
    let mut hold = ringdown(&["hold", "--socket"]);
    hold.arg(socket);
    let mut keeper = Running::start(hold);
    keeper.wait_until_ready();
    keeper
}

pub fn finish(mut command: Command) -> Outcome {
    let deadline = Instant::now() + Duration::from_secs(20);
    let output = loop {
        match command.output() {
            // A program that was just copied is busy while another test's child still has the descriptor it was
            // written through, which it loses when it executes its own program.
            Err(error)
                if error.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < deadline => {}
            output => break output.expect("a program that can be started"),
        }
    };
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Outcome {
        code: output.status.code(),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

pub fn run(arguments: &[&str]) -> Outcome {
    finish(ringdown(arguments))
}

pub fn run_with(runtime_dir: &Path, arguments: &[&str]) -> Outcome {
    let mut command = ringdown(arguments);
    command.arg("--runtime-dir").arg(runtime_dir);
    finish(command)
}

/// A process that is killed when the test ends.
pub struct Running(pub Child);

impl Running {
    /// Starts it, with its output to be read.
    pub fn start(mut command: Command) -> Running {
        Running(
            command
                .stdout(Stdio::piped())
                .spawn()
                .expect("a program that can be started"),
        )
    }

    /// Waits until it says that it serves.
    pub fn wait_until_ready(&mut self) {
        let mut ready = String::new();
        let out = self.0.stdout.take().expect("output that nobody has taken");
        BufReader::new(out).read_line(&mut ready).expect("a line");
        assert_eq!(ready, "ready\n");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[track_caller]
pub fn assert_refused(outcome: &Outcome, code: i32, message: &str) {
    assert_eq!(outcome.code, Some(code), "{}", outcome.err);
    assert!(
        outcome.err.contains(message),
        "expected …{message}…\nfound {}",
        outcome.err
    );
    assert_eq!(outcome.out, "");
}
