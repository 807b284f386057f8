//! The switch itself: its tables, its lines, and the set-up of circuits.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use policy::{Address, DEFAULT_DOMAIN, Directory, LineId, Policy, RuleSet, RuleUse, Taken, Time};
use slab::Slab;
use wire::vsock::{CID_ANY, MIN_GUEST_CID, SocketType};

use crate::call::Call;
use crate::circuit::{Circuit, Deadline, DeadlineKind, EndedCircuit, Throttle};
use crate::circuits::Circuits;
use crate::end::{End, EndKey};
use crate::event::{Action, Event};
use crate::figures::RuleFigures;
use crate::flow::{Ending, Flow};
use crate::line::{Line, Waiting};
use crate::programs::Programs;
use crate::share::Origin;
use crate::{AddLineError, CircuitId, CircuitReport, Limits, LineReport, Reason, Side};

/// So many stale entries a line's round may hold before their share is checked.
const MAX_STALE: usize = 32;

/// Circuits that are cut at once: to cut one means to close a socket and notify a guest, some ten microseconds altogether.
pub(crate) const CUTS_AT_ONCE: usize = 64;

/// Actions in the order in which they are to be carried out.
pub(crate) type Actions = Vec<Action>;

/// Circuits that are to be cut.
#[derive(Debug)]
pub(crate) struct Cut {
    /// Each with the side that is lost; without one, it ends on both.
    pub(crate) circuits: std::vec::IntoIter<(CircuitId, Option<Side>)>,
    pub(crate) reason: Reason,
    /// The line that is removed when they are all cut.
    pub(crate) removed: Option<LineId>,
}

/// The operator: the directory of lines, the policy, and the state of every circuit.
#[derive(Debug)]
pub struct Switch {
    /// Of lines that are added without limits of their own.
    limits: Limits,
    pub(crate) policy: Arc<Policy>,
    pub(crate) lines: Slab<Line>,
    pub(crate) circuits: Circuits,
    pub(crate) by_end: HashMap<EndKey, (u32, Side)>,
    pub(crate) directory: Directory,
    /// By the position of the rule.
    pub(crate) rules: Vec<RuleUse>,
    pub(crate) figures: RuleFigures,
    /// The rules that can match when a guest calls a socket that was made for it.
    pub(crate) listener_callees: RuleSet,
    /// The rules that can match for calls at a published port.
    pub(crate) published_callers: RuleSet,
    pub(crate) programs: Programs,
    /// Circuits that are throttled until then, as more has passed than their rule lets pass.
    pub(crate) throttled: BTreeSet<(Throttle, CircuitId)>,
    pub(crate) next_throttle: u64,
    pub(crate) deadlines: BTreeSet<(Time, CircuitId)>,
    pub(crate) next_generation: u32,
    /// Circuits that are to be cut, in the order of what cuts them.
    pub(crate) cuts: VecDeque<Cut>,
    pub(crate) cuts_at_once: usize,
    /// What is known of circuits that are over, in order, if they are kept. Each is asked for before the next event is handled
    /// but for those that its carrying out makes, so there are at most as many as circuits.
    pub(crate) ended: Option<VecDeque<EndedCircuit>>,
}

impl Switch {
    /// A switch without lines and with a policy that denies every call between VMs. `limits` are those of each line that
    /// is added without its own.
    pub fn new(limits: Limits) -> Switch {
        Switch {
            limits,
            policy: Arc::default(),
            lines: Slab::new(),
            circuits: Circuits::default(),
            by_end: HashMap::new(),
            directory: Directory::default(),
            rules: Vec::new(),
            figures: RuleFigures::default(),
            listener_callees: RuleSet::default(),
            published_callers: RuleSet::default(),
            programs: Programs::default(),
            throttled: BTreeSet::new(),
            next_throttle: 0,
            deadlines: BTreeSet::new(),
            next_generation: 0,
            cuts: VecDeque::new(),
            cuts_at_once: CUTS_AT_ONCE,
            ended: None,
        }
    }

    /// Keeps what is known of circuits that end until [`Switch::take_ended`] asks for it. While this is off no one need ask.
    pub fn keep_ended(&mut self) {
        self.ended.get_or_insert_default();
    }

    /// What was known of a circuit, to be asked once for each [`Action::Released`]: it is not in the action, since that would make all actions
    /// large.
    pub fn take_ended(&mut self, id: CircuitId) -> Option<EndedCircuit> {
        let ended = self.ended.as_mut()?;
        // Those before it are not asked for any more: circuits are released in order.
        let index = ended.iter().position(|ended| ended.circuit.id == id)?;
        ended.drain(..=index).next_back()
    }

