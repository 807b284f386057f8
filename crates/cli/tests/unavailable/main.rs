//! A daemon that starts where another user of the host has bound the address of a published port, or a VMM has spoilt its own directory.

#![allow(clippy::unwrap_used)] // This is a test.

mod held;
#[path = "../program/mod.rs"]
mod program;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use program::{Running, keeper_at, ringdown, run_with};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Until what does not come is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// A directory for daemons, one of its VM `poor`, and the daemon that runs.
struct Host {
    directory: tempfile::TempDir,
    keeper: Option<Running>,
    daemon: Option<Running>,
}

impl Host {
    fn new(configuration: &str) -> Host {
        let host = Host {
            directory: tempfile::tempdir().unwrap(),
            keeper: None,
            daemon: None,
        };
        fs::create_dir(host.vms()).unwrap();
        fs::create_dir(host.vms().join("poor")).unwrap();
        host.write(configuration);
        host
    }

    fn vms(&self) -> PathBuf {
        self.directory.path().join("vms")
    }

    fn of_poor(&self, name: &str) -> PathBuf {
        self.vms().join("poor").join(name)
    }

    /// `POOR` stands for the directory of that VM.
    fn write(&self, configuration: &str) {
        let poor = self.vms().join("poor");
        let text = configuration.replace("POOR", poor.to_str().unwrap());
        let text = format!("sandbox-paths = [{:?}]\n{text}", self.vms());
        fs::write(self.directory.path().join("file.toml"), text).unwrap();
    }

    fn serve(&mut self) {
        let mut serve = ringdown(&["serve", "--config"]);
        serve.arg(self.directory.path().join("file.toml"));
        serve.arg("--runtime-dir").arg(self.directory.path());
        if self.keeper.is_some() {
            serve
                .arg("--keeper")
                .arg(self.directory.path().join("keeper"));
        }
        serve.stderr(fs::File::create(self.directory.path().join("log")).unwrap());
        let mut daemon = Running::start(serve);
        daemon.wait_until_ready();
        self.daemon = Some(daemon);
    }

    /// Ends the daemon by a signal, and waits until nothing is left of it.
    fn end(&mut self, signal: Signal) {
        let mut daemon = self.daemon.take().unwrap();
        let id = Pid::from_child(&daemon.0);
        kill_process(id, signal).unwrap();
        eventually("the daemon does not end", || {
            daemon.0.try_wait().unwrap().is_some()
        });
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    fn run(&self, arguments: &[&str]) -> program::Outcome {
        run_with(self.directory.path(), arguments)
    }

    /// Why a VM is not served, if it is not.
    fn unavailable(&self, vm: &str) -> Option<String> {
        let listed = self.run(&["vm", "ls", "--json"]);
        let listed: Value = serde_json::from_str(&listed.out).expect(&listed.err);
        let vms = listed["vms"].as_array().unwrap();
        let vm = vms.iter().find(|found| found["name"] == vm).unwrap();
        vm["unavailable"].as_str().map(str::to_owned)
    }

    /// The VM `good` is served, whatever became of the other.
    #[track_caller]
    fn assert_good_is_served(&self) {
        assert_eq!(self.unavailable("good"), None);
        UnixStream::connect(self.directory.path().join("good.vhost")).unwrap();
    }

    fn events(&self) -> String {
        self.run(&["events"]).out
    }
}

#[track_caller]
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(LOOK);
    }
}

/// Tries each of these, with hosts that wait beside each other.
fn at_once<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            let test = &test;
            scope.spawn(move || test(case));
        }
    });
}

const GOOD: &str = "[[vm]]\nname = \"good\"\n";

