//! Calls that are not put through: each at once, each with its reason, and nothing left behind.

use std::sync::Arc;
use std::time::Duration;

use policy::LineId;
use wire::vsock::{HOST_CID, Header, Operation, SocketType};

use super::model::socket::State;
use super::model::{Answer, Call, Socket, World, reads, sleeps};
use crate::{Limits, Reason, Side, Switch};

/// A guest dials and is refused for this reason before any time passes.
fn assert_refused(world: &mut World, line: LineId, cid: u32, port: u32, reason: Reason) {
    let (before, start) = (world.reports.len(), world.now);
    let socket = world.connect_to(line, cid, port, sleeps());
    let counted = world.switch.lines[line.0 as usize].counters.ended[reason.index()];
    world.settle();
    assert!(!world.guest(line).sockets.contains_key(&socket));
    assert_eq!(world.reports[before..], [(line, port, reason)]);
    let counters = world.switch.lines[line.0 as usize].counters;
    assert_eq!(counters.ended[reason.index()], counted + 1);
    let time = world.now - start;
    assert!(time < Duration::from_millis(1), "a refusal does not wait");
    world.finish();
}

/// A program of the host dials and is refused for this reason before any time passes.
fn assert_host_refused(world: &mut World, line: LineId, port: u32, reason: Reason) {
    let start = world.now;
    let token = world.dial(line, port, SocketType::Stream, sleeps());
    world.settle();
    assert_eq!(world.programs[&token].call, Call::Rejected(reason));
    let time = world.now - start;
    assert!(time < Duration::from_millis(1), "a refusal does not wait");
    world.finish();
}

#[test]
fn nothing_listens_on_the_host() {
    let (mut world, lines) = World::of(1, Limits::default());
    assert_refused(&mut world, lines[0], HOST_CID, 80, Reason::NoListener);
}

#[test]
fn the_hosts_listener_has_another_type() {
    let (mut world, lines) = World::of(1, Limits::default());
    let answer = Answer::Refuse(Reason::WrongType);
    world.listeners.insert((lines[0], 80), answer);
    assert_refused(&mut world, lines[0], HOST_CID, 80, Reason::WrongType);
}

#[test]
fn the_hosts_listener_fails() {
    let (mut world, lines) = World::of(1, Limits::default());
    let answer = Answer::Refuse(Reason::HostFailed);
    world.listeners.insert((lines[0], 80), answer);
    assert_refused(&mut world, lines[0], HOST_CID, 80, Reason::HostFailed);
}

#[test]
fn nobody_has_the_identifier() {
    let (mut world, lines) = World::of(1, Limits::default());
    for cid in [0, 1, 77, u32::MAX] {
        assert_refused(&mut world, lines[0], cid, 80, Reason::UnknownCid);
    }
}

#[test]
fn no_rule_allows_it() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.switch.set_policy(Arc::default());
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, reads());
    assert_refused(&mut world, lines[0], 4, 80, Reason::Denied);
}

#[test]
fn nobody_may_call_itself() {
    let (mut world, lines) = World::of(1, Limits::default());
    world
        .guest(lines[0])
        .listen(80, SocketType::Stream, reads());
    assert_refused(&mut world, lines[0], 3, 80, Reason::Denied);
}

#[test]
fn the_called_vm_does_not_run() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.line_down(lines[1]);
    assert_refused(&mut world, lines[0], 4, 80, Reason::NotRunning);
    assert_host_refused(&mut world, lines[1], 80, Reason::NotRunning);
}

#[test]
fn nothing_listens_in_the_guest() {
    let (mut world, lines) = World::of(2, Limits::default());
    assert_refused(&mut world, lines[0], 4, 80, Reason::GuestRefused);
    assert_host_refused(&mut world, lines[0], 80, Reason::GuestRefused);
}

#[test]
fn a_removed_vm_is_unknown_to_the_host() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.remove_line(lines[1]);
    assert_host_refused(&mut world, lines[1], 80, Reason::UnknownCid);
    assert_refused(&mut world, lines[0], 4, 80, Reason::UnknownCid);
}

#[test]
fn the_guest_offers_no_messages() {
    let mut switch = Switch::new(Limits::default());
    let line = switch.add_line("old", 3).unwrap();
    let mut actions = Vec::new();
    let up = crate::Event::LineUp {
        line,
        seqpacket: false,
    };
    switch.handle(Duration::ZERO, up, &mut actions);
    let dial = crate::Event::HostDial {
        line,
        port: 80,
        socket_type: SocketType::SeqPacket,
        caller: crate::HostCaller::Published(crate::Outsider::default()),
        token: 9,
    };
    switch.handle(Duration::ZERO, dial, &mut actions);
    let refused = crate::Action::HostDialRefused {
        token: 9,
        reason: Reason::Unsupported,
    };
    assert_eq!(actions.last(), Some(&refused));
}

