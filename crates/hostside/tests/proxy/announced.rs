//! Calls to egress that were announced on another: they are answered when it is known what has become of them.

use std::os::unix::net::UnixStream;

use hostside::audit::AuditDecision;
use policy::{Rule, ServiceId};
use vsock::Reason;
use wire::destination::Destination;
use wire::socks::{Announcement, GREETING};

use crate::egress::Egress;
use crate::support::*;

/// The port that the announcement comes from, and that of the call.
const ANNOUNCER: u32 = 1000;
const CALLER: u32 = 5_000_000;

fn announce(stand: &Stand, id: ServiceId, from: u32, to: &str) -> (UnixStream, u8) {
    announce_as(stand, id, from, to, (ANNOUNCER, CALLER, true))
}

fn announce_as(
    stand: &Stand,
    id: ServiceId,
    from: u32,
    to: &str,
    (own_port, port, is_privileged): (u32, u32, bool),
) -> (UnixStream, u8) {
    let called = stand.begin_from(from, id).recv_timeout(PATIENCE);
    let guest: UnixStream = blocking(called.expect("an answer").expect("put through").socket);
    let announcement = Announcement {
        destination: Destination::parse(to).expect("a destination"),
        own_port,
        port,
        is_privileged,
    };
    write(&guest, &[&GREETING[..], &announcement.to_bytes()].concat());
    assert_eq!(read_some(&guest, 2), [5, 0]);
    let code = read_some(&guest, 10)[1];
    (guest, code)
}

fn egress(rules: Vec<Rule>) -> Egress {
    Egress::new(rules)
}

#[test]
fn a_call_is_put_through_where_it_was_announced_to_go_and_has_only_its_servers_bytes() {
    let (listener, address) = tcp_listener();
    let egress = egress(vec![allow(to_name("a.example")), allow(to_loopback())]);
    egress
        .script
        .answer("a.example", &[&[&address.ip().to_string()]]);
    let to = format!("a.example:{}", address.port());
    let (announcer, code) = announce(&egress.stand, egress.id, ANNOUNCER, &to);
    assert_eq!(code, 0);
    let called = egress.stand.begin_from(CALLER, egress.id);
    let guest: UnixStream = blocking(called.recv_timeout(PATIENCE).unwrap().unwrap().socket);
    let server = accept(&listener);
    assert_eq!(read_some(&announcer, 10)[1], 0);
    assert_eq!(read_all(&announcer), b"");
    write(&server, b"first");
    assert_eq!(read_some(&guest, 5), b"first");
    write(&guest, b"second");
    assert_eq!(read_some(&server, 6), b"second");
    let record = egress.stand.audit.recv_timeout(PATIENCE).unwrap();
    assert_eq!(record.decision, AuditDecision::Allowed);
    // The next call from that port is an ordinary one.
    let called = egress.stand.begin_from(CALLER, egress.id);
    let guest: UnixStream = blocking(called.recv_timeout(PATIENCE).unwrap().unwrap().socket);
    write(&guest, &GREETING);
    assert_eq!(read_some(&guest, 2), [5, 0]);
}

#[test]
fn a_call_that_is_refused_is_reset_and_the_announcer_learns_why() {
    let (closed, _kept) = closed_port();
    let egress = egress(vec![allow(to_name("a.example")), allow(to_loopback())]);
    egress
        .script
        .answer("a.example", &[&[&closed.ip().to_string()]]);
    let port = closed.port();
    for (name, reason, code) in [
        ("a.example", Reason::EgressFailed, 5),
        ("b.example", Reason::EgressDenied, 2),
    ] {
        let to = format!("{name}:{port}");
        let (announcer, accepted) = announce(&egress.stand, egress.id, ANNOUNCER, &to);
        assert_eq!(accepted, 0);
        let called = egress.stand.begin_from(CALLER, egress.id);
        let refused = called.recv_timeout(PATIENCE).unwrap();
        assert_eq!(refused.unwrap_err(), reason, "{name}");
        assert_eq!(read_some(&announcer, 10)[1], code, "{name}");
        assert!(egress.stand.audit.recv_timeout(PATIENCE).is_ok());
    }
}

