//! Why a transfer ends before its time.

use std::io;

use wire::agent::{DecodeError, ErrorKind, ErrorReport, Invalid};

/// Why a transfer ended before everything was dealt with.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// The connection is gone. On another one the transfer can go on.
    #[error("the connection broke: {0}")]
    Broken(io::Error),
    /// The other side said why.
    #[error("{}", .0.message)]
    Reported(ErrorReport),
    /// This side cannot go on, and sends the reason to the other.
    #[error("{}", .0.message)]
    Failed(ErrorReport),
    /// It was cancelled.
    #[error("interrupted")]
    Cancelled,
}

impl Stop {
    /// This side cannot go on.
    pub(crate) fn failed(kind: ErrorKind, message: impl Into<String>) -> Stop {
        Stop::Failed(ErrorReport::new(kind, message))
    }

    /// The other side did what it must not.
    pub(crate) fn protocol(message: impl Into<String>) -> Stop {
        Stop::failed(ErrorKind::Protocol, message)
    }
}

impl From<DecodeError> for Stop {
    fn from(error: DecodeError) -> Stop {
        Stop::protocol(error.to_string())
    }
}

impl From<Invalid> for Stop {
    fn from(error: Invalid) -> Stop {
        Stop::failed(ErrorKind::InvalidRequest, error.to_string())
    }
}
