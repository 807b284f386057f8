//! What `ringdown check` finds, as a person or a monitor meets it.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

mod program;
mod ready_guest;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixListener;
use std::process::Stdio;

use agent::session::Options;
use fake_daemon::FakeDaemon;
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

#[test]
fn a_command_says_that_it_waits_for_an_agent_that_hangs() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    // It takes calls and never says hello, until the caller has gone.
    let hangs = |mut stream: std::os::unix::net::UnixStream| {
        let _ = stream.read_to_end(&mut Vec::new());
    };
    let uplink = ready_guest::announce_serving(&daemon, "web", Options::new(), |_| (), hangs);
    let file = daemon.runtime_dir().join("file");
    std::fs::write(&file, "").unwrap();
    let file = file.to_str().unwrap();
    let forwarded = format!("{file}.sock:localhost:80");
    for words in [
        &["exec", "web", "true"][..],
        &["cp", file, "web:/tmp"],
        &["time", "web"],
        &["forward", "web", "-L", &forwarded],
    ] {
        let mut command = ringdown(words);
        command
            .env("RINGDOWN_RUNTIME_DIR", daemon.runtime_dir())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut waiting = Running(command.spawn().unwrap());
        let mut lines = BufReader::new(waiting.0.stderr.take().unwrap()).lines();
        assert_eq!(
            lines.next().unwrap().unwrap(),
            "waiting up to 28 s more for the guest's agent to answer",
            "{words:?}"
        );
    }
    drop(uplink);
}

const HOUSE: &str = "\
[[network]]
name = \"lan\"
[[vm]]
name = \"web\"
networks = [\"lan\"]
";

#[test]
fn a_card_that_a_running_vmm_lacks_is_told_of_by_the_reload_and_by_check() {
    let daemon = FakeDaemon::with_file(HOUSE);
    let directory = daemon.runtime_dir();
    daemon.worker().set_state("web", true, true);
    daemon.net().set_state("lan", "web", true, 0);
    let text = format!("{HOUSE}[[vm.net]]\nnetwork = \"dmz\"\n[[network]]\nname = \"dmz\"\n");
    std::fs::write(directory.join("ringdown.toml"), text).unwrap();
    let found = "web runs without a card in dmz";
    let remedy = "put one in (docs/qemu.md, \"A card that comes while the guest runs\")";
    let reload = run_with(directory, &["reload"]);
    assert_eq!(reload.code, Some(0), "{}", reload.err);
    let warning = format!("warning: {found}: {remedy}");
    assert!(reload.err.contains(&warning), "{}", reload.err);
    let check = || run_with(directory, &["check"]).out;
    let is_found = |out: &str| out.contains(found) && out.contains(remedy);
    assert!(is_found(&check()), "{}", check());
    daemon.net().set_state("dmz", "web", true, 0);
    assert!(!is_found(&check()), "{}", check());
    let reload = run_with(directory, &["reload"]);
    assert_eq!(reload.err, "");
    // Without a VMM there is nothing that could lack a card.
    daemon.net().set_state("dmz", "web", false, 0);
    assert!(is_found(&check()), "{}", check());
    daemon.worker().set_state("web", false, false);
    assert!(!is_found(&check()), "{}", check());
}

#[test]
fn check_warns_of_a_link_that_was_taken_down() {
    let daemon = FakeDaemon::with_file(HOUSE);
    let directory = daemon.runtime_dir();
    daemon.worker().set_state("web", true, true);
    let link = |state| {
        let outcome = run_with(directory, &["net", "link", "web", "lan", state]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.err);
        let out = run_with(directory, &["check"]).out;
        let found = out.contains(
            "warning networks        the link of web in lan was taken down by `ringdown net link`",
        );
        assert_eq!(
            out.contains("remedy: `ringdown net link web lan up`"),
            found,
            "{out}"
        );
        found
    };
    assert!(link("down"));
    assert!(!link("up"));
}
