//! Other rules, while circuits live.

use policy::RuleId;
use wire::vsock::HOST_CID;

use super::*;
use crate::tests::model::{Answer, reads, sends};

fn at_most(circuits: u32) -> RuleLimits {
    RuleLimits {
        circuits: Some(circuits),
        ..RuleLimits::default()
    }
}

fn bytes(per_second: u64) -> RuleLimits {
    RuleLimits {
        bytes_per_second: Some(per_second),
        ..RuleLimits::default()
    }
}

const VMS: [(&str, u32); 4] = [("web", 3), ("ci", 4), ("db", 5), ("cache", 6)];

fn world(rules: Vec<Rule>) -> (World, Vec<LineId>) {
    let (mut world, lines) = world_of(&VMS, rules);
    listen(&mut world, &lines, 80, sleeps());
    (world, lines)
}

/// The rules by which circuits live, in the order in which they were set up.
fn rules_of(world: &World) -> Vec<Option<u32>> {
    let circuits = world.switch.circuits.iter();
    circuits
        .map(|(_, circuit)| circuit.call.rule.map(|rule| rule.0))
        .collect()
}

#[test]
fn circuits_count_for_the_rule_that_allows_them_now() {
    let (mut world, lines) = world(vec![allow("*", "*")]);
    for cid in [5, 5, 6] {
        call(&mut world, lines[0], cid, 80).unwrap();
    }
    call_guest(&mut world, lines[2], 80).unwrap();
    assert_eq!(rules_of(&world), [Some(0), Some(0), Some(0), None]);
    let rules = vec![
        deny("ci", "*"),
        allow("*", "cache").within(at_most(2)),
        allow("*", "db").within(at_most(2)),
        allow("host", "*"),
    ];
    world.set_rules(rules);
    assert_eq!(rules_of(&world), [Some(2), Some(2), Some(1), Some(3)]);
    assert_eq!(call(&mut world, lines[0], 5, 80), Err(Reason::RuleCircuits));
    assert!(call(&mut world, lines[0], 6, 80).is_ok());
    assert_eq!(world.enforce(), 0);
    world.finish();
}

#[test]
fn a_limit_that_is_lowered_ends_nobody_and_lets_nobody_in() {
    let (mut world, lines) = world(vec![allow("*", "*")]);
    for _ in 0..3 {
        call(&mut world, lines[0], 5, 80).unwrap();
    }
    world.set_rules(vec![allow("*", "*").within(at_most(2))]);
    assert_eq!(world.enforce(), 0);
    assert_eq!(call(&mut world, lines[1], 6, 80), Err(Reason::RuleCircuits));
    let socket = *world.guest(lines[0]).sockets.keys().next().unwrap();
    for _ in 0..2 {
        assert_eq!(call(&mut world, lines[1], 6, 80), Err(Reason::RuleCircuits));
    }
    let _ = socket;
    world.line_down(lines[2]);
    world.settle();
    assert!(call(&mut world, lines[1], 6, 80).is_ok());
    world.finish();
}

#[test]
fn what_no_rule_allows_any_more_goes_on_until_somebody_enforces_the_rules() {
    let (mut world, lines) = world(vec![allow("*", "*")]);
    listen(&mut world, &lines, 81, sends(100_000));
    world.connect_to(lines[0], 5, 81, sends(100_000));
    let kept = call(&mut world, lines[0], 6, 80).unwrap();
    let ended = call(&mut world, lines[1], 5, 80).unwrap();
    world.set_rules(vec![allow("web", "*").at(80), allow("web", "db")]);
    world.settle();
    assert!(world.is_established(lines[1], ended));
    assert_eq!(call(&mut world, lines[1], 5, 80), Err(Reason::Denied));
    let socket = world.connect_to(lines[0], 5, 81, sends(100_000));
    world.settle();
    assert!(!world.guests[&lines[0]].sockets.contains_key(&socket));
    assert_eq!(world.totals.bytes, 400_000);
    assert_eq!(world.enforce(), 1);
    world.settle();
    assert!(world.is_established(lines[0], kept));
    assert!(
        world.guests[&lines[1]]
            .sockets
            .get(&ended)
            .is_none_or(|socket| socket.done)
    );
    let denied = world
        .reasons()
        .iter()
        .filter(|reason| **reason == Reason::Denied)
        .count();
    assert_eq!(denied, 2, "the refused call, and the ended circuit");
    assert_eq!(world.enforce(), 0, "once is enough");
    world.finish();
}

