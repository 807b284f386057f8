//! Circuits that have ended, with bytes that a peer of the host's does not take: they are in the host's memory, and so they count.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device::{CallAnswer, CircuitFilter, Fabric, Hold, PublishedCall, PublishedTo};
use policy::{CalleePattern, DEFAULT_DOMAIN, NamePattern, Policy, Rule, ServiceEntry, ServiceId};
use rustix::net::sockopt::{
    Timeout, set_socket_recv_buffer_size, set_socket_send_buffer_size, set_socket_timeout,
};
use rustix::net::{Shutdown, shutdown};
use vsock::{CircuitState, Outsider};
use wire::vsock::{Header, Operation, SocketType};

use crate::guest::{Guest, RX, TX};
use crate::turns::header;
use crate::{PATIENCE, config, fabric, turn_until};

/// What the guest sends: more than the peer's window, and less than its first credit and than the socket takes.
const PACKETS: u16 = 8;
const PAYLOAD: u32 = 16 << 10;
const SENT: usize = PACKETS as usize * PAYLOAD as usize;

/// A listener whose connections take little unless they are read.
fn narrow() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    set_socket_recv_buffer_size(&listener, 16384).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// A socket that takes all that the guest sends at once.
fn wide(stream: impl Into<OwnedFd>) -> OwnedFd {
    let stream = stream.into();
    set_socket_send_buffer_size(&stream, 2 * SENT).unwrap();
    rustix::io::ioctl_fionbio(&stream, true).unwrap();
    stream
}

/// A guest whose ring has room for everything, at a line where everything is allowed.
fn guest(fabric: &mut Fabric, directory: &std::path::Path) -> Guest {
    let config = config(directory);
    fabric.open_line(&config).unwrap();
    // A service is called by a rule that names it.
    let services = CalleePattern::Service {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: NamePattern::Any,
    };
    let to_services = Rule {
        to: vec![services],
        ..Rule::allow_any()
    };
    let policy = Arc::new(Policy::new(vec![to_services, Rule::allow_any()]));
    fabric.set_policy(policy, Vec::new(), false);
    let mut guest = Guest::attach(fabric, &config.vhost_user);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, 64);
    guest.kick(RX);
    guest
}

fn say(guest: &mut Guest, header: &Header, count: u16) {
    let packet = guest.packet(header);
    guest.offer(TX, packet, count);
    guest.kick(TX);
}

/// The guest sends everything and ends, to a peer that has ended and does not read. Then that peer reads.
fn ends_and_is_read(
    fabric: &mut Fabric,
    guest: &mut Guest,
    like: Header,
    mut peer: impl Read + AsFd + Send + 'static,
) {
    let packet = |operation, len, flags| Header {
        operation: operation as u16,
        len,
        flags,
        ..like
    };
    shutdown(&peer, Shutdown::Write).unwrap();
    say(guest, &packet(Operation::Data, PAYLOAD, 0), PACKETS);
    say(guest, &packet(Operation::Shutdown, 0, 3), 1);
    let circuits = |fabric: &mut Fabric| {
        let all = fabric.list_circuits(&CircuitFilter::default(), 0, 10);
        all.circuits
    };
    turn_until(fabric, "the guest's circuit is over", |fabric| {
        circuits(fabric)
            .first()
            .is_none_or(|circuit| circuit.state == CircuitState::Closing)
    });
    for _ in 0..100 {
        fabric.turn(Some(Duration::from_millis(1))).unwrap();
        assert_eq!(fabric.lines()[0].report.circuits, 1, "it keeps its place");
    }
    let reader = std::thread::spawn(move || {
        set_socket_timeout(&peer, Timeout::Recv, Some(PATIENCE)).unwrap();
        let mut bytes = Vec::new();
        peer.read_to_end(&mut bytes).map(|_| bytes.len())
    });
    turn_until(fabric, "the place is free", |fabric| {
        fabric.lines()[0].report.circuits == 0
    });
    assert_eq!(reader.join().unwrap().unwrap(), SENT, "and it has an end");
}

/// The same with the peer of a service's socket.
fn a_service_is_read(near: impl Into<OwnedFd>, peer: impl Read + AsFd + Send + 'static) {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let place = Arc::new(());
    let kept = Arc::downgrade(&place);
    let hold: Hold = Box::new(place);
    let once = Mutex::new(Some((wide(near), hold)));
    fabric.set_dialer(Box::new(move |call| {
        let (socket, hold) = once.lock().unwrap().take().expect("one call");
        call.reply.connected(socket, Some(hold));
    }));
    fabric.set_services(vec![ServiceEntry {
        id: ServiceId(1),
        domain: DEFAULT_DOMAIN.to_owned(),
        name: "registry".to_owned(),
        port: 5000,
    }]);
    let mut guest = guest(&mut fabric, directory.path());
    let like = header(Operation::Request, 5000, 0);
    say(&mut guest, &like, 1);
    turn_until(&mut fabric, "the guest is answered", |_| {
        guest.given_back(RX) == 1
    });
    assert_eq!(kept.strong_count(), 1);
    ends_and_is_read(&mut fabric, &mut guest, like, peer);
    assert_eq!(kept.strong_count(), 0, "the service's place, too");
}

#[test]
fn what_a_tcp_service_does_not_take_keeps_its_place() {
    let (listener, address) = narrow();
    let near = TcpStream::connect(address).unwrap();
    a_service_is_read(near, listener.accept().unwrap().0);
}

#[test]
fn what_a_program_at_a_unix_socket_does_not_read_keeps_its_place() {
    let (near, peer) = UnixStream::pair().unwrap();
    a_service_is_read(near, peer);
}

#[test]
fn what_a_caller_of_a_published_port_does_not_take_keeps_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let mut guest = guest(&mut fabric, directory.path());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    set_socket_recv_buffer_size(&peer, 16384).unwrap();
    rustix::net::connect(&peer, &listener.local_addr().unwrap()).unwrap();
    let socket = wide(listener.accept().unwrap().0);
    let call = PublishedCall {
        name: "door".into(),
        peer: None,
        outsider: Outsider(1),
        vm: "web".to_owned(),
        to: PublishedTo::Port(80),
        answer: CallAnswer::new(|_| ()),
        socket,
        socket_type: SocketType::Stream,
        cut: None,
        peer_is_ours: false,
        is_published: Arc::new(AtomicBool::new(true)),
    };
    fabric.dial_guest(call, Box::new(()));
    turn_until(&mut fabric, "the guest is called", |_| {
        guest.given_back(RX) == 1
    });
    // The first port that callers from the host get.
    let like = Header {
        src_port: 80,
        dst_port: 1 << 30,
        ..header(Operation::Response, 0, 0)
    };
    say(&mut guest, &like, 1);
    ends_and_is_read(&mut fabric, &mut guest, like, TcpStream::from(peer));
}
