//! `ringdown upgrade` with a keeper and daemons of their own, and programs that differ from this one in a few bytes.

#![allow(clippy::unwrap_used)] // This is a test.

mod program;

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use keeper::{Keeper, KeeperError};
use program::{Outcome, Running, assert_refused, finish, keeper_at, ringdown, run_with};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A keeper and a daemon. Daemons that `upgrade` starts are no children of this process.
struct Host {
    directory: tempfile::TempDir,
    keeper_process: Running,
    daemon: Option<Running>,
}

impl Host {
    fn start() -> Host {
        let directory = tempfile::tempdir().unwrap();
        let keeper = keeper_at(&directory.path().join("keeper"));
        let mut host = Host {
            directory,
            keeper_process: keeper,
            daemon: None,
        };
        host.serve();
        host
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn serve(&mut self) {
        self.serve_with(&["--vm", "name=web"]);
    }

    fn serve_with(&mut self, options: &[&str]) {
        self.serve_in(Path::new("."), options);
    }

    fn serve_in(&mut self, place: &Path, options: &[&str]) {
        let mut serve = self.serving();
        serve.current_dir(place).args(options);
        self.start_daemon(serve);
    }

    fn serving(&self) -> Command {
        let mut serve = ringdown(&["serve", "--keeper"]);
        serve.arg(self.path().join("keeper"));
        serve.arg("--runtime-dir").arg(self.path());
        serve
    }

    fn start_daemon(&mut self, mut serve: Command) {
        serve.stderr(File::create(self.path().join("log")).unwrap());
        let mut daemon = Running::start(serve);
        daemon.wait_until_ready();
        self.daemon = Some(daemon);
    }

    /// What daemons have logged since this test has started one.
    fn log(&self) -> String {
        fs::read_to_string(self.path().join("log")).unwrap()
    }

    fn refused(&self) -> Outcome {
        let keeper = self.path().join("keeper");
        run_with(
            self.path(),
            &["serve", "--keeper", keeper.to_str().unwrap()],
        )
    }

    fn upgrade(&self, arguments: &[&str]) -> Outcome {
        run_with(self.path(), &[&["upgrade"], arguments].concat())
    }

    fn restart(&self) -> Value {
        let listed = run_with(self.path(), &["vm", "ls", "--json"]);
        let listed: Value = serde_json::from_str(&listed.out).expect(&listed.err);
        assert_eq!(listed["vms"][0]["name"], "web");
        listed["restart"].clone()
    }

    fn pid(&self) -> Pid {
        let lock = fs::read_to_string(self.path().join("lock")).unwrap();
        Pid::from_raw(lock.trim().parse().unwrap()).unwrap()
    }

    /// A copy of the program, in which these bytes are others.
    fn program(&self, name: &str, from: &str, to: &str) -> PathBuf {
        assert_eq!(from.len(), to.len());
        let mut bytes = fs::read(env!("CARGO_BIN_EXE_ringdown")).unwrap();
        let places = bytes.windows(from.len()).enumerate();
        let places = places.filter(|(_, found)| *found == from.as_bytes());
        let places: Vec<usize> = places.map(|(place, _)| place).collect();
        assert!(!places.is_empty(), "{from} is not in the program");
        for place in places {
            bytes[place..place + to.len()].copy_from_slice(to.as_bytes());
        }
        let path = self.path().join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn keeper(&self) -> Keeper {
        loop {
            match Keeper::attach(&self.path().join("keeper")) {
                Err(KeeperError::Busy { .. }) => std::thread::yield_now(),
                attached => return attached.unwrap(),
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let lock = fs::read_to_string(self.path().join("lock")).unwrap_or_default();
        let pid = lock.trim().parse().ok().and_then(Pid::from_raw);
        if let (Some(pid), true) = (pid, self.daemon.is_none()) {
            // It may have ended.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

#[test]
fn a_new_program_follows_and_the_old_one_comes_back_where_that_does_not_serve() {
    let mut host = Host::start();
    let new = host.program("new", "ringdown", "ringdown");
    let new = new.to_str().unwrap();
    let checked = host.upgrade(&["--check", "--binary", new]);
    assert_eq!(checked.code, Some(0), "{}{}", checked.out, checked.err);
    assert!(checked.out.contains("it can be done"), "{}", checked.out);
    assert!(
        checked.out.contains("web: no VMM is connected"),
        "{}",
        checked.out
    );

    let first = host.pid();
    let done = host.upgrade(&["--binary", new]);
    assert_eq!(done.code, Some(0), "{}{}", done.out, done.err);
    // It has ended, and is not killed at the end of the test in another's place.
    assert!(host.daemon.take().unwrap().0.wait().unwrap().success());
    assert_ne!(host.pid(), first);
    let second = host.pid();
    let runs = fs::read_link(format!("/proc/{}/exe", second.as_raw_nonzero())).unwrap();
    assert_eq!(runs, Path::new(new));
    let name = fs::read_to_string(format!("/proc/{}/comm", second.as_raw_nonzero())).unwrap();
    assert_eq!(name, "ringdown\n");
    let restart = host.restart();
    assert_eq!(
        (&restart["restarts"], &restart["ended"]),
        (&1.into(), &"stopped".into())
    );

    // One that listens elsewhere.
    let silent = host.program("silent", "control.sock", "cantrol.sock");
    let silent = silent.to_str().unwrap();
    let failed = host.upgrade(&["--timeout", "1s", "--binary", silent]);
    assert_eq!(failed.code, Some(1), "{}", failed.out);
    assert!(
        failed
            .err
            .contains("it has not answered in 1 s. The old one goes on"),
        "{}",
        failed.err
    );
    assert_ne!(host.pid(), second);
    let runs = fs::read_link(format!("/proc/{}/exe", host.pid().as_raw_nonzero())).unwrap();
    assert_eq!(runs, Path::new(new));
    host.restart();
}

#[test]
fn what_a_new_program_could_not_go_on_with_ends_no_daemon() {
    let host = Host::start();
    let pid = host.pid();
    // It calls the same thing by another name.
    let other = host.program("other", "journal", "jornaly");
    let other = other.to_str().unwrap();
    for arguments in [&["--check"][..], &[]] {
        let refused = host.upgrade(&[arguments, &["--binary", other]].concat());
        assert_eq!(refused.code, Some(1), "{}", refused.err);
        let said = refused.out + &refused.err;
        assert!(
            said.contains("journal has version 3, and it reads none"),
            "{said}"
        );
    }
    fs::set_permissions(other, fs::Permissions::from_mode(0o775)).unwrap();
    let refused = host.upgrade(&["--binary", other]);
    assert!(
        refused.err.contains("others may write it"),
        "{}",
        refused.err
    );
    let refused = host.upgrade(&["--binary", "/bin/true"]);
    assert!(
        refused.err.contains("does not say what it reads"),
        "{}",
        refused.err
    );
    let refused = host.upgrade(&["--binary", "ringdown"]);
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert_eq!(host.pid(), pid);
}

/// Another one that was started since knows nothing of the daemon.
#[test]
fn a_keeper_that_has_died_is_noticed_before_anything_ends() {
    let mut host = Host::start();
    let pid = host.pid();
    let keeper = &mut host.keeper_process.0;
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    let _another = keeper_at(&host.path().join("keeper"));
    for arguments in [&["--check"][..], &[]] {
        let refused = host.upgrade(arguments);
        assert_eq!(refused.code, Some(1), "{}", refused.err);
        let said = refused.out + &refused.err;
        assert!(said.contains("has ended since the daemon was"), "{said}");
    }
    let health = run_with(host.path(), &["check"]);
    let words = "it has ended since the daemon was started, and the daemon uses no other";
    let words = format!("ERROR   keeper          {words}");
    assert!(health.out.contains(&words), "{}", health.out);
    assert_eq!(health.code, Some(1), "{}", health.out);
    while !host.log().contains("has ended since the daemon was") {
        std::thread::yield_now();
    }
    assert_eq!(host.pid(), pid);
    host.restart();
}

#[test]
fn where_the_keeper_has_died_vms_and_networks_can_be_added() {
    let mut host = Host::start();
    drop(host.daemon.take());
    let file = host.path().join("ringdown.toml");
    fs::write(&file, "").unwrap();
    host.serve_with(&["--config", file.to_str().unwrap()]);
    let keeper = &mut host.keeper_process.0;
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    let warning = "warning: the keeper has ended: what was added is served";
    let added = run_with(host.path(), &["vm", "add", "late"]);
    assert_eq!(added.code, Some(0), "{}", added.err);
    assert!(added.err.contains(warning), "{}", added.err);
    let vm = "[[network]]\nname = \"lan\"\n[[vm]]\nname = \"new\"\n[[vm.net]]\nnetwork = \"lan\"\n";
    fs::write(&file, vm).unwrap();
    let reloaded = run_with(host.path(), &["reload"]);
    assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
    assert!(reloaded.err.contains(warning), "{}", reloaded.err);
    let log = host.log();
    assert!(
        log.contains("this socket and its VMM are not kept"),
        "{log}"
    );
    for socket in ["late.vhost", "new.vhost", "new.net-lan.vhost"] {
        let socket = host.path().join(socket);
        UnixStream::connect(&socket).unwrap_or_else(|error| panic!("{socket:?}: {error}"));
    }
    let removed = run_with(host.path(), &["vm", "rm", "late"]);
    assert_eq!(removed.code, Some(0), "{}", removed.err);
    let log = host.log();
    assert!(!log.contains("cannot have the keeper let go"), "{log}");
}

#[test]
fn what_a_later_version_kept_is_refused_and_left_as_it_is() {
    let mut host = Host::start();
    host.daemon = None;
    let shape_at = 7;
    let journal = |keeper: &Keeper| {
        let item = keeper.take("journal").unwrap();
        File::from(item.descriptors.into_iter().next().unwrap())
    };
    let file = journal(&host.keeper());
    let mut shape = [0];
    file.read_exact_at(&mut shape, shape_at).unwrap();
    file.write_all_at(&[shape[0] + 1], shape_at).unwrap();
    let refused = host.refused();
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    assert!(
        refused.err.contains("a later version of Ringdown wrote it"),
        "{}",
        refused.err
    );
    let left = journal(&host.keeper());
    let mut found = [0];
    left.read_exact_at(&mut found, shape_at).unwrap();
    assert_eq!(found, [shape[0] + 1]);
    left.write_all_at(&shape, shape_at).unwrap();

    let later = br#"{"version":99,"more":"of it"}"#;
    host.keeper().put("vmm:/web.vhost", later, &[]).unwrap();
    let refused = host.refused();
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    assert!(refused.err.contains("as version 99"), "{}", refused.err);
    let keeper = host.keeper();
    assert_eq!(keeper.take("vmm:/web.vhost").unwrap().value, later);
    keeper.drop_item("vmm:/web.vhost");
    drop(keeper);
    host.serve();
    let restart = host.restart();
    assert_eq!(
        (&restart["restarts"], &restart["ended"]),
        (&1.into(), &"died".into())
    );
}

#[test]
fn a_damaged_record_of_a_socket_holds_up_no_daemon() {
    let mut host = Host::start();
    host.daemon = None;
    let path = host.path().join("web.vhost");
    let key = format!("listener:{}", path.display());
    let keeper = host.keeper();
    let socket = keeper.take(&key).unwrap().descriptors;
    keeper.put(&key, b"damaged", &[socket[0].as_fd()]).unwrap();
    drop((keeper, socket));
    let waits = UnixStream::connect(&path).unwrap();
    host.serve();
    host.restart();
    // Whose it was is not known.
    assert!(matches!((&waits).read(&mut [0]), Ok(0) | Err(_)));
    UnixStream::connect(&path).unwrap();
}

#[test]
fn what_finds_no_room_is_left_for_a_daemon_that_has_it() {
    let mut host = Host::start();
    host.daemon = None;
    let keeper = host.keeper();
    let file = File::open("/dev/null").unwrap();
    keeper.put("vmm:/big", b"", &[file.as_fd(); 64]).unwrap();
    drop(keeper);
    let serve = host.serving();
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 40; exec timeout 60 \"$0\" \"$@\""]);
    limited.arg(serve.get_program()).args(serve.get_args());
    let refused = finish(limited);
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    let words = "may not have as many open files as the keeper has";
    assert!(refused.err.contains(words), "{}", refused.err);
    let kept = host.keeper().take("vmm:/big").unwrap();
    assert_eq!(kept.descriptors.len(), 64);
    host.serve();
    let before = host.pid();
    let upgrade = ["upgrade", "--runtime-dir", host.path().to_str().unwrap()];
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 20; exec \"$0\" \"$@\""]);
    limited.arg(env!("CARGO_BIN_EXE_ringdown")).args(upgrade);
    let refused = finish(limited);
    let words = "run it where `ulimit -Hn` is higher";
    assert!(refused.err.contains(words), "{}", refused.err);
    assert_eq!(host.pid(), before);
}

#[test]
fn a_program_that_does_not_end_holds_up_neither_guests_nor_the_next_daemon() {
    let mut host = Host::start();
    drop(host.daemon.take());
    let path = |name: &str| host.path().join(name);
    let stubborn = "trap '' TERM; echo $$; while :; do sleep 1; done";
    let config = format!(
        "[[vm]]\nname = \"web\"\nhybrid = {:?}\n[[vm]]\nname = \"www\"\nhybrid = {:?}\n\
         [[service]]\nname = \"stubborn\"\nport = 5000\ncommand = [\"/bin/sh\", \"-c\", {stubborn:?}]\n\
         [[rule]]\nfrom = \"web\"\nto = \"service:stubborn\"\naction = \"allow\"\n\
         [[rule]]\nfrom = \"web\"\nto = \"host\"\nport = 6000\nredirect = \"www:80\"\n",
        path("web.v"),
        path("db.v")
    );
    fs::write(path("c.toml"), config).unwrap();
    let vmm = UnixListener::bind(path("db.v")).unwrap();
    std::thread::spawn(move || {
        for call in vmm.incoming() {
            let mut call = call.unwrap();
            let mut line = [0; 11];
            call.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"CONNECT 80\n");
            call.write_all(b"OK 1\nhello").unwrap();
        }
    });
    let config = path("c.toml");
    host.serve_with(&["--config", config.to_str().unwrap()]);

    let mut circuit = UnixStream::connect(host.path().join("web.v_5000")).unwrap();
    let mut program = BufReader::new(circuit.try_clone().unwrap());
    let mut pid = String::new();
    program.read_line(&mut pid).unwrap();
    let before = host.pid();
    let upgrade = ringdown(&["upgrade", "--runtime-dir", host.path().to_str().unwrap()]);
    let upgrade = std::thread::spawn(|| finish(upgrade));
    // It is cut at once, and has seconds to end.
    let _ = circuit.read(&mut [0]);
    let mut call = UnixStream::connect(host.path().join("web.v_6000")).unwrap();
    let mut said = [0; 5];
    call.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"hello");
    let done = upgrade.join().unwrap();
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert_ne!(host.pid(), before);
    assert!(!Path::new("/proc").join(pid.trim()).exists());
    assert!(host.daemon.take().unwrap().0.wait().unwrap().success());
    // The one with the program.
    assert_eq!(host.restart()["reset"], 1);
}

#[test]
fn what_the_next_daemon_would_read_is_looked_at_before_this_one_ends() {
    let mut host = Host::start();
    drop(host.daemon.take());
    let (config, place) = (host.path().join("c.toml"), host.path().join("place"));
    let both = "[[vm]]\nname = \"web\"\n[[vm]]\nname = \"www\"\n";
    fs::write(&config, both).unwrap();
    fs::create_dir(&place).unwrap();
    host.serve_in(&place, &["--config", config.to_str().unwrap()]);
    let before = host.pid();
    let refused = |words: &str| {
        for arguments in [&["--check"][..], &[]] {
            let outcome = host.upgrade(arguments);
            assert_eq!(outcome.code, Some(1), "{}", outcome.out);
            let said = format!("{}{}", outcome.out, outcome.err);
            assert!(said.contains(words), "{said}");
        }
        assert_eq!(host.pid(), before);
    };
    fs::write(&config, "[[vm]]\nname = 7\n").unwrap();
    refused(&format!(
        "the new program would not start: {}: line 2, column 8",
        config.display()
    ));
    fs::write(&config, "[[vm]]\nname = \"web\"\n").unwrap();
    refused("the configuration has no www any more: `ringdown reload` first, if that is meant");
    fs::write(&config, both).unwrap();
    fs::remove_dir(&place).unwrap();
    refused("the daemon's working directory is gone");
    fs::create_dir(&place).unwrap();
    refused("the daemon's working directory is gone");
}

#[test]
fn a_configuration_that_cannot_be_read_again_ends_no_daemon() {
    let mut host = Host::start();
    drop(host.daemon.take());
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&writer, b"[[vm]]\nname = \"web\"\n").unwrap();
    drop(writer);
    let mut serve = host.serving();
    serve.args(["--config", "/dev/stdin"]).stdin(reader);
    host.start_daemon(serve);
    let before = host.pid();
    let refused = host.upgrade(&[]);
    assert_eq!(refused.code, Some(1), "{}", refused.out);
    let words = "the configuration has no web any more";
    assert!(refused.err.contains(words), "{}", refused.err);
    assert_eq!(host.pid(), before);
}

