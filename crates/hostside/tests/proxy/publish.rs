//! Published ports of guests.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use config::{GuestPort, Publish, PublishListen, PublishedPort, ServiceTarget};
use device::{Called, PublishedTo};
use hostside::proxy::identity::field;
use hostside::proxy::{MAX_DIALS_OF_PORT, PublishError};
use policy::Policy;
use proxy_header::{ParseConfig, ProxyHeader, Tlv};
use rustix::net::{RecvFlags, SendFlags};
use vsock::Reason;
use wire::vsock::SocketType;

use crate::support::*;
use crate::targets::OwnedMessages;

pub fn publish(listen: PublishListen) -> Publish {
    Publish {
        name: "front".to_owned(),
        listen,
        to: PublishedPort {
            domain: "red".to_owned(),
            vm: "web".to_owned(),
            port: GuestPort::Vsock(80),
        },
        proxy_protocol: false,
    }
}

/// A loopback address of this process and call, which nothing else uses, without a port.
fn own_host() -> (IpAddr, u16) {
    static CALLS: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = [127, high, low, CALLS.fetch_add(1, Ordering::Relaxed)];
    (host.into(), 0)
}

/// An address that is free now, and that nothing else uses.
pub fn free_address() -> SocketAddr {
    let listener = TcpListener::bind(own_host()).expect("a listener");
    listener.local_addr().expect("an address")
}

fn free_udp_address() -> SocketAddr {
    let socket = UdpSocket::bind(own_host()).expect("a socket");
    socket.local_addr().expect("an address")
}

/// Publishes a port at this host's address, of which others may use ports, too. Returns the port.
fn set_at_shared_host(stand: &Stand, host: &str) -> u16 {
    loop {
        let port = free_address().port();
        let listen = PublishListen::Tcp(format!("{host}:{port}"));
        match stand.proxy.prepare_publishes(vec![publish(listen)]) {
            Ok(prepared) => {
                stand.proxy.set_publishes(prepared);
                return port;
            }
            Err(PublishError::Listen { error, .. }) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => panic!("{error}"),
        }
    }
}

pub fn set(stand: &Stand, publishes: Vec<Publish>) {
    let prepared = stand
        .proxy
        .prepare_publishes(publishes)
        .expect("all listen");
    stand.proxy.set_publishes(prepared);
}

pub fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

#[test]
fn whoever_connects_is_the_guests_caller() {
    let stand = Stand::new();
    let address = free_address();
    set(
        &stand,
        vec![publish(PublishListen::Tcp(address.to_string()))],
    );
    let client = dial(address);
    let call = stand.exchange.next_call();
    assert_eq!(call.vm, "red/web");
    assert!(matches!(call.to, PublishedTo::Port(80)), "{:?}", call.to);
    assert_eq!(
        (&*call.name, call.socket_type),
        ("front", SocketType::Stream)
    );
    let guest: TcpStream = blocking(call.socket);
    write(&client, b"question");
    client
        .shutdown(std::net::Shutdown::Write)
        .expect("half-closed");
    assert_eq!(read_all(&guest), b"question");
    write(&guest, b"answer");
    drop(guest);
    assert_eq!(read_all(&client), b"answer");
}

#[test]
fn a_port_accepts_no_more_callers_than_the_data_plane_takes() {
    const CALLERS: usize = 64;
    let stand = Stand::new();
    stand.exchange.keep_places();
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let at = |name: &str| Publish {
        name: name.to_owned(),
        ..publish(PublishListen::Unix {
            path: path(name),
            mode: 0o600,
        })
    };
    set(&stand, vec![at("flooded"), at("other")]);
    let connect = |name: &str| UnixStream::connect(path(name)).expect("there is room to wait");
    let _callers: Vec<_> = (0..CALLERS).map(|_| connect("flooded")).collect();
    for _ in 0..MAX_DIALS_OF_PORT {
        assert_eq!(&*stand.exchange.next_call().name, "flooded");
    }
    // They take no place of another port's.
    let _caller = connect("other");
    assert_eq!(&*stand.exchange.next_call().name, "other");
    stand.exchange.give_place_back();
    for _ in MAX_DIALS_OF_PORT..CALLERS {
        stand.exchange.give_place_back();
        assert_eq!(&*stand.exchange.next_call().name, "flooded");
    }
    assert_eq!(stand.exchange.most_places(), MAX_DIALS_OF_PORT + 1);
}

