//! The `ringdown` program as a person or a script meets it: words in, exit code and messages out. Where a daemon is
//! needed, one runs in this process with a fake worker behind it.

// Helpers of tests may fail as tests do; clippy's setting for tests does not reach them in a test of its own.
#![allow(clippy::unwrap_used)]

mod program;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use fake_daemon::FakeDaemon;
use program::{assert_refused, finish, ringdown, run, run_with};
use wire::agent::PORT;

#[test]
fn the_tree_of_commands_is_sound() {
    cli::command().debug_assert();
    let help = run(&["--help"]);
    assert_eq!(help.code, Some(0));
    for word in ["serve", "vm", "args", "exec", "reload", "policy", "audit"] {
        assert!(help.out.contains(word), "{}", help.out);
    }
    // What belongs to every command comes behind what belongs to this one.
    let exec = run(&["exec", "--help"]).out;
    let at = |option: &str| exec.find(option).unwrap_or_else(|| panic!("{exec}"));
    assert!(at("--runtime-dir") > at("--wait"), "{exec}");
    assert!(at("--runtime-dir") > at("--env"), "{exec}");
    assert_eq!(
        run(&["--version"]).out,
        concat!("ringdown ", env!("CARGO_PKG_VERSION"), "\n")
    );
}

#[test]
fn wrong_words_end_with_2_and_the_remedy() {
    let long = format!("name=web,host=/{}", "p".repeat(107));
    let table: &[(&[&str], &str)] = &[
        (&[], "Usage: ringdown"),
        (&["fly"], "unrecognized subcommand 'fly'"),
        (
            &["serve", "--vm", "name=web,cid=0"],
            "CID 0 cannot be given to a guest (it means the hypervisor): use a number from 3",
        ),
        (&["serve", "--vm", "name=web,cid=1"], "it means loopback"),
        (&["serve", "--vm", "name=web,cid=2"], "it means the host"),
        (
            &["serve", "--vm", "name=web,cid=4294967295"],
            "it means any",
        ),
        (
            &["serve", "--vm", "name=web,cid=3", "--vm", "name=db,cid=3"],
            "CID 3 belongs to VM \"web\" already",
        ),
        (
            &["serve", "--vm", "name=web", "--vm", "name=web"],
            "there is a VM named \"web\" already",
        ),
        (
            &["serve", "--vm", "name=We"],
            "\"We\" cannot be the name of a VM",
        ),
        (
            &["serve", "--vm", &long],
            "has 108 bytes, and a socket's path may have 107",
        ),
        (
            &["serve", "--vm", "name=web,hots=/x"],
            "unknown key \"hots\": did you mean \"host\"? the keys",
        ),
        (
            &["serve", "--allow", "from=web,to=db"],
            "this rule has no \"port\"",
        ),
        (
            &["serve", "--log", "web=loud"],
            "\"web=loud\" is not a log filter",
        ),
        (&["vm", "add", "We"], "cannot be the name of a VM"),
        (&["vm", "add", "web", "--cid", "2"], "it means the host"),
        (
            &["vm", "add", "web", "--cid", "two"],
            "CID \"two\" cannot be given",
        ),
        (&["vm", "add", "web", "--host", ""], "a value is required"),
        (
            &["vm", "add", "web", "--limit", "circuit=3"],
            "unknown key \"circuit\": did you mean \"circuits\"?",
        ),
        (
            &["vm", "add", "web", "--limit", "circuits"],
            "write it like --limit circuits=1000",
        ),
        (
            &["vm", "add", "web", "--limit", "circuits=-1"],
            "circuits cannot be \"-1\": use a whole number from 0 to 1000000",
        ),
        (
            &[
                "vm",
                "add",
                "web",
                "--limit",
                "circuits=1",
                "--limit",
                "circuits=2",
            ],
            "the key \"circuits\" is given twice",
        ),
        (
            &["serve", "--vm", "name=web,limits.circuits=x"],
            "circuits cannot be \"x\"",
        ),
        (&["vm", "rm", "We"], "cannot be the name of a VM"),
        (
            &["vm", "rm", "Red/web"],
            "\"Red\" cannot be the name of a domain",
        ),
        (
            &["vm", "add", "host"],
            "\"host\" cannot be the name of a VM: it has a meaning of its own",
        ),
        (
            &["vm", "add", "red/web", "--domain", "blue"],
            "\"red/web\" is of another domain than \"blue\": leave --domain out",
        ),
        (&["policy", "test", "web", "db", "x"], "\"x\" is not a port"),
        (&["args", "web"], "--vmm"),
        (
            &["args", "web", "--vmm", "xen"],
            "[possible values: qemu, libvirt, cloud-hypervisor, firecracker, alioth]",
        ),
        (
            &["args", "web", "--vmm", "qemu", "--memory", "lots"],
            "such as 256M",
        ),
        (
            &["cp", "a", "b"],
            "no path names a VM: write one of them as NAME:PATH",
        ),
        (&["cp", "-", "b"], "no path names a VM"),
        (
            &["cp", "web:a", "b", "."],
            "some of the sources are in a guest and others are not",
        ),
        (&["exec", "web"], "<COMMAND>..."),
        (
            &["exec", "We", "--", "true"],
            "starting with a letter or a digit (did you mean \"we\"?)",
        ),
        (
            &["exec", "web", "--wait", "3601", "--", "true"],
            "expected 0 to 1h: a number of seconds",
        ),
        (
            &["exec", "web", "--env", "A", "--", "true"],
            "--env A: expected NAME=VALUE",
        ),
    ];
    for (arguments, message) in table {
        let outcome = run(arguments);
        assert_refused(&outcome, 2, message);
    }
}

