//! Redirected calls, which neither side can notice.

use wire::vsock::{HOST_CID, Header, Operation};

use super::*;
use crate::tests::model::{After, Answer, Socket, reads, sends};
use crate::{CalleeId, Side};

/// `web` means `old`, and reaches `new` at another port.
fn moved() -> (World, Vec<LineId>) {
    let rules = vec![redirect("web", "old", "new", Some(5432))];
    let (mut world, lines) = world_of(&[("web", 3), ("old", 4), ("new", 5)], rules);
    listen(&mut world, &lines[2..], 5432, sends(200_000));
    (world, lines)
}

/// Checks each packet that a guest is sent, and each that it sends.
fn assert_only(world: &World, line: LineId, own: (u32, u32), peer: (u32, u32)) {
    let guest = &world.guests[&line];
    let pair = |cid: u64, port| (cid as u32, port);
    let received = guest.rx.iter().map(|packet| packet.header);
    for Header {
        src_cid,
        dst_cid,
        src_port,
        dst_port,
        ..
    } in received
    {
        assert_eq!(
            (pair(src_cid, src_port), pair(dst_cid, dst_port)),
            (peer, own)
        );
    }
    let sent = guest.tx.iter().map(|packet| packet.header);
    for Header {
        src_cid,
        dst_cid,
        src_port,
        dst_port,
        ..
    } in sent
    {
        assert_eq!(
            (pair(src_cid, src_port), pair(dst_cid, dst_port)),
            (own, peer)
        );
    }
}

#[test]
fn both_guests_see_the_numbers_they_expect_from_the_dial_to_the_end() {
    let (mut world, lines) = moved();
    let socket = world.connect_to(lines[0], 4, 80, sends(200_000));
    let port = world.guests[&lines[0]].socket(socket).port;
    let mut steps = 0;
    // Guests first, so that what they have been sent can be checked before they take it.
    loop {
        let mut busy = false;
        for line in &lines {
            busy |= world.take_from_guest(*line, usize::MAX) > 0;
        }
        for line in &lines {
            busy |= world.pump(*line) > 0;
        }
        assert_only(&world, lines[0], (3, port), (4, 80));
        assert_only(&world, lines[2], (5, 5432), (3, port));
        assert!(world.guests[&lines[1]].rx.is_empty(), "it is not called");
        let now = world.now;
        for line in &lines {
            let guest = world.guests.get_mut(line).expect("it exists");
            while guest.take_packet(&mut world.audit) {
                busy = true;
            }
            busy |= guest.run_programs(now, &mut world.audit);
        }
        world.check_tables();
        steps += 1;
        if !busy {
            break;
        }
    }
    assert!(steps > 3);
    assert_eq!(world.totals.bytes, 400_000);
    assert_eq!(world.reasons(), []);
    assert_eq!(world.switch.circuits.len(), 0, "closed by both");
    world.finish();
}

#[test]
fn half_of_a_redirected_circuit_is_closed() {
    let (mut world, lines) = moved();
    listen(&mut world, &lines[2..], 5432, reads());
    let mut plan = sends(1000);
    plan.closes = false;
    let socket = world.connect_to(lines[0], 4, 80, plan);
    world.settle();
    let theirs = world.guest(lines[2]).accepted(5432);
    assert_eq!(theirs, None, "it has read the end, and closed");
    assert!(world.guests[&lines[0]].socket(socket).done);
    assert_eq!(world.reasons(), []);
    world.finish();
}

#[test]
fn a_reset_passes_through_a_redirection_both_ways() {
    for side in [Side::Caller, Side::Callee] {
        let (mut world, lines) = moved();
        listen(&mut world, &lines[2..], 5432, sleeps());
        let socket = world.connect_to(lines[0], 4, 80, sleeps());
        world.settle();
        let (line, socket) = match side {
            Side::Caller => (lines[0], socket),
            Side::Callee => (lines[2], world.guest(lines[2]).accepted(5432).unwrap()),
        };
        world.guest(line).send(socket, Operation::Reset, 0, None);
        let guest = world.guest(line);
        guest.sockets.clear();
        guest.table.clear();
        world.settle();
        assert_eq!(world.reasons(), [Reason::PeerReset]);
        assert_eq!(world.switch.circuits.len(), 0);
        world.finish();
    }
}

