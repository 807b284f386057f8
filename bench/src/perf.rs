//! The bench: how fast a program with vhost-user-vsock devices is, and what that costs.
//!
//! # Theory of operation
//!
//! Guests, and the programs that they talk to, run here, all of them on one processor; what is measured runs as a process of its own, on another
//! ([`subject`]). A [`guest`] is lean: what a packet costs in it is what a guest must do. A case is measured by letting it run, warming up, and
//! reading all meters twice ([`measure`]); so the figures have no parts from beginnings and ends. A [`run`] goes through the cases and measures in
//! turn, round robin, the machine's limit, Ringdown, and the peer, so that a disturbance of the machine affects them all. [`report`] makes tables and
//! plots of what was kept.
//!
//! Every measurement also says how busy the generator was: on two processors it has much to do, since it plays the guest and the
//! host's program, and where it has no time left it measures itself. The cheap mode takes most of its work away.

pub mod capture;
pub mod case;
pub mod connect;
pub mod control;
pub mod environment;
pub mod goals;
pub mod guest;
pub mod host;
pub mod latency;
pub mod limits;
pub mod measure;
pub mod pattern;
pub mod peer;
pub mod process;
pub mod processor;
pub mod progress;
pub mod report;
pub mod results;
pub mod ring;
pub mod run;
pub mod scale;
pub mod subject;
pub mod throughput;
