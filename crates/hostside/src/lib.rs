//! The daemon's side towards the host and towards agents: services, published ports, egress, channels, and the daemon's end of serial lines.
//!
//! - [`proxy`] puts calls to services through and accepts connections for published ports; [`offers`] is what the control plane asks of it.
//! - [`channels`] and [`serial_line`] meet VMMs at virtio-serial ports ([`chardev`]).
//! - [`starter`] is the process that starts programs for a daemon that is confined.
//! - [`gates`] is where paths in directories that may be others' are looked up, so that no other call waits for it.
//! - [`arrivals`] and [`hello`] are how agents' connections come in.
//! - [`audit`] is what is written down of a call, and [`forwarded`] the frames of a connection that an agent carries.

pub mod arrivals;
pub mod audit;
pub mod channels;
pub mod chardev;
pub mod forwarded;
pub mod gates;
pub mod hello;
pub mod offers;
pub mod proxy;
pub mod serial_line;
pub mod starter;
