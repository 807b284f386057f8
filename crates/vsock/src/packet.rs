//! What guests send (virtio 1.2, section 5.10.6).

use policy::{LineId, Time};
use wire::vsock::{
    Header, Operation, SEQPACKET_END_OF_MESSAGE, SEQPACKET_END_OF_RECORD, SHUTDOWN_BOTH,
    SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SocketType,
};

use crate::call::Destination;
use crate::end::{End, EndKey, Party};
use crate::event::{Action, HostCall};
use crate::flow::Ending;
use crate::operator::Route;
use crate::switch::Actions;
use crate::{Reason, Side, Switch};

impl Switch {
    /// A packet from a guest: find its circuit, believe its numbers where they can be true, and act on its operation.
    pub(crate) fn packet(
        &mut self,
        now: Time,
        line_id: LineId,
        header: Header,
        actions: &mut Actions,
    ) {
        let Some(line) = self.line_mut(line_id) else {
            return;
        };
        if !line.up || line.hybrid {
            return;
        }
        line.counters.packets_from_guest += 1;
        // Payload has cost its sender credit. What came without, or could not be taken, has not.
        let took_payload = self.route(now, line_id, &header, actions);
        if let (false, Some(line)) = (took_payload, self.line_mut(line_id)) {
            line.charge(now);
        }
    }

    /// Finds a packet's receiver, and acts on it. Returns whether it has brought payload that was taken.
    fn route(
        &mut self,
        now: Time,
        line_id: LineId,
        header: &Header,
        actions: &mut Actions,
    ) -> bool {
        let Some(line) = self.line_mut(line_id) else {
            return false;
        };
        // The line is known by its socket; what the packet claims about its source must agree.
        if header.src_cid != u64::from(line.address.cid) {
            line.counters.spoofed += 1;
            return false;
        }
        let Ok(peer_cid) = u32::try_from(header.dst_cid) else {
            line.counters.malformed += 1;
            return false;
        };
        let operation = Operation::from_wire(header.operation);
        let Some(socket_type) = SocketType::from_wire(header.socket_type) else {
            line.counters.malformed += 1;
            self.answer_with_reset(line_id, header, actions);
            return false;
        };
        let key = EndKey {
            line: line_id,
            port: header.src_port,
            peer_cid,
            peer_port: header.dst_port,
        };
        if self.is_cutting() {
            self.cut_lost(now, &key, actions);
        }
        match (operation, self.by_end.get(&key).copied()) {
            (Some(Operation::Request), known) => {
                if let Some((index, side)) = known {
                    let index = index as usize;
                    if self.is_same_dial(index, side, socket_type) {
                        if self.announced(index, side, header, actions).is_err() {
                            self.kill(now, index, Reason::CreditViolation, actions);
                        }
                        return false;
                    }
                    // The guest's ports are in use for a circuit that it has already forgotten.
                    self.guest_gone(now, index, side, Reason::PeerReset, actions);
                }
                self.request(now, line_id, key, socket_type, header, actions);
                false
            }
            (_, Some((index, side))) => self.known(
                now,
                index as usize,
                side,
                operation,
                socket_type,
                header,
                actions,
            ),
            (Some(Operation::Reset), None) => false,
            (_, None) => {
                self.answer_with_reset(line_id, header, actions);
                false
            }
        }
    }

    /// A guest sent something that is not even a header.
    pub fn malformed(&mut self, now: Time, line: LineId) {
        if let Some(line) = self.line_mut(line) {
            line.counters.malformed += 1;
            line.charge(now);
        }
    }

    /// Until when this guest is not to be heard, if it has sent more packets without payload than it may. What it has sent
    /// stays in its ring. To be asked before a batch is taken from the ring: the debt is no larger than the batch.
    pub fn throttled_until(&mut self, now: Time, line: LineId) -> Option<Time> {
        let line = self.line_mut(line)?;
        let until = line.controls.as_ref()?.in_debt_until(now)?;
        if line.throttled_until < until {
            line.throttled_until = until;
            line.counters.throttles += 1;
        }
        Some(until)
    }