#[test]
fn a_port_that_another_has_bound_costs_itself_until_it_is_free() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let listen =
        format!("[[publish]]\nname = \"www\"\nlisten = \"tcp:{address}\"\nto = \"good:80\"\n");
    let mut host = Host::new(&format!("{GOOD}{listen}"));
    host.serve();
    host.assert_good_is_served();
    let log = host.log();
    assert!(log.contains("the published port is unavailable"), "{log}");
    assert!(log.contains("stop the program that uses it"), "{log}");
    let shown = host.run(&["vm", "ls"]).err;
    let expected = format!("the published port tcp:{address} is unavailable: ");
    assert!(shown.contains(&expected), "{shown}");
    let found = host.run(&["check"]).out;
    assert!(found.contains(&expected), "{found}");
    // What is in force may be changed meanwhile.
    host.write(&format!("{GOOD}[[vm]]\nname = \"new\"\n{listen}"));
    let reloaded = host.run(&["reload"]);
    assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
    assert_eq!(host.unavailable("new"), None);

    drop(taken);
    eventually("the port is not published", || {
        TcpStream::connect(address).is_ok()
    });
    eventually("it is still said to be unavailable", || {
        !host.run(&["vm", "ls"]).err.contains("unavailable")
    });
    let events = host.events();
    for kind in ["unavailable", "available"] {
        let of_kind = |line: &str| line.split_whitespace().any(|word| word == kind);
        assert!(events.lines().any(of_kind), "{events}");
    }
}

#[test]
fn a_vm_whose_directory_is_spoilt_costs_itself_until_it_is_mended() {
    type Spoil = fn(&Host, &Path) -> Box<dyn FnOnce(&Host)>;
    fn removed(host: &Host, _: &Path) -> Box<dyn FnOnce(&Host)> {
        fs::remove_dir(host.vms().join("poor")).unwrap();
        Box::new(|host| fs::create_dir(host.vms().join("poor")).unwrap())
    }
    fn file(_: &Host, path: &Path) -> Box<dyn FnOnce(&Host)> {
        let path = path.to_owned();
        fs::write(&path, "").unwrap();
        Box::new(move |_| fs::remove_file(path).unwrap())
    }
    fn another(_: &Host, path: &Path) -> Box<dyn FnOnce(&Host)> {
        let (path, listener) = (path.to_owned(), UnixListener::bind(path).unwrap());
        Box::new(move |_| {
            fs::remove_file(path).unwrap();
            drop(listener);
        })
    }
    let vms = [
        ("vhost-user = \"POOR/s\"", "s"),
        ("hybrid = \"POOR/s\"", "s_1007"),
        ("serial = \"POOR/s\"", "s"),
        ("host = \"POOR/s\"", "s"),
        (
            "[[vm.channel]]\nname = \"log\"\nlisten = \"POOR/s\"\nto = \"file:POOR/f\"",
            "s",
        ),
    ];
    at_once(vms, |(described, socket)| {
        let spoils: [(&str, Spoil); 3] = [
            ("no directory", removed),
            ("a file", file),
            ("a socket", another),
        ];
        for (what, spoil) in spoils {
            if described.starts_with("hybrid") && what != "no directory" {
                // There the daemon leaves out the one port.
                continue;
            }
            let described = format!("{GOOD}[[vm]]\nname = \"poor\"\n{described}\n");
            let mut host = Host::new(&described);
            let mend = spoil(&host, &host.of_poor(socket));
            host.serve();
            host.assert_good_is_served();
            let reason = host
                .unavailable("poor")
                .unwrap_or_else(|| panic!("{described}: {what}"));
            assert!(reason.contains("poor"), "{reason}");
            let found = host.run(&["check"]).out;
            assert!(found.contains(&reason), "{found}");
            mend(&host);
            // It comes by itself, as the others here do, and at once where that is asked for.
            let reloaded = host.run(&["reload"]);
            assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
            assert_eq!(host.unavailable("poor"), None, "{described}: {what}");
        }
    });
}

