//! The circuits of virtio-vsock: the protocol state and the credit of each, and the switch that joins them.
//!
//! [`Switch`] takes what happened ([`Event`]) and at what [`Time`](policy::Time), and answers with what to do ([`Action`]). For permission it
//! asks the directory and the rules of the crate `policy`. It holds the state and the credit of every circuit, and every limit; it never sees
//! payload, a descriptor, a thread, a lock or a clock. The same events at the same times give the same actions, so that every corner of the
//! protocol can be simulated in microseconds.
//!
//! # Theory of operation
//!
//! A *circuit* joins two [`Side`]s, the caller's and the callee's; each end is a guest on some line, or a program
//! on the host. It carries two *flows*, one a direction. A flow counts bytes three times, always modulo 2^32 as the
//! virtio specification does (virtio 1.2, section 5.10.6.3):
//!
//! ```text
//!   source --received--> [what the device holds for us] --delivered--> destination --acknowledged--> consumed
//! ```
//!
//! *received* is what the source has handed over, *delivered* what has reached the destination's ring or socket,
//! and *acknowledged* what the destination has consumed. `received - delivered` bytes are in the device's keeping;
//! they are never more than the flow's *grant*, which is reserved when the circuit is set up and never exceeded by
//! the credit that the source is shown. So memory is bounded before the first byte is sent, not after the last.
//!
//! Packets towards a guest are not queued: what is to be sent to a guest is a set of flags, and the number in a header is
//! taken when the header is written. [`Switch::next_for`] asks what to send next to a line that has room. A thousand
//! credit updates that find no room are one flag.
//!
//! Between two guests the credit runs end to end: the numbers that one guest announces are shown to the other,
//! capped by the grant. The switch adds no acknowledgement of its own.
//! New room is announced to a sender when it asks, along with data that goes its way, and before it runs dry, not whenever
//! its receiver has read something.
//!
//! Credit counts bytes; a Linux receiver since 6.12.92 counts packets too, and resets the connection of a sender that
//! sends too many. So the packets in flight are counted and bounded, and a receiver that has room for bytes but perhaps
//! not for packets is asked what it has consumed. Of messages a receiver consumes only whole ones: none is begun that
//! could not be finished.
//!
//! # What is tested
//!
//! `tests/model` plays both protocol sides and the device. Scenarios beside it are named for what they show;
//! `tests/simulation` runs random schedules from seeds; `tests/results.txt` is a table of what named scenarios cost.

mod call;
mod circuit;
mod circuits;
mod config;
mod counters;
mod cuts;
mod end;
mod ending;
mod event;
mod figures;
mod flow;
mod host;
mod hybrid;
mod ids;
mod inherit;
mod line;
mod operator;
mod own_ports;
mod packet;
mod programs;
mod reason;
mod share;
mod survey;
mod switch;
mod throttle;
mod transmit;
mod tuning;

pub use circuit::{CircuitReport, CircuitState, EndReport, EndedCircuit};
pub use config::Limits;
pub use counters::Counters;
pub use event::{
    Action, CalleeId, CallerId, Decided, Direction, Event, HostCall, HostCaller, Outsider, Sent,
    Transmit,
};
pub use figures::{RuleCounters, RuleReport, SetUpTimes};
pub use hybrid::{HybridView, MAX_OFFERED_PORTS, OfferedPorts};
pub use ids::{CircuitId, ProgramId, Side};
pub use inherit::{Inherited, Record, UnsentReset};
pub use line::{AddLineError, LineReport};
pub use reason::Reason;
pub use switch::Switch;

#[cfg(test)]
mod tests;
