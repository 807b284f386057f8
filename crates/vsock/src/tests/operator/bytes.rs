//! Bytes a second: what passes under a rule, in each direction, and what still works while nothing passes.

use wire::vsock::{HOST_CID, SHUTDOWN_SEND};

use super::*;
use crate::Event;
use crate::tests::model::{Answer, reads, sends};

/// What may pass at once, in bytes: what comes in the depth of the meter, and for each circuit the window that its source was
/// offered before, or one turn, as both are counted when they have passed.
const BURST: u64 = 512 * 1024;

fn bytes(per_second: u64) -> RuleLimits {
    RuleLimits {
        bytes_per_second: Some(per_second),
        ..RuleLimits::default()
    }
}

/// Bytes that have reached their receiver.
fn received(world: &World) -> u64 {
    let ends = world.audit.pairs.values().flat_map(|pair| &pair.ends);
    ends.map(|end| end.received).sum()
}

/// Sender and receiver.
#[derive(Debug, Clone, Copy)]
enum Way {
    ToHost,
    FromHost,
    Between,
}

const WAYS: [Way; 3] = [Way::ToHost, Way::FromHost, Way::Between];

/// A world in which so many senders have so much to send under one rule.
fn sending(way: Way, per_second: u64, senders: u32, left: u64) -> (World, Vec<LineId>) {
    let limits = bytes(per_second);
    let rules = vec![
        allow("*", "*").within(limits),
        allow("host", "*").within(limits),
        allow("*", "listeners").within(limits),
    ];
    let (mut world, lines) = world_of(&[("web", 3), ("db", 4)], rules);
    listen(&mut world, &lines, 80, reads());
    world.listen_host(lines[0], 80, reads());
    for _ in 0..senders {
        match way {
            Way::ToHost => drop(world.connect_to(lines[0], HOST_CID, 80, sends(left))),
            Way::FromHost => drop(world.dial(lines[0], 80, SocketType::Stream, sends(left))),
            Way::Between => drop(world.connect_to(lines[0], 4, 80, sends(left))),
        }
    }
    (world, lines)
}

#[test]
fn so_much_passes_in_a_second_and_no_more() {
    for way in WAYS {
        for (per_second, senders) in [(100_000, 1), (1_000_000, 1), (1_000_000, 4)] {
            let left = 40 * per_second;
            let (mut world, _) = sending(way, per_second, senders, left);
            let burst = BURST * u64::from(senders);
            let start = world.now;
            for second in 1..=10 {
                world.advance(Duration::from_secs(second) - (world.now - start));
                let (passed, due) = (received(&world), per_second * second);
                let case = format!("{way:?}, {senders} senders, {passed} bytes in {second} s");
                assert!(passed <= due + burst, "{case}");
                assert!(passed + burst >= due, "{case}");
            }
            world.finish_soon(0);
        }
    }
}

#[test]
fn all_of_it_arrives_in_the_end() {
    for way in WAYS {
        let (mut world, _) = sending(way, 1_000_000, 3, 1_500_000);
        world.advance(Duration::from_secs(6));
        assert_eq!(received(&world), 4_500_000, "{way:?}");
        assert_eq!(world.reasons(), []);
        assert_eq!(world.switch.circuits.len(), 0, "{way:?}: ended cleanly");
        world.finish();
    }
}

#[test]
fn a_limit_that_is_not_reached_is_not_felt() {
    for way in WAYS {
        let mut times = Vec::new();
        for per_second in [u64::MAX, 100_000_000_000] {
            let (mut world, _) = sending(way, per_second, 1, 2_000_000);
            let start = world.now;
            world.settle();
            assert_eq!(received(&world), 2_000_000, "{way:?}");
            times.push(world.now - start);
        }
        assert_eq!(times[0], times[1]);
    }
}

