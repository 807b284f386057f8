//! What a policy, groups or services that change do to calls that were made before.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use config::{Hosts, ListedAddress, ServiceTarget};
use device::{Called, Hold};
use hostside::offers::Groups;
use hostside::proxy::{Lookup, Resolver};
use policy::{CallerPattern, Policy, Rule, VmPattern};
use wire::vsock::SocketType;

use crate::egress::{Egress, read_head, socks_request};
use crate::support::*;

/// Lets the VMs of a group reach the host's own addresses.
fn group_out(group: &str) -> Rule {
    Rule {
        from: vec![CallerPattern::Vms(VmPattern::Group {
            domain: "default".to_owned(),
            name: group.to_owned(),
        })],
        ..allow(to_loopback())
    }
}

#[test]
fn who_has_left_a_group_loses_what_the_group_may_reach() {
    let egress = Egress::new(Vec::new());
    let set = |groups: &[(&str, &str)], enforce| {
        egress
            .stand
            .set_rules(vec![group_out("ci")], groups, enforce);
    };
    set(&[("web", "ci")], false);
    let (listener, address) = tcp_listener();
    let (guest, code) = egress.socks("127.0.0.1", address.port());
    assert_eq!(code, 0);
    let server = accept(&listener);
    // Taken while it is in the group, and silent.
    let waiting = egress.connect();
    set(&[("web", "ci")], true);
    write(&guest, b"still there");
    assert_eq!(read_some(&server, 11), b"still there");
    set(&[("web", "other")], true);
    let got = std::io::Read::read(&mut &server, &mut [0; 1]);
    assert!(
        matches!(&got, Err(error) if error.kind() == ErrorKind::ConnectionReset),
        "{got:?}"
    );
    assert_eq!(read_all(&guest), b"");
    write(&waiting, &[5, 1, 0]);
    assert_eq!(read_some(&waiting, 2), [5, 0]);
    write(&waiting, &socks_request("127.0.0.1", address.port()));
    assert_eq!(read_some(&waiting, 10)[1], 2, "not allowed");
}

#[test]
fn a_call_from_before_a_reload_gets_no_more_than_both_configurations_allow() {
    let (_listener, address) = tcp_listener();
    let everything = || vec![allow(to_loopback())];
    for (before, after) in [(everything(), Vec::new()), (Vec::new(), everything())] {
        let egress = Egress::new(before);
        // Egress itself was allowed by the first, and may not be by the second.
        let guest = egress.connect();
        egress.stand.set_rules(after, &[], false);
        write(
            &guest,
            format!("CONNECT {address} HTTP/1.1\r\n\r\n").as_bytes(),
        );
        let head = read_head(&guest);
        assert!(
            head.starts_with("HTTP/1.1 403 denied: no rule allows it"),
            "{head}"
        );
    }
}

#[test]
fn connections_keep_no_policy_that_is_not_in_force_any_more() {
    let egress = Egress::new(Vec::new());
    let stand = &egress.stand;
    let set = || {
        let policy = Arc::new(Policy::new(vec![allow(to_loopback())]));
        let weak = Arc::downgrade(&policy);
        let (hosts, groups) = (Hosts::default(), Groups::default());
        stand.proxy.set_policy(policy, hosts, groups, true);
        weak
    };
    let called = set();
    let waiting = egress.connect();
    // Both are asked about the place that is named now.
    let named = set();
    let (listener, address) = tcp_listener();
    write(
        &waiting,
        format!("CONNECT {address} HTTP/1.1\r\n\r\n").as_bytes(),
    );
    assert!(read_head(&waiting).starts_with("HTTP/1.1 200"));
    let server = accept(&listener);
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    udp.set_read_timeout(Some(PATIENCE)).unwrap();
    let id = stand.offer(service(ServiceTarget::Udp(
        udp.local_addr().unwrap().to_string(),
    )));
    let session = stand
        .call(Called::Service(id), SocketType::SeqPacket)
        .expect("put through");
    set();
    let deadline = Instant::now() + PATIENCE;
    for old in [called, named] {
        while old.strong_count() > 0 {
            assert!(Instant::now() < deadline, "a policy is kept");
            std::thread::yield_now();
        }
    }
    write(&waiting, b"goes on");
    assert_eq!(read_some(&server, 7), b"goes on");
    let flags = rustix::net::SendFlags::empty();
    rustix::net::send(&session.socket, b"so does this", flags).expect("sent");
    let mut datagram = [0; 20];
    assert_eq!(udp.recv(&mut datagram).expect("a datagram"), 12);
}

