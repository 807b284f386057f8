//! What to send to a guest next: one round a line, in which every circuit with something to send has its turn.

use policy::{LineId, Time};
use wire::vsock::{Header, Operation, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SocketType};

use crate::circuit::{Deadline, DeadlineKind};
use crate::event::{Action, Sent, Transmit};
use crate::switch::Actions;
use crate::{Reason, Side, Switch};

/// After this many unanswered questions, a silent receiver is asked no more often than every 2^7 poll intervals.
const MAX_POLL_BACKOFF: u32 = 7;

impl Switch {
    /// What to send to this line now, if anything. The caller has room for at least one packet.
    pub fn next_for(
        &mut self,
        now: Time,
        line_id: LineId,
        actions: &mut Vec<Action>,
    ) -> Option<Transmit> {
        let line = self.line_mut(line_id)?;
        if let Some(reset) = line.orphans.pop_front() {
            line.counters.packets_to_guest += 1;
            return Some(Transmit::Control(reset));
        }
        loop {
            let line = self.line_mut(line_id)?;
            let waiting = *line.round.front()?;
            let index = self.find(waiting.circuit);
            let found = index.and_then(|index| {
                self.next_control(now, index, waiting.side, actions)
                    .or_else(|| self.next_data(now, index, waiting.side))
            });
            let line = self.line_mut(line_id)?;
            match found {
                Some(Transmit::Control(header)) => {
                    line.counters.packets_to_guest += 1;
                    if header.operation == Operation::Request as u16 {
                        line.prepay();
                    }
                    return Some(Transmit::Control(header));
                }
                Some(data @ Transmit::Data { .. }) => {
                    // Its turn is used; the next circuit's comes before its next.
                    line.round.rotate_left(1);
                    return Some(data);
                }
                None => {
                    line.round.pop_front();
                    let end = index
                        .and_then(|index| self.circuits.get_mut(index))
                        .map(|circuit| circuit.end_mut(waiting.side))
                        .filter(|end| !end.gone);
                    match end {
                        Some(end) => end.queued = false,
                        None => {
                            let line = self.line_mut(line_id)?;
                            line.stale = line.stale.saturating_sub(1);
                        }
                    }
                }
            }
        }
    }

    /// Whether there may be something to send to this line.
    pub fn has_work(&self, line: LineId) -> bool {
        self.lines
            .get(line.0 as usize)
            .is_some_and(|line| !line.orphans.is_empty() || !line.round.is_empty())
    }

    /// Data that [`Transmit::Data`] asked for has been put into the guest's ring.
    pub fn transmitted(&mut self, now: Time, sent: Sent, actions: &mut Vec<Action>) {
        let Sent {
            circuit: id,
            from,
            len,
            straight,
            packets,
        } = sent;
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        let flow = circuit.flow_from(from);
        flow.pass(straight);
        if straight > len || !flow.deliver(len - straight) {
            return self.kill(now, index, Reason::HostFailed, actions);
        }
        flow.count_packets(packets);
        circuit.passed[from.index()] += u64::from(len);
        if circuit.end(from).is_host() {
            let rule = circuit.call.rule;
            if let Some(used) = self.used(rule) {
                used.charge(now, len);
            }
        }
        let circuit = &self.circuits[index];
        let (source, line) = (circuit.end(from), circuit.end(from.other()).line());
        // What a guest sends by rings has been counted when it came.
        let source = source.owner().filter(|_| source.is_host());
        if let Some(line) = source.and_then(|line| self.line_mut(line)) {
            line.counters.bytes_from_guest += u64::from(len);
        }
        if let Some(line) = line.and_then(|line| self.line_mut(line)) {
            line.counters.packets_to_guest += u64::from(packets);
            line.counters.bytes_to_guest += u64::from(len);
        }
        self.settle(now, index, actions);
    }

    /// A header to the guest at `side`, with the numbers of this moment, which thereby have been shown.
    fn header_to(&mut self, index: usize, side: Side, operation: Operation, flags: u32) -> Header {
        let circuit = &mut self.circuits[index];
        let (buf_alloc, fwd_cnt) = circuit.flow_from(side).show();
        let end = circuit.end(side);
        let peer = circuit.end(side.other());
        Header {
            src_cid: u64::from(peer.seen.0),
            dst_cid: u64::from(end.cid()),
            src_port: peer.seen.1,
            dst_port: end.port,
            len: 0,
            socket_type: circuit.socket_type as u16,
            operation: operation as u16,
            flags,
            buf_alloc,
            fwd_cnt,
        }
    }