    /// Whether a request only repeats the dial that this circuit began with. Linux says so again when a signal interrupts
    /// `connect()` and the system call is begun anew; the first answer is as good for it as a second, and it may be on its way
    /// already. A guest that has sent more than its dial has had the answer, so that a request then is of another socket.
    pub(crate) fn is_same_dial(&self, index: usize, side: Side, socket_type: SocketType) -> bool {
        let circuit = &self.circuits[index];
        let end = circuit.end(side);
        side == Side::Caller
            && circuit.socket_type == socket_type
            && circuit.flows[side.index()].is_untouched()
            && end.heard == 0
            && !end.outbox.reset
    }

    /// A packet of a circuit that exists. Returns whether it has brought payload that was taken.
    #[allow(clippy::too_many_arguments)] // One packet, taken apart once.
    fn known(
        &mut self,
        now: Time,
        index: usize,
        side: Side,
        operation: Option<Operation>,
        socket_type: SocketType,
        header: &Header,
        actions: &mut Actions,
    ) -> bool {
        let same_type = socket_type == self.circuits[index].socket_type;
        if operation == Some(Operation::Reset) {
            if !same_type {
                // It answers an earlier packet of the other type, as Linux sees it too.
                return false;
            }
            let reason = if self.circuits[index].answered || side == Side::Caller {
                Reason::PeerReset
            } else {
                Reason::GuestRefused
            };
            self.guest_gone(now, index, side, reason, actions);
            return false;
        }
        if !same_type {
            self.kill(now, index, Reason::ProtocolViolation, actions);
            return false;
        }
        if self.announced(index, side, header, actions).is_err() {
            self.kill(now, index, Reason::CreditViolation, actions);
            return false;
        }
        let answered = self.circuits[index].answered;
        match operation {
            Some(Operation::Response) if !answered && side == Side::Callee => {
                self.answered(now, index, actions)
            }
            Some(Operation::Data) if answered => {
                return self.data(now, index, side, header, actions);
            }
            Some(Operation::Shutdown) if answered => {
                self.shutdown(now, index, side, header.flags, actions)
            }
            // A caller that gets credit before its answer gives up.
            Some(Operation::CreditUpdate | Operation::CreditRequest) if !answered => {}
            Some(Operation::CreditUpdate) => self.pass_credit(index, side, actions),
            Some(Operation::CreditRequest) => self.credit_wanted(index, side, actions),
            _ => self.kill(now, index, Reason::ProtocolViolation, actions),
        }
        false
    }

    /// Takes in the credit fields, which every packet carries.
    fn announced(
        &mut self,
        index: usize,
        side: Side,
        header: &Header,
        actions: &mut Actions,
    ) -> Result<(), ()> {
        let circuit = &mut self.circuits[index];
        let flow = circuit.flow_to(side);
        if !flow
            .announce(header.buf_alloc, header.fwd_cnt)
            .map_err(|_| ())?
        {
            return Ok(());
        }
        // What a caller offers is nothing to reserve for before the callee has taken the call.
        if circuit.answered {
            self.regrant(index, side.other());
        }
        // There may be room now for what waits, and the sender may want to know.
        let circuit = &mut self.circuits[index];
        let waits = circuit.flow_to(side).kept() > 0 || circuit.end(side.other()).readable;
        let sender_starves = circuit.answered && circuit.starves(side.other());
        if waits {
            self.enqueue(index, side, actions);
        }
        if sender_starves {
            self.queue_credit_update(index, side.other(), actions);
        }
        Ok(())
    }

    /// The receiver offers more than was reserved for what `from` sends: reserve more, within the limits.
    fn regrant(&mut self, index: usize, from: Side) {
        let Some(line) = self.circuits[index].end(from).line() else {
            return;
        };
        let limits = *self.limits(line);
        let origin = self.circuits[index].origin_at(from);
        let flow = self.circuits[index].flow_from(from);
        if flow.window() <= flow.grant() {
            return;
        }
        let (old, wanted) = (flow.grant(), flow.wanted_grant(&limits));
        if wanted <= old {
            return;
        }
        let Some(line) = self.line_mut(line) else {
            return;
        };
        let extra = line.reserve_more(origin, wanted - old);
        self.circuits[index].flow_from(from).set_grant(old + extra);
    }

