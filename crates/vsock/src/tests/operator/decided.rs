//! Each call is decided once, and the decision has the caller, the callee meant, the actual callee, and which rule it was.
//! (That it is once, however it ends, [`World::check_tables`] looks after in every scenario and every simulation.)

use policy::{RuleId, ServiceId};
use wire::vsock::{HOST_CID, Header, Operation};

use super::*;
use crate::tests::model::{Answer, reads};
use crate::{CalleeId, CallerId, Decided, Event, HostCaller, Outsider};

fn guest(line: LineId, port: u32) -> Option<CalleeId> {
    Some(CalleeId::Guest { line, port })
}

/// The last decision.
fn last(world: &World) -> Decided {
    *world.decided.last().expect("a call was decided")
}

fn rules() -> Vec<Rule> {
    vec![
        deny("web", "db").at(81),
        allow("web", "db"),
        redirect("web", "old", "db", Some(80)),
        allow("web", "service:*"),
        deny("host", "web"),
    ]
}

fn world() -> (World, Vec<LineId>) {
    let (mut world, lines) = world_of(&[("web", 3), ("db", 4), ("old", 5)], rules());
    listen(&mut world, &lines, 80, sleeps());
    world.set_services(&[(DEFAULT_DOMAIN, "registry", 5000, Answer::Accept(reads()))]);
    (world, lines)
}

#[test]
fn a_call_between_guests_is_decided_when_it_is_answered() {
    let (mut world, lines) = world();
    world.guest(lines[1]).paused = true;
    let socket = world.connect_to(lines[0], 4, 80, sleeps());
    let port = world.guests[&lines[0]].socket(socket).port;
    world.settle();
    assert_eq!(world.decided, [], "without an answer");
    world.guest(lines[1]).paused = false;
    world.settle();
    let expected = Decided {
        caller: CallerId::Guest {
            line: lines[0],
            port,
        },
        dialled_cid: 4,
        dialled_port: 80,
        dialled: guest(lines[1], 80),
        reached: guest(lines[1], 80),
        rule: Some(RuleId(1)),
        result: Ok(()),
    };
    assert_eq!(world.decided, [expected]);
    world.finish();
}

#[test]
fn what_is_refused_names_the_rule_and_whom_it_was_for() {
    let (mut world, lines) = world();
    let cases = [
        // By a rule, by the lack of one, by another rule's silence about the port.
        (0, 4, 81, Reason::Denied, guest(lines[1], 81), Some(0)),
        (0, 77, 80, Reason::UnknownCid, None, None),
        (1, 3, 80, Reason::Denied, guest(lines[0], 80), None),
        (0, 3, 80, Reason::Denied, guest(lines[0], 80), None),
        (
            0,
            HOST_CID,
            9,
            Reason::NoListener,
            Some(CalleeId::Listener { port: 9 }),
            None,
        ),
        (
            1,
            HOST_CID,
            5000,
            Reason::Denied,
            Some(CalleeId::Service(ServiceId(0))),
            None,
        ),
        (
            0,
            4,
            9999,
            Reason::GuestRefused,
            guest(lines[1], 9999),
            Some(1),
        ),
    ];
    for (line, cid, port, reason, dialled, rule) in cases {
        assert_eq!(call(&mut world, lines[line], cid, port), Err(reason));
        let Decided { caller, .. } = last(&world);
        assert!(matches!(caller, CallerId::Guest { line: from, .. } if from == lines[line]));
        let decided = last(&world);
        assert_eq!((decided.dialled_cid, decided.dialled_port), (cid, port));
        assert_eq!(decided.dialled, dialled, "{reason:?}");
        assert_eq!(decided.rule, rule.map(RuleId), "{reason:?}");
        assert_eq!(decided.result, Err(reason));
    }
    world.finish();
}

#[test]
fn whoever_was_reached_by_a_redirection_is_named_with_his_own_port() {
    let (mut world, lines) = world();
    call(&mut world, lines[0], 5, 5432).unwrap();
    let decided = last(&world);
    assert_eq!((decided.dialled_cid, decided.dialled_port), (5, 5432));
    assert_eq!(decided.dialled, guest(lines[2], 5432));
    assert_eq!(decided.reached, guest(lines[1], 80));
    assert_eq!(decided.rule, Some(RuleId(2)));
    world.line_down(lines[1]);
    assert_eq!(call(&mut world, lines[0], 5, 5432), Err(Reason::NotRunning));
    let decided = last(&world);
    assert_eq!(
        (decided.dialled, decided.reached),
        (guest(lines[2], 5432), None)
    );
    assert_eq!(decided.rule, Some(RuleId(2)));
    world.finish();
}

