//! What `ringdown check` finds, as a person or a monitor meets it.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

mod program;

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::process::Stdio;

use program::{Outcome, Running, finish, ringdown, run_with};

#[test]
fn check_fails_where_a_daemon_is_named_and_none_serves() {
    let directory = tempfile::tempdir().unwrap();
    let own = directory.path().join("ringdown");
    std::fs::create_dir(&own).unwrap();
    let file = directory.path().join("ringdown.toml");
    std::fs::write(&file, "").unwrap();
    let file = file.to_str().unwrap();
    let none = format!("none serves {}\n", own.display());
    let is_failure = |outcome: &Outcome| {
        let is_error = outcome
            .out
            .contains(&format!("ERROR   daemon          {none}"));
        assert!(!is_error || outcome.code == Some(1), "{}", outcome.out);
        let is_warning = outcome
            .out
            .contains(&format!("warning daemon          {none}"));
        assert!(is_error != is_warning, "{}", outcome.out);
        is_error
    };
    assert!(is_failure(&run_with(&own, &["check"])));
    let mut by_environment = ringdown(&["check"]);
    by_environment.env("RINGDOWN_RUNTIME_DIR", &own);
    assert!(is_failure(&finish(by_environment)));
    // Before the first start.
    assert!(!is_failure(&run_with(&own, &["check", "--config", file])));
    // One has served here, and has died.
    drop(UnixListener::bind(own.join("control.sock")).unwrap());
    assert!(is_failure(&run_with(&own, &["check", "--config", file])));
}

#[test]
fn check_says_that_it_waits_for_a_daemon_that_is_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("control.sock")).unwrap();
    let mut command = ringdown(&["check", "--runtime-dir"]);
    command.arg(directory.path());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut check = Running(command.spawn().unwrap());
    let mut lines = BufReader::new(check.0.stderr.take().unwrap()).lines();
    assert_eq!(
        lines.next().unwrap().unwrap(),
        "waiting up to 18 s more for the daemon to answer"
    );
    drop(listener);
    assert_eq!(check.0.wait().unwrap().code(), Some(1));
}
