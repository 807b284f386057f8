//! Limits of a called VM: one caller has a part of them, and its host and its own calls keep one.

use policy::LineId;
use wire::vsock::{HOST_CID, Operation, SocketType};

use super::model::{Call, Socket, World, sleeps};
use crate::{HostCaller, Limits, Outsider, Reason, Side};

/// The first is called.
fn world(guests: usize, limits: Limits) -> (World, Vec<LineId>) {
    let (mut world, lines) = World::of(guests as u32, limits);
    for line in &lines {
        world.listen_host(*line, 80, sleeps());
        world.guest(*line).listen(80, SocketType::Stream, sleeps());
    }
    (world, lines)
}

fn calls(world: &mut World, from: LineId, count: usize) {
    for _ in 0..count {
        world.connect_to(from, 3, 80, sleeps());
    }
    world.settle();
}

fn host_calls(world: &mut World, line: LineId) -> Call {
    let token = world.dial(line, 80, SocketType::Stream, sleeps());
    world.settle();
    world.programs[&token].call
}

#[test]
fn one_caller_has_a_quarter_of_the_circuits_and_all_of_them_three() {
    let limits = Limits {
        circuits: 16,
        ..Limits::default()
    };
    let (mut world, lines) = world(5, limits);
    calls(&mut world, lines[1], 4);
    assert_eq!(world.reasons(), []);
    calls(&mut world, lines[1], 1);
    assert_eq!(world.reasons(), [Reason::CircuitShare]);
    calls(&mut world, lines[2], 4);
    calls(&mut world, lines[3], 4);
    assert_eq!(world.reasons().len(), 1, "{:?}", world.reasons());
    calls(&mut world, lines[4], 1);
    assert_eq!(world.reasons(), [Reason::CircuitShare; 2]);

    let outside = host_calls(&mut world, lines[0]);
    assert_eq!(
        outside,
        Call::Rejected(Reason::CircuitShare),
        "a published port"
    );
    world.call_as(0, &[]);
    assert_eq!(host_calls(&mut world, lines[0]), Call::Open);
    for _ in 0..3 {
        let socket = world.connect(lines[0], 80, sleeps());
        world.settle();
        assert!(world.is_established(lines[0], socket));
    }
    let full = Call::Rejected(Reason::CircuitLimit);
    assert_eq!(host_calls(&mut world, lines[0]), full);
    world.finish();
}

/// By published ports one address has no more than one VM.
#[test]
fn one_caller_from_outside_leaves_circuits_to_others() {
    let limits = Limits {
        circuits: 16,
        ..Limits::default()
    };
    let (mut world, lines) = world(1, limits);
    for outsider in [1, 2, 3] {
        world.host_caller = HostCaller::Published(Outsider(outsider));
        for _ in 0..4 {
            assert_eq!(host_calls(&mut world, lines[0]), Call::Open);
        }
        let share = Call::Rejected(Reason::CircuitShare);
        assert_eq!(host_calls(&mut world, lines[0]), share);
    }
    world.call_as(0, &[]);
    assert_eq!(host_calls(&mut world, lines[0]), Call::Open);
    world.finish();
}

#[test]
fn one_caller_has_a_quarter_of_the_unanswered_dials_and_all_of_them_three() {
    let limits = Limits {
        half_open: 8,
        ..Limits::default()
    };
    let (mut world, lines) = world(5, limits);
    world.guest(lines[0]).paused = true;
    calls(&mut world, lines[1], 2);
    assert_eq!(world.reasons(), []);
    calls(&mut world, lines[1], 1);
    assert_eq!(world.reasons(), [Reason::HalfOpenShare]);
    calls(&mut world, lines[2], 2);
    calls(&mut world, lines[3], 2);
    calls(&mut world, lines[4], 1);
    assert_eq!(world.reasons(), [Reason::HalfOpenShare; 2]);

    world.call_as(0, &[]);
    let program = world.dial(lines[0], 80, SocketType::Stream, sleeps());
    let socket = world.connect_to(lines[0], HOST_CID, 80, sleeps());
    world.guest(lines[0]).paused = false;
    world.settle();
    assert_eq!(world.programs[&program].call, Call::Open);
    assert!(world.is_established(lines[0], socket));
    calls(&mut world, lines[1], 1);
    assert_eq!(world.reasons().len(), 2, "answered: there is room again");
    world.finish();
}

