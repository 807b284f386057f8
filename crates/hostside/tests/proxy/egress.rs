//! Egress: what guests reach, and the errors when they do not.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use config::ServiceTarget;
use device::{Called, DecisionCallee};
use hostside::audit::AuditDecision;
use hostside::proxy::memory::TcpMemory;
use hostside::proxy::ports::LocalPorts;
use policy::{CalleePattern, IpNet, NamePattern, Policy, Rule, RuleLimits, ServiceId, Verdict};
use wire::vsock::SocketType;

use crate::support::*;

/// A stand with an egress service, whose resolver the test writes.
pub struct Egress {
    pub stand: Stand,
    pub script: Arc<Script>,
    pub id: ServiceId,
}

impl Egress {
    pub fn new(rules: Vec<Rule>) -> Egress {
        Egress::with_ports(rules, LocalPorts::default())
    }

    pub fn with_ports(rules: Vec<Rule>, ports: LocalPorts) -> Egress {
        let script = Arc::new(Script::default());
        let memory = TcpMemory::default();
        let stand = Stand::on(Policy::new(rules), script.clone(), ports, memory);
        let id = stand.offer(service(ServiceTarget::Egress));
        Egress { stand, script, id }
    }

    pub fn connect(&self) -> UnixStream {
        let (guest, _) = self.stand.stream(self.id).expect("put through");
        guest
    }

    /// Asks in HTTP, and reads the head of the answer.
    pub fn http(&self, to: &str) -> (UnixStream, String) {
        let guest = self.connect();
        write(
            &guest,
            format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes(),
        );
        let head = read_head(&guest);
        (guest, head)
    }

    /// Asks in SOCKS, and reads the code of the answer.
    pub fn socks(&self, host: &str, port: u16) -> (UnixStream, u8) {
        let guest = self.connect();
        write(&guest, &[5, 1, 0]);
        assert_eq!(read_some(&guest, 2), [5, 0]);
        write(&guest, &socks_request(host, port));
        let answer = read_some(&guest, 10);
        assert_eq!(answer[0], 5);
        (guest, answer[1])
    }
}

pub fn socks_request(host: &str, port: u16) -> Vec<u8> {
    let mut bytes = vec![5, 1, 0];
    match host.parse() {
        Ok(std::net::IpAddr::V4(address)) => {
            bytes.push(1);
            bytes.extend(address.octets());
        }
        Ok(std::net::IpAddr::V6(address)) => {
            bytes.push(4);
            bytes.extend(address.octets());
        }
        Err(_) => {
            bytes.extend([3, host.len() as u8]);
            bytes.extend(host.as_bytes());
        }
    }
    bytes.extend(port.to_be_bytes());
    bytes
}

pub fn read_head(stream: &UnixStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.extend(read_some(stream, 1));
    }
    String::from_utf8(head).expect("text")
}

fn named(name: &str, port: u16) -> Rule {
    Rule {
        ports: vec![port.into()..=port.into()],
        ..allow(to_name(name))
    }
}

/// Both ends say something and end what they say, the guest first.
fn converse(guest: &UnixStream, server: &TcpStream) {
    write(guest, b"question");
    guest.shutdown(Shutdown::Write).expect("half-closed");
    assert_eq!(read_all(server), b"question");
    write(server, b"answer");
    server.shutdown(Shutdown::Write).expect("half-closed");
    assert_eq!(read_all(guest), b"answer");
}

fn server_of(stand: &Egress, name: &str) -> (TcpListener, SocketAddr) {
    let (listener, address) = tcp_listener();
    stand.script.answer(name, &[&[&address.ip().to_string()]]);
    (listener, address)
}

#[test]
fn a_guest_reaches_a_name_that_a_rule_allows() {
    let (listener, address) = tcp_listener();
    let port = address.port();
    let egress = Egress::new(vec![named("files.test", port), allow(to_loopback())]);
    egress.script.answer("files.test", &[&["127.0.0.1"]]);
    let (guest, head) = egress.http(&format!("Files.Test.:{port}"));
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    converse(&guest, &accept(&listener));
    let record = egress.stand.audit.recv_timeout(PATIENCE).expect("a record");
    assert_eq!(record.decision, AuditDecision::Allowed);
    assert_eq!(record.rule.expect("a rule").index, 0);
    assert_eq!(
        record.to,
        DecisionCallee::Address {
            name: Some("files.test".to_owned()),
            address: Some(address.ip()),
            port,
        }
    );

    let (guest, code) = egress.socks("files.test", port);
    assert_eq!(code, 0);
    converse(&guest, &accept(&listener));
    let (guest, code) = egress.socks("127.0.0.1", port);
    assert_eq!(code, 0);
    converse(&guest, &accept(&listener));
    let (guest, code) = egress.socks("::ffff:127.0.0.1", port);
    assert_eq!(code, 0, "the same address in disguise is the same address");
    converse(&guest, &accept(&listener));
    assert_eq!(egress.stand.proxy.report().egress_allowed, 4);
}

