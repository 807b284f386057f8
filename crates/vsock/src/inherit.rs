//! Circuits that go on from a switch of another process.
//!
//! The owner of a switch can [record](Switch::take_changed) its circuits where they outlive the process, as of a moment between two events. The next switch
//! [inherits](Switch::inherit) those between guests whose rings go on. The others are inherited as well, to be reset at the ends that are left: a guest that waits would
//! never hear of it otherwise, also where this switch ends before the guest has. A record is checked as if a guest had written it.

use std::collections::{HashMap, HashSet};

use policy::{LineId, Time};
use wire::vsock::{Header, Operation};

use crate::call::Destination;
use crate::circuit::{Circuit, Deadline, DeadlineKind};
use crate::end::{EndKey, Party};
use crate::event::{Action, Outsider};
use crate::share::Origin;
use crate::switch::Actions;
use crate::{CircuitId, Reason, Side, Switch};

/// The lines of guests that are there still, by what they were: what they are now, and which [epoch](Switch::epoch) it was.
type Lines = HashMap<LineId, (LineId, u32)>;

/// Room for a circuit's record, in bytes: enough for the largest numbers.
pub(crate) const RECORD_BYTES: usize = 288;

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

/// A reset that a guest is to be sent for a packet of no circuit, such as for a call that is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnsentReset {
    port: u32,
    peer_cid: u64,
    peer_port: u32,
    socket_type: u16,
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

    /// How often a line has gone down. Circuits of its guest that were recorded in an earlier epoch are over, though they may have yet to be cut.
    pub fn epoch(&self, line: LineId) -> u32 {
        let line = self.lines.get(line.0 as usize);
        line.map_or(0, |line| line.epoch)
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
    /// then: what they are now, and their epoch then. To be called before there is any circuit, and before a line [goes on](crate::Event::LineGoesOn). Circuits that the policy in force would not set up are cut.
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
            if circuit.ends.iter().all(|end| end.gone) {
                // Only peers of the host's had yet to take something.
                continue;
            }
            let (circuit, is_lost) = self.moved(circuit, now, lines);
            if circuit.ends.iter().all(|end| end.gone) {
                inherited.reset += 1;
            } else if enter_ends(&circuit, &mut ends) {
                kept.push((circuit, is_lost || !record.is_whole));
            } else {
                inherited.malformed += 1;
            }
        }
        let generations = kept.iter().map(|(circuit, _)| circuit.id.generation);
        self.next_generation = generations
            .map(|generation| generation.wrapping_add(1))
            .fold(self.next_generation, u32::max);
        let fates: Vec<(CircuitId, bool)> = kept
            .iter()
            .map(|(circuit, is_lost)| (circuit.id, *is_lost))
            .collect();
        let at_index = |(circuit, _): (Circuit, bool)| (circuit.id.index as usize, circuit);
        self.circuits.restore(kept.into_iter().map(at_index));
        for (id, is_lost) in fates {
            let index = id.index as usize;
            self.take_up(now, index);
            if is_lost {
                inherited.reset += 1;
                // It does not count for a rule of now.
                self.circuits[index].call.rule = None;
                self.kill(now, index, Reason::DaemonEnded, actions);
            } else {
                inherited.circuits.push(id);
                self.judge_inherited(now, index, actions);
            }
        }
        inherited
    }

    /// Resets that wait for room in a guest's ring, the oldest first.
    pub fn unsent_resets(&self, line: LineId) -> impl Iterator<Item = UnsentReset> {
        let line = self.lines.get(line.0 as usize);
        let resets = line.into_iter().flat_map(|line| &line.orphans);
        resets.map(|reset| UnsentReset {
            port: reset.dst_port,
            peer_cid: reset.src_cid,
            peer_port: reset.src_port,
            socket_type: reset.socket_type,
        })
    }

    /// Has such a reset wait again, which another switch has recorded.
    pub fn inherit_reset(&mut self, line: LineId, reset: UnsentReset) {
        if let Some(line) = self.line_mut(line) {
            let cid = line.address.cid.into();
            line.orphans.push_back(reset.header(cid));
        }
    }

    /// The same circuit, between the lines of now, and whether an end was lost that was not gone. What is lost is gone now.
    fn moved(&self, mut circuit: Circuit, now: Time, lines: &Lines) -> (Circuit, bool) {
        let of_now = |line: LineId| lines.get(&line).map(|(line, _)| *line);
        let mut is_lost = false;
        for end in &mut circuit.ends {
            let cid = end.cid();
            let is_of_epoch = |line: LineId| {
                let known = lines.get(&line).map(|(_, epoch)| *epoch);
                end.gone || known == Some(end.epoch)
            };
            let line = end.line().filter(|line| is_of_epoch(*line));
            let line = line.and_then(of_now).filter(|line| {
                let line = self.lines.get(line.0 as usize);
                line.is_some_and(|line| line.address.cid == cid && !line.removed)
            });
            let departed = Party::Departed { cid };
            end.party = line.map_or(departed, |line| Party::Guest { line, cid });
            is_lost |= line.is_none() && !end.gone;
            end.gone |= line.is_none();
        }
        for destination in [&mut circuit.call.dialled, &mut circuit.call.reached] {
            if let Destination::Line(line) = *destination {
                *destination = of_now(line).map_or(Destination::Departed, Destination::Line);
            }
        }
        if let Some(Origin::Vm(line)) = circuit.origin {
            circuit.origin =
                Some(of_now(line).map_or(Origin::Outside(Outsider::default()), Origin::Vm));
        }
        circuit.opened_at = now;
        circuit.accounted = circuit.passed;
        (circuit, is_lost)
    }

    /// Has everything else know of a circuit that is in the table.
    fn take_up(&mut self, now: Time, index: usize) {
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
    }

    /// Has both ends go on, under the rules in force.
    fn judge_inherited(&mut self, now: Time, index: usize, actions: &mut Actions) {
        for side in [Side::Caller, Side::Callee] {
            self.enqueue(index, side, actions);
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

    /// A guest may be called, and is sent what there is for it when its rings run.
    pub(crate) fn line_goes_on(&mut self, id: LineId, seqpacket: bool, actions: &mut Actions) {
        let Some(line) = self.line_mut(id).filter(|line| !line.hybrid) else {
            return;
        };
        line.up = true;
        line.seqpacket = seqpacket;
        actions.push(Action::Wake { line: id });
    }
}

impl UnsentReset {
    /// How long it is as bytes.
    pub const BYTES: usize = 18;

    /// Its numbers, little-endian, in their order.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.port.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.peer_cid.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.peer_port.to_le_bytes());
        bytes[16..].copy_from_slice(&self.socket_type.to_le_bytes());
        bytes
    }

    /// What [`to_bytes`](Self::to_bytes) gave. Any bytes are one.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> UnsentReset {
        let [a, b, c, d, peer_cid @ .., e, f, g, h, i, j] = *bytes;
        UnsentReset {
            port: u32::from_le_bytes([a, b, c, d]),
            peer_cid: u64::from_le_bytes(peer_cid),
            peer_port: u32::from_le_bytes([e, f, g, h]),
            socket_type: u16::from_le_bytes([i, j]),
        }
    }

    pub(crate) fn header(self, cid: u64) -> Header {
        Header {
            src_cid: self.peer_cid,
            dst_cid: cid,
            src_port: self.peer_port,
            dst_port: self.port,
            socket_type: self.socket_type,
            operation: Operation::Reset as u16,
            ..Header::default()
        }
    }
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
