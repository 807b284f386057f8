//! `ringdown exec` against real guests, over vsock and over virtio-serial alone: streams apart, exit codes, terminals, bulk, and waiting for
//! a guest to be ready.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::thread;
use std::time::Instant;

use e2e::host;
use e2e::pattern::Pattern;
use e2e::terminal::{read_until, terminal};
use e2e::{Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Meeting, Scene, Shared, SharedGuard};
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{Winsize, tcsetwinsize};

static SCENE: Shared<Scene> = Shared::new();

/// How much passes through `exec` each way, in bytes.
const BULK_BYTES: u64 = 100 * 1024 * 1024;

fn scene() -> SharedGuard<Scene> {
    SCENE.get(|| {
        let daemon = DaemonSpec::new()
            .vm("web", 3)
            .vm("db", 4)
            .vm("late", 5)
            .vm("never", 6)
            .serial_vm("attic", Meeting::QemuConnects)
            .serial_vm("cellar", Meeting::QemuListens);
        let guests = vec![
            GuestSpec::new("web", Kernel::V6_1),
            GuestSpec::new("db", Kernel::V6_12),
            GuestSpec::new("attic", Kernel::V6_1),
            GuestSpec::new("cellar", Kernel::V6_12),
        ];
        Scene::start_with(daemon, guests).unwrap()
    })
}

/// A `ringdown exec` under way with all its streams in the test's hands.
fn start(daemon: &Daemon, arguments: &[&str]) -> Child {
    daemon
        .command(arguments)
        .unwrap()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn streams_stay_apart_and_the_exit_code_comes_back() {
    let scene = scene();
    for guest in &scene.guests {
        let path = scene.daemon.runtime_directory().join("input");
        let input = Pattern::new(1).take(300_000);
        std::fs::write(&path, &input).unwrap();
        let line = "cat; echo err >&2; exit 7";
        let output = scene
            .daemon
            .command(&["exec", guest.name(), "--", "sh", "-c", line])
            .unwrap()
            .stdin(File::open(&path).unwrap())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(7));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "err\n");
        assert!(output.stdout == input, "{} bytes", output.stdout.len());
    }
}

#[test]
fn endings_of_every_kind_have_their_codes() {
    let scene = scene();
    for guest in &scene.guests {
        let code = |command: &[&str]| {
            let mut arguments = vec!["exec", guest.name(), "--"];
            arguments.extend(command);
            scene.daemon.run(&arguments).unwrap().status.code()
        };
        assert_eq!(code(&["true"]), Some(0));
        assert_eq!(code(&["sh", "-c", "exit 255"]), Some(255));
        assert_eq!(code(&["sh", "-c", "kill -9 $$"]), Some(137));
        assert_eq!(code(&["no-such-command"]), Some(127));
        assert_eq!(code(&["/etc/passwd"]), Some(126));
        // A command that leaves its input and its output early.
        assert_eq!(code(&["sh", "-c", "exec <&- >&- 2>&-; exit 3"]), Some(3));
    }
    let output = scene.daemon.run(&["exec", "nobody", "--", "true"]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("nobody"));
}

#[test]
fn a_hundred_mebibytes_pass_through_exec_both_ways() {
    let scene = scene();
    for guest in &scene.guests {
        let started = Instant::now();
        let mut child = start(&scene.daemon, &["exec", guest.name(), "--", "cat"]);
        let mut stdin = child.stdin.take().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let feeder = thread::spawn(move || {
            host::send(&mut stdin, &mut Pattern::new(2), BULK_BYTES).unwrap();
        });
        let received = host::drain(&mut stdout, &mut Pattern::new(2)).unwrap();
        feeder.join().unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(received, BULK_BYTES);
        assert_eq!(output.status.code(), Some(0));
        assert!(output.stderr.is_empty());
        eprintln!(
            "{}: {} MiB in and out of exec in {:?}",
            guest.name(),
            BULK_BYTES >> 20,
            started.elapsed()
        );
    }
}

#[test]
fn a_terminal_has_the_size_of_the_users_and_follows_it() {
    let scene = scene();
    for guest in &scene.guests {
        let size = |rows, columns| Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let (mut screen, terminal) = terminal().unwrap();
        tcsetwinsize(&terminal, size(33, 101)).unwrap();
        let line =
            "stty size; trap 'stty size; exit 5' WINCH; echo armed; while :; do sleep 1; done";
        let mut child = scene
            .daemon
            .command(&["exec", "-t", guest.name(), "--", "sh", "-c", line])
            .unwrap()
            .stdin(terminal.try_clone().unwrap())
            .stdout(terminal.try_clone().unwrap())
            .stderr(terminal.try_clone().unwrap())
            .spawn()
            .unwrap();
        let mut shown = String::new();
        read_until(&mut screen, &mut shown, "armed").unwrap();
        assert!(shown.contains("33 101"), "{shown:?}");
        tcsetwinsize(&terminal, size(44, 122)).unwrap();
        let process = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        kill_process(process, Signal::WINCH).unwrap();
        read_until(&mut screen, &mut shown, "44 122").unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(5));
    }
}

#[test]
fn keys_at_a_terminal_are_the_commands_own() {
    let scene = scene();
    for guest in &scene.guests {
        let (mut screen, terminal) = terminal().unwrap();
        let line = "trap 'echo interrupted; exit 9' INT; echo armed; while :; do sleep 1; done";
        let mut child = scene
            .daemon
            .command(&["exec", "-t", guest.name(), "--", "sh", "-c", line])
            .unwrap()
            .stdin(terminal.try_clone().unwrap())
            .stdout(terminal.try_clone().unwrap())
            .stderr(terminal.try_clone().unwrap())
            .spawn()
            .unwrap();
        let mut shown = String::new();
        read_until(&mut screen, &mut shown, "armed").unwrap();
        // Ctrl-C: a byte for the guest's terminal, no signal for the client.
        screen.write_all(b"\x03").unwrap();
        read_until(&mut screen, &mut shown, "interrupted").unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(9));
    }
}

#[test]
fn a_signal_to_the_client_reaches_the_command() {
    let scene = scene();
    for guest in &scene.guests {
        let line = "trap 'echo got it; exit 4' TERM; echo armed; while :; do sleep 1; done";
        let mut child = start(
            &scene.daemon,
            &["exec", guest.name(), "--", "sh", "-c", line],
        );
        let mut stdout = child.stdout.take().unwrap();
        let mut shown = String::new();
        read_until(&mut stdout, &mut shown, "armed").unwrap();
        let process = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        kill_process(process, Signal::TERM).unwrap();
        read_until(&mut stdout, &mut shown, "got it").unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(4));
    }
}

#[test]
fn exec_waits_for_a_guest_that_has_yet_to_boot() {
    let scene = scene();
    let mut early = start(
        &scene.daemon,
        &["exec", "--wait", "120", "late", "--", "uname", "-r"],
    );
    assert!(early.try_wait().unwrap().is_none());
    let guest = Guest::boot(GuestSpec::new("late", Kernel::V6_12).attached(&scene.daemon)).unwrap();
    let output = early.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim_end(),
        guest.release()
    );

    // A command that never comes fails after the wait that was asked for.
    let mut waiting = start(
        &scene.daemon,
        &["exec", "never", "--wait", "0", "--", "true"],
    );
    assert_eq!(waiting.wait().unwrap().code(), Some(1));
    let mut said = String::new();
    waiting
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert!(said.contains("never"), "{said}");
}
