//! A guest without vsock is saved to a file in the middle of its work, its VMM ends, and another VMM goes on from the file: what was
//! copied and followed at that moment goes on, too.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use e2e::images::Images;
use e2e::pattern::Pattern;
use e2e::{CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Meeting, Qmp, Scene, spawn};
use serde_json::{Value, json};

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long the file is that is copied meanwhile, in bytes.
const FILE_BYTES: usize = 48 * 1024 * 1024;

/// How many lines the guest's log gets.
const LINES: usize = 600;

/// Guests since Linux 6.8 learn from it that they were restored.
const GENERATION_DEVICE: [&str; 2] = ["-device", "vmgenid,guid=auto"];

#[test]
fn copies_and_logs_go_on_in_a_restored_guest() {
    // The first with the generation device, of which only the newer kernel notifies programs.
    for (kernel, meeting) in [
        (Kernel::V6_12, Meeting::QemuListens),
        (Kernel::V6_1, Meeting::QemuConnects),
    ] {
        let daemon = DaemonSpec::new().serial_vm("box", meeting);
        let guest = GuestSpec::new("box", kernel)
            .memory_mib(384)
            .qemu(&GENERATION_DEVICE);
        let scene = Scene::start_with(daemon, vec![guest]).unwrap();
        goes_on(&scene, kernel);
    }
}

fn goes_on(scene: &Scene, kernel: Kernel) {
    let guest = scene.guest("box");
    let directory = spawn::scratch_directory().unwrap();
    let here = directory.join("here");
    fs::write(&here, Pattern::new(7).take(FILE_BYTES)).unwrap();
    guest.shell("echo line 0 > /tmp/app.log").unwrap();
    let shown = directory.join("shown");
    let mut follower = scene
        .daemon
        .command(&["logs", "box", "--follow", "--retry", "120", "/tmp/app.log"])
        .unwrap()
        .stdout(fs::File::create(&shown).unwrap())
        .spawn()
        .unwrap();
    wait_for("the log is followed", || contains(&shown, "line 0\n"));
    let before = generation(&scene.daemon);
    let writer =
        format!("for i in $(seq 1 {LINES}); do echo line $i >> /tmp/app.log; usleep 5000; done");
    let _writer = guest
        .start_spec(CommandSpec::new(writer).deadline(PATIENCE))
        .unwrap();
    let mut copy = scene
        .daemon
        .command(&[
            "cp",
            "--quiet",
            "--retry",
            "120",
            here.to_str().unwrap(),
            "box:/tmp/file",
        ])
        .unwrap()
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("the log is followed", || contains(&shown, "line 50\n"));

    let saved = directory.join("saved");
    save(guest.qmp(), &saved);
    let restored = Restored::start(guest, kernel, &saved);

    assert!(copy.wait().unwrap().success());
    wait_for("the rest of the log", || {
        contains(&shown, &format!("line {LINES}\n"))
    });
    follower.kill().unwrap();
    follower.wait().unwrap();
    let text = fs::read_to_string(&shown).unwrap();
    for (number, line) in text.lines().enumerate() {
        assert_eq!(line, format!("line {number}"), "a line is lost or doubled");
    }
    let back = directory.join("back");
    let output = scene
        .daemon
        .run(&["cp", "--quiet", "box:/tmp/file", back.to_str().unwrap()])
        .unwrap();
    assert!(output.status.success());
    assert!(fs::read(&back).unwrap() == fs::read(&here).unwrap());
    if kernel == Kernel::V6_12 {
        wait_for("the agent has noticed", || {
            generation(&scene.daemon) != before
        });
    }
    drop(restored);
}

/// Stops the guest and writes its state to a file.
fn save(qmp: &Qmp, path: &Path) {
    qmp.stop().unwrap();
    let uri = format!("exec:cat > {}", path.display());
    qmp.execute("migrate", json!({ "uri": uri })).unwrap();
    wait_for("the state is saved", || {
        let state = qmp.execute("query-migrate", json!({})).unwrap();
        assert_ne!(state["status"], "failed", "{state}");
        state["status"] == "completed"
    });
}

/// A guest in another QEMU than that in which it began. The harness cannot ask it for anything, as its hello was said before.
struct Restored {
    qemu: Child,
    // QEMU would not start without it.
    _control: UnixListener,
    _qmp: Qmp,
}

impl Restored {
    /// Ends the QEMU in which `guest` has been and starts another of the same arguments.
    fn start(guest: &Guest, kernel: Kernel, saved: &Path) -> Restored {
        let line = fs::read(format!("/proc/{}/cmdline", guest.process_id())).unwrap();
        let words = line
            .split(|byte| *byte == 0)
            .filter(|word| !word.is_empty());
        let mut arguments: Vec<String> = words
            .map(|word| String::from_utf8(word.to_vec()).unwrap())
            .collect();
        guest.kill().unwrap();
        let directory = guest.console_log().parent().unwrap().to_owned();
        // The guest does not read it again, but QEMU has to find it.
        let images = Images::open().unwrap();
        images
            .write_initramfs(kernel, true, &[], &[], &directory.join("initramfs"))
            .unwrap();
        let [control, qmp] = ["control", "qmp"].map(|name| {
            let path = directory.join(name);
            let _ = fs::remove_file(&path);
            UnixListener::bind(path).unwrap()
        });
        arguments.extend([
            "-incoming".to_owned(),
            format!("exec:cat {}", saved.display()),
        ]);
        let program = arguments.remove(0);
        let qemu = spawn::spawn(program, arguments, |command| {
            command.stdin(Stdio::null());
        });
        let qmp = Qmp::new(qmp.accept().unwrap().0).unwrap();
        // It was stopped when it was saved, and so it is now.
        wait_for("the state is back", || {
            let state = qmp.execute("query-status", json!({})).unwrap();
            state["status"] == "paused"
        });
        qmp.cont().unwrap();
        Restored {
            qemu: qemu.unwrap(),
            _control: control,
            _qmp: qmp,
        }
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn generation(daemon: &Daemon) -> String {
    let output = daemon.run(&["vm", "ls", "--json"]).unwrap();
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    let vms = list["vms"]
        .as_array()
        .unwrap_or_else(|| panic!("no list: {list}"));
    let vm = vms.iter().find(|vm| vm["name"] == "box");
    vm.map(|vm| vm["agent"]["generation"].to_string())
        .unwrap_or_else(|| panic!("no VM in {list}"))
}

fn contains(path: &Path, text: &str) -> bool {
    fs::read_to_string(path).unwrap().contains(text)
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "it did not come to be: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}