/// Windows of VMs are files in the runtime directory, and a port in a network has a socket of its own.
#[test]
fn a_spoilt_vm_costs_others_neither_windows_nor_ports() {
    let vms = "[[network]]\nname = \"lan\"\n\
        [[vm]]\nname = \"good\"\nwindows = \"2x8M\"\nnetworks = [\"lan\"]\n\
        [[vm]]\nname = \"poor\"\nwindows = \"2x8M\"\n\
        [[vm.net]]\nnetwork = \"lan\"\nvhost-user = \"POOR/port\"\n";
    let mut host = Host::new(vms);
    host.serve();
    let directory = host.directory.path().join("windows");
    let files = || {
        let paths = ["good.d/0", "good.d/1", "poor.d/0", "poor.d/1"];
        paths.map(|path| (path, fs::metadata(directory.join(path)).unwrap().ino()))
    };
    let before = files();
    host.daemon = None;
    let port = host.of_poor("port");
    let _ = fs::remove_file(&port);
    fs::write(&port, "no socket").unwrap();
    host.serve();
    host.assert_good_is_served();
    let shown = host.run(&["net", "show", "lan", "--json"]).out;
    assert!(shown.contains("good"), "{shown}");
    let reason = host.unavailable("poor").unwrap();
    assert!(reason.contains("port"), "{reason}");
    let prospect = host.run(&["upgrade", "--check"]).out;
    assert!(prospect.contains("poor: it is not served: "), "{prospect}");
    // Its link is not taken down.
    let found = host.run(&["check"]).out;
    assert!(!found.contains("was taken down"), "{found}");
    assert_eq!(files(), before);
    fs::remove_file(port).unwrap();
    eventually("it is not served", || host.unavailable("poor").is_none());
}

#[test]
fn a_vm_added_by_hand_whose_directory_is_gone_comes_back_too() {
    let mut host = Host::new(GOOD);
    let keeper = keeper_at(&host.directory.path().join("keeper"));
    host.keeper = Some(keeper);
    host.serve();
    let path = host.of_poor("s");
    let added = host.run(&["vm", "add", "poor", "--hybrid", path.to_str().unwrap()]);
    assert_eq!(added.code, Some(0), "{}", added.err);
    for _ in 0..2 {
        host.daemon = None;
        fs::remove_dir_all(host.vms().join("poor")).unwrap();
        host.serve();
        host.assert_good_is_served();
        assert!(host.unavailable("poor").is_some());
        // What was taken over is as before: it is not forgotten at the next end either.
        host.daemon = None;
        host.serve();
        assert!(host.unavailable("poor").is_some());
        fs::create_dir(host.vms().join("poor")).unwrap();
        eventually("it is not served", || host.unavailable("poor").is_none());
    }
    fs::remove_dir_all(host.vms().join("poor")).unwrap();
    host.daemon = None;
    host.serve();
    let removed = host.run(&["vm", "rm", "poor"]);
    assert_eq!(removed.code, Some(0), "{}", removed.err);
    assert!(!host.run(&["vm", "ls"]).out.contains("poor"));
}

#[test]
fn a_change_that_is_asked_for_is_refused_as_a_whole() {
    let mut host = Host::new(GOOD);
    host.serve();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    host.write(&format!(
        "{GOOD}[[vm]]\nname = \"new\"\n[[publish]]\nname = \"www\"\nlisten = \"tcp:{address}\"\nto = \"good:80\"\n"
    ));
    let reloaded = host.run(&["reload"]);
    assert_ne!(reloaded.code, Some(0));
    assert!(
        reloaded.err.contains("cannot listen on"),
        "{}",
        reloaded.err
    );
    let new = UnixStream::connect(host.directory.path().join("new.vhost"));
    assert_eq!(new.unwrap_err().kind(), ErrorKind::NotFound);
    host.assert_good_is_served();
}

/// As any reader of it can have it.
#[test]
fn sockets_are_made_beyond_a_mount() {
    let beyond = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut host = Host::new(&format!(
        "{GOOD}[[vm]]\nname = \"poor\"\nvhost-user = \"{}/s\"\n",
        beyond.path().display()
    ));
    host.serve();
    assert_eq!(host.unavailable("poor"), None);
    UnixStream::connect(beyond.path().join("s")).unwrap();
}