#[test]
fn a_file_is_refused_with_line_and_column() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ringdown.toml");
    std::fs::write(&path, "[[vm]]\nname = \"web\"\nvhost-usr = \"/x\"\n").unwrap();
    let outcome = run(&["serve", "--config", path.to_str().unwrap()]);
    assert_refused(
        &outcome,
        2,
        "ringdown.toml: line 3, column 1: unknown key \"vhost-usr\": did you mean \"vhost-user\"? the keys",
    );
    let outcome = run(&["serve", "--config", "/nonexistent/ringdown.toml"]);
    assert_refused(
        &outcome,
        1,
        "cannot read the configuration file /nonexistent/ringdown.toml: No such file",
    );
}

#[test]
fn a_directory_that_cannot_be_used_ends_with_1_and_the_remedy() {
    let outcome = run(&["serve", "--runtime-dir", "/nonexistent/ringdown"]);
    assert_refused(
        &outcome,
        1,
        "the directory /nonexistent does not exist: create it with `mkdir -p /nonexistent`",
    );

    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    let mut command = ringdown(&["serve", "--runtime-dir"]);
    let copy;
    if rustix::process::geteuid().is_root() {
        // Permissions do not bind root: the program runs as `nobody`, from a place where it may run.
        copy = tempfile::tempdir().unwrap();
        std::fs::set_permissions(copy.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = copy.path().join("ringdown");
        std::fs::copy(env!("CARGO_BIN_EXE_ringdown"), &program).unwrap();
        command = Command::new(program);
        command
            .args(["serve", "--runtime-dir"])
            .uid(65534)
            .gid(65534);
    }
    command.arg(directory.path());
    let outcome = finish(command);
    assert_refused(&outcome, 1, "has no permission to create sockets in");
    assert!(
        outcome
            .err
            .contains("name a directory of its own with --runtime-dir"),
        "{}",
        outcome.err
    );
}

#[test]
fn a_daemon_that_is_not_there_ends_with_1_and_how_to_start_it() {
    let directory = tempfile::tempdir().unwrap();
    let commands: [&[&str]; 6] = [
        &["vm", "ls"],
        &["vm", "add", "web"],
        &["vm", "rm", "web"],
        &["args", "web", "--vmm", "qemu"],
        &["upgrade", "--check"],
        &["upgrade"],
    ];
    let expected = |directory: &Path| {
        format!(
            "no daemon serves {0}: start it with `ringdown serve --runtime-dir {0}`",
            directory.display()
        )
    };
    for place in [directory.path(), &directory.path().join("none")] {
        for arguments in commands {
            assert_refused(&run_with(place, arguments), 1, &expected(place));
        }
    }
    let expected = expected(directory.path());
    drop(UnixListener::bind(directory.path().join("control.sock")).unwrap());
    // One that has died may have had a keeper.
    let expected = format!("{expected} and the options that it had, such as --keeper");
    assert_refused(&run_with(directory.path(), &["vm", "ls"]), 1, &expected);
}

#[test]
fn a_daemon_that_goes_away_with_the_question_is_said_to_have_hung_up() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("control.sock")).unwrap();
    let daemon = std::thread::spawn(move || {
        // With the question unread its end is a reset, else it is a plain end.
        drop(listener.accept().unwrap());
        let (mut connection, _) = listener.accept().unwrap();
        let mut question = [0; 4096];
        assert!(connection.read(&mut question).unwrap() > 0);
    });
    for _ in 0..2 {
        let outcome = run_with(directory.path(), &["vm", "ls"]);
        assert_refused(&outcome, 1, "hung up without an answer");
    }
    daemon.join().unwrap();
}

