//! What a daemon after this one goes on with: how far rings and circuits have come, as of the last publication.
//!
//! Nothing of a turn is published before it is written down ([`guestmem::journal`]). So a successor finds the rings and the circuits of one moment: what the last turn
//! did beyond it has not happened, for it was seen by no guest. Packets that are parked are in their senders' rings, and are found there again. What
//! is stored in memory of our own is lost, and its circuits are reset, as are those with ends at the host.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use guestmem::crash::{self, Point};
use guestmem::journal::{Journal, MAX_RECORD_BYTES, SHAPE};
use guestmem::queue::{Chain, Positions};
use keeper::Keeper;
use policy::LineId;
use vsock::{CircuitId, Event, Inherited, Reason, Record, Side, UnsentReset};
use wire::vsock::{HEADER_LEN, Header, Operation};

use self::line_record::LineRecord;
use super::Fabric;
use super::park::PARKED_PIECES;
use super::tx::Packet;
use crate::circuit::CircuitIo;
use crate::frontend::{Frontend, KEPT_VERSION, RingPositions};
use crate::journals::KeptJournal;
use crate::line::{LineIo, StoppedRing};
use crate::vsock::{FEATURE_SEQPACKET, RINGS, RX, TX};

mod line_record;

/// Circuits that may be written down; further ones end with this process. Lines have room for as many.
const CIRCUITS: usize = 1 << 18;

/// What a guest has done whose parked packets are more than could be parked.
const GROWN: &str = "descriptors that the device has were changed";

/// How often a fabric checks whether the daemon has started.
const START_INTERVAL: Duration = Duration::from_millis(1);

/// What is kept for the next daemon: its name, and which versions of it this one reads. The last is the one that it writes.
pub const FORMATS: [(&str, &[u32]); 2] = [("journal", &[SHAPE as u32]), ("vmm", &[KEPT_VERSION])];

const JOURNAL: KeptJournal = KeptJournal {
    key: "journal",
    records: 2 * CIRCUITS,
    loss: "circuits end",
};

/// What a fabric writes down, and what another has written down before.
#[derive(Debug, Default)]
pub(super) struct Handover {
    /// Its journal, until this fabric goes on with it.
    before: Option<Before>,
    /// Boxed, as it is taken out for each turn.
    journal: Option<Box<Writer>>,
    /// Lines of which something has changed, beside those with something to publish.
    changed: Vec<LineId>,
    /// Payload that circuits have left in the rings of a line that goes on, in bytes: until it is found there.
    unparked: HashMap<LineId, HashMap<(CircuitId, Side), u32>>,
    taken_over: Option<TakenOver>,
    /// The circuits that the next fabric goes on with, once everything is left to it.
    pub(super) left: Option<HashSet<CircuitId>>,
}

/// A journal, and room to put a record together.
#[derive(Debug)]
struct Writer {
    journal: Journal,
    room: [u8; MAX_RECORD_BYTES],
}

/// What a fabric has taken over from the one before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// Lines of VMs that go on.
    pub lines: usize,
    /// Circuits that go on.
    pub circuits: usize,
    /// Circuits that were reset.
    pub reset: usize,
}

#[derive(Debug)]
struct LineBefore {
    id: LineId,
    epoch: u32,
    positions: RingPositions,
    resets: Vec<UnsentReset>,
}

#[derive(Debug, Default)]
struct Before {
    journal: Option<Journal>,
    /// By the full name of the VM.
    lines: HashMap<String, LineBefore>,
}

/// The records of a line and of a circuit take turns.
fn line_index(line: LineId) -> usize {
    2 * line.0 as usize
}

fn circuit_index(index: u32) -> usize {
    2 * index as usize + 1
}

impl Before {
    fn read(journal: Journal) -> Before {
        let mut lines = HashMap::new();
        for index in (0..journal.written()).step_by(2) {
            let Some(bytes) = journal.read(index) else {
                continue;
            };
            let Some((record, resets)) = LineRecord::read(&bytes) else {
                continue;
            };
            let positions = |(available, used)| Positions { available, used };
            let line = LineBefore {
                id: LineId((index / 2) as u32),
                epoch: record.epoch,
                resets,
                positions: record.rings.map(|ring| ring.map(positions)).to_vec(),
            };
            lines.insert(record.vm.to_owned(), line);
        }
        Before {
            journal: Some(journal),
            lines,
        }
    }
}

impl Handover {
    /// Finds what a predecessor has left with this keeper.
    fn of(keeper: &Keeper) -> io::Result<Handover> {
        let before = JOURNAL.of_before(keeper)?.map(Before::read);
        Ok(Handover {
            before: Some(before.unwrap_or_default()),
            ..Handover::default()
        })
    }

