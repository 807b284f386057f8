//! Why a transfer ends before its time.

use std::io;

use wire::agent::{DecodeError, ErrorKind, ErrorReport, Invalid};

/// Why a transfer ended before everything was dealt with.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    #[error("the connection broke: {0}")]
    Broken(io::Error),
    #[error("{}", .0.message)]
    Reported(ErrorReport),
    #[error("{}", .0.message)]
    Failed(ErrorReport),
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
