//! Why a request failed, as problem details (RFC 9457).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::vms::VmState;

/// The media type of [`Problem`] (RFC 9457, section 6.1).
pub const PROBLEM_MEDIA_TYPE: &str = "application/problem+json";

/// Why a request failed, as problem details (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The kind of problem, as a URI that names and does not lead anywhere.
    #[serde(rename = "type")]
    pub kind: String,
    /// The kind in words, the same each time.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What was wrong this time, and the remedy.
    pub detail: String,
    /// What was wrong: a member of the body, as in `limits.circuits` or `nets[1].vlan`, a parameter of the query, a name in the path, or a header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// The state of the VM that the request waited for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<VmState>,
}

/// A kind of problem. Its slug ends the URI in the `type` member and never changes its meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is not what this API understands.
    InvalidRequest,
    /// There is no such resource.
    NoSuchResource,
    /// The resource has no such method.
    MethodNotAllowed,
    /// No VM has this name.
    UnknownVm,
    /// No service has this name.
    UnknownService,
    /// No network has this name, or the VM has no port there.
    UnknownNetwork,
    /// No circuit has this number.
    UnknownCircuit,
    /// The configuration was refused, and what was in force stays.
    ConfigurationRefused,
    /// The configuration could not be brought into force, and what was in force stays.
    ReloadFailed,
    /// Something belongs to another VM already.
    Conflict,
    /// A socket cannot be made where it should be.
    SocketUnavailable,
    /// The request is understood, and what it asks for cannot be: its parts contradict each other or what the host has.
    Impossible,
    /// The host has no room left for it.
    NoRoom,
    /// No audit is configured.
    NoAudit,
    /// There is no keeper.
    NoKeeper,
    /// As many follow the events as may.
    TooManyReaders,
    /// The caller's user has as many connections as it may.
    TooManyConnections,
    /// The caller may not do this, or anything.
    Forbidden,
    /// The VM did not become ready in the time given.
    NotReady,
    /// The daemon failed.
    Internal,
}

impl Kind {
    /// The kind as a URI.
    pub fn uri(self) -> String {
        format!("urn:ringdown:problem:{}", self.slug())
    }

    fn slug(self) -> &'static str {
        match self {
            Kind::InvalidRequest => "invalid-request",
            Kind::NoSuchResource => "no-such-resource",
            Kind::MethodNotAllowed => "method-not-allowed",
            Kind::UnknownVm => "unknown-vm",
            Kind::UnknownService => "unknown-service",
            Kind::UnknownNetwork => "unknown-network",
            Kind::UnknownCircuit => "unknown-circuit",
            Kind::ConfigurationRefused => "configuration-refused",
            Kind::ReloadFailed => "reload-failed",
            Kind::Conflict => "conflict",
            Kind::SocketUnavailable => "socket-unavailable",
            Kind::Impossible => "impossible",
            Kind::NoRoom => "no-room",
            Kind::NoAudit => "no-audit",
            Kind::NoKeeper => "no-keeper",
            Kind::TooManyReaders => "too-many-readers",
            Kind::TooManyConnections => "too-many-connections",
            Kind::Forbidden => "forbidden",
            Kind::NotReady => "not-ready",
            Kind::Internal => "internal",
        }
    }

    /// The kind in words.
    pub fn title(self) -> &'static str {
        match self {
            Kind::InvalidRequest => "The request is not valid",
            Kind::NoSuchResource => "There is no such resource",
            Kind::MethodNotAllowed => "The resource has no such method",
            Kind::UnknownVm => "There is no such VM",
            Kind::UnknownService => "There is no such service",
            Kind::UnknownNetwork => "There is no such network or port",
            Kind::UnknownCircuit => "There is no such circuit",
            Kind::ConfigurationRefused => {
                "The configuration is refused, and what was in force stays"
            }
            Kind::ReloadFailed => {
                "The configuration cannot be brought into force, and what was in force stays"
            }
            Kind::Conflict => "It belongs to another VM",
            Kind::SocketUnavailable => "A socket cannot be made",
            Kind::Impossible => "The request asks for what cannot be",
            Kind::NoRoom => "The host has no room for it",
            Kind::NoAudit => "No audit is configured",
            Kind::NoKeeper => "There is no keeper",
            Kind::TooManyReaders => "As many follow the events as may",
            Kind::TooManyConnections => "You have as many connections as you may",
            Kind::Forbidden => "You may not do this",
            Kind::NotReady => "The VM is not ready",
            Kind::Internal => "The daemon failed",
        }
    }
}