    /// Where the rings of this VM were, if a predecessor has written it down.
    pub(super) fn positions(&self, vm: &str) -> Option<RingPositions> {
        let line = self.before.as_ref()?.lines.get(vm)?;
        Some(line.positions.clone())
    }

    /// Whether changes are written down.
    pub(super) fn has_journal(&self) -> bool {
        self.journal.is_some()
    }

    /// Whether the daemon has yet to start. Then nothing is done for a guest: the start may fail, and what was kept is the next one's.
    fn waits(&self) -> bool {
        self.before.is_some()
    }
}

impl Fabric {
    /// Keeps VMMs' connections for a successor, and goes on with what a predecessor kept, on lines that are opened from now on: when the keeper
    /// [runs](Keeper::run).
    ///
    /// # Errors
    /// When what is kept is a later version's.
    pub fn set_keeper(&mut self, keeper: Arc<Keeper>) -> io::Result<()> {
        self.handover = Handover::of(&keeper)?;
        self.keeper = Some(keeper);
        Ok(())
    }

    /// Whether the daemon has yet to start, after a moment's wait for it.
    pub(super) fn awaits_start(&mut self) -> bool {
        if self.handover.waits() {
            self.go_on();
        }
        let waits = self.handover.waits();
        if waits {
            std::thread::sleep(START_INTERVAL);
        }
        waits
    }

    /// What was taken over from a predecessor, once that is done.
    pub fn taken_over(&self) -> Option<TakenOver> {
        self.handover.taken_over
    }

    /// Goes on with the circuits of a predecessor, once the daemon has started.
    fn go_on(&mut self) {
        let Some(keeper) = self.keeper.clone().filter(|keeper| keeper.runs()) else {
            return;
        };
        let Some(before) = self.handover.before.take() else {
            return;
        };
        self.handover.taken_over = Some(TakenOver::default());
        let mut journal = match before.journal {
            Some(journal) => journal,
            None => match JOURNAL.create(&keeper) {
                Ok(journal) => journal,
                Err(error) => {
                    tracing::warn!(%error, "cannot write down circuits: they end with this daemon");
                    return self.mailbox.waker.wake();
                }
            },
        };
        // Only now: nothing would take the changes without a journal.
        self.switch.record_changes();
        crash::point(Point::TakeOver);
        self.inherit(&mut journal, &before.lines);
        let room = [0; MAX_RECORD_BYTES];
        self.handover.journal = Some(Box::new(Writer { journal, room }));
        let lines = self.lines.iter_mut().filter_map(|(_, line)| line.as_mut());
        for ring in lines.flat_map(|line| line.rings.iter_mut().flatten()) {
            ring.queue.defer_marks();
        }
        self.commit();
        self.mailbox.waker.wake();
    }

    fn inherit(&mut self, journal: &mut Journal, before: &HashMap<String, LineBefore>) {
        let mut lines = HashMap::new();
        for (vm, was) in before {
            let Some(id) = self.line_named(vm) else {
                continue;
            };
            let Some(line) = self.line(id) else { continue };
            let frontend = line.frontend.as_ref();
            let features = frontend.and_then(Frontend::features_of_before);
            let known = |index: usize| was.positions.get(index).copied().flatten();
            if let (Some(features), Some(_), Some(_)) = (features, known(TX), known(RX)) {
                (line.goes_on, line.starts_anew) = (true, false);
                for index in 0..RINGS {
                    line.of_before[index] = known(index);
                    // A VMM that has paused its guest starts the rings there.
                    line.stopped[index] = known(index).map(|at| StoppedRing::at(at.available));
                }
                line.seqpacket = features & FEATURE_SEQPACKET != 0;
                lines.insert(was.id, (id, was.epoch));
            }
        }
        let read = |index: usize| Some(((index / 2) as u32, journal.read(index)?));
        let found = (1..journal.written()).step_by(2).filter_map(read);
        let found: Vec<(u32, Vec<u8>)> = found.collect();
        let records: Vec<Record<'_>> = found
            .iter()
            .map(|(index, bytes)| Record {
                index: *index,
                bytes: bytes.get(1..).unwrap_or_default(),
                is_whole: bytes.first() == Some(&1),
            })
            .collect();
        let inherited = self
            .switch
            .inherit(self.now, &records, &lines, &mut self.actions);
        self.carry_out();
        self.handover.taken_over = Some(self.cost_of(lines.len(), &inherited));
        for was in before.values() {
            let Some((line, _)) = lines.get(&was.id) else {
                continue;
            };
            for reset in &was.resets {
                self.switch.inherit_reset(*line, *reset);
            }
        }
        // Before their rings run: a caller of such a guest meanwhile is refused.
        for (line, _) in lines.values().copied() {
            let seqpacket = self.line(line).is_some_and(|line| line.seqpacket);
            self.tell_of_line(line, Event::LineGoesOn { line, seqpacket });
        }
        // Everything is written anew, by its numbers of now.
        for index in 0..journal.written() {
            if journal.read(index).is_some() {
                journal.write(index, &[]);
            }
        }
        let of_now = lines.into_values().map(|(line, _)| line);
        self.handover.changed.extend(of_now);
        for id in &inherited.circuits {
            self.expect_parked(*id);
        }
        if !records.is_empty() {
            tracing::info!(
                circuits = inherited.circuits.len(),
                reset = inherited.reset,
                malformed = inherited.malformed,
                "goes on with circuits of the daemon before"
            );
        }
    }

