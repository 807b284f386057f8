//! Circuits whose ends are both sockets of the host's: they are joined here, and their bytes passed.

use switch::{CircuitId, Event, Reason, Side};
use wire::connect;

use super::Fabric;
use super::capture::Payload;
use super::host::SOCKET_EVENTS;
use crate::caller::{Who, answer};
use crate::dialer::mark;
use crate::reactor::{EventFlags, Token};
use crate::relay::{PIECE_BYTES, Relay, Step};

/// Pieces that one circuit may pass in one turn and one direction, so that others have their turns.
const PIECES: usize = 4;

impl Fabric {
    /// Both sockets of a circuit are there: the callee has answered. From now on what one sends goes to the other.
    pub(super) fn join(&mut self, id: CircuitId, port: u32) {
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        let speaks = circuit.who.as_ref().is_some_and(Who::speaks);
        let sockets = circuit.host.take().zip(circuit.answered_by.take());
        let Some((caller, callee)) = sockets else {
            return self.break_relay(id, Reason::HostFailed);
        };
        if speaks && !answer(&caller.socket, &connect::accepted(port)) {
            mark(callee.cut.as_ref());
            return self.break_relay(id, Reason::HostFailed);
        }
        let circuit = self.circuit(id);
        if let Some(who) = circuit.and_then(|circuit| circuit.who.as_ref()) {
            who.accepted(id);
        }
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
        match watched {
            Ok(()) => self.schedule_relay(id),
            Err(_) => self.break_relay(id, Reason::HostFailed),
        }
    }

    fn break_relay(&mut self, circuit: CircuitId, reason: Reason) {
        self.tell(Event::Kill { circuit, reason });
    }

    fn schedule_relay(&mut self, id: CircuitId) {
        let relay = self
            .circuit(id)
            .and_then(|circuit| circuit.relay.as_deref_mut());
        if let Some(relay) = relay.filter(|relay| !relay.scheduled && !relay.resting) {
            relay.scheduled = true;
            self.relaying.push_back(id);
        }
    }

    pub(super) fn relay_ready(&mut self, id: CircuitId, side: Side, flags: EventFlags) {
        let relay = self
            .circuit(id)
            .and_then(|circuit| circuit.relay.as_deref_mut());
        let Some(relay) = relay else { return };
        let was_full = relay.is_full(side);
        relay.happened(side, flags);
        if was_full && !relay.is_full(side) {
            self.watch_relay(id, side, SOCKET_EVENTS);
        }
        self.schedule_relay(id);
    }

    /// The rest is over that a rule has asked for.
    pub(super) fn relay_on(&mut self, id: CircuitId) {
        let relay = self
            .circuit(id)
            .and_then(|circuit| circuit.relay.as_deref_mut());
        if let Some(relay) = relay {
            relay.resting = false;
            self.schedule_relay(id);
        }
    }

    /// Gives each circuit that may have something to pass its turn.
    pub(super) fn pass_relayed(&mut self) {
        for _ in 0..self.relaying.len() {
            if let Some(id) = self.relaying.pop_front() {
                self.pass(id);
            }
        }
    }

    fn pass(&mut self, id: CircuitId) {
        // Taken out, so that the switch can be told in between.
        let relay = self.circuit(id).and_then(|circuit| {
            let relay = circuit.relay.as_deref_mut()?;
            relay.scheduled = false;
            circuit.relay.take()
        });
        let Some(mut relay) = relay else { return };
        let mut room = std::mem::take(&mut self.message_room);
        let was_full = [Side::Caller, Side::Callee].map(|side| relay.is_full(side));
        let mut goes_on = false;
        let mut broken = false;
        for from in [Side::Caller, Side::Callee] {
            match self.pass_direction(id, &mut relay, from, &mut room[..PIECE_BYTES]) {
                Step::Took(_) => goes_on = true,
                Step::Waits => {}
                Step::Broken => broken = true,
            }
        }
        self.message_room = room;
        if !broken && relay.is_over() {
            relay.close();
            return self.tell(Event::RelayEnded { circuit: id });
        }
        let full = [Side::Caller, Side::Callee].map(|side| relay.is_full(side));
        if let Some(circuit) = self.circuit(id) {
            circuit.relay = Some(relay);
        }
        if broken {
            return self.break_relay(id, Reason::PeerReset);
        }
        for side in [Side::Caller, Side::Callee] {
            if full[side.index()] && !was_full[side.index()] {
                self.watch_relay(id, side, SOCKET_EVENTS | EventFlags::OUT);
            }
        }
        if goes_on {
            self.schedule_relay(id);
        }
    }

    /// Passes what one side has sent, as far as its turn goes. Says whether there may be more.
    fn pass_direction(
        &mut self,
        id: CircuitId,
        relay: &mut Relay,
        from: Side,
        room: &mut [u8],
    ) -> Step {
        for _ in 0..PIECES {
            if relay.resting {
                return Step::Waits;
            }
            match relay.step(from, room) {
                Step::Took(len) => {
                    if len > 0 && self.captures.are_wanted() {
                        self.show_passed(id, from, &Payload::Private(&room[..len]));
                    }
                    relay.resting = !self.switch.relayed(self.now, id, from, len as u32);
                }
                other => {
                    if self.captures.are_wanted() && relay.is_over_from(from) {
                        self.show_relay_end(id, from);
                    }
                    return other;
                }
            }
        }
        Step::Took(0)
    }

    /// Waits for what may happen to one of the sockets. What has happened already is told again.
    fn watch_relay(&mut self, id: CircuitId, side: Side, events: EventFlags) {
        let relay = self
            .circuits
            .get(id.index as usize)
            .and_then(Option::as_ref)
            .and_then(|circuit| circuit.relay.as_deref());
        let token = Token::Relayed { circuit: id, side };
        // It fails only when the kernel has no memory, and then only for a descriptor that is not yet watched.
        let _ = relay.map(|relay| self.reactor.retag(relay.socket(side), token, events));
    }
}