#[test]
fn what_has_been_ended_is_not_ended_again_while_a_guest_takes_its_time() {
    let (mut world, lines) = world(vec![allow("*", "*")]);
    call(&mut world, lines[0], 5, 80).unwrap();
    world.guest(lines[0]).paused = true;
    world.guest(lines[2]).paused = true;
    world.set_rules(Vec::new());
    assert_eq!(world.enforce(), 1);
    assert_eq!(world.enforce(), 0);
    world.finish();
}

#[test]
fn enforcing_ends_calls_that_nobody_has_answered() {
    let (mut world, lines) = world(vec![allow("*", "*")]);
    world.guest(lines[2]).paused = true;
    let socket = world.connect_to(lines[0], 5, 80, sleeps());
    let token = world.dial(lines[2], 80, SocketType::Stream, sleeps());
    world.settle();
    world.set_rules(vec![deny("*", "*"), deny("host", "*")]);
    assert_eq!(world.enforce(), 2);
    world.settle();
    assert!(!world.guests[&lines[0]].sockets.contains_key(&socket));
    assert_eq!(world.programs[&token].call, Call::Rejected(Reason::Denied));
    world.finish();
}

#[test]
fn a_redirection_that_changes_ends_circuits_that_would_go_elsewhere_now() {
    let changes: [(Vec<Rule>, usize); 6] = [
        (vec![redirect("*", "db", "cache", Some(80))], 0),
        (vec![redirect("web", "db", "cache", Some(80))], 0),
        (vec![redirect("*", "db", "ci", Some(80))], 1),
        (vec![redirect("*", "db", "cache", None)], 1),
        (vec![allow("*", "db")], 1),
        (vec![redirect("*", "db", "service:x", None)], 1),
    ];
    for (rules, ended) in changes {
        let (mut world, lines) = world(vec![redirect("*", "db", "cache", Some(80))]);
        call(&mut world, lines[0], 5, 5432).unwrap();
        world.set_rules(rules);
        let expected = (ended == 0).then_some(0);
        assert_eq!(rules_of(&world), [expected]);
        assert_eq!(world.enforce(), ended);
        world.finish();
    }
    // And the other way round.
    let (mut world, lines) = world(vec![allow("*", "db")]);
    call(&mut world, lines[0], 5, 80).unwrap();
    world.set_rules(vec![redirect("*", "db", "cache", None)]);
    assert_eq!(world.enforce(), 1);
    world.finish();
}

#[test]
fn a_redirection_whose_target_is_another_vm_of_that_name_ends_circuits_with_the_old() {
    let (mut world, lines) = world(vec![redirect("*", "db", "cache", None)]);
    call(&mut world, lines[0], 5, 80).unwrap();
    // The old one still drains when the new one has its name, and even the number of its line.
    world.guest(lines[0]).paused = true;
    world.remove_line(lines[3]);
    assert_eq!(add(&mut world, "cache", 7), lines[3]);
    world.set_rules(vec![redirect("*", "db", "cache", None)]);
    assert_eq!(rules_of(&world), [None]);
    world.finish();
}

#[test]
fn services_that_are_gone_or_forbidden_lose_their_circuits_when_that_is_wanted() {
    let accepts = Answer::Accept(sleeps());
    let rules = || vec![allow("*", "service:*")];
    let (mut world, lines) = world(rules());
    let services = [
        (DEFAULT_DOMAIN, "a", 1000, accepts),
        (DEFAULT_DOMAIN, "b", 1001, accepts),
    ];
    world.set_services(&services);
    call(&mut world, lines[0], HOST_CID, 1000).unwrap();
    call(&mut world, lines[0], HOST_CID, 1001).unwrap();
    world.set_services(&services[..1]);
    world.set_rules(rules());
    assert_eq!(rules_of(&world), [Some(0), None]);
    assert_eq!(world.enforce(), 1);
    world.set_rules(vec![allow("*", "service:b")]);
    assert_eq!(world.enforce(), 1);
    world.settle();
    assert_eq!(world.switch.circuits.len(), 0);
    world.finish();
}

#[test]
fn own_ports_and_what_needs_no_rule_outlive_every_change() {
    let (mut world, lines) = world(vec![allow("*", "listeners"), allow("host", "*")]);
    for port in [80, 1006, 1007] {
        world.listen_host(lines[0], port, sleeps());
        call(&mut world, lines[0], HOST_CID, port).unwrap();
    }
    call_guest(&mut world, lines[0], 80).unwrap();
    world.set_rules(Vec::new());
    assert_eq!(rules_of(&world), [None; 4]);
    assert_eq!(world.enforce(), 0);
    world.set_rules(vec![deny("*", "listeners"), deny("host", "*")]);
    assert_eq!(world.enforce(), 2);
    world.finish();
}

