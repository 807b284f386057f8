use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use super::*;

fn pair() -> (OwnedFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    (ours.into(), theirs)
}

fn join(caller: OwnedFd, socket: OwnedFd) -> Relay {
    Relay::new(
        HostSocket::new(caller, None, false),
        Connected::new(socket, None),
    )
}

fn joined() -> (Relay, UnixStream, UnixStream) {
    let ((near, caller), (far, callee)) = (pair(), pair());
    (join(near, far), caller, callee)
}

const ID: CircuitId = CircuitId {
    index: 0,
    generation: 0,
};

fn step(relay: &mut Relay, from: Side, room: &mut [u8]) -> Step {
    relay.step(ID, from, room, &mut Slow::default())
}

fn happened(relay: &mut Relay, side: Side, flags: EventFlags) {
    relay.happened(ID, side, flags, &mut Slow::default());
}

/// Steps in both directions until both wait. Everything that may have changed is checked.
fn run(relay: &mut Relay) -> bool {
    let mut room = vec![0; PIECE_BYTES];
    for side in [Side::Caller, Side::Callee] {
        happened(relay, side, EventFlags::IN | EventFlags::OUT);
        loop {
            match step(relay, side, &mut room) {
                Step::Took(_) => {}
                Step::Waits => break,
                Step::Broken => return false,
            }
        }
    }
    true
}

fn read(stream: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // It would block once there is nothing more.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

#[test]
fn each_direction_ends_by_itself() {
    let (mut relay, mut caller, mut callee) = joined();
    caller.write_all(b"question").unwrap();
    caller.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(run(&mut relay));
    let mut bytes = Vec::new();
    callee.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"question");
    assert!(!relay.is_over());
    callee.write_all(b"answer").unwrap();
    assert!(run(&mut relay));
    assert_eq!(read(&mut caller), b"answer");
    drop(callee);
    assert!(run(&mut relay));
    assert!(relay.is_over());
}

#[test]
fn a_receiver_that_takes_nothing_costs_one_piece_and_loses_nothing() {
    let (mut relay, mut caller, mut callee) = joined();
    let sent: Vec<u8> = (0..3_000_000_u32)
        .map(|index| (index % 251) as u8)
        .collect();
    let mut rest = &sent[..];
    let mut arrived = Vec::new();
    while arrived.len() < sent.len() {
        while let Ok(len) = caller.write(rest) {
            rest = &rest[len..];
            if rest.is_empty() {
                break;
            }
        }
        assert!(run(&mut relay));
        let kept = &relay.legs[0].kept;
        assert!(kept.len() <= PIECE_BYTES);
        assert_eq!(relay.is_full(Side::Callee), !kept.is_empty());
        arrived.extend(read(&mut callee));
    }
    assert!(arrived == sent);
    assert!(run(&mut relay));
    assert_eq!(
        relay.legs[0].kept.capacity(),
        0,
        "an idle circuit keeps nothing"
    );
}

#[test]
fn who_receives_no_more_is_told_to_the_sender_alone() {
    let (mut relay, mut caller, mut callee) = joined();
    callee.shutdown(std::net::Shutdown::Read).unwrap();
    caller.write_all(b"nobody reads this").unwrap();
    assert!(run(&mut relay));
    let refused = caller.write(b"nor this").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::BrokenPipe);
    callee.write_all(b"but this").unwrap();
    assert!(run(&mut relay));
    assert_eq!(read(&mut caller), b"but this");
}

#[test]
fn what_was_sent_before_hanging_up_still_arrives() {
    let (mut relay, mut caller, mut callee) = joined();
    callee.write_all(b"last words").unwrap();
    drop(callee);
    happened(&mut relay, Side::Callee, EventFlags::HUP | EventFlags::IN);
    assert!(run(&mut relay));
    assert!(relay.is_over());
    let mut bytes = Vec::new();
    caller.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"last words");
}

/// Whichever of the two directions finds it first.
#[test]
fn a_reset_is_no_end() {
    for sends_first in [false, true] {
        a_reset(sends_first);
    }
}

fn a_reset(sends_first: bool) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (ours, _) = listener.accept().unwrap();
    let (near, mut caller) = pair();
    let mut relay = join(near, ours.into());
    rustix::net::sockopt::set_socket_linger(&peer, Some(std::time::Duration::ZERO)).unwrap();
    drop(peer);
    if sends_first {
        caller.write_all(b"x").unwrap();
    }
    assert!(!run(&mut relay));
    assert!(!relay.is_over());
}

/// A program that answers before it has read everything, and closes.
#[test]
fn what_was_sent_before_a_reset_still_arrives() {
    for (is_kept, tcp) in [(false, false), (true, false), (false, true)] {
        an_early_answer(is_kept, tcp);
    }
}

fn an_early_answer(is_kept: bool, tcp: bool) {
    let (near, mut caller) = pair();
    let (mut relay, mut callee): (Relay, Box<dyn Stream>) = if tcp {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let callee = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, _) = listener.accept().unwrap();
        (join(near, ours.into()), Box::new(callee))
    } else {
        let (far, callee) = pair();
        (join(near, far), Box::new(callee))
    };
    let mut room = vec![0; PIECE_BYTES];
    let bytes = vec![1; PIECE_BYTES];
    loop {
        // The buffers between them are filled, so that something is kept; or one piece goes unread.
        let is_full = caller.write(&bytes).is_err();
        while matches!(step(&mut relay, Side::Caller, &mut room), Step::Took(_)) {}
        happened(&mut relay, Side::Caller, EventFlags::IN);
        if !is_kept || (is_full && relay.is_full(Side::Callee)) {
            break;
        }
    }
    let answer: Vec<u8> = (0..100_000_u32).map(|index| index as u8).collect();
    callee.write_all(&answer).unwrap();
    drop(callee);
    // The way to the program is found to be gone before what it said is read.
    relay.legs[1].writable = true;
    let _ = caller.write(b"more");
    let mut ended = Step::Took(0);
    while ended != Step::Waits {
        ended = step(&mut relay, Side::Caller, &mut room);
        assert_ne!(ended, Step::Broken);
    }
    let mut arrived = Vec::new();
    while step(&mut relay, Side::Callee, &mut room) != Step::Broken {
        arrived.extend(read(&mut caller));
        happened(&mut relay, Side::Caller, EventFlags::OUT);
    }
    arrived.extend(read(&mut caller));
    assert!(arrived == answer, "{} bytes arrived", arrived.len());
    assert!(!relay.is_over());
}

trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}
