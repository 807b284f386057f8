//! The daemon as a service: in its sandbox, and with a service manager that makes its socket, hears when it is ready, and
//! waits for signs of life.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

mod program;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use program::{Running, assert_refused, keeper_at, ringdown, run_with};

/// What is waited for that should come at once.
const PATIENCE: Duration = Duration::from_secs(60);

fn serve(directory: &Path, words: &[&str]) -> Command {
    let mut command = ringdown(&["serve", "--log", "info", "--runtime-dir"]);
    command.arg(directory).args(words);
    command
}

#[test]
fn a_call_that_the_sandbox_does_not_know_ends_the_daemon() {
    for (mode, is_killed) in [("on", true), ("off", false)] {
        let directory = tempfile::tempdir().unwrap();
        let mut command = serve(directory.path(), &["--sandbox", mode]);
        command
            .env("RINGDOWN_TEST_FORBIDDEN_CALL", "1")
            .stderr(Stdio::piped());
        let mut daemon = Running::start(command);
        daemon.wait_until_ready();
        let mut log = BufReader::new(daemon.0.stderr.take().unwrap());
        if is_killed {
            // SIGSYS, which the service manager reports; the kernel's log has the number of the call.
            let mut rest = String::new();
            log.read_to_string(&mut rest).unwrap();
            assert_eq!(daemon.0.wait().unwrap().signal(), Some(31), "{rest}");
            assert!(!rest.contains("started a program"), "{rest}");
        } else {
            let mut lines = log.lines().map(Result::unwrap);
            assert!(lines.any(|line| line.starts_with("started a program: Ok")));
        }
    }
}

#[test]
fn who_is_unknown_is_looked_up_in_the_sandbox() {
    let directory = tempfile::tempdir().unwrap();
    let mut daemon = Running::start(serve(directory.path(), &["--vm", "name=web"]));
    daemon.wait_until_ready();
    // Every source is asked for them, and modules are loaded for it.
    for nobody in ["user:ringdown-no-such", "users:ringdown-no-such"] {
        let why = run_with(directory.path(), &["why", nobody, "web", "80"]);
        assert_refused(&why, 2, "ringdown-no-such");
    }
    let known = run_with(directory.path(), &["why", "user:root", "web", "80"]);
    assert!(
        known.code == Some(4)
            && known
                .out
                .starts_with("allowed, but it would fail now: VM \"web\""),
        "{}",
        known.err
    );
    // And all that was an event, or is none.
    let events = run_with(directory.path(), &["events", "--json", "--kind", "refused"]);
    assert_eq!(
        (events.code, events.out.as_str(), events.err.as_str()),
        (Some(0), "", "")
    );
    let events = run_with(directory.path(), &["events", "--kind", "refused"]);
    assert_eq!((events.code, events.out.as_str()), (Some(0), ""));
    assert!(events.err.contains("no such events"), "{}", events.err);
}

#[test]
fn routes_are_asked_for_in_the_sandbox() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ringdown.toml");
    let text = "[[vm]]\nname = \"web\"\n[[service]]\nname = \"out\"\nport = 1\negress = true\n\
        [[rule]]\nfrom = \"web\"\nto = \"any\"\naction = \"allow\"\n";
    std::fs::write(&path, text).unwrap();
    let config = path.to_str().unwrap();
    let mut daemon = Running::start(serve(directory.path(), &["--config", config]));
    daemon.wait_until_ready();
    // Whatever this machine's routes are, they are known.
    for address in ["address:1.1.1.1", "address:2606:4700::1111"] {
        let answer = run_with(directory.path(), &["policy", "test", "web", address, "80"]);
        assert!(matches!(answer.code, Some(0 | 3)), "{}", answer.err);
        assert!(!answer.out.contains("does not say"), "{}", answer.out);
    }
    let own = run_with(
        directory.path(),
        &["policy", "test", "web", "address:127.0.0.1", "80"],
    );
    assert_eq!(own.code, Some(3));
    assert!(own.out.contains("an address of the host"), "{}", own.out);
}

#[test]
fn who_follows_events_goes_on_through_a_restart_of_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let mut daemon = Running::start(serve(directory.path(), &[]));
    daemon.wait_until_ready();
    let words = ["events", "--follow", "--kind", "vm-added"];
    let mut command = ringdown(&words);
    command.arg("--runtime-dir").arg(directory.path());
    let mut follower = Running::start(command);
    let mut told = BufReader::new(follower.0.stdout.take().unwrap()).lines();
    let mut told_of = |vm: &str| {
        let added = run_with(directory.path(), &["vm", "add", vm]);
        assert_eq!(added.code, Some(0), "{}", added.err);
        // Before it may come that events of the daemon before are not kept.
        let expected = format!(" vm-added        {vm}");
        assert!(told.any(|line| line.unwrap().ends_with(&expected)), "{vm}");
    };
    told_of("web");
    drop(daemon);
    let mut daemon = Running::start(serve(directory.path(), &[]));
    daemon.wait_until_ready();
    told_of("db");
    // Of those that are kept and asked for the last ones, without an end of its own.
    for vm in ["mail", "old"] {
        told_of(vm);
    }
    let words = ["events", "--kind", "vm-added", "-n", "2"];
    let last = run_with(directory.path(), &words).out;
    let vms: Vec<_> = last
        .lines()
        .map(|line| line.split(' ').next_back())
        .collect();
    assert_eq!(vms, [Some("mail"), Some("old")]);
}

