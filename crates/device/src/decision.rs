//! What the operator decided, with the names of both ends, for the audit.

use std::net::IpAddr;

use policy::RuleId;
use serde::Serialize;
use vsock::{CircuitId, Reason};

use crate::snapshot::CircuitSnapshot;

/// What became of one call.
#[derive(Debug)]
pub struct Decision<'a> {
    /// The caller.
    pub caller: DecisionCaller,
    /// The circuit that it has become. That of a hybrid VM's caller is not given.
    pub circuit: Option<CircuitId>,
    /// The callee meant.
    pub dialled: DecisionCallee,
    /// The real callee, if it came so far: by a redirection another one.
    pub reached: Option<DecisionCallee>,
    /// The rule that decided, and what a person finds it by.
    pub rule: Option<(RuleId, &'a str)>,
    /// Why it was refused or came to nothing, if it did.
    pub result: Result<(), Reason>,
}

/// The caller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum DecisionCaller {
    /// A guest.
    Vm {
        /// Its domain.
        domain: String,
        /// Its name in the domain.
        vm: String,
        /// Its context identifier.
        cid: u32,
        /// The port it called from.
        port: u32,
    },
    /// A program of the host.
    Program {
        /// The user it runs as.
        uid: u32,
        /// Its process, if the system said so.
        pid: Option<u32>,
    },
    /// A caller at a published port.
    Published {
        /// The name of the published port.
        published: String,
        /// The address it came from, if it has one.
        #[serde(skip_serializing_if = "Option::is_none")]
        peer: Option<String>,
    },
}

/// The callee.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum DecisionCallee {
    /// A guest.
    Vm {
        /// Its domain.
        domain: String,
        /// Its name in the domain.
        vm: String,
        /// Its context identifier.
        cid: u32,
        /// The port that was called.
        port: u32,
    },
    /// A program of a guest, to which the guest's agent was to connect.
    Place {
        /// The guest's domain.
        domain: String,
        /// The guest's name in the domain.
        vm: String,
        /// Where it listens: `tcp:127.0.0.1:80`.
        place: String,
    },
    /// A service of the host.
    Service {
        /// Its domain.
        domain: String,
        /// Its name.
        service: String,
        /// The port that was called.
        port: u32,
    },
    /// A socket that a program of the host made for the calling guest: `<host path>_<port>`.
    Listener {
        /// The port that was called.
        listener: u32,
    },
    /// An address beyond the host.
    Address {
        /// The name that was asked for.
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// The address, if it came so far.
        #[serde(skip_serializing_if = "Option::is_none")]
        address: Option<IpAddr>,
        /// The port there.
        port: u16,
    },
    /// A context identifier of no VM.
    UnknownCid {
        /// The identifier.
        cid: u32,
        /// The port that was called.
        port: u32,
    },
}

/// Something that has happened to a line or a circuit.
#[derive(Debug, Clone)]
pub enum Observation<'a> {
    /// The guest's driver runs its rings, or its guest answers at a serial port.
    LineUp {
        /// The VM's full name.
        vm: &'a str,
    },
    /// The guest has gone, or knows nothing of its circuits any more.
    LineDown {
        /// The VM's full name.
        vm: &'a str,
    },
    /// A circuit is over on both ends.
    CircuitEnded {
        /// How it stood at its end.
        circuit: &'a CircuitSnapshot,
        /// Why it was cut short, if it was.
        reason: Option<Reason>,
    },
}

/// Takes note of what happens. It must not block.
pub type Observer = Box<dyn FnMut(&Observation<'_>) + Send>;

/// Takes note of decisions. It must not block.
pub type DecisionSink = Box<dyn FnMut(Decision<'_>) + Send>;
