//! Failures of requests, and how they look as problem details (RFC 9457).

use std::fmt;
use std::io::ErrorKind;

use api::{Kind, PROBLEM_MEDIA_TYPE, Problem, VmState};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use config::ConfigError;
use config::input::InputError;

use crate::control_error::ControlError;
use crate::line::LineError;
use crate::net::{NetError, NetFault};
use crate::policy::AskError;
use crate::reload::ReloadError;
use runtime::directory::RuntimeError;
use windows::memory::WindowsError;

/// The HTTP status that goes with a kind of problem.
pub(super) fn status(kind: Kind) -> StatusCode {
    match kind {
        Kind::InvalidRequest => StatusCode::BAD_REQUEST,
        Kind::NoSuchResource
        | Kind::UnknownVm
        | Kind::UnknownService
        | Kind::UnknownNetwork
        | Kind::UnknownCircuit => StatusCode::NOT_FOUND,
        Kind::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        Kind::Conflict => StatusCode::CONFLICT,
        Kind::SocketUnavailable | Kind::ConfigurationRefused | Kind::Impossible => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
        Kind::NoRoom => StatusCode::INSUFFICIENT_STORAGE,
        Kind::TooManyReaders | Kind::TooManyConnections => StatusCode::SERVICE_UNAVAILABLE,
        Kind::Forbidden => StatusCode::FORBIDDEN,
        Kind::ReloadFailed | Kind::NoAudit | Kind::NoKeeper => StatusCode::CONFLICT,
        Kind::NotReady => StatusCode::GATEWAY_TIMEOUT,
        Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// A failed request on its way to the client.
#[derive(Debug)]
pub struct Failure {
    kind: Kind,
    detail: String,
    field: Option<String>,
    state: Option<VmState>,
}

impl Failure {
    /// A failure of this kind, with what was wrong in words.
    pub fn new(kind: Kind, detail: impl fmt::Display) -> Failure {
        Failure {
            kind,
            detail: detail.to_string(),
            field: None,
            state: None,
        }
    }

    /// The same, with what was wrong: a member of the body, a parameter of the query, a name in the path or a header.
    pub fn at(mut self, field: impl Into<String>) -> Failure {
        self.field = Some(field.into());
        self
    }

    /// Something that a person wrote and that cannot be meant, and where it stood.
    pub fn of_input(field: impl Into<String>, error: InputError) -> Failure {
        Failure::new(input_kind(&error), error).at(field)
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Failure {
        let kind = match &error {
            ControlError::Input(input) => input_kind(input),
            ControlError::Ask(AskError::Input(input)) => input_kind(input),
            ControlError::Ask(AskError::NotThroughUs { .. } | AskError::NoAddress(_)) => {
                Kind::Impossible
            }
            ControlError::Ask(AskError::NoPort) => Kind::InvalidRequest,
            ControlError::Ask(AskError::UnknownService { .. }) => Kind::UnknownService,
            ControlError::Unknown { .. }
            | ControlError::Ask(AskError::UnknownVm { .. } | AskError::Published { .. })
            | ControlError::Line(LineError::Unknown { .. }) => Kind::UnknownVm,
            ControlError::Runtime(RuntimeError::System { .. }) => Kind::Internal,
            ControlError::Runtime(_) => Kind::SocketUnavailable,
            ControlError::Line(LineError::Socket(_)) => Kind::SocketUnavailable,
            ControlError::Line(
                LineError::DuplicateName { .. }
                | LineError::DuplicateCid { .. }
                | LineError::TooManyCaptures,
            ) => Kind::Conflict,
            ControlError::Windows(WindowsError::File { error, .. })
                if matches!(
                    error.kind(),
                    ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::OutOfMemory
                ) =>
            {
                Kind::NoRoom
            }
            ControlError::Line(LineError::Io(_))
            | ControlError::State(_)
            | ControlError::Windows(_)
            | ControlError::Offer(_)
            | ControlError::Audit(_)
            | ControlError::AuditFile { .. }
            | ControlError::Lost => Kind::Internal,
            ControlError::NoAudit => Kind::NoAudit,
            ControlError::NoKeeper | ControlError::Keeper(_) => Kind::NoKeeper,
            ControlError::NotReady { .. } => Kind::NotReady,
            ControlError::UnknownNetwork { .. } => Kind::UnknownNetwork,
            ControlError::UnknownCircuit { .. } => Kind::UnknownCircuit,
            ControlError::Net(error) | ControlError::Port(NetFault { error, .. }) => {
                net_kind(error)
            }
        };
        let state = match &error {
            ControlError::NotReady { state, .. } => Some(*state),
            _ => None,
        };
        Failure {
            kind,
            detail: error.to_string(),
            field: field_of(&error).map(str::to_owned),
            state,
        }
    }
}

impl From<ReloadError> for Failure {
    fn from(error: ReloadError) -> Failure {
        let kind = match &error {
            ReloadError::Config(ConfigError::Input { .. }) => Kind::ConfigurationRefused,
            ReloadError::NotBeside { .. } => {
                return Failure::new(Kind::InvalidRequest, error).at("file");
            }
            ReloadError::Lost => Kind::Internal,
            _ => Kind::ReloadFailed,
        };
        Failure::new(kind, error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = status(self.kind);
        let problem = Problem {
            kind: self.kind.uri(),
            title: self.kind.title().to_owned(),
            status: status.as_u16(),
            detail: self.detail,
            field: self.field,
            state: self.state,
        };
        (
            status,
            [(CONTENT_TYPE, PROBLEM_MEDIA_TYPE)],
            axum::Json(problem),
        )
            .into_response()
    }
}

fn net_kind(error: &NetError) -> Kind {
    match error {
        NetError::Runtime(RuntimeError::System { .. }) => Kind::Internal,
        NetError::Socket(_) | NetError::Runtime(_) => Kind::SocketUnavailable,
        NetError::UnknownNetwork { .. } | NetError::UnknownPort { .. } => Kind::UnknownNetwork,
        NetError::Refused(_) => Kind::Conflict,
        NetError::Uplink { .. } | NetError::Io(_) => Kind::Internal,
    }
}

fn input_kind(error: &InputError) -> Kind {
    match error {
        InputError::DuplicateName { .. }
        | InputError::Taken { .. }
        | InputError::Held { .. }
        | InputError::DuplicateCid { .. }
        | InputError::DuplicatePath { .. } => Kind::Conflict,
        InputError::TooMany { .. } | InputError::NetworkFull { .. } => Kind::Conflict,
        // Of the right form by itself: what stands beside it, or what the host has, speaks against it.
        InputError::ReservedName { .. }
        | InputError::PathTooLong { .. }
        | InputError::Duplicate { .. }
        | InputError::ExactlyOne { .. }
        | InputError::Pointless { .. }
        | InputError::BesideHybrid { .. }
        | InputError::BesideSerial { .. }
        | InputError::QmpWithoutWindows
        | InputError::UnknownUser { .. }
        | InputError::UserLookup { .. }
        | InputError::UnknownNetwork { .. }
        | InputError::MissingPath { .. }
        | InputError::OutsideSandbox { .. } => Kind::Impossible,
        _ => Kind::InvalidRequest,
    }
}

/// The member of a request that a failure is about, if its words say so.
fn field_of(error: &ControlError) -> Option<&'static str> {
    match error {
        ControlError::Input(error) => match error {
            InputError::DuplicateName { .. } => Some("name"),
            InputError::DuplicateCid { .. } => Some("cid"),
            InputError::QmpWithoutWindows => Some("qmp"),
            InputError::BesideHybrid { .. } | InputError::BesideSerial { .. } => Some("windows"),
            InputError::UnknownNetwork { .. } | InputError::NetworkFull { .. } => Some("nets"),
            _ => None,
        },
        ControlError::Ask(AskError::NotThroughUs { .. } | AskError::NoAddress(_)) => Some("to"),
        ControlError::Ask(AskError::NoPort) => Some("port"),
        ControlError::Line(LineError::DuplicateName { .. }) => Some("name"),
        ControlError::Line(LineError::DuplicateCid { .. }) => Some("cid"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_room_is_told_from_a_daemon_that_fails() {
        for (error, status) in [
            (ErrorKind::StorageFull, 507),
            (ErrorKind::QuotaExceeded, 507),
            (ErrorKind::OutOfMemory, 507),
            (ErrorKind::PermissionDenied, 500),
        ] {
            let error = WindowsError::File {
                path: None,
                len: 1 << 30,
                error: error.into(),
            };
            let failure = Failure::from(ControlError::Windows(error));
            assert_eq!(super::status(failure.kind), status);
        }
    }
}