#[test]
fn programs_of_services_run_outside_the_sandbox_and_files_elsewhere_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (run, more) = (directory.path().join("run"), directory.path().join("more"));
    let (elsewhere, file) = (
        directory.path().join("elsewhere"),
        directory.path().join("c/c.toml"),
    );
    for made in [&run, &more, &elsewhere, &directory.path().join("c")] {
        std::fs::create_dir(made).unwrap();
    }
    // Writing to its standard input's directory is what the daemon itself could not do.
    let mark = elsewhere.join("mark");
    let base = format!(
        "sandbox-paths = [{more:?}]\n[[vm]]\nname = \"fc\"\nhybrid = {:?}\n[[rule]]\nfrom = \"fc\"\nto = \"service:cat\"\nport = \"*\"\n\
         action = \"allow\"\n[[service]]\nname = \"cat\"\nport = 5000\ncommand = [\"/bin/sh\", \"-c\", \"echo run > {}; exec cat\"]\n",
        run.join("fc.vsock"),
        mark.display()
    );
    std::fs::write(&file, &base).unwrap();
    let mut daemon = Running::start(serve(&run, &["--config", file.to_str().unwrap()]));
    daemon.wait_until_ready();

    let mut circuit = UnixStream::connect(run.join("fc.vsock_5000")).unwrap();
    circuit.set_read_timeout(Some(PATIENCE)).unwrap();
    circuit.write_all(b"hello").unwrap();
    circuit.shutdown(Shutdown::Write).unwrap();
    let mut echoed = String::new();
    circuit.read_to_string(&mut echoed).unwrap();
    assert_eq!(echoed, "hello");
    assert_eq!(std::fs::read_to_string(&mark).unwrap(), "run\n");

    let add = |name: &str, socket: &Path| {
        run_with(
            &run,
            &["vm", "add", name, "--host", socket.to_str().unwrap()],
        )
    };
    let outside = elsewhere.join("web.sock");
    assert_refused(
        &add("web", &outside),
        2,
        "start it anew, with the directory in sandbox-paths or --sandbox-path",
    );
    assert!(!outside.exists());
    assert_eq!(add("db", &more.join("db.sock")).code, Some(0));

    let program = "[[service]]\nname = \"new\"\nport = 5001\ncommand = [\"/bin/true\"]\n";
    for (text, message) in [
        (
            program.to_owned(),
            ": line 14, column 1: the sandbox does not let the daemon start \"/bin/true\", as the configuration did not name it with these arguments when the daemon started: start it anew (this cuts off the guests of QEMU",
        ),
        (
            // All at once, as one restart is enough.
            format!(
                "{program}[[publish]]\nname = \"p\"\nlisten = {:?}\nto = \"fc:1\"\n[[vm]]\nname = \"v\"\nhost = {:?}\n",
                format!("unix:{}/p", elsewhere.display()),
                elsewhere.join("v")
            ),
            &format!(
                ": line 14, column 1: the sandbox does not let the daemon make {0}/p and {0}/v and start \"/bin/true\", as",
                elsewhere.display()
            ),
        ),
        (
            format!(
                "[[publish]]\nlisten = {:?}\nto = \"fc:1\"\n",
                format!("unix:{}/p", elsewhere.display())
            ),
            "the sandbox does not let the daemon make",
        ),
        (
            format!(
                "{program}[[vm]]\nname = \"v\"\nhost = {:?}\n",
                elsewhere.join("no/v")
            ),
            &format!(
                ": line 18, column 1: there is no {}/no: correct the path, or make it",
                elsewhere.display()
            ),
        ),
        (
            program.replace("/bin/true", "/bin/no-such-program"),
            "there is no /bin/no-such-program: correct the path, or make it",
        ),
    ] {
        std::fs::write(&file, base.clone() + &text).unwrap();
        let check = run_with(&run, &["check", "--config", file.to_str().unwrap()]);
        let found = "ERROR   reload          the daemon would refuse the file: ";
        assert!(
            check.out.contains(found) && check.out.contains(message),
            "{}",
            check.out
        );
        assert_eq!(check.code, Some(1));
        // Before it is renamed, too.
        let new = file.with_extension("new");
        std::fs::copy(&file, &new).unwrap();
        let check = run_with(&run, &["check", "--config", new.to_str().unwrap()]);
        let found = "ERROR   reload          the daemon would refuse the file in place of ";
        assert!(
            check.out.contains(found) && check.out.contains(message),
            "{}",
            check.out
        );
        assert_refused(&run_with(&run, &["reload"]), 1, message);
    }
    // The file is read again though its name stands for another one.
    let renamed = directory.path().join("c/new");
    std::fs::write(&renamed, &base).unwrap();
    std::fs::rename(&renamed, &file).unwrap();
    assert_eq!(run_with(&run, &["reload"]).code, Some(0));
}

