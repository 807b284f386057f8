//! What programs on the host do.

use policy::{LineId, Time};
use wire::vsock::SocketType;

use crate::call::Call;
use crate::end::{End, EndKey, Party};
use crate::event::{Action, CalleeId, CallerId, Decided, HostCaller};
use crate::flow::Ending;
use crate::operator::Refusal;
use crate::switch::Actions;
use crate::{CircuitId, ProgramId, Reason, Side, Switch};

impl Switch {
    #[allow(clippy::too_many_arguments)] // One event, taken apart once.
    pub(crate) fn host_dial(
        &mut self,
        now: Time,
        line_id: LineId,
        port: u32,
        socket_type: SocketType,
        host: HostCaller,
        token: u64,
        actions: &mut Actions,
    ) {
        let admitted = self.admit_host_dial(now, line_id, port, socket_type, host);
        let (callee_line, callee_port, host_port, call) = match admitted {
            Ok(admitted) => admitted,
            Err(Refusal { reason, rule, .. }) => {
                if let Some(line) = self.line_mut(line_id) {
                    line.counters.ended[reason.index()] += 1;
                }
                self.count_refused(rule, reason);
                let line = self.lines.get(line_id.0 as usize);
                actions.push(Action::Decided(Decided {
                    caller: CallerId::HostAttempt { token },
                    dialled_cid: line.map_or(0, |line| line.address.cid),
                    dialled_port: port,
                    dialled: line.map(|_| CalleeId::Guest {
                        line: line_id,
                        port,
                    }),
                    reached: None,
                    rule,
                    result: Err(reason),
                }));
                actions.push(Action::HostDialRefused { token, reason });
                return;
            }
        };
        let cid = self.lines[callee_line.0 as usize].address.cid;
        let caller = End::new(Party::Host, host_port);
        let hybrid = self.lines[callee_line.0 as usize].hybrid;
        let mut callee = End::new(Party::of_vm(callee_line, cid, hybrid), callee_port);
        let dialled = self.lines.get(line_id.0 as usize);
        callee.seen = (dialled.map_or(cid, |line| line.address.cid), port);
        let index = self.open(now, socket_type, caller, callee, call);
        let circuit = &mut self.circuits[index];
        actions.push(Action::HostDialing {
            token,
            circuit: circuit.id,
        });
        if hybrid {
            actions.push(Action::DialHybrid {
                circuit: circuit.id,
                line: callee_line,
                port: callee_port,
            });
            return;
        }
        circuit.end_mut(Side::Callee).outbox.request = true;
        self.enqueue(index, Side::Callee, actions);
    }

    /// The line and the port that have the call, a free port for the host's end, and what to remember of the call; or why it
    /// cannot be made.
    fn admit_host_dial(
        &mut self,
        now: Time,
        dialled: LineId,
        port: u32,
        socket_type: SocketType,
        host: HostCaller,
    ) -> Result<(LineId, u32, u32, Call), Refusal> {
        let (line_id, port, call) = self.route_from_host(now, dialled, port, socket_type, host)?;
        let circuits = self.lines[line_id.0 as usize].circuits;
        // Each circuit has one port, so one of so many is free.
        for _ in 0..=circuits {
            let host_port = self.lines[line_id.0 as usize].take_port();
            let key = EndKey {
                line: line_id,
                port,
                peer_cid: wire::vsock::HOST_CID,
                peer_port: host_port,
            };
            if !self.by_end.contains_key(&key) {
                return Ok((line_id, port, host_port, call));
            }
        }
        Err(Reason::CircuitLimit.into())
    }

    pub(crate) fn host_dialed(
        &mut self,
        now: Time,
        id: CircuitId,
        result: Result<(), Reason>,
        actions: &mut Actions,
    ) {
        let Some(index) = self.find(id) else { return };
        if self.circuits[index].answered {
            return;
        }
        if let Err(reason) = result {
            return self.fail_dial(now, index, None, reason, actions);
        }
        self.decided(now, index, Ok(()), actions);
        self.close_handshake(index);
        if self.circuits[index].is_relayed() {
            let port = self.circuits[index].end(Side::Caller).port;
            return actions.push(Action::Relay { circuit: id, port });
        }
        self.circuits[index].end_mut(Side::Caller).outbox.response = true;
        self.enqueue(index, Side::Caller, actions);
    }

    pub(crate) fn host_readable(&mut self, id: CircuitId, readable: bool, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        let Some(host) = circuit.host_side() else {
            return;
        };
        let flow = circuit.flow_from(host);
        if readable && (flow.end != Ending::Open || flow.refused || flow.refusal_passed) {
            return;
        }
        circuit.end_mut(host).readable = readable;
        if readable && circuit.answered {
            self.enqueue(index, host.other(), actions);
        }
    }