    /// Adds a line for a VM of the default domain, with the limits of every line that has none of its own.
    pub fn add_line(&mut self, name: &str, cid: u32) -> Result<LineId, AddLineError> {
        self.add_line_at(Address::new(name, cid), self.limits)
    }

    /// Adds a line for a VM, with limits of its own.
    pub fn add_line_at(
        &mut self,
        address: Address,
        limits: Limits,
    ) -> Result<LineId, AddLineError> {
        self.enter_line(address, limits, false)
    }

    pub(crate) fn enter_line(
        &mut self,
        address: Address,
        limits: Limits,
        hybrid: bool,
    ) -> Result<LineId, AddLineError> {
        let cid = address.cid;
        if !(MIN_GUEST_CID..CID_ANY).contains(&cid) {
            return Err(AddLineError::ReservedCid(cid));
        }
        match self.directory.admits(&address) {
            Ok(()) => {}
            Err(Taken::Cid(owner)) => {
                let name = self.lines[owner.0 as usize].address.full_name();
                return Err(AddLineError::CidTaken { cid, name });
            }
            Err(Taken::Name) => return Err(AddLineError::NameTaken(address.name)),
        }
        let entry = self.lines.vacant_entry();
        let id = LineId(entry.key() as u32);
        let domain = self.directory.enter(&address, id);
        let mut line = Line::new(address, domain, limits);
        line.subject_to(&self.policy);
        line.hybrid = hybrid;
        line.up = hybrid;
        entry.insert(line);
        Ok(id)
    }

    /// Removes a line: its name and its identifier are free at once. Its circuits are cut short; its number is free when they all are.
    pub fn remove_line(&mut self, now: Time, id: LineId, actions: &mut Actions) {
        let Some(line) = self.line_mut(id).filter(|line| !line.removed) else {
            return;
        };
        line.removed = true;
        self.directory.strike(id);
        self.line_down(now, id, Reason::Operator, Some(id), actions);
    }

    /// The next moment at which [`Event::Tick`] is wanted.
    pub fn poll_at(&self) -> Option<Time> {
        if self.is_cutting() {
            return Some(Time::ZERO);
        }
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let throttle = self.throttled.first().map(|((at, _), _)| *at);
        deadline.into_iter().chain(throttle).min()
    }

    /// Takes note of an event. What is to be done is appended to `actions`.
    pub fn handle(&mut self, now: Time, event: Event, actions: &mut Actions) {
        match event {
            Event::LineUp { line, .. } | Event::LineDown { line } if self.is_hybrid(line) => {
                self.guest_seen(line, matches!(event, Event::LineUp { .. }));
            }
            Event::LineUp { line, seqpacket } => self.line_up(now, line, seqpacket, actions),
            Event::LineGoesOn { line, seqpacket } => self.line_goes_on(line, seqpacket, actions),
            Event::LineDown { line } => self.line_down(now, line, Reason::LineDown, None, actions),
            Event::Packet { line, header } => self.packet(now, line, header, actions),
            Event::HostDial {
                line,
                port,
                socket_type,
                caller,
                token,
            } => {
                self.host_dial(now, line, port, socket_type, caller, token, actions);
            }
            Event::HybridDial { line, port, token } => {
                self.hybrid_dial(now, line, port, token, actions);
            }
            Event::RelayEnded { circuit } => self.relay_ended(circuit),
            Event::Taken { circuit } => self.taken(circuit, actions),
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

    /// Whether the guest of a line is there.
    pub fn is_up(&self, line: LineId) -> bool {
        self.lines.get(line.0 as usize).is_some_and(|line| line.up)
    }

    /// Every line, in no particular order.
    pub fn lines(&self) -> impl Iterator<Item = LineReport> + '_ {
        let lines = self.lines.iter().filter(|(_, line)| !line.removed);
        lines.map(|(index, line)| LineReport {
            id: LineId(index as u32),
            address: line.address.clone(),
            up: line.up,
            hybrid: line.hybrid,
            limits: line.limits,
            circuits: line.circuits,
            half_open: line.half_open,
            granted_bytes: line.granted_bytes,
            counters: line.counters,
        })
    }

    /// How many circuits a line has, in any state.
    pub fn circuits_of(&self, line: LineId) -> u32 {
        let line = self.lines.get(line.0 as usize);
        line.map_or(0, |line| line.circuits)
    }

    /// Every circuit, in no particular order.
    pub fn circuits(&self) -> impl Iterator<Item = CircuitReport> + '_ {
        self.circuits_at(0..self.circuit_places())
    }