/// A resolver that says what it was asked, and answers with 127.0.0.1 on request.
struct Slow {
    asked: Mutex<Sender<()>>,
    go_on: tokio::sync::Semaphore,
}

impl Resolver for Slow {
    fn lookup<'a>(&'a self, _name: &'a str, turn: Option<Hold>) -> Lookup<'a> {
        Box::pin(async move {
            let _turn = turn;
            // The test waits for it.
            let _ = self.asked.lock().expect("not poisoned").send(());
            let _permit = self.go_on.acquire().await;
            Ok(vec![[127, 0, 0, 1].into()])
        })
    }
}

#[test]
fn nothing_is_sent_for_a_call_that_was_pending_when_a_policy_ended_it() {
    let (asked, is_asked): (_, Receiver<()>) = channel();
    let resolver = Arc::new(Slow {
        asked: Mutex::new(asked),
        go_on: tokio::sync::Semaphore::new(0),
    });
    let rules = || vec![allow(to_loopback()), allow(to_name("a.test"))];
    let stand = Stand::with(Policy::new(rules()), resolver.clone());
    let id = stand.offer(service(ServiceTarget::Egress));
    let (listener, address) = tcp_listener();
    let ask = || {
        let (guest, _) = stand.stream(id).expect("put through");
        let port = address.port();
        let request = format!("CONNECT a.test:{port} HTTP/1.1\r\n\r\nearly");
        write(&guest, request.as_bytes());
        is_asked.recv_timeout(PATIENCE).expect("a question");
        guest
    };
    let guest = ask();
    stand.set_rules(vec![allow(to_name("a.test"))], &[], true);
    resolver.go_on.add_permits(100);
    let head = read_head(&guest);
    assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    // It may have been connected to, and nothing more.
    let server = accept(&listener);
    let got = std::io::Read::read(&mut &server, &mut [0; 1]);
    assert!(!matches!(got, Ok(1..)), "{got:?}");
    // One that is allowed by both is not held up.
    stand.set_rules(rules(), &[], true);
    let guest = ask();
    stand.set_rules(rules(), &[], true);
    assert!(read_head(&guest).starts_with("HTTP/1.1 200 "));
    assert_eq!(read_some(&accept(&listener), 5), b"early");
}

#[test]
fn a_call_is_put_through_to_what_was_offered_when_it_was_made() {
    let directory = tempfile::tempdir().expect("a directory");
    let server = |name: &str| {
        let path = directory.path().join(name);
        let listener = UnixListener::bind(&path).expect("a listener");
        listener.set_nonblocking(true).expect("an option");
        (listener, service(ServiceTarget::Unix(path)))
    };
    let ((_public, to_public), (secret, to_secret)) = (server("public"), server("secret"));
    let stand = Stand::new();
    for _ in 0..50 {
        let called = Called::Service(stand.offer(to_public.clone()));
        let answer = stand.begin(&web(), called, SocketType::Stream, None);
        // Even under the same number.
        stand.offer(to_secret.clone());
        assert!(answer().is_ok());
        assert!(secret.accept().is_err(), "there was no call");
    }
}

#[test]
fn a_call_goes_to_the_address_that_was_listed_when_it_was_made() {
    let stand = Stand::new();
    let (_listener, address) = tcp_listener();
    let set_hosts = |addresses: Vec<ListedAddress>| {
        let hosts = Hosts::from_iter([("server.test".to_owned(), addresses)]);
        let groups = Groups::default();
        stand.proxy.set_policy(Arc::default(), hosts, groups, false);
    };
    let listed = ListedAddress {
        address: address.ip(),
        port: None,
    };
    let server = format!("server.test:{}", address.port());
    let id = stand.offer(service(ServiceTarget::Tcp(server)));
    for _ in 0..50 {
        set_hosts(vec![listed]);
        let answer = stand.begin(&web(), Called::Service(id), SocketType::Stream, None);
        set_hosts(Vec::new());
        assert_eq!(answer().err(), None);
    }
}
