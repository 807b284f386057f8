//! Targets for guest memory and virtqueues.

use bolero::check;

#[test]
fn ring_walk() {
    check!(name = "ring_walk")
        .with_max_len(2048)
        .for_each(fuzz::ring::walk);
}

#[test]
fn ring_setup() {
    check!(name = "ring_setup")
        .with_max_len(64)
        .for_each(fuzz::ring::setup);
}

#[test]
fn segments_move() {
    check!(name = "segments_move")
        .with_max_len(512)
        .for_each(fuzz::segments::move_bytes);
}
