//! Limits: below and at them all is well, beyond them the call is refused, and nothing grows.

use std::time::Duration;

use wire::vsock::{HOST_CID, Header, Operation, SocketType};

use super::model::{Answer, Call, World, sleeps};
use crate::{Limits, LineId, Reason};

fn world(limits: Limits) -> (World, Vec<LineId>) {
    let (mut world, lines) = World::of(2, limits);
    for line in &lines {
        world.listen_host(*line, 80, sleeps());
        world.listeners.insert((*line, 81), Answer::Never);
        world.guest(*line).listen(80, SocketType::Stream, sleeps());
    }
    (world, lines)
}

fn is_open(world: &mut World, line: LineId, cid: u32) -> bool {
    let socket = world.connect_to(line, cid, 80, sleeps());
    world.settle();
    world.is_established(line, socket)
}

#[test]
fn a_line_has_so_many_circuits_and_no_more_whoever_dials() {
    let limits = Limits {
        circuits: 4,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    for _ in 0..4 {
        assert!(is_open(&mut world, lines[0], HOST_CID));
    }
    assert!(!is_open(&mut world, lines[0], HOST_CID));
    assert!(!is_open(&mut world, lines[0], 4));
    assert!(
        !is_open(&mut world, lines[1], 3),
        "the called line counts too"
    );
    let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
    assert_eq!(
        world.programs[&token].call,
        Call::Rejected(Reason::CircuitLimit)
    );
    assert_eq!(world.reasons(), [Reason::CircuitLimit; 3]);
    // One ends, one can begin.
    let now = world.now;
    let socket = *world.guest(lines[0]).sockets.keys().next().unwrap();
    let guest = world.guests.get_mut(&lines[0]).unwrap();
    guest.close(now, socket, &mut world.audit);
    for program in world.programs.values_mut() {
        program.plan = super::model::reads();
    }
    world.settle();
    assert!(is_open(&mut world, lines[1], 3));
    world.finish();
}

#[test]
fn a_line_has_so_many_unanswered_dials_and_no_more() {
    let limits = Limits {
        half_open: 3,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    world.guest(lines[1]).paused = true;
    for _ in 0..3 {
        world.connect_to(lines[0], 4, 80, sleeps());
    }
    world.settle();
    world.connect(lines[0], 80, sleeps());
    let token = world.dial(lines[1], 80, SocketType::Stream, sleeps());
    world.settle();
    assert_eq!(world.reasons(), [Reason::HalfOpenLimit]);
    let rejected = Call::Rejected(Reason::HalfOpenLimit);
    assert_eq!(world.programs[&token].call, rejected);
    world.guest(lines[1]).paused = false;
    world.settle();
    assert!(
        is_open(&mut world, lines[0], HOST_CID),
        "answered: there is room again"
    );
    world.finish();
}

#[test]
fn unanswered_dials_of_the_host_count() {
    let limits = Limits {
        half_open: 1,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    world.connect(lines[0], 81, sleeps());
    world.settle();
    assert!(!is_open(&mut world, lines[0], HOST_CID));
    assert!(
        !is_open(&mut world, lines[1], 3),
        "the called line counts too"
    );
    world.advance(Duration::from_secs(11));
    assert!(
        is_open(&mut world, lines[0], HOST_CID),
        "given up: there is room again"
    );
    world.finish();
}

#[test]
fn so_many_stray_packets_are_answered_and_the_rest_are_counted() {
    for limit in [0, 1, 5] {
        let limits = Limits {
            orphan_resets: limit,
            ..Limits::default()
        };
        let (mut world, lines) = world(limits);
        for src_port in 0..6 {
            let stray = Header {
                src_cid: 3,
                dst_cid: 2,
                src_port,
                dst_port: 9,
                socket_type: 1,
                operation: Operation::Data as u16,
                ..Header::default()
            };
            world.inject(lines[0], stray);
        }
        let dropped = world.switch.lines[lines[0].0 as usize]
            .counters
            .resets_dropped;
        assert_eq!(dropped, 6 - limit as u64);
        assert_eq!(world.take_operations(lines[0]).len(), limit);
        world.finish();
    }
}

#[test]
fn credit_becomes_scarce_before_it_runs_out() {
    let limits = Limits {
        grant_bytes: 1000,
        min_grant_bytes: 10,
        max_grant_bytes: 1000,
        line_grant_bytes: 4000,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    let mut grants = Vec::new();
    for _ in 0..12 {
        assert!(is_open(&mut world, lines[0], HOST_CID));
        let (_, circuit) = world.switch.circuits.iter().next_back().unwrap();
        grants.push(circuit.flows[0].grant());
    }
    assert_eq!(
        grants,
        [1000, 1000, 1000, 500, 250, 125, 62, 31, 16, 10, 10, 10]
    );
    world.finish();
}

#[test]
fn announcements_do_not_grow_a_grant_beyond_the_lines_share() {
    // Seed 5 of the simulation: each announcement added the minimum, however little was left of the share.
    let limits = Limits {
        grant_bytes: 4096,
        min_grant_bytes: 4096,
        max_grant_bytes: 1_000_000,
        line_grant_bytes: 10_000,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    for port in 1..4 {
        let request = Header {
            src_cid: 3,
            dst_cid: 4,
            src_port: port,
            dst_port: 80,
            socket_type: 1,
            operation: Operation::Request as u16,
            buf_alloc: u32::MAX,
            ..Header::default()
        };
        world.inject(lines[0], request);
        world.round();
        for buf_alloc in 1..100 {
            let operation = Operation::CreditUpdate as u16;
            let buf_alloc = u32::MAX - buf_alloc;
            world.inject(
                lines[0],
                Header {
                    operation,
                    buf_alloc,
                    ..request
                },
            );
        }
    }
    let granted = world.switch.lines[lines[1].0 as usize].granted_bytes;
    assert!(granted <= 10_000 + 3 * 4096, "{granted}");
    world.finish();
}

#[test]
fn reserved_identifiers_and_names_that_are_taken_are_refused() {
    use crate::AddLineError::{CidTaken, NameTaken, ReservedCid};
    let (mut world, _) = World::of(1, Limits::default());
    for cid in [0, 1, 2, u32::MAX] {
        assert_eq!(world.switch.add_line("new", cid), Err(ReservedCid(cid)));
    }
    let taken = CidTaken {
        cid: 3,
        name: "vm0".to_owned(),
    };
    assert_eq!(world.switch.add_line("new", 3), Err(taken));
    let taken = NameTaken("vm0".to_owned());
    assert_eq!(world.switch.add_line("vm0", 77), Err(taken));
    assert!(world.switch.add_line("new", u32::MAX - 1).is_ok());
}
