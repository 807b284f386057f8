//! What the circuits that a rule has allowed use together.

use std::time::Duration;

use crate::event::Action;
use crate::rate::{Bucket, Meter};
use crate::switch::Actions;
use crate::{Policy, Reason, RuleId, RuleLimits, Side, Switch, Time};

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

impl Switch {
    /// Whether nothing of this circuit may pass now. It will go on by itself.
    pub(crate) fn rests(&mut self, now: Time, index: usize) -> bool {
        let (rule, id) = (self.circuits[index].call.rule, self.circuits[index].id);
        let until = self.used(rule).and_then(|used| used.rests_until(now));
        let Some(until) = until else { return false };
        let circuit = &mut self.circuits[index];
        if circuit.resting.is_none() {
            let rest = (until, self.next_rest);
            self.next_rest += 1;
            circuit.resting = Some(rest);
            self.resting.insert((rest, id));
        }
        true
    }

    /// Forgets that a circuit rests.
    pub(crate) fn end_rest(&mut self, index: usize) {
        let circuit = &mut self.circuits[index];
        if let Some(rest) = circuit.resting.take() {
            self.resting.remove(&(rest, circuit.id));
        }
    }

    /// Has every rest end at the next tick, which is due at once: other limits hold from now on.
    pub(crate) fn cut_rests_short(&mut self) {
        self.resting.clear();
        for (_, circuit) in &mut self.circuits {
            if let Some((until, _)) = &mut circuit.resting {
                *until = Time::ZERO;
            }
            let rest = circuit.resting.map(|rest| (rest, circuit.id));
            self.resting.extend(rest);
        }
    }

    /// Lets circuits go on whose rest is over.
    pub(crate) fn end_rests(&mut self, now: Time, actions: &mut Actions) {
        while let Some(((at, _), id)) = self.resting.first().copied() {
            if at > now {
                break;
            }
            self.resting.pop_first();
            let Some(index) = self.find(id) else { continue };
            self.circuits[index].resting = None;
            if self.circuits[index].is_relayed() {
                actions.push(Action::RelayOn { circuit: id });
                continue;
            }
            for side in [Side::Caller, Side::Callee] {
                let circuit = &mut self.circuits[index];
                if !circuit.end(side).is_host() {
                    self.enqueue(index, side, actions);
                    continue;
                }
                circuit.flow_to(side).acknowledge_all();
                if circuit.answered && circuit.starves(side.other()) {
                    self.queue_credit_update(index, side.other(), actions);
                }
            }
        }
    }
}
