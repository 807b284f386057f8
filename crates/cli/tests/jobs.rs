//! The everyday jobs as a person meets them: the program, a daemon in this process with a fake worker, and the agent's own session code
//! behind the VM's host socket. The guest's tools are scripts, found in a search path that has nothing else: no test can turn this
//! machine off.

#![allow(clippy::unwrap_used)]

mod program;
mod ready_guest;

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agent::config::Config;
use agent::session::Options;
use fake_daemon::FakeDaemon;
use program::{Outcome, Running, assert_refused, run_with};
use tempfile::TempDir;

/// A guest whose agent is ready, and its tools.
struct Guest {
    tools: TempDir,
    uplink: UnixStream,
}

impl Guest {
    fn start(daemon: &FakeDaemon, vm: &str, tools: &[(&str, &str)]) -> Guest {
        let directory = tempfile::tempdir().unwrap();
        for (name, script) in tools {
            let path = directory.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut config = Config::default();
        config.search_path = directory.path().into();
        let options = Options::new().with_config(config);
        let uplink = ready_guest::announce(daemon, vm, options);
        Guest {
            tools: directory,
            uplink,
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.tools.path().join(name)
    }

    fn wait_for_file(&self, name: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            match std::fs::read_to_string(self.file(name)) {
                Ok(text) if text.ends_with('\n') => return text,
                _ => assert!(Instant::now() < deadline, "nobody writes {name}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Its agent ends, and its VMM with it if that is said.
    fn leave(&self, daemon: &FakeDaemon, vm: &str, vmm: bool) {
        self.uplink.shutdown(Shutdown::Both).unwrap();
        daemon.worker().set_state(vm, !vmm, false);
    }
}

/// A guest with either init system: whichever this machine is taken for, what is called is a script.
const POWER: &str = "echo \"$(basename $0) $*\" >> $(dirname $0)/power";
const POWER_TOOLS: [(&str, &str); 3] =
    [("systemctl", POWER), ("poweroff", POWER), ("reboot", POWER)];

fn run(daemon: &FakeDaemon, arguments: &[&str]) -> Outcome {
    run_with(daemon.runtime_dir(), arguments)
}

#[test]
fn a_guest_is_shut_down_when_its_line_says_so() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let guest = Guest::start(&daemon, "web", &POWER_TOOLS);
    let (outcome, called) = std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| run(&daemon, &["shutdown", "web", "--timeout", "60"]));
        let called = guest.wait_for_file("power");
        // An agent that is gone is not a guest that is off.
        guest.uplink.shutdown(Shutdown::Both).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        assert!(!shutdown.is_finished());
        daemon.worker().set_state("web", false, false);
        (shutdown.join().unwrap(), called)
    });
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    assert!(
        outcome.out.starts_with("web: shut down after "),
        "{}",
        outcome.out
    );
    assert!(called.contains("poweroff"), "{called}");
    let again = run(&daemon, &["shutdown", "web"]);
    assert_eq!(
        (again.code, again.out.as_str()),
        (
            Some(0),
            "web: is off: no VMM is attached (one that was cut off may still run)\n"
        )
    );
}

#[test]
fn a_vmm_that_stays_when_its_guest_has_halted_is_told_of() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let guest = Guest::start(&daemon, "web", &POWER_TOOLS);
    let outcome = std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| run(&daemon, &["shutdown", "web", "--timeout", "60"]));
        guest.wait_for_file("power");
        guest.leave(&daemon, "web", false);
        shutdown.join().unwrap()
    });
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    let said = outcome.out.trim_end();
    assert!(
        said.starts_with("web: shut down after ")
            && said.ends_with("; its VMM goes on, and has to be ended"),
        "{said}"
    );
}

#[test]
fn a_guest_that_is_off_does_not_reboot_or_fall_asleep() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    for command in [
        &["reboot", "web"][..],
        &["suspend", "web"],
        &["shutdown", "--suspend", "web"],
    ] {
        let outcome = run(&daemon, command);
        assert_refused(&outcome, 1, "VM \"web\": is off: no VMM is attached");
        assert_eq!(outcome.out, "", "{command:?}");
    }
}