#[test]
fn the_runtime_directory_comes_from_the_environment_too() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let parent = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(daemon.runtime_dir(), parent.path().join("ringdown")).unwrap();
    let mut by_name = ringdown(&["vm", "ls"]);
    by_name
        .env("RINGDOWN_RUNTIME_DIR", daemon.runtime_dir())
        .env("XDG_RUNTIME_DIR", "/nonexistent");
    assert_eq!(finish(by_name).code, Some(0));
    let mut by_xdg = ringdown(&["vm", "ls"]);
    by_xdg
        .env("RINGDOWN_RUNTIME_DIR", "")
        .env("XDG_RUNTIME_DIR", parent.path());
    assert_eq!(finish(by_xdg).code, Some(0));
}

#[test]
fn a_second_daemon_ends_with_1_and_names_the_first() {
    let daemon = FakeDaemon::start(&[], &[]);
    let outcome = run_with(daemon.runtime_dir(), &["serve"]);
    let expected = format!(
        "another ringdown daemon (process {}) serves",
        std::process::id()
    );
    assert_refused(&outcome, 1, &expected);
    assert_eq!(run_with(daemon.runtime_dir(), &["vm", "ls"]).code, Some(0));
}

#[test]
fn what_answers_but_is_no_daemon_ends_with_1() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("control.sock")).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            // Read first: an answer before the question would be another failure.
            let mut request = [0; 1024];
            assert_ne!(stream.read(&mut request).unwrap(), 0);
            stream.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        });
        assert_refused(
            &run_with(directory.path(), &["vm", "ls"]),
            1,
            "did not answer as expected",
        );
    });
}

#[test]
fn a_reader_that_has_left_is_no_panic() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let mut command = ringdown(&["vm", "ls", "--runtime-dir"]);
    command.arg(daemon.runtime_dir()).stdout(Stdio::from(
        std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap(),
    ));
    assert_refused(&finish(command), 1, "cannot write to standard output");
}

#[test]
fn a_reader_that_has_had_enough_ends_the_command_without_a_word() {
    let daemon = FakeDaemon::start(&["name=web", "name=db"], &[]);
    for words in [
        &["vm", "ls"][..],
        &["vm", "ls", "--json"],
        &["ls", "--json"],
        &["args", "web", "--vmm", "qemu"],
        &["metrics"],
        &["check"],
        &["why", "web", "db", "1"],
        &["policy", "test", "host", "web", "80"],
        &["completions", "bash"],
    ] {
        // As a pipe whose reader has left.
        let (reader, writer) = UnixStream::pair().unwrap();
        drop(reader);
        let mut command = ringdown(words);
        if words != ["completions", "bash"] {
            command.arg("--runtime-dir").arg(daemon.runtime_dir());
        }
        command
            .stdout(Stdio::from(OwnedFd::from(writer)))
            .stderr(Stdio::piped());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*said), (Some(141), ""), "{words:?}");
    }
}

