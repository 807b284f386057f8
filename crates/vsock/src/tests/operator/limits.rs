//! Limits of a rule: of circuits at once, and of calls in a second.

use wire::vsock::{HOST_CID, Operation};

use super::*;
use crate::tests::model::{Answer, Socket, reads, sends};
use crate::{Event, Side};

fn circuits(most: u32) -> RuleLimits {
    RuleLimits {
        circuits: Some(most),
        ..RuleLimits::default()
    }
}

fn connects(per_second: u32) -> RuleLimits {
    RuleLimits {
        connects_per_second: Some(per_second),
        ..RuleLimits::default()
    }
}

const VMS: [(&str, u32); 4] = [("web", 3), ("ci", 4), ("db", 5), ("cache", 6)];

fn world(rules: Vec<Rule>) -> (World, Vec<LineId>) {
    let (mut world, lines) = world_of(&VMS, rules);
    listen(&mut world, &lines, 80, sleeps());
    for line in &lines {
        world
            .listeners
            .insert((*line, 80), Answer::Accept(sleeps()));
    }
    (world, lines)
}

#[test]
fn a_rule_allows_so_many_circuits_at_once_whoever_calls() {
    for most in [0, 1, 3] {
        let rules = vec![allow("*", "db").within(circuits(most)), allow("*", "*")];
        let (mut world, lines) = world(rules);
        for number in 0..most {
            let caller = lines[number as usize % 2];
            assert!(call(&mut world, caller, 5, 80).is_ok());
        }
        for caller in &lines[..2] {
            assert_eq!(call(&mut world, *caller, 5, 80), Err(Reason::RuleCircuits));
        }
        // Other rules have their own.
        assert!(call(&mut world, lines[0], 6, 80).is_ok());
        world.finish();
    }
}

#[test]
fn a_limit_holds_for_the_host_and_for_calls_to_it() {
    let rules = vec![
        allow("host", "db").within(circuits(1)),
        allow("*", "listeners").within(circuits(2)),
    ];
    let (mut world, lines) = world(rules);
    assert!(call_guest(&mut world, lines[2], 80).is_ok());
    assert_eq!(
        call_guest(&mut world, lines[2], 80),
        Err(Reason::RuleCircuits)
    );
    assert!(call_guest(&mut world, lines[3], 80).is_ok());
    assert!(call(&mut world, lines[0], HOST_CID, 80).is_ok());
    assert!(call(&mut world, lines[1], HOST_CID, 80).is_ok());
    let refused = Err(Reason::RuleCircuits);
    assert_eq!(call(&mut world, lines[2], HOST_CID, 80), refused);
    // The operator's own ports are in no rule.
    world.listen_host(lines[2], 1007, sleeps());
    assert!(call(&mut world, lines[2], HOST_CID, 1007).is_ok());
    world.finish();
}

/// How a circuit of `web` with `db` ends. It is answered unless `db` is paused.
type Ending = fn(&mut World, &[LineId], u32);

/// Ends a circuit, and looks whether there is room for another.
fn assert_gives_its_place_back(what: &str, answered: bool, end: Ending) {
    let (mut world, lines) = world(vec![allow("*", "*").within(circuits(1))]);
    world.guest(lines[2]).paused = !answered;
    let mut socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
    socket.plan = sleeps();
    let now = world.now;
    let socket = world.guest(lines[0]).connect(now, socket, (5, 80), None);
    let sockets = &mut world.guest(lines[0]).sockets;
    sockets.get_mut(&socket).unwrap().connect_by = None;
    world.settle();
    assert_eq!(world.is_established(lines[0], socket), answered);
    assert_eq!(call(&mut world, lines[1], 6, 80), Err(Reason::RuleCircuits));
    end(&mut world, &lines, socket);
    if let Some(db) = world.guests.get_mut(&lines[2]) {
        db.paused = false;
    }
    world.settle();
    assert!(call(&mut world, lines[1], 6, 80).is_ok(), "{what}");
    world.finish();
}

fn kill(world: &mut World) {
    let circuit = world.switch.circuits.iter().next().unwrap().1.id;
    world.audit.taint(circuit);
    let reason = Reason::Operator;
    world.handle(Event::Kill { circuit, reason });
}

#[test]
fn a_circuit_gives_its_place_back_however_it_ends() {
    let after_answer: [(&str, Ending); 6] = [
        ("closed", |world, lines, socket| {
            for (line, socket) in [(lines[2], None), (lines[0], Some(socket))] {
                let guest = world.guests.get_mut(&line).unwrap();
                let socket = socket.or(guest.accepted(80)).unwrap();
                guest.sockets.get_mut(&socket).unwrap().plan = sends(1000);
            }
        }),
        ("reset", |world, lines, socket| {
            world
                .guest(lines[0])
                .send(socket, Operation::Reset, 0, None);
            world.guest(lines[0]).sockets.clear();
            world.guest(lines[0]).table.clear();
        }),
        ("line down", |world, lines, _| world.line_down(lines[2])),
        ("line removed", |world, lines, _| {
            world.remove_line(lines[2])
        }),
        ("caller removed", |world, lines, _| {
            world.remove_line(lines[0])
        }),
        ("killed", |world, _, _| kill(world)),
    ];
    for (what, end) in after_answer {
        assert_gives_its_place_back(what, true, end);
    }
}

#[test]
fn a_call_gives_its_place_back_however_it_fails() {
    let before_answer: [(&str, Ending); 6] = [
        ("timed out", |world, _, _| {
            world.advance(Duration::from_secs(11));
        }),
        ("refused", |world, lines, _| {
            world.guest(lines[2]).listeners.clear();
        }),
        ("given up", |world, lines, socket| {
            world
                .guest(lines[0])
                .send(socket, Operation::Reset, 0, None);
            world.guest(lines[0]).sockets.clear();
            world.guest(lines[0]).table.clear();
        }),
        ("line down", |world, lines, _| world.line_down(lines[2])),
        ("caller removed", |world, lines, _| {
            world.remove_line(lines[0])
        }),
        ("killed", |world, _, _| kill(world)),
    ];
    for (what, end) in before_answer {
        assert_gives_its_place_back(what, false, end);
    }
}

