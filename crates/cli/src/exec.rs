//! `ringdown exec`: a command in the guest that looks like a command here.
//!
//! The client connects to the VM's host socket, asks for the agent's port, and speaks the agent protocol
//! ([`wire::agent`]). Standard input, output and error stay apart, and each may stall without stalling the others: a
//! thread each for reading input and for writing the two outputs, the calling thread for the frames that arrive, one for
//! signals. What is buffered in between is bounded by the credit that was granted. The keys of a raw terminal are read by a thread of their own, which
//! sees those that leave the session whatever the agent does.
//!
//! # Exit codes
//! The guest command's own; 128 + n if signal n ended it; as in a shell, 127 if there is no such command and 126 if it
//! cannot be executed, or not in that directory; 1 where the agent was not reached, and 2 where the command cannot be sent to it, so that nothing was started; as in ssh, 255 for everything
//! else, above all a connection that breaks before the command's exit was reported.

mod escape;
mod output;
mod session;
mod signals;
mod terminal;

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use wire::agent::{CAPABILITY_EXEC, ErrorKind};

use crate::client::reach_agent;
use crate::guest::{Agent, Connection, GuestError};

/// The exit code for everything that keeps the command's own exit code from being known.
pub const FAILURE: u8 = 255;

/// What to run and how.
#[derive(Debug, Clone, Default)]
pub struct ExecOptions {
    /// The command's name, looked up in the guest's PATH unless it has a slash, and its arguments.
    pub command: Vec<OsString>,
    /// Variables to set on top of the agent's default environment.
    pub environment: Vec<(OsString, OsString)>,
    /// The working directory; if none, the home directory of the agent's user.
    pub directory: Option<PathBuf>,
    /// Run the command on a terminal of its own, and the local one, if standard input is one, in raw mode meanwhile.
    pub terminal: bool,
}

/// Why there is no exit code of the command.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// Nothing was asked of the agent.
    #[error(transparent)]
    NotReached(GuestError),
    #[error("cannot write the command's {name}: {source}")]
    Output {
        name: &'static str,
        source: io::Error,
    },
    #[error("cannot read standard input: {0}")]
    Input(io::Error),
    #[error("interrupted; the guest's command may still run")]
    Interrupted,
    /// The agent did not show that it runs, after a signal.
    #[error("{0}; the guest's command may still run")]
    Silent(GuestError),
    #[error("left by ~.; the guest's command may still run")]
    Left,
    #[error("cannot {what}: {source}")]
    Local {
        what: &'static str,
        source: io::Error,
    },
}

impl ExecError {
    /// The exit code for this failure: 127, 126, 1 where the agent was not reached, 2 where the command cannot be sent, or [`FAILURE`].
    pub fn exit_code(&self) -> u8 {
        match self {
            ExecError::Guest(GuestError::Agent(report)) => match report.kind {
                ErrorKind::CommandNotFound => 127,
                ErrorKind::CommandNotExecutable | ErrorKind::NoSuchDirectory => 126,
                _ => FAILURE,
            },
            // What the agent refuses, whenever it says so.
            ExecError::NotReached(GuestError::Agent(_) | GuestError::Unsupported(_)) => FAILURE,
            ExecError::NotReached(_) => crate::failure::FAILURE,
            ExecError::Guest(GuestError::Request(_)) => crate::failure::USAGE,
            _ => FAILURE,
        }
    }
}

/// Run a command in the guest of this agent, with this process's standard input, output and error: its exit
/// code. The process is expected to exit soon after: a thread may still be reading standard input.
///
/// # Errors
/// Why there is no exit code; [`ExecError::exit_code`] says what to exit with instead.
pub fn run(agent: Agent<'_>, options: ExecOptions) -> Result<u8, ExecError> {
    let local = Local::of_process().map_err(|source| ExecError::Local {
        what: "use the standard streams",
        source,
    })?;
    session::run(reach(agent)?, agent.host_socket, &options, local)
}

fn reach(agent: Agent<'_>) -> Result<Connection, ExecError> {
    reach_agent(agent, CAPABILITY_EXEC).map_err(ExecError::NotReached)
}

/// The local ends of the command's streams.
#[derive(Debug)]
struct Local {
    stdin: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
    /// Whether this process's signals are the command's.
    signals: bool,
}

impl Local {
    fn of_process() -> io::Result<Local> {
        Ok(Local {
            stdin: rustix::stdio::stdin().try_clone_to_owned()?,
            stdout: rustix::stdio::stdout().try_clone_to_owned()?,
            stderr: rustix::stdio::stderr().try_clone_to_owned()?,
            signals: true,
        })
    }
}

#[cfg(test)]
mod tests;