#[test]
fn exec_says_how_far_the_vm_has_come() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let exec = |name| {
        let mut command = ringdown(&["exec", name, "--wait", "0", "--runtime-dir"]);
        command.arg(daemon.runtime_dir()).args(["--", "true"]);
        finish(command)
    };
    assert_refused(&exec("nobody"), 1, "there is no VM named \"nobody\"");
    assert_refused(
        &exec("web"),
        1,
        "VM \"web\" is not ready: no VMM is attached",
    );
    let mut command = ringdown(&["exec", "web", "--wait", "3", "--runtime-dir"]);
    command.arg(daemon.runtime_dir()).args(["--", "true"]);
    let waited = finish(command);
    for words in [
        "waiting up to 1 s more for VM \"web\": no VMM is attached to its socket (start one with what `ringdown args web --vmm qemu` prints; one that was cut off, as by a restart of a daemon without a keeper, has to be started anew)\n",
        "VM \"web\" did not become ready within 3 s: ",
        "(what to do: `ringdown check`)\n",
    ] {
        assert_refused(&waited, 1, words);
    }
    // Mistakes of this host do not wait for the guest.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ports = format!("{}:80", taken.local_addr().unwrap().port());
    for (arguments, words) in [
        (["cp", "/nofile", "web:"], "cannot read /nofile"),
        (["forward", "web", &ports], "cannot listen at"),
        (
            ["top", "--once", "--vm=wbe"],
            "there is no VM named \"wbe\"",
        ),
        (["events", "--vm", "wbe"], "there is no VM named \"wbe\""),
        (["vm", "del", "wbe"], "there is no VM named \"wbe\""),
    ] {
        let mut command = ringdown(&arguments);
        command.arg("--runtime-dir").arg(daemon.runtime_dir());
        assert_refused(&finish(command), 1, words);
    }
    daemon.worker().set_state("web", true, false);
    assert_refused(
        &exec("web"),
        1,
        "a VMM is attached, but nothing in its guest answers yet",
    );
    daemon.worker().set_state("web", true, true);
    assert_refused(
        &exec("web"),
        1,
        "the guest's kernel runs, but its ringdown-agent has not called: it may still be starting",
    );
}

#[test]
fn exec_waits_for_the_agent_and_ends_with_the_commands_code() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let listener = daemon.worker().host_listener("web");
    std::thread::spawn(move || serve_guest(&listener));
    let mut command = ringdown(&[
        "exec",
        "web",
        "--wait",
        "20",
        "--env",
        "WORD=a b",
        "--cwd",
        "/",
        "--runtime-dir",
    ]);
    command.arg(daemon.runtime_dir());
    command.args([
        "--",
        "sh",
        "-c",
        "cat; printf \"$WORD $PWD\"; echo err >&2; exit 7",
    ]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"in ").unwrap();
    // The agent comes after the client has been started, which waits for it or finds it there.
    let guest = daemon.worker().call_agent_port("web", 1007);
    std::thread::spawn(move || {
        let callers = agent::callers::Callers::over_vsock();
        let options = agent::session::Options::new();
        agent::uplink::announce(&guest.into(), &options, &callers)
    });
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "in a b /");
    // On a busy machine it says before that it waits.
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.ends_with("err\n"), "{errors}");
    assert_eq!(output.status.code(), Some(7));
}

/// The worker's part of the host socket and the agent's part of the guest, for one connection.
fn serve_guest(listener: &UnixListener) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut line = vec![0; format!("CONNECT {PORT}\n").len()];
    stream.read_exact(&mut line).unwrap();
    assert_eq!(line, format!("CONNECT {PORT}\n").as_bytes());
    stream.write_all(b"OK 1073741824\n").unwrap();
    let _ = agent::session::serve(&stream.into(), &agent::session::Options::new());
}

