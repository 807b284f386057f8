//! Lines that come and go while circuits are open.

use std::time::Duration;

use policy::LineId;
use wire::vsock::{Header, Operation, SocketType};

use super::model::{After, Call, Plan, Socket, World, reads, sends, sleeps};
use crate::{Event, Limits, Reason, Side};

fn sends_and_closes(bytes: u64) -> Plan {
    Plan {
        after: After::Close,
        ..sends(bytes)
    }
}

/// A guest that has sent more than the host's program has taken.
fn with_data_kept(plan: Plan) -> (World, Vec<LineId>) {
    let (mut world, lines) = World::of(2, Limits::default());
    world.listen_host(lines[0], 80, sleeps());
    world.connect(lines[0], 80, plan);
    world.settle();
    assert!(world.switch.circuits().next().unwrap().caller.kept_bytes > 0);
    (world, lines)
}

fn read_all(world: &mut World) {
    for program in world.programs.values_mut() {
        program.plan.reads = true;
    }
    world.settle();
}

#[test]
fn what_a_lost_guest_had_finished_is_still_delivered() {
    let (mut world, lines) = with_data_kept(sends_and_closes(262_144));
    world.line_down(lines[0]);
    read_all(&mut world);
    assert_eq!(world.programs[&1].read, 262_144);
    assert_eq!(world.programs[&1].call, Call::Closed { reset: false });
    assert_eq!(world.reasons(), []);
    world.finish();
}

#[test]
fn what_a_lost_guest_had_not_finished_is_cut_off_at_once() {
    let endless = Plan {
        left: 262_144,
        ..sleeps()
    };
    let (mut world, lines) = with_data_kept(endless);
    world.line_down(lines[0]);
    assert_eq!(world.programs[&1].call, Call::Closed { reset: true });
    assert_eq!(world.reasons(), [Reason::LineDown]);
    assert!(world.switch.circuits.is_empty());
    world.finish();
}

#[test]
fn a_guest_that_boots_again_knows_of_no_circuit() {
    let (mut world, lines) = World::of(3, Limits::default());
    for line in &lines {
        world.guest(*line).listen(80, SocketType::Stream, sleeps());
        world.listen_host(*line, 80, sleeps());
    }
    world.connect(lines[0], 80, sleeps());
    world.connect_to(lines[0], 4, 80, sleeps());
    world.connect_to(lines[1], 3, 80, sleeps());
    world.connect_to(lines[1], 5, 80, sleeps());
    world.dial(lines[0], 80, SocketType::Stream, sleeps());
    world.settle();
    assert_eq!(world.switch.circuits.len(), 5);
    world.line_up(lines[0]);
    world.settle();
    assert_eq!(world.switch.circuits.len(), 1, "others are not concerned");
    assert_eq!(world.reasons(), [Reason::LineDown; 4]);
    // The same ports again, at once.
    let socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
    let now = world.now;
    let id = world
        .guest(lines[0])
        .connect(now, socket, (2, 80), Some(1025));
    world.settle();
    assert!(world.is_established(lines[0], id));
    world.finish();
}

#[test]
fn a_removed_line_drains_and_its_number_is_free_at_once() {
    let (mut world, lines) = with_data_kept(sends_and_closes(262_144));
    world.remove_line(lines[0]);
    assert_eq!(world.switch.circuits.len(), 1);
    let line = world.add_guest(0);
    assert_eq!(line, lines[0], "numbers are used again");
    assert_eq!(world.switch.lines[line.0 as usize].circuits, 0);
    assert_eq!(world.switch.lines[line.0 as usize].granted_bytes, 0);
    read_all(&mut world);
    assert_eq!(world.programs[&1].read, 262_144);
    assert_eq!(world.programs[&1].call, Call::Closed { reset: false });
    world.finish();
}

