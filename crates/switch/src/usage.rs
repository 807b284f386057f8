//! What the circuits that a rule has allowed use together.

use std::time::Duration;

use crate::rate::{Bucket, Meter};
use crate::{Policy, Reason, RuleId, RuleLimits, Time};

/// Who has been quiet for so long may call as often at once as it may in this time.
const CONNECT_DEPTH: Duration = Duration::from_secs(1);

/// The same for bytes: long enough for a wait to be worth a timer, short enough not to be seen.
///
/// Bytes are counted when they have passed. So what passes in some time is what the limit says, and beyond it, once, this
/// depth and for each circuit what it may send without asking: one turn ([`Limits::quantum_bytes`](crate::Limits)) of what a
/// program of the host sends, or twice the window that a guest was offered.
const BYTE_DEPTH: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct RuleUse {
    limits: RuleLimits,
    /// Circuits that it has allowed, in any state.
    pub(crate) circuits: u32,
    connects: Option<Bucket>,
    bytes: Option<Meter>,
}

impl RuleUse {
    /// One for each rule of a policy that replaces another, without circuits. A rule that was there before, and has a place in it, has as much left of a limit as
    /// it had, if that limit is what it was.
    pub(crate) fn handed_over(
        old: Vec<RuleUse>,
        places: &[Option<RuleId>],
        to: &Policy,
    ) -> Vec<RuleUse> {
        let rules = to.rules().iter();
        let mut uses: Vec<RuleUse> = rules.map(|rule| RuleUse::new(rule.limits)).collect();
        for (place, old) in places.iter().zip(old) {
            if let Some(place) = place {
                uses[place.0 as usize].take_over(old);
            }
        }
        uses
    }

    fn take_over(&mut self, old: RuleUse) {
        if self.limits.connects_per_second == old.limits.connects_per_second {
            self.connects = old.connects;
        }
        if self.limits.bytes_per_second == old.limits.bytes_per_second {
            self.bytes = old.bytes;
        }
    }

    fn new(limits: RuleLimits) -> RuleUse {
        RuleUse {
            limits,
            circuits: 0,
            connects: limits
                .connects_per_second
                .map(|per_second| Bucket::new(per_second, CONNECT_DEPTH)),
            bytes: limits
                .bytes_per_second
                .map(|per_second| Meter::new(per_second, BYTE_DEPTH)),
        }
    }

    /// Whether one more circuit may be set up now.
    pub(crate) fn admits(&self, now: Time) -> Result<(), Reason> {
        if self
            .limits
            .circuits
            .is_some_and(|most| self.circuits >= most)
        {
            return Err(Reason::RuleCircuits);
        }
        let admitted = self
            .connects
            .as_ref()
            .is_none_or(|connects| connects.has(now));
        if admitted {
            Ok(())
        } else {
            Err(Reason::RuleRate)
        }
    }

    /// Counts a call that has been admitted.
    pub(crate) fn called(&mut self, now: Time) {
        if let Some(connects) = &mut self.connects {
            connects.charge(now);
        }
    }

    pub(crate) fn opened(&mut self) {
        self.circuits += 1;
    }

    pub(crate) fn closed(&mut self) {
        self.circuits = self.circuits.saturating_sub(1);
    }

    /// Counts payload.
    pub(crate) fn charge(&mut self, now: Time, len: u32) {
        if let Some(bytes) = &mut self.bytes {
            bytes.charge(now, len);
        }
    }

    /// Until when nothing more may pass, if more has passed than may.
    pub(crate) fn rests_until(&self, now: Time) -> Option<Time> {
        self.bytes.as_ref()?.in_debt_until(now)
    }
}