#[test]
fn a_guest_that_does_not_go_is_told_of() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _guest = Guest::start(&daemon, "web", &POWER_TOOLS);
    let stays = run(&daemon, &["shutdown", "web", "--timeout", "1"]);
    assert_refused(
        &stays,
        1,
        "it has not shut down within 1 s, though it was asked",
    );
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let fails = "echo no way >&2; exit 1";
    let _guest = Guest::start(&daemon, "web", &[("systemctl", fails), ("reboot", fails)]);
    assert_refused(
        &run(&daemon, &["reboot", "web"]),
        1,
        "reboot failed: no way",
    );
}

#[test]
fn a_guest_whose_vmm_ends_does_not_come_back_of_a_reboot() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let guest = Guest::start(&daemon, "web", &POWER_TOOLS);
    let outcome = std::thread::scope(|scope| {
        let reboot = scope.spawn(|| run(&daemon, &["reboot", "web", "--timeout", "2m"]));
        guest.wait_for_file("power");
        guest.leave(&daemon, "web", true);
        reboot.join().unwrap()
    });
    let [waits, ended] = outcome.err.lines().collect::<Vec<_>>()[..] else {
        panic!("{}", outcome.err)
    };
    assert!(
        waits.starts_with(
            "waiting up to 118 s more for VM \"web\" to come back of its reboot: its VMM has left"
        ),
        "{waits}"
    );
    assert!(ended.contains("its VMM has ended"), "{ended}");
    assert!(ended.ends_with("start it again"), "{ended}");
    assert_eq!(outcome.code, Some(1));
}

#[test]
fn all_guests_are_shut_down_together() {
    let daemon = FakeDaemon::start(&["name=web", "name=db", "name=off", "name=booting"], &[]);
    daemon.worker().set_state("booting", true, true);
    let web = Guest::start(&daemon, "web", &POWER_TOOLS);
    let db = Guest::start(&daemon, "db", &POWER_TOOLS);
    let outcome = std::thread::scope(|scope| {
        let all = scope.spawn(|| run(&daemon, &["shutdown", "--all", "--timeout", "60"]));
        // Both are asked before either is off.
        web.wait_for_file("power");
        db.wait_for_file("power");
        web.leave(&daemon, "web", true);
        db.leave(&daemon, "db", false);
        all.join().unwrap()
    });
    assert_eq!(outcome.code, Some(0), "{}", outcome.err);
    let mut lines: Vec<&str> = outcome.out.lines().collect();
    lines.sort_unstable();
    assert!(
        lines[0].starts_with("booting: skipped: the guest's kernel runs"),
        "{lines:?}"
    );
    assert!(lines[1].starts_with("db: shut down after"), "{lines:?}");
    let off = "off: is off: no VMM is attached (one that was cut off may still run)";
    assert_eq!(lines[2], off);
    assert!(lines[3].starts_with("web: shut down after"), "{lines:?}");
    // Of one alone it is said why it is not asked.
    assert_refused(
        &run(&daemon, &["shutdown", "booting", "--timeout", "1"]),
        1,
        "VM \"booting\" cannot be asked to shut down: the guest's kernel runs, but its ringdown-agent has not called",
    );
    let off = run(&daemon, &["shutdown", "off"]);
    assert_eq!(off.code, Some(0), "{}", off.err);
    assert!(
        off.out.starts_with("off: is off: no VMM is attached"),
        "{}",
        off.out
    );
    assert_refused(&program::run(&["shutdown"]), 2, "required");
}

/// A program of the desktop: it has the display in its environment. Ends with the test.
struct Program(Child);