#[test]
fn only_a_privileged_program_on_a_line_that_keeps_ports_may_announce() {
    let egress = egress(vec![]);
    // It says that it calls from another port than the one that is seen.
    for from in [ANNOUNCER + 1, CALLER] {
        let (_, code) = announce(&egress.stand, egress.id, from, "a.example:1");
        assert_eq!(code, 7);
    }
    // Where the line does not keep ports, each has this one.
    let (_, code) = announce_as(&egress.stand, egress.id, 0, "a.example:1", (0, 0, true));
    assert_eq!(code, 7);
    // An announcement is taken back by hanging up, and there is one for a port.
    let (announcer, code) = announce(&egress.stand, egress.id, ANNOUNCER, "a.example:1");
    assert_eq!(code, 0);
    let (_, code) = announce(&egress.stand, egress.id, ANNOUNCER, "b.example:1");
    assert_eq!(code, 1);
    drop(announcer);
    until("the announcement is taken back", || {
        let (_, code) = announce(&egress.stand, egress.id, ANNOUNCER, "c.example:1");
        code == 0
    });
}

/// What the next call from the announced port is: one that is asked where it is to go.
fn is_ordinary(egress: &Egress) -> bool {
    let called = egress.stand.begin_from(CALLER, egress.id);
    let Ok(connected) = called.recv_timeout(PATIENCE).expect("an answer") else {
        return false;
    };
    let guest: UnixStream = blocking(connected.socket);
    write(&guest, &GREETING);
    read_some(&guest, 2) == [5, 0]
}

/// Ordinary programs of the guest keep no privileged one, such as those of root in a run, from the service. One in a run of root's is an ordinary one, too.
#[test]
fn ordinary_programs_leave_room_for_announced_calls() {
    let egress = egress(vec![allow(to_name("a.example"))]);
    let begin = |port| {
        egress
            .stand
            .begin_from(port, egress.id)
            .recv_timeout(PATIENCE)
    };
    let mut held: Vec<_> = (2000..2019).map(begin).collect();
    assert!(held.iter().flatten().all(Result::is_ok));
    let refused = begin(2019).expect("an answer");
    assert_eq!(refused.err(), Some(Reason::ServiceShare));
    // What announces an ordinary program's call has the place of one, too.
    let ports = (ANNOUNCER, CALLER, false);
    let ordinary = || announce_as(&egress.stand, egress.id, ANNOUNCER, "a.example:1", ports);
    assert_eq!(ordinary().1, 3);
    drop(held.pop());
    let mut announcers = Vec::new();
    until("there is a place", || {
        let (announcer, code) = ordinary();
        announcers.push(announcer);
        code == 0
    });
    let announcer = announcers.pop().expect("the last one");
    let called = egress.stand.begin_from(CALLER, egress.id);
    let refused = called.recv_timeout(PATIENCE).expect("an answer");
    assert_eq!(refused.err(), Some(Reason::ServiceShare));
    assert_eq!(read_some(&announcer, 10)[1], 1);
    let (announcer, code) = announce(&egress.stand, egress.id, ANNOUNCER, "a.example:1");
    assert_eq!(code, 0);
    let called = egress.stand.begin_from(CALLER, egress.id);
    // It is let in, and no such name is known.
    assert_ne!(
        called.recv_timeout(PATIENCE).expect("an answer").err(),
        Some(Reason::ServiceShare)
    );
    assert_ne!(read_some(&announcer, 10)[1], 1);
}

/// A port is another program's as soon as its call is refused, and that program goes where it says.
#[test]
fn an_announced_call_that_is_refused_leads_no_later_one() {
    let egress = egress(vec![allow(to_name("a.example"))]);
    let (announcer, code) = announce(&egress.stand, egress.id, ANNOUNCER, "a.example:1");
    assert_eq!(code, 0);
    // The VM has all connections that it may have of the service: a quarter of 100.
    let privileged = |port| {
        egress
            .stand
            .begin_from(port, egress.id)
            .recv_timeout(PATIENCE)
    };
    let held: Vec<_> = (1..25).map(privileged).collect();
    assert!(held.iter().flatten().all(Result::is_ok));
    let called = egress.stand.begin_from(CALLER, egress.id);
    let refused = called.recv_timeout(PATIENCE).unwrap();
    assert_eq!(refused.unwrap_err(), Reason::ServiceShare);
    assert_eq!(read_some(&announcer, 10)[1], 1);
    drop(held);
    until("the next call goes its own way", || is_ordinary(&egress));
    // The data plane has refused it itself.
    let (announcer, code) = announce(&egress.stand, egress.id, ANNOUNCER, "a.example:1");
    assert_eq!(code, 0);
    egress.stand.proxy.refusals()(&web().full_name(), CALLER);
    assert_eq!(read_some(&announcer, 10)[1], 1);
    assert!(is_ordinary(&egress));
}
