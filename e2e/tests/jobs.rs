//! The agent's everyday jobs in real guests: over vsock, and over virtio-serial alone in guests that have no vsock device.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "jobs/channels.rs"]
mod channels;
#[path = "jobs/files.rs"]
mod files;
#[path = "jobs/forward.rs"]
mod forward;
#[path = "jobs/frozen.rs"]
mod frozen;
#[path = "jobs/logs.rs"]
mod logs;
#[path = "jobs/machine.rs"]
mod machine;
#[path = "jobs/methods.rs"]
mod methods;
#[path = "jobs/published.rs"]
mod published;

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use e2e::{Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Scene, Shared, SharedGuard, spawn};

static SCENE: Shared<Scene> = Shared::new();

/// For the agents' users.
static AGENTS: RwLock<()> = RwLock::new(());

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// `web` and `db` have a vsock device; `attic` and `cellar` have none, and QEMU connects to the daemon for the one and the daemon to QEMU
/// for the other. All have been asleep since 2020, by their clocks.
fn start() -> Scene {
    let directory = spawn::scratch_directory().unwrap();
    let file = directory.join("ringdown.toml");
    fs::write(&file, configuration(&directory)).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    let daemon = Daemon::start(spec).unwrap();
    let specs = [
        ("web", Kernel::V6_1),
        ("db", Kernel::V6_12),
        ("attic", Kernel::V6_1),
        ("cellar", Kernel::V6_12),
    ];
    let specs = specs.map(|(name, kernel)| guest(name, kernel).attached(&daemon));
    let guests = Guest::boot_all(specs.into()).unwrap();
    let scene = Scene { guests, daemon };
    for guest in &scene.guests {
        // Waits until its agent has called.
        ringdown(&scene, &["exec", guest.name(), "--", "true"]);
    }
    scene
}

/// The scene for a test that leaves the agents alone. Such tests run side by side.
fn scene() -> Held<RwLockReadGuard<'static, ()>> {
    let lock = AGENTS.read().unwrap_or_else(PoisonError::into_inner);
    Held {
        scene: SCENE.get(start),
        _lock: lock,
    }
}

/// The scene for a test that ends agents, which other tests would notice.
fn scene_alone() -> Held<RwLockWriteGuard<'static, ()>> {
    let lock = AGENTS.write().unwrap_or_else(PoisonError::into_inner);
    Held {
        scene: SCENE.get(start),
        _lock: lock,
    }
}

/// The scene, in use by one test.
struct Held<L> {
    scene: SharedGuard<Scene>,
    _lock: L,
}

impl<L> Deref for Held<L> {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.scene
    }
}

fn guest(name: &str, kernel: Kernel) -> GuestSpec {
    GuestSpec::new(name, kernel)
        .with_tools()
        .layer("jobs")
        .memory_mib(448)
        .qemu(&["-rtc", "base=2020-01-01"])
}

fn configuration(directory: &Path) -> String {
    let here = directory.display();
    let vm = |name: &str, line: &str| {
        let channels = channels::configuration(name, directory);
        let published = published::configuration(name, directory);
        format!("[[vm]]\nname = \"{name}\"\n{line}\n{channels}\n{published}\n")
    };
    [
        "[[service]]\nname = \"greeting\"\nport = 700\ncommand = [\"/bin/sh\", \"-c\", \"echo hello $RINGDOWN_VM\"]\n".to_owned(),
        "[[rule]]\nfrom = \"attic\"\nto = \"service:greeting\"\naction = \"allow\"\n".to_owned(),
        vm("web", "cid = 3"),
        vm("db", "cid = 4"),
        vm("attic", "serial = true"),
        vm("cellar", &format!("serial-connect = \"{here}/cellar.serial\"")),
    ]
    .concat()
}

/// Runs `ringdown`, which must succeed, and gives its standard output.
fn ringdown(scene: &Scene, arguments: &[&str]) -> String {
    let output = scene.daemon.run(arguments).unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", said(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs `ringdown`, which must fail with exit code 1, and gives what it said.
fn refused(scene: &Scene, arguments: &[&str]) -> String {
    let output = scene.daemon.run(arguments).unwrap();
    assert_eq!(
        output.status.code(),
        Some(1),
        "{arguments:?}: {}",
        said(&output)
    );
    said(&output)
}

/// Standard output and standard error.
fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .concat()
}

/// A command that goes on until it is dropped, with its standard output in a file.
struct Background {
    child: Child,
    output: PathBuf,
}

impl Background {
    fn start(daemon: &Daemon, arguments: &[&str]) -> Background {
        let output = spawn::scratch_directory().unwrap().join("output");
        let child = daemon
            .command(arguments)
            .unwrap()
            .stdout(fs::File::create(&output).unwrap())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        Background { child, output }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap()).into_owned()
    }

    /// Waits until its output has this text.
    fn wait_for(&mut self, text: &str) {
        eventually(&format!("{text:?} in {}", self.output.display()), || {
            assert!(
                self.child.try_wait().unwrap().is_none(),
                "it has ended: {}",
                self.text()
            );
            self.text().contains(text)
        });
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until something is so, and fails when it does not come to be.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "it did not come to be: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}
