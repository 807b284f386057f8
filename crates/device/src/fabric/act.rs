//! Carrying out what the switch has decided.

use rustix::net::Shutdown;
use vsock::{Action, CircuitId, Direction, Event, Reason, Side};
use wire::connect;
use wire::vsock::SocketType;

use super::{Fabric, peek_circuit};
use crate::caller::Who;
use crate::circuit::CircuitIo;
use crate::dialer::mark;

impl Fabric {
    /// Does everything that the switch wants done, and what follows from that.
    pub(super) fn carry_out(&mut self) {
        while !self.actions.is_empty() {
            let mut actions = std::mem::take(&mut self.actions);
            for action in actions.drain(..) {
                self.act(action);
            }
            // Keep the larger of the two, so that neither has to grow again.
            if self.actions.is_empty() {
                self.actions = actions;
            }
        }
    }

    fn act(&mut self, action: Action) {
        if self.captures.are_wanted() {
            self.show_action(&action);
        }
        match action {
            Action::Forward { circuit, from } => self.forward(circuit, from),
            Action::Wake { line } => self.wake(line),
            Action::DialHost(call) => {
                // One whose caller is a socket too is known already.
                if self.circuit(call.circuit).is_none() {
                    self.install(CircuitIo::new(call.circuit, call.socket_type));
                }
                self.dial_host(call);
            }
            Action::DialHybrid {
                circuit,
                line,
                port,
            } => {
                if self.circuit(circuit).is_none() {
                    self.install(CircuitIo::new(circuit, SocketType::Stream));
                }
                self.dial_hybrid(circuit, line, port);
            }
            Action::Relay { circuit, port } => self.join(circuit, port),
            Action::RelayOn { circuit } => self.relay_on(circuit),
            Action::Decided(decided) => self.report_decision(&decided),
            Action::HostDialing { token, circuit } => self.caller_dials(token, circuit),
            Action::HostDialRefused { token, reason } => self.caller_refused(token, reason),
            Action::HostAccepted { circuit, port } => self.host_accepted(circuit, port),
            Action::HostRejected { circuit, reason } => self.host_rejected(circuit, reason),
            Action::HostShutdown { circuit, direction } => self.host_shutdown(circuit, direction),
            Action::HostClose { circuit, reset } => self.host_close(circuit, reset),
            Action::Discard { circuit, from } => self.discard(circuit, from),
            Action::Released { circuit } => {
                self.observe_end(circuit);
                self.host_close(circuit, true);
                for side in [Side::Caller, Side::Callee] {
                    self.discard(circuit, side);
                }
                if self.circuit(circuit).is_some() {
                    self.circuits[circuit.index as usize] = None;
                }
            }
            Action::Report {
                line,
                source_port,
                destination_cid,
                destination_port,
                reason,
            } => {
                // What ends with this daemon goes on in the next one, or is reset by that.
                if self.handover.left.is_some() {
                    return;
                }
                let Some(line) = self.line(line) else { return };
                let vm = line.name.as_str();
                tracing::info!(vm, source_port, destination_cid, destination_port, %reason, "refused or cut short");
            }
        }
    }

    pub(super) fn install(&mut self, circuit: CircuitIo) {
        let index = circuit.id.index as usize;
        if self.circuits.len() <= index {
            self.circuits.resize_with(index + 1, || None);
        }
        self.circuits[index] = Some(circuit);
    }

    fn host_accepted(&mut self, id: CircuitId, port: u32) {
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        let speaks = circuit.who.as_ref().is_some_and(Who::speaks);
        if let Some(who) = &circuit.who {
            who.accepted(id);
        }
        if let Some(host) = circuit.host.as_mut() {
            host.unanswered = false;
        } else {
            return;
        }
        if !speaks || self.say_to_host(id, &connect::accepted(port)) {
            // It may have sent data already, or be gone: find out.
            self.host_is_readable(id);
        } else {
            self.tell(Event::Kill {
                circuit: id,
                reason: Reason::HostFailed,
            });
        }
    }

    fn host_rejected(&mut self, id: CircuitId, reason: Reason) {
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        let speaks = circuit.who.as_ref().is_some_and(Who::speaks);
        if let Some(who) = &circuit.who {
            who.refused(reason);
        }
        if let Some(host) = circuit.host.take() {
            mark(host.cut.as_ref().filter(|_| !speaks));
            let words = speaks.then(|| connect::refused(reason));
            self.close_socket(host.socket, host.party, words);
        }
    }

    fn host_shutdown(&mut self, id: CircuitId, direction: Direction) {
        let circuit = peek_circuit(&self.circuits, id);
        if let Some(host) = circuit.and_then(|circuit| circuit.host.as_ref()) {
            let how = match direction {
                Direction::Read => Shutdown::Read,
                Direction::Write => {
                    host.ends();
                    Shutdown::Write
                }
            };
            self.slow.timed(host.party, Some(id), || {
                // It fails only when the program is gone, which its socket reports too.
                let _ = rustix::net::shutdown(&host.socket, how);
            });
        }
    }

    /// Closes the host program's socket. When the circuit was cut short, a request that is still in the socket stays
    /// unread, so that the program sees an error and not the end of the data, as a TCP peer does that is reset.
    fn host_close(&mut self, id: CircuitId, cut_short: bool) {
        self.redials.remove(id);
        if !cut_short {
            self.take_host_request(id);
        }
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        let callee = circuit.callee;
        let (ringing, answered_by) = (circuit.ringing.take(), circuit.answered_by.take());
        let (relay, host) = (circuit.relay.take(), circuit.host.take());
        if let Some(socket) = ringing {
            self.close_socket(socket, callee, None);
        }
        if let Some(answered_by) = answered_by {
            mark(answered_by.cut.as_ref());
            self.close_held(answered_by.socket, callee, answered_by.hold);
        }
        if let Some(relay) = relay {
            relay.mark_cut();
            for (socket, party, hold) in relay.into_sockets() {
                self.close_held(socket, party, hold);
            }
        }
        if !cut_short {
            if let Some(host) = &host {
                host.ends();
            }
            let sockets = host.map(|host| (host.socket, host.party, host.hold));
            return self.close_when_taken(id, sockets.into_iter().collect());
        }
        if let Some(host) = host {
            mark(host.cut.as_ref());
            self.close_held(host.socket, host.party, host.hold);
        }
    }
}