impl Program {
    fn start(display: &str, session: &str) -> Program {
        let mut command = Command::new("sleep");
        command
            .arg("1000")
            .env_clear()
            .env(display, "test-display")
            .env("XDG_SESSION_ID", session);
        Program(command.stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A `loginctl` that knows one session of the user who runs the test.
fn loginctl(session: &str) -> String {
    let uid = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap());
    format!(
        "case $1 in list-sessions) echo ' {session} {uid} me seat0 tty2';; \
         show-session) printf 'User={uid}\\nActive=yes\\nClass=user\\nSeat=seat0\\nRemote=no\\n';; \
         *) echo \"$*\" >> $(dirname $0)/locked;; esac"
    )
}

fn run_with_input(daemon: &FakeDaemon, arguments: &[&str], input: &[u8]) -> (Option<i32>, String) {
    let mut command = program::ringdown(arguments);
    command.arg("--runtime-dir").arg(daemon.runtime_dir());
    let mut child = command
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It may end before it has read everything.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn the_clipboard_goes_both_ways_and_the_screen_is_locked() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let session = format!("wl{}", std::process::id());
    let _program = Program::start("WAYLAND_DISPLAY", &session);
    let tools = [
        ("loginctl", loginctl(&session)),
        // As the real one: it stays to give the text to who pastes it.
        (
            "wl-copy",
            "cat > $(dirname $0)/clip; echo $WAYLAND_DISPLAY > $(dirname $0)/display; sleep 30 &"
                .to_owned(),
        ),
        (
            "wl-paste",
            "cat $(dirname $0)/clip 2> /dev/null || { echo 'Nothing is copied' >&2; exit 1; }"
                .to_owned(),
        ),
    ];
    let tools: Vec<(&str, &str)> = tools
        .iter()
        .map(|(name, script)| (*name, script.as_str()))
        .collect();
    let guest = Guest::start(&daemon, "web", &tools);
    let empty = run(&daemon, &["clipboard", "get", "web"]);
    assert_eq!(
        (empty.code, empty.out.as_str()),
        (Some(0), ""),
        "{}",
        empty.err
    );
    let text = "x".repeat(1024 * 1024 - 7) + "äöü\n";
    let (code, words) = run_with_input(&daemon, &["clipboard", "set", "web"], text.as_bytes());
    assert_eq!(code, Some(0), "{words}");
    assert_eq!(
        std::fs::read_to_string(guest.file("display")).unwrap(),
        "test-display\n"
    );
    let got = run(&daemon, &["clipboard", "get", "web"]);
    assert!(got.out == text, "{} bytes: {}", got.out.len(), got.err);
    let (code, words) = run_with_input(
        &daemon,
        &["clipboard", "set", "web"],
        (text + "x").as_bytes(),
    );
    assert_eq!(code, Some(1));
    assert!(words.contains("more than 1048576 bytes"), "{words}");
    std::fs::write(guest.file("clip"), vec![b'x'; 1024 * 1024 + 1]).unwrap();
    assert_refused(
        &run(&daemon, &["clipboard", "get", "web"]),
        1,
        "more than 1048576 bytes",
    );
    assert_eq!(run(&daemon, &["lock", "web"]).code, Some(0));
    let locked = std::fs::read_to_string(guest.file("locked")).unwrap();
    assert_eq!(locked, format!("lock-session {session}\n"));
}

#[test]
fn without_a_desktop_there_is_a_clear_answer() {
    let daemon = FakeDaemon::start(&["name=web", "name=db", "name=x"], &[]);
    let _web = Guest::start(&daemon, "web", &[]);
    assert_refused(
        &run(&daemon, &["clipboard", "get", "web"]),
        1,
        "no loginctl in this guest",
    );
    assert_refused(
        &run(&daemon, &["lock", "web"]),
        1,
        "its screens cannot be locked",
    );
    let _db = Guest::start(&daemon, "db", &[("loginctl", "exit 0")]);
    assert_refused(
        &run(&daemon, &["clipboard", "get", "db"]),
        1,
        "no user is logged in",
    );
    let session = format!("x{}", std::process::id());
    let _program = Program::start("DISPLAY", &session);
    let _x = Guest::start(&daemon, "x", &[("loginctl", &loginctl(&session))]);
    assert_refused(
        &run(&daemon, &["clipboard", "get", "x"]),
        1,
        "install xclip",
    );
}

#[test]
fn figures_for_people_scripts_and_prometheus() {
    let daemon = FakeDaemon::start(&["name=web", "name=off"], &[]);
    let _guest = Guest::start(&daemon, "web", &[]);
    let report = run(&daemon, &["stats", "web"]);
    assert_eq!(report.code, Some(0), "{}", report.err);
    assert_eq!(report.out.matches("web  up ").count(), 1, "{}", report.out);
    assert!(
        report.out.starts_with("web  up ") && report.out.contains("\n  mem   "),
        "{}",
        report.out
    );
    let lines = run(
        &daemon,
        &[
            "stats",
            "web",
            "--interval",
            "100ms",
            "--count",
            "2",
            "--json",
        ],
    )
    .out;
    assert_eq!(lines.lines().count(), 2);
    for line in lines.lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(value["vm"], "web");
        assert!(value["stats"]["memory"]["total"].as_u64().unwrap() > 0);
    }
    let page = run(&daemon, &["metrics"]).out;
    for line in [
        "ringdown_vm_ready{vm=\"web\",domain=\"default\"} 1",
        "ringdown_vm_ready{vm=\"off\",domain=\"default\"} 0",
        "ringdown_guest_up{vm=\"web\",domain=\"default\"} 1",
        "ringdown_guest_up{vm=\"off\",domain=\"default\"} 0",
        "# TYPE ringdown_guest_cpu_seconds_total counter",
    ] {
        assert!(
            page.lines().any(|found| found == line),
            "no {line}:\n{page}"
        );
    }
    assert!(page.contains("ringdown_guest_memory_bytes{vm=\"web\",kind=\"total\"} "));
    assert!(!page.contains("ringdown_guest_memory_bytes{vm=\"off\""));
}

#[test]
fn figures_at_an_interval_go_on_until_they_are_stopped() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _guest = Guest::start(&daemon, "web", &[]);
    for count in [&[][..], &["--count", "0"]] {
        let mut command = program::ringdown(&["stats", "web", "--interval", "100ms"]);
        command.args(count).arg("--runtime-dir");
        command.arg(daemon.runtime_dir()).stdout(Stdio::piped());
        let mut endless = Running(command.spawn().unwrap());
        let lines = BufReader::new(endless.0.stdout.take().unwrap()).lines();
        let reports = lines.filter(|line| line.as_ref().unwrap().starts_with("web  up "));
        assert_eq!(reports.take(4).count(), 4);
    }
    let counted = ["stats", "web", "--interval", "100ms", "--count", "2"];
    let counted = run(&daemon, &counted).out;
    assert_eq!(counted.matches("web  up ").count(), 2, "{counted}");
}

