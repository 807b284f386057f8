//! The daemon as a process: its ready line, its word to the service manager, its end by signals and its death.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Until what does not come is given up.
const PATIENCE: Duration = Duration::from_secs(20);

const SOCKETS: [&str; 3] = ["control.sock", "web.sock", "web.vhost"];

/// A daemon process. It is killed when the test fails before it has ended.
struct Daemon {
    process: Child,
    out: BufReader<ChildStdout>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It has ended already when all went well.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Daemon {
    fn start(directory: &Path, notify: &Path) -> Daemon {
        Daemon::start_with(directory, notify, &["--vm", "name=web"])
    }

    fn start_with(directory: &Path, notify: &Path, arguments: &[&str]) -> Daemon {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdown"));
        command.arg("serve").args(arguments);
        command.arg("--runtime-dir").arg(directory);
        command
            .env("NOTIFY_SOCKET", notify)
            .env_remove("RINGDOWN_LOG");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let out = BufReader::new(process.stdout.take().unwrap());
        Daemon { process, out }
    }

    /// Reads the ready line; there is none when the daemon has ended.
    fn wait_until_ready(&mut self) {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Waits for the end: the exit code, and the log. Nothing may have followed the ready line.
    fn wait(&mut self) -> (Option<i32>, String) {
        let (mut rest, mut log) = (String::new(), String::new());
        self.out.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "");
        self.process
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut log)
            .unwrap();
        (self.process.wait().unwrap().code(), log)
    }
}

fn notify_socket(directory: &Path) -> UnixDatagram {
    let socket = UnixDatagram::bind(directory.join("notify")).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    socket
}

fn word(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 256];
    let count = socket.recv(&mut buffer).unwrap();
    String::from_utf8_lossy(&buffer[..count]).trim().to_owned()
}

#[test]
fn it_says_when_it_is_ready_and_a_signal_ends_it_cleanly() {
    for signal in [Signal::TERM, Signal::INT] {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("ringdown");
        let notify = notify_socket(parent.path());
        let mut daemon = Daemon::start(&directory, &parent.path().join("notify"));
        daemon.wait_until_ready();
        assert_eq!(word(&notify), "READY=1");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&directory), 0o700);
        for name in SOCKETS {
            assert_eq!(mode(&directory.join(name)), 0o600, "{name}");
            UnixStream::connect(directory.join(name)).unwrap();
        }
        daemon.signal(signal);
        assert_eq!(word(&notify), "STOPPING=1");
        let (code, log) = daemon.wait();
        assert_eq!(code, Some(0), "{log}");
        for name in SOCKETS {
            assert!(
                !directory.join(name).exists(),
                "{name} is left after {signal:?}"
            );
        }
    }
}

#[test]
fn the_sockets_of_a_killed_daemon_are_taken_over_and_the_log_says_so() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("ringdown");
    let notify = parent.path().join("nobody");
    let mut first = Daemon::start(&directory, &notify);
    first.wait_until_ready();
    first.signal(Signal::KILL);
    assert_eq!(first.wait().0, None);
    for name in SOCKETS {
        assert!(directory.join(name).exists(), "{name}");
    }
    let mut second = Daemon::start(&directory, &notify);
    second.wait_until_ready();
    for name in SOCKETS {
        UnixStream::connect(directory.join(name)).unwrap();
    }
    second.signal(Signal::TERM);
    let (code, log) = second.wait();
    assert_eq!(code, Some(0), "{log}");
    for name in SOCKETS {
        let said = |line: &&str| line.contains("took over the stale socket") && line.contains(name);
        assert!(
            log.lines().any(|line| said(&line)),
            "nothing about {name} in {log}"
        );
    }
    // A service manager that is not there is no reason to end.
    assert!(log.contains("cannot tell the service manager"), "{log}");
}

