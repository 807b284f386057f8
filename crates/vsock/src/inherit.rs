//! Circuits that go on from a switch of another process.
//!
//! The owner of a switch can [record](Switch::take_changed) its circuits where they outlive the process, as of a moment between two events. The next switch
//! [inherits](Switch::inherit) those between guests whose rings go on; the others are reset at the ends that are left, for a guest that waits would never hear
//! of it. A record is checked as if a guest had written it.

use std::collections::{HashMap, HashSet};

use policy::{LineId, Time};
use wire::vsock::{Header, Operation};

use crate::call::Destination;
use crate::circuit::{Circuit, Deadline, DeadlineKind};
use crate::end::{End, Party};
use crate::event::Action;
use crate::share::Origin;
use crate::switch::{Actions, EndKey};
use crate::{CircuitId, Reason, Side, Switch};

/// The lines of guests that are there still, by what they were: what they are now, and whether their rings go on.
type Lines = HashMap<LineId, (LineId, bool)>;

/// Room for a circuit's record, in bytes.
const RECORD_BYTES: usize = 256;

/// What a switch recorded of a circuit.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// Its index.
    pub index: u32,
    /// As [`Switch::take_changed`] gave it.
    pub bytes: &'a [u8],
    /// What was kept of it is there. If not, it is reset.
    pub is_whole: bool,
}

/// What has become of recorded circuits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inherited {
    /// Those that go on.
    pub circuits: Vec<CircuitId>,
    /// Those that are reset.
    pub reset: usize,
    /// Records that make no sense.
    pub malformed: usize,
}

impl Switch {
    /// Notes from now on which circuits change, for [`take_changed`](Self::take_changed).
    pub fn record_changes(&mut self) {
        self.circuits.note_changes();
    }

    /// Notes that what is kept of a circuit has changed its place.
    pub fn note_changed(&mut self, id: CircuitId) {
        if let Some(index) = self.find(id) {
            let _ = self.circuits.get_mut(index);
        }
    }

    /// Whether a circuit has changed since changes were last taken.
    pub fn has_changed(&self) -> bool {
        self.circuits.has_changed()
    }

    /// The records of the circuits that have changed since this was last called, by their index; no bytes where there is none any more. A circuit that
    /// ends in the same moment as another begins at its index may be given twice.
    pub fn take_changed(&mut self, mut each: impl FnMut(u32, &[u8])) {
        let mut room = [0; RECORD_BYTES];
        self.circuits.take_changed(|index, circuit| {
            let record = circuit.and_then(|circuit| postcard::to_slice(circuit, &mut room).ok());
            each(index, record.as_deref().unwrap_or_default());
        });
    }