#[test]
fn with_a_keeper_a_program_that_a_reload_adds_does_not_cost_the_guests() {
    let directory = tempfile::tempdir().unwrap();
    let (run, file) = (directory.path(), directory.path().join("c.toml"));
    let keeper = run.join("keeper");
    let _hold = keeper_at(&keeper);
    std::fs::write(&file, "").unwrap();
    let mut command = serve(run, &["--config", file.to_str().unwrap(), "--keeper"]);
    command.arg(&keeper);
    let mut daemon = Running::start(command);
    daemon.wait_until_ready();
    let program = "[[service]]\nname = \"new\"\nport = 5001\ncommand = [\"/bin/true\"]\n";
    std::fs::write(&file, program).unwrap();
    let refused = run_with(run, &["reload"]);
    let words = "start it anew (this resets circuits with the host and nothing else";
    assert_refused(&refused, 1, words);
    assert!(!refused.err.contains("QEMU"), "{}", refused.err);
}

/// Links that came when the configuration had been read: a user who may write in the directory of a service's socket must not send guests on to other VMs.
#[test]
fn what_a_guest_says_gets_to_no_socket_of_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let (run, file) = (
        directory.path().join("run"),
        directory.path().join("c.toml"),
    );
    std::fs::create_dir(&run).unwrap();
    let service = run.join("service");
    let text = format!(
        "[[vm]]\nname = \"fc\"\nhybrid = {0:?}\nhost = {1:?}\n\
         [[vm]]\nname = \"box\"\nhybrid = {2:?}\n\
         [[vm]]\nname = \"old\"\n[[vm.channel]]\nname = \"c\"\nto = \"unix:{3}\"\nlisten = {4:?}\n\
         [[service]]\nname = \"s\"\nport = 5000\nto = \"unix:{3}\"\n\
         [[rule]]\nfrom = \"fc\"\nto = \"service:s\"\nport = \"*\"\naction = \"allow\"\n",
        run.join("fc.vmm"),
        run.join("fc.sock"),
        run.join("box.vmm"),
        service.display(),
        run.join("old.port"),
    );
    std::fs::write(&file, text).unwrap();
    let boxes_vmm = UnixListener::bind(run.join("box.vmm")).unwrap();
    boxes_vmm.set_nonblocking(true).unwrap();
    let mut daemon = Running::start(serve(&run, &["--config", file.to_str().unwrap()]));
    daemon.wait_until_ready();

    let call = || {
        let mut call = UnixStream::connect(run.join("fc.vmm_5000")).unwrap();
        call.set_read_timeout(Some(PATIENCE)).unwrap();
        // The daemon may have refused it already.
        let _ = call.write_all(b"CONNECT 22\nGET /v1/vms HTTP/1.1\r\n\r\n");
        let mut heard = Vec::new();
        let _ = call.read_to_end(&mut heard);
        heard
    };
    for own in ["box.sock", "control.sock", "circuit.sock", "box.vmm_1007"] {
        std::os::unix::fs::symlink(run.join(own), &service).unwrap();
        assert_eq!(call(), b"", "{own}");
        std::fs::remove_file(&service).unwrap();
    }
    // A channel tries again and again: when it has reached the program, it has tried the link before.
    std::os::unix::fs::symlink(run.join("box.sock"), &service).unwrap();
    let mut port = UnixStream::connect(run.join("old.port")).unwrap();
    port.write_all(b"CONNECT 22\n").unwrap();
    assert_eq!(call(), b"");
    let none = boxes_vmm.accept().map(drop).map_err(|error| error.kind());
    assert_eq!(none, Err(std::io::ErrorKind::WouldBlock));
    std::fs::remove_file(&service).unwrap();
    let program = UnixListener::bind(&service).unwrap();
    let mut words = [0; 11];
    program.accept().unwrap().0.read_exact(&mut words).unwrap();
    assert_eq!(
        &words, b"CONNECT 22\n",
        "the channel said it to a socket of the daemon"
    );
}

