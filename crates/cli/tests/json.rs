//! What `--json` prints has one shape, whichever command prints it: an object with `version`, a number, and what was asked for under its name.

#![allow(clippy::unwrap_used)]

mod program;
mod ready_guest;

use std::collections::BTreeSet;

use agent::session::Options;
use fake_daemon::FakeDaemon;
use program::run_with;
use serde_json::Value;

const CONFIGURATION: &str = r#"
    [[network]]
    name = "lan"
    ipv4 = "10.1.2.0/24"
    [[vm]]
    name = "web"
    [[vm.net]]
    network = "lan"
    [[rule]]
    name = "no-ssh"
    from = "web"
    to = "any"
    port = 22
    action = "deny"
"#;

/// Each command that has `--json`: its words, and the name of what it prints. DIR stands for a directory.
const COMMANDS: &[(&str, &str, &str)] = &[
    ("args", "args web --vmm qemu", "arguments"),
    ("args", "args fc --vmm cloud-hypervisor", "arguments"),
    ("args", "args fc --vmm firecracker", "configuration"),
    ("args", "args web --vmm alioth", "arguments"),
    ("bench", "bench web --time 100ms", "measurements"),
    ("check", "check", "findings"),
    ("cp", "cp DIR/file web:DIR/copy", "summary"),
    ("events", "events", "event"),
    ("logs", "logs web DIR/file", "entry"),
    ("ls", "ls", "circuits"),
    ("net link", "net link web lan up", "port"),
    ("net ls", "net ls", "networks"),
    ("net macs", "net macs lan", "macs"),
    ("net show", "net show lan", "network"),
    ("policy check", "policy check", "findings"),
    ("policy show", "policy show", "rules"),
    ("policy test", "policy test web fc 80", "decision"),
    ("reload", "reload", "findings"),
    ("stats", "stats web --count 2 --interval 100ms", "stats"),
    ("sync", "sync DIR/from web:DIR/to", "summary"),
    ("time", "time web", "time"),
    ("upgrade", "upgrade --check --binary PROGRAM", "upgrade"),
    ("version", "version", "program"),
    ("vm add", "vm add new", "vm"),
    ("vm ls", "vm ls", "vms"),
    ("vm rm", "vm rm new", "vm"),
    ("why", "why web fc 80", "why"),
    ("windows", "windows", "windows"),
];

#[test]
fn every_json_is_an_object_with_a_version_and_a_name() {
    let mut described = BTreeSet::new();
    with_json(&cli::command(), &[], &mut described);
    let tried = COMMANDS.iter().map(|(command, ..)| (*command).to_owned());
    assert_eq!(tried.collect::<BTreeSet<_>>(), described);

    let files = tempfile::tempdir().unwrap();
    std::fs::write(files.path().join("file"), "one\ntwo\n").unwrap();
    std::fs::create_dir(files.path().join("from")).unwrap();
    let daemon = FakeDaemon::with_file(CONFIGURATION);
    let hybrid = files.path().join("fc.sock").display().to_string();
    run_with(
        daemon.runtime_dir(),
        &["vm", "add", "fc", "--hybrid", &hybrid],
    );
    let _guest = ready_guest::announce(&daemon, "web", Options::new());
    for (_, words, name) in COMMANDS {
        let words = words.replace("DIR", files.path().to_str().unwrap());
        let words = words.replace("PROGRAM", env!("CARGO_BIN_EXE_ringdown"));
        let words: Vec<&str> = words.split(' ').chain(["--json"]).collect();
        let outcome = run_with(daemon.runtime_dir(), &words);
        assert_ne!(outcome.code, Some(2), "{words:?}: {}", outcome.err);
        let values = serde_json::Deserializer::from_str(&outcome.out).into_iter();
        let values: Vec<Value> = values.collect::<Result<_, _>>().unwrap();
        assert!(!values.is_empty(), "{words:?}: {}", outcome.err);
        for value in values {
            assert_eq!(value["version"], 1, "{words:?}: {value}");
            let named = &value[*name];
            assert!(named.is_object() || named.is_array(), "{words:?}: {value}");
        }
    }
}

/// The commands that have `--json`, by the parser's own description.
fn with_json(command: &clap::Command, path: &[&str], found: &mut BTreeSet<String>) {
    let is_json = |argument: &clap::Arg| argument.get_long() == Some("json");
    if command.get_arguments().any(is_json) {
        found.insert(path.join(" "));
    }
    for below in command.get_subcommands() {
        with_json(below, &[path, &[below.get_name()]].concat(), found);
    }
}
