//! VMs without vsock, from the VMM's socket to the host's: a whole daemon, and a guest and a VMM that the tests play.

#![allow(clippy::unwrap_used)]

#[path = "serial/channels.rs"]
mod channels;
#[path = "serial/house.rs"]
mod house;
#[path = "serial/lines.rs"]
mod lines;
