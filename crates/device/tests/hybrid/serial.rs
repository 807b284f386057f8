//! Serial lines: the host's programs and the guest meet by streams that a carrier brings.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::time::Duration;

use device::{CallAnswer, Cut, PublishedCall, PublishedTo, Reply};
use policy::{CalleePattern, ServiceId, Verdict, VmPattern};
use vsock::Reason;

use wire::vsock::SocketType;

use crate::PATIENCE;
use crate::house::{House, calls_services, converse, rule};

/// Puts a dial through, and returns the guest's end.
fn accept(reply: Reply) -> UnixStream {
    let (guest, ours) = UnixStream::pair().unwrap();
    guest.set_read_timeout(Some(PATIENCE)).unwrap();
    ours.set_nonblocking(true).unwrap();
    reply.connected(ours.into(), None);
    guest
}

/// A program of the host that has named its callee, and this behind it in one write.
fn program(house: &House, request: &[u8]) -> UnixStream {
    let mut program = UnixStream::connect(house.path("old")).unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    program.write_all(request).unwrap();
    program
}

fn line(stream: &mut UnixStream) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 && byte != *b"\n" {
        text.push(byte[0]);
    }
    String::from_utf8(text).unwrap()
}

#[test]
fn a_program_reaches_the_guest_and_no_byte_behind_its_request_is_lost() {
    let house = House::new(HashMap::new());
    let dials = house.add_serial("old", 3);
    house.set_guest("old", true);
    let mut near = program(&house, b"CONNECT 22\nhello");
    let (port, reply) = dials.recv_timeout(PATIENCE).unwrap();
    assert_eq!(port, 22);
    let mut far = accept(reply);
    assert!(line(&mut near).starts_with("OK "));
    let mut seen = [0; 5];
    far.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"hello");
    converse(near, far, 3_000_000);
    house.wait_for_circuits(0);
}

#[test]
fn a_program_is_told_why_the_guest_cannot_be_had() {
    let house = House::new(HashMap::new());
    let dials = house.add_serial("old", 3);
    let refusal = |request: &[u8]| line(&mut program(&house, request));
    assert_eq!(
        refusal(b"CONNECT 22\n"),
        format!("ERR {}", Reason::NotRunning)
    );
    house.set_guest("old", true);
    let mut near = program(&house, b"CONNECT 22\n");
    let (_, reply) = dials.recv_timeout(PATIENCE).unwrap();
    reply.failed(Reason::GuestRefused);
    assert_eq!(line(&mut near), format!("ERR {}", Reason::GuestRefused));
    // A carrier that gives up has said no.
    let mut near = program(&house, b"CONNECT 22\n");
    drop(dials.recv_timeout(PATIENCE).unwrap());
    assert_eq!(line(&mut near), format!("ERR {}", Reason::HostFailed));
    let domain = policy::DEFAULT_DOMAIN.to_owned();
    let denied = rule(
        "old",
        CalleePattern::Vms(VmPattern::Any { domain }),
        Verdict::Deny,
    );
    let denied = policy::Rule {
        from: vec![policy::CallerPattern::Host],
        ..denied
    };
    house.set_rules(vec![denied], false);
    assert_eq!(refusal(b"CONNECT 22\n"), format!("ERR {}", Reason::Denied));
    assert_eq!(house.circuits(), 0);
}

#[test]
fn the_guest_reaches_listeners_services_and_the_daemon() {
    let registry = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = registry.local_addr().unwrap();
    let house = House::new(HashMap::from([(ServiceId(0), address)]));
    house.add_serial("old", 3);
    house.set_guest("old", true);

    assert_eq!(
        house.guest_calls("old", 9000).err(),
        Some(Reason::NoListener)
    );
    let listener = UnixListener::bind(house.port_path("old", 9000)).unwrap();
    let near = house.guest_calls("old", 9000).unwrap();
    let (far, _) = listener.accept().unwrap();
    converse(near, far, 1_000_000);

    house.offer(&[(0, "registry", 5000)]);
    assert_eq!(house.guest_calls("old", 5000).err(), Some(Reason::Denied));
    house.set_rules(vec![calls_services("old")], false);
    let near = house.guest_calls("old", 5000).unwrap();
    let (far, _) = registry.accept().unwrap();
    converse(near, far, 1_000_000);

    let agent = house.guest_calls("old", 1007).unwrap();
    let arrival = house.arrivals.recv_timeout(PATIENCE).unwrap();
    assert_eq!((arrival.vm.as_str(), arrival.source_port), ("old", 0));
    arrival.stream.set_nonblocking(false).unwrap();
    converse(agent, arrival.stream, 1000);
    assert_eq!(
        house.guest_calls("nobody", 1).err(),
        Some(Reason::UnknownCid)
    );
}

