//! Clients that break the rules, and the agent's limits.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use agent::callers::Callers;
use agent::session::{Options, serve, serve_caller};
use agent::stop::Stop;
use common::{Agent, Client, command, is_running, listen_argument, shell, wait_until, words};
use wire::agent::job::Ask;
use wire::agent::{
    CALLERS_KNOWN, CALLERS_PROVE, ErrorKind, ExitStatus, Frame, Hello, OPERATION_CHANNEL, Stream,
};

/// A greeting that is not one gets an error that says so, and the connection closes.
#[test]
fn a_wrong_beginning_is_refused() {
    let agent = Agent::start();
    let garbage: &[&[u8]] = &[
        b"GET / HTTP/1.1\r\n\r\n",
        &[0xff; 100],
        &Frame::Signal(1).to_bytes(OPERATION_CHANNEL).unwrap(),
        &Frame::Hello(Hello::new("wrong channel"))
            .to_bytes(OPERATION_CHANNEL)
            .unwrap(),
    ];
    for bytes in garbage {
        let mut client = agent.connect();
        client.stream.write_all(bytes).unwrap();
        client.expect_hello();
        assert_eq!(client.expect_error().kind, ErrorKind::Protocol);
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        client.expect_end();
    }
    let mut client = agent.connect();
    client.greet();
    client.send(&Frame::Hello(Hello::new("again")));
    assert_eq!(client.expect_error().kind, ErrorKind::Protocol);
}

#[test]
fn a_version_that_is_not_spoken_is_refused() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.send(&Frame::Hello(Hello {
        protocol_min: 2,
        protocol_max: 9,
        ..Hello::new("future 9")
    }));
    client.expect_hello();
    let error = client.expect_error();
    assert_eq!(error.kind, ErrorKind::Version);
    assert!(
        error.message.contains("future 9 supports 2 to 9"),
        "{}",
        error.message
    );
}

#[test]
fn frames_that_make_no_sense_end_the_command() {
    let agent = Agent::start();
    let frames = [
        Frame::Data {
            stream: Stream::Stdout,
            bytes: b"x",
        },
        Frame::EndOfStream(Stream::Stderr),
        Frame::StreamClosed(Stream::Stdin),
        Frame::Credit {
            stream: Stream::Stdin,
            bytes: 1,
        },
        Frame::Credit {
            stream: Stream::Stdout,
            bytes: u32::MAX,
        },
        Frame::Started { pid: 1 },
        Frame::Exit(ExitStatus::Code(0)),
        Frame::ExecStart(words(&["true"])),
    ];
    for frame in frames {
        let mut client = agent.request(words(&["sleep", "1000"]));
        let pid = client.expect_started();
        client.send(&frame);
        assert_eq!(client.expect_error().kind, ErrorKind::Protocol, "{frame:?}");
        drop(client);
        wait_until("the command is ended", || !is_running(pid));
    }
    let mut client = agent.request(words(&["sleep", "1000"]));
    let pid = client.expect_started();
    client.send(&Frame::EndOfStream(Stream::Stdin));
    client.input(b"after the end");
    assert_eq!(client.expect_error().kind, ErrorKind::Protocol);
    wait_until("the command is ended", || !is_running(pid));
}

#[test]
fn a_client_that_says_nothing_is_not_waited_for() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let options = Options {
        handshake_timeout: Duration::from_millis(50),
        ..Options::new()
    };
    let mut client = Client::new(ours);
    client.send(&Frame::Hello(Hello::new("silent")));
    let stopped = serve(&theirs.into(), &options).unwrap_err();
    assert!(
        matches!(&stopped, Stop::HostGone(error) if error.kind() == std::io::ErrorKind::TimedOut),
        "{stopped}"
    );
}