#[test]
fn a_call_is_told_when_its_port_is_published_otherwise() {
    let stand = Stand::new();
    let address = free_address();
    let at = publish(PublishListen::Tcp(address.to_string()));
    let mut elsewhere = at.clone();
    elsewhere.to.port = GuestPort::Vsock(81);
    let mut of_before = None;
    for (next, is_the_same) in [(&at, true), (&at, true), (&elsewhere, false), (&at, false)] {
        set(&stand, vec![next.clone()]);
        let _client = dial(address);
        let call = stand.exchange.next_call();
        let is_published = |call: &device::PublishedCall| {
            call.is_published.load(std::sync::atomic::Ordering::Acquire)
        };
        assert!(is_published(&call));
        assert_eq!(of_before.as_ref().is_none_or(is_published), is_the_same);
        of_before = Some(call);
    }
    set(&stand, Vec::new());
    let last = of_before.expect("a call").is_published;
    assert!(!last.load(std::sync::atomic::Ordering::Acquire));
}

#[test]
fn a_unix_socket_has_its_mode_and_goes_with_its_port() {
    let stand = Stand::new();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("web.sock");
    let listen = |mode| PublishListen::Unix {
        path: path.clone(),
        mode,
    };
    let mode = || path.metadata().expect("a socket").permissions().mode() & 0o777;
    set(&stand, vec![publish(listen(0o660))]);
    assert_eq!(mode(), 0o660);
    let client = UnixStream::connect(&path).expect("connected");
    let guest: UnixStream = blocking(stand.exchange.next_call().socket);
    write(&client, b"hello");
    assert_eq!(read_some(&guest, 5), b"hello");
    // Another mode needs no other socket: what waits in its backlog stays.
    set(&stand, vec![publish(listen(0o600))]);
    assert_eq!(mode(), 0o600);
    set(&stand, Vec::new());
    until("the socket goes", || !path.exists());
    write(&client, b"again");
    assert_eq!(read_some(&guest, 5), b"again", "what was accepted goes on");
}

#[test]
fn a_link_in_place_of_a_published_socket_leaves_its_target_its_mode() {
    let stand = Stand::new();
    let directory = tempfile::tempdir().expect("a directory");
    let (path, secret) = (
        directory.path().join("web.sock"),
        directory.path().join("secret"),
    );
    std::fs::write(&secret, "private").expect("a file");
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).expect("its mode");
    let listen = PublishListen::Unix {
        path: path.clone(),
        mode: 0o666,
    };
    set(&stand, vec![publish(listen.clone())]);
    // The directory may be writable for a user who may not read the daemon's files.
    std::fs::remove_file(&path).expect("it was there");
    std::os::unix::fs::symlink(&secret, &path).expect("a link");
    set(&stand, vec![publish(listen)]);
    let mode = secret.metadata().expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_reload_keeps_what_listens_and_changes_where_it_leads() {
    let stand = Stand::new();
    let address = free_address();
    let first = publish(PublishListen::Tcp(address.to_string()));
    set(&stand, vec![first.clone()]);
    let mut second = first.clone();
    second.to.vm = "db".to_owned();
    set(&stand, vec![second.clone()]);
    let _client = dial(address);
    assert_eq!(stand.exchange.next_call().vm, "red/db");
    // A reload that cannot listen changes nothing, and leaves nothing.
    let (taken, at) = tcp_listener();
    let free = free_address();
    let fresh = publish(PublishListen::Tcp(free.to_string()));
    let impossible = publish(PublishListen::Tcp(at.to_string()));
    let error = stand
        .proxy
        .prepare_publishes(vec![fresh, impossible])
        .err()
        .expect("refused");
    assert!(error.to_string().contains(&at.to_string()), "{error}");
    drop(taken);
    TcpListener::bind(free).expect("it is free again");
    let _client = dial(address);
    assert_eq!(stand.exchange.next_call().vm, "red/db");
    // What is not published any more is closed.
    set(&stand, Vec::new());
    until("it is closed", || TcpStream::connect(address).is_err());
}

