//! The switch itself: its tables, and the life of a circuit from set-up to release.

use std::collections::{BTreeSet, HashMap};

use slab::Slab;
use wire::vsock::{
    CID_ANY, MIN_GUEST_CID, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SocketType,
};

use crate::circuit::{Circuit, Deadline, DeadlineKind};
use crate::end::{End, Party};
use crate::event::{Action, Direction, Event, Time};
use crate::flow::{Ending, Flow};
use crate::line::{Line, Waiting};
use crate::{
    AddLineError, CircuitId, CircuitReport, EndReport, Limits, LineId, LineReport, Policy, Reason,
    Side,
};

/// Actions in the order in which they are to be carried out.
pub(crate) type Actions = Vec<Action>;

/// By what a guest's packet is matched to its circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct EndKey {
    pub(crate) line: LineId,
    pub(crate) port: u32,
    pub(crate) peer_cid: u32,
    pub(crate) peer_port: u32,
}

/// The operator: the directory of lines, the policy, and the state of every circuit.
#[derive(Debug)]
pub struct Switch {
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
    pub(crate) lines: Slab<Line>,
    pub(crate) circuits: Slab<Circuit>,
    pub(crate) by_end: HashMap<EndKey, (u32, Side)>,
    by_cid: HashMap<u32, LineId>,
    deadlines: BTreeSet<(Time, CircuitId)>,
    next_generation: u32,
}

impl Switch {
    /// A switch without lines and with a policy that denies every call between VMs.
    pub fn new(limits: Limits) -> Switch {
        Switch {
            limits,
            policy: Policy::default(),
            lines: Slab::new(),
            circuits: Slab::new(),
            by_end: HashMap::new(),
            by_cid: HashMap::new(),
            deadlines: BTreeSet::new(),
            next_generation: 0,
        }
    }

    /// Puts another policy in force, for circuits yet to be set up.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Adds a line for the VM of this name and context identifier.
    ///
    /// # Errors
    /// When the identifier is reserved, or it or the name is taken.
    pub fn add_line(&mut self, name: &str, cid: u32) -> Result<LineId, AddLineError> {
        if !(MIN_GUEST_CID..CID_ANY).contains(&cid) {
            return Err(AddLineError::ReservedCid(cid));
        }
        if let Some(owner) = self.by_cid.get(&cid) {
            return Err(AddLineError::CidTaken {
                cid,
                name: self.lines[owner.0 as usize].name.clone(),
            });
        }
        if self.lines.iter().any(|(_, line)| line.name == name) {
            return Err(AddLineError::NameTaken(name.to_owned()));
        }
        let id = LineId(self.lines.insert(Line::new(name.to_owned(), cid)) as u32);
        self.by_cid.insert(cid, id);
        Ok(id)
    }

    /// Removes a line. Its circuits are cut short.
    pub fn remove_line(&mut self, now: Time, id: LineId, actions: &mut Actions) {
        self.line_down(now, id, Reason::Operator, actions);
        // Ends that still drain elsewhere keep only the identifier, never the number of the line.
        for (_, circuit) in &mut self.circuits {
            for end in &mut circuit.ends {
                if end.line() == Some(id) {
                    end.party = Party::Departed { cid: end.cid() };
                }
            }
        }
        let line = self.lines.remove(id.0 as usize);
        self.by_cid.remove(&line.cid);
    }

    /// The next moment at which [`Event::Tick`] is wanted.
    pub fn poll_at(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Takes note of an event. What is to be done is appended to `actions`.
    pub fn handle(&mut self, now: Time, event: Event, actions: &mut Actions) {
        match event {
            Event::LineUp { line, seqpacket } => self.line_up(now, line, seqpacket, actions),
            Event::LineDown { line } => self.line_down(now, line, Reason::LineDown, actions),
            Event::Packet { line, header } => self.packet(now, line, header, actions),
            Event::HostDial {
                line,
                port,
                socket_type,
                token,
            } => {
                self.host_dial(now, line, port, socket_type, token, actions);
            }
            Event::HostDialed { circuit, result } => {
                self.host_dialed(now, circuit, result, actions)
            }
            Event::HostReadable { circuit } => self.host_readable(circuit, true, actions),
            Event::HostDrained { circuit } => self.host_readable(circuit, false, actions),
            Event::HostStored { circuit, len } => self.host_stored(circuit, len, actions),
            Event::HostFinished { circuit } => self.host_finished(now, circuit, actions),
            Event::HostRefused { circuit } => self.host_refused(now, circuit, actions),
            Event::HostGone { circuit } => self.host_gone(now, circuit, actions),
            Event::Delivered { circuit, len } => self.delivered(now, circuit, len, actions),
            Event::Kill { circuit, reason } => {
                if let Some(index) = self.find(circuit) {
                    self.kill(now, index, reason, actions);
                }
            }
            Event::Tick => self.tick(now, actions),
        }
    }

    /// Every line, in no particular order.
    pub fn lines(&self) -> impl Iterator<Item = LineReport> + '_ {
        self.lines.iter().map(|(index, line)| LineReport {
            id: LineId(index as u32),
            name: line.name.clone(),
            cid: line.cid,
            up: line.up,
            circuits: line.circuits,
            granted_bytes: line.granted_bytes,
            counters: line.counters,
        })
    }