#[test]
fn a_service_manager_makes_the_socket_and_hears_that_the_daemon_lives() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path();
    let told = UnixDatagram::bind(run.join("notify")).unwrap();
    told.set_read_timeout(Some(PATIENCE)).unwrap();
    let listener = UnixListener::bind(run.join("control.sock")).unwrap();
    // A client that asks before the daemon is there waits.
    let mut early = UnixStream::connect(run.join("control.sock")).unwrap();
    early
        .write_all(b"GET /v1/vms HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .unwrap();

    let mut daemon = Running::start(handed_over(listener, run, run));
    daemon.wait_until_ready();
    let mut hear = || {
        let mut buffer = [0; 256];
        let len = told.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..len]).into_owned()
    };
    let heard: Vec<String> = std::iter::repeat_with(&mut hear).take(4).collect();
    assert!(
        heard.iter().any(|word| word.contains("READY=1")),
        "{heard:?}"
    );
    let signs = heard.iter().filter(|word| word.contains("WATCHDOG=1"));
    assert!(signs.count() >= 2, "{heard:?}");
    early.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = String::new();
    early.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");

    let pid = rustix::process::Pid::from_raw(daemon.0.id().try_into().unwrap()).unwrap();
    // By this the daemon knows its own sockets.
    let late = UnixStream::connect(run.join("control.sock")).unwrap();
    let listens = rustix::net::sockopt::socket_peercred(&late).unwrap().pid;
    assert_eq!(listens, pid);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.0.wait().unwrap().success());
    assert!(
        run.join("control.sock").exists(),
        "it is the service manager's to remove"
    );
}

#[test]
fn a_socket_of_another_place_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("other.sock")).unwrap();
    let run = directory.path().join("run");
    let outcome = program::finish(handed_over(listener, &run, directory.path()));
    assert_refused(&outcome, 1, "ListenStream=");
}

/// The daemon, started as systemd would start it. A shell puts the socket where it belongs, and has the process's id.
fn handed_over(listener: UnixListener, run: &Path, notify: &Path) -> Command {
    let script = "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" serve --runtime-dir \"$1\"";
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", script, env!("CARGO_BIN_EXE_ringdown")])
        .arg(run)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .env("NOTIFY_SOCKET", notify.join("notify"))
        .env("WATCHDOG_USEC", "200000")
        .env_remove("WATCHDOG_PID")
        .env_remove("RINGDOWN_LOG");
    command
}

#[test]
fn what_an_enforced_rule_ends_is_told_with_the_rule() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path();
    let (file, target) = (run.join("ringdown.toml"), run.join("target"));
    let server = UnixListener::bind(&target).unwrap();
    let base = format!(
        "[[vm]]\nname = \"fc\"\nhybrid = {:?}\n[[service]]\nname = \"s\"\nport = 5000\nto = \"unix:{}\"\n",
        run.join("fc.vsock"),
        target.display()
    );
    let rule = |name: &str, action: &str| {
        format!(
            "[[rule]]\nname = {name:?}\nfrom = \"fc\"\nto = \"service:s\"\naction = {action:?}\n"
        )
    };
    std::fs::write(&file, base.clone() + &rule("yes", "allow")).unwrap();
    let mut daemon = Running::start(serve(run, &["--config", file.to_str().unwrap()]));
    daemon.wait_until_ready();
    for (next, by_rule, reason) in [
        (
            rule("no-more", "deny"),
            ", rule \"no-more\", ",
            "the rule does not allow it any more",
        ),
        (String::new(), "", "no rule allows it"),
    ] {
        let mut guest = UnixStream::connect(run.join("fc.vsock_5000")).unwrap();
        guest.set_read_timeout(Some(PATIENCE)).unwrap();
        let (mut program, _) = server.accept().unwrap();
        program.write_all(b"x").unwrap();
        guest.read_exact(&mut [0]).unwrap();
        std::fs::write(&file, base.clone() + &next).unwrap();
        let reload = run_with(run, &["reload", "--enforce-existing"]);
        assert_eq!(reload.code, Some(0), "{}", reload.err);
        // A reset, or an end: a UNIX socket has no other way.
        let _ = guest.read(&mut [0]);
        let deadline = Instant::now() + PATIENCE;
        let is_told = |events: &str| {
            let mut lines = events.lines();
            lines.any(|line| line.ends_with(reason) && line.contains(by_rule))
        };
        loop {
            let events = run_with(run, &["events", "--kind", "circuit-ended"]).out;
            if is_told(&events) {
                break;
            }
            assert!(Instant::now() < deadline, "{events}");
        }
        std::fs::write(&file, base.clone() + &rule("yes", "allow")).unwrap();
        assert_eq!(run_with(run, &["reload"]).code, Some(0));
    }
}
