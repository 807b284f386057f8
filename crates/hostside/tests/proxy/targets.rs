//! Services that are servers: TCP, UDP and UNIX.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use config::{Hosts, ListedAddress, ServiceTarget};
use device::{Called, Connected, Hold, Reply};
use hostside::offers::Groups;
use hostside::proxy::identity::field;
use hostside::proxy::memory::TcpMemory;
use hostside::proxy::ports::LocalPorts;
use hostside::proxy::{Lookup, MAX_CALLS, Resolver};
use policy::{Policy, ServiceId};
use proxy_header::{ParseConfig, ProxyHeader, Tlv};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, recv};
use vsock::Reason;
use wire::vsock::SocketType;

use crate::support::*;

fn tcp(address: impl ToString) -> ServiceTarget {
    ServiceTarget::Tcp(address.to_string())
}

#[test]
fn a_tcp_service_is_the_guests_other_end() {
    let stand = Stand::new();
    let (listener, address) = tcp_listener();
    let id = stand.offer(service(tcp(address)));
    let connected = stand
        .call(Called::Service(id), SocketType::Stream)
        .expect("put through");
    let guest: TcpStream = blocking(connected.socket);
    assert!(guest.nodelay().expect("an option"));
    let server = accept(&listener);
    write(&guest, b"question");
    guest
        .shutdown(std::net::Shutdown::Write)
        .expect("half-closed");
    assert_eq!(read_all(&server), b"question");
    write(&server, b"answer");
    drop(server);
    assert_eq!(read_all(&guest), b"answer");
}

#[test]
fn a_call_that_ended_before_its_turn_reaches_no_target() {
    let stand = Stand::new();
    let (listener, address) = tcp_listener();
    let id = stand.offer(service(tcp(address)));
    let (answer, answered) = std::sync::mpsc::channel();
    for is_awaited in [false, true] {
        let circuit = Arc::new(());
        let answer = answer.clone();
        let reply = Reply::of_circuit(&circuit, move |result| answer.send(result).expect("a test"));
        let lasting = is_awaited.then_some(circuit);
        stand.hand_over(&web(), Called::Service(id), SocketType::Stream, None, reply);
        let result = answered.recv_timeout(PATIENCE).expect("an answer");
        assert_eq!(result.is_ok(), is_awaited);
        drop(lasting);
    }
    // Of the first there is nothing.
    drop(accept(&listener));
    listener.set_nonblocking(true).expect("an option");
    assert!(listener.accept().is_err());
}

#[test]
fn each_way_not_to_reach_a_service_has_its_own_reason() {
    let stand = Stand::new();
    let (closed, _keep) = closed_port();
    let directory = tempfile::tempdir().expect("a directory");
    let missing = directory.path().join("missing");
    let file = directory.path().join("file");
    std::fs::write(&file, b"").expect("a file");
    for (target, reason) in [
        (tcp(closed), Reason::NoListener),
        (tcp("255.255.255.255:1"), Reason::Unreachable),
        (tcp("nobody.test:80"), Reason::Unreachable),
        (
            ServiceTarget::Udp("nobody.test:80".to_owned()),
            Reason::Unreachable,
        ),
        (ServiceTarget::Unix(missing), Reason::NoListener),
        (ServiceTarget::Unix(file), Reason::NoListener),
        (
            ServiceTarget::Command(vec!["/nowhere/program".to_owned()]),
            Reason::NoListener,
        ),
    ] {
        let id = stand.offer(service(target.clone()));
        assert_eq!(stand.stream(id).err(), Some(reason), "{target:?}");
    }
    assert_eq!(
        stand.stream(ServiceId(u32::MAX)).err(),
        Some(Reason::NoListener)
    );
    assert_eq!(stand.proxy.report().failed, 8);
}

