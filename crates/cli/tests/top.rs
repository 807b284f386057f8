//! The program as it is: `ringdown top` on a terminal, whose screen is read as by a person.

mod program;
mod terminal;

use std::process::Command;

use api::VmState;
use fake_daemon::FakeDaemon;
use rustix::process::{Pid, Signal, kill_process};

use program::{assert_refused, ringdown, run_with};
use terminal::Terminal;

fn top(daemon: &FakeDaemon, arguments: &[&str]) -> Command {
    let mut command = ringdown(&["top", "--interval", "100ms"]);
    command.args(arguments);
    command.arg("--runtime-dir").arg(daemon.runtime_dir());
    command
}

#[test]
fn a_person_looks_filters_and_leaves_and_the_terminal_is_as_it_was() {
    let daemon = FakeDaemon::start(&["name=web", "name=db"], &[]);
    let mut terminal = Terminal::open(80, 24);
    let before = terminal.modes();
    terminal.start(top(&daemon, &[]));
    terminal.wait_for("2 VMs (0 ready)");
    assert!(terminal.is_alternate());
    assert_ne!(
        terminal.modes(),
        before,
        "characters come as they are typed"
    );
    terminal.type_in("/db\r");
    terminal.wait_until("only db is shown", |screen| {
        screen.contains("db ") && !screen.contains("web ")
    });
    terminal.type_in("\r");
    terminal.wait_for("no VMM is attached to its socket");
    terminal.type_in("?");
    terminal.wait_for("this help");
    terminal.resize(79, 24);
    terminal.wait_for("This window has 79 by 24.");
    terminal.resize(120, 40);
    terminal.wait_for("this help");
    terminal.type_in("q");
    assert_eq!(terminal.wait_for_end(), (Some(0), None));
    assert!(!terminal.is_alternate());
    assert_eq!(terminal.modes(), before);
}

#[test]
fn signals_end_it_and_the_terminal_is_as_it_was() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let mut terminal = Terminal::open(80, 24);
        let before = terminal.modes();
        let pid = terminal.start(top(&daemon, &[]));
        terminal.wait_for("1 VM ");
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
        assert_eq!(terminal.wait_for_end(), (None, Some(signal.as_raw())));
        assert!(!terminal.is_alternate());
        assert_eq!(terminal.modes(), before);
    }
}

#[test]
fn a_panic_gives_the_terminal_back_and_can_be_read() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "child_that_panics", "--nocapture"]);
    let mut terminal = Terminal::open(80, 24);
    let before = terminal.modes();
    terminal.start(child);
    terminal.wait_for("a fault of ours");
    terminal.wait_for_end();
    assert!(!terminal.is_alternate());
    assert_eq!(terminal.modes(), before);
}

#[test]
#[ignore = "the other process of the test above"]
fn child_that_panics() {
    let _screen = cli::top::Screen::take().unwrap();
    panic!("a fault of ours");
}

#[test]
fn a_daemon_that_starts_anew_is_waited_for() {
    let mut daemon = FakeDaemon::start(&["name=web"], &[]);
    let mut terminal = Terminal::open(80, 24);
    terminal.start(top(&daemon, &[]));
    terminal.wait_for("1 VM ");
    daemon.stop().unwrap();
    terminal.wait_for("waiting for the daemon");
    terminal.wait_for("no daemon serves");
    // Another daemon, with another VM, at the same place.
    let other = FakeDaemon::start(&["name=later"], &[]);
    let (from, to) = (other.runtime_dir(), daemon.runtime_dir());
    let socket = |directory| config::directories::control_socket(directory);
    let _ = std::fs::remove_file(socket(to));
    std::os::unix::fs::symlink(socket(from), socket(to)).unwrap();
    terminal.wait_until("the new daemon's VM is shown", |screen| {
        screen.contains("later ") && screen.contains("every 0.1 s")
    });
    terminal.type_in("q");
    assert_eq!(terminal.wait_for_end(), (Some(0), None));
}

#[test]
fn no_colour_is_sent_where_none_is_wanted() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    for (no_color, coloured) in [("1", false), ("", true)] {
        let mut command = top(&daemon, &[]);
        command.env("NO_COLOR", no_color);
        let mut terminal = Terminal::open(80, 24);
        terminal.start(command);
        terminal.wait_for("1 VM ");
        terminal.type_in("q");
        terminal.wait_for_end();
        assert_eq!(terminal.had_colours(), coloured);
    }
}

#[test]
fn one_frame_is_printed_as_plain_text() {
    let daemon = FakeDaemon::start(&["name=web", "name=db"], &[]);
    daemon.worker().set_state("db", true, true);
    let once = |arguments: &[&str]| {
        let all = ["top", "--once", "--interval", "100ms"];
        run_with(daemon.runtime_dir(), &[&all, arguments].concat())
    };
    let outcome = once(&["--sort", "name"]);
    assert_eq!((outcome.code, outcome.err.as_str()), (Some(0), ""));
    assert!(outcome.out.starts_with("ringdown top   2 VMs (0 ready)"));
    let rows: Vec<&str> = outcome
        .out
        .lines()
        .filter(|line| line.contains("vsock"))
        .collect();
    assert!(
        rows[0].starts_with("db ") && rows[0].contains(VmState::Booted.word()),
        "{rows:?}"
    );
    assert!(
        rows[1].starts_with("web ") && rows[1].contains("waiting"),
        "{rows:?}"
    );
    assert!(!outcome.out.contains('\x1b') && !outcome.out.contains("q leave"));
    assert!(!outcome.out.ends_with("\n\n"));
    assert!(outcome.out.lines().all(|line| line.chars().count() <= 100));
    let of_one = once(&["--vm", "db", "--samples", "3"]);
    assert!(
        of_one.out.contains("db, booted, vsock line"),
        "{}",
        of_one.out
    );
    let circuits = once(&["--circuits"]);
    assert!(circuits.out.contains("there are no circuits at the moment"));
}

#[test]
fn what_cannot_be_is_refused() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let of = |arguments: &[&str]| run_with(daemon.runtime_dir(), arguments);
    assert_refused(&of(&["top"]), 1, "print one frame with --once");
    assert_refused(&of(&["top", "--interval", "99ms"]), 2, "100ms to 1h");
    assert_refused(&of(&["top", "--sort", "size"]), 2, "possible values");
    assert_refused(&of(&["top", "--once", "--samples", "0"]), 2, "1..=180");
    assert_refused(&of(&["top", "--once", "--samples", "181"]), 2, "1..=180");
    assert_refused(&of(&["top", "--samples", "3"]), 2, "--once");
    assert_refused(&of(&["top", "--once", "--vm", "a b"]), 2, "a b");
    let nobody = tempfile::tempdir().unwrap();
    let outcome = run_with(nobody.path(), &["top", "--once"]);
    assert_refused(&outcome, 1, "no daemon serves");
    let mut terminal = Terminal::open(80, 24);
    let mut command = ringdown(&["top", "--runtime-dir"]);
    command.arg(nobody.path());
    terminal.start(command);
    assert_eq!(terminal.wait_for_end(), (Some(1), None));
    assert!(
        terminal.screen().contains("no daemon serves"),
        "{}",
        terminal.screen()
    );
}