#[test]
fn a_service_that_refuses_gives_the_place_back() {
    let rules = vec![allow("*", "service:*").within(circuits(1))];
    let (mut world, lines) = world(rules);
    for answer in [Answer::Refuse(Reason::Unreachable), Answer::Never] {
        world.set_services(&[(DEFAULT_DOMAIN, "registry", 5000, answer)]);
        world.connect(lines[0], 5000, sleeps());
        world.advance(Duration::from_secs(11));
    }
    let accepts = Answer::Accept(reads());
    world.set_services(&[(DEFAULT_DOMAIN, "registry", 5000, accepts)]);
    assert!(call(&mut world, lines[0], HOST_CID, 5000).is_ok());
    world.finish();
}

#[test]
fn a_guest_that_does_not_take_the_news_keeps_its_place() {
    let (mut world, lines) = world(vec![allow("*", "*").within(circuits(1))]);
    call(&mut world, lines[0], 5, 80).unwrap();
    world.guest(lines[2]).ring = 0;
    kill(&mut world);
    world.settle();
    // The circuit is still in the tables, and so it counts.
    assert_eq!(call(&mut world, lines[1], 6, 80), Err(Reason::RuleCircuits));
    world.guest(lines[2]).ring = 256;
    world.settle();
    assert!(call(&mut world, lines[1], 6, 80).is_ok());
    world.finish();
}

#[test]
fn a_rule_allows_so_many_calls_in_a_second_whoever_calls() {
    for per_second in [1, 2, 5] {
        let rules = vec![
            allow("*", "db").within(connects(per_second)),
            allow("*", "*"),
        ];
        let (mut world, lines) = world(rules);
        world.advance(Duration::from_secs(1));
        for number in 0..per_second {
            let caller = lines[number as usize % 2];
            assert!(call(&mut world, caller, 5, 80).is_ok());
        }
        for caller in &lines[..2] {
            assert_eq!(call(&mut world, *caller, 5, 80), Err(Reason::RuleRate));
        }
        assert!(call(&mut world, lines[0], 6, 80).is_ok());
        world.advance(Duration::from_secs(1) / per_second);
        assert!(call(&mut world, lines[1], 5, 80).is_ok());
        assert_eq!(call(&mut world, lines[1], 5, 80), Err(Reason::RuleRate));
        world.finish();
    }
}

#[test]
fn a_reload_gives_nobody_calls_that_have_been_used_up() {
    let limited = || allow("*", "db").within(connects(2));
    let (mut world, lines) = world(vec![limited(), allow("*", "*")]);
    world.advance(Duration::from_secs(1));
    for caller in &lines[..2] {
        assert!(call(&mut world, *caller, 5, 80).is_ok());
    }
    // The rule stands elsewhere now, and so is called otherwise.
    world.set_rules(vec![allow("ci", "cache"), limited(), allow("*", "*")]);
    assert_eq!(call(&mut world, lines[0], 5, 80), Err(Reason::RuleRate));
    world.advance(Duration::from_secs(1) / 2);
    assert!(call(&mut world, lines[0], 5, 80).is_ok());
    // Another limit is another budget.
    let other = allow("*", "db").within(connects(3));
    world.set_rules(vec![other, allow("*", "*")]);
    assert!(call(&mut world, lines[0], 5, 80).is_ok());
    world.finish();
}

#[test]
fn with_no_calls_a_second_there_are_none() {
    let (mut world, lines) = world(vec![allow("*", "db").within(connects(0))]);
    world.advance(Duration::from_secs(1000));
    assert_eq!(call(&mut world, lines[0], 5, 80), Err(Reason::RuleRate));
    world.finish();
}

#[test]
fn who_calls_too_often_does_not_use_up_what_the_rule_allows_others() {
    let rules = vec![allow("*", "db").within(connects(3))];
    let mut world = World::new(Limits {
        connects_per_second: 1,
        host_connects_per_second: 1,
        ..Limits::default()
    });
    world.set_rules(rules);
    let lines: Vec<_> = VMS
        .iter()
        .map(|(name, cid)| add(&mut world, name, *cid))
        .collect();
    listen(&mut world, &lines, 80, sleeps());
    assert!(call(&mut world, lines[0], 5, 80).is_ok());
    for _ in 0..10 {
        assert_eq!(call(&mut world, lines[0], 5, 80), Err(Reason::ConnectRate));
    }
    for caller in [1, 3] {
        assert!(call(&mut world, lines[caller], 5, 80).is_ok());
    }
    world.finish();
}

#[test]
fn what_a_rule_refuses_costs_the_caller_nothing() {
    let rules = vec![
        allow("*", "db").within(circuits(0)),
        allow("*", "cache").within(connects(0)),
        allow("*", "ci"),
    ];
    let mut world = World::new(Limits {
        connects_per_second: 1,
        ..Limits::default()
    });
    world.set_rules(rules);
    let lines: Vec<_> = VMS
        .iter()
        .map(|(name, cid)| add(&mut world, name, *cid))
        .collect();
    listen(&mut world, &lines, 80, sleeps());
    assert_eq!(call(&mut world, lines[0], 5, 80), Err(Reason::RuleCircuits));
    assert_eq!(call(&mut world, lines[0], 6, 80), Err(Reason::RuleRate));
    assert!(call(&mut world, lines[0], 4, 80).is_ok());
    world.finish();
}
