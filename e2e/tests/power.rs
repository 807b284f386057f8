//! `ringdown suspend`, `reboot` and `shutdown`, of guests with vsock and of guests with virtio-serial alone.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::thread;
use std::time::{Duration, Instant};

use e2e::{BOOT_DEADLINE_S, DaemonSpec, Guest, GuestSpec, Kernel, Meeting, Scene};
use serde_json::json;

/// How long a guest may take to boot, to fall asleep, or to end.
const DEADLINE: Duration = Duration::from_secs(BOOT_DEADLINE_S);

#[test]
fn guests_sleep_start_again_and_end_as_their_host_asks() {
    let daemon = DaemonSpec::new()
        .vm("web", 3)
        .vm("db", 4)
        .vm("off", 5)
        .serial_vm("attic", Meeting::QemuConnects)
        .serial_vm("cellar", Meeting::QemuListens);
    let guests = vec![
        GuestSpec::new("web", Kernel::V6_1),
        GuestSpec::new("db", Kernel::V6_12),
        GuestSpec::new("attic", Kernel::V6_1),
        GuestSpec::new("cellar", Kernel::V6_12),
    ];
    let guests = guests.into_iter().map(GuestSpec::allow_reboot).collect();
    let scene = Scene::start_with(daemon, guests).unwrap();

    // All at once, for each waits most of the time.
    thread::scope(|threads| {
        for guest in &scene.guests {
            threads.spawn(|| sleep_and_reboot(&scene, guest));
        }
    });

    // One alone, the others together; one of all has no guest.
    ringdown(&scene, &["shutdown", "web"]);
    scene.guest("web").wait_for_exit(DEADLINE).unwrap();
    let told = ringdown(&scene, &["shutdown", "--all", "--timeout", "100"]);
    for name in ["db", "attic", "cellar"] {
        assert!(told.contains(name), "{told}");
        scene.guest(name).wait_for_exit(DEADLINE).unwrap();
    }
}

fn sleep_and_reboot(scene: &Scene, guest: &Guest) {
    let name = guest.name();
    let begun = Instant::now();
    ringdown(scene, &["exec", name, "--", "touch", "/tmp/kept"]);
    ringdown(scene, &["suspend", name, "--timeout", "100"]);
    let status = guest.qmp().execute("query-status", json!({})).unwrap();
    assert_eq!(status["status"], "suspended", "{name}");
    guest.qmp().execute("system_wakeup", json!({})).unwrap();
    ringdown(scene, &["exec", name, "--", "cat", "/tmp/kept"]);
    eprintln!("{name}: asleep and awake after {:?}", begun.elapsed());

    ringdown(scene, &["reboot", name]);
    guest.wait_for_boots(2, DEADLINE).unwrap();
    let output = scene
        .daemon
        .run(&["exec", name, "--", "cat", "/tmp/kept"])
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{name} has not rebooted");
    eprintln!("{name}: rebooted after {:?}", begun.elapsed());
}

/// Runs `ringdown`, which must succeed, and gives its standard output.
fn ringdown(scene: &Scene, arguments: &[&str]) -> String {
    let output = scene.daemon.run(arguments).unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {told}{said}");
    told
}
