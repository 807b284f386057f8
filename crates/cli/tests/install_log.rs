//! The log of an installation, from the VMM's socket to the reader's terminal.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

mod program;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use program::{Running, assert_refused, ringdown, run, run_with};

#[test]
fn an_installation_is_shown_as_it_happens() {
    let directory = tempfile::tempdir().unwrap();
    let (config, runtime_dir) = (
        directory.path().join("c.toml"),
        directory.path().join("run"),
    );
    let text = "[[vm]]\nname = \"web\"\nserial = true\n[[vm.channel]]\ninstall-log = true\n[[vm]]\nname = \"db\"\n";
    std::fs::write(&config, text).unwrap();
    let mut serve = ringdown(&["serve", "--log", "warn", "--config"]);
    serve.arg(&config).arg("--runtime-dir").arg(&runtime_dir);
    let mut daemon = Running::start(serve);
    daemon.wait_until_ready();

    let show = |words: &[&str]| run_with(&runtime_dir, &[&["install-log"], words].concat());
    assert_refused(
        &show(&["db"]),
        1,
        "with install-log = true below its [[vm]]",
    );
    assert_refused(&run(&["install-log"]), 2, "<NAME>");
    assert_refused(&show(&["nobody"]), 1, "there is no VM named \"nobody\"");
    let nothing = show(&["web"]);
    assert_eq!((nothing.code, nothing.out.as_str()), (Some(0), ""));
    assert_eq!(nothing.err, "no output from the installer of web yet\n");

    // It may be followed before it begins.
    let mut follow = ringdown(&["install-log", "web", "--follow", "--runtime-dir"]);
    let mut follow = Running(
        follow
            .arg(&runtime_dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut followed = BufReader::new(follow.0.stdout.take().unwrap()).lines();
    let port = "org.fedoraproject.anaconda.log.0";
    let socket = runtime_dir.join(format!("web.{port}.channel"));
    let mut vmm = UnixStream::connect(&socket).unwrap();
    for line in ["INFO anaconda: one", "two \x1b[31m"] {
        writeln!(vmm, "{line}").unwrap();
        // In a pipe it is as it was written.
        assert_eq!(followed.next().unwrap().unwrap(), line);
    }
    assert_eq!(show(&["web"]).out, "INFO anaconda: one\ntwo \x1b[31m\n");
    let words = run_with(&runtime_dir, &["args", "web", "--vmm", "qemu", "--json"]).out;
    assert!(words.contains(&format!("name={port}")), "{words}");
    let list = run_with(&runtime_dir, &["vm", "ls", "--json"]).out;
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let channel = &list["vms"][1]["channels"][0];
    assert_eq!(channel["counters"]["lost_bytes_from_guest"], 0, "{list:#}");
    assert_eq!(channel["attached"], true);

    // A reader with enough ends the command.
    drop(followed);
    let deadline = Instant::now() + Duration::from_secs(20);
    while follow.0.try_wait().unwrap().is_none() {
        writeln!(vmm, "more").unwrap();
        assert!(Instant::now() < deadline, "it goes on without a reader");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(follow.0.try_wait().unwrap().unwrap().code(), Some(0));
}
