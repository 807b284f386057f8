//! A circuit as it stands, with the names of its ends.

use std::time::Duration;

use sys::peer::Peer;
use vsock::{CircuitId, CircuitState};
use wire::vsock::SocketType;

/// Whose program it is that calls, as the kernel says (unix(7), `SO_PEERCRED`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The user.
    pub uid: u32,
    /// The process; 0 if it cannot be seen from here, as from within a container.
    pub pid: i32,
}

impl From<&Peer> for Credentials {
    fn from(peer: &Peer) -> Credentials {
        Credentials {
            uid: peer.uid,
            pid: peer.pid,
        }
    }
}

/// A party of a circuit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A guest.
    Vm {
        /// Its domain.
        domain: String,
        /// Its name there.
        name: String,
        /// The port.
        port: u32,
    },
    /// A program of the host that has called.
    Program {
        /// Whose it is.
        credentials: Credentials,
        /// By what the one that made the call knows it: see [`ProgramCall`](crate::ProgramCall).
        ticket: Option<u64>,
    },
    /// A caller at a published port.
    Published {
        /// The port's name.
        name: String,
    },
    /// A service of the host.
    Service {
        /// Its name.
        name: String,
        /// The port.
        port: u32,
    },
    /// A program of the host that is called at this port.
    Listener {
        /// The port.
        port: u32,
    },
    /// A peer that has gone since.
    Gone,
}

/// A circuit as it stands, with names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CircuitSnapshot {
    /// Its number.
    pub id: CircuitId,
    /// Its type.
    pub socket_type: SocketType,
    /// How far it has come. One that has been cut short is closing.
    pub state: CircuitState,
    /// How long it has been there.
    pub age: Duration,
    /// What a person finds the rule by that allows it.
    pub rule: Option<String>,
    /// The caller.
    pub caller: Endpoint,
    /// The callee meant.
    pub dialled: Endpoint,
    /// The callee, which a redirection may change.
    pub callee: Endpoint,
    /// Bytes that have arrived, by the side that sent them.
    pub bytes: [u64; 2],
    /// Bytes in our keeping that have yet to arrive, by the side that sent them.
    pub queued: [u32; 2],
    /// Bytes that may still be sent on before the receiver has to make room, by the side that sends them.
    pub credit: [u32; 2],
}
