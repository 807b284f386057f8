//! What the parts of the daemon share of the process and of the host.
//!
//! - [`directory`]: the runtime directory, its lock, and the sockets that a dead daemon left behind.
//! - [`places`]: how many of a thing each user of the host may have.
//! - [`rate`]: rates in real time.
//! - [`sockets`]: pairs of sockets, and descriptors that a runtime watches.
//! - [`thread`]: a thread with a runtime of its own.

pub mod directory;
pub mod places;
pub mod rate;
pub mod sockets;
pub mod thread;
