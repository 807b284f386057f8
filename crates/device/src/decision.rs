//! What the operator decided, with the names of both ends, for the audit.

use policy::{Address, RuleId, ServiceEntry};
use vsock::{CircuitId, Reason};

use crate::snapshot::{CircuitSnapshot, Credentials};

/// What became of one call.
#[derive(Debug, Clone, Copy)]
pub struct Decision<'a> {
    /// Who called.
    pub caller: DecisionCaller<'a>,
    /// The circuit that it has become. That of a hybrid VM's caller is not given.
    pub circuit: Option<CircuitId>,
    /// The context identifier that was called.
    pub dialled_cid: u32,
    /// The port that was called.
    pub dialled_port: u32,
    /// Whom the caller meant, if there is such.
    pub dialled: Option<DecisionCallee<'a>>,
    /// Who had the call, if it came so far: by a redirection another one.
    pub reached: Option<DecisionCallee<'a>>,
    /// The rule that decided, and what a person finds it by.
    pub rule: Option<(RuleId, &'a str)>,
    /// Why it was refused or came to nothing, if it did.
    pub result: Result<(), Reason>,
}

/// Who called.
#[derive(Debug, Clone, Copy)]
pub enum DecisionCaller<'a> {
    /// A guest.
    Vm {
        /// Which.
        vm: &'a Address,
        /// From which port.
        port: u32,
    },
    /// A program of the host.
    Program(Credentials),
    /// A caller at a published port.
    Published {
        /// Its name.
        name: &'a str,
    },
    /// A caller that is gone already.
    Unknown,
}

/// Who is called.
#[derive(Debug, Clone, Copy)]
pub enum DecisionCallee<'a> {
    /// A guest.
    Vm {
        /// Which.
        vm: &'a Address,
        /// At which port.
        port: u32,
    },
    /// A service of the host.
    Service(&'a ServiceEntry),
    /// A socket that a program of the host has made for the caller.
    Listener {
        /// The port that it stands for.
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
pub type DecisionSink = Box<dyn FnMut(&Decision<'_>) + Send>;
