//! What makes the daemon write, over and over: the log takes a part of it, and counts the rest.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use wire::vsock::SocketType;

use crate::guest::{Connection, Received, State, VirtualGuest, drive};
use crate::host;

use super::scene::{PATIENCE, Scene, assert_works};
use super::{Attack, nothing};

/// Where guests find a service that takes one connection.
const FULL_PORT: u32 = 9001;

/// Where they find egress.
const EGRESS_PORT: u32 = 9002;

/// How many connections of a VM egress takes.
const MAX_EGRESS: usize = 256;

/// What is written of what was held back.
const HELD_BACK: &str = "suppressed log lines of one kind";

pub(super) const ATTACKS: &[Attack] = &[
    nothing(
        "calls-of-a-full-service",
        "3,000 calls of a service that has as many connections as it may: the log has some of them and counts the rest",
        full_service,
    ),
    nothing(
        "calls-of-egress-beyond-its-limit",
        "3,000 calls of egress from a VM that has as many connections through it as it may: the same",
        full_egress,
    ),
    nothing(
        "egress-that-is-denied",
        "500 requests for a place that no rule allows: the audit has some of them and counts the rest",
        denied_egress,
    ),
    nothing(
        "hellos-that-are-none",
        "500 calls of the agent's port, from a privileged port, that say nonsense: the log has some of them and counts the rest",
        hellos,
    ),
    nothing(
        "programs-that-talk-nonsense",
        "500 programs each at the host socket, the socket for circuits and the control socket that send garbage, and 500 that call a port without a listener",
        nonsense,
    ),
    nothing(
        "captures-that-are-dropped",
        "500 captures that begin and are left at once: the log has some of them and counts the rest",
        captures,
    ),
];

/// What the attacks here call, as a configuration. The sockets of services are in this directory.
pub(super) fn services(directory: &Path) -> String {
    format!(
        "[[service]]\nname = \"full\"\nport = {FULL_PORT}\nto = \"unix:{}\"\nmax-connections = 1\n\n\
         [[service]]\nname = \"egress\"\nport = {EGRESS_PORT}\negress = true\n\n\
         [[rule]]\nfrom = \"*\"\nto = \"service:*\"\naction = \"allow\"\n",
        directory.join("full").display()
    )
}

/// The program behind the service that is full.
pub(super) fn serve(directory: &Path) -> std::io::Result<UnixListener> {
    UnixListener::bind(directory.join("full"))
}

/// Dials this port of the host so many times, some at a time, and waits for all answers. None is put through.
fn refused(guest: &mut VirtualGuest, port: u32, count: usize) {
    for _ in 0..count / 100 {
        let circuits: Vec<_> = (0..100)
            .map(|_| guest.dial(2, port, SocketType::Stream))
            .collect();
        wait_for_answers(guest, &circuits);
        let is_open = |circuit: &Connection| guest.state(*circuit) == State::Connected;
        assert!(!circuits.iter().any(is_open), "it takes no more");
    }
}

fn wait_for_answers(guest: &mut VirtualGuest, circuits: &[Connection]) {
    let answered = drive(&mut [guest], PATIENCE, |guests| {
        let waits = |circuit: &Connection| guests[0].state(*circuit) == State::Connecting;
        (!circuits.iter().any(waits)).then_some(())
    });
    answered.expect("each is answered");
}

fn full_service(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let first = guest.connect(2, FULL_PORT).expect("it takes one");
    refused(&mut guest, FULL_PORT, 3000);
    scene.assert_bounded("max_connections=1");
    scene.wait_for_log(HELD_BACK).expect("the rest is counted");
    guest.close(first);
    assert_works(&mut guest);
    scene.keep(guest);
}

fn full_egress(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let circuits: Vec<_> = (0..MAX_EGRESS)
        .map(|_| guest.dial(2, EGRESS_PORT, SocketType::Stream))
        .collect();
    wait_for_answers(&mut guest, &circuits);
    refused(&mut guest, EGRESS_PORT, 3000);
    scene.assert_bounded("max_connections=1024");
    scene.wait_for_log(HELD_BACK).expect("the rest is counted");
    assert_works(&mut guest);
    scene.keep(guest);
}

fn denied_egress(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    for _ in 0..500 {
        let circuit = guest.connect(2, EGRESS_PORT).expect("egress answers");
        let request = b"CONNECT 192.0.2.1:443 HTTP/1.1\r\nHost: 192.0.2.1:443\r\n\r\n";
        guest.send(circuit, request).expect("it is open");
        let (answer, _) = guest.receive_to_end(circuit);
        assert!(answer.starts_with(b"HTTP/1.1 403"), "{answer:?}");
        guest.close(circuit);
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn hellos(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    for port in 1..=500 {
        let circuit = guest.dial_from(port, 2, wire::agent::PORT, SocketType::Stream);
        wait_for_answers(&mut guest, &[circuit]);
        // It may be hung up on before the end.
        let _ = guest.send(circuit, &[0xff; 64]);
        let (_, ended) = guest.receive_to_end(circuit);
        assert_ne!(ended, Received::Nothing);
        guest.close(circuit);
    }
    scene.assert_bounded("sent no valid hello");
    scene.wait_for_log(HELD_BACK).expect("the rest is counted");
    assert_works(&mut guest);
    scene.keep(guest);
}

fn nonsense(scene: &mut Scene<'_>) {
    let host = scene.host_socket();
    let control = scene.daemon.control_socket();
    let circuits = control.with_file_name("circuit.sock");
    let requests: [(&Path, &[u8]); 4] = [
        (&host, b"\xff\xff\xff\xff\n"),
        (&host, b"CONNECT 4000\n"),
        (&circuits, b"CONNECT nobody\n"),
        (&control, b"\0\0\0\0\r\n\r\n"),
    ];
    for _ in 0..500 {
        for (path, request) in requests {
            let mut stream = UnixStream::connect(path).expect("it listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            // It may be refused before the last byte is sent.
            let _ = stream.write_all(request);
            let answer = host::read_line(&mut stream).expect("an answer");
            assert!(
                ["ERR", "HTTP/1.1 400"]
                    .iter()
                    .any(|start| answer.starts_with(start)),
                "{answer:?}"
            );
        }
    }
    let mut guest = scene.attach();
    assert_works(&mut guest);
    scene.keep(guest);
}

fn captures(scene: &mut Scene<'_>) {
    for _ in 0..500 {
        let path = scene.daemon.control_socket();
        let mut stream = UnixStream::connect(path).expect("it listens");
        let request = b"GET /v1/capture HTTP/1.1\r\nHost: x\r\n\r\n";
        stream.write_all(request).expect("it is open");
        let mut status = [0; 9];
        stream.read_exact(&mut status).expect("an answer");
        assert_eq!(&status, b"HTTP/1.1 ");
    }
    scene.assert_bounded("began a capture");
    let mut guest = scene.attach();
    assert_works(&mut guest);
    scene.keep(guest);
}