    /// How many places for circuits there are. A circuit has one as long as it lives, and many may be empty.
    pub fn circuit_places(&self) -> usize {
        self.circuits.capacity()
    }

    /// The circuits at these places.
    pub fn circuits_at(&self, places: Range<usize>) -> impl Iterator<Item = CircuitReport> + '_ {
        let circuits = places.filter_map(|place| self.circuits.get(place));
        circuits.map(Circuit::report)
    }

    /// A circuit, as it stands, as long as it is there.
    pub fn circuit(&self, id: CircuitId) -> Option<CircuitReport> {
        Some(self.circuits[self.find(id)?].report())
    }

    /// The circuit that the guest of this line knows by these ports, and the side that this guest is of it. The ports of a guest whose VMM has
    /// a vsock device of its own are not known.
    pub fn circuit_of(
        &self,
        line: LineId,
        port: u32,
        peer_cid: u32,
        peer_port: u32,
    ) -> Option<(CircuitId, Side)> {
        let key = EndKey {
            line,
            port,
            peer_cid,
            peer_port,
        };
        let (index, side) = self.by_end.get(&key)?;
        let circuit = self.circuits.get(*index as usize)?;
        (!self.is_lost(circuit.end(*side))).then_some((circuit.id, *side))
    }

    /// What a line may use.
    pub fn limits(&self, line: LineId) -> &Limits {
        self.lines
            .get(line.0 as usize)
            .map_or(&self.limits, |line| &line.limits)
    }

    /// The line of the VM with this context identifier, in the default domain.
    pub fn line_by_cid(&self, cid: u32) -> Option<LineId> {
        let domain = self.directory.domain(DEFAULT_DOMAIN)?;
        self.directory.line_by_cid(domain, cid)
    }

    /// The line of the VM with this name or alias, which begins with its domain if that is not the default one.
    pub fn line_by_name(&self, name: &str) -> Option<LineId> {
        let (domain, name) = name.split_once('/').unwrap_or((DEFAULT_DOMAIN, name));
        self.directory.line_by_name(domain, name)
    }

    /// The VM at this side of a circuit, if there is one.
    pub fn owner(&self, circuit: CircuitId, side: Side) -> Option<LineId> {
        self.circuits[self.find(circuit)?].end(side).owner()
    }

    /// The side of a circuit that is a socket of the host's, if there is one: of two, the caller's.
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

    /// The limits of the line at `side`, or of the one at the other side if that is the host.
    pub(crate) fn limits_at(&self, index: usize, side: Side) -> &Limits {
        let circuit = &self.circuits[index];
        let line = circuit
            .end(side)
            .line()
            .or_else(|| circuit.end(side.other()).line());
        line.map_or(&self.limits, |line| self.limits(line))
    }

    pub(crate) fn line_mut(&mut self, id: LineId) -> Option<&mut Line> {
        self.lines.get_mut(id.0 as usize)
    }

    pub(crate) fn key(circuit: &Circuit, side: Side) -> Option<EndKey> {
        let end = circuit.end(side);
        let peer = circuit.end(side.other());
        Some(EndKey {
            line: end.line()?,
            port: end.port,
            peer_cid: peer.seen.0,
            peer_port: peer.seen.1,
        })
    }

    /// The flows from both ends of a circuit, with what is reserved for them.
    fn flows(&mut self, caller: &End, callee: &End, origin: Option<Origin>) -> [Flow; 2] {
        let default_grant = self.limits.grant_bytes;
        let mut flow_of = |end: &End, origin: Option<Origin>| {
            // A host program gets no credit: it is read only when there is room, so nothing needs to be reserved.
            let grant = match end
                .line()
                .and_then(|line| self.lines.get_mut(line.0 as usize))
            {
                Some(line) => line.reserve(origin, line.limits.grant_bytes),
                None => default_grant,
            };
            Flow::new(0, grant)
        };
        let mut flows = [flow_of(caller, None), flow_of(callee, origin)];
        for (flow, destination) in flows.iter_mut().zip([callee, caller]) {
            if destination.is_host() {
                let grant = flow.grant();
                let _ = flow.announce(grant, 0);
            }
        }
        flows
    }

    /// Sets a circuit up, in the state of dialling. The limits have been checked.
    pub(crate) fn open(
        &mut self,
        now: Time,
        socket_type: SocketType,
        caller: End,
        callee: End,
        call: Call,
    ) -> usize {
        self.programs.opened(call.host);
        let origin = Origin::of(call.host, caller.owner());
        // The called guest has to answer, or the caller's host.
        let answering = callee.owner().or(caller.owner());
        let flows = self.flows(&caller, &callee, origin);
        let index = self.circuits.vacant_key();
        let id = CircuitId {
            index: index as u32,
            generation: self.next_generation,
        };
        self.next_generation = self.next_generation.wrapping_add(1);
        let circuit = Circuit {
            id,
            socket_type,
            answered: false,
            put_through: false,
            ends: [caller, callee],
            flows,
            origin,
            call,
            throttled: None,
            deadline: None,
            untaken: false,
            opened_at: now,
            passed: [0; 2],
            accounted: [0; 2],
            reason: None,
        };
        self.circuits.insert(index, circuit);
        self.enter_circuit(index);
        self.figures.of(call.rule).opened += 1;
        if let Some(used) = self.used(call.rule) {
            used.opened();
        }
        let patience = answering.map_or(&self.limits, |line| self.limits(line));
        let deadline = now + patience.handshake;
        self.set_deadline(
            index,
            Some(Deadline {
                at: deadline,
                kind: DeadlineKind::Handshake,
            }),
        );
        index
    }

    /// Enters a circuit into the tables of ends and lines, as one that has not been answered.
    pub(crate) fn enter_circuit(&mut self, index: usize) {
        let circuit = &self.circuits[index];
        for side in [Side::Caller, Side::Callee] {
            let end = circuit.end(side);
            if let Some(key) = Self::key(circuit, side).filter(|_| !end.gone) {
                self.by_end.insert(key, (index as u32, side));
            }
            let line = end.owner().map(|line| line.0 as usize);
            if let Some(line) = line.and_then(|line| self.lines.get_mut(line)) {
                line.open_circuit(circuit.origin_at(side));
            }
        }
        self.list_ends(index);
    }

    /// The circuit has been answered, one way or the other.
    pub(crate) fn close_handshake(&mut self, index: usize) {
        if self.circuits[index].answered {
            return;
        }
        self.circuits[index].answered = true;
        self.set_deadline(index, None);
        for side in [Side::Caller, Side::Callee] {
            let circuit = &self.circuits[index];
            let (line, origin) = (circuit.end(side).owner(), circuit.origin_at(side));
            if let Some(line) = line.and_then(|line| self.line_mut(line)) {
                line.answer_circuit(origin);
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
        let queued = std::mem::take(&mut end.queued);
        let Some(key) = key else { return };
        self.by_end.remove(&key);
        if queued {
            self.sweep(key.line);
        }
    }

    /// An entry of the line's round has become stale. A line whose guest takes nothing must not collect them.
    fn sweep(&mut self, id: LineId) {
        let circuits = &self.circuits;
        let Some(line) = self.lines.get_mut(id.0 as usize) else {
            return;
        };
        line.stale += 1;
        if line.stale > MAX_STALE && line.stale > line.round.len() / 2 {
            line.round.retain(|waiting| {
                circuits
                    .get(waiting.circuit.index as usize)
                    .is_some_and(|circuit| {
                        circuit.id == waiting.circuit && !circuit.end(waiting.side).gone
                    })
            });
            line.stale = 0;
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
        let Some(line) = self.lines.get_mut(line_id.0 as usize) else {
            return;
        };
        // The new driver has none of the old driver's circuits.
        if line.epoch == end.epoch {
            end.queued = true;
            line.round.push_back(Waiting { circuit: id, side });
            actions.push(Action::Wake { line: line_id });
        }
    }

    // ---- Lines ----

    fn line_up(&mut self, now: Time, id: LineId, seqpacket: bool, actions: &mut Actions) {
        self.line_down(now, id, Reason::LineDown, None, actions);
        if let Some(line) = self.line_mut(id) {
            line.up = true;
            line.seqpacket = seqpacket;
        }
    }

    fn line_down(
        &mut self,
        now: Time,
        id: LineId,
        reason: Reason,
        removed: Option<LineId>,
        actions: &mut Actions,
    ) {
        let Some(line) = self.line_mut(id) else {
            return;
        };
        line.up = false;
        line.orphans.clear();
        line.round.clear();
        line.stale = 0;
        let circuits = self.take_ends(id).into_iter();
        let cut = Cut {
            circuits,
            reason,
            removed,
        };
        self.cut(now, cut, actions);
    }

    /// The guest at `side` is gone with its line. What it has finished sending is still delivered; what it has not is
    /// cut off at once.
    pub(crate) fn guest_lost(
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
}
