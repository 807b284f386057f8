//! Circuits are set up in every direction.

use std::time::Duration;

use wire::vsock::SocketType;

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
