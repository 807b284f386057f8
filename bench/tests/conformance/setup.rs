//! Circuits are set up in both directions, and refusals come at once and say why.

use std::io::{Read, Write};
use std::time::Duration;

use bench::guest::{ConnectError, State};
use bench::host;
use wire::vsock::SocketType;

use crate::support::{assert_no_violations, connect, daemon, guest, wait_for};

/// A refusal is an answer and no timeout: it must come well before Linux's two seconds are over.
const AT_ONCE: Duration = Duration::from_secs(1);

fn assert_refused(result: Result<bench::guest::Connection, ConnectError>) {
    match result {
        Err(ConnectError::Refused(after)) => assert!(after < AT_ONCE, "refused after {after:?}"),
        other => panic!("expected a refusal, found {other:?}"),
    }
}

#[test]
fn a_guest_reaches_a_program_of_the_host() {
    let daemon = daemon();
    let listener = host::listen(&daemon.listener_path("web", 80)).unwrap();
    let mut web = guest(&daemon, "web");
    let near = web.connect(2, 80).unwrap();
    let mut far = host::accept(&listener).unwrap();
    web.send(near, b"question").unwrap();
    let mut bytes = [0; 8];
    far.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"question");
    far.write_all(b"answer").unwrap();
    assert_eq!(web.receive(near, 6).unwrap(), b"answer");
    assert_no_violations(&[&web]);
}

#[test]
fn a_program_of_the_host_reaches_a_guest() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    web.listen(80);
    let path = daemon.host_socket("web");
    let program = std::thread::spawn(move || {
        let (mut stream, answer) = host::call(&path, 80).unwrap();
        stream.write_all(b"question").unwrap();
        let mut bytes = [0; 6];
        stream.read_exact(&mut bytes).unwrap();
        (answer, bytes)
    });
    let far = web.accept(80).unwrap();
    assert_eq!(web.receive(far, 8).unwrap(), b"question");
    web.send(far, b"answer").unwrap();
    wait_for("the program", &mut [&mut web], |_| program.is_finished());
    let (answer, bytes) = program.join().unwrap();
    let port = web.addresses(far).unwrap().2;
    assert_eq!(answer, format!("OK {port}"));
    assert_eq!(&bytes, b"answer");
    assert_no_violations(&[&web]);
}

#[test]
fn a_guest_reaches_another_guest_where_a_rule_allows_it() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    db.listen(5432);
    let (near, far) = connect(&mut web, &mut db, 5432);
    assert_eq!(db.addresses(far).map(|(_, cid, _)| cid), Some(3));
    web.send(near, b"select 1").unwrap();
    assert_eq!(db.receive(far, 8).unwrap(), b"select 1");
    db.send(far, b"1").unwrap();
    assert_eq!(web.receive(near, 1).unwrap(), b"1");
    assert_no_violations(&[&web, &db]);
}

#[test]
fn a_guest_is_refused_at_once() {
    let daemon = daemon();
    let _messages_only = {
        // A listener of the other socket type.
        let path = daemon.listener_path("web", 81);
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            None,
        )
        .unwrap();
        let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        rustix::net::listen(&socket, 8).unwrap();
        socket
    };
    let mut web = guest(&daemon, "web");
    let mut ci = guest(&daemon, "ci");
    assert_refused(web.connect(2, 9)); // No listener.
    assert_refused(web.connect(2, 81)); // The listener is for messages.
    assert_refused(web.connect(99, 80)); // There is no such VM.
    assert_refused(web.connect(4, 80)); // The VM is not running.
    assert_refused(web.connect(3, 80)); // It is itself.
    assert_refused(ci.connect(3, 80)); // No rule allows it.
    assert_refused(web.connect(0, 80)); // Not an address in use.
    assert_refused(web.connect(1, 80));
    assert_refused(web.connect(u32::MAX, 80));
    assert_no_violations(&[&web, &ci]);
    // All of it was counted, logged, and cost no circuit.
    for reason in [
        "no listener on the host",
        "another socket type",
        "no VM has this context identifier",
        "not running",
        "no rule allows it",
    ] {
        daemon.wait_for_log(reason, 1);
    }
}

#[test]
fn a_guest_that_refuses_is_passed_on_at_once() {
    let daemon = daemon();
    let (mut web, mut db) = (guest(&daemon, "web"), guest(&daemon, "db"));
    let near = web.dial(4, 9, SocketType::Stream);
    wait_for("the refusal", &mut [&mut web, &mut db], |guests| {
        guests[0].state(near) == State::Reset
    });
    let path = daemon.host_socket("db");
    let program = std::thread::spawn(move || host::call(&path, 9).map(|(_, answer)| answer));
    wait_for("the answer", &mut [&mut db], |_| program.is_finished());
    let answer = program.join().unwrap().unwrap();
    assert_eq!(
        answer,
        "ERR the guest refused: nothing listens on that port"
    );
    assert_no_violations(&[&web, &db]);
}

#[test]
fn a_program_that_calls_a_vm_which_does_not_run_is_told_so() {
    let daemon = daemon();
    let (_, answer) = host::call(&daemon.host_socket("db"), 80).unwrap();
    assert!(
        answer.starts_with("ERR the VM is not running"),
        "{answer:?}"
    );
}

#[test]
fn a_request_may_come_in_pieces_and_with_payload_behind_it() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    web.listen(80);
    for pieces in [
        vec!["CONNECT 80\nhello"],
        vec!["CONN", "ECT 8", "0", "\n", "hello"],
        vec!["CONNECT 80\r\nhel", "lo"],
    ] {
        let path = daemon.host_socket("web");
        let program = std::thread::spawn(move || {
            let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
            for piece in pieces {
                stream.write_all(piece.as_bytes()).unwrap();
            }
            host::read_line(&mut stream).unwrap();
            stream
        });
        let far = web.accept(80).unwrap();
        assert_eq!(web.receive(far, 5).unwrap(), b"hello");
        wait_for("the program", &mut [&mut web], |_| program.is_finished());
        drop(program.join().unwrap());
        web.close(far);
    }
    assert_no_violations(&[&web]);
}

#[test]
fn a_request_that_is_none_is_answered_with_what_was_expected() {
    let daemon = daemon();
    let _web = guest(&daemon, "web");
    for request in [
        "GET / HTTP/1.1\r\n",
        "CONNECT\n",
        "CONNECT x\n",
        "CONNECT 4294967295\n",
    ] {
        let mut stream =
            std::os::unix::net::UnixStream::connect(daemon.host_socket("web")).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let answer = host::read_line(&mut stream).unwrap();
        assert!(
            answer.starts_with("ERR expected"),
            "{request:?}: {answer:?}"
        );
        let mut rest = Vec::new();
        // It is closed behind the answer; since the request was not read, that may look like a reset.
        let _ = stream.read_to_end(&mut rest);
        assert_eq!(rest, b"");
    }
}
