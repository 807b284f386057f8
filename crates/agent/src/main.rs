//! Ringdown: agent.
fn main() {}