    pub(crate) fn host_stored(&mut self, id: CircuitId, len: u32, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        let Some(host) = circuit.host_side() else {
            return;
        };
        let id = circuit.id;
        let flow = circuit.flow_from(host);
        if flow.refused || flow.end != Ending::Open {
            // It was read before the device knew that it is not taken.
            actions.push(Action::Discard {
                circuit: id,
                from: host,
            });
            return;
        }
        flow.store(len);
        self.enqueue(index, host.other(), actions);
    }

    pub(crate) fn host_finished(&mut self, now: Time, id: CircuitId, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        let Some(host) = circuit.host_side() else {
            return;
        };
        circuit.end_mut(host).readable = false;
        let flow = circuit.flow_from(host);
        if flow.end == Ending::Open {
            flow.end = Ending::Finishing;
        }
        self.settle(now, index, actions);
    }

    pub(crate) fn host_refused(&mut self, now: Time, id: CircuitId, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let Some(host) = self.circuits[index].host_side() else {
            return;
        };
        self.refuse(index, host, actions);
        self.settle(now, index, actions);
    }

    /// The host program went away before the guest answered: the guest's answer is for no one.
    pub(crate) fn host_gone(&mut self, now: Time, id: CircuitId, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        if self.circuits[index].answered {
            return;
        }
        self.fail_dial(now, index, None, Reason::HostFailed, actions);
    }

    pub(crate) fn delivered(&mut self, now: Time, id: CircuitId, len: u32, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        let Some(host) = circuit.host_side() else {
            return;
        };
        let flow = circuit.flow_to(host);
        if !flow.deliver(len) {
            return self.kill(now, index, Reason::HostFailed, actions);
        }
        circuit.passed[host.other().index()] += u64::from(len);
        let flow = circuit.flow_to(host);
        let open = flow.end == Ending::Open;
        let line = circuit.end(host).owner();
        if let Some(line) = line.and_then(|line| self.line_mut(line)) {
            line.counters.bytes_to_guest += u64::from(len);
        }
        if open && self.is_throttled(now, index) {
            // What has arrived is acknowledged when the rest is over: until then the guest has no more credit.
            return;
        }
        let circuit = &mut self.circuits[index];
        let flow = circuit.flow_to(host);
        flow.acknowledge_all();
        if flow.end != Ending::Open {
            self.settle(now, index, actions);
            return;
        }
        let update_is_due = circuit.starves(host.other());
        self.tune(index, host.other(), update_is_due);
        if update_is_due {
            self.queue_credit_update(index, host.other(), actions);
        }
    }

    /// Some bytes of the guest at `from` have reached its program. `update_is_due`: the guest is about to be notified.
    pub(crate) fn tune(&mut self, index: usize, from: Side, update_is_due: bool) {
        let circuit = &self.circuits[index];
        let Some(line) = circuit.end(from).line() else {
            return;
        };
        if circuit.socket_type != SocketType::Stream {
            return;
        }
        let origin = circuit.origin_at(from);
        let limits = *self.limits(line);
        let flow = self.circuits[index].flow_from(from);
        let tolerated = limits.grant_bytes.max(flow.window() / 4 * 3);
        let keeps_up = flow.kept() <= tolerated;
        if !keeps_up && flow.window() > limits.grant_bytes {
            flow.tuning.setback();
            flow.narrow(limits.grant_bytes);
        }
        let surplus = flow.surplus();
        if surplus > 0 {
            flow.set_grant(flow.grant() - surplus);
            if let Some(line) = self.line_mut(line) {
                line.release(origin, surplus);
            }
            return;
        }
        let room = limits.max_host_grant_bytes.saturating_sub(flow.grant());
        let wanted = flow.grant().min(room);
        // After a setback the usual credit holds once the source has used up what it had been promised beyond that.
        let settled = flow.window() == flow.grant();
        if !update_is_due || !keeps_up || !settled || wanted == 0 || !flow.tuning.prompt() {
            return;
        }
        let Some(line) = self.line_mut(line) else {
            return;
        };
        let extra = line.reserve_more(origin, wanted);
        self.circuits[index].flow_from(from).widen(extra);
    }

    /// The number of a user of the host with these groups, in any order. It is good for a call that is made before the next number is asked for,
    /// and for that call's circuit. There is none when the circuits that exist are of so many others that they can no longer be distinguished;
    /// then the call has to be refused.
    pub fn program(&mut self, uid: u32, gids: &[u32]) -> Option<ProgramId> {
        self.programs.number(uid, gids, &self.policy)
    }
}
