//! Ringdown: cli.
fn main() {}