#[test]
fn one_after_the_other_has_its_turn() {
    for way in WAYS {
        let (mut world, _) = sending(way, 1_000_000, 4, 20_000_000);
        world.advance(Duration::from_secs(20));
        let shares: Vec<u64> = world
            .audit
            .pairs
            .values()
            .map(|pair| pair.ends.iter().map(|end| end.received).sum())
            .collect();
        assert_eq!(shares.len(), 4);
        let (least, most) = (shares.iter().min(), shares.iter().max());
        assert!(
            least.unwrap() + BURST >= *most.unwrap(),
            "{way:?}: {shares:?}"
        );
        world.finish_soon(0);
    }
}

#[test]
fn nobody_works_while_all_rest() {
    for way in WAYS {
        let (mut world, _) = sending(way, 10_000, 3, 5_000_000);
        world.settle();
        let before = world.totals.events;
        // Some 100 kB pass in this time: as many wake-ups as there are turns, and not one for each moment.
        world.advance(Duration::from_secs(10));
        let events = world.totals.events - before;
        assert!(events < 300, "{way:?}: {events} events");
        world.finish_soon(0);
    }
}

#[test]
fn circuits_with_nothing_to_send_are_left_alone_while_others_rest() {
    let (mut world, lines) = sending(Way::Between, 1_000_000, 1, 20_000_000);
    listen(&mut world, &lines, 81, sleeps());
    world.settle();
    for _ in 0..100 {
        // Each is sent an answer while the rule throttles.
        world.connect_to(lines[0], 4, 81, sleeps());
    }
    world.settle();
    let throttled = world.switch.throttled.len();
    assert!(throttled <= 1, "{throttled} circuits wait for nothing");
    world.finish_soon(0);
}

#[test]
fn the_end_of_data_and_a_close_pass_while_the_rule_rests() {
    for way in WAYS {
        // What is sent first makes the rule throttle for seconds.
        let (mut world, lines) = sending(way, 100_000, 1, 1_000_000);
        world.settle();
        listen(&mut world, &lines, 81, sleeps());
        world.listen_host(lines[0], 81, sleeps());
        let socket = match way {
            Way::Between => world.connect_to(lines[0], 4, 81, sleeps()),
            _ => world.connect_to(lines[0], HOST_CID, 81, sleeps()),
        };
        world.settle();
        assert!(world.is_established(lines[0], socket), "{way:?}");
        let mut audit = std::mem::take(&mut world.audit);
        world
            .guest(lines[0])
            .shutdown(socket, SHUTDOWN_SEND, &mut audit);
        world.audit = audit;
        let before = world.now;
        world.settle();
        assert!(world.now - before < Duration::from_millis(10));
        let announced = match way {
            Way::Between => {
                let theirs = world.guest(lines[1]).accepted(81).unwrap();
                world.guests[&lines[1]].socket(theirs).peer_shutdown == SHUTDOWN_SEND
            }
            _ => world.programs.values().any(|program| program.end_shown),
        };
        assert!(announced, "{way:?}");
        world.finish_soon(0);
    }
}

#[test]
fn what_was_sent_before_a_half_close_arrives_before_it() {
    // The rule throttles for half a minute; the audit checks the order.
    let (mut world, _) = sending(Way::Between, 10_000, 1, 250_000);
    world.advance(Duration::from_secs(20));
    assert_eq!(received(&world), 0, "it is held back");
    world.advance(Duration::from_secs(20));
    assert_eq!(received(&world), 250_000);
    assert_eq!(world.switch.circuits.len(), 0);
    world.finish();
}

#[test]
fn a_circuit_is_cut_short_while_it_rests() {
    for way in WAYS {
        let (mut world, lines) = sending(way, 1000, 2, 1_000_000);
        world.settle();
        let circuit = world.switch.circuits.iter().next().unwrap().1.id;
        world.audit.taint(circuit);
        let reason = Reason::Operator;
        world.handle(Event::Kill { circuit, reason });
        world.settle();
        assert_eq!(world.switch.circuits.len(), 1, "{way:?}");
        let line = if matches!(way, Way::Between) {
            lines[1]
        } else {
            lines[0]
        };
        world.line_down(line);
        world.settle();
        if !matches!(way, Way::Between) {
            assert_eq!(world.switch.circuits.len(), 0, "{way:?}");
            assert_eq!(
                world.switch.poll_at(),
                None,
                "{way:?}: no reader is left to wake"
            );
        }
        world.finish_soon(0);
    }
}

