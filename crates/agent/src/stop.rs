//! Why an operation for the host ended early.

use std::io;

use wire::agent::ErrorReport;

/// Why a session ended without a command's exit being delivered.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    #[error("the host closed the connection or does not answer: {0}")]
    HostGone(io::Error),
    #[error("{}", .0.message)]
    Report(ErrorReport),
}
