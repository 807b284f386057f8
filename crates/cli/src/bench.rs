//! `ringdown bench`: how fast a VM's line is, or the circuit between two VMs.
//!
//! A *measurement* is one direction of throughput, or round trips. It has one or more streams, each with a thread here and
//! a connection to the agent ([`link`]); between two VMs, to both agents, and the payload then passes from guest to guest
//! and not through this program ([`guests`], [`host`]). All streams are connected before the first begins. Then the calling
//! thread reads the clock, shows what has passed in each second, and says when it is enough ([`run`]).
//!
//! Time is taken from the host's clock, except for single round trips between guests, which only the guest sees. What counts is what the receiver
//! has confirmed; that the stream just ended confirms nothing.

mod guests;
mod host;
mod link;
mod report;
mod run;

pub use report::Report;
pub use run::{Interrupt, measure};

use std::path::PathBuf;
use std::time::Duration;

use wire::agent::bench::Role;
use wire::agent::{ErrorKind, Invalid};

use crate::guest::GuestError;

/// How long nothing may pass before a measurement is given up. A guest without KVM on a busy machine is slow.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A VM that takes part.
#[derive(Debug, Clone)]
pub struct Party {
    /// Its name.
    pub name: String,
    /// Its context identifier.
    pub cid: u32,
    /// Its host socket.
    pub host_socket: PathBuf,
}

/// The parties.
#[derive(Debug, Clone)]
pub struct Parties {
    /// The VM.
    pub vm: Party,
    /// The VM that it calls, instead of the host.
    pub other: Option<Party>,
    /// The port at which the other VM's agent listens, or 0 for any.
    pub port: u32,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Throughput from the host, or the VM that calls, to the other.
    There,
    /// Throughput from the other to the host, or to the VM that calls.
    Back,
    /// Round trips.
    Ping,
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// What is measured.
    pub kind: Kind,
    /// The length of the messages in bytes, 1 to [`MAX_MESSAGE_LEN`](wire::agent::bench::MAX_MESSAGE_LEN).
    pub message_len: u32,
    /// How many streams, 1 to [`MAX_STREAMS`](wire::agent::bench::MAX_STREAMS).
    pub streams: usize,
    /// How long it takes.
    pub time: Duration,
    /// Whether every byte is checked.
    pub verify: bool,
}

impl Parties {
    /// The name of the sender, or caller, and its peer.
    fn names(&self, kind: Kind) -> (String, String) {
        let (far, near) = match &self.other {
            Some(other) => (other.name.clone(), self.vm.name.clone()),
            None => (self.vm.name.clone(), "host".to_owned()),
        };
        match kind {
            Kind::There | Kind::Ping => (near, far),
            Kind::Back => (far, near),
        }
    }
}

impl Kind {
    /// What the one that calls does, and what the other does.
    fn roles(self) -> (Role, Role) {
        match self {
            Kind::There => (Role::Source, Role::Sink),
            Kind::Back => (Role::Sink, Role::Source),
            Kind::Ping => (Role::Ping, Role::Echo),
        }
    }
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("VM {vm:?}: {source}")]
    Guest { vm: String, source: GuestError },
    #[error(
        "no rule lets VM {from:?} call VM {to:?} at port {port}: start the daemon with --allow from={from},to={to},port=*, \
         or add to its configuration file [[allow]] from = {from:?}, to = {to:?}, port = \"*\"; for a rule with a single port, \
         give that port to the benchmark as well, with --port"
    )]
    Denied {
        from: String,
        /// The VM that it calls.
        to: String,
        port: u32,
    },
    #[error("this cannot be measured: {0}")]
    Request(#[from] Invalid),
    #[error("cannot {what}: {source}")]
    Local {
        what: &'static str,
        source: std::io::Error,
    },
}

impl BenchError {
    /// Whether the one guest could not reach the other.
    fn is_unreachable(&self) -> bool {
        matches!(self, BenchError::Guest { source: GuestError::Agent(report), .. } if report.kind == ErrorKind::Unreachable)
    }
}

#[cfg(test)]
mod tests;
