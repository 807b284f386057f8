//! The ports of Ringdown's own at a VM, of which its agent's is one: its host alone reaches them, and only directly.

use wire::vsock::HOST_CID;

use super::*;
use crate::{CircuitId, HostCaller, Outsider};

const OWN: [u32; 3] = [1005, 1006, 1007];

/// All may call all, by rules about all ports and about these.
fn open(mut more: Vec<Rule>) -> (World, Vec<LineId>) {
    more.extend([
        allow("*", "*"),
        allow("blue/*", "*"),
        allow("host", "*"),
        allow("blue/*", "blue/*").at(1007),
    ]);
    let vms = [("web", 3), ("box", 4), ("old", 5), ("blue/web", 3)];
    let (mut world, lines) = world_of(&vms, more);
    for port in OWN.into_iter().chain([80, 1004, 1008]) {
        listen(&mut world, &lines, port, sleeps());
    }
    (world, lines)
}

#[test]
fn no_rule_opens_them_to_a_guest() {
    let (mut world, lines) = open(vec![allow("web", "box").at(1007)]);
    let alias = world.resolve(lines[3], "default/box").unwrap();
    for port in OWN {
        let refused = Err(Reason::OwnPort);
        assert_eq!(call(&mut world, lines[0], 4, port), refused);
        assert_eq!(call(&mut world, lines[3], alias, port), refused);
    }
    assert!(world.decided.iter().all(|decided| decided.rule.is_some()));
    for port in [1004, 1008] {
        assert!(call(&mut world, lines[0], 4, port).is_ok());
        assert!(call(&mut world, lines[3], alias, port).is_ok());
    }
    world.finish();
}

#[test]
fn without_a_rule_the_reason_is_the_port_and_a_denial_stays_one() {
    let (mut world, lines) = world_of(&[("web", 3), ("box", 4), ("db", 5)], vec![deny("*", "db")]);
    assert_eq!(call(&mut world, lines[0], 4, 1007), Err(Reason::OwnPort));
    assert_eq!(call(&mut world, lines[0], 4, 80), Err(Reason::Denied));
    assert_eq!(call(&mut world, lines[0], 5, 1007), Err(Reason::Denied));
    world.finish();
}

#[test]
fn no_redirection_leads_there() {
    for port in OWN {
        let (mut world, lines) = open(vec![
            redirect("web", "old", "box", Some(port)).at(80),
            redirect("web", "old", "box", None),
            redirect("web", "listeners", "box", Some(port)).at(81),
            redirect("host", "old", "box", None).at(port),
            redirect("host", "old", "box", Some(port)),
        ]);
        let refused = Err(Reason::OwnPort);
        for (cid, dialled) in [(5, 80), (5, port), (HOST_CID, 81)] {
            assert_eq!(call(&mut world, lines[0], cid, dialled), refused);
        }
        for caller in [None, Some(1000)] {
            world.host_caller = HostCaller::Published(Outsider::default());
            if let Some(uid) = caller {
                world.call_as(uid, &[uid]);
            }
            for dialled in [port, 80] {
                let refused = Err(Reason::OwnPort);
                assert_eq!(call_guest(&mut world, lines[2], dialled), refused);
            }
        }
        world.finish();
    }
}

#[test]
fn a_program_of_the_host_reaches_them_directly_and_a_published_port_does_not() {
    let (mut world, lines) = open(Vec::new());
    for port in OWN {
        world.host_caller = HostCaller::Published(Outsider::default());
        assert_eq!(
            call_guest(&mut world, lines[1], port),
            Err(Reason::OwnPort),
            "a published port"
        );
        world.call_as(1000, &[1000]);
        assert!(call_guest(&mut world, lines[1], port).is_ok());
    }
    // The daemon calls its agents for published ports, and what such a call gets is what it called.
    world.host_caller = HostCaller::ForPublished(Outsider::default());
    assert!(call_guest(&mut world, lines[1], 1007).is_ok());
    world.set_rules(vec![
        redirect("host", "box", "box", Some(80)).at(1007),
        redirect("host", "web", "box", None),
        deny("host", "old"),
    ]);
    for (line, reason) in [
        (1, Reason::OwnPort),
        (0, Reason::OwnPort),
        (2, Reason::Denied),
    ] {
        assert_eq!(call_guest(&mut world, lines[line], 1007), Err(reason));
    }
    world.call_as(1000, &[1000]);
    // A redirection to where it called anyhow changes nothing; rules about programs still hold.
    world.set_rules(vec![
        redirect("host", "box", "box", Some(1007)).at(1007),
        deny("host", "old"),
    ]);
    assert!(call_guest(&mut world, lines[1], 1007).is_ok());
    assert_eq!(call_guest(&mut world, lines[2], 1007), Err(Reason::Denied));
    world.finish();
}