#[test]
fn circuits_that_come_and_go_while_the_rule_rests_leave_nothing_behind() {
    let (mut world, lines) = sending(Way::Between, 1, 1, 250_000);
    listen(&mut world, &lines, 81, reads());
    world.settle();
    for _ in 0..50 {
        let socket = world.connect_to(
            lines[0],
            4,
            81,
            Plan {
                closes: false,
                ..sends(1)
            },
        );
        world.settle();
        assert!(world.is_established(lines[0], socket));
        let operation = wire::vsock::Operation::Reset;
        let circuit = world.guests[&lines[0]].socket(socket).circuit.unwrap();
        world.guest(lines[0]).send(socket, operation, 0, None);
        world.guest(lines[0]).sockets.remove(&socket);
        world.audit.taint(circuit);
        world.settle();
        let reason = Reason::Operator;
        world.handle(Event::Kill { circuit, reason });
        world.settle();
    }
    assert_eq!(world.switch.circuits.len(), 1);
    assert_eq!(world.switch.throttled.len(), 1);
}

#[test]
fn with_no_bytes_a_second_next_to_nothing_passes_and_calls_can_be_ended() {
    for way in WAYS {
        let (mut world, lines) = sending(way, 0, 1, 10_000_000);
        world.advance(Duration::from_secs(3600));
        assert!(received(&world) <= BURST, "{way:?}");
        world.line_down(lines[0]);
        world.line_down(lines[1]);
        for program in world.programs.values_mut() {
            program.close(&mut world.audit);
        }
        world.settle();
        assert_eq!(world.switch.circuits.len(), 0, "{way:?}");
    }
}

#[test]
fn messages_are_kept_whole_while_they_wait() {
    let rules = vec![allow("*", "*").within(bytes(500_000))];
    let (mut world, lines) = world_of(&[("web", 3), ("db", 4)], rules);
    for port in [80, 81] {
        world
            .guest(lines[1])
            .listen(port, SocketType::SeqPacket, sends(0));
    }
    for (port, write_len) in [(80, 100_000), (81, 700)] {
        let plan = Plan {
            write_len,
            ..sends(1_400_000)
        };
        let kind = SocketType::SeqPacket;
        let mut socket = crate::tests::model::Socket::new(crate::Side::Caller, kind, 262_144);
        socket.plan = plan;
        let now = world.now;
        world.guest(lines[0]).connect(now, socket, (4, port), None);
    }
    let to_guest = world.dial(
        lines[1],
        80,
        SocketType::SeqPacket,
        Plan {
            write_len: 3000,
            ..sends(900_000)
        },
    );
    world.advance(Duration::from_secs(10));
    assert_eq!(received(&world), 3_700_000);
    assert!(matches!(
        world.programs[&to_guest].call,
        Call::Closed { reset: false }
    ));
    world.finish();
}

#[test]
fn the_limit_is_for_both_directions_and_all_circuits_together() {
    let rules = vec![allow("*", "*").within(bytes(1_000_000))];
    let (mut world, lines) = world_of(&[("web", 3), ("db", 4)], rules);
    listen(&mut world, &lines, 80, sends(40_000_000));
    world
        .listeners
        .insert((lines[0], 80), Answer::Accept(reads()));
    world.connect_to(lines[0], 4, 80, sends(40_000_000));
    world.connect_to(lines[1], 3, 80, sends(40_000_000));
    let start = world.now;
    world.advance(Duration::from_secs(20) - (world.now - start));
    let passed = received(&world);
    assert!(passed <= 20_000_000 + 4 * BURST, "{passed}");
    assert!(passed + 4 * BURST >= 20_000_000, "{passed}");
    world.finish_soon(0);
}
