//! Guests whose VMM maps their memory for itself alone (`share=off`): it is handed over, and stays empty for ever.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use e2e::{Daemon, DaemonSpec, Guest, GuestSpec, Kernel, spawn};
use serde_json::Value;

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);

const CONFIGURATION: &str = r#"
[[network]]
name = "lan"

[[vm]]
name = "web"
networks = ["lan"]

[[vm]]
name = "db"
networks = ["lan"]

[[vm]]
name = "box"
serial = true
networks = ["lan"]
"#;

/// `web` and `box`, which has a serial line, share no memory; `db` does. Each has a card that is not up.
fn start() -> (Daemon, Vec<Guest>) {
    let directory = spawn::scratch_directory().unwrap();
    let file = directory.join("ringdown.toml");
    fs::write(&file, CONFIGURATION).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    let daemon = Daemon::start(spec).unwrap();
    let guest = |name: &str, kernel| GuestSpec::new(name, kernel).layer("lan").attached(&daemon);
    let specs = vec![
        guest("web", Kernel::V6_1).private_memory(),
        guest("db", Kernel::V6_12),
        guest("box", Kernel::V6_12).private_memory(),
    ];
    let guests = Guest::boot_all(specs).unwrap();
    for guest in &guests {
        guest.shell("modprobe virtio_net").unwrap();
    }
    (daemon, guests)
}

/// Standard output and standard error of a command.
fn run(daemon: &Daemon, arguments: &[&str]) -> (String, String) {
    let output = daemon.run(arguments).unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

fn vm(daemon: &Daemon, name: &str) -> Value {
    let (list, _) = run(daemon, &["vm", "ls", "--json"]);
    let list: Value = serde_json::from_str(&list).unwrap();
    let vms = list["vms"].as_array().unwrap();
    vms.iter().find(|vm| vm["name"] == name).unwrap().clone()
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "it never came: {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Whether a text says what is wrong and what to do.
fn says_it(text: &str) -> bool {
    text.contains("memory is probably not shared") && text.contains("share=on")
}

#[test]
fn memory_that_is_not_shared_is_named_wherever_one_looks() {
    let (daemon, guests) = start();
    wait_until("the fault of web", || {
        vm(&daemon, "web")["last_fault"].is_string()
    });
    let web = vm(&daemon, "web");
    assert!(says_it(web["last_fault"].as_str().unwrap()), "{web}");
    assert_eq!(web["state"], "attached");
    for arguments in [
        &["vm", "ls"][..],
        &["check"],
        &["why", "host", "web", "80"],
        &["shutdown", "web"],
        &["exec", "--wait", "3", "web", "--", "true"],
    ] {
        let (out, errors) = run(&daemon, arguments);
        assert!(
            says_it(&out) || says_it(&errors),
            "{arguments:?}: {out}{errors}"
        );
    }
    // Its card says so once it is up and has been given buffers; and so does that of a guest whose line needs no memory.
    run(
        &daemon,
        &[
            "exec", "--wait", "120", "box", "--", "ip", "link", "set", "eth0", "up",
        ],
    );
    for guest in &guests[..2] {
        guest.shell("ip link set eth0 up").unwrap();
    }
    for name in ["web", "box"] {
        let card = || vm(&daemon, name)["nets"][0]["last_fault"].clone();
        wait_until("the fault of a card", || card().is_string());
        assert!(says_it(card().as_str().unwrap()));
        let (shown, _) = run(&daemon, &["net", "show", "lan"]);
        let line = format!("the last fault of {name}: ");
        assert!(
            shown.lines().any(|found| found.starts_with(&line)),
            "{shown}"
        );
        let (found, _) = run(&daemon, &["check"]);
        assert!(
            found.contains(&format!("the card of {name} in lan: ")),
            "{found}"
        );
    }
    let log = daemon.log_text();
    let lines = log.lines().filter(|line| says_it(line)).count();
    assert_eq!(lines, 3, "one for each device\n{log}");
    assert_eq!(vm(&daemon, "box")["state"], "ready");
    // Whose memory is shared, has none of this.
    run(
        &daemon,
        &[
            "exec", "--wait", "120", "db", "--", "udhcpc", "-i", "eth0", "-n", "-q",
        ],
    );
    let db = vm(&daemon, "db");
    assert_eq!(db["state"], "ready");
    let faults = [&db["last_fault"], &db["nets"][0]["last_fault"]];
    assert!(faults.iter().all(|fault| fault.is_null()), "{db}");
    assert!(!log.lines().any(|line| says_it(line) && line.contains("db")));
}
