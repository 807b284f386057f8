//! Why an operation for the host ended early.

use std::io;

use wire::agent::ErrorReport;

/// Why a session ended without a command's exit being delivered.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// The host is not there any more.
    #[error("the host closed the connection or does not answer: {0}")]
    HostGone(io::Error),
    /// The host was sent this.
    #[error("{}", .0.message)]
    Report(ErrorReport),
}