#[test]
fn a_service_that_does_not_answer_is_not_waited_for() {
    let stand = Stand::new();
    let socket = rustix::net::socket(AddressFamily::INET, rustix::net::SocketType::STREAM, None)
        .expect("a socket");
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    rustix::net::bind(&socket, &any).expect("a port");
    rustix::net::listen(&socket, 0).expect("listening");
    let address = rustix::net::getsockname(&socket).expect("an address");
    let address = std::net::SocketAddr::try_from(address).expect("an address");
    let mut offer = service(tcp(address));
    offer.connect_timeout = std::time::Duration::from_millis(50);
    let id = stand.offer(offer);
    // Its backlog of 0 takes a connection or two, which are never accepted.
    let mut held = Vec::new();
    let reason = loop {
        match stand.call(Called::Service(id), SocketType::Stream) {
            Ok(connected) => held.push(connected),
            Err(reason) => break reason,
        }
        assert!(held.len() < 100, "a backlog of 0 is full at some time");
    };
    assert_eq!(reason, Reason::ServiceTimedOut);
}

#[test]
fn streams_and_messages_do_not_mix() {
    let stand = Stand::new();
    let (_listener, address) = tcp_listener();
    let path = std::path::PathBuf::from("/nowhere");
    for (target, wrong) in [
        (tcp(address), SocketType::SeqPacket),
        (ServiceTarget::Unix(path.clone()), SocketType::SeqPacket),
        (ServiceTarget::UnixSeqpacket(path), SocketType::Stream),
        (ServiceTarget::Egress, SocketType::SeqPacket),
    ] {
        let id = stand.offer(service(target));
        let result = stand.call(Called::Service(id), wrong);
        assert_eq!(result.err(), Some(Reason::WrongType));
    }
}

#[test]
fn a_service_has_as_many_connections_as_it_may_and_no_more() {
    let stand = Stand::new();
    let (_listener, address) = tcp_listener();
    let mut offer = service(tcp(address));
    offer.max_connections = 8;
    let id = stand.offer(offer.clone());
    let vm = |number: u32| policy::Address::new(&format!("vm{number}"), 10 + number);
    let call = |of| stand.call_as(&vm(of), Called::Service(id), SocketType::Stream, None);
    let mut held = Vec::new();
    for of in [0, 0, 1, 1, 2, 2, 3] {
        held.push(call(of).expect("below the limits"));
    }
    // One VM has a quarter, and others have the rest.
    assert_eq!(call(0).err(), Some(Reason::ServiceShare));
    let last = call(3).expect("the last place");
    assert_eq!(call(4).err(), Some(Reason::ServiceLimit));
    // What exists counts on when the service is offered anew, under the same number.
    assert_eq!(stand.offer(offer.clone()), id);
    assert_eq!(call(4).err(), Some(Reason::ServiceLimit));
    drop(last);
    assert_eq!(call(0).err(), Some(Reason::ServiceShare));
    held.push(call(4).expect("a place"));
    drop(held.remove(0));
    assert!(call(0).is_ok());
    let call = || stand.call(Called::Service(id), SocketType::Stream);
    offer.name = "another".to_owned();
    assert_ne!(stand.offer(offer), id);
    assert_eq!(
        call().err(),
        Some(Reason::NoListener),
        "its number is free now"
    );
}

#[test]
fn connections_that_a_vm_has_ended_count_for_its_share_of_the_hosts_ports() {
    let ports = LocalPorts {
        count: 8,
        reuses_loopback: false,
    };
    let nobody = Arc::new(Script::default());
    let stand = Stand::on(Policy::default(), nobody, ports, TcpMemory::default());
    let (listener, address) = tcp_listener();
    let id = stand.offer(service(tcp(address)));
    let call = |vm, cid| {
        let vm = policy::Address::new(vm, cid);
        stand.call_as(&vm, Called::Service(id), SocketType::Stream, None)
    };
    // As the data plane says it, or does not.
    for is_first in [false, false, true, true] {
        let Connected {
            socket,
            hold,
            ended_first,
            ..
        } = call("web", 3).expect("its share");
        let ended_first = ended_first.expect("a TCP connection");
        ended_first.store(is_first, Ordering::Release);
        drop((socket, hold));
        drop(accept(&listener));
    }
    assert_eq!(call("web", 3).err(), Some(Reason::ServiceShare));
    assert!(call("db", 4).is_ok());
}