/// What vouches for a program of the host to an agent does not rest on the check of these ports.
#[test]
fn only_a_programs_call_of_what_it_got_is_direct() {
    let (mut world, lines) = open(vec![
        redirect("host", "old", "box", None).at(1004),
        redirect("host", "old", "old", Some(1008)).at(1004),
        redirect("host", "web", "web", Some(1008)).at(1004),
    ]);
    let mut known = Vec::new();
    let mut is_direct = |world: &World| {
        let all = world.switch.circuits.iter();
        let mut new: Vec<CircuitId> = all.map(|(_, circuit)| circuit.id).collect();
        new.retain(|id| !known.contains(id));
        known.extend(&new);
        assert_eq!(new.len(), 1);
        world.switch.is_hosts_direct_call(new[0])
    };
    call(&mut world, lines[0], 4, 80).unwrap();
    assert!(!is_direct(&world), "a guest's");
    world.host_caller = HostCaller::Published(Outsider::default());
    call_guest(&mut world, lines[1], 80).unwrap();
    assert!(!is_direct(&world), "a published port's");
    world.call_as(1000, &[1000]);
    call_guest(&mut world, lines[1], 1007).unwrap();
    assert!(is_direct(&world));
    call_guest(&mut world, lines[2], 1004).unwrap();
    assert!(!is_direct(&world), "redirected to another VM");
    call_guest(&mut world, lines[0], 1004).unwrap();
    assert!(!is_direct(&world), "redirected to another port");
    let gone = CircuitId {
        index: 99,
        generation: 0,
    };
    assert!(!world.switch.is_hosts_direct_call(gone));
}

#[test]
fn a_reload_that_redirects_a_circuit_of_the_host_ends_it() {
    let (mut world, lines) = open(Vec::new());
    world.call_as(1000, &[1000]);
    call_guest(&mut world, lines[1], 1007).unwrap();
    world.set_rules(vec![redirect("host", "old", "box", Some(1007))]);
    assert_eq!(world.enforce(), 0, "it was called directly");
    world.set_rules(vec![redirect("host", "box", "old", None)]);
    assert_eq!(world.enforce(), 1);
    world.finish();
}

#[test]
fn who_may_call_nothing_but_them_is_given_no_number() {
    let rules = vec![
        allow("blue/web", "box").at(1007),
        redirect("blue/web", "old", "box", Some(1006)).at(80),
        redirect("blue/web", "db", "box", None).at(1005),
        allow("blue/web", "mail").at(1007).at(80),
    ];
    let vms = [
        ("blue/web", 3),
        ("box", 4),
        ("old", 5),
        ("db", 6),
        ("mail", 7),
    ];
    let (mut world, lines) = world_of(&vms, rules);
    for name in ["default/box", "default/old", "default/db"] {
        assert_eq!(world.resolve(lines[0], name), None, "{name}");
    }
    assert!(world.resolve(lines[0], "default/mail").is_some());
    world.finish();
}

#[test]
fn a_rule_that_names_them_for_others_is_found() {
    let named = |rule: Rule| rule.own_ports_named();
    assert_eq!(named(allow("web", "box").at(1007)), [1007]);
    assert_eq!(
        named(Rule {
            ports: vec![1000..=1006],
            ..allow("@ring", "*")
        }),
        [1005, 1006]
    );
    assert_eq!(
        named(redirect("web", "listeners", "box", Some(1007))),
        [1007]
    );
    assert_eq!(named(redirect("host", "old", "box", None).at(1006)), [1006]);
    for rule in [
        allow("web", "box"),
        allow("host", "box").at(1007),
        allow("web", "listeners").at(1007),
        allow("web", "service:registry").at(1007),
        deny("web", "box").at(1007),
        redirect("web", "box", "old", Some(80)).at(1007),
        redirect("web", "box", "service:registry", None).at(1007),
    ] {
        assert_eq!(named(rule.clone()), [0; 0], "{rule:?}");
    }
}