#[test]
fn one_operation_too_many_is_told_so() {
    let agent = Agent::start();
    let mut clients: Vec<Client> = (0..agent::session::MAX_OPERATIONS)
        .map(|_| {
            let mut client = agent.request(words(&["cat"]));
            client.expect_started();
            client
        })
        .collect();
    let mut refused = agent.connect();
    refused.expect_hello();
    assert_eq!(refused.expect_error().kind, ErrorKind::Busy);
    refused.expect_end();
    // All of them are alive, and a place comes back when one ends.
    for client in &mut clients {
        client.send(&Frame::EndOfStream(Stream::Stdin));
        assert_eq!(client.expect_exit(), ExitStatus::Code(0));
    }
    clients.clear();
    wait_until("a place is free", || {
        let mut client = agent.connect();
        client.expect_hello();
        client
            .stream
            .write_all(&Frame::Hello(Hello::new("test")).to_bytes(0).unwrap())
            .is_ok()
            && client
                .stream
                .write_all(&Frame::ExecStart(words(&["true"])).to_bytes(1).unwrap())
                .is_ok()
            && matches!(client.next(), Some(Frame::Started { .. }))
    });
}

/// 64 operations, of which a quarter is kept for commands, shutdown and freeze: docs/agent.md.
#[test]
fn what_users_can_hold_up_leaves_places_for_commands() {
    let agent = Agent::start();
    let ask = |ask: Ask| {
        let mut client = agent.connect();
        client.greet();
        client.send(&Frame::Ask(ask));
        client
    };
    let stats = || {
        ask(Ask::Stats {
            interval_ms: 3_600_000,
            count: 0,
        })
    };
    let is_served = |client: &mut Client| match client.next() {
        Some(Frame::Answer(_)) => true,
        Some(Frame::Error(report)) => {
            assert_eq!(report.kind, ErrorKind::Busy);
            assert!(report.message.starts_with("48 operations"), "{report:?}");
            false
        }
        other => panic!("expected an answer, not {other:?}"),
    };
    // Its places are free when its connection has ended.
    let end = |mut client: Client| {
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        client.expect_end();
    };
    let served = || {
        let mut client = stats();
        assert!(is_served(&mut client));
        client
    };
    let mut clients: Vec<Client> = (0..48).map(|_| served()).collect();
    for refused in [
        Ask::Stats {
            interval_ms: 100,
            count: 1,
        },
        Ask::Time { step_ns: None },
        Ask::ClipboardGet,
        Ask::Lock,
    ] {
        let mut client = ask(refused);
        assert!(!is_served(&mut client));
        end(client);
    }
    end(clients.swap_remove(7));
    clients.push(served());
    let commands: Vec<Client> = (0..15)
        .map(|_| {
            let mut client = agent.request(words(&["cat"]));
            client.expect_started();
            client
        })
        .collect();
    // Nothing is frozen.
    let mut thaw = ask(Ask::Thaw);
    assert_ne!(thaw.expect_error().kind, ErrorKind::Busy);
    let mut refused = agent.connect();
    refused.expect_hello();
    assert!(refused.expect_error().message.starts_with("64 operations"));
    drop(commands);
}

#[test]
fn nothing_is_left_behind() {
    let agent = Agent::start();
    let count = |what: &str| {
        std::fs::read_dir(format!("/proc/{}/{what}", agent.pid()))
            .unwrap()
            .count()
    };
    assert_eq!(
        agent.exec(words(&["true"])).expect_exit(),
        ExitStatus::Code(0)
    );
    let operations = || {
        std::fs::read_dir(format!("/proc/{}/task", agent.pid()))
            .unwrap()
            .filter(|task| {
                // A thread that has ended meanwhile has no name any more.
                let name = std::fs::read_to_string(task.as_ref().unwrap().path().join("comm"));
                name.is_ok_and(|name| name.trim() == "operation")
            })
            .count()
    };
    wait_until("the first operation ends", || operations() == 0);
    let descriptors = count("fd");
    for round in 0..1000_u32 {
        let code = round % 251;
        // One in four leaves in the middle.
        if round % 4 == 3 {
            agent.request(words(&["sleep", "1000"])).expect_started();
            continue;
        }
        assert_eq!(
            agent.exec(shell(&format!("exit {code}"))).expect_exit(),
            ExitStatus::Code(code as u8)
        );
        if round % 4 == 2 {
            wait_until("places are free", || operations() < 30);
        }
    }
    wait_until("all operations end", || operations() == 0);
    assert_eq!(count("fd"), descriptors);
    // No process waits to be asked how it ended.
    let children =
        std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", agent.pid())).unwrap();
    assert_eq!(children, "");
}