#[test]
fn a_guest_is_told_who_comes_in() {
    let stand = Stand::new();
    let address = free_address();
    let mut with_protocol = publish(PublishListen::Tcp(address.to_string()));
    with_protocol.proxy_protocol = true;
    set(&stand, vec![with_protocol]);
    let client = dial(address);
    write(&client, b"payload");
    let guest: UnixStream = blocking(stand.exchange.next_call().socket);
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"payload") {
        bytes.extend(read_some(&guest, 1));
    }
    let (header, _) = ProxyHeader::parse(&bytes, ParseConfig::default()).expect("a header");
    let addresses = header.proxied_address().expect("addresses");
    assert_eq!(addresses.source, client.local_addr().expect("an address"));
    assert_eq!(addresses.destination, address);
    let name = header.tlvs().next().expect("a field").expect("whole");
    assert_eq!(name, Tlv::Custom(field::PUBLISHED, b"front".into()));
    write(&guest, b"answer");
    guest
        .shutdown(std::net::Shutdown::Write)
        .expect("half-closed");
    assert_eq!(read_all(&client), b"answer");
    drop((client, guest));
    // A guest that refuses closes without having read anything, and the caller sees a reset.
    let mut client = dial(address);
    drop(stand.exchange.next_call());
    let refused = client.read(&mut [0; 1]);
    assert!(
        matches!(&refused, Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset),
        "{refused:?}"
    );
}

fn udp_publish(stand: &Stand) -> SocketAddr {
    let address = free_udp_address();
    set(
        stand,
        vec![publish(PublishListen::Udp(address.to_string()))],
    );
    address
}

fn udp_client(server: SocketAddr) -> UdpSocket {
    let client = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    client.connect(server).expect("connected");
    client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    client
}

#[test]
fn each_address_that_sends_datagrams_has_a_circuit_of_its_own() {
    let stand = Stand::new();
    let server = udp_publish(&stand);
    let mut buffer = [0; 64];
    let mut open = Vec::new();
    for word in [&b"one"[..], b"two"] {
        let client = udp_client(server);
        client.send(word).expect("sent");
        let call = stand.exchange.next_call();
        assert_eq!(call.socket_type, SocketType::SeqPacket);
        let guest: OwnedMessages = blocking(call.socket);
        let (len, _) =
            rustix::net::recv(&guest.0, &mut buffer, RecvFlags::empty()).expect("received");
        assert_eq!(&buffer[..len], word);
        open.push((client, guest));
    }
    for (client, guest) in &open {
        client.send(b"more").expect("sent");
        let (len, _) =
            rustix::net::recv(&guest.0, &mut buffer, RecvFlags::empty()).expect("received");
        assert_eq!(&buffer[..len], b"more");
        rustix::net::send(&guest.0, b"answer", SendFlags::empty()).expect("sent");
        let len = client.recv(&mut buffer).expect("received");
        assert_eq!(&buffer[..len], b"answer");
    }
    assert!(!stand.exchange.has_call());
}

#[test]
fn a_guest_that_takes_no_messages_gets_a_stream_with_what_was_sent() {
    let stand = Stand::new();
    let server = udp_publish(&stand);
    let client = udp_client(server);
    client.send(b"question").expect("sent");
    // It refuses the first call.
    let call = stand.exchange.next_call();
    assert_eq!(call.socket_type, SocketType::SeqPacket);
    drop(call);
    let call = stand.exchange.next_call();
    assert_eq!(call.socket_type, SocketType::Stream);
    let guest: UnixStream = blocking(call.socket);
    assert_eq!(read_some(&guest, 10), b"\0\x08question");
    write(&guest, b"\0\x06answer");
    let mut buffer = [0; 64];
    let len = client.recv(&mut buffer).expect("received");
    assert_eq!(&buffer[..len], b"answer");
    // The next session knows.
    let other = udp_client(server);
    other.send(b"x").expect("sent");
    assert_eq!(stand.exchange.next_call().socket_type, SocketType::Stream);
}

#[test]
fn a_port_has_so_many_sessions_and_no_more() {
    let stand = Stand::new();
    let server = udp_publish(&stand);
    let mut open = Vec::new();
    for _ in 0..hostside::proxy::publish::udp::MAX_SESSIONS {
        let client = udp_client(server);
        client.send(b"x").expect("sent");
        open.push((stand.exchange.next_call(), client));
    }
    let late = udp_client(server);
    late.send(b"x").expect("sent");
    until("it is lost", || stand.proxy.report().lost_datagrams == 1);
    assert!(!stand.exchange.has_call());
}

