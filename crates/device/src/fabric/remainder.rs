//! Circuits that have ended in order, and keep their places until the peers of their sockets have taken everything: see [`crate::remainder`].

use vsock::{CircuitId, Event, Reason};

use super::Fabric;
use crate::remainder::{Held, Left, Remainder};

/// Circuits that are checked in one turn.
const LOOKS_PER_TURN: usize = 256;

impl Fabric {
    /// Everything has passed to these sockets: closes them when their peers have taken it.
    pub(super) fn close_when_taken(&mut self, id: CircuitId, sockets: Vec<Held>) {
        let now = self.now;
        if let Some(circuit) = self.circuit(id) {
            circuit.remainder = Some(Remainder::new(now, sockets));
        }
        self.look_at_remainder(id);
    }

    fn look_at_remainder(&mut self, id: CircuitId) {
        let now = self.now;
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        let Some(remainder) = circuit.remainder.take() else {
            return;
        };
        match remainder.left() {
            Left::Nothing => {}
            Left::Something => {
                let at = remainder.next_look(now);
                circuit.remainder = Some(remainder);
                self.remainders.insert((at, id));
                return;
            }
            Left::GivenUp => self.tell(Event::Kill {
                circuit: id,
                reason: Reason::NotTaken,
            }),
        }
        for (socket, party, hold) in remainder.sockets {
            self.close_held(socket, party, hold);
        }
        self.tell(Event::Taken { circuit: id });
    }

    pub(super) fn look_at_remainders(&mut self) {
        for _ in 0..LOOKS_PER_TURN {
            let first = self.remainders.first().copied();
            let Some(due) = first.filter(|(at, _)| *at <= self.now) else {
                return;
            };
            self.remainders.remove(&due);
            self.look_at_remainder(due.1);
        }
    }
}

#[cfg(test)]
mod tests;