    /// A guest dials.
    fn request(
        &mut self,
        now: Time,
        line_id: LineId,
        key: EndKey,
        socket_type: SocketType,
        header: &Header,
        actions: &mut Actions,
    ) {
        let Route {
            callee,
            caller_cid,
            call,
            ..
        } = match self.route_from_guest(now, line_id, &key, socket_type, actions) {
            Ok(route) => route,
            Err(refusal) => {
                let reason = refusal.reason;
                self.refused(line_id, &key, refusal, actions);
                return self.refuse_request(line_id, header, reason, actions);
            }
        };
        let Some(line) = self.line_mut(line_id) else {
            return;
        };
        // A reset that answers an earlier packet of these ports would end the new call.
        line.orphans.retain(|reset| {
            (reset.dst_port, reset.src_port, reset.src_cid)
                != (header.src_port, header.dst_port, header.dst_cid)
        });
        let party = Party::Guest {
            line: line_id,
            cid: line.address.cid,
        };
        let mut caller = End::new(party, key.port);
        caller.seen.0 = caller_cid;
        let index = self.open(now, socket_type, caller, callee, call);
        let circuit = &mut self.circuits[index];
        let _ = circuit.flow_to(Side::Caller).announce(header.buf_alloc, 0);
        self.ring_callee(index, line_id, key.port, actions);
    }

    /// Has the callee of a circuit hear of it that was set up for a VM's call.
    pub(crate) fn ring_callee(
        &mut self,
        index: usize,
        caller: LineId,
        source_port: u32,
        actions: &mut Actions,
    ) {
        let circuit = &mut self.circuits[index];
        let (id, call) = (circuit.id, circuit.call);
        let callee = circuit.end_mut(Side::Callee);
        let port = callee.port;
        match callee.party {
            Party::Hybrid { line, .. } => actions.push(Action::DialHybrid {
                circuit: id,
                line,
                port,
            }),
            Party::Host => actions.push(Action::DialHost(HostCall {
                circuit: id,
                line: caller,
                port,
                source_port,
                socket_type: circuit.socket_type,
                service: match call.reached {
                    Destination::Service(service) => Some(service),
                    _ => None,
                },
                rule: call.rule,
            })),
            Party::Guest { .. } | Party::Departed { .. } => {
                callee.outbox.request = true;
                self.enqueue(index, Side::Callee, actions);
            }
        }
    }

    fn refuse_request(
        &mut self,
        line_id: LineId,
        header: &Header,
        reason: Reason,
        actions: &mut Actions,
    ) {
        // The identifier was matched against the directory, so it fits, or it matched nothing.
        let ports = (header.src_port, header.dst_cid as u32, header.dst_port);
        self.count_refusal(line_id, ports, reason, actions);
        self.answer_with_reset(line_id, header, actions);
    }

    /// Counts why a VM's dial was refused, and says so to the log.
    pub(crate) fn count_refusal(
        &mut self,
        line_id: LineId,
        (source_port, destination_cid, destination_port): (u32, u32, u32),
        reason: Reason,
        actions: &mut Actions,
    ) {
        if let Some(line) = self.line_mut(line_id) {
            line.counters.ended[reason.index()] += 1;
        }
        actions.push(Action::Report {
            line: line_id,
            source_port,
            destination_cid,
            destination_port,
            reason,
        });
    }

    /// A reset for a packet that belongs to no circuit. It is a courtesy, so more than a limit are dropped.
    fn answer_with_reset(&mut self, line_id: LineId, header: &Header, actions: &mut Actions) {
        let Some(line) = self.line_mut(line_id) else {
            return;
        };
        if line.orphans.len() >= line.limits.orphan_resets {
            line.counters.resets_dropped += 1;
            return;
        }
        line.orphans.push_back(Header {
            src_cid: header.dst_cid,
            dst_cid: header.src_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            socket_type: header.socket_type,
            operation: Operation::Reset as u16,
            ..Header::default()
        });
        actions.push(Action::Wake { line: line_id });
    }

    /// The guest that was called has accepted.
    fn answered(&mut self, now: Time, index: usize, actions: &mut Actions) {
        self.decided(now, index, Ok(()), actions);
        self.close_handshake(index);
        for side in [Side::Caller, Side::Callee] {
            self.regrant(index, side);
        }
        // The caller's answer says how much it may send; the callee was called with less.
        if self.circuits[index].starves(Side::Callee) {
            self.queue_credit_update(index, Side::Callee, actions);
        }
        let circuit = &mut self.circuits[index];
        let port = circuit.end(Side::Caller).port;
        match circuit.end(Side::Caller).party {
            Party::Host | Party::Hybrid { .. } => actions.push(Action::HostAccepted {
                circuit: circuit.id,
                port,
            }),
            Party::Guest { .. } => {
                circuit.end_mut(Side::Caller).outbox.response = true;
                self.enqueue(index, Side::Caller, actions);
            }
            Party::Departed { .. } => {}
        }
    }

