//! What is counted of rules, and that it stays so through a reload.

use super::*;
use crate::tests::model::{Answer, Socket, reads, sends};
use crate::{RuleReport, Side};

const VMS: [(&str, u32); 3] = [("web", 3), ("db", 5), ("cache", 6)];

fn named(rule: Rule, label: &str) -> Rule {
    Rule {
        label: label.to_owned(),
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

fn report(world: &World, label: Option<&str>) -> RuleReport {
    let reports = world.switch.rule_reports();
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
    let before = report(&world, Some("to-db"));
    assert_eq!(before.counters.opened, 2);
    assert_eq!(before.counters.bytes[0], 2000);
    world.settle();
    assert_eq!(call(&mut world, lines[0], 6, 80), Err(Reason::Denied));
    let none = report(&world, None);
    assert_eq!(none.counters.refused[&Reason::Denied], 1);
    assert_eq!(report(&world, Some("cached")).counters, Default::default());
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
    let after = report(&world, Some("to-db"));
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
    let to_db = report(&world, Some("to-db"));
    assert_eq!((to_db.circuits, to_db.counters.opened), (2, 2));
    assert_eq!(to_db.counters.refused[&Reason::RuleCircuits], 1);
    assert_eq!(report(&world, Some("new")).counters, Default::default());
    assert_eq!(report(&world, None).circuits, 1);
    assert_eq!(world.switch.rule_reports().len(), 3);
    world.finish();
}
