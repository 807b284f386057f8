//! Many circuits that are cut: in slices, and yet as if it were at once.

use policy::{Address, LineId};
use wire::vsock::{Header, Operation, SocketType};

use super::model::{Call, Socket, World, sleeps};
use crate::switch::CUTS_AT_ONCE;
use crate::{Event, Limits, Reason, Side};

/// Circuits of guests to programs of the host.
fn with_circuits(guests: u32, count: usize) -> (World, Vec<LineId>) {
    let (mut world, lines) = World::of(guests, Limits::default());
    world.listen_host(lines[0], 80, sleeps());
    for _ in 0..count {
        world.connect(lines[0], 80, sleeps());
    }
    world.settle();
    assert_eq!(world.switch.circuits.len(), count);
    (world, lines)
}

/// How many programs have seen that they are cut off.
fn cut_off(world: &World) -> usize {
    let programs = world.programs.values();
    let reset = |call: &Call| *call == Call::Closed { reset: true };
    programs.filter(|program| reset(&program.call)).count()
}

fn ticks(world: &mut World) -> Vec<usize> {
    let mut counts = vec![cut_off(world)];
    while world.switch.poll_at().is_some_and(|at| at <= world.now) {
        world.handle(Event::Tick);
        counts.push(cut_off(world));
    }
    counts
}

#[test]
fn a_line_that_goes_down_is_down_at_once_and_its_circuits_are_cut_in_slices() {
    let count = 3 * CUTS_AT_ONCE + 1;
    let (mut world, lines) = with_circuits(1, count);
    world.line_down(lines[0]);
    assert!(!world.switch.is_up(lines[0]));
    let program = world.dial(lines[0], 80, SocketType::Stream, sleeps());
    assert_eq!(
        world.programs[&program].call,
        Call::Rejected(Reason::NotRunning)
    );
    let slices = [1, 2, 3].map(|slice| slice * CUTS_AT_ONCE);
    assert_eq!(ticks(&mut world), [&slices[..], &[count]].concat());
    assert!(world.switch.circuits.is_empty());
    assert!(world.reasons().contains(&Reason::LineDown));
    world.finish();
}

#[test]
fn a_driver_that_starts_anew_meanwhile_meets_nothing_of_what_was_before() {
    let (mut world, lines) = with_circuits(1, 5);
    world.switch.cuts_at_once = 1;
    let used = world.switch.circuits().last().unwrap().caller.port;
    world.line_up(lines[0]);
    assert_eq!(cut_off(&world), 1);
    // The programs of the old circuits have something for a guest that is gone.
    for program in world.programs.values_mut() {
        program.plan.left = 1000;
    }
    // The last circuit's ports again, before its turn to be cut.
    let socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
    let now = world.now;
    let id = world
        .guest(lines[0])
        .connect(now, socket, (2, 80), Some(used));
    world.settle();
    assert!(world.is_established(lines[0], id));
    assert_eq!(cut_off(&world), 2);
    assert_eq!(world.guest(lines[0]).sockets.len(), 1);
    assert_eq!(ticks(&mut world).last(), Some(&5));
    assert!(world.is_established(lines[0], id));
    assert_eq!(world.switch.circuits.len(), 1);
    world.finish();
}

#[test]
fn a_guest_may_use_its_ports_again_before_their_circuit_is_cut() {
    for resets in [false, true] {
        use_ports_again(resets);
    }
}

/// A guest calls another, whose driver starts anew, and calls it again from the same port; with a reset before that or without.
fn use_ports_again(resets: bool) {
    let (mut world, lines) = World::of(3, Limits::default());
    world.switch.cuts_at_once = 1;
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, sleeps());
    for line in [0, 2] {
        world.connect_to(lines[line], 4, 80, sleeps());
    }
    world.settle();
    let last = world.switch.circuits().last().unwrap();
    let (caller, port) = (last.caller.line.unwrap(), last.caller.port);
    if resets {
        let reset = Header {
            src_cid: u64::from(world.guest(caller).cid),
            dst_cid: 4,
            src_port: port,
            dst_port: 80,
            socket_type: SocketType::Stream as u16,
            operation: Operation::Reset as u16,
            ..Header::default()
        };
        // The callee's ring has no room to hear of it.
        world.guest(lines[1]).paused = true;
        world.inject(caller, reset);
        world.guest(caller).hostile = false;
    }
    world.line_up(lines[1]);
    world.guest(lines[1]).paused = false;
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, sleeps());
    world.guest(caller).forget();
    let socket = Socket::new(Side::Caller, SocketType::Stream, 65_536);
    let now = world.now;
    let id = world
        .guest(caller)
        .connect(now, socket, (4, 80), Some(port));
    world.settle();
    assert!(world.is_established(caller, id));
    ticks(&mut world);
    world.settle();
    assert!(world.is_established(caller, id));
    world.finish();
}

#[test]
fn a_line_that_is_removed_is_free_at_once_and_its_number_when_all_is_cut() {
    let (mut world, lines) = with_circuits(1, 5);
    world.switch.cuts_at_once = 2;
    let address = world.switch.address(lines[0]).unwrap().clone();
    world.remove_line(lines[0]);
    assert_eq!(world.switch.line_by_name(&address.name), None);
    assert_eq!(world.switch.lines().count(), 0);
    // Removed a second time, it is not there.
    world
        .switch
        .remove_line(world.now, lines[0], &mut Vec::new());
    let next = world.add_vm(Address::new(&address.name, address.cid));
    assert_ne!(next, lines[0]);
    assert_eq!(ticks(&mut world), [2, 4, 5]);
    assert_eq!(world.switch.lines.len(), 1);
    assert_eq!(world.add_guest(7), lines[0], "numbers are used again");
    world.finish();
}

#[test]
fn a_policy_is_enforced_in_slices() {
    let count = CUTS_AT_ONCE + 10;
    let (mut world, lines) = World::of(2, Limits::default());
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, sleeps());
    for _ in 0..count {
        world.connect_to(lines[0], 4, 80, sleeps());
    }
    world.settle();
    assert_eq!(world.switch.circuits.len(), count);
    let open = |world: &World| {
        let circuits = world.switch.circuits();
        circuits.filter(|circuit| !circuit.is_cut_short).count()
    };
    world.set_rules(Vec::new());
    assert_eq!(world.enforce(), count);
    assert_eq!(open(&world), count - CUTS_AT_ONCE);
    ticks(&mut world);
    assert_eq!(open(&world), 0);
    world.settle();
    world.finish();
}