#[test]
fn signals_reload_and_rotate_and_the_daemon_goes_on() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("ringdown");
    let (file, log) = (
        parent.path().join("ringdown.toml"),
        parent.path().join("audit.log"),
    );
    let audit = "audit = \"audit.log\"\n";
    let vm = |name: &str| format!("[[vm]]\nname = \"{name}\"\n");
    std::fs::write(&file, format!("{audit}{}", vm("web"))).unwrap();
    let notify = notify_socket(parent.path());
    let arguments = ["--config", file.to_str().unwrap()];
    let mut daemon = Daemon::start_with(&directory, &parent.path().join("notify"), &arguments);
    daemon.wait_until_ready();
    assert_eq!(word(&notify), "READY=1");

    // What cannot be meant ends nothing, and the service manager is not left waiting.
    std::fs::write(&file, "[[vn]]\n").unwrap();
    reload_by_signal(&daemon, &notify);
    UnixStream::connect(directory.join("web.sock")).unwrap();
    std::fs::write(&file, format!("{audit}{}{}", vm("web"), vm("db"))).unwrap();
    reload_by_signal(&daemon, &notify);
    UnixStream::connect(directory.join("db.sock")).unwrap();

    std::fs::rename(&log, parent.path().join("audit.log.1")).unwrap();
    daemon.signal(Signal::USR1);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !log.exists() {
        assert!(Instant::now() < deadline, "the audit was not opened anew");
        std::thread::yield_now();
    }
    daemon.signal(Signal::TERM);
    let (code, said) = daemon.wait();
    assert_eq!(code, Some(0), "{said}");
    let expected = "ringdown.toml: line 1, column 3: unknown key \"vn\": did you mean \"vm\"?";
    assert!(said.contains(expected), "{said}");
    assert!(said.contains("what was in force stays"), "{said}");
}

/// Has the daemon reload, and waits until it is done.
fn reload_by_signal(daemon: &Daemon, notify: &UnixDatagram) {
    daemon.signal(Signal::HUP);
    let begun = word(notify);
    assert!(begun.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{begun}");
    assert_eq!(word(notify), "READY=1");
}

#[test]
fn it_says_at_its_start_what_a_check_of_its_policy_finds_a_line_each() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("ringdown.toml");
    let text = "[hosts]\n\"in.test\" = \"127.0.0.1\"\n[[vm]]\nname = \"web\"\n\
        [[service]]\nname = \"out\"\nport = 1\negress = true\n\
        [[rule]]\nfrom = \"web\"\nto = \"any\"\naction = \"allow\"\n\
        [[rule]]\nfrom = \"wbe\"\nto = \"web\"\naction = \"allow\"\n\
        [[rule]]\nfrom = \"web\"\nto = \"service:out\"\naction = \"allow\"\n\
        [[publish]]\nlisten = \"unix:p.sock\"\nto = \"wee:80\"\n";
    std::fs::write(&file, text).unwrap();
    let config = file.to_str().unwrap();
    let check = Command::new(env!("CARGO_BIN_EXE_ringdown"))
        .args(["policy", "check", "--config", config])
        .output()
        .unwrap();
    let found = String::from_utf8(check.stdout).unwrap();
    let findings: Vec<&str> = found.lines().filter(|line| line.contains("; ")).collect();
    assert_eq!(findings.len(), 4, "{found}");
    let directory = parent.path().join("ringdown");
    let notify = notify_socket(parent.path());
    let mut daemon = Daemon::start_with(
        &directory,
        &parent.path().join("notify"),
        &["--config", config],
    );
    daemon.wait_until_ready();
    assert_eq!(word(&notify), "READY=1");
    daemon.signal(Signal::TERM);
    let (code, log) = daemon.wait();
    assert_eq!(code, Some(0), "{log}");
    for finding in findings {
        let told = log.lines().filter(|line| line.contains(finding)).count();
        assert_eq!(told, 1, "{finding}\n{log}");
    }
}