#[test]
fn limits_of_a_vm_are_told_with_the_rule_and_whom_the_call_was_for() {
    let cases = [
        (
            Limits {
                circuits: 0,
                ..Limits::default()
            },
            Reason::CircuitLimit,
        ),
        (
            Limits {
                connects_per_second: 0,
                host_connects_per_second: 0,
                ..Limits::default()
            },
            Reason::ConnectRate,
        ),
    ];
    for (limits, reason) in cases {
        let mut world = World::new(limits);
        world.set_rules(vec![allow("web", "db"), allow("host", "web")]);
        let lines = [add(&mut world, "web", 3), add(&mut world, "db", 4)];
        assert_eq!(call(&mut world, lines[0], 4, 80), Err(reason));
        assert_eq!(last(&world).dialled, guest(lines[1], 80), "{reason:?}");
        assert_eq!(call_guest(&mut world, lines[0], 80), Err(reason));
        let decided = last(&world);
        assert_eq!(decided.dialled, guest(lines[0], 80), "{reason:?}");
        assert_eq!(decided.rule, Some(RuleId(1)), "{reason:?}");
        world.finish();
    }
}

#[test]
fn calls_of_the_host_are_named_by_attempt_and_then_by_circuit() {
    let (mut world, lines) = world();
    assert_eq!(call_guest(&mut world, lines[0], 80), Err(Reason::Denied));
    let token = world.programs.keys().next_back().copied().unwrap();
    let decided = last(&world);
    assert_eq!(decided.caller, CallerId::HostAttempt { token });
    assert_eq!((decided.dialled_cid, decided.dialled_port), (3, 80));
    assert_eq!(
        (decided.dialled, decided.reached),
        (guest(lines[0], 80), None)
    );
    assert_eq!(decided.rule, Some(RuleId(4)));
    let token = call_guest(&mut world, lines[1], 80).unwrap();
    let circuit = world.programs[&token].circuit.unwrap();
    let decided = last(&world);
    assert_eq!(decided.caller, CallerId::HostCircuit { circuit });
    assert_eq!((decided.dialled_cid, decided.dialled_port), (4, 80));
    assert_eq!((decided.rule, decided.result), (None, Ok(())));
    world.finish();
}

#[test]
fn a_call_is_decided_once_however_it_ends() {
    type Ending = fn(&mut World, &[LineId]);
    let endings: [(Ending, Reason); 6] = [
        (
            |world, _| world.advance(Duration::from_secs(11)),
            Reason::TimedOut,
        ),
        (|world, lines| world.line_down(lines[1]), Reason::LineDown),
        (|world, lines| world.remove_line(lines[1]), Reason::Operator),
        (|world, lines| world.line_down(lines[0]), Reason::LineDown),
        (
            |world, _| {
                let circuit = world.switch.circuits.iter().next().unwrap().1.id;
                world.audit.taint(circuit);
                let reason = Reason::MemoryFault;
                world.handle(Event::Kill { circuit, reason });
            },
            Reason::MemoryFault,
        ),
        (
            |world, _| {
                world.set_rules(Vec::new());
                world.enforce();
            },
            Reason::Denied,
        ),
    ];
    for (end, reason) in endings {
        let (mut world, lines) = world();
        world.guest(lines[1]).paused = true;
        let socket = world.connect_to(lines[0], 5, 80, sleeps());
        let sockets = &mut world.guest(lines[0]).sockets;
        sockets.get_mut(&socket).unwrap().connect_by = None;
        world.settle();
        assert_eq!(world.decided, []);
        end(&mut world, &lines);
        world.settle();
        let results: Vec<_> = world.decided.iter().map(|decided| decided.result).collect();
        assert_eq!(results, [Err(reason)]);
        assert_eq!(last(&world).dialled, guest(lines[2], 80));
        assert_eq!(last(&world).reached, guest(lines[1], 80));
        world.finish();
        assert_eq!(world.decided.len(), 1, "{reason:?}");
    }
}

#[test]
fn a_dial_that_is_repeated_is_decided_once() {
    let (mut world, lines) = world();
    world.guest(lines[1]).paused = true;
    let socket = world.connect_to(lines[0], 4, 80, sleeps());
    for _ in 0..5 {
        world
            .guest(lines[0])
            .send(socket, Operation::Request, 0, None);
        world.settle();
    }
    world.guest(lines[1]).paused = false;
    for _ in 0..5 {
        world
            .guest(lines[0])
            .send(socket, Operation::Request, 0, None);
        world.settle();
    }
    assert_eq!(world.decided.len(), 1);
    // Also to the host, which answers at once.
    let socket = world.connect(lines[0], 5000, sleeps());
    world
        .guest(lines[0])
        .send(socket, Operation::Request, 0, None);
    world.settle();
    assert_eq!(world.decided.len(), 2);
    world.finish();
}