#[test]
fn check_tells_why_a_vmm_was_cut_off() {
    let daemon = FakeDaemon::start(&["name=web", "name=db", "name=late"], &[]);
    let directory = daemon.runtime_dir();
    let found = |vm: &str| {
        let json = run_with(directory, &["check", "--json"]).out;
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let findings = json["findings"].as_array().unwrap();
        let begin = format!("{vm}: ");
        let is_about = |finding: &serde_json::Value| {
            let found = finding["found"].as_str().unwrap();
            found.starts_with(&begin).then(|| finding.clone())
        };
        findings.iter().find_map(is_about).unwrap()
    };
    let fault = "the VMM shares no memory: give its memory backend share=on";
    daemon.worker().set_fault("web", fault);
    // Of a VMM that has left it is history.
    for (attached, state, severity) in [
        (false, "no VMM is attached", "warning"),
        (true, "a VMM is attached", "error"),
    ] {
        daemon.worker().set_state("web", attached, false);
        let finding = found("web");
        assert_eq!(finding["severity"], severity, "{finding}");
        let text = finding["found"].as_str().unwrap();
        assert!(text.contains(state) && text.contains(fault), "{text}");
        let remedy = finding["remedy"].as_str().unwrap();
        assert!(
            remedy.contains("`ringdown args web --vmm qemu`"),
            "{remedy}"
        );
    }
    assert_eq!(run_with(directory, &["check"]).code, Some(1));
    let list = run_with(directory, &["vm", "ls", "--json"]).out;
    assert!(
        list.contains(&format!("\"last_fault\": \"{fault}")),
        "{list}"
    );
    let why = run_with(directory, &["why", "db", "web", "80"]);
    assert!(
        why.code == Some(3) && why.out.contains(fault),
        "{}",
        why.out
    );
    let why = run_with(directory, &["why", "host", "web", "80"]);
    let first = why.out.lines().next().unwrap();
    assert!(
        first.starts_with("allowed, but it would fail now: ") && first.contains(fault),
        "{first}"
    );
    assert_eq!((why.code, why.out.matches(fault).count()), (Some(4), 1));
    let table = run_with(directory, &["vm", "ls"]).out;
    assert!(table.contains(fault), "{table}");
    // What waits for its agent is notified, at first and in the end.
    let named = directory.display().to_string();
    let waited = run(&[
        "exec",
        "--runtime-dir",
        &named,
        "--wait",
        "3",
        "web",
        "--",
        "true",
    ]);
    assert_eq!(waited.err.matches(fault).count(), 2, "{}", waited.err);
    // It is sent again when something has changed, and the end comes as soon as nothing can change any more.
    let mut command = ringdown(&[
        "exec",
        "--wait",
        "5m",
        "--runtime-dir",
        &named,
        "late",
        "true",
    ]);
    let mut exec = program::Running(command.stderr(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(exec.0.stderr.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    let first = next();
    let begin = "waiting up to 298 s more for VM \"late\": no VMM is attached";
    assert!(first.starts_with(begin), "{first}");
    daemon.worker().set_state("late", true, false);
    let second = next();
    let words = "more for VM \"late\": a VMM is attached";
    assert!(second.contains(words), "{second}");
    daemon.worker().set_state("late", false, false);
    daemon.worker().set_fault("late", fault);
    let end = std::iter::repeat_with(next).find(|line| !line.starts_with("waiting"));
    let end = end.unwrap();
    let remedy = "start it with what `ringdown args late --vmm qemu` prints";
    assert!(end.contains(fault) && end.contains(remedy), "{end}");
    // Another that was never there.
    let waiting = found("db");
    assert_eq!(waiting["severity"], "warning", "{waiting}");
    let found = waiting["found"].as_str().unwrap();
    assert!(
        found.contains("restart of a daemon without a keeper"),
        "{found}"
    );
}