#[test]
fn the_log_and_the_commands_name_the_published_port_whose_caller_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("ringdown.toml");
    let socket = parent.path().join("www.sock");
    let text = format!(
        "[[vm]]\nname = \"web\"\n[[publish]]\nname = \"www\"\nlisten = \"unix:{}\"\nto = \"web:80\"\n",
        socket.display()
    );
    std::fs::write(&file, text).unwrap();
    let directory = parent.path().join("ringdown");
    let notify = notify_socket(parent.path());
    let mut daemon = Daemon::start_with(
        &directory,
        &parent.path().join("notify"),
        &["--config", file.to_str().unwrap()],
    );
    daemon.wait_until_ready();
    assert_eq!(word(&notify), "READY=1");
    let mut caller = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let _ = std::io::Read::read(&mut caller, &mut [0]);
    let said = |words: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_ringdown"))
            .arg("--runtime-dir")
            .arg(&directory)
            .args(words)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let why = said(&["why", "host", "web", "80"]);
    assert!(
        why.contains("published(www) -> web:80: the VM is not running"),
        "{why}"
    );
    let check = said(&["check"]);
    assert!(
        check.contains("www: its last caller") && check.contains("did not reach web:80"),
        "{check}"
    );
    daemon.signal(Signal::TERM);
    let (_, log) = daemon.wait();
    let line = log
        .lines()
        .find(|line| line.contains("refused a caller of a published port"));
    let line = line.unwrap_or_else(|| panic!("{log}"));
    for part in [
        "name=\"www\"",
        "vm=\"web\"",
        "to=80",
        "the VM is not running",
    ] {
        assert!(line.contains(part), "{line}");
    }
}

/// The answer of a command to a daemon, once it holds a word, or does not any more.
fn answer(directory: &Path, arguments: &[&str], word: &str, is_wanted: bool) -> String {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdown"));
        command.args(arguments).arg("--runtime-dir").arg(directory);
        let out = String::from_utf8(command.output().unwrap().stdout).unwrap();
        if out.contains(word) == is_wanted {
            return out;
        }
        assert!(Instant::now() < deadline, "{arguments:?}: {out}");
    }
}

#[test]
fn a_second_vmm_at_a_socket_is_shown_until_it_leaves() {
    let directory = tempfile::tempdir().unwrap();
    let (directory, notify) = (directory.path(), directory.path().join("notify"));
    let mut daemon = Daemon::start(directory, &notify);
    daemon.wait_until_ready();
    let connect = || UnixStream::connect(directory.join("web.vhost")).unwrap();
    let _first = connect();
    answer(directory, &["vm", "ls"], "attached", true);
    let second = connect();
    let word = "another VMM waits at its socket until this one leaves";
    answer(directory, &["vm", "ls"], word, true);
    let found = answer(directory, &["check"], word, true);
    assert!(found.contains("remedy: end one of the two VMMs"), "{found}");
    drop(second);
    answer(directory, &["vm", "ls"], word, false);
}

#[test]
fn a_vmm_at_the_control_socket_is_told_of() {
    let directory = tempfile::tempdir().unwrap();
    let (directory, notify) = (directory.path(), directory.path().join("notify"));
    let mut daemon = Daemon::start(directory, &notify);
    daemon.wait_until_ready();
    let mut vmm = UnixStream::connect(directory.join("control.sock")).unwrap();
    // GET_FEATURES of vhost-user, with which QEMU begins.
    vmm.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
        .unwrap();
    let mut answer = Vec::new();
    vmm.read_to_end(&mut answer).unwrap();
    daemon.signal(Signal::TERM);
    let (_, log) = daemon.wait();
    let said = "what has connected to the control socket speaks no HTTP, as a VMM's device does";
    assert!(log.contains(said), "{log}");
}

/// Where all users may make `web.sock_80`, all may answer the guest's calls.
#[test]
fn a_runtime_directory_that_every_user_may_write_is_told_of() {
    let directory = tempfile::tempdir().unwrap();
    let (directory, notify) = (directory.path(), directory.path().join("notify"));
    let allow = |mode| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(directory, mode).unwrap();
    };
    let found = format!("every user may write {}", directory.display());
    for (mode, is_found) in [(0o1777, true), (0o770, false)] {
        allow(mode);
        let mut daemon = Daemon::start(directory, &notify);
        daemon.wait_until_ready();
        let check = answer(directory, &["check"], &found, is_found);
        let remedy = format!("remedy: `chmod o-w {}`", directory.display());
        assert_eq!(check.contains(&remedy), is_found, "{check}");
        daemon.signal(Signal::TERM);
        let (_, log) = daemon.wait();
        assert_eq!(log.contains(&found), is_found, "{log}");
        // Before the next start, too.
        let check = answer(directory, &["check"], &found, is_found);
        assert_eq!(check.contains("ERROR   permissions"), is_found, "{check}");
    }
}

