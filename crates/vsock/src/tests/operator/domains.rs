//! Domains: the same names and numbers side by side, and what passes between them.

use super::*;
use crate::tests::model::{Socket, sends};
use crate::{AddLineError, Side};

/// Two domains with the same names and the same numbers.
fn twins(rules: Vec<Rule>) -> (World, Vec<LineId>) {
    let vms = [
        ("red/web", 3),
        ("red/db", 4),
        ("blue/web", 3),
        ("blue/db", 4),
    ];
    let (mut world, lines) = world_of(&vms, rules);
    for port in [80, 81] {
        listen(&mut world, &lines, port, sleeps());
    }
    (world, lines)
}

#[test]
fn domains_with_equal_names_and_numbers_live_side_by_side() {
    let (mut world, lines) = twins(vec![allow("red/*", "red/*"), allow("blue/*", "blue/*")]);
    for line in &lines {
        world
            .guest(*line)
            .listen(82, SocketType::Stream, sends(70_000));
    }
    for (from, to) in [(0, 1), (1, 0), (2, 3), (3, 2)] {
        let cid = world.guests[&lines[to]].cid;
        world.connect_to(lines[from], cid, 82, sends(70_000));
    }
    world.settle();
    assert_eq!(world.totals.bytes, 8 * 70_000);
    let decided: Vec<_> = world
        .decided
        .iter()
        .map(|decided| decided.rule.unwrap().0)
        .collect();
    let mut sorted = decided.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [0, 0, 1, 1]);
    world.finish();
}

#[test]
fn nothing_crosses_that_no_rule_names() {
    // Each of these is about one domain only, or about none that is there.
    let rules = vec![
        allow("red/*", "red/*"),
        allow("*", "*"),
        allow("blue/web", "db"),
    ];
    let (mut world, lines) = twins(rules);
    for (line, name) in [(0, "blue/db"), (2, "red/db"), (2, "db"), (0, "default/db")] {
        assert_eq!(world.resolve(lines[line], name), None, "{name}");
    }
    assert!(call(&mut world, lines[0], 4, 80).is_ok());
    assert_eq!(call(&mut world, lines[2], 4, 80), Err(Reason::Denied));
    // No VM has a number in a domain that is not its own.
    for line in &lines {
        for cid in [5, 1 << 30, (1 << 30) + 1, u32::MAX - 1] {
            assert_eq!(call(&mut world, *line, cid, 80), Err(Reason::UnknownCid));
        }
    }
    world.finish();
}

#[test]
fn one_rule_opens_exactly_one_path() {
    let (mut world, lines) = twins(vec![allow("red/web", "blue/db").at(80)]);
    let alias = world
        .resolve(lines[0], "blue/db")
        .expect("it may be called");
    assert!((1 << 30..1 << 31).contains(&alias));
    assert!(call(&mut world, lines[0], alias, 80).is_ok());
    let accepted = world.guest(lines[3]).accepted(80).unwrap();
    let caller = world.guests[&lines[3]].socket(accepted).peer_cid;
    assert_ne!(caller, 3, "that is its own domain's web");
    // Not at another port.
    assert_eq!(call(&mut world, lines[0], alias, 81), Err(Reason::Denied));
    // Not back.
    assert_eq!(call(&mut world, lines[3], caller, 80), Err(Reason::Denied));
    assert_eq!(world.resolve(lines[3], "red/web"), None);
    // No other, neither from there nor to there.
    assert_eq!(call(&mut world, lines[1], alias, 80), Err(Reason::Denied));
    assert_eq!(world.resolve(lines[1], "blue/db"), None);
    assert_eq!(call(&mut world, lines[2], caller, 80), Err(Reason::Denied));
    assert_eq!(call(&mut world, lines[2], 4, 80), Err(Reason::Denied));
    assert_eq!(call(&mut world, lines[0], 4, 80), Err(Reason::Denied));
    assert_eq!(world.resolve(lines[0], "blue/web"), None);
    let paths = world.switch.circuits.len();
    assert_eq!(paths, 1);
    world.finish();
}

#[test]
fn data_crosses_between_domains_and_each_side_sees_numbers_of_its_own() {
    let (mut world, lines) = twins(vec![allow("red/web", "blue/db")]);
    world
        .guest(lines[3])
        .listen(82, SocketType::Stream, sends(300_000));
    let alias = world.resolve(lines[0], "blue/db").unwrap();
    let socket = world.connect_to(lines[0], alias, 82, sends(300_000));
    world.settle();
    assert_eq!(world.totals.bytes, 600_000);
    assert!(!world.guests[&lines[0]].sockets.contains_key(&socket));
    assert_eq!(world.reasons(), []);
    world.finish();
}

