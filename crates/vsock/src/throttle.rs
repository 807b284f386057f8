//! Circuits that rest, as more has passed than their rule lets pass.

use policy::Time;

use crate::event::Action;
use crate::ids::Side;
use crate::switch::{Actions, Switch};

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
        for circuit in self.circuits.iter_mut_quietly() {
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