#[test]
fn a_removed_line_drains_into_another_guest() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.guest(lines[1]).ring = 8;
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, reads());
    world.connect_to(lines[0], 4, 80, sends_and_closes(200_000));
    world.round();
    world.round();
    world.guest(lines[1]).paused = true;
    world.settle();
    assert!(world.switch.circuits().next().unwrap().caller.kept_bytes > 0);
    world.remove_line(lines[0]);
    world.guest(lines[1]).paused = false;
    world.finish();
    assert_eq!(world.totals.bytes, 200_000);
}

#[test]
fn an_unknown_line_cannot_be_removed() {
    let (mut world, lines) = World::of(1, Limits::default());
    let mut actions = Vec::new();
    world
        .switch
        .remove_line(Duration::ZERO, LineId(77), &mut actions);
    assert_eq!(actions, []);
    world.remove_line(lines[0]);
    world
        .switch
        .remove_line(Duration::ZERO, lines[0], &mut actions);
    assert_eq!(actions, []);
}

#[test]
fn events_of_lines_and_circuits_that_are_gone_change_nothing() {
    use crate::{CircuitId, Event, Sent, Switch};
    let mut switch = Switch::new(Limits::default());
    let (line, circuit) = (
        LineId(3),
        CircuitId {
            index: 0,
            generation: 0,
        },
    );
    let events = [
        Event::LineUp {
            line,
            seqpacket: true,
        },
        Event::LineDown { line },
        Event::Packet {
            line,
            header: Header::default(),
        },
        Event::HostDialed {
            circuit,
            result: Ok(()),
        },
        Event::HostReadable { circuit },
        Event::HostDrained { circuit },
        Event::HostStored { circuit, len: 1 },
        Event::HostFinished { circuit },
        Event::HostRefused { circuit },
        Event::HostGone { circuit },
        Event::Delivered { circuit, len: 1 },
        Event::Kill {
            circuit,
            reason: Reason::Operator,
        },
        Event::Tick,
    ];
    let mut actions = Vec::new();
    for event in events {
        switch.handle(Duration::ZERO, event, &mut actions);
    }
    let sent = Sent {
        circuit,
        from: Side::Caller,
        len: 1,
        straight: 0,
        packets: 1,
    };
    switch.transmitted(Duration::ZERO, sent, &mut actions);
    assert_eq!(switch.next_for(Duration::ZERO, line, &mut actions), None);
    assert_eq!(actions, []);
}

#[test]
fn ports_are_free_again_while_the_host_still_drains() {
    let (mut world, lines) = with_data_kept(sends_and_closes(262_144));
    world.advance(Duration::from_secs(9));
    assert!(world.guest(lines[0]).sockets.is_empty());
    let socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
    let now = world.now;
    let id = world
        .guest(lines[0])
        .connect(now, socket, (2, 80), Some(1025));
    world.settle();
    assert!(world.is_established(lines[0], id));
    assert_eq!(world.switch.circuits.len(), 2);
    read_all(&mut world);
    assert_eq!(world.programs[&1].read, 262_144);
    world.finish();
}

#[test]
fn ports_are_in_use_while_another_guest_still_drains() {
    // Found by reading: the new circuit took the old one's place in the table, and the called guest's announcements
    // for the old one were taken for lies about the new one.
    let (mut world, lines) = World::of(2, Limits::default());
    world.guest(lines[1]).ring = 8;
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, reads());
    world.connect_to(lines[0], 4, 80, sends_and_closes(200_000));
    world.round();
    world.round();
    world.guest(lines[1]).paused = true;
    world.advance(Duration::from_secs(9));
    assert!(world.guest(lines[0]).sockets.is_empty());
    let again = |world: &mut World| {
        let socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
        let now = world.now;
        let id = world
            .guest(lines[0])
            .connect(now, socket, (4, 80), Some(1025));
        world.settle();
        world.is_established(lines[0], id)
    };
    assert!(!again(&mut world));
    assert_eq!(world.reasons(), [Reason::PortsInUse]);
    world.guest(lines[1]).paused = false;
    world.settle();
    assert!(again(&mut world), "it is over: the ports are free");
    world.finish();
    assert_eq!(world.totals.bytes, 200_000);
}