impl Host {
    /// The process `ringdown-paths` of this daemon.
    fn helper(&self) -> Option<PathBuf> {
        let runtime_dir = self.directory.path().to_str().unwrap();
        let is_helper = |process: &PathBuf| {
            let read = |name| fs::read_to_string(process.join(name)).unwrap_or_default();
            // One without the sandbox was there before.
            let is_confined = read("status").contains("\nSeccomp:\t2");
            let is_named = read("comm") == "ringdown-paths\n";
            is_named && is_confined && read("cmdline").contains(runtime_dir)
        };
        let processes = fs::read_dir("/proc").unwrap();
        let mut processes = processes.map(|process| process.unwrap().path());
        processes.find(is_helper)
    }

    fn signal_helper(&self, signal: Signal) {
        let id = self.helper().unwrap();
        let id = id.file_name().unwrap().to_str().unwrap();
        kill_process(Pid::from_raw(id.parse().unwrap()).unwrap(), signal).unwrap();
    }
}

#[test]
fn a_socket_whose_file_cannot_be_removed_is_in_the_log() {
    let mut host = Host::new(GOOD);
    fs::set_permissions(host.of_poor(""), PermissionsExt::from_mode(0o755)).unwrap();
    host.serve();
    let path = host.of_poor("s");
    let added = host.run(&["vm", "add", "new", "--vhost-user", path.to_str().unwrap()]);
    assert_eq!(added.code, Some(0), "{}", added.err);
    assert!(path.exists());
    host.signal_helper(Signal::STOP);
    let removed = host.run(&["vm", "rm", "new"]);
    assert_eq!(removed.code, Some(0), "{}", removed.err);
    let words = "could not remove a socket's file, and does not try again";
    eventually("the log does not say so", || {
        let log = host.log();
        log.lines()
            .any(|line| line.contains(words) && line.contains(path.to_str().unwrap()))
    });
    assert!(path.exists());
    host.signal_helper(Signal::CONT);
    host.assert_good_is_served();
}

#[test]
fn without_the_process_that_looks_into_directories_each_error_says_so() {
    let mut host = Host::new(GOOD);
    host.serve();
    host.signal_helper(Signal::KILL);
    eventually("it does not end", || host.helper().is_none());
    let path = host.of_poor("s");
    let added = host.run(&["vm", "add", "new", "--hybrid", path.to_str().unwrap()]);
    assert_eq!(added.code, Some(1), "{}", added.err);
    assert!(added.err.contains("start this one anew"), "{}", added.err);
    let check = host.run(&["check"]);
    let words = "its process `ringdown-paths` has ended";
    assert!(check.out.contains(words), "{}", check.out);
    host.end(Signal::TERM);
    host.serve();
    host.assert_good_is_served();
}

#[test]
fn a_directory_that_is_made_later_is_said_to_be_outside_of_the_sandbox() {
    let elsewhere = tempfile::tempdir().unwrap();
    let missing = elsewhere.path().join("missing");
    let socket = missing.join("late.vhost");
    let mut host = Host::new(&format!(
        "{GOOD}[[vm]]\nname = \"late\"\nvhost-user = {socket:?}\n"
    ));
    host.serve();
    let reason = host.unavailable("late").unwrap();
    assert!(reason.contains("does not exist"), "{reason}");
    fs::create_dir(&missing).unwrap();
    let is_confined = host.log().contains("the sandbox is in force");
    eventually("the remedy", || match host.unavailable("late") {
        None => !is_confined,
        Some(reason) => reason.contains("outside of the sandbox: start the daemon anew"),
    });
    host.end(Signal::TERM);
    host.serve();
    assert_eq!(host.unavailable("late"), None);
}
