//! What all threads of a soak share: what has happened, and what is to be done.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::path::Path;

/// Kinds of failures that are counted apart; more are counted as others.
const MAX_REASONS: usize = 64;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Calls are made since this moment.
    Load(Instant),
    /// No calls are made; standing circuits go on.
    Rest,
    /// Standing circuits end, and then the threads.
    End,
}

/// Whether the toggled path is open, as far as the caller of a reload knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy(u64);

impl Policy {
    /// What a call must see that began and ended under the same policy; nothing while it changes.
    pub fn allows(self) -> Option<bool> {
        match self.0 % 4 {
            0 => Some(true),
            2 => Some(false),
            _ => None,
        }
    }
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All bytes went to and fro.
    Echoed {
        /// How many, one way.
        bytes: u64,
    },
    /// The policy did not let it through, as it should.
    Denied,
    /// Cut by a reload that enforces, as it should.
    Cut,
    /// Given up by the other side because this one was too slow: the machine had no time for it.
    Late,
    /// Anything else.
    Failed(String),
}

/// What has happened on one path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls whose bytes all went to and fro.
    pub echoed: u64,
    /// Calls that were rightly denied.
    pub denied: u64,
    /// Circuits that were rightly cut.
    pub cut: u64,
    /// Calls that were given up because their caller was slow.
    pub late: u64,
    /// Calls that went wrong.
    pub failed: u64,
    /// Bytes one way.
    pub bytes: u64,
}

/// What all threads share.
#[derive(Debug)]
pub struct Tally {
    state: Mutex<State>,
    changed: Condvar,
    policy: AtomicU64,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    counts: BTreeMap<Path, Counts>,
    reasons: BTreeMap<String, u64>,
    in_flight: usize,
    standing: usize,
}

impl Default for Tally {
    fn default() -> Tally {
        Tally {
            state: Mutex::new(State {
                phase: Phase::Rest,
                counts: BTreeMap::new(),
                reasons: BTreeMap::new(),
                in_flight: 0,
                standing: 0,
            }),
            changed: Condvar::new(),
            policy: AtomicU64::new(0),
        }
    }
}

impl Tally {
    /// What is to be done.
    pub fn phase(&self) -> Phase {
        self.lock().phase
    }

    /// Says what is to be done from now on.
    pub fn set_phase(&self, phase: Phase) {
        self.lock().phase = phase;
        self.changed.notify_all();
    }

    /// Waits until something changes, at most so long.
    pub fn wait(&self, limit: Duration) {
        // Whatever ends it, the caller looks next.
        drop(self.changed.wait_timeout(self.lock(), limit));
    }

    /// A call begins.
    pub fn begin(&self) {
        self.lock().in_flight += 1;
    }

    /// A call does not begin after all.
    pub fn abandon(&self) {
        self.lock().in_flight -= 1;
    }

    /// A call has ended.
    pub fn end(&self, path: Path, outcome: Outcome) {
        let mut state = self.lock();
        state.in_flight -= 1;
        state.count(path, outcome);
        drop(state);
        self.changed.notify_all();
    }

    /// A standing circuit is there.
    pub fn stand(&self) {
        self.lock().standing += 1;
        self.changed.notify_all();
    }

    /// A standing circuit has ended; well, if without a reason.
    pub fn fall(&self, path: Path, reason: Option<String>) {
        let mut state = self.lock();
        state.standing = state.standing.saturating_sub(1);
        if let Some(reason) = reason {
            state.count(
                path,
                Outcome::Failed(format!("a standing circuit: {reason}")),
            );
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Something else went wrong.
    pub fn fail(&self, reason: String) {
        self.lock().reason(reason);
        self.changed.notify_all();
    }

    /// Calls under way.
    pub fn in_flight(&self) -> usize {
        self.lock().in_flight
    }

    /// Standing circuits.
    pub fn standing(&self) -> usize {
        self.lock().standing
    }

    /// What has happened on each path.
    pub fn counts(&self) -> BTreeMap<Path, Counts> {
        self.lock().counts.clone()
    }

    /// What went wrong, and how often.
    pub fn failures(&self) -> BTreeMap<String, u64> {
        self.lock().reasons.clone()
    }

    /// The policy as it stands.
    pub fn policy(&self) -> Policy {
        Policy(self.policy.load(Ordering::SeqCst))
    }

    /// A reload begins, or is over.
    pub fn change_policy(&self) -> Policy {
        Policy(self.policy.fetch_add(1, Ordering::SeqCst) + 1)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn count(&mut self, path: Path, outcome: Outcome) {
        let counts = self.counts.entry(path).or_default();
        match outcome {
            Outcome::Echoed { bytes } => {
                counts.echoed += 1;
                counts.bytes += bytes;
            }
            Outcome::Denied => counts.denied += 1,
            Outcome::Cut => counts.cut += 1,
            Outcome::Late => counts.late += 1,
            Outcome::Failed(reason) => {
                counts.failed += 1;
                self.reason(format!("{path}: {reason}"));
            }
        }
    }

    fn reason(&mut self, reason: String) {
        let known = self.reasons.contains_key(&reason) || self.reasons.len() < MAX_REASONS;
        let key = if known { reason } else { "others".to_owned() };
        *self.reasons.entry(key).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_says_nothing_while_it_changes() {
        let tally = Tally::default();
        let seen: Vec<_> = (0..4).map(|_| tally.change_policy().allows()).collect();
        assert_eq!(seen, [None, Some(false), None, Some(true)]);
        assert_eq!(tally.policy().allows(), Some(true));
    }

    #[test]
    fn failures_are_counted_by_reason_and_never_beyond_a_bound() {
        let tally = Tally::default();
        for number in 0..2 * MAX_REASONS {
            tally.begin();
            tally.end(Path::Egress, Outcome::Failed(format!("reason {number}")));
        }
        assert_eq!(tally.failures().len(), MAX_REASONS + 1);
        assert_eq!(tally.failures()["others"], MAX_REASONS as u64);
        assert_eq!(tally.counts()[&Path::Egress].failed, 2 * MAX_REASONS as u64);
        assert_eq!(tally.in_flight(), 0);
    }
}
