//! What a daemon lacks and serves the rest.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What kind of thing may be unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PartKind {
    /// A VM, by its full name: one of its sockets cannot be made.
    Vm,
    /// The uplink of a network, by the network's full name: its device cannot be opened.
    Uplink,
    /// A published port, by where it listens, such as `tcp:127.0.0.1:8080`.
    PublishedPort,
}

impl fmt::Display for PartKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            PartKind::Vm => "VM",
            PartKind::Uplink => "uplink of the network",
            PartKind::PublishedPort => "published port",
        })
    }
}

/// Something that is configured and cannot be had from the system at the moment. It is tried again every few seconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnavailablePart {
    /// What it is.
    pub kind: PartKind,
    /// Its name.
    pub name: String,
    /// Why, and what to do.
    pub reason: String,
}

impl fmt::Display for UnavailablePart {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnavailablePart { kind, name, reason } = self;
        write!(formatter, "the {kind} {name} is unavailable: {reason}")
    }
}
