//! Published ports of which the guest's agent makes the connections. The agent is the real one, and runs here.

use std::io::{ErrorKind, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use agent::session::{Options, serve};
use config::{GuestPort, Publish, PublishListen};
use device::{DecisionCallee, DecisionCaller, PublishedCall, PublishedTo};
use hostside::audit::AuditDecision;
use proxy_header::{ParseConfig, ProxyHeader};
use rustix::net::sockopt::set_socket_linger;
use vsock::{CircuitId, Reason};
use wire::agent::forward::Place;
use wire::agent::{
    CAPABILITY_FORWARD, CONNECTION_CHANNEL, ErrorKind as AgentError, ErrorReport, Frame, Hello,
};

use crate::publish::{dial, free_address, publish, set};
use crate::support::*;

/// The published port, which leads to a place in the guest.
fn port(address: SocketAddr, place: &str) -> Publish {
    let mut port = publish(PublishListen::Tcp(address.to_string()));
    port.to.port = GuestPort::Agent(Place::parse(place).expect("a place"));
    port
}

struct Scene {
    stand: Stand,
    address: SocketAddr,
    server: TcpListener,
}

impl Scene {
    fn new(change: impl Fn(&mut Publish)) -> Scene {
        let (stand, address) = (Stand::new(), free_address());
        let (server, at) = tcp_listener();
        let mut port = port(address, &format!("tcp:{at}"));
        change(&mut port);
        set(&stand, vec![port]);
        Scene {
            stand,
            address,
            server,
        }
    }

    /// The daemon's call of the agent, and what it says there.
    fn call(&self) -> (PublishedCall, UnixStream) {
        let mut call = self.stand.exchange.next_call();
        assert_eq!(call.vm, "red/web");
        let socket = rustix::io::dup(&call.socket).expect("a descriptor");
        // The call itself is as good as one that has the socket no more.
        call.socket = UnixStream::pair().expect("sockets").0.into();
        (call, blocking(socket))
    }

    /// Lets an agent take the call.
    fn attend(&self, options: Options) -> UnixStream {
        let (call, stream) = self.call();
        take(&call);
        let agents = stream.try_clone().expect("a descriptor");
        std::thread::spawn(move || {
            let _ = serve(&agents.into(), &options);
        });
        stream
    }

    /// The reason for which a caller was refused, as the audit has it.
    fn refusal(&self) -> String {
        let record = self.stand.audit.recv_timeout(PATIENCE).expect("a record");
        assert_eq!(record.decision, AuditDecision::Failed);
        let DecisionCallee::Place { domain, vm, .. } = &record.to else {
            panic!("{record:?}");
        };
        assert_eq!((domain.as_str(), vm.as_str()), ("red", "web"));
        let DecisionCaller::Published { published, peer } = &record.from else {
            panic!("{record:?}");
        };
        assert!(published == "front" && peer.is_some());
        record.reason.expect("a reason").into_owned()
    }
}

fn take(call: &PublishedCall) {
    assert_eq!(call.to, PublishedTo::Agent);
    call.answer.give(Ok(CircuitId {
        index: 0,
        generation: 0,
    }));
}

fn is_reset(mut stream: impl Read) -> bool {
    let read = stream.read(&mut [0; 1]);
    matches!(&read, Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn a_server_in_the_guest_that_knows_no_vsock_is_reached() {
    let scene = Scene::new(|_| ());
    let client = dial(scene.address);
    // More than a frame, and said before the call was taken.
    let question: Vec<u8> = (0..200_000_u32).map(|index| index as u8).collect();
    let feeder = {
        let (client, question) = (client.try_clone().expect("a descriptor"), question.clone());
        std::thread::spawn(move || {
            write(&client, &question);
            client.shutdown(Shutdown::Write).expect("half-closed");
        })
    };
    let _circuit = scene.attend(Options::new());
    let server = accept(&scene.server);
    assert!(read_all(&server) == question);
    write(&server, b"answer after a half-close");
    drop(server);
    assert_eq!(read_all(&client), b"answer after a half-close");
    feeder.join().expect("fed");
}

/// A server that refuses an upload: it answers, and closes without having read the rest.
#[test]
fn what_a_server_says_before_it_breaks_off_still_arrives_and_is_no_end() {
    let scene = Scene::new(|_| ());
    let mut client = dial(scene.address);
    write(&client, b"unread");
    // The agent alone has its end.
    drop(scene.attend(Options::new()));
    let server = accept(&scene.server);
    assert_eq!(server.peek(&mut [0; 6]).expect("said"), 6);
    let answer: Vec<u8> = (0..50_000_u32).map(|index| index as u8).collect();
    write(&server, &answer);
    drop(server);
    let mut received = Vec::new();
    let error = client.read_to_end(&mut received).expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(received == answer, "{} bytes", received.len());
}

#[test]
fn a_unix_socket_of_the_guest_is_reached_from_one_of_the_host() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let server = UnixListener::bind(at("server")).expect("a listener");
    let scene = Scene::new(|port| {
        let place = format!("unix:{}", at("server").display());
        port.to.port = GuestPort::Agent(Place::parse(&place).expect("a place"));
        port.listen = PublishListen::Unix {
            path: at("published"),
            mode: 0o600,
        };
    });
    let client = UnixStream::connect(at("published")).expect("connected");
    let _circuit = scene.attend(Options::new());
    let (server, _) = server.accept().expect("a connection");
    for (from, to) in [(&client, &server), (&server, &client)] {
        write(from, b"hello");
        assert_eq!(read_some(to, 5), b"hello");
    }
}

#[test]
fn the_server_is_told_who_comes_in_before_anything_else() {
    let scene = Scene::new(|port| port.proxy_protocol = true);
    let client = dial(scene.address);
    write(&client, b"payload");
    let _circuit = scene.attend(Options::new());
    let server = accept(&scene.server);
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"payload") {
        bytes.extend(read_some(&server, 1));
    }
    let (header, _) = ProxyHeader::parse(&bytes, ParseConfig::default()).expect("a header");
    let addresses = header.proxied_address().expect("addresses");
    assert_eq!(addresses.source, client.local_addr().expect("an address"));
    assert_eq!(addresses.destination, scene.address);
}

#[test]
fn a_cut_on_either_side_is_one_on_the_other() {
    let scene = Scene::new(|_| ());
    let connect = || {
        let client = dial(scene.address);
        let circuit = scene.attend(Options::new());
        let server = accept(&scene.server);
        write(&server, b"half of it");
        assert_eq!(read_some(&client, 10), b"half of it");
        (client, circuit, server)
    };
    let reset = |stream: TcpStream| {
        let linger = Some(std::time::Duration::ZERO);
        set_socket_linger(&stream, linger).expect("a TCP socket");
    };
    // The agent, its VM or its line.
    let (client, circuit, server) = connect();
    circuit.shutdown(Shutdown::Both).expect("cut");
    assert!(is_reset(&client) && is_reset(&server));
    // The client, and a client that had said its end.
    for says_end in [false, true] {
        let (client, _circuit, server) = connect();
        if says_end {
            client.shutdown(Shutdown::Write).expect("half-closed");
            assert_eq!(read_all(&server), b"");
        }
        reset(client);
        let mut server = server;
        until("the server is cut off", || {
            use std::io::Write;
            server.write_all(b"more").is_err()
        });
    }
    // The server.
    let (client, circuit, server) = connect();
    // From here on the agent alone has its end.
    drop(circuit);
    reset(server);
    assert!(is_reset(&client));
}

#[test]
fn a_call_that_is_refused_resets_the_caller() {
    let scene = Scene::new(|_| ());
    for reason in [Reason::NotRunning, Reason::AgentAway, Reason::AgentTooOld] {
        let client = dial(scene.address);
        let (call, _socket) = scene.call();
        assert_eq!(call.to, PublishedTo::Agent);
        call.answer.give(Err(reason));
        assert!(is_reset(&client));
    }
    assert!(
        scene.stand.audit.try_recv().is_err(),
        "it was judged, and written down, as a call"
    );
    // A call that is dropped without a word.
    let client = dial(scene.address);
    drop(scene.call());
    assert!(is_reset(&client));
}

#[test]
fn why_the_agent_does_not_connect_is_written_down() {
    let scene = Scene::new(|_| ());
    // Nothing listens.
    let (closed, _keep) = closed_port();
    set(
        &scene.stand,
        vec![port(scene.address, &format!("tcp:{closed}"))],
    );
    let client = dial(scene.address);
    let _circuit = scene.attend(Options::new());
    let words = scene.refusal();
    assert!(
        words.starts_with(&format!("cannot connect to {closed} in the guest: ")),
        "{words}"
    );
    assert!(is_reset(&client));
    // The guest's administrator has switched the method off.
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("agent.toml");
    std::fs::write(&file, "[methods]\nforward = false\n").expect("a file");
    let config = agent::config::Config::read(Some(&file)).expect("a configuration");
    let client = dial(scene.address);
    let _circuit = scene.attend(Options::new().with_config(config));
    let words = scene.refusal();
    assert!(
        words
            .contains("does not offer forward: it is older than that, or forward is off in its /etc/ringdown/agent.toml"),
        "{words}"
    );
    assert!(is_reset(&client));
}

/// As a guest does that wakes up: the daemon has its secret of before.
#[test]
fn an_agent_with_a_new_secret_is_called_again() {
    let scene = Scene::new(|_| ());
    let client = dial(scene.address);
    let (call, circuit) = scene.call();
    take(&call);
    let report = ErrorReport::new(AgentError::WrongProof, "another secret");
    let refusal = Frame::Error(report).to_bytes(CONNECTION_CHANNEL);
    write(&circuit, &refusal.expect("a report"));
    let _circuit = scene.attend(Options::new());
    let server = accept(&scene.server);
    write(&client, b"hello");
    assert_eq!(read_some(&server, 5), b"hello");
}

#[test]
fn an_agent_that_breaks_the_protocol_is_not_believed() {
    let scene = Scene::new(|_| ());
    let hello = |change: fn(&mut Hello)| {
        let mut hello = Hello::new("\x1b[2Jold");
        hello.capabilities.push(CAPABILITY_FORWARD.to_owned());
        change(&mut hello);
        Frame::Hello(hello)
            .to_bytes(CONNECTION_CHANNEL)
            .expect("a hello")
    };
    let later = |hello: &mut Hello| (hello.protocol_min, hello.protocol_max) = (7, 9);
    let before_forward = |hello: &mut Hello| hello.capabilities.clear();
    let ordinary = hello(|_| ());
    let again = [&ordinary[..], &ordinary].concat();
    for (said, expected) in [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            "broke the protocol",
        ),
        (ordinary, "broke before it answered"),
        (Vec::new(), "broke before it answered"),
        (again, "broke the protocol: it did not connect"),
        (hello(later), "the guest's ?[2Jold speaks versions 7 to 9"),
        (hello(before_forward), "the guest's ?[2Jold does not offer"),
    ] {
        let client = dial(scene.address);
        let (call, circuit) = scene.call();
        take(&call);
        write(&circuit, &said);
        circuit.shutdown(Shutdown::Write).expect("no more");
        let words = scene.refusal();
        assert!(words.contains(expected), "{words}");
        assert!(is_reset(&client), "{words}");
    }
}

#[test]
fn a_port_that_is_published_otherwise_meanwhile_says_so_to_its_call() {
    let scene = Scene::new(|_| ());
    let _client = dial(scene.address);
    let (call, _socket) = scene.call();
    let is_published: Arc<_> = call.is_published.clone();
    set(&scene.stand, vec![port(scene.address, "tcp:81")]);
    assert!(!is_published.load(std::sync::atomic::Ordering::Acquire));
}
