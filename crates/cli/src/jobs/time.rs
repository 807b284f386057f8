//! How far a guest's clock is from this host's, and putting it right.

use std::time::{Duration, Instant, SystemTime};

use wire::agent::job::{Answer, Ask};

use super::{Job, unexpected};
use crate::guest::{Agent, GuestError, printable};

/// How often the clock is asked. The answer that came quickest counts.
const QUESTIONS: usize = 8;

/// What the guest's clock is found to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offset {
    /// By how much it is ahead of this host's, in nanoseconds.
    pub ns: i64,
    /// By how much that may be wrong: half of the way there and back.
    pub uncertainty: Duration,
    /// The service that keeps it right in the guest, if any.
    pub kept_by: String,
}

/// Measure, and set the clock by this host's if that is wanted: what it was, and what it is then.
pub fn measure(agent: Agent<'_>, set: bool) -> Result<(Offset, Option<Offset>), GuestError> {
    let begun = Instant::now();
    let mut job = Job::ask(agent, Ask::Time { step_ns: None })?;
    // The first answer waits for the agent to look around, so it measures nothing.
    let _ = answer(&mut job, begun)?;
    let before = best(&mut job)?;
    if !set {
        return Ok((before, None));
    }
    let asked = Instant::now();
    job.say(Ask::Time {
        step_ns: Some(before.ns.saturating_neg()),
    })?;
    let _ = answer(&mut job, asked)?;
    let after = best(&mut job)?;
    Ok((before, Some(after)))
}

fn best(job: &mut Job) -> Result<Offset, GuestError> {
    let mut best: Option<Offset> = None;
    for _ in 0..QUESTIONS {
        let asked = Instant::now();
        job.say(Ask::Time { step_ns: None })?;
        let offset = answer(job, asked)?;
        if best
            .as_ref()
            .is_none_or(|best| offset.uncertainty < best.uncertainty)
        {
            best = Some(offset);
        }
    }
    best.ok_or_else(|| GuestError::Protocol("no answer about the time".to_owned()))
}

fn answer(job: &mut Job, asked: Instant) -> Result<Offset, GuestError> {
    let clock = match job.answer()? {
        Answer::Time(clock) => clock,
        other => return Err(unexpected(&other)),
    };
    let uncertainty = asked.elapsed() / 2;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let host_ns = now.map_or(0, |now| now.saturating_sub(uncertainty).as_nanos());
    Ok(Offset {
        ns: clock
            .unix_ns
            .saturating_sub(i64::try_from(host_ns).unwrap_or(i64::MAX)),
        uncertainty,
        kept_by: printable(&clock.kept_by),
    })
}
