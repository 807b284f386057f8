//! The end of circuits: resets, refusals, the last byte, and the timers that wait for them.

use policy::Time;
use wire::vsock::{SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SocketType};

use crate::call::Destination;
use crate::circuit::{CircuitReport, Deadline, DeadlineKind, EndedCircuit};
use crate::end::Party;
use crate::event::{Action, Direction};
use crate::flow::{Ending, Flow};
use crate::switch::Actions;
use crate::{CircuitId, Reason, Side, Switch};

/// Deadlines that are met in one tick. The next tick is due at once while there are more.
const DEADLINES_AT_ONCE: usize = 256;

impl Switch {
    /// The guest at `side` knows nothing of this circuit any more.
    pub(crate) fn guest_gone(
        &mut self,
        now: Time,
        index: usize,
        side: Side,
        reason: Reason,
        actions: &mut Actions,
    ) {
        if !self.circuits[index].answered {
            self.fail_dial(now, index, Some(side), reason, actions);
            return;
        }
        let circuit = &mut self.circuits[index];
        let over = circuit.flows[0].is_over() && circuit.flows[1].is_over();
        let flow = circuit.flow_from(side);
        let finished = matches!(flow.end, Ending::Finishing | Ending::Done) || flow.refused;
        if !over && !finished {
            self.note(index, side, reason, actions);
        }
        self.detach(index, side);
        let circuit = &mut self.circuits[index];
        let flow = circuit.flow_from(side);
        if flow.end == Ending::Open {
            flow.end = Ending::Aborting;
        }
        self.refuse(index, side, actions);
        self.settle(now, index, actions);
    }

    /// `side` takes no more data: what is kept for it is dropped.
    pub(crate) fn refuse(&mut self, index: usize, side: Side, actions: &mut Actions) {
        self.circuits[index].flow_to(side).refused = true;
        self.drop_kept(index, side.other(), actions);
    }

    fn drop_kept(&mut self, index: usize, from: Side, actions: &mut Actions) {
        let circuit = &mut self.circuits[index];
        let id = circuit.id;
        let flow = circuit.flow_from(from);
        if flow.kept() > 0 {
            flow.discard();
            actions.push(Action::Discard { circuit: id, from });
        }
    }

    /// Whether `from` has ended in the middle of a message: a host program takes a message as a whole or not at all.
    fn is_cut_short(&self, index: usize, from: Side) -> bool {
        let circuit = &self.circuits[index];
        circuit.socket_type == SocketType::SeqPacket
            && circuit.end(from.other()).is_host()
            && circuit.flows[from.index()].is_cut_short()
    }

    /// Ends a circuit at once, on both sides.
    pub(crate) fn kill(&mut self, now: Time, index: usize, reason: Reason, actions: &mut Actions) {
        if !self.circuits[index].answered {
            self.fail_dial(now, index, None, reason, actions);
            return;
        }
        self.note(index, Side::Caller, reason, actions);
        for side in [Side::Caller, Side::Callee] {
            self.refuse(index, side, actions);
            let circuit = &mut self.circuits[index];
            circuit.flow_to(side).end = Ending::Done;
            circuit.flow_to(side).refusal_passed = true;
            let id = circuit.id;
            let end = circuit.end_mut(side);
            if end.gone {
                continue;
            }
            if end.is_host() {
                end.gone = true;
                actions.push(Action::HostClose {
                    circuit: id,
                    reset: true,
                });
            } else {
                end.outbox = Default::default();
                end.outbox.reset = true;
                self.enqueue(index, side, actions);
            }
        }
        self.settle(now, index, actions);
    }

    /// A circuit that was never answered ends. `knows` is the guest that ended it, if one did.
    pub(crate) fn fail_dial(
        &mut self,
        now: Time,
        index: usize,
        knows: Option<Side>,
        reason: Reason,
        actions: &mut Actions,
    ) {
        self.note(index, Side::Caller, reason, actions);
        self.decided(now, index, Err(reason), actions);
        self.close_handshake(index);
        for side in [Side::Caller, Side::Callee] {
            let circuit = &mut self.circuits[index];
            circuit.flow_from(side).end = Ending::Done;
            circuit.flow_from(side).refused = true;
            circuit.flow_from(side).refusal_passed = true;
            let id = circuit.id;
            let end = circuit.end_mut(side);
            if end.gone {
                continue;
            }
            match end.party {
                Party::Host | Party::Hybrid { .. } => {
                    end.gone = true;
                    actions.push(match side {
                        Side::Caller => Action::HostRejected {
                            circuit: id,
                            reason,
                        },
                        Side::Callee => Action::HostClose {
                            circuit: id,
                            reset: true,
                        },
                    });
                }
                // A guest to which the call was not announced needs no end of it.
                Party::Guest { .. } if side == Side::Callee && end.outbox.request => {
                    self.detach(index, side)
                }
                Party::Guest { .. } if knows == Some(side) => self.detach(index, side),
                Party::Guest { .. } => {
                    end.outbox = Default::default();
                    end.outbox.reset = true;
                    self.enqueue(index, side, actions);
                }
                Party::Departed { .. } => {}
            }
        }
        self.settle(now, index, actions);
    }