/// Calls that fail, one after another; each has to be answered.
fn call_in_vain(socket: &Path, times: usize) {
    for _ in 0..times {
        let mut call = UnixStream::connect(socket).unwrap();
        call.set_read_timeout(Some(PATIENCE)).unwrap();
        match call.read(&mut [0]) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("{}: {other:?}", socket.display()),
        }
    }
}

/// A circuit from a program of the host to the guest of a VMM that listens there: both of its ends.
fn circuit(host: &Path, vmm: &UnixListener) -> (BufReader<UnixStream>, UnixStream) {
    let mut program = UnixStream::connect(host).unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    program.write_all(b"CONNECT 80\n").unwrap();
    let (guest, _) = vmm.accept().unwrap();
    guest.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut guest = BufReader::new(guest);
    let mut line = String::new();
    guest.read_line(&mut line).unwrap();
    assert_eq!(line, "CONNECT 80\n");
    guest.get_mut().write_all(b"OK 1024\n").unwrap();
    let mut program = BufReader::new(program);
    line.clear();
    program.read_line(&mut line).unwrap();
    assert!(line.starts_with("OK "), "{line}");
    (program, guest.into_inner())
}

fn ping((program, guest): &mut (BufReader<UnixStream>, UnixStream)) {
    let mut heard = [0; 4];
    program.get_mut().write_all(b"ping").unwrap();
    guest.read_exact(&mut heard).unwrap();
    guest.write_all(&heard).unwrap();
    program.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"ping");
}

#[test]
fn a_log_that_is_not_read_stops_nothing_and_says_later_what_it_lacks() {
    const PORTS: usize = 20;
    const CALLS: usize = 90;
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path();
    let port = |number| format!("{number}-{}", "p".repeat(50));
    let mut text = format!(
        "[[vm]]\nname = \"fc\"\nhybrid = {:?}\nhost = {:?}\n[[vm]]\nname = \"web\"\n\
         [[service]]\nname = \"s\"\nport = 5000\nto = \"unix:{}\"\n\
         [[rule]]\nfrom = \"fc\"\nto = \"service:s\"\nport = \"*\"\naction = \"allow\"\n",
        run.join("fc.vmm"),
        run.join("fc.sock"),
        run.join("nothing").display(),
    );
    for number in 0..PORTS {
        let name = port(number);
        text += &format!(
            "[[publish]]\nname = {name:?}\nlisten = \"unix:{}\"\nto = \"web:80\"\n",
            run.join(number.to_string()).display()
        );
    }
    let file = run.join("c.toml");
    std::fs::write(&file, text).unwrap();
    let vmm = UnixListener::bind(run.join("fc.vmm")).unwrap();
    let mut daemon = Daemon::start_with(
        run,
        &run.join("no-notify"),
        &["--config", file.to_str().unwrap()],
    );
    let log = daemon.process.stderr.take().unwrap();
    rustix::pipe::fcntl_setpipe_size(&log, 4096).unwrap();
    daemon.wait_until_ready();
    let mut circuit = circuit(&run.join("fc.sock"), &vmm);
    ping(&mut circuit);

    // The worker writes these lines itself, more than the pipe has room for.
    call_in_vain(&run.join("fc.vmm_5000"), CALLS);
    ping(&mut circuit);
    for number in 0..PORTS {
        call_in_vain(&run.join(number.to_string()), CALLS);
    }
    ping(&mut circuit);
    answer(run, &["vm", "ls"], "fc", true);

    let mut log = BufReader::new(log);
    let (mut refused, mut left_out, mut line) = (0, 0, String::new());
    while left_out == 0 {
        line.clear();
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "{refused}");
        refused += usize::from(line.contains("refused a caller of a published port"));
        if line.contains("the log was not read in time") {
            let count = line.split("held_back=").nth(1).unwrap();
            left_out = count.split_whitespace().next().unwrap().parse().unwrap();
        }
    }
    assert!(refused < PORTS * CALLS, "{refused}");
    assert!(refused + left_out >= PORTS * CALLS, "{refused}, {left_out}");
    daemon.signal(Signal::TERM);
    let mut rest = String::new();
    log.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("ending"), "{rest}");
    assert_eq!(daemon.process.wait().unwrap().code(), Some(0));
}