#[test]
fn an_alias_is_the_same_each_time_and_for_everybody() {
    let rules = || vec![allow("red/*", "blue/*"), allow("green/*", "blue/*")];
    let (mut world, lines) = twins(rules());
    let alias = world.resolve(lines[0], "blue/db").unwrap();
    assert_eq!(world.resolve(lines[1], "blue/db"), Some(alias));
    assert_eq!(world.resolve(lines[0], "blue/db"), Some(alias));
    assert_ne!(world.resolve(lines[0], "blue/web"), Some(alias));
    world.remove_line(lines[3]);
    assert_eq!(world.resolve(lines[0], "blue/db"), None);
    assert_eq!(
        call(&mut world, lines[0], alias, 80),
        Err(Reason::UnknownCid)
    );
    let again = add(&mut world, "blue/db", 9);
    listen(&mut world, &[again], 80, sleeps());
    assert_eq!(world.resolve(lines[0], "blue/db"), Some(alias));
    assert!(call(&mut world, lines[0], alias, 80).is_ok());
    let elsewhere = add(&mut world, "green/web", 3);
    assert_eq!(world.resolve(elsewhere, "blue/db"), Some(alias));
    // Also in another world, in another order.
    let (mut world, lines) = twins(rules());
    world.resolve(lines[0], "blue/web");
    assert_eq!(world.resolve(lines[1], "blue/db"), Some(alias));
    world.finish();
}

#[test]
fn an_alias_gives_way_to_a_vm_that_gets_its_number() {
    let rules = vec![allow("red/*", "blue/db"), allow("red/*", "red/*")];
    let (mut world, lines) = twins(rules);
    let alias = world.resolve(lines[0], "blue/db").unwrap();
    let socket = call(&mut world, lines[0], alias, 80).unwrap();
    let newcomer = add(&mut world, "red/new", alias);
    listen(&mut world, &[newcomer], 80, sleeps());
    let next = world.resolve(lines[0], "blue/db").unwrap();
    assert_ne!(next, alias);
    // The circuit that was set up under the old number goes on under it.
    assert!(world.is_established(lines[0], socket));
    world.guest(lines[0]).sockets.get_mut(&socket).unwrap().plan = sends(50_000);
    let theirs = world.guest(lines[3]).accepted(80).unwrap();
    world
        .guest(lines[3])
        .sockets
        .get_mut(&theirs)
        .unwrap()
        .plan
        .reads = true;
    world.settle();
    assert_eq!(world.totals.bytes, 50_000);
    assert_eq!(world.guest(newcomer).sockets.len(), 0);
    // The number now means the newcomer, the next one the old.
    assert!(call(&mut world, lines[0], alias, 80).is_ok());
    assert!(world.guest(newcomer).accepted(80).is_some());
    assert!(call(&mut world, lines[0], next, 80).is_ok());
    assert_eq!(world.guest(lines[3]).sockets.len(), 2);
    world.finish();
}

#[test]
fn circuits_under_a_number_that_has_changed_hands_are_not_confused() {
    let rules = vec![
        allow("red/*", "blue/db"),
        allow("blue/db", "red/*"),
        allow("red/*", "red/*"),
    ];
    let (mut world, lines) = twins(rules);
    let alias = world.resolve(lines[0], "blue/db").unwrap();
    // Behind this number calls red/web, from port 700 to port 80, first a VM of another domain and then one of its own.
    let dial = |world: &mut World, line, port| {
        let mut socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
        socket.plan = sleeps();
        let now = world.now;
        let cid = world.resolve(line, "red/web").unwrap();
        let id = world
            .guest(line)
            .connect(now, socket, (cid, 80), Some(port));
        world.settle();
        world.is_established(line, id).then_some(id)
    };
    let first = dial(&mut world, lines[3], 700).expect("the ports are free");
    let newcomer = add(&mut world, "red/new", alias);
    assert_eq!(dial(&mut world, newcomer, 700), None);
    assert_eq!(world.reasons(), [Reason::PortsInUse]);
    let second = dial(&mut world, newcomer, 701).expect("these ports are free");
    for (line, socket) in [(lines[3], first), (newcomer, second)] {
        world.guest(line).sockets.get_mut(&socket).unwrap().plan = sends(10_000);
    }
    for socket in world.guest(lines[0]).sockets.values_mut() {
        socket.plan = sends(0);
    }
    world.settle();
    assert_eq!(world.totals.bytes, 20_000);
    assert_eq!(world.reasons().len(), 1);
    // The first is over: its ports can be used by the newcomer.
    assert!(dial(&mut world, newcomer, 700).is_some());
    world.finish();
}

#[test]
fn a_vm_that_goes_takes_its_aliases_and_its_circuits_with_it() {
    let (mut world, lines) = twins(vec![allow("red/*", "blue/*")]);
    let alias = world.resolve(lines[0], "blue/db").unwrap();
    let socket = call(&mut world, lines[0], alias, 80).unwrap();
    world.remove_line(lines[3]);
    world.settle();
    assert!(
        world.guests[&lines[0]]
            .sockets
            .get(&socket)
            .is_none_or(|socket| socket.done)
    );
    assert_eq!(world.reasons(), [Reason::Operator]);
    // Its line's number is another VM's now; the alias is not.
    let other = add(&mut world, "blue/other", 7);
    assert_eq!(other, lines[3]);
    assert_eq!(
        call(&mut world, lines[0], alias, 80),
        Err(Reason::UnknownCid)
    );
    world.finish();
}

