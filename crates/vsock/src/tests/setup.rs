//! Circuits are set up in every direction.

use std::time::Duration;

use wire::vsock::{HOST_CID, Operation, SocketType};

use super::model::{Call, World, reads, sends};
use crate::Limits;

#[test]
fn a_guest_calls_a_program_of_the_host() {
    let (mut world, lines) = World::of(1, Limits::default());
    world.listen_host(lines[0], 80, sends(1_000_000));
    let socket = world.connect(lines[0], 80, sends(2_000_000));
    world.settle();
    assert!(!world.guest(lines[0]).sockets.contains_key(&socket));
    assert_eq!(world.programs[&1].read, 2_000_000);
    assert_eq!(world.programs[&1].call, Call::Closed { reset: false });
    assert_eq!(world.totals.bytes, 3_000_000);
    world.finish();
}

#[test]
fn a_program_of_the_host_calls_a_guest() {
    let (mut world, lines) = World::of(1, Limits::default());
    world
        .guest(lines[0])
        .listen(22, SocketType::Stream, sends(300_000));
    let token = world.dial(lines[0], 22, SocketType::Stream, sends(500_000));
    world.settle();
    assert_eq!(world.programs[&token].read, 300_000);
    assert_eq!(world.totals.bytes, 800_000);
    world.finish();
}

#[test]
fn a_guest_calls_another_guest() {
    let (mut world, lines) = World::of(2, Limits::default());
    world
        .guest(lines[1])
        .listen(5432, SocketType::Stream, sends(3_000_000));
    world.connect_to(lines[0], 4, 5432, sends(700_000));
    world.settle();
    assert_eq!(world.totals.bytes, 3_700_000);
    assert!(world.now < Duration::from_secs(1));
    world.finish();
}

#[test]
fn nobody_has_anything_to_say() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.listen_host(lines[0], 80, reads());
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, reads());
    world.connect(lines[0], 80, reads());
    world.connect_to(lines[0], 4, 80, reads());
    world.dial(lines[1], 80, SocketType::Stream, reads());
    world.finish();
}

/// A signal interrupts `connect()`, and the kernel begins it anew: the same ports, a second request. Whether the first
/// has been seen, passed on or answered by then, it is one call.
#[test]
fn a_dial_that_is_repeated_is_one_call() {
    for stage in 0..5 {
        for callee_is_host in [false, true] {
            let (mut world, lines) = World::of(2, Limits::default());
            world
                .guest(lines[1])
                .listen(80, SocketType::Stream, sends(300_000));
            world.listen_host(lines[0], 80, sends(300_000));
            let cid = if callee_is_host { HOST_CID } else { 4 };
            let socket = world.connect_to(lines[0], cid, 80, sends(200_000));
            if stage > 0 {
                world.take_from_guest(lines[0], usize::MAX);
            }
            if stage > 1 {
                world.pump(lines[1]);
                while world
                    .guests
                    .get_mut(&lines[1])
                    .unwrap()
                    .take_packet(&mut world.audit)
                {}
            }
            if stage > 2 {
                world.take_from_guest(lines[1], usize::MAX);
            }
            if stage > 3 {
                world.pump(lines[0]);
            }
            world
                .guest(lines[0])
                .send(socket, Operation::Request, 0, None);
            world.settle();
            assert_eq!(world.totals.bytes, 500_000, "stage {stage}");
            assert_eq!(world.reasons(), [], "stage {stage}");
            let opened: u64 = world
                .switch
                .lines()
                .map(|line| line.counters.circuits_opened)
                .sum();
            assert_eq!(opened, if callee_is_host { 1 } else { 2 }, "stage {stage}");
            world.finish();
        }
    }
}