    /// Counts why a circuit ended early, and says so to the log, once.
    fn note(&mut self, index: usize, blamed: Side, reason: Reason, actions: &mut Actions) {
        let circuit = &mut self.circuits[index];
        if circuit.reason.is_some() {
            return;
        }
        circuit.reason = Some(reason);
        if circuit.answered {
            let cut_short = &mut self.figures.of(circuit.call.rule).cut_short;
            *cut_short.entry(reason).or_default() += 1;
        }
        let caller = circuit.end(Side::Caller);
        let callee = circuit.end(Side::Callee);
        let Some(line) = circuit
            .end(blamed)
            .owner()
            .or(caller.owner())
            .or(callee.owner())
        else {
            return;
        };
        actions.push(Action::Report {
            line,
            source_port: caller.port,
            destination_cid: callee.seen.0,
            destination_port: callee.seen.1,
            reason,
        });
        if let Some(line) = self.line_mut(line) {
            line.counters.ended[reason.index()] += 1;
        }
    }

    /// Draws the consequences of whatever has changed: ends of data that can be passed on, ends of circuits that are
    /// over, circuits that can be forgotten.
    pub(crate) fn settle(&mut self, now: Time, index: usize, actions: &mut Actions) {
        if !self.circuits[index].answered {
            return;
        }
        for from in [Side::Caller, Side::Callee] {
            if self.is_cut_short(index, from) {
                if !self.circuits[index].end(from).gone {
                    return self.kill(now, index, Reason::PeerReset, actions);
                }
                self.circuits[index].flow_from(from).end = Ending::Aborting;
                self.drop_kept(index, from, actions);
            }
            self.settle_flow(index, from, actions);
        }
        for side in [Side::Caller, Side::Callee] {
            self.settle_end(now, index, side, actions);
        }
        self.release_if_over(index, actions);
    }

    /// Forgets a circuit that is over on both ends, and of which nothing is left.
    pub(crate) fn release_if_over(&mut self, index: usize, actions: &mut Actions) {
        let circuit = &self.circuits[index];
        if circuit.ends.iter().all(|end| end.gone) && !circuit.untaken {
            self.release(index, actions);
        }
    }

    /// The peers of its sockets have taken everything.
    pub(crate) fn taken(&mut self, id: CircuitId, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        self.circuits[index].untaken = false;
        self.release_if_over(index, actions);
    }

    /// Passes on the end of what `from` sends, and the refusal of the other side to receive more.
    fn settle_flow(&mut self, index: usize, from: Side, actions: &mut Actions) {
        let circuit = &mut self.circuits[index];
        let id = circuit.id;
        let to = from.other();
        let unwanted = circuit.end(to).heard & SHUTDOWN_RECEIVE != 0;
        let flow = &mut circuit.flows[from.index()];
        // An end that shut down its reading still gets what is kept for it, should it read on; but no more is wanted, and
        // the source is notified of that at once.
        flow.refused |= unwanted && flow.kept() == 0;
        let ending = flow.end;
        let passes_end = flow.kept() == 0 && matches!(ending, Ending::Finishing | Ending::Aborting);
        if passes_end {
            flow.end = Ending::Done;
        }
        let passes_refusal = (flow.refused || unwanted) && !flow.refusal_passed;
        flow.refusal_passed |= passes_refusal;
        if passes_end && !circuit.end(to).gone {
            let end = circuit.end_mut(to);
            match (end.is_host(), ending) {
                (true, Ending::Aborting) => {
                    end.gone = true;
                    actions.push(Action::HostClose {
                        circuit: id,
                        reset: true,
                    });
                }
                (true, _) => actions.push(Action::HostShutdown {
                    circuit: id,
                    direction: Direction::Write,
                }),
                (false, Ending::Aborting) => {
                    end.outbox.reset = true;
                    self.enqueue(index, to, actions);
                }
                (false, _) => {
                    end.outbox.shutdown |= SHUTDOWN_SEND;
                    self.enqueue(index, to, actions);
                }
            }
        }
        let end = self.circuits[index].end_mut(from);
        if passes_refusal && !end.gone {
            if end.is_host() {
                end.readable = false;
                actions.push(Action::HostShutdown {
                    circuit: id,
                    direction: Direction::Read,
                });
            } else {
                end.outbox.shutdown |= SHUTDOWN_RECEIVE;
                self.enqueue(index, from, actions);
            }
        }
    }