    fn cost_of(&self, lines: usize, inherited: &Inherited) -> TakenOver {
        // Others have an end that has gone, or are not allowed any more.
        let goes_on = |id: &&CircuitId| {
            let report = self.switch.circuit(**id);
            report.is_some_and(|circuit| {
                let lines = [circuit.caller.line, circuit.callee.line];
                !circuit.is_cut_short && lines.iter().all(Option::is_some)
            })
        };
        let circuits = inherited.circuits.iter().filter(goes_on).count();
        TakenOver {
            lines,
            circuits,
            reset: inherited.reset + inherited.circuits.len() - circuits,
        }
    }

    fn expect_parked(&mut self, id: CircuitId) {
        let Some(report) = self.switch.circuit(id) else {
            return;
        };
        for (side, end) in [(Side::Caller, report.caller), (Side::Callee, report.callee)] {
            if let (Some(line), 1..) = (end.line, end.kept_bytes) {
                let unparked = self.handover.unparked.entry(line).or_default();
                unparked.insert((id, side), end.kept_bytes);
            }
        }
    }

    /// Something of a line is to be written down before the next publication.
    pub(super) fn note_line(&mut self, id: LineId) {
        if !self.handover.has_journal() {
            return;
        }
        let known = self.line(id);
        let was_noted = known.is_some_and(|line| std::mem::replace(&mut line.is_noted, true));
        if !was_noted {
            self.handover.changed.push(id);
        }
    }

    /// Writes down what has changed. Called before anything is published.
    pub(super) fn commit(&mut self) {
        for index in 0..self.touched.len() {
            self.note_line(self.touched[index].0);
        }
        let Some(mut writer) = self.handover.journal.take() else {
            return;
        };
        let Writer { journal, room } = &mut *writer;
        let mut changed = std::mem::take(&mut self.handover.changed);
        for id in changed.drain(..) {
            if let Some(line) = self.line(id) {
                line.is_noted = false;
                for ring in line.rings.iter_mut().flatten() {
                    ring.queue.mark_out(ring.held.len() as u16);
                }
            }
            let record = self.line_record(id, room);
            journal.write(line_index(id), record.unwrap_or_default());
        }
        self.handover.changed = changed;
        let circuits = &self.circuits;
        self.switch.take_changed(|index, bytes| {
            let io = circuits.get(index as usize).and_then(Option::as_ref);
            let record = match room.get_mut(..1 + bytes.len()) {
                Some(record) if !bytes.is_empty() => {
                    record[0] = u8::from(!io.is_some_and(CircuitIo::has_stored));
                    record[1..].copy_from_slice(bytes);
                    &*record
                }
                _ => &[],
            };
            journal.write(circuit_index(index), record);
        });
        journal.commit();
        self.handover.journal = Some(writer);
    }

