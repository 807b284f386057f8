//! A guest whose agent has stopped answering, as where it is stopped or its VM is paused: what was started with `ringdown` can be ended all the same.

#![allow(clippy::unwrap_used)]

mod program;
mod ready_guest;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdout, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use agent::session::Options;
use fake_daemon::FakeDaemon;
use program::{Running, ringdown};
use rustix::process::{Pid, Signal, kill_process};

/// A daemon with a guest that is ready.
struct House {
    daemon: FakeDaemon,
    /// The agent answers no further caller.
    silent: Arc<AtomicBool>,
    calls: Arc<AtomicUsize>,
    _uplink: UnixStream,
}

impl House {
    fn start() -> House {
        let daemon = FakeDaemon::start(&["name=web"], &[]);
        let (silent, calls) = <(Arc<AtomicBool>, Arc<AtomicUsize>)>::default();
        let (is_silent, options) = (Arc::clone(&silent), Options::new());
        let (session, called) = (options.clone(), Arc::clone(&calls));
        let serve = move |stream: UnixStream| {
            called.fetch_add(1, Ordering::SeqCst);
            if !is_silent.load(Ordering::SeqCst) {
                let _ = agent::session::serve(&stream.into(), &session);
                return;
            }
            // It takes what comes, and says nothing.
            let _ = std::io::copy(&mut &stream, &mut std::io::sink());
        };
        let uplink = ready_guest::announce_serving(&daemon, "web", options, |_| (), serve);
        House {
            daemon,
            silent,
            calls,
            _uplink: uplink,
        }
    }

    fn run(&self, arguments: &[&str]) -> Running {
        let mut command = ringdown(&arguments[..1]);
        command
            .arg("--runtime-dir")
            .arg(self.daemon.runtime_dir())
            .args(&arguments[1..])
            .stderr(Stdio::piped());
        Running::start(command)
    }

    fn wait_for_calls(&self, count: usize, why: &str) {
        until(why, || self.calls.load(Ordering::SeqCst) >= count);
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn send(program: &Running, signal: Signal) {
    let pid = i32::try_from(program.0.id()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// How it ended, and what it said on standard error.
fn end(mut program: Running) -> (ExitStatus, String) {
    until("it ends", || program.0.try_wait().unwrap().is_some());
    let mut said = String::new();
    let mut err = program.0.stderr.take().unwrap();
    err.read_to_string(&mut said).unwrap();
    (program.0.wait().unwrap(), said)
}

fn lines(program: &mut Running) -> BufReader<ChildStdout> {
    BufReader::new(program.0.stdout.take().unwrap())
}

fn expect_line(lines: &mut BufReader<ChildStdout>, expected: &str) {
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert_eq!(line.trim_end(), expected);
}

#[test]
fn exec_ends_by_itself_after_a_signal_that_an_agent_does_not_answer() {
    let house = House::start();
    // A command that does not end by the signal is what a stopped agent looks like.
    let script = "trap '' TERM INT; echo up; while :; do sleep 1; done";
    let mut program = house.run(&["exec", "web", "--", "sh", "-c", script]);
    let mut lines = lines(&mut program);
    expect_line(&mut lines, "up");
    house.silent.store(true, Ordering::SeqCst);
    send(&program, Signal::TERM);
    let (status, said) = end(program);
    assert_eq!(status.code(), Some(255), "{said}");
    assert!(said.contains("did not answer within 5 s"), "{said}");
    assert!(
        said.contains("; the guest's command may still run"),
        "{said}"
    );
}

#[test]
fn a_command_of_an_agent_that_answers_takes_its_time_after_a_signal() {
    let house = House::start();
    let directory = tempfile::tempdir().unwrap();
    let end_file = directory.path().join("end");
    let script = format!(
        "trap 'echo got' TERM; echo up; while [ ! -e {} ]; do sleep 0.1; done; exit 3",
        end_file.display()
    );
    let mut program = house.run(&["exec", "web", "--", "sh", "-c", &script]);
    let mut lines = lines(&mut program);
    expect_line(&mut lines, "up");
    let before = house.calls.load(Ordering::SeqCst);
    send(&program, Signal::TERM);
    expect_line(&mut lines, "got");
    house.wait_for_calls(before + 1, "the agent is asked whether it runs");
    std::fs::write(end_file, "").unwrap();
    let (status, said) = end(program);
    assert_eq!(status.code(), Some(3), "{said}");
}

#[test]
fn the_wait_that_is_given_is_the_agents_too() {
    let house = House::start();
    house.silent.store(true, Ordering::SeqCst);
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let forwarded = format!("{place}/socket:localhost:80");
    for words in [
        &["exec", "--wait", "3", "web", "true"][..],
        &["cp", "--wait", "3", "web:/etc/hostname", place],
        &["forward", "--wait", "3", "web", "-L", &forwarded],
        &["stats", "--wait", "3", "web"],
        &["logs", "--wait", "3", "--retry", "0", "web"],
        &["time", "--wait", "3", "web"],
        &["freeze", "--wait", "3", "web"],
    ] {
        let (status, said) = end(house.run(words));
        assert_eq!(status.code(), Some(1), "{words:?}: {said}");
        assert!(
            said.contains("the guest's agent did not answer within 3 s"),
            "{words:?}: {said}"
        );
    }
}

#[test]
fn a_signal_ends_at_once_what_waits_for_a_silent_agent() {
    let house = House::start();
    house.silent.store(true, Ordering::SeqCst);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "content").unwrap();
    let (file, place) = (file.to_str().unwrap(), directory.path().to_str().unwrap());
    let forwarded = format!("{place}/socket:localhost:80");
    for words in [
        &["exec", "--wait", "1h", "web", "true"][..],
        &["shell", "--wait", "1h", "web"],
        &["cp", "--wait", "1h", "--retry", "1h", file, "web:/tmp"],
        &[
            "cp",
            "--wait",
            "1h",
            "--retry",
            "1h",
            "web:/etc/hostname",
            place,
        ],
        &["sync", "--wait", "1h", "--retry", "1h", place, "web:/tmp/x"],
        &["forward", "--wait", "1h", "web", "-L", &forwarded],
        &["stats", "--wait", "1h", "web"],
        &["logs", "--wait", "1h", "--retry", "1h", "web"],
        &["time", "--wait", "1h", "web"],
        &["freeze", "--wait", "1h", "web"],
        &["thaw", "web"],
        &["lock", "--wait", "1h", "web"],
        &["shutdown", "--timeout", "1h", "web"],
        &["bench", "--wait", "1h", "web"],
    ] {
        let before = house.calls.load(Ordering::SeqCst);
        let program = house.run(words);
        house.wait_for_calls(before + 1, &words.join(" "));
        let begun = Instant::now();
        send(&program, Signal::TERM);
        let (status, said) = end(program);
        let code = status.code().or(status.signal().map(|signal| 128 + signal));
        assert!(
            matches!(code, Some(130 | 143)),
            "{words:?}: {status} {said}"
        );
        // The agent would be waited for longer.
        assert!(begun.elapsed() < Duration::from_secs(25), "{words:?}");
    }
}