/// The daemon's journal is shared: a caller gets no more lines there by the audit than by anything else.
#[test]
fn an_audit_without_a_file_takes_no_more_of_the_log_than_lines_do() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path();
    let text = format!(
        "[[vm]]\nname = \"fc\"\nhybrid = {:?}\n[[service]]\nname = \"s\"\nport = 5000\nto = \"unix:{}\"\n\
         [[rule]]\nfrom = \"fc\"\nto = \"service:s\"\nport = \"*\"\naction = \"allow\"\n",
        run.join("fc.vmm"),
        run.join("nothing").display(),
    );
    let file = run.join("c.toml");
    std::fs::write(&file, text).unwrap();
    let mut daemon = Daemon::start_with(
        run,
        &run.join("no-notify"),
        &["--config", file.to_str().unwrap()],
    );
    let mut log = daemon.process.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        log.read_to_string(&mut text).unwrap();
        text
    });
    daemon.wait_until_ready();
    let begun = Instant::now();
    let mut calls = 0;
    while calls < 400 || begun.elapsed() < Duration::from_secs(3) {
        call_in_vain(&run.join("fc.vmm_5000"), 20);
        calls += 20;
    }
    daemon.signal(Signal::TERM);
    let log = reader.join().unwrap();
    let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap();
    let (mut written, mut held_back) = (0, 0);
    for line in log.lines() {
        let Some(place) = line.find("{\"time\":") else {
            continue;
        };
        let record: serde_json::Value = serde_json::from_str(&line[place..]).unwrap();
        match record["held_back"]["failed"].as_u64() {
            Some(count) => held_back += usize::try_from(count).unwrap(),
            None => written += 1,
        }
    }
    assert!(written >= 100, "{written}");
    assert!(written <= 100 + seconds + 1, "{written} in {seconds} s");
    assert_eq!(written + held_back, calls);
}

/// As where programs that a container runs write their logs.
#[test]
fn an_audit_may_be_a_descriptor_of_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path();
    let link = run.join("audit.log");
    std::os::unix::fs::symlink("/dev/stdout", &link).unwrap();
    for audit in [Path::new("/dev/stdout"), Path::new("/dev/fd/1"), &link] {
        let file = run.join("c.toml");
        let vm = format!("[[vm]]\nname = \"fc\"\nhybrid = {:?}\n", run.join("fc"));
        let service = "[[service]]\nname = \"s\"\nport = 5000\nto = \"tcp:127.0.0.1:9\"\n";
        std::fs::write(&file, format!("audit = {audit:?}\n{vm}{service}")).unwrap();
        let arguments = ["--config", file.to_str().unwrap()];
        let mut daemon = Daemon::start_with(run, &run.join("no-notify"), &arguments);
        daemon.wait_until_ready();
        call_in_vain(&run.join("fc_5000"), 1);
        let mut line = String::new();
        daemon.out.read_line(&mut line).unwrap();
        let record: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(record["from"]["vm"], "fc");
    }
}

/// Nothing may wait for its reader at the end, either.
#[test]
fn a_daemon_whose_log_is_not_read_ends_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path();
    let file = run.join("c.toml");
    let text = format!(
        "[[vm]]\nname = \"web\"\n[[publish]]\nname = \"www\"\nlisten = \"unix:{}\"\nto = \"web:80\"\n",
        run.join("www").display()
    );
    std::fs::write(&file, text).unwrap();
    let mut daemon = Daemon::start_with(
        run,
        &run.join("no-notify"),
        &["--config", file.to_str().unwrap()],
    );
    let log = daemon.process.stderr.take().unwrap();
    rustix::pipe::fcntl_setpipe_size(&log, 4096).unwrap();
    daemon.wait_until_ready();
    call_in_vain(&run.join("www"), 90);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.process.wait().unwrap().code(), Some(0));
    drop(log);
}
