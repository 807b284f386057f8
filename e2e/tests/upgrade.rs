//! `ringdown upgrade` while two guests stream to each other: they see nothing of it.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use e2e::{
    CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, hold, ringdown_program, spawn,
};
use serde_json::Value;

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// How many upgrades there are, and with RINGDOWN_E2E_FULL.
const UPGRADES: u32 = 3;
const UPGRADES_IN_FULL: u32 = 20;

/// The daemons that upgrades have started. They are no children of this process.
struct Last(PathBuf);

impl Drop for Last {
    fn drop(&mut self) {
        let lock = fs::read_to_string(&self.0).unwrap_or_default();
        if let Some(pid) = lock
            .trim()
            .parse()
            .ok()
            .and_then(rustix::process::Pid::from_raw)
        {
            // It may have ended.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

fn ringdown(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = daemon.run(arguments).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn json(daemon: &Daemon, arguments: &[&str]) -> Value {
    serde_json::from_str(&ringdown(daemon, arguments)).unwrap()
}

fn start(guest: &Guest, command: &str) -> e2e::Running {
    let spec = CommandSpec::new(command).deadline(PATIENCE);
    guest.start_spec(spec).unwrap()
}

#[test]
fn streams_go_on_through_upgrades() {
    let upgrades = match std::env::var_os("RINGDOWN_E2E_FULL") {
        Some(_) => UPGRADES_IN_FULL,
        None => UPGRADES,
    };
    let directory = spawn::scratch_directory().unwrap();
    let mut keeper = hold(&directory.join("keeper")).unwrap();
    let mut spec = DaemonSpec::new().arguments(&[
        "--allow",
        "from=web,to=db,port=5000",
        "--allow",
        "from=db,to=web,port=5000",
        "--keeper",
        &directory.join("keeper").display().to_string(),
    ]);
    spec.runtime_directory = Some(directory.clone());
    let daemon = Daemon::start(spec).unwrap();
    for (vm, cid) in [("web", "3"), ("db", "4")] {
        ringdown(&daemon, &["vm", "add", vm, "--cid", cid]);
    }
    let guest = |name: &str, kernel| GuestSpec::new(name, kernel).with_tools().attached(&daemon);
    let guests = vec![guest("web", Kernel::V6_1), guest("db", Kernel::V6_12)];
    let guests = Guest::boot_all(guests).unwrap();
    let [web, db] = &guests[..] else {
        panic!("two guests")
    };
    let _last = Last(directory.join("lock"));
    let new = directory.join("new");
    fs::copy(ringdown_program().unwrap(), &new).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();

    // Each sends until it is asked to stop, so that every upgrade is in the middle of both streams.
    let ends = [(web, 4), (db, 3)].map(|(guest, peer)| {
        let receives = start(guest, "socat -u VSOCK-LISTEN:5000 STDOUT | sha256sum");
        let sends = format!(
            "(n=0; while [ ! -e /tmp/stop ]; do seq ${{n}}00000 ${{n}}99999; n=$((n+1)); done) | tee /tmp/copy | \
             socat -u STDIN VSOCK-CONNECT:{peer}:5000,retry=100,interval=0.1; echo sent"
        );
        guest.shell("mkfifo /tmp/copy").unwrap();
        let sums = start(guest, "sha256sum < /tmp/copy");
        (guest, receives, sums, sends)
    });
    let streams = ends.map(|(guest, receives, sums, sends)| {
        let sends = start(guest, &sends);
        (guest, receives, sums, sends)
    });
    let until = std::time::Instant::now() + PATIENCE;
    while ringdown(&daemon, &["ls"]).matches(":5000").count() < 2 {
        assert!(std::time::Instant::now() < until, "no circuits");
        std::thread::sleep(Duration::from_millis(50));
    }

    let check = json(&daemon, &["upgrade", "--check", "--json"]);
    let plan = &check["upgrade"]["daemon"];
    assert_eq!(plan["circuits"], 2, "{check}");
    assert_eq!(plan["lines"].as_array().unwrap().len(), 2, "{check}");
    let programs = [new.clone(), ringdown_program().unwrap()];
    let mut pauses = Vec::new();
    for upgrade in 1..=upgrades {
        let program = programs[upgrade as usize % 2].display().to_string();
        ringdown(&daemon, &["upgrade", "--binary", &program]);
        let restart = &json(&daemon, &["vm", "ls", "--json"])["restart"];
        assert_eq!(restart["restarts"], upgrade, "{restart}");
        assert_eq!(restart["circuits"], 2, "{restart}");
        assert_eq!(restart["lines"], 2, "{restart}");
        pauses.push(restart["pause_ms"].as_u64().unwrap());
    }
    println!("pauses in ms: {pauses:?}");
    for (guest, ..) in &streams {
        guest.shell("touch /tmp/stop").unwrap();
    }
    let text = |running: e2e::Running| running.wait().unwrap().text().trim().to_owned();
    let ends = streams.map(|(_, receives, sums, sends)| {
        assert!(text(sends).contains("sent"));
        (text(sums), receives)
    });
    let sent = [&ends[0].0, &ends[1].0].map(String::clone);
    let received = ends.map(|(_, receives)| text(receives));
    assert_eq!([&received[1], &received[0]], [&sent[0], &sent[1]]);
    drop(guests);
    drop(daemon);
    // It may have been killed with the last daemon.
    let _ = keeper.kill();
    keeper.wait().unwrap();
}
