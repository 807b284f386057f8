//! What goes over the control socket about circuits and windows.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Circuits, as the daemon sees them now.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct CircuitsInfo {
    /// The circuits.
    pub circuits: Vec<CircuitInfo>,
    /// How many more there are: a list has a limit.
    #[serde(default)]
    pub more: usize,
}

/// One circuit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CircuitInfo {
    /// Its number, as in `12-3054`: never used again.
    pub id: String,
    /// What carries its bytes.
    pub kind: CircuitKind,
    /// Whether it carries messages and not a stream of bytes.
    #[serde(default)]
    pub seqpacket: bool,
    /// How far it has come.
    pub state: CircuitPhase,
    /// The caller.
    pub from: CircuitEnd,
    /// The callee meant.
    pub to: CircuitEnd,
    /// The callee, if a rule has redirected the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reached: Option<CircuitEnd>,
    /// The rule that allows it; without one, what holds without a rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// How long it has been there. Not known if only its window is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u64>,
    /// Bytes of the caller's that have arrived by the stream. Those in a window are not counted.
    pub bytes_from_caller: u64,
    /// Bytes of the callee's that have arrived by the stream.
    pub bytes_to_caller: u64,
    /// Bytes of the caller's that the daemon keeps, as the callee has yet to take them.
    #[serde(default)]
    pub queued_from_caller: u64,
    /// Bytes of the callee's that the daemon keeps, as the caller has yet to take them.
    #[serde(default)]
    pub queued_to_caller: u64,
    /// Bytes of the caller's for which the callee has room.
    #[serde(default)]
    pub credit_from_caller: u64,
    /// Bytes of the callee's for which the caller has room.
    #[serde(default)]
    pub credit_to_caller: u64,
}

/// What carries a circuit's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CircuitKind {
    /// The daemon, from one end to the other.
    Stream,
    /// A window of memory that both programs have mapped.
    ZeroCopy,
}

impl fmt::Display for CircuitKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            CircuitKind::Stream => "stream",
            CircuitKind::ZeroCopy => "zero-copy",
        })
    }
}

/// How far a circuit has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CircuitPhase {
    /// The callee has yet to answer.
    Dialling,
    /// Both ends know each other.
    Open,
    /// At least one end is gone.
    Closing,
    /// The stream is over, and a program still has the window.
    Draining,
}

impl fmt::Display for CircuitPhase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            CircuitPhase::Dialling => "dialling",
            CircuitPhase::Open => "open",
            CircuitPhase::Closing => "closing",
            CircuitPhase::Draining => "draining",
        })
    }
}

/// An end of a circuit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum CircuitEnd {
    /// A guest.
    Vm {
        /// Its full name.
        vm: String,
        /// The port.
        port: u32,
    },
    /// A program of the host that has called.
    Program {
        /// Its user.
        uid: u32,
        /// Its process.
        pid: i32,
    },
    /// A peer that called a published port.
    Published {
        /// The port's name.
        name: String,
    },
    /// A service of the host.
    Service {
        /// Its name.
        service: String,
        /// The port.
        port: u32,
    },
    /// The host: a program that listens there, or the daemon itself.
    Host {
        /// The port.
        port: u32,
    },
    /// A peer that has gone since.
    Gone,
}

impl fmt::Display for CircuitEnd {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CircuitEnd::Vm { vm, port } => write!(formatter, "{vm}:{port}"),
            CircuitEnd::Program { uid, pid } => write!(formatter, "host(uid {uid}, pid {pid})"),
            CircuitEnd::Published { name } => write!(formatter, "published({name})"),
            CircuitEnd::Service { service, port } => write!(formatter, "service({service}):{port}"),
            CircuitEnd::Host { port } => write!(formatter, "host:{port}"),
            CircuitEnd::Gone => write!(formatter, "(gone)"),
        }
    }
}

/// Windows, as the daemon sees them now.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct WindowsInfo {
    /// The windows.
    pub windows: Vec<WindowInfo>,
}

/// One window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WindowInfo {
    /// By what the host and the guest know it.
    pub uuid: String,
    /// The two that have it: full names of VMs, or `host`.
    pub between: [String; 2],
    /// The user of the host to whom it belongs, once there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its size in bytes.
    pub size: u64,
    /// How it stands: `absent`, `free`, `in use` or `quarantined`.
    pub state: String,
    /// The number of its latest use.
    pub generation: u64,
}