#[test]
fn numbers_of_rules_that_are_no_more_mean_nothing() {
    let many: Vec<Rule> = (0..200)
        .map(|port| allow("*", "*").at(port).within(at_most(1)))
        .collect();
    let (mut world, lines) = world(many);
    for port in [70, 199] {
        listen(&mut world, &lines, port, reads());
        call(&mut world, lines[0], 5, port).unwrap();
    }
    assert_eq!(rules_of(&world), [Some(70), Some(199)]);
    for rules in [
        Vec::new(),
        vec![allow("*", "*").at(199).within(at_most(1))],
        vec![deny("*", "*")],
    ] {
        world.set_rules(rules);
        let there = world.switch.policy.rules().len() as u32;
        assert!(
            rules_of(&world)
                .into_iter()
                .flatten()
                .all(|rule| rule < there)
        );
        world.settle();
    }
    let id = RuleId(199);
    assert!(world.switch.policy.rule(id).is_none());
    world.finish();
}

#[test]
fn a_limit_of_bytes_that_is_lifted_lets_those_go_on_who_rest() {
    for from_host in [false, true] {
        let slow = || {
            vec![
                allow("*", "*").within(bytes(1)),
                allow("host", "*").within(bytes(1)),
                allow("*", "listeners").within(bytes(1)),
            ]
        };
        let (mut world, lines) = world(slow());
        listen(&mut world, &lines, 81, reads());
        world.listen_host(lines[0], 81, reads());
        world.connect_to(lines[0], 5, 81, sends(3_000_000));
        world.connect_to(lines[0], HOST_CID, 81, sends(3_000_000));
        if from_host {
            world.dial(lines[0], 81, SocketType::Stream, sends(3_000_000));
        }
        world.advance(Duration::from_secs(10));
        assert!(
            world
                .switch
                .poll_at()
                .is_some_and(|at| at > world.now + Duration::from_secs(1000))
        );
        let before = world.totals.bytes;
        assert!(before < 3_000_000);
        world.set_rules(vec![allow("*", "*")]);
        let start = world.now;
        world.advance(Duration::from_secs(1));
        assert_eq!(
            world.totals.bytes,
            6_000_000 + 3_000_000 * u64::from(from_host)
        );
        assert!(world.now <= start + Duration::from_secs(1));
        assert_eq!(world.switch.circuits.len(), 0);
        world.finish();
    }
}

#[test]
fn a_limit_of_bytes_that_is_set_holds_for_circuits_that_live() {
    let (mut world, lines) = world(vec![allow("*", "*")]);
    listen(&mut world, &lines, 81, reads());
    world.connect_to(lines[0], 5, 81, sends(400_000_000));
    for _ in 0..20 {
        world.round();
    }
    world.set_rules(vec![allow("*", "*").within(bytes(1_000_000))]);
    let before = world.totals.bytes;
    world.advance(Duration::from_secs(5));
    let passed = world.totals.bytes - before;
    assert!((4_500_000..6_000_000).contains(&passed), "{passed}");
    world.set_rules(vec![allow("*", "*").within(bytes(2_000_000))]);
    let before = world.totals.bytes;
    world.advance(Duration::from_secs(5));
    let passed = world.totals.bytes - before;
    assert!((9_000_000..11_000_000).contains(&passed), "{passed}");
    world.finish_soon(0);
}

#[test]
fn data_that_is_on_its_way_does_not_notice_a_reload() {
    let rules = |number: u32| {
        let mut rules = vec![deny("ci", "cache"); number as usize % 7];
        rules.push(allow("*", "*"));
        rules
    };
    let (mut world, lines) = world(rules(0));
    listen(&mut world, &lines, 81, sends(2_000_000));
    world.connect_to(lines[0], 5, 81, sends(2_000_000));
    world.connect_to(lines[1], 5, 81, sends(2_000_000));
    for number in 0..100 {
        world.set_rules(rules(number));
        assert_eq!(world.enforce(), 0);
        world.round();
    }
    world.settle();
    assert_eq!(world.totals.bytes, 8_000_000);
    assert_eq!(world.reasons(), []);
    world.finish();
}
