//! The guest's side of Ringdown: it says to the host that the guest is ready, runs commands for it, and takes part in
//! benchmarks of its line. Beside that, [`forward`] lets programs of the guest that know nothing of vsock reach services of the host, and [`transparent`] programs that know nothing of
//! proxies the network.
//!
//! The agent is one static binary with threads and blocking waits, and no runtime: a thread that accepts
//! ([`server`]), a thread that keeps the host informed ([`uplink`]), and a thread for each operation ([`session`]),
//! of which there are at most [`session::MAX_OPERATIONS`]. Where there is a serial port instead of vsock, one thread runs it ([`serial`]). It needs no files, and of the system only `/proc`, and
//! `/dev/pts` for terminals.

mod bench;
pub mod callers;
mod clock;
pub mod command;
pub mod config;
pub mod directory;
mod exec;
mod files;
pub mod forward;
mod forwarding;
pub mod freezer;
pub mod generation;
pub mod guest;
pub mod host_socket;
mod job;
pub mod launch;
mod log;
mod outgoing;
mod pump;
pub mod serial;
pub mod server;
pub mod session;
mod share;
pub mod signals;
pub mod stop;
mod stream;
pub mod switchboard;
mod tool;
pub mod transparent;
pub mod transport;
pub mod uplink;
