//! `ringdown upgrade` and `kill -9` of the daemon, over and over, under load: guests see nothing of it, and what the host takes part in is cut at once or goes on by
//! itself, as docs/service.md says.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "upgrade/load.rs"]
mod load;
#[path = "upgrade/package.rs"]
mod package;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use e2e::{Daemon, DaemonSpec, Guest, hold, ringdown_program, spawn};
use load::{Stream, eventually, start};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// How many upgrades there are, and as many kills; and with RINGDOWN_E2E_FULL.
const ROUNDS: u64 = 2;
const ROUNDS_IN_FULL: u64 = 20;

/// The least that a stream carries, in pieces of 100,000 numbers: with RINGDOWN_E2E_FULL more than 1 GiB.
const PIECES: u64 = 1;
const PIECES_IN_FULL: u64 = 1200;

/// What `cp` takes over, in bytes.
const COPIED: usize = 16 << 20;

/// A runtime directory, its keeper, and the daemon of now. One that an upgrade has started is no child of this process.
struct Host {
    directory: PathBuf,
    keeper: Child,
    daemon: Daemon,
}

impl Host {
    fn start() -> Host {
        let directory = spawn::scratch_directory().unwrap();
        let keeper = hold(&directory.join("keeper")).unwrap();
        let daemon = serve(&directory);
        Host {
            directory,
            keeper,
            daemon,
        }
    }

    fn ringdown(&self, arguments: &[&str]) -> String {
        let output = self.daemon.run(arguments).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ringdown(arguments)).unwrap()
    }

    fn start_command(&self, arguments: &[&str], output: &str) -> Child {
        let file = fs::File::create(self.directory.join(output)).unwrap();
        let mut command = self.daemon.command(arguments).unwrap();
        command.stdout(file).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn output(&self, name: &str) -> String {
        fs::read_to_string(self.directory.join(name)).unwrap()
    }

    /// Kills the daemon and starts the next one.
    fn kill(&mut self) {
        kill_last(&self.directory);
        // It may have been this process's child.
        self.daemon.kill().unwrap();
        self.daemon = serve(&self.directory);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        kill_last(&self.directory);
        let _ = self.daemon.kill();
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

fn serve(directory: &Path) -> Daemon {
    let mut spec = DaemonSpec::new().arguments(&[
        "--network",
        "lan",
        "--allow",
        "from=web,to=db,port=5000",
        "--allow",
        "from=db,to=web,port=5000",
        "--keeper",
        &directory.join("keeper").display().to_string(),
    ]);
    spec.runtime_directory = Some(directory.to_owned());
    Daemon::start(spec).unwrap()
}

/// Kills the process that has the lock of the runtime directory.
fn kill_last(directory: &Path) {
    let lock = fs::read_to_string(directory.join("lock")).unwrap_or_default();
    if let Some(pid) = lock.trim().parse().ok().and_then(Pid::from_raw) {
        // It may have ended.
        let _ = kill_process(pid, Signal::KILL);
    }
}

fn boot(host: &Host) -> [Guest; 2] {
    for (vm, cid) in [("web", "3"), ("db", "4")] {
        host.ringdown(&["vm", "add", vm, "--cid", cid, "--net", "lan"]);
    }
    load::boot(|guest| guest.attached(&host.daemon))
}

/// A circuit of the host is reset with its daemon: the command that has it ends, and says so.
fn is_cut(exec: Child) {
    let ended = exec.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(255), "{ended:?}");
    assert!(!ended.stderr.is_empty());
}

/// A copy that a restart has met goes on by itself or fails with a word; the same command then finishes it.
fn is_copied(host: &Host, copy: Child, arguments: &[&str]) {
    let ended = copy.wait_with_output().unwrap();
    if !ended.status.success() {
        assert!(!ended.stderr.is_empty(), "{ended:?}");
        host.ringdown(arguments);
    }
}

/// Each line once, in order.
fn assert_numbered(log: &str) {
    let lines: Vec<&str> = log.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        assert_eq!(*line, format!("line {number}"));
    }
}

#[test]
fn guests_see_nothing_of_upgrades_and_kills() {
    let (rounds, pieces) = match std::env::var_os("RINGDOWN_E2E_FULL") {
        Some(_) => (ROUNDS_IN_FULL, PIECES_IN_FULL),
        None => (ROUNDS, PIECES),
    };
    let mut host = Host::start();
    let guests = boot(&host);
    let [web, db] = &guests;
    let new = host.directory.join("new");
    fs::copy(ringdown_program().unwrap(), &new).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    let programs = [new, ringdown_program().unwrap()];
    let file = host.directory.join("copied");
    fs::write(&file, vec![7; COPIED]).unwrap();

    let streams = Stream::start_all(web, db, pieces);
    let writes = "n=0; while [ ! -e /tmp/stop ]; do echo line $n; n=$((n+1)); usleep 20000; done >> /tmp/numbers";
    db.shell("touch /tmp/numbers").unwrap();
    let follow = ["logs", "db", "--follow", "/tmp/numbers"];
    let mut follows = host.start_command(&follow, "log");
    let writer = start(db, writes);
    eventually("two circuits and lines of the log", || {
        host.ringdown(&["ls"]).matches(":5000").count() == 2 && host.output("log").contains("line")
    });

    let check = host.json(&["upgrade", "--check", "--json"]);
    let plan = &check["upgrade"]["daemon"];
    assert_eq!(plan["lines"].as_array().unwrap().len(), 2, "{check}");
    let mut pauses = Vec::new();
    for restart in 1..=2 * rounds {
        host.ringdown(&["exec", "db", "--wait", "60", "--", "true"]);
        let exec = ["exec", "web", "--wait", "60", "--", "sh", "-c"];
        let exec = [&exec[..], &["echo here; sleep 1000"]].concat();
        let exec = host.start_command(&exec, "exec");
        let target = format!("db:/tmp/copied-{}", restart % 2);
        let copy = ["cp", &file.display().to_string(), &target].map(str::to_owned);
        let copy = copy.each_ref().map(String::as_str);
        let copies = host.start_command(&copy, "cp");
        eventually("a command that runs", || host.output("exec") == "here\n");
        if restart % 2 == 0 {
            host.kill();
        } else {
            let program = programs[restart as usize / 2 % 2].display().to_string();
            host.ringdown(&["upgrade", "--binary", &program]);
        }
        is_cut(exec);
        is_copied(&host, copies, &copy);
        let cost = &host.json(&["vm", "ls", "--json"])["restart"];
        assert_eq!(cost["restarts"], restart, "{cost}");
        assert_eq!(cost["circuits"], 2, "{cost}");
        assert_eq!(cost["lines"], 2, "{cost}");
        pauses.push(cost["pause_ms"].as_u64().unwrap());
    }
    println!("pauses in ms, of upgrades and kills in turn: {pauses:?}");
    for guest in [web, db] {
        guest.shell("touch /tmp/stop").unwrap();
    }
    for stream in streams {
        stream.ends_whole();
    }
    writer.wait().unwrap();
    let written = db.shell("cat /tmp/numbers").unwrap();
    eventually("the whole log", || {
        host.output("log").len() >= written.trim().len()
    });
    follows.kill().unwrap();
    follows.wait().unwrap();
    assert_eq!(host.output("log").trim(), written.trim());
    assert_numbered(&host.output("log"));
    let sums = db
        .shell("cmp /tmp/copied-0 /tmp/copied-1 && wc -c < /tmp/copied-0")
        .unwrap();
    assert_eq!(sums.trim(), COPIED.to_string());
    drop(guests);
}