#[test]
fn the_other_guest_offers_no_messages() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.switch.lines[lines[1].0 as usize].seqpacket = false;
    let socket = Socket::new(Side::Caller, SocketType::SeqPacket, 65_536);
    let id = world
        .guest(lines[0])
        .connect(Duration::ZERO, socket, (4, 80), None);
    world.settle();
    assert!(!world.guest(lines[0]).sockets.contains_key(&id));
    assert_eq!(world.reasons(), [Reason::Unsupported]);
    world.finish();
}

#[test]
fn a_host_that_does_not_accept_in_time_has_a_full_backlog() {
    let (mut world, lines) = World::of(1, Limits::default());
    world.listeners.insert((lines[0], 80), Answer::Never);
    let socket = world.connect(lines[0], 80, sleeps());
    // The kernel would give up sooner than the switch does.
    world
        .guest(lines[0])
        .sockets
        .get_mut(&socket)
        .unwrap()
        .connect_by = None;
    let patience = Limits::default().handshake;
    world.advance(patience - Duration::from_millis(1));
    assert_eq!(
        world.guests[&lines[0]].socket(socket).state,
        State::Connecting
    );
    world.advance(Duration::from_millis(2));
    assert!(!world.guest(lines[0]).sockets.contains_key(&socket));
    assert_eq!(world.reasons(), [Reason::BacklogFull]);
    world.finish();
}

#[test]
fn a_guest_that_does_not_answer_in_time_is_told_that_it_is_too_late() {
    let (mut world, lines) = World::of(2, Limits::default());
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, reads());
    world.guest(lines[1]).paused = true;
    let token = world.dial(lines[1], 80, SocketType::Stream, sleeps());
    let socket = world.connect_to(lines[0], 4, 80, sleeps());
    world
        .guest(lines[0])
        .sockets
        .get_mut(&socket)
        .unwrap()
        .connect_by = None;
    world.advance(Limits::default().handshake);
    world.settle();
    assert_eq!(
        world.programs[&token].call,
        Call::Rejected(Reason::TimedOut)
    );
    assert!(!world.guest(lines[0]).sockets.contains_key(&socket));
    // It goes on, accepts what is no longer waited for, and is notified.
    world.guest(lines[1]).paused = false;
    world.finish();
}

#[test]
fn the_host_program_goes_while_the_guest_has_yet_to_answer() {
    for announced in [false, true] {
        let (mut world, lines) = World::of(1, Limits::default());
        world
            .guest(lines[0])
            .listen(80, SocketType::Stream, reads());
        world.guest(lines[0]).paused = true;
        let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
        if announced {
            world.settle();
        }
        world
            .programs
            .get_mut(&token)
            .unwrap()
            .close(&mut world.audit);
        world.settle();
        let circuits = world.switch.circuits.len();
        if announced {
            let operations = world.take_operations(lines[0]);
            let requested = (Operation::Request, 0);
            assert_eq!(operations, [requested, (Operation::Reset, 0)]);
        } else {
            assert_eq!(
                circuits, 0,
                "a guest that was never notified needs no notification of the end"
            );
            assert_eq!(world.take_operations(lines[0]), []);
        }
        assert_eq!(world.reasons(), [Reason::HostFailed]);
        world.finish();
    }
}

#[test]
fn a_caller_that_gives_up_was_not_refused() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.guest(lines[1]).paused = true;
    let header = Header {
        src_cid: 3,
        dst_cid: 4,
        src_port: 1,
        dst_port: 80,
        socket_type: 1,
        operation: Operation::Request as u16,
        ..Header::default()
    };
    world.inject(lines[0], header);
    world.pump(lines[1]);
    let operation = Operation::Reset as u16;
    world.inject(
        lines[0],
        Header {
            operation,
            ..header
        },
    );
    assert_eq!(world.reasons(), [Reason::PeerReset]);
    let expected = [(Operation::Request, 0), (Operation::Reset, 0)];
    assert_eq!(world.take_operations(lines[1]), expected);
    world.finish();
}

#[test]
fn a_called_guest_is_told_when_the_operator_ends_the_call() {
    let (mut world, lines) = World::of(1, Limits::default());
    world.guest(lines[0]).paused = true;
    let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
    world.pump(lines[0]);
    let circuit = world.programs[&token].circuit.unwrap();
    let reason = Reason::Operator;
    world.handle(crate::Event::Kill { circuit, reason });
    let expected = [(Operation::Request, 0), (Operation::Reset, 0)];
    assert_eq!(world.take_operations(lines[0]), expected);
    world.finish();
}
