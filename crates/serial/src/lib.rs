//! Reliable channels over a virtio-serial port, which loses bytes.

pub mod driver;
pub mod link;
mod port;

pub use driver::{Answered, Driver, Handle};
pub use port::{Counters, Cut, Options, PeerEvent, Port, Status, Stream};
pub use wire::serial::{PORT_NAME, Refusal, RefusalKind};
