//! Calls to the host: services, own sockets, and the operator's own ports.

use wire::vsock::HOST_CID;

use super::*;
use crate::tests::model::{Answer, reads, sends};

const REGISTRY: (&str, &str, u32, Answer) = (DEFAULT_DOMAIN, "registry", 5000, accepts());

const fn accepts() -> Answer {
    Answer::Accept(Plan {
        left: 0,
        write_len: 1000,
        after: crate::tests::model::After::HalfClose,
        reads: true,
        closes: true,
    })
}

fn service(name: &'static str, port: u32) -> (&'static str, &'static str, u32, Answer) {
    (DEFAULT_DOMAIN, name, port, accepts())
}

fn host(world: &mut World, line: LineId, port: u32) -> Result<(), Reason> {
    call(world, line, HOST_CID, port).map(drop)
}

#[test]
fn a_service_is_called_by_whom_a_rule_allows_and_by_nobody_else() {
    let rules = vec![allow("ci", "service:registry")];
    let (mut world, lines) = world_of(&[("ci", 3), ("web", 4)], rules);
    world.set_services(&[REGISTRY]);
    assert_eq!(host(&mut world, lines[0], 5000), Ok(()));
    assert_eq!(host(&mut world, lines[1], 5000), Err(Reason::Denied));
    // Not a service's port: no program has made a socket for it.
    assert_eq!(host(&mut world, lines[1], 5001), Err(Reason::NoListener));
    world.finish();
}

#[test]
fn data_goes_both_ways_between_a_guest_and_a_service() {
    let rules = vec![allow("*", "service:registry")];
    let (mut world, lines) = world_of(&[("ci", 3)], rules);
    let plan = sends(300_000);
    world.set_services(&[(DEFAULT_DOMAIN, "registry", 5000, Answer::Accept(plan))]);
    world.connect(lines[0], 5000, plan);
    world.settle();
    assert_eq!(world.totals.bytes, 600_000);
    assert_eq!(world.reasons(), []);
    world.finish();
}

#[test]
fn the_first_rule_that_matches_decides_about_services_by_name() {
    let rules = vec![
        deny("*", "service:git-secret"),
        allow("*", "service:git-*"),
        deny("*", "service:git-never"),
    ];
    let (mut world, lines) = world_of(&[("ci", 3)], rules);
    world.set_services(&[
        service("git-secret", 1),
        service("git-public", 2),
        service("git-never", 3),
        service("gi", 4),
        service("git-", 5),
    ]);
    let results: Vec<_> = (1..=5)
        .map(|port| host(&mut world, lines[0], port))
        .collect();
    let denied = Err(Reason::Denied);
    assert_eq!(results, [denied, Ok(()), Ok(()), denied, Ok(())]);
    world.finish();
}

#[test]
fn a_rule_about_services_is_about_its_ports_only() {
    let rules = vec![allow("*", "service:*").at(5000)];
    let (mut world, lines) = world_of(&[("ci", 3)], rules);
    world.set_services(&[service("a", 4999), service("b", 5000), service("c", 5001)]);
    let results: Vec<_> = (4999..=5001)
        .map(|port| host(&mut world, lines[0], port))
        .collect();
    let denied = Err(Reason::Denied);
    assert_eq!(results, [denied, Ok(()), denied]);
    world.finish();
}

#[test]
fn sockets_made_for_a_guest_are_open_to_it_unless_a_rule_says_otherwise() {
    let (mut world, lines) = world_of(&[("ci", 3), ("web", 4)], Vec::new());
    for line in &lines {
        world.listen_host(*line, 80, reads());
    }
    assert_eq!(host(&mut world, lines[0], 80), Ok(()));
    world.set_rules(vec![deny("ci", "listeners").at(80)]);
    assert_eq!(host(&mut world, lines[0], 80), Err(Reason::Denied));
    assert_eq!(host(&mut world, lines[0], 81), Err(Reason::NoListener));
    assert_eq!(host(&mut world, lines[1], 80), Ok(()));
    world.finish();
}

#[test]
fn the_operators_own_ports_are_reachable_whatever_the_rules_say() {
    let rules = vec![
        deny("*", "listeners"),
        deny("*", "service:*"),
        redirect("*", "listeners", "web", None),
    ];
    let (mut world, lines) = world_of(&[("ci", 3), ("web", 4)], rules);
    for port in 1004..=1008 {
        world.listen_host(lines[0], port, reads());
    }
    let results: Vec<_> = (1004..=1008)
        .map(|port| host(&mut world, lines[0], port))
        .collect();
    let denied = Err(Reason::Denied);
    assert_eq!(results, [denied, Ok(()), Ok(()), Ok(()), denied]);
    world.finish();
}