#[test]
fn a_daemon_waits_for_a_keeper_that_is_started_behind_it() {
    let directory = tempfile::tempdir().unwrap();
    let keeper = directory.path().join("keeper");
    let mut serve = ringdown(&["serve", "--keeper"]);
    // It is made right before the keeper is asked for.
    let run = directory.path().join("run");
    serve.arg(&keeper).arg("--runtime-dir").arg(&run);
    let mut daemon = Running::start(serve);
    while !run.exists() {
        std::thread::yield_now();
    }
    let _hold = keeper_at(&keeper);
    daemon.wait_until_ready();
}

#[test]
fn a_keeper_or_a_daemon_that_is_stopped_is_noticed_before_anything_ends() {
    let mut host = Host::start();
    let before = host.pid();
    let keeper = Pid::from_child(&host.keeper_process.0);
    for (process, words) in [(keeper, "does not answer"), (before, "is stopped")] {
        kill_process(process, Signal::STOP).unwrap();
        for arguments in [&["--check"][..], &[]] {
            let refused = host.upgrade(arguments);
            assert_eq!(refused.code, Some(1), "{}", refused.err);
            let said = refused.out + &refused.err;
            assert!(said.contains(words), "{said}");
        }
        if process == keeper {
            let checked = run_with(host.path(), &["check"]);
            assert_eq!(checked.code, Some(1), "{}", checked.out);
            let keeper = checked.out.lines().find(|line| line.contains(" keeper "));
            assert!(keeper.unwrap().contains(words), "{}", checked.out);
        }
        if process == before {
            for command in [&["vm", "ls"][..], &["events"]] {
                assert_refused(&run_with(host.path(), command), 1, words);
            }
            let checked = run_with(host.path(), &["check"]);
            assert_eq!(checked.code, Some(1), "{}", checked.out);
            assert!(checked.out.contains(words), "{}", checked.out);
        }
        kill_process(process, Signal::CONT).unwrap();
        assert_eq!(host.pid(), before);
    }
    let done = host.upgrade(&[]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    drop(host.daemon.take());
    host.restart();
}

#[test]
fn one_upgrade_is_done_at_a_time() {
    let mut host = Host::start();
    let before = host.pid();
    let other = File::open(host.path()).unwrap();
    flock(&other, FlockOperation::LockExclusive).unwrap();
    let refused = host.upgrade(&[]);
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    let words = "another upgrade of this daemon is under way";
    assert!(refused.err.contains(words), "{}", refused.err);
    assert_eq!(host.upgrade(&["--check"]).code, Some(0));
    assert_eq!(host.pid(), before);
    drop(other);
    assert_eq!(host.upgrade(&[]).code, Some(0));
    drop(host.daemon.take());
    host.restart();
}

/// A script of this name that runs the daemon.
fn supervised(host: &mut Host, name: &str, script: &str) -> Running {
    drop(host.daemon.take());
    let path = host.path().join(name);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut supervisor = Command::new(path);
    let serve = host.serving();
    supervisor.arg(serve.get_program()).args(serve.get_args());
    supervisor.args(["--vm", "name=web"]);
    let mut supervisor = Running::start(supervisor);
    supervisor.wait_until_ready();
    supervisor
}

#[test]
fn a_supervisor_is_to_start_the_new_daemon() {
    let mut host = Host::start();
    let _supervisor = supervised(&mut host, "runsv", "\"$@\"; exit");
    let before = host.pid();
    for arguments in [&["--check"][..], &[]] {
        let refused = host.upgrade(arguments);
        assert_eq!(refused.code, Some(1), "{}", refused.err);
        let said = refused.out + &refused.err;
        assert!(said.contains("`sv restart SERVICE`"), "{said}");
    }
    assert_eq!(host.pid(), before);
}

/// It may be faster, or not.
#[test]
fn where_something_else_starts_the_daemon_too_one_serves() {
    let mut host = Host::start();
    let loops = supervised(&mut host, "loops", "while :; do \"$@\"; done");
    let before = host.pid();
    let done = host.upgrade(&[]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    drop(loops);
    assert_ne!(host.pid(), before);
    assert_eq!(host.restart()["restarts"], 2);
}

#[test]
fn the_log_of_a_daemon_that_hands_over_does_not_say_that_vmms_go() {
    let mut host = Host::start();
    let vmm = UnixStream::connect(host.path().join("web.vhost")).unwrap();
    while !host.log().contains("VMM connected") {
        std::thread::yield_now();
    }
    let done = host.upgrade(&[]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(host.daemon.take().unwrap().0.wait().unwrap().success());
    let log = host.log();
    assert!(!log.contains("VMM disconnected"), "{log}");
    drop(vmm);
}
