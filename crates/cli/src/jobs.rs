//! The everyday jobs, as the host asks a guest's agent for them ([`wire::agent::job`]). Each takes where its agent is called, and where to
//! write; finding the VM and waiting for it is the commands' business.

pub mod clipboard;
pub mod freeze;
pub mod logs;
pub mod power;
pub mod stats;
pub mod time;

use std::time::Duration;

use wire::agent::job::{Answer, Ask};
use wire::agent::{Frame, OPERATION_CHANNEL};

use crate::client::reach_agent;
use crate::guest::{Agent, Connection, Deadline, GuestError};

/// A connection on which one job was asked for.
#[derive(Debug)]
pub(crate) struct Job {
    connection: Connection,
}

impl Job {
    /// Ask an agent, and say so if it does not answer soon.
    pub(crate) fn ask(agent: Agent<'_>, ask: Ask) -> Result<Job, GuestError> {
        let mut job = Job {
            connection: reach_agent(agent, ask.capability())?,
        };
        job.say(ask)?;
        Ok(job)
    }

    /// The same without a word.
    pub(crate) fn ask_silently(agent: Agent<'_>, ask: Ask) -> Result<Job, GuestError> {
        let deadline = Deadline::after(agent.patience);
        let mut job = Job {
            connection: Connection::open_by(agent.host_socket, ask.capability(), deadline)?,
        };
        job.say(ask)?;
        Ok(job)
    }

    /// Ask once more.
    pub(crate) fn say(&mut self, ask: Ask) -> Result<(), GuestError> {
        let bytes = Frame::Ask(ask).to_bytes(OPERATION_CHANNEL)?;
        self.connection.say(&bytes)
    }

    /// The next answer.
    pub(crate) fn answer(&mut self) -> Result<Answer, GuestError> {
        match self.connection.next_frame()? {
            Frame::Answer(answer) => Ok(answer),
            other => Err(unexpected(&other)),
        }
    }

    /// From here on the agent has so long, or as long as it likes.
    pub(crate) fn wait_for(&mut self, patience: Option<Duration>) {
        self.connection.wait_for(patience);
    }
}

/// What does not belong to the job that was asked for.
pub(crate) fn unexpected(what: &impl std::fmt::Debug) -> GuestError {
    let words: String = format!("{what:?}").chars().take(60).collect();
    GuestError::Protocol(format!(
        "an unexpected answer: {}",
        crate::guest::printable(&words)
    ))
}

#[cfg(test)]
mod tests;