#[test]
fn no_service_takes_the_operators_own_ports() {
    let (mut world, lines) = world_of(&[("ci", 3)], vec![deny("*", "service:*")]);
    world.set_services(&[
        service("false-switchboard", 1005),
        service("false-directory", 1006),
        service("false-agent", 1007),
    ]);
    for port in [1005, 1006, 1007] {
        world.listen_host(lines[0], port, reads());
        assert_eq!(host(&mut world, lines[0], port), Ok(()));
    }
    world.finish();
}

#[test]
fn a_service_that_is_gone_takes_no_calls_and_keeps_those_it_has() {
    let rules = vec![allow("*", "service:*")];
    let (mut world, lines) = world_of(&[("ci", 3)], rules);
    let slow = Answer::Accept(sleeps());
    world.set_services(&[(DEFAULT_DOMAIN, "registry", 5000, slow)]);
    assert_eq!(host(&mut world, lines[0], 5000), Ok(()));
    world.set_services(&[]);
    assert_eq!(host(&mut world, lines[0], 5000), Err(Reason::NoListener));
    assert_eq!(world.switch.circuits.len(), 1);
    // A rule may still name it; there is nothing that it could mean.
    world.set_rules(vec![allow("*", "service:*")]);
    assert_eq!(world.enforce(), 1);
    world.finish();
}

#[test]
fn a_service_may_fail_in_its_own_ways() {
    let (mut world, lines) = world_of(&[("ci", 3)], vec![allow("*", "service:*")]);
    let reasons = [
        Reason::NoListener,
        Reason::Unreachable,
        Reason::ServiceTimedOut,
        Reason::HostFailed,
    ];
    for reason in reasons {
        world.set_services(&[(DEFAULT_DOMAIN, "registry", 5000, Answer::Refuse(reason))]);
        assert_eq!(host(&mut world, lines[0], 5000), Err(reason));
    }
    world.finish();
}

#[test]
fn a_service_that_does_not_answer_is_given_up() {
    let (mut world, lines) = world_of(&[("ci", 3)], vec![allow("*", "service:*")]);
    world.set_services(&[(DEFAULT_DOMAIN, "registry", 5000, Answer::Never)]);
    world.connect(lines[0], 5000, sleeps());
    world.advance(Limits::default().handshake);
    world.settle();
    assert_eq!(world.reasons(), [Reason::ServiceTimedOut]);
    world.finish();
}

#[test]
fn a_domain_has_services_of_its_own() {
    let rules = vec![
        allow("red/*", "service:red/*"),
        allow("blue/*", "service:red/*"),
    ];
    let (mut world, lines) = world_of(&[("red/a", 3), ("blue/a", 3)], rules);
    world.set_services(&[("red", "registry", 5000, accepts())]);
    assert_eq!(host(&mut world, lines[0], 5000), Ok(()));
    // There is no way to call it, even where a rule allows it: the port is a port of the other domain.
    assert_eq!(host(&mut world, lines[1], 5000), Err(Reason::NoListener));
    world.finish();
}

#[test]
fn the_port_of_a_service_is_told_to_those_who_may_call_it() {
    let rules = vec![allow("ci", "service:registry")];
    let (mut world, lines) = world_of(&[("ci", 3), ("web", 4), ("red/ci", 3)], rules);
    world.set_services(&[REGISTRY]);
    let found = |line: usize, name| world.switch.resolve_service(lines[line], name);
    assert_eq!(found(0, "registry"), Some(5000));
    assert_eq!(found(0, "other"), None);
    assert_eq!(found(1, "registry"), None);
    assert_eq!(found(2, "registry"), None);
}

#[test]
fn of_two_services_of_one_name_or_at_one_port_the_later_one_holds() {
    let (mut world, lines) = world_of(&[("ci", 3)], vec![allow("*", "service:*")]);
    world.set_services(&[
        service("a", 1),
        service("a", 2),
        service("b", 2),
        service("c", 3),
    ]);
    let found = |name| world.switch.resolve_service(lines[0], name);
    assert_eq!(
        (found("a"), found("b"), found("c")),
        (None, Some(2), Some(3))
    );
    world.set_services(&[service("a", 1), service("a", 2)]);
    assert_eq!(world.switch.resolve_service(lines[0], "a"), Some(2));
    assert_eq!(host(&mut world, lines[0], 1), Err(Reason::NoListener));
    world.finish();
}