#[test]
fn logs_and_the_time() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let guest = Guest::start(&daemon, "web", &[]);
    let log = guest.file("log");
    std::fs::write(&log, "one\ntwo\nthree\n").unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let last = run(&daemon, &["logs", "web", "-n", "2", &path(&log)]);
    assert_eq!(last.out, "two\nthree\n", "{}", last.err);
    assert_refused(
        &run(&daemon, &["logs", "web"]),
        1,
        "name the file of the log",
    );
    assert_refused(
        &run(&daemon, &["logs", "web", "log"]),
        2,
        "give the whole path",
    );
    assert_refused(
        &run(&daemon, &["logs", "web", "--unit", "a", &path(&log)]),
        2,
        "cannot be used with",
    );
    assert_refused(
        &run(&daemon, &["logs", "web", &path(&guest.file("gone"))]),
        1,
        "cannot read",
    );
    let time = run(&daemon, &["time", "web", "--json"]);
    let document: serde_json::Value = serde_json::from_str(&time.out).unwrap();
    let value = &document["time"];
    let (offset, uncertainty) = (
        value["offset_ns"].as_i64().unwrap(),
        value["uncertainty_ns"].as_i64().unwrap(),
    );
    assert!(offset.abs() <= uncertainty + 5_000_000, "{}", time.out);
    assert!(run(&daemon, &["time", "web"]).out.starts_with("web is "));
}
