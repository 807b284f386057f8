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
use keeper::KeeperError;
use runtime::directory::RuntimeError;
use windows::memory::WindowsError;

/// Why the daemon did not do what it was asked.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Line(#[from] LineError),
    #[error(transparent)]
    Port(#[from] NetFault),
    #[error(transparent)]
    Net(#[from] NetError),
    #[error(
        "there is no network named {name:?}{}: `ringdown net ls` shows those that exist, and [[network]] in the file of `ringdown serve --config` makes one, after `ringdown reload`",
        did_you_mean(nearest)
    )]
    UnknownNetwork {
        name: String,
        /// One that exists and may be meant.
        nearest: Option<String>,
    },
    #[error("there is no circuit {id:?}, or not any more: `ringdown ls` shows those that exist")]
    UnknownCircuit { id: String },
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Windows(#[from] WindowsError),
    #[error(transparent)]
    Offer(#[from] OfferError),
    #[error("{}{}", .0, after_a_change(.0))]
    Ask(#[from] AskError),
    #[error("cannot open the audit's file {}: {error}; check its path and its permissions", path.display())]
    AuditFile { path: PathBuf, error: io::Error },
    #[error(
        "no audit is configured, so there is no file to open anew: `audit` in the configuration names one"
    )]
    NoAudit,
    #[error(
        "there is no keeper, so the end of the daemon would cut VMs off: `ringdown hold` and `serve --keeper` keep them"
    )]
    NoKeeper,
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    #[error("cannot open the audit's file anew: {0}; the old one stays in use")]
    Audit(io::Error),
    #[error(
        "there is no VM named {name:?}{}: `ringdown vm ls` shows those that exist, `ringdown vm add` makes one, and so does [[vm]] in the file of `ringdown serve --config`, after `ringdown reload`",
        did_you_mean(nearest)
    )]
    Unknown {
        name: String,
        /// One that exists and may be meant.
        nearest: Option<String>,
    },
    #[error(
        "VM {name:?} {}: {words} (what to do: `ringdown check`)",
        not_ready(*waited)
    )]
    NotReady {
        name: String,
        /// How far it had come at the end.
        state: VmState,
        /// The same in words, with what went wrong before that.
        words: String,
        waited: Duration,
    },
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

/// What is not so after this time, if that was any.
fn not_ready(waited: Duration) -> String {
    match waited.is_zero() {
        true => "is not ready".to_owned(),
        false => format!("did not become ready within {} s", waited.as_secs_f64()),
    }
}