#[test]
fn a_share_is_free_again_when_its_circuits_end_or_its_vm_is_removed() {
    let limits = Limits {
        circuits: 8,
        ..Limits::default()
    };
    let (mut world, lines) = world(2, limits);
    calls(&mut world, lines[1], 3);
    assert_eq!(world.reasons(), [Reason::CircuitShare]);
    let shares = |world: &World| world.switch.lines[0].shares.by_origin.len();
    assert_eq!(shares(&world), 1);
    world.line_down(lines[1]);
    world.settle();
    world.advance(std::time::Duration::from_secs(20));
    assert_eq!(shares(&world), 0);
    world.finish();
}

#[test]
fn a_called_guest_does_not_pay_for_its_answers() {
    let limits = Limits {
        controls_per_second: 1000,
        ..Limits::default()
    };
    let (mut world, lines) = world(2, limits);
    world.advance(std::time::Duration::from_secs(1));
    let controls = |world: &World| world.switch.lines[0].controls.clone();
    let before = format!("{:?}", controls(&world));
    calls(&mut world, lines[1], 50);
    assert_eq!(world.reasons(), []);
    assert_eq!(format!("{:?}", controls(&world)), before);
    // What is left of what the calls paid is bounded by the calls.
    let prepaid = world.switch.lines[0].prepaid;
    assert!(prepaid <= 50, "{prepaid}");

    let socket = *world.guest(lines[0]).sockets.keys().next().unwrap();
    for _ in 0..=prepaid {
        let guest = world.guest(lines[0]);
        guest.send(socket, Operation::CreditUpdate, 0, None);
    }
    world.settle();
    assert_ne!(format!("{:?}", controls(&world)), before, "others cost");
    world.finish();
}

#[test]
fn one_caller_has_a_quarter_of_the_bytes_and_all_of_them_three() {
    const MIB: u64 = 1 << 20;
    let limits = Limits {
        grant_bytes: MIB as u32,
        min_grant_bytes: 1000,
        line_grant_bytes: 16 * MIB,
        ..Limits::default()
    };
    let (mut world, lines) = world(6, limits);
    let granted = |world: &World| world.switch.lines[0].granted_bytes;
    for (callers, caller) in lines.iter().enumerate().skip(1) {
        calls(&mut world, *caller, 100);
        let parts = 4 * callers.min(3) as u64 * MIB;
        let least = 1000 * 100 * callers as u64;
        let granted = granted(&world);
        assert!(
            granted + MIB > parts && granted <= parts + least,
            "{granted}"
        );
    }
    // The least that others' circuits are granted beyond their part takes nothing from what is left to the VM itself.
    let socket = world.connect(lines[0], 80, sleeps());
    world.settle();
    assert!(world.is_established(lines[0], socket));
    let (_, circuit) = world.switch.circuits.iter().next_back().unwrap();
    assert_eq!(u64::from(circuit.flows[0].grant()), MIB);
    world.finish();
}

#[test]
fn what_a_caller_offers_is_reserved_for_when_it_is_answered() {
    let limits = Limits::default();
    let (mut world, lines) = world(2, limits);
    let callee = world.guest(lines[0]);
    callee.paused = true;
    callee.listeners.get_mut(&80).unwrap().buf_alloc = u32::MAX;
    let mut socket = Socket::new(Side::Caller, SocketType::Stream, u32::MAX);
    socket.plan = sleeps();
    let now = world.now;
    world.guest(lines[1]).connect(now, socket, (3, 80), None);
    world.settle();
    let granted = |world: &World| world.switch.lines[0].granted_bytes;
    assert_eq!(granted(&world), u64::from(limits.grant_bytes));
    world.guest(lines[0]).paused = false;
    world.settle();
    assert_eq!(granted(&world), u64::from(limits.max_grant_bytes));
    // The callee, which was called with less, is notified.
    let callee = world.guest(lines[0]).accepted(80).unwrap();
    let shown = world.guest(lines[0]).socket(callee).peer_buf_alloc;
    assert_eq!(shown, limits.max_grant_bytes);
    world.finish();
}