    /// The next packet without payload for the guest at `side`.
    fn next_control(
        &mut self,
        now: Time,
        index: usize,
        side: Side,
        actions: &mut Actions,
    ) -> Option<Transmit> {
        let circuit = &mut self.circuits[index];
        let nothing_waits = circuit.flow_to(side).kept() == 0;
        let end = circuit.end_mut(side);
        if end.gone {
            return None;
        }
        let outbox = &mut end.outbox;
        let (operation, flags) = if std::mem::take(&mut outbox.request) {
            (Operation::Request, 0)
        } else if std::mem::take(&mut outbox.response) {
            (Operation::Response, 0)
        } else if outbox.reset {
            let header = self.header_to(index, side, Operation::Reset, 0);
            self.detach(index, side);
            self.settle_after_reset(now, index, actions);
            return Some(Transmit::Control(header));
        } else if std::mem::take(&mut outbox.credit_request) {
            (Operation::CreditRequest, 0)
        } else if std::mem::take(&mut outbox.credit_update) {
            (Operation::CreditUpdate, 0)
        } else if outbox.shutdown & !end.announced != 0 {
            // That no more is received may be said at once; that no more is sent, only behind the last byte.
            let sayable = if nothing_waits {
                outbox.shutdown
            } else {
                outbox.shutdown & !SHUTDOWN_SEND
            };
            let flags = sayable & !end.announced;
            if flags == 0 {
                return None;
            }
            end.announced |= flags;
            outbox.shutdown &= !flags;
            self.linger(now, index, side);
            (
                Operation::Shutdown,
                flags & (SHUTDOWN_RECEIVE | SHUTDOWN_SEND),
            )
        } else {
            return None;
        };
        Some(Transmit::Control(
            self.header_to(index, side, operation, flags),
        ))
    }

    fn settle_after_reset(&mut self, now: Time, index: usize, actions: &mut Actions) {
        let circuit = &self.circuits[index];
        if circuit.ends.iter().all(|end| end.gone) {
            self.release_if_over(index, actions);
        } else {
            self.settle(now, index, actions);
        }
    }

    /// A turn of data for the guest at `side`.
    fn next_data(&mut self, now: Time, index: usize, side: Side) -> Option<Transmit> {
        let limits = self.limits_at(index, side);
        let (quantum, credit_poll) = (limits.quantum_bytes, limits.credit_poll);
        let circuit = self.circuits.get_mut(index)?;
        let id = circuit.id;
        let from = side.other();
        if !circuit.answered || circuit.end(side).gone {
            return None;
        }
        let readable = circuit.end(from).readable;
        let flow = circuit.flow_from(from);
        if (flow.kept() == 0 && !readable) || flow.refused || self.is_throttled(now, index) {
            return None;
        }
        let circuit = &mut self.circuits[index];
        let message = circuit.socket_type == SocketType::SeqPacket;
        let from_guest = !circuit.end(from).is_host();
        let flow = circuit.flow_from(from);
        let sendable = match (message, from_guest) {
            (true, true) => flow.sendable_messages(),
            (true, false) if flow.lacks_room_for_message() => 0,
            _ => u32::MAX,
        };
        let budget = flow.credit().min(quantum).min(sendable);
        let packets = flow.packet_credit();
        if budget > 0 && packets > 0 {
            let header = self.header_to(index, side, Operation::Data, 0);
            return Some(Transmit::Data {
                circuit: id,
                from,
                budget,
                packets,
                header,
            });
        }
        if budget > 0 && flow.asked == 0 {
            // The receiver has room for bytes but perhaps not for packets, and has no reason of its own to say
            // what it has consumed: ask.
            flow.asked = 1;
            self.poll_credit_by(index, now + credit_poll);
            return Some(Transmit::Control(self.header_to(
                index,
                side,
                Operation::CreditRequest,
                0,
            )));
        }
        None
    }

    /// The receivers of a circuit are asked again no later than this.
    fn poll_credit_by(&mut self, index: usize, at: Time) {
        let sooner = match self.circuits[index].deadline {
            None => true,
            Some(deadline) => deadline.kind == DeadlineKind::CreditPoll && at < deadline.at,
        };
        if sooner {
            let kind = DeadlineKind::CreditPoll;
            self.set_deadline(index, Some(Deadline { at, kind }));
        }
    }

    /// Asks again the receivers that have not answered, less and less often; or lets them have a few packets more.
    pub(crate) fn poll_credit(&mut self, now: Time, index: usize, actions: &mut Actions) {
        for side in [Side::Caller, Side::Callee] {
            let credit_poll = self.limits_at(index, side).credit_poll;
            let circuit = &mut self.circuits[index];
            let readable = circuit.end(side.other()).readable;
            let flow = circuit.flow_to(side);
            let waits = (flow.kept() > 0 || readable) && !flow.refused;
            if !waits || flow.asked == 0 {
                continue;
            }
            flow.asked += 1;
            let wait = credit_poll * (1 << (flow.asked - 1).min(MAX_POLL_BACKOFF));
            let end = circuit.end_mut(side);
            if end.gone || end.is_host() {
                continue;
            }
            end.outbox.credit_request = true;
            self.enqueue(index, side, actions);
            self.poll_credit_by(index, now + wait);
        }
    }
}
