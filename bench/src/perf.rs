//! The bench: how fast a program with vhost-user-vsock devices is, and what that costs.
//!
//! Guests and the programs that they talk to run here, on one processor; what is measured runs as a process of its own, on
//! another. Figures are the means to an end: every measurement also says how busy the generator was, since a generator that is
//! itself the limit measures nothing else.

pub mod case;
pub mod control;
pub mod guest;
pub mod host;
pub mod latency;
pub mod measure;
pub mod pattern;
pub mod processor;
pub mod ring;
pub mod subject;
pub mod throughput;