    /// Payload. Returns whether there was some, and credit for it.
    fn data(
        &mut self,
        now: Time,
        index: usize,
        side: Side,
        header: &Header,
        actions: &mut Actions,
    ) -> bool {
        let circuit = &mut self.circuits[index];
        let id = circuit.id;
        let to_host = circuit.end(side.other()).is_host();
        let line = circuit.end(side).line();
        let known_flags = match circuit.socket_type {
            SocketType::SeqPacket => SEQPACKET_END_OF_MESSAGE | SEQPACKET_END_OF_RECORD,
            SocketType::Stream => 0,
        };
        let message = circuit.socket_type == SocketType::SeqPacket;
        let flow = circuit.flow_from(side);
        // An empty message looks like an end of data to its reader, and Linux sends none.
        let empty_message = header.len == 0 && message;
        if flow.end != Ending::Open || header.flags & !known_flags != 0 || empty_message {
            self.kill(now, index, Reason::ProtocolViolation, actions);
            return false;
        }
        if header.len == 0 {
            // It would be kept without ever counting against the credit.
            return false;
        }
        if flow.receive(header.len).is_err() {
            self.kill(now, index, Reason::CreditViolation, actions);
            return false;
        }
        if flow.refused {
            // The sender was notified, and sent before that arrived.
            flow.discard();
            flow.acknowledge_all();
            return true;
        }
        if header.flags & SEQPACKET_END_OF_MESSAGE != 0 {
            flow.end_message();
        }
        let rule = circuit.call.rule;
        if let Some(used) = self.used(rule) {
            used.charge(now, header.len);
        }
        let circuit = &self.circuits[index];
        // Room that was not announced to the source while it had plenty may be all that is left to it now.
        let source_starves = circuit.starves(side);
        if let Some(line) = line.and_then(|line| self.line_mut(line)) {
            line.counters.bytes_from_guest += u64::from(header.len);
        }
        actions.push(Action::Forward {
            circuit: id,
            from: side,
        });
        if !to_host {
            self.enqueue(index, side.other(), actions);
        }
        if source_starves {
            self.queue_credit_update(index, side, actions);
        }
        true
    }

    fn shutdown(&mut self, now: Time, index: usize, side: Side, flags: u32, actions: &mut Actions) {
        let circuit = &mut self.circuits[index];
        circuit.end_mut(side).heard |= flags & SHUTDOWN_BOTH;
        if flags & SHUTDOWN_SEND != 0 && circuit.flow_from(side).end == Ending::Open {
            circuit.flow_from(side).end = Ending::Finishing;
        }
        if flags & SHUTDOWN_RECEIVE != 0 {
            // What is kept for it stays: the guest may have shut down before it read.
            if circuit.end(side).heard == SHUTDOWN_BOTH || circuit.flow_to(side).kept() == 0 {
                self.refuse(index, side, actions);
            }
        }
        self.settle(now, index, actions);
    }

    /// The receiver at `side` announced room and nothing else. Linux does so whenever it has read everything, which
    /// the sender need not know each time: it is notified when it has asked, or is about to run out.
    fn pass_credit(&mut self, index: usize, side: Side, actions: &mut Actions) {
        let circuit = &mut self.circuits[index];
        let asked = std::mem::take(&mut circuit.end_mut(side.other()).wants_credit);
        if asked && circuit.flow_to(side).has_news() {
            self.queue_credit_update(index, side.other(), actions);
        }
    }

    fn credit_wanted(&mut self, index: usize, side: Side, actions: &mut Actions) {
        let other = side.other();
        if self.circuits[index].end(other).line().is_some() && !self.circuits[index].end(other).gone
        {
            // Only the receiver knows; its answer is passed on.
            self.circuits[index].end_mut(side).wants_credit = true;
            self.circuits[index].end_mut(other).outbox.credit_request = true;
            self.enqueue(index, other, actions);
        }
        self.queue_credit_update(index, side, actions);
    }

    pub(crate) fn queue_credit_update(&mut self, index: usize, side: Side, actions: &mut Actions) {
        let end = self.circuits[index].end_mut(side);
        if !end.gone && !end.is_host() {
            end.outbox.credit_update = true;
            self.enqueue(index, side, actions);
        }
    }
}
