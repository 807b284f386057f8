//! Targets for guest memory and virtqueues.

mod support;

target!(ring_walk, 2048, fuzz::ring::walk);
target!(ring_setup, 64, fuzz::ring::setup);
target!(segments_move, 512, fuzz::segments::move_bytes);
