//! What the circuits that a rule has allowed use together.

use std::time::Duration;

use crate::compiled::Policy;
use crate::ids::Time;
use crate::rule::{RuleId, RuleLimits};
use crate::token_bucket::TokenBucket;

/// After so long without calls as many may be made at once as may be made in this time.
pub const CALLS_AT_ONCE: Duration = Duration::from_secs(1);

/// The same for bytes: long enough for a wait to be worth a timer, short enough not to be seen.
///
/// Bytes are counted when they have passed. So what passes in some time is what the limit says, and beyond it, once, this
/// depth and for each circuit what it may send without asking: one turn (`Limits::quantum_bytes` of the switch) of what a
/// program of the host sends, or twice the window that a guest was offered.
const BYTES_AT_ONCE: Duration = Duration::from_millis(50);

/// A limit of a rule that is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleLimit {
    /// It has allowed as many circuits as there may be.
    Circuits,
    /// It has allowed as many calls as may be made in a second.
    ConnectsPerSecond,
}

/// What is used of the limits of one rule.
#[derive(Debug)]
pub struct RuleUse {
    limits: RuleLimits,
    circuits: u32,
    connects: Option<TokenBucket>,
    bytes: Option<TokenBucket>,
}

impl RuleUse {
    /// One for each rule of a policy that replaces another, without circuits. A rule that was there before, and has a place in it, has as much left of a limit as
    /// it had, if that limit is what it was ([`TokenBucket::replacing`]).
    pub fn handed_over(old: Vec<RuleUse>, places: &[Option<RuleId>], to: &Policy) -> Vec<RuleUse> {
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
        // Each field is named, so that a new limit is not forgotten. Circuits are counted anew.
        let RuleUse {
            limits: _,
            circuits: _,
            connects,
            bytes,
        } = old;
        for (new, old) in [(&mut self.connects, connects), (&mut self.bytes, bytes)] {
            *new = new.take().map(|new| new.replacing(old));
        }
    }

    fn new(limits: RuleLimits) -> RuleUse {
        RuleUse {
            limits,
            circuits: 0,
            connects: limits
                .connects_per_second
                .map(|per_second| TokenBucket::new(per_second.into(), CALLS_AT_ONCE)),
            bytes: limits
                .bytes_per_second
                .map(|per_second| TokenBucket::new(per_second, BYTES_AT_ONCE)),
        }
    }

    /// Circuits that it has allowed, in any state.
    pub fn circuits(&self) -> u32 {
        self.circuits
    }

    /// How many bytes may pass in a second, if there is a limit.
    pub fn bytes_per_second(&self) -> Option<u64> {
        self.limits.bytes_per_second
    }

    /// Whether one more circuit may be set up now.
    ///
    /// # Errors
    /// The limit that is reached.
    pub fn admits(&self, now: Time) -> Result<(), RuleLimit> {
        if self
            .limits
            .circuits
            .is_some_and(|most| self.circuits >= most)
        {
            return Err(RuleLimit::Circuits);
        }
        let connects = self.connects.as_ref();
        match connects.is_none_or(|connects| connects.has(now, 1)) {
            true => Ok(()),
            false => Err(RuleLimit::ConnectsPerSecond),
        }
    }

    /// Counts a call that has been admitted.
    pub fn called(&mut self, now: Time) {
        if let Some(connects) = &mut self.connects {
            connects.charge(now, 1);
        }
    }

    /// Counts a circuit.
    pub fn opened(&mut self) {
        self.circuits += 1;
    }

    /// A circuit has ended, or counts for another rule.
    pub fn closed(&mut self) {
        self.circuits = self.circuits.saturating_sub(1);
    }

    /// Counts payload.
    pub fn charge(&mut self, now: Time, len: u32) {
        if let Some(bytes) = &mut self.bytes {
            bytes.charge(now, len.into());
        }
    }

    /// Until when nothing more may pass, if more has passed than may.
    pub fn throttled_until(&self, now: Time) -> Option<Time> {
        self.bytes.as_ref()?.in_debt_until(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Rule;

    const NOW: Time = Duration::from_secs(1);

    fn policy(label: &str, limits: RuleLimits) -> Policy {
        Policy::new(vec![Rule {
            limits,
            label: label.to_owned(),
            ..Rule::allow_any()
        }])
    }

    fn limits(circuits: u32, connects_per_second: u32, bytes_per_second: u64) -> RuleLimits {
        RuleLimits {
            circuits: Some(circuits),
            connects_per_second: Some(connects_per_second),
            bytes_per_second: Some(bytes_per_second),
        }
    }

    #[test]
    fn circuits_below_at_and_above_the_limit() {
        let mut used = RuleUse::new(limits(2, 100, 1));
        for circuits in [0, 1] {
            assert_eq!((used.circuits(), used.admits(NOW)), (circuits, Ok(())));
            used.opened();
        }
        assert_eq!(used.admits(NOW), Err(RuleLimit::Circuits));
        used.closed();
        assert_eq!(used.admits(NOW), Ok(()));
    }

    #[test]
    fn calls_below_at_and_above_the_limit() {
        let mut used = RuleUse::new(limits(100, 2, 1));
        for _ in 0..2 {
            assert_eq!(used.admits(NOW), Ok(()));
            used.called(NOW);
        }
        assert_eq!(used.admits(NOW), Err(RuleLimit::ConnectsPerSecond));
        assert_eq!(used.admits(NOW + CALLS_AT_ONCE / 2), Ok(()));
    }

    #[test]
    fn bytes_below_at_and_above_the_limit() {
        let mut used = RuleUse::new(limits(100, 100, 20_000));
        used.charge(NOW, 999);
        assert_eq!(used.throttled_until(NOW), None);
        used.charge(NOW, 1);
        assert_eq!(used.throttled_until(NOW), None, "those of 50 ms");
        used.charge(NOW, 20_000);
        assert_eq!(used.throttled_until(NOW), Some(2 * NOW));
    }

    #[test]
    fn a_reload_keeps_what_is_left_of_each_limit_that_stays() {
        let old = policy("old", limits(2, 1, 20));
        let new = policy("new", limits(3, 1, 40));
        let mut uses = RuleUse::handed_over(Vec::new(), &[], &old);
        uses[0].opened();
        uses[0].called(NOW);
        uses[0].charge(NOW, 100);
        assert_eq!(uses[0].admits(NOW), Err(RuleLimit::ConnectsPerSecond));
        let uses = RuleUse::handed_over(uses, &[Some(RuleId(0))], &new);
        assert_eq!(uses[0].circuits(), 0, "they are counted again");
        assert_eq!(uses[0].admits(NOW), Err(RuleLimit::ConnectsPerSecond));
        assert_eq!(uses[0].throttled_until(NOW), None, "another limit");
        // A rule that is gone leaves nothing.
        let uses = RuleUse::handed_over(uses, &[None], &new);
        assert_eq!(uses[0].admits(NOW), Ok(()));
    }

    #[test]
    fn a_rule_without_limits_admits_everything() {
        let mut used = RuleUse::new(RuleLimits::default());
        used.called(NOW);
        used.charge(NOW, u32::MAX);
        assert_eq!(
            (used.admits(NOW), used.throttled_until(NOW)),
            (Ok(()), None)
        );
    }
}