/// Ports of a host where one VM has two towards each destination, also after connections that it has ended, as beyond loopback.
const EIGHT_PORTS: LocalPorts = LocalPorts {
    count: 8,
    reuses_loopback: false,
};

#[test]
fn connections_that_a_guest_has_ended_count_for_its_share_of_the_hosts_ports() {
    let (listener, address) = tcp_listener();
    let egress = Egress::with_ports(vec![allow(to_loopback())], EIGHT_PORTS);
    let (host, port) = ("127.0.0.1", address.port());
    // Those that the server ends first leave it the port.
    for _ in 0..3 {
        let (guest, code) = egress.socks(host, port);
        assert_eq!(code, 0);
        let server = accept(&listener);
        server.shutdown(Shutdown::Write).expect("half-closed");
        assert_eq!(read_all(&guest), b"");
        drop(guest);
        assert_eq!(read_all(&server), b"");
    }
    for _ in 0..2 {
        let (guest, code) = egress.socks(host, port);
        assert_eq!(code, 0);
        converse(&guest, &accept(&listener));
    }
    let (_guest, code) = egress.socks(host, port);
    assert_eq!(code, 1);
    let (_guest, head) = egress.http(&address.to_string());
    assert!(
        head.starts_with("HTTP/1.1 503 this VM has as many"),
        "{head}"
    );
    let mut records = egress.stand.audit.iter();
    let failed = records.find(|record| record.decision != AuditDecision::Allowed);
    let failed = failed.expect("a record");
    assert_eq!(failed.decision, AuditDecision::Failed);
    assert!(failed.reason.expect("words").contains("in the last minute"));
    // Other destinations, and other VMs, have their own.
    let (listener, address) = tcp_listener();
    assert_eq!(egress.socks(host, address.port()).1, 0);
    drop(accept(&listener));
}

#[test]
fn a_plain_request_is_passed_on_to_its_server() {
    let (listener, address) = tcp_listener();
    let egress = Egress::new(vec![allow(to_loopback())]);
    let guest = egress.connect();
    write(
        &guest,
        format!("POST http://{address}/upload HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody")
            .as_bytes(),
    );
    let server = accept(&listener);
    let expected = format!(
        "POST /upload HTTP/1.1\r\nHost: {address}\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody"
    );
    assert_eq!(read_some(&server, expected.len()), expected.as_bytes());
    write(&server, b"HTTP/1.1 204 No Content\r\n\r\n");
    drop(server);
    assert_eq!(read_all(&guest), b"HTTP/1.1 204 No Content\r\n\r\n");
}

#[test]
fn an_http_1_0_client_is_not_answered_in_chunks() {
    let (listener, address) = tcp_listener();
    let egress = Egress::new(vec![allow(to_loopback())]);
    for (version, body) in [
        ("1.0", "Connection: close\r\n\r\nhello"),
        (
            "1.1",
            "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        ),
    ] {
        let guest = egress.connect();
        write(
            &guest,
            format!("GET http://{address}/ HTTP/{version}\r\n\r\n").as_bytes(),
        );
        // A server as RFC 9112, section 6.1, has it: chunks only for clients that announce them.
        let server = accept(&listener);
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.extend(read_some(&server, 1));
        }
        let knows_chunks = head.starts_with(b"GET / HTTP/1.1\r\n");
        let answer = match knows_chunks {
            true => "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            false => "Connection: close\r\n\r\nhello",
        };
        write(&server, format!("HTTP/1.1 200 OK\r\n{answer}").as_bytes());
        drop(server);
        let heard = String::from_utf8(read_all(&guest)).expect("text");
        assert_eq!(heard, format!("HTTP/1.1 200 OK\r\n{body}"));
    }
    let guest = egress.connect();
    let request = format!("POST http://{address}/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n");
    write(&guest, request.as_bytes());
    assert!(read_head(&guest).starts_with("HTTP/1.1 400 "));
}