    /// Ends `side` when nothing more can pass and the other end has no more to say.
    fn settle_end(&mut self, now: Time, index: usize, side: Side, actions: &mut Actions) {
        let circuit = &mut self.circuits[index];
        let id = circuit.id;
        let peer_gone = circuit.end(side.other()).gone;
        let both_over = circuit.flows.iter().all(Flow::is_over);
        let inbound_over = circuit.flow_to(side).is_over();
        let end = circuit.end_mut(side);
        if end.gone {
            return;
        }
        match end.party {
            Party::Host | Party::Hybrid { .. } if both_over => {
                end.gone = true;
                circuit.untaken = true;
                actions.push(Action::HostClose {
                    circuit: id,
                    reset: false,
                });
                // The guest may be waiting for just this.
                self.settle_end(now, index, side.other(), actions);
            }
            Party::Guest { .. } if peer_gone && inbound_over && !end.outbox.reset => {
                if end.heard == SHUTDOWN_BOTH {
                    end.outbox.reset = true;
                    self.enqueue(index, side, actions);
                } else {
                    end.outbox.shutdown |= SHUTDOWN_BOTH & !end.announced;
                    self.linger(now, index, side);
                    self.enqueue(index, side, actions);
                }
            }
            _ => {}
        }
    }

    /// The end of the circuit was announced to the guest at `side`, and has some time to confirm it. A guest whose ring
    /// had no room for that does not know.
    pub(crate) fn linger(&mut self, now: Time, index: usize, side: Side) {
        let circuit = &self.circuits[index];
        let announced =
            circuit.end(side.other()).gone && circuit.end(side).announced == SHUTDOWN_BOTH;
        let lingers = |deadline: Deadline| deadline.kind == DeadlineKind::Linger;
        if announced && !circuit.deadline.is_some_and(lingers) {
            let at = now + self.limits_at(index, side).linger;
            let kind = DeadlineKind::Linger;
            self.set_deadline(index, Some(Deadline { at, kind }));
        }
    }

    /// Forgets a circuit that is over on both ends.
    fn release(&mut self, index: usize, actions: &mut Actions) {
        self.close_handshake(index);
        self.set_deadline(index, None);
        self.end_throttle(index);
        self.account_for(index);
        self.strike_ends(index);
        // One that the rules have ended counts for none, and the rule that ended it is what is asked for.
        let is_denied = self.circuits[index].reason == Some(Reason::Denied);
        let ended_by = is_denied.then(|| self.ended_by(index)).flatten();
        let circuit = self.circuits.remove(index);
        self.programs.closed(circuit.call.host);
        // One that was never put through has been decided about, and nothing else.
        if let Some(ended) = self.ended.as_mut().filter(|_| circuit.put_through) {
            ended.push_back(EndedCircuit {
                circuit: CircuitReport {
                    rule: circuit.call.rule.or(ended_by),
                    ..circuit.report()
                },
                reason: circuit.reason,
            });
        }
        if let Some(used) = self.used(circuit.call.rule) {
            used.closed();
        }
        for side in [Side::Caller, Side::Callee] {
            let end = circuit.end(side);
            // Only what a guest sends through its rings has been reserved for.
            let grant = match end.is_host() {
                true => 0,
                false => circuit.flows[side.index()].grant(),
            };
            if let Some(line) = end.owner().and_then(|line| self.line_mut(line)) {
                let origin = circuit.origin_at(side);
                line.release(origin, grant);
                line.close_circuit(origin);
            }
        }
        actions.push(Action::Released {
            circuit: circuit.id,
        });
    }

    pub(crate) fn tick(&mut self, now: Time, actions: &mut Actions) {
        self.cut_some(now, actions);
        self.end_throttles(now, actions);
        for _ in 0..DEADLINES_AT_ONCE {
            let due = self.deadlines.first().filter(|(at, _)| *at <= now);
            let Some((_, id)) = due.copied() else { break };
            self.deadlines.pop_first();
            let Some(index) = self.find(id) else { continue };
            let Some(deadline) = self.circuits[index].deadline.take() else {
                continue;
            };
            match deadline.kind {
                DeadlineKind::Handshake => {
                    let reason = match self.circuits[index].call.reached {
                        Destination::Line(_) | Destination::Departed => Reason::TimedOut,
                        Destination::Listener => Reason::BacklogFull,
                        Destination::Service(_) => Reason::ServiceTimedOut,
                    };
                    self.fail_dial(now, index, None, reason, actions);
                }
                DeadlineKind::Linger => {
                    for side in [Side::Caller, Side::Callee] {
                        let end = self.circuits[index].end_mut(side);
                        if !end.gone && !end.is_host() {
                            end.outbox.shutdown = 0;
                            end.outbox.reset = true;
                            self.enqueue(index, side, actions);
                        }
                    }
                }
                DeadlineKind::CreditPoll => self.poll_credit(now, index, actions),
            }
        }
    }
}
