//! Circuits that are throttled, as more has passed than their rule lets pass.

use policy::Time;

use crate::event::Action;
use crate::ids::Side;
use crate::switch::{Actions, Switch};

impl Switch {
    /// Whether nothing of this circuit may pass now. It will go on by itself.
    pub(crate) fn is_throttled(&mut self, now: Time, index: usize) -> bool {
        let (rule, id) = (self.circuits[index].call.rule, self.circuits[index].id);
        let until = self.used(rule).and_then(|used| used.throttled_until(now));
        let Some(until) = until else { return false };
        let circuit = &mut self.circuits[index];
        if circuit.throttled.is_none() {
            let throttle = (until, self.next_throttle);
            self.next_throttle += 1;
            circuit.throttled = Some(throttle);
            self.throttled.insert((throttle, id));
        }
        true
    }

    /// Forgets that a circuit is throttled.
    pub(crate) fn end_throttle(&mut self, index: usize) {
        let circuit = &mut self.circuits[index];
        if let Some(throttle) = circuit.throttled.take() {
            self.throttled.remove(&(throttle, circuit.id));
        }
    }

    /// Has every throttle end at the next tick, which is due at once: other limits hold from now on.
    pub(crate) fn cut_throttles_short(&mut self) {
        self.throttled.clear();
        for circuit in self.circuits.iter_mut_quietly() {
            if let Some((until, _)) = &mut circuit.throttled {
                *until = Time::ZERO;
            }
            let throttle = circuit.throttled.map(|throttle| (throttle, circuit.id));
            self.throttled.extend(throttle);
        }
    }

    /// Lets circuits go on whose throttle is over.
    pub(crate) fn end_throttles(&mut self, now: Time, actions: &mut Actions) {
        while let Some(((at, _), id)) = self.throttled.first().copied() {
            if at > now {
                break;
            }
            self.throttled.pop_first();
            let Some(index) = self.find(id) else { continue };
            self.circuits[index].throttled = None;
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