    fn line_record<'a>(
        &self,
        id: LineId,
        room: &'a mut [u8; MAX_RECORD_BYTES],
    ) -> Option<&'a [u8]> {
        let line = self.lines.get(id.0 as usize)?.as_ref()?;
        let record = LineRecord {
            vm: &line.name,
            epoch: self.switch.epoch(id),
            rings: [0, 1, 2].map(|index| ring_record(line, index)),
        };
        record.write(self.switch.unsent_resets(id), room)
    }

    /// Leaves everything to a successor, as it stands.
    pub(super) fn leave_guests(&mut self) {
        self.handover.left = Some(self.circuits_that_go_on());
        self.publish();
        self.handover.journal = None;
        for (_, line) in &mut self.lines {
            if let Some(line) = line {
                line.rings = Default::default();
            }
        }
    }

    /// Parks again what a predecessor had parked of a line whose guest goes on.
    pub(super) fn park_again(&mut self, id: LineId) {
        let out = |line: &mut LineIo| Some(line.rings[TX].as_ref()?.queue.out());
        let heads = self.line(id).and_then(out).unwrap_or_default();
        let mut pieces = 0;
        crash::point(Point::ParkAgain);
        for head in heads {
            let mut chain = Chain::default();
            let ring = self.line(id).and_then(|line| line.rings[TX].as_ref());
            match ring.map(|ring| ring.queue.read_again(head, &mut chain)) {
                Some(Ok(true)) => {}
                Some(Err(error)) => return self.fail_line(id, &error),
                _ => continue,
            }
            pieces += chain.readable.len();
            if pieces > PARKED_PIECES || !self.park_one_again(id, chain) {
                return self.fail_line(id, &GROWN);
            }
        }
        for ((circuit, from), kept) in self.handover.unparked.remove(&id).unwrap_or_default() {
            if self.switch.circuit(circuit).is_some() && !self.skip_delivered(circuit, from, kept) {
                tracing::warn!(
                    line = id.0,
                    "what a circuit has sent is not in its guest's ring any more: it is reset"
                );
                self.tell(Event::Kill {
                    circuit,
                    reason: Reason::LineDown,
                });
            }
        }
    }

    /// Whether a circuit has bytes in the ring of a guest whose ring has yet to run again.
    pub(super) fn has_yet_to_park(&self, circuit: CircuitId, from: Side) -> bool {
        let mut unparked = self.handover.unparked.values();
        unparked.any(|of_line| of_line.contains_key(&(circuit, from)))
    }

    /// What is parked of a line is not there any more.
    pub(super) fn forget_unparked(&mut self, id: LineId) {
        self.handover.unparked.remove(&id);
    }

    /// `false` if it is more than its sender may park.
    fn park_one_again(&mut self, id: LineId, chain: Chain) -> bool {
        let mut bytes = [0; HEADER_LEN];
        let memory = self.memory(id, TX);
        let read = memory.map(|memory| memory.read(&chain.readable, 0, &mut bytes));
        let header = Header::from_bytes(&bytes);
        let payload = guestmem::guest::total_len(&chain.readable).saturating_sub(HEADER_LEN);
        let is_data = matches!(read, Some(Ok(())))
            && header.operation == Operation::Data as u16
            && header.len as usize <= payload;
        let peer = u32::try_from(header.dst_cid);
        let known = peer.ok().and_then(|peer| {
            self.switch
                .circuit_of(id, header.src_port, peer, header.dst_port)
        });
        let expected = self.handover.unparked.get(&id);
        let is_expected = |of: &(CircuitId, Side)| {
            is_data && expected.is_some_and(|of_line| of_line.contains_key(of))
        };
        let Some((circuit, from)) = known.filter(is_expected) else {
            self.complete(id, TX, chain, 0);
            return true;
        };
        if self.circuit(circuit).is_none() {
            let socket_type = super::tx::socket_type(&header);
            self.install(CircuitIo::new(circuit, socket_type));
        }
        let packet = Packet {
            line: id,
            chain,
            header,
        };
        let may_park = self.may_park(&packet);
        self.park(circuit, from, packet);
        may_park
    }

    /// Skips what has been delivered of the first packet that is parked. `false` if what is parked is not what was kept.
    fn skip_delivered(&mut self, id: CircuitId, from: Side, kept: u32) -> bool {
        let parked = self
            .circuit(id)
            .and_then(|circuit| circuit.kept(from))
            .map_or(0, |kept| kept.iter().map(|parcel| parcel.left()).sum());
        let Some(delivered) = parked.checked_sub(kept as usize) else {
            return false;
        };
        let first = self
            .circuit(id)
            .and_then(|circuit| circuit.kept(from)?.front());
        match first {
            Some(first) if delivered < first.left() => {
                first.advance(delivered);
                true
            }
            _ => false,
        }
    }
}

/// Where a ring is; of one that has stopped, where it would go on. None of a line whose driver starts anew: its circuits are over, whether they have been cut yet or not.
pub(super) fn ring_record(line: &LineIo, index: usize) -> Option<(u16, u16)> {
    if line.starts_anew {
        return None;
    }
    if let Some(Positions { available, used }) = line.of_before[index] {
        return Some((available, used));
    }
    if let Some(stopped) = &line.stopped[index] {
        return stopped.base.try_into().ok().map(|base| (base, base));
    }
    let ring = line.rings[index].as_ref()?;
    let positions = ring.queue.positions(ring.held.len() as u16)?;
    Some((positions.available, positions.used))
}

#[cfg(test)]
mod tests;
