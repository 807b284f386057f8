//! Holding the writes of a guest's file systems, and letting them go.

use std::time::Duration;

use wire::agent::job::{Answer, Ask};

use super::{Job, unexpected};
use crate::guest::{Agent, GuestError, printable};

/// How long the guest may take: every file system writes what it has first.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);

/// Freeze for that long at most, or thaw: the mount points, made harmless.
pub fn freeze(agent: Agent<'_>, timeout: Duration) -> Result<Vec<String>, GuestError> {
    let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    file_systems(agent, Ask::Freeze { timeout_ms })
}

/// Thaw: the mount points.
pub fn thaw(agent: Agent<'_>) -> Result<Vec<String>, GuestError> {
    file_systems(agent, Ask::Thaw)
}

fn file_systems(agent: Agent<'_>, ask: Ask) -> Result<Vec<String>, GuestError> {
    let mut job = Job::ask(agent, ask)?;
    job.wait_for(Some(ANSWER_TIMEOUT));
    match job.answer()? {
        Answer::FileSystems(mounts) => {
            let shown = mounts
                .iter()
                .map(|mount| printable(&String::from_utf8_lossy(mount)));
            Ok(shown.collect())
        }
        other => Err(unexpected(&other)),
    }
}