#[test]
fn a_domain_that_is_empty_is_forgotten_with_all_that_was_known_of_others() {
    let rules = vec![allow("red/*", "blue/*"), allow("blue/*", "red/*")];
    let (mut world, lines) = twins(rules);
    world.resolve(lines[0], "blue/db");
    world.resolve(lines[2], "red/db");
    world.remove_line(lines[2]);
    world.remove_line(lines[3]);
    let green = add(&mut world, "green/web", 3);
    listen(&mut world, &[green], 80, sleeps());
    assert_eq!(world.resolve(green, "red/db"), None);
    let back = add(&mut world, "blue/db", 4);
    listen(&mut world, &[back], 80, sleeps());
    let alias = world.resolve(lines[0], "blue/db").unwrap();
    assert!(call(&mut world, lines[0], alias, 80).is_ok());
    assert_eq!(world.guest(green).sockets.len(), 0);
    world.finish();
}

#[test]
fn a_redirection_into_another_domain_needs_no_number_there() {
    let (mut world, lines) = twins(vec![redirect("red/web", "red/db", "blue/db", Some(81))]);
    let socket = call(&mut world, lines[0], 4, 80).unwrap();
    assert_eq!(world.guests[&lines[0]].socket(socket).peer_cid, 4);
    assert_eq!(world.guest(lines[1]).sockets.len(), 0);
    let theirs = world.guest(lines[3]).accepted(81).unwrap();
    let seen = world.guests[&lines[3]].socket(theirs).peer_cid;
    assert!(
        seen >= 1 << 30,
        "not the number that web has in its own domain"
    );
    world.finish();
}

#[test]
fn names_are_told_to_those_who_may_call_them() {
    let rules = vec![allow("web", "db").at(5432), deny("web", "ci")];
    let vms = [("web", 3), ("db", 4), ("ci", 5)];
    let (mut world, lines) = world_of(&vms, rules);
    let found: Vec<_> = ["web", "db", "ci", "nobody", "", "/", "red/db", "default/db"]
        .map(|name| world.resolve(lines[0], name))
        .to_vec();
    let expected = [Some(3), Some(4), None, None, None, None, None, Some(4)];
    assert_eq!(found, expected);
    assert_eq!(world.resolve(lines[1], "web"), None, "the other way round");
    assert_eq!(world.resolve(LineId(99), "web"), None);
}

#[test]
fn a_name_is_not_told_for_a_rule_that_an_earlier_one_forestalls() {
    let cases = [
        (vec![deny("web", "db"), allow("*", "*")], false),
        (vec![allow("web", "db").at(1), deny("web", "db")], true),
        (
            vec![deny("web", "db").at(1), allow("web", "db").at(1)],
            false,
        ),
        (
            vec![deny("web", "db").at(1), allow("web", "db").at(2)],
            true,
        ),
        (vec![deny("web", "db").at(1), allow("web", "db")], true),
        (
            vec![
                deny("web", "db").at(1),
                allow("web", "db").at(1),
                allow("*", "*"),
            ],
            true,
        ),
        (
            vec![deny("web", "db").at(1), allow("web", "db").at(1).at(2)],
            true,
        ),
        (vec![deny("ci", "db"), allow("*", "db")], true),
    ];
    for (rules, found) in cases {
        let case = format!("{rules:?}");
        let (mut world, lines) = world_of(&[("web", 3), ("db", 4)], rules);
        assert_eq!(world.resolve(lines[0], "db").is_some(), found, "{case}");
    }
}

#[test]
fn other_names_of_a_vm_mean_the_same() {
    let mut world = World::new(Limits::default());
    world.set_rules(vec![
        allow("web", "db"),
        redirect("ci", "web", "database", None),
    ]);
    let web = add(&mut world, "web", 3);
    let db = add(&mut world, "db", 4);
    let names = vec!["database".to_owned(), "sql".to_owned()];
    world.switch.set_aliases(vec![(db, names)]);
    let ci = add(&mut world, "ci", 5);
    listen(&mut world, &[web, db], 80, sleeps());
    assert_eq!(world.resolve(web, "sql"), Some(4));
    assert!(call(&mut world, ci, 3, 80).is_ok());
    assert!(world.guest(db).accepted(80).is_some());
    assert_eq!(world.resolve(db, "database"), Some(4));
    world.remove_line(db);
    assert_eq!(world.resolve(web, "sql"), None);
}

#[test]
fn names_and_numbers_are_taken_in_their_own_domain_only() {
    let (mut world, _) = twins(Vec::new());
    let mut add = |domain: &str, name: &str, cid| {
        let address = Address {
            domain: domain.to_owned(),
            ..Address::new(name, cid)
        };
        world
            .switch
            .add_line_at(address, Limits::default())
            .map(|_| ())
    };
    let name = "red/web".to_owned();
    assert_eq!(
        add("red", "x", 3),
        Err(AddLineError::CidTaken { cid: 3, name })
    );
    assert_eq!(
        add("red", "web", 9),
        Err(AddLineError::NameTaken("web".to_owned()))
    );
    assert_eq!(add("default", "web", 3), Ok(()));
    assert_eq!(add("red", "x", 9), Ok(()));
}