#[test]
fn a_rule_keeps_the_guest_from_listeners_of_the_host() {
    let house = House::new(HashMap::new());
    house.add_serial("old", 3);
    house.set_guest("old", true);
    let _listener = UnixListener::bind(house.port_path("old", 9000)).unwrap();
    let denied = rule("old", CalleePattern::Listeners, Verdict::Deny);
    house.set_rules(vec![denied], false);
    assert_eq!(house.guest_calls("old", 9000).err(), Some(Reason::Denied));
    let (words, result) = house.heard();
    assert_eq!(
        (words.as_str(), result),
        ("old -> host:9000", Err(Reason::Denied))
    );
}

#[test]
fn when_the_guest_goes_it_cannot_be_called_until_it_comes_again() {
    let house = House::new(HashMap::new());
    let dials = house.add_serial("old", 3);
    house.set_guest("old", true);
    let mut near = program(&house, b"CONNECT 22\n");
    let mut far = accept(dials.recv_timeout(PATIENCE).unwrap().1);
    assert!(line(&mut near).starts_with("OK "));
    house.set_guest("old", false);
    let refused = line(&mut program(&house, b"CONNECT 23\n"));
    assert_eq!(refused, format!("ERR {}", Reason::NotRunning));
    // What was said before is the carrier's to deliver.
    far.write_all(b"goodbye\n").unwrap();
    drop(far);
    assert_eq!(line(&mut near), "goodbye");
    drop(near);
    house.wait_for_circuits(0);
    house.set_guest("old", true);
    let mut near = program(&house, b"CONNECT 22\n");
    let far = accept(dials.recv_timeout(PATIENCE).unwrap().1);
    assert!(line(&mut near).starts_with("OK "));
    converse(near, far, 1000);
}

#[test]
fn a_stream_that_is_cut_is_no_end_on_either_side() {
    let registry = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = registry.local_addr().unwrap();
    let house = House::new(HashMap::from([(ServiceId(0), address)]));
    house.add_serial("old", 3);
    house.set_guest("old", true);
    house.offer(&[(0, "registry", 5000)]);
    house.set_rules(vec![calls_services("old")], false);
    let call = |cut: &Cut| {
        let guest = house.guest_calls_with("old", 5000, cut).unwrap();
        let (far, _) = registry.accept().unwrap();
        far.set_read_timeout(Some(PATIENCE)).unwrap();
        (guest, far)
    };
    // The carrier of the stream cuts it.
    let cut = Cut::default();
    let (guest, mut far) = call(&cut);
    cut.store(true, Ordering::Release);
    drop(guest);
    let error = far.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    // The other end is cut off.
    let cut = Cut::default();
    let (mut guest, far) = call(&cut);
    rustix::net::sockopt::set_socket_linger(&far, Some(Duration::ZERO)).unwrap();
    drop(far);
    assert_eq!(guest.read(&mut [0]).unwrap(), 0);
    assert!(cut.load(Ordering::Acquire));
    // An end is an end.
    let cut = Cut::default();
    let (guest, far) = call(&cut);
    converse(guest, far, 1000);
    house.wait_for_circuits(0);
    assert!(!cut.load(Ordering::Acquire));
}

#[test]
fn a_line_that_is_closed_leaves_nothing_and_ends_everything() {
    let house = House::new(HashMap::new());
    let dials = house.add_serial("old", 3);
    house.set_guest("old", true);
    let mut near = program(&house, b"CONNECT 22\n");
    let mut far = accept(dials.recv_timeout(PATIENCE).unwrap().1);
    assert!(line(&mut near).starts_with("OK "));
    assert!(house.ask(|fabric| fabric.close_line("old")));
    assert_eq!(far.read(&mut [0]).unwrap(), 0);
    assert!(matches!(near.read(&mut [0]), Ok(0) | Err(_)));
    assert!(!house.path("old").exists());
    // The carrier went with it.
    assert!(dials.recv_timeout(PATIENCE).is_err());
}

/// The system may have no room left to watch one more socket; what cannot be watched at all stands for that here.
#[test]
fn a_call_that_cannot_be_watched_is_cut_and_does_not_look_ended() {
    let house = House::new(HashMap::new());
    let _dials = house.add_serial("old", 3);
    house.set_guest("old", true);
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    let cut = Cut::default();
    let call = PublishedCall {
        name: "web".into(),
        peer: None,
        outsider: vsock::Outsider::default(),
        vm: "old".to_owned(),
        to: PublishedTo::Port(80),
        answer: CallAnswer::new(|_| ()),
        socket: file(),
        socket_type: SocketType::Stream,
        cut: Some(cut.clone()),
        peer_is_ours: false,
        is_published: std::sync::Arc::new(true.into()),
    };
    house.ask(move |fabric| fabric.dial_guest(call, Box::new(())));
    assert!(cut.load(Ordering::Acquire));
    let cut = Cut::default();
    let (name, theirs) = ("old".to_owned(), cut.clone());
    let called = house.ask(move |fabric| fabric.guest_calls(&name, 5000, file(), theirs));
    assert!(called.is_err());
    assert!(cut.load(Ordering::Acquire));
}