    /// Goes on with circuits that a switch before this one has recorded. `lines` has the lines of guests that are there still, by what they were
    /// then: what they are now, and whether their rings go on. To be called
    /// before there is any circuit; a line is [up](crate::Event::LineGoesOn) later. Circuits that the policy in force would not set up are cut.
    pub fn inherit(
        &mut self,
        now: Time,
        records: &[Record<'_>],
        lines: &Lines,
        actions: &mut Actions,
    ) -> Inherited {
        let mut inherited = Inherited::default();
        let mut kept = Vec::new();
        let mut ends = HashSet::new();
        for record in records {
            let decoded = postcard::from_bytes::<Circuit>(record.bytes);
            let Some(circuit) = decoded.ok().filter(|known| known.id.index == record.index) else {
                inherited.malformed += 1;
                continue;
            };
            let goes_on = record.is_whole && self.goes_on(&circuit, lines);
            match goes_on.then(|| moved(circuit.clone(), now, lines)) {
                Some(circuit) if enter_ends(&circuit, &mut ends) => kept.push(circuit),
                _ => {
                    self.note_lost(&circuit, lines);
                    inherited.reset += 1;
                }
            }
        }
        inherited.circuits = kept.iter().map(|circuit| circuit.id).collect();
        self.next_generation = inherited
            .circuits
            .iter()
            .map(|id| id.generation.wrapping_add(1))
            .fold(self.next_generation, u32::max);
        let at_index = |circuit: Circuit| (circuit.id.index as usize, circuit);
        self.circuits.restore(kept.into_iter().map(at_index));
        for id in &inherited.circuits {
            self.take_up(now, id.index as usize, actions);
        }
        inherited
    }

    /// Whether both ends of a circuit are guests that go on, or gone.
    fn goes_on(&self, circuit: &Circuit, lines: &Lines) -> bool {
        let is_there = |end: &End| match end.party {
            _ if end.gone => true,
            Party::Guest { line, cid } => lines
                .get(&line)
                .filter(|(_, goes_on)| *goes_on)
                .and_then(|(line, _)| self.lines.get(line.0 as usize))
                .is_some_and(|line| line.address.cid == cid && !line.removed),
            Party::Departed { .. } | Party::Host | Party::Hybrid { .. } => false,
        };
        circuit.ends.iter().all(is_there) && circuit.ends.iter().any(|end| !end.gone)
    }

    /// Has the guests at a circuit's ends learn that it is over, when their lines are up.
    fn note_lost(&mut self, circuit: &Circuit, lines: &Lines) {
        for side in [Side::Caller, Side::Callee] {
            let (end, peer) = (circuit.end(side), circuit.end(side.other()));
            let line = end.line().filter(|_| !end.gone);
            let line = line.and_then(|line| self.lines.get_mut(lines.get(&line)?.0.0 as usize));
            let Some(line) = line else { continue };
            line.lost.push(Header {
                src_cid: peer.seen.0.into(),
                dst_cid: line.address.cid.into(),
                src_port: peer.seen.1,
                dst_port: end.port,
                socket_type: circuit.socket_type as u16,
                operation: Operation::Reset as u16,
                ..Header::default()
            });
        }
    }

    /// Has everything else know of a circuit that is in the table.
    fn take_up(&mut self, now: Time, index: usize, actions: &mut Actions) {
        let deadline = self.circuits[index].deadline.take();
        self.enter_circuit(index);
        if self.circuits[index].answered {
            self.circuits[index].answered = false;
            self.close_handshake(index);
        }
        for side in [Side::Caller, Side::Callee] {
            let circuit = &self.circuits[index];
            let (line, origin) = (circuit.end(side).line(), circuit.origin_at(side));
            let grant = circuit.flows[side.index()].grant();
            if let Some(line) = line.and_then(|line| self.line_mut(line)) {
                line.grant(origin, grant);
            }
            self.enqueue(index, side, actions);
        }
        if let Some(Deadline { kind, .. }) = deadline {
            let limits = self.limits_at(index, Side::Callee);
            let patience = match kind {
                DeadlineKind::Handshake => limits.handshake,
                DeadlineKind::Linger => limits.linger,
                DeadlineKind::CreditPoll => limits.credit_poll,
            };
            let at = now + patience;
            self.set_deadline(index, Some(Deadline { at, kind }));
        }
        let judgement = self.judge_again(index);
        let rule = judgement.as_ref().and_then(|judgement| judgement.rule);
        self.circuits[index].call.rule = rule;
        if let Some(used) = self.used(rule) {
            used.opened();
        }
        let circuit = &self.circuits[index];
        let is_over = circuit.reason.is_some() || circuit.ends.iter().any(|end| end.gone);
        if judgement.is_none() && !is_over {
            self.kill(now, index, Reason::Denied, actions);
        }
    }

    /// The rings of a guest run again.
    pub(crate) fn line_goes_on(&mut self, id: LineId, seqpacket: bool, actions: &mut Actions) {
        let Some(line) = self.line_mut(id).filter(|line| !line.hybrid) else {
            return;
        };
        line.up = true;
        line.seqpacket = seqpacket;
        self.reset_lost(id, actions);
        actions.push(Action::Wake { line: id });
    }

    /// Resets what did not go on.
    pub(crate) fn reset_lost(&mut self, id: LineId, actions: &mut Actions) {
        let Some(line) = self.line_mut(id).filter(|line| !line.lost.is_empty()) else {
            return;
        };
        let lost = std::mem::take(&mut line.lost);
        line.orphans.extend(lost);
        actions.push(Action::Wake { line: id });
    }
}

/// The same circuit, between the lines of now.
fn moved(mut circuit: Circuit, now: Time, lines: &Lines) -> Circuit {
    let of_now = |line: LineId| lines.get(&line).map(|(line, _)| *line);
    for end in &mut circuit.ends {
        end.party = match end.party {
            Party::Guest { line, cid } => match of_now(line) {
                Some(line) => Party::Guest { line, cid },
                None => Party::Departed { cid },
            },
            other => Party::Departed { cid: other.cid() },
        };
    }
    for destination in [&mut circuit.call.dialled, &mut circuit.call.reached] {
        if let Destination::Line(line) = *destination {
            *destination = of_now(line).map_or(Destination::Departed, Destination::Line);
        }
    }
    if let Some(Origin::Vm(line)) = circuit.origin {
        circuit.origin = Some(of_now(line).map_or(Origin::Outside, Origin::Vm));
    }
    circuit.opened_at = now;
    circuit.accounted = circuit.passed;
    circuit
}

/// Notes by what the packets of both ends are known, unless another circuit has one of these.
fn enter_ends(circuit: &Circuit, known: &mut HashSet<EndKey>) -> bool {
    let key = |side| Switch::key(circuit, side).filter(|_| !circuit.end(side).gone);
    let keys = [Side::Caller, Side::Callee].map(key);
    let is_new = keys.iter().flatten().all(|key| !known.contains(key));
    if is_new {
        known.extend(keys.into_iter().flatten());
    }
    is_new
}