/// A sender with a thousand ports has all sessions until another sender wants one, and gives up its most silent one then.
#[test]
fn one_sender_with_many_ports_keeps_no_other_sender_out() {
    let stand = Stand::new();
    let server = udp_publish(&stand);
    let mut buffer = [0; 64];
    let mut open = Vec::new();
    for _ in 0..hostside::proxy::publish::udp::MAX_SESSIONS {
        let client = udp_client(server);
        client.send(b"x").expect("sent");
        let guest: OwnedMessages = blocking(stand.exchange.next_call().socket);
        open.push((guest, client));
    }
    let receive = |guest: &OwnedMessages, buffer: &mut [u8]| {
        let (len, _) =
            rustix::net::recv(&guest.0, &mut *buffer, RecvFlags::empty()).expect("received");
        len
    };
    open[0].1.send(b"again").expect("sent");
    assert_eq!(receive(&open[0].0, &mut buffer), 1);
    assert_eq!(receive(&open[0].0, &mut buffer), 5);
    let other = UdpSocket::bind("127.0.0.2:0").expect("a socket");
    other.connect(server).expect("connected");
    other.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    other.send(b"question").expect("sent");
    let guest: OwnedMessages = blocking(stand.exchange.next_call().socket);
    assert_eq!(receive(&guest, &mut buffer), 8);
    rustix::net::send(&guest.0, b"answer", SendFlags::empty()).expect("sent");
    assert_eq!(other.recv(&mut buffer).expect("received"), 6);
    // The second has gone, which has been silent for longest; the first has not.
    assert_eq!(receive(&open[1].0, &mut buffer), 1);
    assert_eq!(receive(&open[1].0, &mut buffer), 0);
    open[0].1.send(b"more").expect("sent");
    assert_eq!(receive(&open[0].0, &mut buffer), 4);
    // One more of those ports takes no other sender's place.
    let late = udp_client(server);
    late.send(b"x").expect("sent");
    until("it is lost", || stand.proxy.report().lost_datagrams == 1);
    other.send(b"more").expect("sent");
    assert_eq!(receive(&guest, &mut buffer), 4);
    assert!(!stand.exchange.has_call());
}

/// A datagram is no connection: none that is sent later reaches the guest that was named before.
#[test]
fn datagrams_go_where_the_port_leads_now() {
    let stand = Stand::new();
    let server = udp_publish(&stand);
    let client = udp_client(server);
    client.send(b"before").expect("sent");
    let call = stand.exchange.next_call();
    assert_eq!(call.vm, "red/web");
    let guest: OwnedMessages = blocking(call.socket);
    let mut buffer = [0; 64];
    let (len, _) = rustix::net::recv(&guest.0, &mut buffer, RecvFlags::empty()).expect("received");
    assert_eq!(&buffer[..len], b"before");
    let mut other = publish(PublishListen::Udp(server.to_string()));
    other.to.vm = "other".to_owned();
    set(&stand, vec![other]);
    // Its circuit ends.
    let (len, _) = rustix::net::recv(&guest.0, &mut buffer, RecvFlags::empty()).expect("an end");
    assert_eq!(len, 0);
    client.send(b"after").expect("sent");
    let call = stand.exchange.next_call();
    assert_eq!(call.vm, "red/other");
    let guest: OwnedMessages = blocking(call.socket);
    let (len, _) = rustix::net::recv(&guest.0, &mut buffer, RecvFlags::empty()).expect("received");
    assert_eq!(&buffer[..len], b"after");
}

/// Guests that read nothing: what waits for one sender leaves room for what another sends.
#[test]
fn one_sender_with_many_bytes_keeps_no_other_sender_out() {
    let stand = Stand::new();
    let server = udp_publish(&stand);
    let lost = || stand.proxy.report().lost_datagrams;
    let mut clients = Vec::new();
    for _ in 0..4 {
        let (client, before) = (udp_client(server), lost());
        until("nothing more of it waits", || {
            // The kernel, too, drops what comes too fast.
            let _ = client.send(&[7; 60_000]);
            lost() > before
        });
        clients.push(client);
    }
    let other = UdpSocket::bind("127.0.0.2:0").expect("a socket");
    other.send_to(&[8; 60_000], server).expect("sent");
    let (mut buffer, mut guests) = ([0; 64], Vec::new());
    while buffer != [8; 64] {
        let guest: OwnedMessages = blocking(stand.exchange.next_call().socket);
        rustix::net::recv(&guest.0, &mut buffer, RecvFlags::empty()).expect("received");
        guests.push(guest);
    }
}