#[test]
fn a_second_request_replaces_the_circuit_that_the_guest_has_forgotten() {
    let (mut world, lines) = World::of(1, Limits::default());
    world.listen_host(lines[0], 80, sleeps());
    let header = Header {
        src_cid: 3,
        dst_cid: 2,
        src_port: 1025,
        dst_port: 80,
        socket_type: 1,
        operation: Operation::Request as u16,
        buf_alloc: 1000,
        ..Header::default()
    };
    world.inject(lines[0], header);
    world.settle();
    let operation = Operation::Data as u16;
    world.inject(
        lines[0],
        Header {
            operation,
            len: 1,
            ..header
        },
    );
    world.inject(lines[0], header);
    assert_eq!(world.programs[&1].call, Call::Closed { reset: true });
    assert_eq!(world.programs[&2].call, Call::Open);
    assert_eq!(world.switch.circuits.len(), 1);
    world.finish();
}

#[test]
fn a_reset_for_an_earlier_packet_does_not_end_a_new_call() {
    let (mut world, lines) = World::of(1, Limits::default());
    world.listen_host(lines[0], 80, sleeps());
    let stray = Header {
        src_cid: 3,
        dst_cid: 2,
        src_port: 1025,
        dst_port: 80,
        socket_type: 1,
        operation: Operation::CreditUpdate as u16,
        ..Header::default()
    };
    world.inject(lines[0], stray);
    let operation = Operation::Request as u16;
    world.inject(lines[0], Header { operation, ..stray });
    assert_eq!(world.take_operations(lines[0]), [(Operation::Response, 0)]);
    world.finish();
}

#[test]
fn a_line_that_takes_nothing_collects_nothing() {
    // Found by reading: the round kept an entry for every circuit that was over before its turn came.
    let (mut world, lines) = World::of(1, Limits::default());
    world.guest(lines[0]).ring = 0;
    for _ in 0..1000 {
        let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
        world
            .programs
            .get_mut(&token)
            .unwrap()
            .close(&mut world.audit);
        world.serve_program(token);
        world.programs.clear();
        world.check_tables();
    }
    assert!(world.switch.lines[lines[0].0 as usize].round.len() < 100);
    world.finish();
}

#[test]
fn a_circuit_is_found_by_what_the_guest_at_either_end_knows_of_it() {
    let (mut world, lines) = World::of(2, Limits::default());
    let reads_on = Plan {
        reads: true,
        ..sleeps()
    };
    let stays = Plan {
        left: 70_000,
        ..sleeps()
    };
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, reads_on);
    world.connect_to(lines[0], 4, 80, stays);
    world.settle();
    let report = world.switch.circuits().next().unwrap();
    let port = report.caller.port;
    let found =
        |line, port, peer_cid, peer_port| world.switch.circuit_of(line, port, peer_cid, peer_port);
    assert_eq!(
        found(lines[0], port, 4, 80),
        Some((report.id, Side::Caller))
    );
    assert_eq!(
        found(lines[1], 80, 3, port),
        Some((report.id, Side::Callee))
    );
    assert_eq!(found(lines[1], port, 4, 80), None, "another guest's words");
    assert_eq!(found(lines[0], port, 4, 81), None);
    assert_eq!(world.switch.circuit(report.id), Some(report.clone()));
    assert_eq!(report.caller.passed_bytes, 70_000);
    assert_eq!(report.callee.passed_bytes, 0);
    assert!(!report.is_cut_short);
    world.audit.taint(report.id);
    world.handle(Event::Kill {
        circuit: report.id,
        reason: Reason::Operator,
    });
    let cut = world.switch.circuit(report.id);
    assert!(cut.is_none_or(|report| report.is_cut_short));
    world.settle();
    assert_eq!(world.switch.circuit(report.id), None);
    assert_eq!(world.switch.circuit_of(lines[0], port, 4, 80), None);
}
