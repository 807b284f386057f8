//! Why something that was asked of the daemon was not done.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use api::VmState;
use config::StateError;
use config::input::{InputError, did_you_mean};

use crate::line::LineError;
use crate::net::{NetError, NetFault};
use crate::policy::AskError;
use hostside::offers::OfferError;
use runtime::directory::RuntimeError;
use windows::memory::WindowsError;

/// Why the daemon did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// What was asked for cannot be meant, or collides with another VM.
    #[error(transparent)]
    Input(#[from] InputError),
    /// A directory or a socket is not as it should be.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The worker could not open or close the line.
    #[error(transparent)]
    Line(#[from] LineError),
    /// A port in a network could not be opened.
    #[error(transparent)]
    Port(#[from] NetFault),
    /// The worker could not do something with a network.
    #[error(transparent)]
    Net(#[from] NetError),
    /// No network has this name.
    #[error(
        "there is no network named {name:?}{}: `ringdown net ls` shows those that exist, and [[network]] in the configuration makes one, after `ringdown reload`",
        did_you_mean(nearest)
    )]
    UnknownNetwork {
        /// The name.
        name: String,
        /// One that exists and may be meant.
        nearest: Option<String>,
    },
    /// No circuit has this number.
    #[error("there is no circuit {id:?}, or not any more: `ringdown ls` shows those that exist")]
    UnknownCircuit {
        /// What was given.
        id: String,
    },
    /// What is remembered of VMs cannot be written.
    #[error(transparent)]
    State(#[from] StateError),
    /// The VM's windows cannot be made.
    #[error(transparent)]
    Windows(#[from] WindowsError),
    /// What is offered does not hold any more.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// A question about the policy has no answer.
    #[error("{}{}", .0, after_a_change(.0))]
    Ask(#[from] AskError),
    /// The audit's file cannot be opened.
    #[error("cannot open the audit's file {}: {error}; check its path and its permissions", path.display())]
    AuditFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The audit's file cannot be opened anew.
    #[error("cannot open the audit's file anew: {0}; the old one stays in use")]
    Audit(io::Error),
    /// No VM has this name.
    #[error(
        "there is no VM named {name:?}{}: `ringdown vm ls` shows those that exist, `ringdown vm add` makes one, and so does [[vm]] in the configuration after `ringdown reload`",
        did_you_mean(nearest)
    )]
    Unknown {
        /// The name.
        name: String,
        /// One that exists and may be meant.
        nearest: Option<String>,
    },
    /// The VM did not become ready in time.
    #[error("VM {name:?} did not become ready within {}: {}", seconds(*waited), words)]
    NotReady {
        /// The name.
        name: String,
        /// How far it had come at the end.
        state: VmState,
        /// The same in words, with what went wrong before that.
        words: String,
        /// How long was waited.
        waited: Duration,
    },
    /// A part of the daemon ended without an answer.
    #[error("the daemon dropped the request: see its log")]
    Lost,
}

/// What may help where a name is not known yet.
fn after_a_change(error: &AskError) -> &'static str {
    match error {
        AskError::UnknownVm { .. } | AskError::UnknownService { .. } => {
            "; after a change of the configuration, `ringdown reload`"
        }
        _ => "",
    }
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}