#[test]
fn no_service_leads_a_guest_to_a_published_port_by_a_name_or_any_address() {
    let script = Arc::new(Script::default());
    script.answer("near.test", &[&["127.0.0.1"]]);
    let stand = Stand::with(Policy::default(), script);
    let has_ipv6 = TcpListener::bind("[::]:0").is_ok();
    if !has_ipv6 {
        eprintln!("skipped in part: there is no IPv6");
    }
    let hosts = ["127.0.0.1", "0.0.0.0", "[::]"];
    for host in hosts.into_iter().take(if has_ipv6 { 3 } else { 2 }) {
        let port = set_at_shared_host(&stand, host);
        for server in ["near.test", "127.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]"] {
            let id = stand.offer(service(ServiceTarget::Tcp(format!("{server}:{port}"))));
            let failed = stand.call(Called::Service(id), SocketType::Stream);
            assert_eq!(failed.err(), Some(Reason::HostFailed), "{host} {server}");
        }
    }
    assert!(!stand.exchange.has_call());
    let address = udp_publish(&stand).to_string();
    let id = stand.offer(service(ServiceTarget::Udp(address)));
    let failed = stand.call(Called::Service(id), SocketType::SeqPacket);
    assert_eq!(failed.err(), Some(Reason::HostFailed));
}

#[test]
fn no_guest_waits_at_a_port_before_it_is_published() {
    let stand = Stand::new();
    let (tcp, udp) = (free_address(), free_udp_address());
    let publishes = [
        PublishListen::Tcp(tcp.to_string()),
        PublishListen::Udp(udp.to_string()),
    ];
    let prepare = || {
        let prepared = stand
            .proxy
            .prepare_publishes(publishes.clone().map(publish).to_vec());
        prepared.expect("they listen")
    };
    let call = |target, socket_type| {
        let id = stand.offer(service(target));
        stand.call(Called::Service(id), socket_type).map(drop)
    };
    let call_tcp = || call(ServiceTarget::Tcp(tcp.to_string()), SocketType::Stream);
    let call_udp = || call(ServiceTarget::Udp(udp.to_string()), SocketType::SeqPacket);
    let prepared = prepare();
    assert_eq!(call_tcp(), Err(Reason::HostFailed));
    assert_eq!(call_udp(), Err(Reason::HostFailed));
    // It does not come into force: the addresses are as others.
    drop(prepared);
    assert_eq!(call_tcp(), Err(Reason::NoListener));
    assert_eq!(call_udp(), Ok(()));
    // The addresses of before stay the daemon's own until they are closed.
    stand.proxy.set_publishes(prepare());
    let none = stand.proxy.prepare_publishes(Vec::new()).expect("nothing");
    assert_eq!(call_tcp(), Err(Reason::HostFailed));
    stand.proxy.set_publishes(none);
    until("it is closed", || call_tcp() == Err(Reason::NoListener));
    assert_eq!(stand.proxy.report().published, 0);
}

#[test]
fn a_session_from_before_a_port_is_published_there_ends() {
    let stand = Stand::new();
    let address = free_udp_address();
    let id = stand.offer(service(ServiceTarget::Udp(address.to_string())));
    let connected = stand.call(Called::Service(id), SocketType::SeqPacket);
    let guest: OwnedMessages = blocking(connected.expect("put through").socket);
    set(
        &stand,
        vec![publish(PublishListen::Udp(address.to_string()))],
    );
    rustix::net::send(&guest.0, b"let me in", SendFlags::empty()).expect("sent");
    let mut buffer = [0; 16];
    let ended = rustix::net::recv(&guest.0, &mut buffer, RecvFlags::empty());
    assert_eq!(ended.expect("an end").0, 0);
    // The first that the port takes is this.
    let client = udp_client(address);
    client.send(b"x").expect("sent");
    let call: OwnedMessages = blocking(stand.exchange.next_call().socket);
    rustix::net::recv(&call.0, &mut buffer, RecvFlags::empty()).expect("a message");
    assert_eq!(buffer[0], b'x');
    assert_eq!(stand.proxy.report().published, 1);
}