#[test]
fn a_vm_that_fills_the_hosts_memory_for_tcp_loses_connections_and_opens_no_others() {
    let resolver = Arc::new(Script::default());
    // TCP always has more than this.
    let memory = TcpMemory::beyond(0);
    let stand = Stand::on(Policy::default(), resolver, LocalPorts::default(), memory);
    let (listener, address) = tcp_listener();
    let id = stand.offer(service(tcp(address)));
    let call = |vm, cid| {
        let vm = policy::Address::new(vm, cid);
        stand.call_as(&vm, Called::Service(id), SocketType::Stream, None)
    };
    let other = call("db", 4).expect("put through");
    let to_other = accept(&listener);
    // Nothing of what the server sends is taken.
    let filled = [(); 16].map(|()| {
        let connected = call("web", 3).expect("put through");
        let server = accept(&listener);
        server.set_nonblocking(true).expect("a socket");
        while (&server).write(&[1; 65536]).is_ok() {}
        (connected, server)
    });
    let is_reset = |server: &TcpStream| {
        let result = (&*server).read(&mut [0]);
        result.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
    };
    until("a connection is reset", || {
        filled.iter().any(|(_, server)| is_reset(server))
    });
    // Its end at the guest is none either.
    until("the guest has no end of it", || {
        filled.iter().any(|(connected, _)| {
            let error = recv(&connected.socket, &mut [0; 1], RecvFlags::PEEK).err();
            matches!(error, Some(Errno::CONNRESET | Errno::NOTCONN))
        })
    });
    assert_eq!(call("web", 3).err(), Some(Reason::ServiceShare));
    write(&to_other, b"here");
    assert_eq!(read_some(&blocking::<TcpStream>(other.socket), 4), b"here");
    assert!(call("db", 4).is_ok());
}

#[test]
fn a_service_is_told_who_calls() {
    // The rules may be others by the time that the call comes here.
    let stand = Stand::new();
    let (listener, address) = tcp_listener();
    let mut offer = service(tcp(address));
    offer.proxy_protocol = true;
    let id = stand.offer(offer);
    let connected = stand
        .call_as(
            &web(),
            Called::Service(id),
            SocketType::Stream,
            Some("the rule"),
        )
        .expect("put through");
    let guest: TcpStream = blocking(connected.socket);
    let server = accept(&listener);
    write(&guest, b"payload");
    drop((guest, connected.hold));
    let bytes = read_all(server);
    let (header, len) = ProxyHeader::parse(&bytes, ParseConfig::default()).expect("a header");
    assert_eq!(&bytes[len..], b"payload");
    let fields: Vec<(u8, Vec<u8>)> = header
        .tlvs()
        .map(|tlv| match tlv.expect("a field") {
            Tlv::Custom(kind, value) => (kind, value.to_vec()),
            other => panic!("an unexpected field {other:?}"),
        })
        .collect();
    for (kind, value) in [
        (field::VM, "web"),
        (field::RULE, "the rule"),
        (field::SOURCE_PORT, "70001"),
    ] {
        assert!(
            fields.contains(&(kind, value.as_bytes().to_vec())),
            "{kind:#x} {fields:?}"
        );
    }
}

#[test]
fn a_name_may_stand_for_a_servers_address() {
    let stand = Stand::new();
    let (listener, address) = tcp_listener();
    let listed = ListedAddress {
        address: address.ip(),
        port: None,
    };
    let hosts = Hosts::from_iter([("server.test".to_owned(), vec![listed])]);
    stand
        .proxy
        .set_policy(Arc::default(), hosts, Groups::default(), false);
    let id = stand.offer(service(tcp(format!("server.test:{}", address.port()))));
    let _connected = stand
        .call(Called::Service(id), SocketType::Stream)
        .expect("put through");
    accept(&listener);
}

#[test]
fn a_unix_service_gets_streams() {
    let stand = Stand::new();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("stream");
    let listener = UnixListener::bind(&path).expect("a listener");
    let mut offer = service(ServiceTarget::Unix(path));
    offer.proxy_protocol = true;
    let id = stand.offer(offer);
    let (guest, _hold) = stand.stream(id).expect("put through");
    let (server, _) = listener.accept().expect("a connection");
    write(&guest, b"hello");
    drop(guest);
    let bytes = read_all(server);
    let (_, len) = ProxyHeader::parse(&bytes, ParseConfig::default()).expect("a header");
    assert_eq!(&bytes[len..], b"hello");
}

