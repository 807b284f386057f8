//! Hybrid lines with a VMM of the tests' own at the other end: calls in every direction that needs no ring, what a VMM can do
//! wrong, and the sockets that come and go.

#![allow(clippy::unwrap_used)]

mod agents;
mod change;
mod circuits;
mod hostile;
mod house;
mod serial;
mod slow;
mod sockets;
mod vmm;
#[path = "../watchers/mod.rs"]
mod watchers;

/// How long anything may take. Nothing here waits that long unless it is broken.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);