#[test]
fn what_is_not_even_a_call_is_not_decided() {
    let (mut world, lines) = world();
    let request = Header {
        src_cid: 3,
        dst_cid: 4,
        src_port: 1,
        dst_port: 80,
        socket_type: 1,
        operation: Operation::Request as u16,
        ..Header::default()
    };
    let spoofed = Header {
        src_cid: 4,
        ..request
    };
    let nowhere = Header {
        dst_cid: 1 << 32 | 4,
        ..request
    };
    let untyped = Header {
        socket_type: 3,
        ..request
    };
    for header in [spoofed, nowhere, untyped] {
        world.inject(lines[0], header);
    }
    assert_eq!(world.decided, []);
    world.inject(lines[0], request);
    world.settle();
    assert_eq!(world.decided.len(), 1);
    world.finish();
}

#[test]
fn a_vm_that_was_meant_and_has_gone_is_not_taken_for_another() {
    let (mut world, lines) = world();
    world.guest(lines[1]).paused = true;
    world.connect_to(lines[0], 5, 80, sleeps());
    world.settle();
    world.remove_line(lines[2]);
    assert_eq!(add(&mut world, "stranger", 9), lines[2]);
    world.guest(lines[1]).paused = false;
    world.settle();
    let decided = last(&world);
    assert_eq!((decided.dialled_cid, decided.result), (5, Ok(())));
    assert_eq!(decided.dialled, None);
    assert_eq!(decided.reached, guest(lines[1], 80));
    world.finish();
}

#[test]
fn users_of_the_host_are_told_apart() {
    let rules = vec![
        allow("user:7", "web").at(80),
        deny("user:7", "web"),
        allow("users:50", "web").at(81),
        deny("host", "web"),
    ];
    let (mut world, lines) = world_of(&[("web", 3)], rules);
    for port in [80, 81] {
        listen(&mut world, &lines, port, sleeps());
    }
    let users: [(u32, &[u32]); 4] = [(7, &[7]), (7, &[50]), (8, &[8, 50]), (8, &[8])];
    let mut results = Vec::new();
    for (uid, gids) in users {
        world.call_as(uid, gids);
        for port in [80, 81] {
            let result = call_guest(&mut world, lines[0], port).map(drop);
            results.push((result.is_ok(), last(&world).rule.unwrap().0));
        }
    }
    world.host_caller = HostCaller::Published(Outsider::default());
    assert_eq!(call_guest(&mut world, lines[0], 80), Err(Reason::Denied));
    let expected = [
        (true, 0),
        (false, 1),
        (true, 0),
        (false, 1),
        (false, 3),
        (true, 2),
        (false, 3),
        (false, 3),
    ];
    assert_eq!(results, expected);
    world.finish();
}

#[test]
fn a_user_is_known_again_and_forgotten_once_it_has_no_circuit() {
    let (mut world, lines) = world();
    let first = world.switch.program(1000, &[1000, 50, 50]);
    assert!(first.is_some());
    assert_eq!(world.switch.program(1000, &[50, 1000]), first);
    assert_ne!(world.switch.program(1000, &[50]), first);
    assert_ne!(world.switch.program(1001, &[50, 1000]), first);
    world.call_as(1000, &[50, 1000]);
    call_guest(&mut world, lines[1], 80).unwrap();
    let switch = &mut world.switch;
    for uid in 0..3 * 4096 {
        assert!(switch.program(2000 + uid, &[]).is_some(), "{uid}");
        assert!(switch.programs.known.len() <= 4096);
    }
    assert_eq!(switch.program(1000, &[50, 1000]), first, "of a circuit");
    world.finish();
    let switch = &mut world.switch;
    for uid in 0..4096 {
        assert!(switch.program(20_000 + uid, &[]).is_some(), "{uid}");
    }
    let mut known = switch.programs.known.iter();
    assert!(!known.any(|(_, program)| program.uid == 1000));
}

#[test]
fn a_user_more_than_can_be_told_apart_is_refused_until_a_circuit_ends() {
    let (mut world, _) = world();
    let switch = &mut world.switch;
    for uid in 0..4096 {
        let program = switch.program(uid, &[]).map(HostCaller::Program);
        assert!(program.is_some(), "{uid}");
        switch.programs.opened(program);
        switch.programs.opened(program);
        switch.programs.closed(program);
    }
    assert_eq!(switch.program(5000, &[]), None);
    let known = switch.program(7, &[]).map(HostCaller::Program);
    assert!(known.is_some());
    switch.programs.closed(known);
    assert!(switch.program(5000, &[]).is_some());
    assert_eq!(
        switch.program(5001, &[]),
        switch.program(5001, &[]),
        "of no circuit yet"
    );
}