#[test]
fn the_ports_of_a_redirected_circuit_are_free_again() {
    let (mut world, lines) = moved();
    listen(&mut world, &lines[2..], 5432, reads());
    for _ in 0..3 {
        let mut socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
        socket.plan = sends(100);
        let now = world.now;
        world
            .guest(lines[0])
            .connect(now, socket, (4, 80), Some(700));
        world.settle();
        assert_eq!(world.switch.circuits.len(), 0);
    }
    assert_eq!(world.reasons(), []);
    world.finish();
}

#[test]
fn one_guest_calls_another_by_two_names_from_one_port() {
    // Both calls would be the same connection to the called guest, which could not tell them apart.
    let rules = vec![redirect("web", "old", "new", Some(80)), allow("web", "new")];
    let (mut world, lines) = world_of(&[("web", 3), ("old", 4), ("new", 5)], rules);
    listen(&mut world, &lines, 80, sleeps());
    let from = |world: &mut World, cid, port| {
        let mut socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
        socket.plan = sleeps();
        let now = world.now;
        let id = world
            .guest(lines[0])
            .connect(now, socket, (cid, 80), Some(port));
        world.settle();
        world.is_established(lines[0], id)
    };
    assert!(from(&mut world, 4, 700));
    assert!(!from(&mut world, 5, 700));
    assert_eq!(world.reasons(), [Reason::PortsInUse]);
    assert!(from(&mut world, 5, 701));
    world.finish();
}

#[test]
fn nobody_is_put_through_to_itself() {
    let rules = vec![redirect("*", "old", "web", None)];
    let (mut world, lines) = world_of(&[("web", 3), ("old", 4), ("ci", 5)], rules);
    listen(&mut world, &lines, 80, sleeps());
    assert_eq!(call(&mut world, lines[0], 4, 80), Err(Reason::Denied));
    assert!(call(&mut world, lines[2], 4, 80).is_ok());
    world.finish();
}

#[test]
fn somebody_who_means_himself_may_be_put_through() {
    let rules = vec![redirect("web", "web", "db", None)];
    let (mut world, lines) = world_of(&[("web", 3), ("db", 4)], rules);
    listen(&mut world, &lines, 80, sleeps());
    assert!(call(&mut world, lines[0], 3, 80).is_ok());
    assert!(world.guest(lines[1]).accepted(80).is_some());
    world.finish();
}

#[test]
fn the_target_of_a_redirection_is_missing_or_down() {
    let (mut world, lines) = moved();
    world.line_down(lines[2]);
    assert_eq!(call(&mut world, lines[0], 4, 80), Err(Reason::NotRunning));
    world.remove_line(lines[2]);
    assert_eq!(call(&mut world, lines[0], 4, 80), Err(Reason::NotRunning));
    let rules = vec![redirect("web", "old", "service:none", None)];
    world.set_rules(rules);
    assert_eq!(call(&mut world, lines[0], 4, 80), Err(Reason::NotRunning));
    world.finish();
}

#[test]
fn it_does_not_matter_whether_the_vm_runs_for_which_another_answers() {
    let (mut world, lines) = moved();
    listen(&mut world, &lines[2..], 5432, sleeps());
    world.line_down(lines[1]);
    let socket = call(&mut world, lines[0], 4, 80).unwrap();
    // Not even whether it is there, once the call has been put through; its number may be another VM's by then.
    world.remove_line(lines[1]);
    let other = add(&mut world, "other", 6);
    assert_eq!(other, lines[1], "numbers of lines are used again");
    assert!(world.is_established(lines[0], socket));
    world.set_rules(vec![deny("web", "other")]);
    assert!(world.is_established(lines[0], socket));
    assert_eq!(world.enforce(), 1, "there is none to be replaced");
    world.finish();
}