#[test]
fn a_seqpacket_service_gets_messages() {
    let stand = Stand::new();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("messages");
    let listener = rustix::net::socket(
        AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        None,
    )
    .expect("a socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).expect("a path")).expect("bound");
    rustix::net::listen(&listener, 1).expect("listening");
    let id = stand.offer(service(ServiceTarget::UnixSeqpacket(path.clone())));
    let connected = stand
        .call(Called::Service(id), SocketType::SeqPacket)
        .expect("put through");
    let server = rustix::net::accept(&listener).expect("a connection");
    for message in [&b"one"[..], b"two"] {
        rustix::net::send(&connected.socket, message, SendFlags::empty()).expect("sent");
    }
    let mut buffer = [0; 16];
    for message in [&b"one"[..], b"two"] {
        let (len, _) =
            rustix::net::recv(&server, &mut buffer, RecvFlags::empty()).expect("received");
        assert_eq!(&buffer[..len], message);
    }
    // The socket file is there, and of the other type.
    let id = stand.offer(service(ServiceTarget::Unix(path)));
    assert_eq!(stand.stream(id).err(), Some(Reason::WrongType));
}

/// A UDP server.
fn udp_server() -> (UdpSocket, ServiceTarget) {
    let server = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    server.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let address = server.local_addr().expect("an address");
    (server, ServiceTarget::Udp(address.to_string()))
}

#[test]
fn a_message_is_a_datagram() {
    let stand = Stand::new();
    let (server, target) = udp_server();
    let id = stand.offer(service(target));
    let connected = stand
        .call(Called::Service(id), SocketType::SeqPacket)
        .expect("put through");
    let guest: OwnedMessages = blocking(connected.socket);
    let mut buffer = vec![0; 70_000];
    // An oversized message is lost, as a datagram would be.
    for message in [vec![b'a'; 65_508], b"question".to_vec()] {
        rustix::net::send(&guest.0, &message, SendFlags::empty()).expect("sent");
    }
    let (len, peer) = server.recv_from(&mut buffer).expect("a datagram");
    assert_eq!(&buffer[..len], b"question");
    for answer in [&b""[..], b"answer"] {
        server.send_to(answer, peer).expect("sent");
    }
    // An empty datagram would look like the end.
    let (len, _) = rustix::net::recv(&guest.0, &mut buffer, RecvFlags::empty()).expect("a message");
    assert_eq!(&buffer[..len], b"answer");
}

pub struct OwnedMessages(pub std::os::fd::OwnedFd);

impl From<std::os::fd::OwnedFd> for OwnedMessages {
    fn from(socket: std::os::fd::OwnedFd) -> OwnedMessages {
        OwnedMessages(socket)
    }
}

impl std::os::fd::AsFd for OwnedMessages {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[test]
fn datagrams_in_a_stream_have_their_length_before_them() {
    let stand = Stand::new();
    let (server, target) = udp_server();
    let id = stand.offer(service(target));
    let (guest, _hold) = stand.stream(id).expect("put through");
    let mut buffer = vec![0; 70_000];
    // Too long for a datagram, empty, and in pieces.
    write(
        &guest,
        &[&65_508_u16.to_be_bytes()[..], &vec![b'x'; 65_508]].concat(),
    );
    write(&guest, &[0, 0, 0]);
    let (len, _) = server.recv_from(&mut buffer).expect("a datagram");
    assert_eq!(len, 0);
    write(&guest, &[4, b'a', b'b']);
    write(&guest, b"cd");
    let (len, peer) = server.recv_from(&mut buffer).expect("a datagram");
    assert_eq!(&buffer[..len], b"abcd");
    server.send_to(b"answer", peer).expect("sent");
    server.send_to(b"", peer).expect("sent");
    assert_eq!(read_some(&guest, 10), b"\0\x06answer\0\0");
    guest
        .shutdown(std::net::Shutdown::Write)
        .expect("half-closed");
    assert_eq!(
        read_all(&guest),
        b"",
        "the session ends with the guest's word"
    );
}

#[test]
fn half_a_datagram_is_none() {
    let stand = Stand::new();
    let (server, target) = udp_server();
    let id = stand.offer(service(target));
    let (guest, _hold) = stand.stream(id).expect("put through");
    write(&guest, b"\0\x05whole\0\x09half");
    let mut buffer = [0; 64];
    let (len, _) = server.recv_from(&mut buffer).expect("a datagram");
    assert_eq!(&buffer[..len], b"whole");
    guest
        .shutdown(std::net::Shutdown::Write)
        .expect("half-closed");
    assert_eq!(read_all(&guest), b"", "the session is over");
    server.set_nonblocking(true).expect("an option");
    let error = server.recv_from(&mut buffer).expect_err("no datagram");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_udp_server_that_is_not_there_ends_the_session() {
    let stand = Stand::new();
    let (server, target) = udp_server();
    drop(server);
    let id = stand.offer(service(target));
    let (guest, _hold) = stand
        .stream(id)
        .expect("put through, for nothing is sent yet");
    write(&guest, b"\0\x01a");
    let mut end = [0; 1];
    let got = std::io::Read::read(&mut &guest, &mut end);
    assert!(matches!(got, Ok(0) | Err(_)), "{got:?}");
}

#[test]
fn each_datagram_says_who_sent_it() {
    let stand = Stand::new();
    let (server, target) = udp_server();
    let mut offer = service(target);
    offer.proxy_protocol = true;
    let id = stand.offer(offer);
    let (guest, _hold) = stand.stream(id).expect("put through");
    let mut buffer = vec![0; 70_000];
    for word in ["one", "two"] {
        write(&guest, &[&[0, 3][..], word.as_bytes()].concat());
        let (len, _) = server.recv_from(&mut buffer).expect("a datagram");
        let (header, header_len) =
            ProxyHeader::parse(&buffer[..len], ParseConfig::default()).expect("a header");
        let addresses = header.proxied_address().expect("addresses");
        assert_eq!(addresses.protocol, proxy_header::Protocol::Datagram);
        assert_eq!(&buffer[header_len..len], word.as_bytes());
    }
}

/// A resolver that never answers.
struct Silent;

impl Resolver for Silent {
    fn lookup<'a>(&'a self, _name: &'a str, _turn: Option<Hold>) -> Lookup<'a> {
        Box::pin(std::future::pending())
    }
}

#[test]
fn a_vm_whose_calls_are_never_answered_leaves_room_for_the_calls_of_others() {
    let stand = Stand::with(Policy::default(), Arc::new(Silent));
    let (_listener, address) = tcp_listener();
    let mut silent = service(tcp("silent.test:80"));
    // As many as several services let it have.
    silent.max_connections = 65_536;
    let [silent, works] = [(0, silent), (1, service(tcp(address)))]
        .map(|(number, service)| (ServiceId(number), service));
    let called = [silent.0, works.0].map(Called::Service);
    stand.proxy.set_services(vec![silent, works]);
    let calls: Vec<_> = (0..8000)
        .map(|_| stand.begin(&web(), called[0], SocketType::Stream, None))
        .collect();
    let own = stand.call(called[1], SocketType::Stream);
    assert_eq!(own.err(), Some(Reason::ServiceShare));
    // A quarter of what it may have is for privileged programs.
    let privileged = stand.begin_from(600, ServiceId(1));
    let privileged = privileged.recv_timeout(PATIENCE).expect("an answer");
    assert!(privileged.is_ok(), "{:?}", privileged.err());
    let db = policy::Address::new("db", 4);
    let other = stand.call_as(&db, called[1], SocketType::Stream, None);
    assert!(other.is_ok(), "{:?}", other.err());
    let refused = stand.proxy.report().turned_away;
    assert_eq!(refused, 8001 - u64::from(MAX_CALLS / 4 / 4 * 3));
    drop(calls);
}
