//! What is counted of rules, and that it stays so through a reload.

use super::*;
use crate::tests::model::{Answer, Socket, reads, sends};
use crate::{RuleReport, Side};

const VMS: [(&str, u32); 3] = [("web", 3), ("db", 5), ("cache", 6)];

fn named(rule: Rule, label: &str) -> Rule {
    Rule {
        label: label.to_owned(),
        is_named: true,
        ..rule
    }
}

fn rules() -> Vec<Rule> {
    vec![
        named(allow("web", "db").within(limit_of_circuits(2)), "to-db"),
        named(allow("cache", "db"), "cached"),
    ]
}

fn limit_of_circuits(most: u32) -> RuleLimits {
    RuleLimits {
        circuits: Some(most),
        ..RuleLimits::default()
    }
}

/// The reports after a survey in slices of this many places.
fn reports(world: &mut World, slice: usize) -> Vec<RuleReport> {
    for from in (0..world.switch.circuit_places()).step_by(slice) {
        world.switch.survey(from..from + slice);
    }
    world.switch.rule_reports()
}

fn report(world: &mut World, label: Option<&str>) -> RuleReport {
    let reports = reports(world, 1);
    let of = |report: &RuleReport| report.label.as_deref() == label;
    reports.into_iter().find(of).expect("there is such a rule")
}

#[test]
fn circuits_bytes_and_refusals_count_for_their_rule() {
    let (mut world, lines) = world_of(&VMS, rules());
    listen(&mut world, &lines, 80, reads());
    for _ in 0..2 {
        let mut socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
        socket.plan = sends(1000);
        let now = world.now;
        world.guest(lines[0]).connect(now, socket, (5, 80), None);
        world.settle();
    }
    let before = report(&mut world, Some("to-db"));
    assert_eq!(before.counters.opened, 2);
    assert_eq!(before.counters.bytes[0], 2000);
    world.settle();
    assert_eq!(call(&mut world, lines[0], 6, 80), Err(Reason::Denied));
    let none = report(&mut world, None);
    assert_eq!(none.counters.refused[&Reason::Denied], 1);
    assert_eq!(
        report(&mut world, Some("cached")).counters,
        Default::default()
    );
    let set_up = world.switch.lines().map(|line| {
        let counts = line.counters.set_up.counts;
        (line.id, counts.iter().sum::<u64>())
    });
    let set_up: Vec<_> = set_up.collect();
    assert_eq!(
        set_up,
        [(lines[0], 0), (lines[1], 2), (lines[2], 0)],
        "of the one that answers"
    );
    world.finish();
    // What circuits that are over have carried is not forgotten.
    let after = report(&mut world, Some("to-db"));
    assert_eq!((after.circuits, after.counters), (0, before.counters));
}

#[test]
fn a_reload_takes_nothing_away_from_a_rule_that_stays() {
    let (mut world, lines) = world_of(&VMS, rules());
    listen(&mut world, &lines, 80, sleeps());
    world
        .listeners
        .insert((lines[1], 80), Answer::Accept(sleeps()));
    assert!(call(&mut world, lines[0], 5, 80).is_ok());
    assert!(call(&mut world, lines[0], 5, 80).is_ok());
    assert_eq!(call(&mut world, lines[0], 5, 80), Err(Reason::RuleCircuits));
    assert!(call(&mut world, lines[2], 5, 80).is_ok());
    // It stands elsewhere now, and the other is gone: its circuit has no rule any more.
    let stays = rules().remove(0);
    let new = named(allow("db", "cache"), "new");
    world.set_rules(vec![new, stays]);
    let to_db = report(&mut world, Some("to-db"));
    assert_eq!((to_db.circuits, to_db.counters.opened), (2, 2));
    assert_eq!(to_db.counters.refused[&Reason::RuleCircuits], 1);
    assert_eq!(report(&mut world, Some("new")).counters, Default::default());
    assert_eq!(report(&mut world, None).circuits, 1);
    assert_eq!(reports(&mut world, 2).len(), 3);
    world.finish();
}

#[test]
fn rules_of_one_name_lose_nothing_by_a_reload() {
    let namesakes = || {
        vec![
            named(allow("web", "db"), "to-db"),
            named(allow("cache", "db"), "to-db"),
        ]
    };
    let (mut world, lines) = world_of(&VMS, namesakes());
    listen(&mut world, &lines, 80, reads());
    let calls_of = |world: &mut World, line: usize, count: usize| {
        for _ in 0..count {
            let mut socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
            socket.plan = sends(1000);
            let now = world.now;
            world.guest(lines[line]).connect(now, socket, (5, 80), None);
            world.settle();
        }
    };
    calls_of(&mut world, 0, 1);
    calls_of(&mut world, 2, 2);
    let sum = |world: &mut World| {
        let mut sum = crate::RuleCounters::default();
        for report in reports(world, 3) {
            if report.label.as_deref() == Some("to-db") {
                sum.add(&report.counters);
            }
        }
        (sum.opened, sum.bytes[0])
    };
    assert_eq!(sum(&mut world), (3, 3000));
    // As many again, only the second of them, and both.
    for rules in [namesakes(), vec![namesakes().remove(1)], namesakes()] {
        world.set_rules(rules);
        assert_eq!(sum(&mut world), (3, 3000));
    }
    calls_of(&mut world, 2, 1);
    assert_eq!(sum(&mut world), (4, 4000));
    world.finish();
}

#[test]
fn a_rule_without_a_name_is_known_by_what_it_says_and_not_by_its_place() {
    let at_line = |line: u32, rule: Rule| Rule {
        is_named: false,
        ..named(rule, &format!("ringdown.toml: line {line}, column 1"))
    };
    let opened = |world: &mut World| {
        let reports = reports(world, 1);
        let opened = reports.iter().map(|report| report.counters.opened);
        opened.collect::<Vec<_>>()
    };
    let rules = vec![
        at_line(1, allow("web", "db")),
        at_line(2, allow("cache", "db")),
    ];
    let (mut world, lines) = world_of(&VMS, rules);
    listen(&mut world, &lines, 80, sleeps());
    assert!(call(&mut world, lines[0], 5, 80).is_ok());
    for _ in 0..2 {
        assert!(call(&mut world, lines[2], 5, 80).is_ok());
    }
    assert_eq!(opened(&mut world), [0, 1, 2]);
    // A line more above: each place is another rule's now.
    world.set_rules(vec![
        at_line(1, allow("db", "cache")),
        at_line(2, allow("web", "db")),
        at_line(3, allow("cache", "db")),
    ]);
    assert_eq!(opened(&mut world), [0, 0, 1, 2]);
    // What says something else at the same place is another rule.
    world.set_rules(vec![
        at_line(1, allow("db", "cache")),
        at_line(2, allow("web", "db").within(limit_of_circuits(9))),
        at_line(3, allow("cache", "db")),
    ]);
    assert_eq!(opened(&mut world), [0, 0, 0, 2]);
    world.finish();
}