#[test]
fn redirections_are_not_followed_twice() {
    let rules = vec![redirect("*", "a", "b", None), redirect("*", "b", "c", None)];
    let (mut world, lines) = world_of(&[("web", 3), ("a", 4), ("b", 5), ("c", 6)], rules);
    listen(&mut world, &lines, 80, sleeps());
    assert!(call(&mut world, lines[0], 4, 80).is_ok());
    assert!(world.guest(lines[2]).accepted(80).is_some());
    assert!(world.guest(lines[3]).accepted(80).is_none());
    world.finish();
}

#[test]
fn a_call_to_a_vm_reaches_a_service_and_the_other_way_round() {
    let rules = vec![
        redirect("*", "db", "service:cloud-db", None),
        redirect("*", "service:registry", "cache", Some(80)),
        redirect("*", "listeners", "cache", None).at(81),
    ];
    let (mut world, lines) = world_of(&[("web", 3), ("db", 4), ("cache", 5)], rules);
    let plan = sends(100_000);
    world.set_services(&[
        (DEFAULT_DOMAIN, "cloud-db", 6000, Answer::Accept(plan)),
        (DEFAULT_DOMAIN, "registry", 5000, Answer::Never),
    ]);
    listen(&mut world, &lines, 80, plan);
    listen(&mut world, &lines, 81, plan);
    for (cid, port) in [(4, 5432), (HOST_CID, 5000), (HOST_CID, 81)] {
        world.connect_to(lines[0], cid, port, plan);
        world.settle();
    }
    assert_eq!(world.totals.bytes, 600_000);
    assert_eq!(world.reasons(), []);
    let reached: Vec<_> = world
        .decided
        .iter()
        .map(|decided| decided.reached)
        .collect();
    let cache = |port| {
        Some(CalleeId::Guest {
            line: lines[2],
            port,
        })
    };
    let service = Some(CalleeId::Service(policy::ServiceId(0)));
    assert_eq!(reached, [service, cache(80), cache(81)]);
    world.finish();
}

#[test]
fn a_service_that_takes_calls_for_a_vm_is_closed_with_a_reset() {
    let rules = vec![redirect("*", "db", "service:cloud-db", None)];
    let (mut world, lines) = world_of(&[("web", 3), ("db", 4)], rules);
    let mut plan = sends(50_000);
    plan.after = After::Close;
    world.set_services(&[(DEFAULT_DOMAIN, "cloud-db", 6000, Answer::Accept(plan))]);
    let socket = world.connect_to(lines[0], 4, 5432, sleeps());
    world.settle();
    world
        .guest(lines[0])
        .send(socket, Operation::Reset, 0, None);
    let guest = world.guest(lines[0]);
    guest.sockets.clear();
    guest.table.clear();
    world.settle();
    assert_eq!(world.switch.circuits.len(), 0);
    world.finish();
}

#[test]
fn programs_of_the_host_are_put_through_to_another_vm_too() {
    let rules = vec![redirect("host", "old", "new", Some(81))];
    let (mut world, lines) = world_of(&[("old", 3), ("new", 4)], rules);
    listen(&mut world, &lines, 80, sleeps());
    listen(&mut world, &lines, 81, sends(1000));
    let token = world.dial(lines[0], 80, SocketType::Stream, sends(1000));
    world.settle();
    assert_eq!(world.programs[&token].read, 1000);
    assert_eq!(world.guest(lines[0]).accepted(80), None);
    let decided = world.decided[0];
    let guest = |line, port| Some(CalleeId::Guest { line, port });
    assert_eq!(decided.dialled, guest(lines[0], 80));
    assert_eq!((decided.dialled_cid, decided.dialled_port), (3, 80));
    assert_eq!(decided.reached, guest(lines[1], 81));
    world.finish();
}

#[test]
fn programs_of_the_host_are_not_put_through_to_each_other() {
    let rules = vec![redirect("host", "old", "service:registry", None)];
    let (mut world, lines) = world_of(&[("old", 3)], rules);
    world.set_services(&[(DEFAULT_DOMAIN, "registry", 5000, Answer::Never)]);
    let refused = Err(Reason::Denied);
    assert_eq!(call_guest(&mut world, lines[0], 80), refused);
    world.finish();
}
