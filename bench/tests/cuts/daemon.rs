//! The daemon itself ends in the middle: killed, or asked to.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use wire::agent::{Frame, OPERATION_CHANNEL, Stream};

use crate::scene::{Callee, Caller, Dialect, End, HALF, Scene, Seen};
use crate::support::PATIENCE;

/// Callers and callees one of which is a TCP peer: the source is the other.
fn to_tcp() -> Vec<(Caller, Callee, bool)> {
    let mut rows = Vec::new();
    for header in [false, true] {
        for caller in [Caller::Guest, Caller::Hybrid, Caller::Serial] {
            rows.push((caller, Callee::Tcp { header }, false));
        }
        for callee in [Callee::Guest, Callee::Hybrid, Callee::Serial] {
            rows.push((Caller::Published { tcp: true, header }, callee, true));
        }
        rows.push((Caller::Published { tcp: true, header }, Callee::Agent, true));
    }
    for dialect in [
        Dialect::Socks,
        Dialect::Connect,
        Dialect::Length,
        Dialect::Chunked,
    ] {
        rows.push((Caller::Guest, Callee::Egress(dialect), false));
    }
    rows
}

/// What the source says of it: an agent says it in a frame.
fn half(callee: Callee) -> Vec<u8> {
    let bytes = &[7; HALF];
    let data = Frame::Data {
        stream: Stream::Stdout,
        bytes,
    };
    match callee {
        Callee::Agent => data.to_bytes(OPERATION_CHANNEL).unwrap(),
        _ => bytes.to_vec(),
    }
}

fn check(end: impl FnOnce(&mut Scene)) {
    let mut scene = Scene::new();
    let mut receivers = Vec::new();
    let programs = [
        (Caller::Program, Callee::Guest, true),
        (Caller::Program, Callee::Serial, true),
        (Caller::Guest, Callee::Listener, false),
        (Caller::Guest, Callee::Unix, false),
    ];
    for (caller, callee, receiver_calls) in to_tcp().into_iter().chain(programs) {
        let (near, far) = scene.connect(caller, callee);
        let (mut source, mut receiver) = match receiver_calls {
            true => (far, near),
            false => (near, far),
        };
        scene.send(&mut source, &half(callee));
        scene.receive(&mut receiver, HALF);
        receivers.push((caller, callee, source, receiver));
    }
    end(&mut scene);
    for (caller, callee, _source, receiver) in receivers {
        let is_socket_that_cannot = matches!(callee, Callee::Listener | Callee::Unix);
        let expected = match receiver {
            End::Unix(_) if is_socket_that_cannot => Seen::End,
            _ => Seen::Reset,
        };
        let seen = scene.read_to_end(receiver);
        assert_eq!(seen, (0, expected), "{caller:?} to {callee:?}");
    }
}

#[test]
fn a_daemon_that_is_killed_shows_no_end() {
    check(|scene| scene.daemon.kill().unwrap());
}

#[test]
fn a_daemon_that_ends_shows_no_end() {
    check(|scene| assert!(scene.daemon.stop()));
}

/// A stream of the control API is in chunks, the last of which says that it is whole.
#[test]
fn a_stream_of_the_control_api_is_not_whole_when_its_daemon_is_killed() {
    let mut scene = Scene::new();
    let targets = ["/v1/events", "/v1/capture?vm=web"];
    let streams = targets.map(|target| {
        let mut stream = UnixStream::connect(scene.daemon.control_socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET {target} HTTP/1.1\r\nHost: ringdown\r\n\r\n").unwrap();
        // The head, and the first of what follows it.
        let mut said = Vec::new();
        while !String::from_utf8_lossy(&said).contains("\r\n\r\n") {
            let mut piece = [0; 4096];
            let len = stream.read(&mut piece).unwrap();
            assert!(len > 0, "{}", String::from_utf8_lossy(&said));
            said.extend(&piece[..len]);
        }
        (target, stream, said)
    });
    scene.daemon.kill().unwrap();
    for (target, mut stream, mut said) in streams {
        stream.read_to_end(&mut said).unwrap();
        let text = String::from_utf8_lossy(&said).to_lowercase();
        assert!(text.starts_with("http/1.1 200 "), "{target}: {text}");
        assert!(
            text.contains("transfer-encoding: chunked"),
            "{target}: {text}"
        );
        assert!(!said.ends_with(b"\r\n0\r\n\r\n"), "{target}");
    }
}
