//! `ringdown cp` and `sync` as they are typed, between two directories of this machine: the agent is the real one.

#![allow(clippy::unwrap_used)]

mod program;
mod ready_guest;

use std::fs;
use std::process::{Command, Stdio};

use agent::session::Options;
use fake_daemon::FakeDaemon;
use program::run_with;

#[test]
fn a_tree_that_was_copied_is_synchronized_in_its_place() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _guest = ready_guest::announce(&daemon, "web", Options::new());
    let files = tempfile::tempdir().unwrap();
    let directory = files.path().display();
    let here = files.path().join("site");
    let there = files.path().join("tmp/site");
    fs::create_dir_all(here.join("pages")).unwrap();
    fs::create_dir(files.path().join("tmp")).unwrap();
    for name in ["index", "pages/one"] {
        fs::write(here.join(name), "hello").unwrap();
    }
    // The directories stand for those of README.md.
    let run = |line: &str| {
        let line = line.replace("web:/tmp", &format!("web:{directory}/tmp"));
        let line = line.replace("HERE", &format!("{directory}/site"));
        let words: Vec<&str> = line.split(' ').collect();
        let outcome = run_with(daemon.runtime_dir(), &words);
        assert_eq!(outcome.code, Some(0), "{line}: {}", outcome.err);
        assert_eq!(outcome.out, "");
        outcome.err
    };
    assert_eq!(run("cp -r HERE web:/tmp"), "");
    for source in ["HERE/", "HERE"] {
        let said = run(&format!("sync --delete {source} web:/tmp/site"));
        assert!(said.starts_with("copied 0 files, 0 B in "), "{said}");
        assert!(said.ends_with("; 2 unchanged\n"), "{said}");
    }
    fs::write(there.join("stray"), "stray").unwrap();
    fs::write(here.join("index"), "hello again").unwrap();
    let said = run("sync --delete HERE/ web:/tmp/site");
    assert!(said.starts_with("copied 1 file, 11 B in "), "{said}");
    assert!(said.ends_with("; 1 unchanged; 1 removed\n"), "{said}");
    assert_eq!(run("sync --quiet HERE/ web:/tmp/site"), "");
    let file = format!("{directory}/site/index");
    let to = format!("web:{directory}/tmp/site");
    let refused = run_with(daemon.runtime_dir(), &["sync", &file, &to]);
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    assert!(!refused.err.contains("copied"), "{}", refused.err);
    assert_eq!(fs::read(there.join("index")).unwrap(), b"hello again");
    assert!(!there.join("stray").exists() && !there.join("site").exists());
}

#[test]
fn what_is_not_done_within_its_timeout_is_given_up() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _guest = ready_guest::announce(&daemon, "web", Options::new());
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("endless");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdown"));
    command.arg("--runtime-dir").arg(daemon.runtime_dir());
    command.args(["cp", "--timeout", "1", "-"]);
    command.arg(format!("web:{}", file.display()));
    // Standard input stays open: it has no end.
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut copy = command.spawn().unwrap();
    let _input = copy.stdin.take().unwrap();
    let done = copy.wait_with_output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains("not done within 1 s"), "{said}");
    assert!(!file.exists());
}
