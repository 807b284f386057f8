//! What passes sockets of the host's without a guest's ring having its turn: the bytes of two that have been joined, and what is kept for a
//! program that has made room. Lines have their turns, and so have the circuits of each.

use vsock::{CircuitId, Side};

use super::{Fabric, TURN_BYTES};

/// What a poll of a socket counts in a turn, in bytes, whatever passes: its system calls.
pub(super) const LOOK_BYTES: usize = 8 * 1024;

impl Fabric {
    /// Gives a circuit a turn, at the cost of the VM that calls, or else of the one that is called.
    pub(super) fn schedule(&mut self, id: CircuitId) {
        let owner = |side| self.switch.owner(id, side);
        let Some(line) = owner(Side::Caller).or_else(|| owner(Side::Callee)) else {
            return;
        };
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        let is_throttled = circuit.relay.as_ref().is_some_and(|relay| relay.throttled);
        if !is_throttled && !std::mem::replace(&mut circuit.scheduled, true) {
            self.passing.push(line, id);
        }
    }

    /// Gives each line its turn, and of its circuits those their turns for which there is time.
    pub(super) fn pass_scheduled(&mut self) {
        for _ in 0..self.passing.owners() {
            let Some((line, mut circuits)) = self.passing.pop_owner() else {
                return;
            };
            let mut passed = 0;
            while passed < TURN_BYTES {
                let Some(id) = circuits.pop_front() else {
                    break;
                };
                passed += self.pass(id);
            }
            self.passing.put_back(line, circuits);
        }
    }

    /// Passes what there is of a circuit, as far as its turn goes. Returns what that counts, in bytes.
    fn pass(&mut self, id: CircuitId) -> usize {
        let Some(circuit) = self.circuit(id) else {
            return 0;
        };
        circuit.scheduled = false;
        // Taken out, so that the switch can be called in between.
        match circuit.relay.take() {
            Some(relay) => self.relay(id, relay),
            None => self.send_kept(id),
        }
    }
}
