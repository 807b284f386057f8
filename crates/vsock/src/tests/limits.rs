//! Limits: below and at them all is well, beyond them the call is refused, and nothing grows.

use std::time::Duration;

use policy::LineId;
use wire::vsock::{HOST_CID, Header, Operation, SocketType};

use super::model::{Answer, Call, World, reads, sends, sleeps};
use crate::{HostCaller, Limits, Outsider, Reason};

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
        program.plan = reads();
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
    world.connect_to(lines[0], 4, 80, sleeps());
    for outsider in 1..3 {
        world.host_caller = HostCaller::Published(Outsider(outsider));
        world.connect(lines[0], 81, sleeps());
        world.dial(lines[1], 80, SocketType::Stream, sleeps());
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

/// The guest's dials that were refused for being too many.
fn refused_for_rate(world: &World, line: LineId) -> u64 {
    world.switch.lines[line.0 as usize].counters.ended[Reason::ConnectRate.index()]
}

#[test]
fn a_guest_dials_so_often_and_no_more() {
    let limits = Limits {
        connects_per_second: 5,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    for dial in 0..5 {
        let cid = [HOST_CID, 4][dial % 2];
        assert!(is_open(&mut world, lines[0], cid), "dial {dial}");
    }
    let before = world.now;
    assert!(!is_open(&mut world, lines[0], HOST_CID));
    assert!(!is_open(&mut world, lines[0], 4));
    assert!(
        world.now - before < Duration::from_millis(1),
        "notified at once"
    );
    assert_eq!(world.reasons(), [Reason::ConnectRate; 2]);
    assert_eq!(refused_for_rate(&world, lines[0]), 2);

    assert!(
        is_open(&mut world, lines[1], 3),
        "the called guest pays nothing"
    );
    let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
    world.settle();
    assert_eq!(world.programs[&token].call, Call::Open, "nor do programs");

    world.advance(Duration::from_millis(200));
    assert!(is_open(&mut world, lines[0], HOST_CID), "one has come back");
    assert!(!is_open(&mut world, lines[0], HOST_CID));
    assert_eq!(refused_for_rate(&world, lines[0]), 3);
    world.finish();
}

#[test]
fn a_dial_is_paid_for_when_somebody_else_has_to_do_with_it() {
    let limits = Limits {
        connects_per_second: 2,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    for (cid, port) in [
        (77, 80),
        (HOST_CID, 9999),
        (4, 9999),
        (77, 80),
        (HOST_CID, 80),
    ] {
        world.connect_to(lines[0], cid, port, sleeps());
        world.settle();
    }
    let expected = [
        Reason::UnknownCid,
        Reason::NoListener,
        Reason::GuestRefused,
        Reason::UnknownCid,
        Reason::ConnectRate,
    ];
    assert_eq!(world.reasons(), expected);
    world.finish();
}

#[test]
fn a_dial_that_is_repeated_is_paid_for_once() {
    let limits = Limits {
        connects_per_second: 1,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    let socket = world.connect(lines[0], 80, sleeps());
    for _ in 0..10 {
        let guest = world.guest(lines[0]);
        guest.send(socket, Operation::Request, 0, None);
    }
    world.settle();
    assert!(world.is_established(lines[0], socket));
    assert_eq!(world.reasons(), []);
    world.finish();
}

#[test]
fn programs_dial_a_guest_so_often_and_no_more() {
    let limits = Limits {
        host_connects_per_second: 3,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    let mut calls = Vec::new();
    for _ in 0..4 {
        let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
        world.settle();
        calls.push(world.programs[&token].call);
    }
    let refused = Call::Rejected(Reason::ConnectRate);
    assert_eq!(calls, [Call::Open, Call::Open, Call::Open, refused]);
    assert_eq!(refused_for_rate(&world, lines[0]), 1);
    let token = world.dial(lines[1], 80, SocketType::Stream, sleeps());
    world.settle();
    assert_eq!(
        world.programs[&token].call,
        Call::Open,
        "each VM has its own"
    );
    assert!(
        is_open(&mut world, lines[0], HOST_CID),
        "the guest's are its own"
    );
    world.advance(Duration::from_secs(1) / 3 + Duration::from_millis(1));
    let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
    world.settle();
    assert_eq!(world.programs[&token].call, Call::Open, "one has come back");
    world.finish();
}

#[test]
fn a_guest_that_may_not_dial_can_be_called_and_the_other_way_round() {
    let limits = Limits {
        connects_per_second: 0,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    assert!(!is_open(&mut world, lines[0], HOST_CID));
    let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
    world.settle();
    assert_eq!(world.programs[&token].call, Call::Open);
    world.finish();

    let limits = Limits {
        host_connects_per_second: 0,
        ..Limits::default()
    };
    let (mut world, lines) = self::world(limits);
    let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
    let refused = Call::Rejected(Reason::ConnectRate);
    assert_eq!(world.programs[&token].call, refused);
    assert!(is_open(&mut world, lines[0], HOST_CID));
    world.finish();
}

#[test]
fn limits_of_none_allow_none() {
    for (limits, reason) in [
        (
            Limits {
                circuits: 0,
                ..Limits::default()
            },
            Reason::CircuitLimit,
        ),
        (
            Limits {
                half_open: 0,
                ..Limits::default()
            },
            Reason::HalfOpenLimit,
        ),
    ] {
        let (mut world, lines) = world(limits);
        assert!(!is_open(&mut world, lines[0], HOST_CID));
        let token = world.dial(lines[0], 80, SocketType::Stream, sleeps());
        assert_eq!(world.programs[&token].call, Call::Rejected(reason));
        assert_eq!(world.reasons(), [reason]);
        world.finish();
    }
}

#[test]
fn each_line_has_its_own_limits() {
    let (mut world, lines) = world(Limits::default());
    world.limits = Limits {
        circuits: 1,
        ..Limits::default()
    };
    let small = world.add_guest(7);
    world.listen_host(small, 80, sleeps());
    assert!(is_open(&mut world, small, HOST_CID));
    assert!(!is_open(&mut world, small, HOST_CID));
    assert!(
        !is_open(&mut world, lines[0], 10),
        "the called line's limit"
    );
    for _ in 0..3 {
        assert!(is_open(&mut world, lines[0], HOST_CID));
    }
    let reports: Vec<_> = world.switch.lines().collect();
    assert_eq!(reports[small.0 as usize].limits.circuits, 1);
    assert_eq!(reports[small.0 as usize].circuits, 1);
    assert_eq!(reports[lines[0].0 as usize].limits, Limits::default());
    world.finish();
}

/// Packets that the guest has sent and that have not been taken from its ring.
fn waiting(world: &World, line: LineId) -> usize {
    world.guests[&line].tx.len()
}

/// Queues so many announcements of credit on a circuit, as a guest that reads byte by byte does.
fn announce(world: &mut World, line: LineId, socket: u32, count: usize) {
    for _ in 0..count {
        let guest = world.guest(line);
        guest.send(socket, Operation::CreditUpdate, 0, None);
    }
}

#[test]
fn a_guest_that_says_too_much_has_to_wait_and_loses_nothing() {
    let limits = Limits {
        controls_per_second: 10_000,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    let socket = world.connect(lines[0], 80, sleeps());
    let other = world.connect_to(lines[1], 3, 80, sleeps());
    world.settle();
    // The call paid for two packets, of which the answer is one.
    announce(&mut world, lines[0], socket, 1);
    world.take_from_guest(lines[0], usize::MAX);
    world.advance(Duration::from_secs(1));
    let throttles = |world: &World| world.switch.lines[lines[0].0 as usize].counters.throttles;

    // A tenth of a second's worth at once is what a burst may be.
    announce(&mut world, lines[0], socket, 1000);
    world.take_from_guest(lines[0], usize::MAX);
    assert_eq!((waiting(&world, lines[0]), throttles(&world)), (0, 0));

    // Beyond it, no more than one batch is taken; then the guest waits, and so does what it sends after.
    announce(&mut world, lines[0], socket, 1000);
    let taken = world.take_from_guest(lines[0], usize::MAX);
    assert_eq!(taken, 256);
    assert_eq!(world.take_from_guest(lines[0], usize::MAX), 0);
    assert_eq!(
        throttles(&world),
        1,
        "one throttle, however often one looks"
    );

    // No other does.
    announce(&mut world, lines[1], other, 500);
    assert_eq!(world.take_from_guest(lines[1], usize::MAX), 500);

    // The debt is paid at ten a millisecond, and not a moment sooner.
    let until = world
        .switch
        .throttled_until(world.now, lines[0])
        .expect("it is throttled");
    assert_eq!(until - world.now, Duration::from_micros(25_600));
    world.now = until - Duration::from_nanos(1);
    assert_eq!(world.take_from_guest(lines[0], usize::MAX), 0);
    world.now = until;
    assert_eq!(world.take_from_guest(lines[0], usize::MAX), 256);
    world.advance(Duration::from_secs(1));
    assert_eq!(
        waiting(&world, lines[0]),
        0,
        "all of it is heard in the end"
    );
    assert_eq!(world.reasons(), []);
    world.finish();
}

#[test]
fn data_costs_nothing_and_what_is_for_nobody_does() {
    let limits = Limits {
        controls_per_second: 1000,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    world.listen_host(lines[0], 82, reads());
    let mut plan = sends(100_000);
    plan.write_len = 10;
    world.connect(lines[0], 82, plan);
    world.settle();
    assert_eq!(world.totals.bytes, 100_000);
    let throttles = |world: &World| world.switch.lines[lines[0].0 as usize].counters.throttles;
    assert_eq!(
        throttles(&world),
        0,
        "ten thousand packets of data are no burden"
    );

    world.advance(Duration::from_secs(1));
    for source in [3, 99] {
        let stray = Header {
            src_cid: source,
            dst_cid: 2,
            src_port: 5,
            dst_port: 9,
            len: 1,
            socket_type: 1,
            operation: Operation::Data as u16,
            ..Header::default()
        };
        for _ in 0..50 {
            world.inject(lines[0], stray);
        }
    }
    assert_eq!(world.switch.throttled_until(world.now, lines[0]), None);
    world.switch.malformed(world.now, lines[0]);
    let tick = Duration::from_millis(1);
    let until = world.switch.throttled_until(world.now, lines[0]);
    assert_eq!(until, Some(world.now + tick), "a hundred and one");
    world.finish();
}

#[test]
fn a_driver_that_starts_anew_finds_its_budgets_as_they_were() {
    let limits = Limits {
        connects_per_second: 1,
        controls_per_second: 1000,
        ..Limits::default()
    };
    let (mut world, lines) = world(limits);
    assert!(is_open(&mut world, lines[0], HOST_CID));
    for _ in 0..200 {
        world.switch.malformed(world.now, lines[0]);
    }
    world.line_up(lines[0]);
    assert!(world.switch.throttled_until(world.now, lines[0]).is_some());
    world.now += Duration::from_millis(500);
    assert!(!is_open(&mut world, lines[0], HOST_CID));
    assert_eq!(refused_for_rate(&world, lines[0]), 1);
    world.finish();
}

#[test]
fn what_a_line_keeps_is_reported() {
    let (mut world, lines) = world(Limits::default());
    world.guest(lines[1]).ring = 4;
    let socket = world.connect_to(lines[0], 4, 80, sends(400_000));
    while !world.is_established(lines[0], socket) {
        world.round();
    }
    world.guest(lines[1]).paused = true;
    world.settle();
    let kept: u32 = world.stores.values().map(|store| store.len()).sum();
    assert!(kept > 0);
    let places = world.switch.circuit_places();
    let reported = world.switch.survey(0..places);
    assert_eq!(reported, [(lines[0], u64::from(kept))]);
    world.finish();
}
