//! Windows that a VMM is started with: files, which outlive the daemon and the VMM.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use circuit::{Connector, Options};
use e2e::pattern::Pattern;
use e2e::probe::PROGRAM;
use e2e::{CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel};
use serde_json::Value;

const COUNT: usize = 2;
const DEADLINE: Duration = Duration::from_secs(120);

fn spec() -> DaemonSpec {
    DaemonSpec::new().arguments(&["--vm", "name=web,cid=3,windows=2x16M"])
}

fn boot(daemon: &Daemon, kernel: Kernel) -> Guest {
    let spec = GuestSpec::new("web", kernel)
        .attached(daemon)
        .window_drivers();
    Guest::boot(spec).unwrap()
}

/// The windows as the daemon sees them, once each is in this state.
fn windows(daemon: &Daemon, state: &str) -> BTreeSet<String> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let answer = daemon.run(&["windows", "--json"]).unwrap();
        let list: Value = serde_json::from_slice(&answer.stdout).unwrap();
        let list = list["windows"].as_array().unwrap();
        assert_eq!(list.len(), COUNT, "{list:?}");
        if list.iter().all(|window| window["state"] == state) {
            let name = |window: &Value| window["uuid"].as_str().unwrap().to_owned();
            return list.iter().map(name).collect();
        }
        assert!(Instant::now() < deadline, "not {state}: {list:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The windows as the guest's kernel has them: by the info blocks that it has taken.
fn devices(guest: &Guest) -> BTreeSet<String> {
    guest
        .wait_until(&format!("[ $(ls /dev/dax* | wc -l) = {COUNT} ]"), DEADLINE)
        .unwrap();
    // What the kernel keeps ready to be configured has none.
    let names = guest
        .shell("cat /sys/bus/nd/devices/dax*/uuid | grep .")
        .unwrap();
    names.lines().map(|name| name.replace('-', "")).collect()
}

/// A program of the host calls one of the guest's, which checks what it gets.
fn call(daemon: &Daemon, guest: &Guest, bytes: u64) {
    let line =
        format!("exec su user -c 'exec {PROGRAM} circuits serve 5000 1 4194304 /tmp/serves'");
    guest.shell("rm -f /tmp/serves").unwrap();
    let serving = guest
        .start_spec(CommandSpec::new(line).deadline(DEADLINE))
        .unwrap();
    guest.wait_until("[ -e /tmp/serves ]", DEADLINE).unwrap();
    let connector = Connector::new()
        .socket(daemon.runtime_directory().join("circuit.sock"))
        .options(Options {
            ring_len: 4 << 20,
            ..Options::default()
        });
    let circuit = connector.connect("web:5000").unwrap();
    assert!(circuit.is_zero_copy());
    let (mut writer, mut reader) = circuit.into_split();
    let mut pattern = Pattern::new(1);
    let mut chunk = vec![0; 1 << 20];
    while pattern.offset() < bytes {
        pattern.fill(&mut chunk);
        writer.write_all(&chunk).unwrap();
    }
    writer.finish().unwrap();
    let mut answer = Vec::new();
    reader.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, bytes.to_le_bytes());
    drop((writer, reader));
    let served = e2e::finished(serving).unwrap();
    assert!(
        served.starts_with(&format!("zero-copy {bytes} bytes")),
        "{served}"
    );
}

#[test]
fn a_guest_has_the_windows_that_its_vmm_was_started_with() {
    for kernel in [Kernel::V6_1, Kernel::V6_12] {
        // A disk's files are refused as a VM's memory.
        let in_memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let daemon = Daemon::start(DaemonSpec {
            runtime_directory: Some(in_memory.path().to_owned()),
            ..spec()
        })
        .unwrap();
        let names = windows(&daemon, "absent");
        let guest = boot(&daemon, kernel);
        assert_eq!(
            devices(&guest),
            names,
            "what the kernel makes of the info blocks"
        );
        assert_eq!(windows(&daemon, "free"), names);
        call(&daemon, &guest, 64 << 20);
        assert_eq!(windows(&daemon, "free"), names);

        // A guest that is gone and comes again.
        guest.kill().unwrap();
        drop(guest);
        windows(&daemon, "absent");
        let guest = boot(&daemon, kernel);
        assert_eq!(windows(&daemon, "free"), names);
        call(&daemon, &guest, 1 << 20);
        drop(guest);

        // A daemon that comes again, and the guest with it.
        let directory = daemon.runtime_directory().to_owned();
        daemon.kill().unwrap();
        let again = Daemon::start(DaemonSpec {
            runtime_directory: Some(directory.clone()),
            ..spec()
        })
        .unwrap();
        assert_eq!(windows(&again, "absent"), names);
        let guest = boot(&again, kernel);
        assert_eq!(devices(&guest), names);
        assert_eq!(windows(&again, "free"), names);
        call(&again, &guest, 1 << 20);
        drop(guest);
        // They go with their VM.
        assert!(again.run(&["vm", "rm", "web"]).unwrap().status.success());
        assert_eq!(
            fs::read_dir(directory.join("windows")).unwrap().count(),
            1,
            "the record"
        );
    }
}