#[test]
fn what_is_said_behind_a_request_is_not_lost() {
    let (listener, address) = tcp_listener();
    let egress = Egress::new(vec![allow(to_loopback())]);
    let guest = egress.connect();
    write(
        &guest,
        format!("CONNECT {address} HTTP/1.1\r\n\r\nearly").as_bytes(),
    );
    let server = accept(&listener);
    assert_eq!(read_some(&server, 5), b"early");
    let guest = egress.connect();
    let request = socks_request("127.0.0.1", address.port());
    write(&guest, &[&[5, 1, 0][..], &request, b"early"].concat());
    let server = accept(&listener);
    assert_eq!(read_some(&server, 5), b"early");
    assert_eq!(read_some(&guest, 12), [5, 0, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn each_way_to_fail_has_its_own_answer() {
    let (closed, _keep) = closed_port();
    let nowhere =
        CalleePattern::Network(IpNet::new([255, 255, 255, 255].into(), 32).expect("a network"));
    let deny = Rule {
        verdict: Verdict::Deny,
        label: "not \"this\"".to_owned(),
        is_named: true,
        ..allow(to_name("denied.test"))
    };
    let egress = Egress::new(vec![
        deny,
        allow(to_name("inside.test")),
        allow(to_name("unknown.test")),
        allow(nowhere),
        named("closed.test", closed.port()),
        Rule {
            ports: vec![closed.port().into()..=closed.port().into()],
            ..allow(to_loopback())
        },
    ]);
    egress.script.answer("inside.test", &[&["10.0.0.1", "::1"]]);
    egress.script.answer("denied.test", &[&["1.1.1.1"]]);
    egress.script.answer("closed.test", &[&["127.0.0.1"]]);
    for (host, port, code, status, words, decision) in [
        (
            "denied.test",
            443,
            2,
            403,
            "denied by rule \"not \"this\"\"",
            AuditDecision::Denied,
        ),
        (
            "other.test",
            443,
            2,
            403,
            "no rule allows it",
            AuditDecision::Denied,
        ),
        (
            "127.0.0.1",
            1,
            2,
            403,
            "no rule allows it",
            AuditDecision::Denied,
        ),
        (
            "inside.test",
            443,
            2,
            403,
            "leads to 10.0.0.1",
            AuditDecision::Denied,
        ),
        (
            "unknown.test",
            443,
            4,
            502,
            "this name does not exist",
            AuditDecision::Failed,
        ),
        (
            "255.255.255.255",
            443,
            3,
            502,
            "no route",
            AuditDecision::Failed,
        ),
        (
            "closed.test",
            closed.port(),
            5,
            502,
            "refused",
            AuditDecision::Failed,
        ),
    ] {
        let (guest, found) = egress.socks(host, port);
        assert_eq!(found, code, "{host}");
        assert_eq!(read_all(&guest), b"");
        let (guest, head) = egress.http(&format!("{host}:{port}"));
        let line = head.lines().next().expect("a line");
        assert!(
            line.starts_with(&format!("HTTP/1.1 {status} ")) && line.contains(words),
            "{host}: {line}"
        );
        assert!(
            head.contains("\r\nProxy-Status: ringdown; error="),
            "{head}"
        );
        assert!(String::from_utf8_lossy(&read_all(&guest)).contains(words));
        for _ in 0..2 {
            let record = egress.stand.audit.recv_timeout(PATIENCE).expect("a record");
            assert_eq!(record.decision, decision, "{host}");
            assert!(record.reason.expect("a reason").contains(words), "{host}");
        }
    }
    // A name that nothing allows is not even looked up: DNS would carry it out of the setup.
    let asked = egress.script.asked.lock().expect("not poisoned");
    assert!(
        !asked
            .iter()
            .any(|name| name.starts_with("other.test") || name.starts_with("denied.test")),
        "{asked:?}"
    );
    // What is looked up is what was judged: no search list of the host's makes another name of it.
    assert!(
        !asked.is_empty() && asked.iter().all(|name| name.ends_with('.')),
        "{asked:?}"
    );
}

#[test]
fn a_server_that_says_nothing_is_told_apart_from_one_that_refuses() {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )
    .expect("a socket");
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
    rustix::net::listen(&socket, 0).expect("listening");
    let address = rustix::net::getsockname(&socket).expect("an address");
    let address = SocketAddr::try_from(address).expect("an address");
    let egress = Egress::new(vec![allow(to_loopback())]);
    let mut offer = service(ServiceTarget::Egress);
    offer.connect_timeout = std::time::Duration::from_millis(50);
    egress.stand.offer(offer);
    // Its backlog of 0 takes a connection or two, which are never accepted.
    let mut held = Vec::new();
    let code = loop {
        match egress.socks("127.0.0.1", address.port()) {
            (guest, 0) => held.push(guest),
            (_, code) => break code,
        }
        assert!(held.len() < 100, "a backlog of 0 is full at some time");
    };
    assert_eq!(code, 6);
    let (_, head) = egress.http(&address.to_string());
    assert!(head.starts_with("HTTP/1.1 504 "), "{head}");
}

#[test]
fn a_name_that_leads_elsewhere_after_it_was_checked_does_not_get_past() {
    // The attacker's name leads to a public address when it is checked, and inside ever after.
    let (inside, address) = tcp_listener();
    let port = address.port();
    let egress = Egress::new(vec![named("rebinding.test", port)]);
    egress
        .script
        .answer("rebinding.test", &[&["255.255.255.255"], &["127.0.0.1"]]);
    // It is special, too, so that nothing is called at all by this test.
    assert_eq!(egress.socks("rebinding.test", port).1, 2);
    assert_eq!(
        egress.script.asked.lock().expect("not poisoned").len(),
        1,
        "asked once"
    );
    // The second time it leads inside, and is refused for that.
    assert_eq!(egress.socks("rebinding.test", port).1, 2);
    // Among others, too; and in each disguise.
    for inside in [
        "127.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "0.0.0.0",
        "::",
        "169.254.169.254",
    ] {
        egress.script.answer("rebinding.test", &[&[inside]]);
        assert_eq!(egress.socks("rebinding.test", port).1, 2, "{inside}");
    }
    inside.set_nonblocking(true).expect("an option");
    assert!(inside.accept().is_err(), "there was no call");
}

#[test]
fn the_address_that_was_checked_is_the_one_that_is_called() {
    // Two servers of one port. The name leads to the first when it is looked up, and to the second if it were looked up again.
    let (first, address) = tcp_listener();
    let port = address.port();
    let second = TcpListener::bind(("127.0.0.2", port)).expect("a listener");
    let only_first =
        CalleePattern::Network(IpNet::new([127, 0, 0, 1].into(), 32).expect("a network"));
    let egress = Egress::new(vec![named("rebinding.test", port), allow(only_first)]);
    egress
        .script
        .answer("rebinding.test", &[&["127.0.0.1"], &["127.0.0.2"]]);
    let (guest, code) = egress.socks("rebinding.test", port);
    assert_eq!(code, 0);
    converse(&guest, &accept(&first));
    // Of several addresses only those that pass are called, wherever they stand.
    egress
        .script
        .answer("rebinding.test", &[&["127.0.0.2", "127.0.0.1"]]);
    let (guest, code) = egress.socks("rebinding.test", port);
    assert_eq!(code, 0);
    converse(&guest, &accept(&first));
    second.set_nonblocking(true).expect("an option");
    assert!(second.accept().is_err(), "there was no call");
}

#[test]
fn a_rule_has_as_many_circuits_as_it_may_and_no_more() {
    let (listener, address) = tcp_listener();
    let limited = Rule {
        limits: RuleLimits {
            circuits: Some(2),
            ..Default::default()
        },
        ..allow(to_loopback())
    };
    let egress = Egress::new(vec![limited.clone()]);
    let to = address.to_string();
    let (first, _) = egress.http(&to);
    let (_second, head) = egress.http(&to);
    assert!(head.starts_with("HTTP/1.1 200 "));
    let (_, head) = egress.http(&to);
    assert!(
        head.starts_with("HTTP/1.1 503 denied: rule \"the rule\" has as many circuits"),
        "{head}"
    );
    // A reload keeps the count of a rule that is still there.
    egress.stand.set_rules(vec![limited], &[], false);
    assert!(egress.http(&to).1.starts_with("HTTP/1.1 503 "));
    drop(first);
    drop(accept(&listener));
    until("there is room again", || {
        egress.http(&to).1.starts_with("HTTP/1.1 200 ")
    });
}

#[test]
fn a_rule_allows_so_many_calls_a_second() {
    let (_listener, address) = tcp_listener();
    let egress = Egress::new(vec![Rule {
        limits: RuleLimits {
            connects_per_second: Some(0),
            ..Default::default()
        },
        ..allow(to_loopback())
    }]);
    let (_, head) = egress.http(&address.to_string());
    assert!(head.starts_with("HTTP/1.1 429 "), "{head}");
    assert_eq!(egress.socks("127.0.0.1", address.port()).1, 1);
}

#[test]
fn a_limit_of_bytes_loses_nothing() {
    let (listener, address) = tcp_listener();
    let egress = Egress::new(vec![Rule {
        limits: RuleLimits {
            bytes_per_second: Some(1_000_000),
            ..Default::default()
        },
        ..allow(to_loopback())
    }]);
    let (guest, code) = egress.socks("127.0.0.1", address.port());
    assert_eq!(code, 0);
    let server = accept(&listener);
    let sent: Vec<u8> = (0..200_000_u32).map(|index| index as u8).collect();
    let writer = {
        let sent = sent.clone();
        std::thread::spawn(move || {
            write(&guest, &sent);
            guest.shutdown(Shutdown::Write).expect("half-closed");
            guest
        })
    };
    assert_eq!(read_all(&server), sent);
    writer.join().expect("written");
}

#[test]
fn an_enforced_policy_ends_what_it_does_not_allow() {
    let egress = Egress::new(vec![allow(to_loopback())]);
    let (listener, address) = server_of(&egress, "a.test");
    let (guest, code) = egress.socks("127.0.0.1", address.port());
    assert_eq!(code, 0);
    let server = accept(&listener);
    egress.stand.set_rules(Vec::new(), &[], false);
    let same = vec![allow(to_loopback())];
    egress.stand.set_rules(same, &[], true);
    write(&guest, b"still there");
    assert_eq!(read_some(&server, 11), b"still there");
    egress.stand.set_rules(Vec::new(), &[], true);
    let mut end = [0; 1];
    let got = std::io::Read::read(&mut &server, &mut end);
    assert!(
        matches!(&got, Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset),
        "{got:?}"
    );
    assert_eq!(read_all(&guest), b"");
    assert_eq!(egress.socks("127.0.0.1", address.port()).1, 2);
}

#[test]
fn a_connection_that_breaks_on_one_side_is_broken_on_the_other() {
    let (listener, address) = tcp_listener();
    let egress = Egress::new(vec![allow(to_loopback())]);
    let reach = || {
        let called = Called::Service(egress.id);
        let connected = egress.stand.call(called, SocketType::Stream);
        let connected = connected.expect("put through");
        let guest: UnixStream = blocking(connected.socket);
        let request = socks_request("127.0.0.1", address.port());
        write(&guest, &[&[5, 1, 0][..], &request].concat());
        assert_eq!(read_some(&guest, 12)[3], 0);
        let cut = connected.cut.expect("what says how it ends");
        (guest, cut, accept(&listener))
    };
    let (guest, cut, server) = reach();
    write(&server, b"half of");
    assert_eq!(read_some(&guest, 7), b"half of");
    rustix::net::sockopt::set_socket_linger(&server, Some(std::time::Duration::ZERO))
        .expect("an option");
    drop(server);
    assert_eq!(read_all(&guest), b"");
    assert!(cut.load(Ordering::Acquire), "the data plane is notified");

    let (guest, cut, server) = reach();
    write(&guest, b"half of");
    assert_eq!(read_some(&server, 7), b"half of");
    cut.store(true, Ordering::Release);
    drop(guest);
    let end = std::io::Read::read(&mut &server, &mut [0]).expect_err("no end");
    assert_eq!(end.kind(), std::io::ErrorKind::ConnectionReset);

    // A guest that has said all and closes: first the end, then, since what the server says is not taken, a reset.
    let (guest, _, server) = reach();
    drop(guest);
    assert_eq!(read_all(&server), b"");
    until("the server cannot send any more", || {
        std::io::Write::write(&mut &server, b"x").is_err()
    });
}

#[test]
fn a_redirection_makes_no_sense_here_and_says_so() {
    let redirect = policy::Redirect::Service {
        domain: "default".to_owned(),
        name: "registry".to_owned(),
    };
    let egress = Egress::new(vec![Rule {
        verdict: Verdict::Redirect(redirect),
        ..allow(CalleePattern::Name(NamePattern::Any))
    }]);
    let (_, head) = egress.http("a.test:443");
    assert!(
        head.starts_with("HTTP/1.1 403 ") && head.contains("redirects"),
        "{head}"
    );
}