    /// Every circuit, in no particular order.
    pub fn circuits(&self) -> impl Iterator<Item = CircuitReport> + '_ {
        self.circuits.iter().map(|(_, circuit)| {
            let report = |side: Side| {
                let end = circuit.end(side);
                EndReport {
                    line: end.line(),
                    cid: end.cid(),
                    port: end.port,
                    kept_bytes: circuit.flows[side.index()].kept(),
                    credit_bytes: circuit.flows[side.other().index()].credit(),
                }
            };
            CircuitReport {
                id: circuit.id,
                socket_type: circuit.socket_type,
                state: circuit.state(),
                opened_at: circuit.opened_at,
                caller: report(Side::Caller),
                callee: report(Side::Callee),
            }
        })
    }

    /// The line of the VM with this context identifier.
    pub fn line_by_cid(&self, cid: u32) -> Option<LineId> {
        self.by_cid.get(&cid).copied()
    }

    /// The side of a circuit where a program of the host is, if there is one.
    pub fn host_side(&self, circuit: CircuitId) -> Option<Side> {
        self.circuits[self.find(circuit)?].host_side()
    }

    /// The whole buffer of the end at `side`, in bytes: no larger message will ever fit.
    pub fn window_towards(&self, circuit: CircuitId, side: Side) -> usize {
        let flow = |index: usize| &self.circuits[index].flows[side.other().index()];
        self.find(circuit)
            .map_or(0, |index| flow(index).window() as usize)
    }

    // ---- Tables ----

    /// The position of a circuit, if that use of it still lives.
    pub(crate) fn find(&self, id: CircuitId) -> Option<usize> {
        let index = id.index as usize;
        let circuit = self.circuits.get(index)?;
        (circuit.id == id).then_some(index)
    }

    pub(crate) fn line_mut(&mut self, id: LineId) -> Option<&mut Line> {
        self.lines.get_mut(id.0 as usize)
    }

    fn key(circuit: &Circuit, side: Side) -> Option<EndKey> {
        let end = circuit.end(side);
        let peer = circuit.end(side.other());
        Some(EndKey {
            line: end.line()?,
            port: end.port,
            peer_cid: peer.cid(),
            peer_port: peer.port,
        })
    }

    /// Sets a circuit up, in the state of dialling. The limits have been checked.
    pub(crate) fn open(
        &mut self,
        now: Time,
        socket_type: SocketType,
        caller: End,
        callee: End,
    ) -> usize {
        let entry = self.circuits.vacant_entry();
        let index = entry.key();
        let id = CircuitId {
            index: index as u32,
            generation: self.next_generation,
        };
        self.next_generation = self.next_generation.wrapping_add(1);
        let mut flow_of = |end: &End| {
            // A host program gets no credit: it is read only when there is room, so nothing needs to be reserved.
            let grant = match end
                .line()
                .and_then(|line| self.lines.get_mut(line.0 as usize))
            {
                Some(line) => line.reserve(self.limits.grant_bytes, &self.limits),
                None => self.limits.grant_bytes,
            };
            Flow::new(0, grant)
        };
        let mut flows = [flow_of(&caller), flow_of(&callee)];
        for (flow, destination) in flows.iter_mut().zip([&callee, &caller]) {
            if destination.is_host() {
                let grant = flow.grant();
                let _ = flow.announce(grant, 0);
            }
        }
        let circuit = Circuit {
            id,
            socket_type,
            answered: false,
            ends: [caller, callee],
            flows,
            deadline: None,
            opened_at: now,
            reason: None,
        };
        for side in [Side::Caller, Side::Callee] {
            if let Some(key) = Self::key(&circuit, side) {
                self.by_end.insert(key, (index as u32, side));
                if let Some(line) = self.lines.get_mut(key.line.0 as usize) {
                    line.circuits += 1;
                    line.half_open += 1;
                    line.counters.circuits_opened += 1;
                }
            }
        }
        entry.insert(circuit);
        let deadline = now + self.limits.handshake;
        self.set_deadline(
            index,
            Some(Deadline {
                at: deadline,
                kind: DeadlineKind::Handshake,
            }),
        );
        index
    }

    /// The circuit has been answered, one way or the other.
    pub(crate) fn close_handshake(&mut self, index: usize) {
        if self.circuits[index].answered {
            return;
        }
        self.circuits[index].answered = true;
        self.set_deadline(index, None);
        for side in [Side::Caller, Side::Callee] {
            if let Some(line) = self.circuits[index].end(side).line()
                && let Some(line) = self.line_mut(line)
            {
                line.half_open = line.half_open.saturating_sub(1);
            }
        }
    }

    /// The end at `side` is out of the circuit: its packets no longer belong to it, so that its ports may be used anew.
    pub(crate) fn detach(&mut self, index: usize, side: Side) {
        let circuit = &mut self.circuits[index];
        if circuit.end(side).gone {
            return;
        }
        let key = Self::key(circuit, side);
        let end = circuit.end_mut(side);
        end.gone = true;
        end.outbox = Default::default();
        if let Some(key) = key
            && self.by_end.get(&key) == Some(&(index as u32, side))
        {
            self.by_end.remove(&key);
        }
    }

    pub(crate) fn set_deadline(&mut self, index: usize, deadline: Option<Deadline>) {
        let circuit = &mut self.circuits[index];
        if let Some(old) = circuit.deadline {
            self.deadlines.remove(&(old.at, circuit.id));
        }
        circuit.deadline = deadline;
        if let Some(new) = deadline {
            self.deadlines.insert((new.at, circuit.id));
        }
    }

    /// Puts an end into its line's round, unless it is there.
    pub(crate) fn enqueue(&mut self, index: usize, side: Side, actions: &mut Actions) {
        let circuit = &mut self.circuits[index];
        let id = circuit.id;
        let end = circuit.end_mut(side);
        if end.gone || end.queued {
            return;
        }
        let Some(line_id) = end.line() else { return };
        end.queued = true;
        if let Some(line) = self.line_mut(line_id) {
            line.round.push_back(Waiting { circuit: id, side });
            actions.push(Action::Wake { line: line_id });
        }
    }

    // ---- Lines ----

    fn line_up(&mut self, now: Time, id: LineId, seqpacket: bool, actions: &mut Actions) {
        self.line_down(now, id, Reason::LineDown, actions);
        if let Some(line) = self.line_mut(id) {
            line.up = true;
            line.seqpacket = seqpacket;
        }
    }

    fn line_down(&mut self, now: Time, id: LineId, reason: Reason, actions: &mut Actions) {
        let Some(line) = self.line_mut(id) else {
            return;
        };
        line.up = false;
        line.orphans.clear();
        let touched: Vec<(usize, Side)> = self
            .circuits
            .iter()
            .flat_map(|(index, circuit)| {
                [Side::Caller, Side::Callee]
                    .into_iter()
                    .filter(move |side| {
                        circuit.end(*side).line() == Some(id) && !circuit.end(*side).gone
                    })
                    .map(move |side| (index, side))
            })
            .collect();
        for (index, side) in touched {
            if self.circuits.contains(index) {
                self.guest_lost(now, index, side, reason, actions);
            }
        }
        if let Some(line) = self.line_mut(id) {
            line.round.clear();
        }
    }

    /// The guest at `side` is gone with its line. What it has finished sending is still delivered; what it has not is
    /// cut off at once.
    fn guest_lost(
        &mut self,
        now: Time,
        index: usize,
        side: Side,
        reason: Reason,
        actions: &mut Actions,
    ) {
        let flow = self.circuits[index].flow_from(side);
        if flow.end == Ending::Open && flow.kept() > 0 {
            flow.discard();
            let circuit = self.circuits[index].id;
            actions.push(Action::Discard {
                circuit,
                from: side,
            });
        }
        self.guest_gone(now, index, side, reason, actions);
    }

    // ---- The end of circuits ----

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
            self.fail_dial(now, index, side, reason, actions);
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
        let circuit = &mut self.circuits[index];
        let id = circuit.id;
        let flow = circuit.flow_to(side);
        flow.refused = true;
        if flow.kept() > 0 {
            flow.discard();
            actions.push(Action::Discard {
                circuit: id,
                from: side.other(),
            });
        }
    }

    /// Ends a circuit at once, on both sides.
    pub(crate) fn kill(&mut self, now: Time, index: usize, reason: Reason, actions: &mut Actions) {
        if !self.circuits[index].answered {
            self.fail_dial(now, index, Side::Callee, reason, actions);
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

    /// A circuit that was never answered ends: `failed` is the side that failed it.
    pub(crate) fn fail_dial(
        &mut self,
        now: Time,
        index: usize,
        failed: Side,
        reason: Reason,
        actions: &mut Actions,
    ) {
        self.note(index, Side::Caller, reason, actions);
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
                Party::Host => {
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
                // A guest that has not been told of the call need not be told of its end.
                Party::Guest { .. } if side == Side::Callee && end.outbox.request => {
                    self.detach(index, side)
                }
                Party::Guest { .. }
                    if side == failed
                        && reason != Reason::TimedOut
                        && reason != Reason::HostFailed =>
                {
                    self.detach(index, side);
                }
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
        let caller = circuit.end(Side::Caller);
        let callee = circuit.end(Side::Callee);
        let Some(line) = circuit
            .end(blamed)
            .line()
            .or(caller.line())
            .or(callee.line())
        else {
            return;
        };
        actions.push(Action::Report {
            line,
            source_port: caller.port,
            destination_cid: callee.cid(),
            destination_port: callee.port,
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
            self.settle_flow(index, from, actions);
        }
        for side in [Side::Caller, Side::Callee] {
            self.settle_end(now, index, side, actions);
        }
        let circuit = &self.circuits[index];
        if circuit.ends.iter().all(|end| end.gone) {
            self.release(index, actions);
        }
    }

    /// Passes on the end of what `from` sends, and the refusal of the other side to receive more.
    fn settle_flow(&mut self, index: usize, from: Side, actions: &mut Actions) {
        let circuit = &mut self.circuits[index];
        let id = circuit.id;
        let to = from.other();
        let flow = &mut circuit.flows[from.index()];
        let ending = flow.end;
        let passes_end = flow.kept() == 0 && matches!(ending, Ending::Finishing | Ending::Aborting);
        if passes_end {
            flow.end = Ending::Done;
        }
        let passes_refusal = flow.refused && !flow.refusal_passed;
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
            Party::Host if both_over => {
                end.gone = true;
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
                    end.outbox.shutdown |= SHUTDOWN_BOTH & !end.told;
                    let at = now + self.limits.linger;
                    if circuit
                        .deadline
                        .is_none_or(|deadline| deadline.kind != DeadlineKind::Linger)
                    {
                        self.set_deadline(
                            index,
                            Some(Deadline {
                                at,
                                kind: DeadlineKind::Linger,
                            }),
                        );
                    }
                    self.enqueue(index, side, actions);
                }
            }
            _ => {}
        }
    }

    /// Forgets a circuit that is over on both ends.
    pub(crate) fn release(&mut self, index: usize, actions: &mut Actions) {
        self.close_handshake(index);
        self.set_deadline(index, None);
        let circuit = self.circuits.remove(index);
        for side in [Side::Caller, Side::Callee] {
            let grant = circuit.flows[side.index()].grant();
            if let Some(line) = circuit
                .end(side)
                .line()
                .and_then(|line| self.line_mut(line))
            {
                line.circuits = line.circuits.saturating_sub(1);
                line.release(grant);
            }
        }
        actions.push(Action::Released {
            circuit: circuit.id,
        });
    }

    // ---- Timers ----

    fn tick(&mut self, now: Time, actions: &mut Actions) {
        while let Some((at, id)) = self.deadlines.first().copied() {
            if at > now {
                break;
            }
            self.deadlines.pop_first();
            let Some(index) = self.find(id) else { continue };
            let Some(deadline) = self.circuits[index].deadline.take() else {
                continue;
            };
            match deadline.kind {
                DeadlineKind::Handshake => {
                    let callee_is_host = self.circuits[index].end(Side::Callee).is_host();
                    let reason = if callee_is_host {
                        Reason::BacklogFull
                    } else {
                        Reason::TimedOut
                    };
                    self.fail_dial(now, index, Side::Callee, reason, actions);
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
                DeadlineKind::CreditPoll { asked } => {
                    self.poll_credit(now, index, asked, actions);
                }
            }
        }
    }
}