#[test]
fn the_socket_is_private_and_taken_over_only_from_the_dead() {
    let agent = Agent::start();
    let mode = std::fs::metadata(agent.socket())
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = command()
        .arg(listen_argument(&agent.directory))
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("cannot listen on"));
    assert_eq!(
        agent.exec(words(&["true"])).expect_exit(),
        ExitStatus::Code(0)
    );

    let directory = tempfile::tempdir().unwrap();
    drop(UnixListener::bind(directory.path().join("agent.sock")).unwrap());
    let mut third = command()
        .arg(listen_argument(&directory))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the stale socket is replaced", || {
        UnixStream::connect(directory.path().join("agent.sock")).is_ok()
    });
    third.kill().unwrap();
    third.wait().unwrap();
}

#[test]
fn wrong_words_are_usage_errors() {
    for arguments in [
        &["--nonsense"][..],
        &["--listen"],
        &["--listen", "tcp:1"],
        &["--listen", "unix:"],
        &["--version", "x"],
    ] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_ringdown-agent"))
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("--help"));
    }
}

#[test]
fn readiness_lasts_as_long_as_the_connection() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut host = Client::new(ours);
    let uplink = std::thread::spawn(move || {
        agent::uplink::announce(&theirs.into(), &Options::new(), &Callers::over_vsock())
    });
    assert_eq!(host.expect_hello().boot_id, agent::guest::hello().boot_id);
    host.send(&Frame::Hello(Hello::new("ringdown test")));
    // The agent holds the connection and says nothing more until the host closes it.
    host.stream.shutdown(std::net::Shutdown::Write).unwrap();
    host.expect_end();
    let ended = uplink.join().unwrap().unwrap();
    assert_eq!(ended.kind(), std::io::ErrorKind::UnexpectedEof);

    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut host = Client::new(ours);
    host.send(&Frame::Hello(Hello {
        protocol_min: 9,
        protocol_max: 9,
        ..Hello::new("future")
    }));
    let error = agent::uplink::announce(&theirs.into(), &Options::new(), &Callers::over_vsock())
        .unwrap_err();
    assert!(
        error.to_string().contains("another protocol version"),
        "{error}"
    );
}

/// A caller on a line, served in this process.
fn call(callers: &Arc<Callers>) -> Client {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let callers = Arc::clone(callers);
    std::thread::spawn(move || {
        let options = Options {
            handshake_timeout: Duration::from_millis(200),
            ..Options::new()
        };
        serve_caller(&theirs.into(), &options, &callers)
    });
    Client::new(ours)
}

/// The agent's own call over such a line, answered with these capabilities. It stands for as long as the client lives.
fn answered(callers: &Arc<Callers>, capabilities: &[&str]) -> Client {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut host = Client::new(ours);
    let callers = Arc::clone(callers);
    std::thread::spawn(move || {
        let options = Options::new();
        agent::uplink::announce(&theirs.into(), &options, &callers)
    });
    host.answer_as_host(capabilities);
    host
}

#[test]
fn nobody_is_served_before_the_host_has_answered() {
    for callers in [Callers::over_vsock(), Callers::over_serial()] {
        let mut caller = call(&Arc::new(callers));
        let report = caller.expect_refusal();
        assert_eq!(report.kind, ErrorKind::Unavailable);
        assert!(report.message.contains("cannot check who calls"));
    }
    call(&Arc::new(Callers::at_unix_socket())).greet();
}

#[test]
fn over_vsock_the_host_says_whether_callers_prove_themselves() {
    let callers = Arc::new(Callers::over_vsock());
    let host = answered(&callers, &[CALLERS_KNOWN]);
    call(&callers).greet();
    host.stream.shutdown(std::net::Shutdown::Both).unwrap();

    // A VMM with a vsock device of its own shows all as the host.
    let callers = Arc::new(Callers::over_vsock());
    let mut host = answered(&callers, &[CALLERS_PROVE]);
    let secret = host.expect_secret();
    let mut caller = call(&callers);
    caller.send(&Frame::Hello(Hello::new("test")));
    assert_eq!(caller.expect_refusal().kind, ErrorKind::Forbidden);
    let mut caller = call(&callers);
    caller.send(&Frame::Secret(secret));
    caller.greet();

    // A host of before says nothing about it.
    let callers = Arc::new(Callers::over_vsock());
    let _host = answered(&callers, &[]);
    assert_eq!(call(&callers).expect_refusal().kind, ErrorKind::Unavailable);
}
