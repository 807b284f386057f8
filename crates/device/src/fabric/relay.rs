//! Circuits whose ends are both sockets of the host's, which are joined here.

use vsock::{CircuitId, Event, Reason, Side};
use wire::connect;

use super::capture::Payload;
use super::host::SOCKET_EVENTS;
use super::pass::LOOK_BYTES;
use super::{Fabric, find_circuit};
use crate::caller::Who;
use crate::reactor::{EventFlags, Token};
use crate::relay::{PIECE_BYTES, Relay, Step};

/// Pieces that one circuit may pass in one turn and one direction, so that others have their turns.
const PIECES: usize = 4;

impl Fabric {
    /// Both sockets of a circuit are there: the callee has answered. From now on what one sends goes to the other.
    pub(super) fn join(&mut self, id: CircuitId, port: u32) {
        if !self.join_sockets(id, port) {
            self.break_relay(id, Reason::HostFailed);
        }
    }

    /// False if they cannot be joined: both are still the circuit's then, which marks them when it is cut.
    fn join_sockets(&mut self, id: CircuitId, port: u32) -> bool {
        let Some(circuit) = self.circuit(id) else {
            return true;
        };
        let speaks = circuit.who.as_ref().is_some_and(Who::speaks);
        let (Some(_), Some(_)) = (&circuit.host, &circuit.answered_by) else {
            return false;
        };
        if speaks && !self.say_to_host(id, &connect::accepted(port)) {
            return false;
        }
        let Some(circuit) = self.circuit(id) else {
            return true;
        };
        if let Some(who) = &circuit.who {
            who.accepted(id);
        }
        let Some((caller, callee)) = circuit.host.take().zip(circuit.answered_by.take()) else {
            return false;
        };
        let token = |side| Token::Relayed { circuit: id, side };
        let watched = self
            .reactor
            .retag(&caller.socket, token(Side::Caller), SOCKET_EVENTS)
            .and_then(|()| {
                self.reactor
                    .add(&callee.socket, token(Side::Callee), SOCKET_EVENTS)
            });
        if let Some(circuit) = self.circuit(id) {
            circuit.relay = Some(Box::new(Relay::new(caller, callee)));
        }
        self.schedule(id);
        watched.is_ok()
    }

    fn break_relay(&mut self, circuit: CircuitId, reason: Reason) {
        self.tell(Event::Kill { circuit, reason });
    }

    pub(super) fn relay_ready(&mut self, id: CircuitId, side: Side, flags: EventFlags) {
        let circuit = find_circuit(&mut self.circuits, id);
        let relay = circuit.and_then(|circuit| circuit.relay.as_deref_mut());
        let Some(relay) = relay else { return };
        let was_full = relay.is_full(side);
        relay.happened(id, side, flags, &mut self.slow);
        if was_full && !relay.is_full(side) {
            self.watch_relay(id, side, SOCKET_EVENTS);
        }
        self.schedule(id);
    }

    /// The rest is over that a rule has asked for.
    pub(super) fn relay_on(&mut self, id: CircuitId) {
        let relay = self
            .circuit(id)
            .and_then(|circuit| circuit.relay.as_deref_mut());
        if let Some(relay) = relay {
            relay.throttled = false;
            self.schedule(id);
        }
    }

    /// Passes what there is of two sockets that have been joined, as far as their turn goes. Returns what that counts, in bytes.
    pub(super) fn relay(&mut self, id: CircuitId, mut relay: Box<Relay>) -> usize {
        let mut passed = 0;
        let mut room = std::mem::take(&mut self.message_room);
        let was_full = [Side::Caller, Side::Callee].map(|side| relay.is_full(side));
        let mut goes_on = false;
        let mut broken = false;
        for from in [Side::Caller, Side::Callee] {
            let (len, step) = self.pass_direction(id, &mut relay, from, &mut room[..PIECE_BYTES]);
            passed += len;
            match step {
                Step::Took(_) => goes_on = true,
                Step::Waits => {}
                Step::Broken => broken = true,
            }
        }
        self.message_room = room;
        if !broken && relay.is_over() {
            relay.end(id, &mut self.slow);
            self.tell(Event::RelayEnded { circuit: id });
            self.close_when_taken(id, relay.into_sockets().into());
            return passed;
        }
        let full = [Side::Caller, Side::Callee].map(|side| relay.is_full(side));
        if let Some(circuit) = self.circuit(id) {
            circuit.relay = Some(relay);
        }
        if broken {
            self.break_relay(id, Reason::PeerReset);
            return passed;
        }
        for side in [Side::Caller, Side::Callee] {
            if full[side.index()] && !was_full[side.index()] {
                self.watch_relay(id, side, SOCKET_EVENTS | EventFlags::OUT);
            }
        }
        if goes_on {
            self.schedule(id);
        }
        self.act_on_overruns();
        passed
    }

    /// Passes what one side has sent, as far as its turn goes. Returns what that counts, in bytes, and whether there may be more.
    fn pass_direction(
        &mut self,
        id: CircuitId,
        relay: &mut Relay,
        from: Side,
        room: &mut [u8],
    ) -> (usize, Step) {
        let mut taken = 0;
        for _ in 0..PIECES {
            if relay.throttled {
                return (taken, Step::Waits);
            }
            taken += LOOK_BYTES;
            match relay.step(id, from, room, &mut self.slow) {
                Step::Took(len) => {
                    taken += len;
                    if len > 0 && self.captures.are_wanted() {
                        self.show_passed(id, from, &Payload::Private(&room[..len]));
                    }
                    relay.throttled = !self.switch.relayed(self.now, id, from, len as u32);
                }
                other => {
                    if self.captures.are_wanted() && relay.is_over_from(from) {
                        self.show_relay_end(id, from);
                    }
                    return (taken, other);
                }
            }
        }
        (taken, Step::Took(0))
    }

    /// Waits for what may happen to one of the sockets. What has happened is reported again.
    fn watch_relay(&mut self, id: CircuitId, side: Side, events: EventFlags) {
        let relay = self
            .peek_circuit(id)
            .and_then(|circuit| circuit.relay.as_deref());
        let token = Token::Relayed { circuit: id, side };
        // It fails only when the kernel has no memory, and then only for a descriptor that is not yet watched.
        let _ = relay.map(|relay| self.reactor.retag(relay.socket(side), token, events));
    }
}
