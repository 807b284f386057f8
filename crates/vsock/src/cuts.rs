//! Cutting many circuits short, some at a time: a guest with thousands of them holds up no other when it goes.
//!
//! A line that goes down is down at once: its guest is not heard, no call reaches it, and nothing is sent to it. Its ends are *lost* from
//! then on. The line begins another epoch, by which a lost end is known; the list of its ends is taken, and cut in slices, one now and one at each tick,
//! which is due at once while there is something to cut. So a driver that starts anew meanwhile finds its line as after a cut of everything:
//! a lost end is in no round and gets into none, and a packet that would meet one has it cut first.

use policy::{LineId, Time};

use crate::circuit::Circuit;
use crate::end::{End, EndKey, Party};
use crate::event::{Action, Outsider};
use crate::share::Origin;
use crate::switch::{Actions, Cut};
use crate::{CircuitId, Reason, Side, Switch};

impl Switch {
    /// Whether circuits are left to be cut at the next tick.
    pub fn is_cutting(&self) -> bool {
        !self.cuts.is_empty()
    }

    /// Cuts the circuits with programs of the host, the first of them now and the others at the next ticks.
    pub fn cut_host_circuits(&mut self, now: Time, actions: &mut Vec<Action>) -> usize {
        let is_with_host = |circuit: &Circuit| {
            let mut ends = circuit.ends.iter();
            ends.any(|end| !end.gone && matches!(end.party, Party::Host))
        };
        let concerned = self.circuits.iter();
        let concerned = concerned.filter(|(_, circuit)| is_with_host(circuit));
        let circuits: Vec<_> = concerned.map(|(_, circuit)| (circuit.id, None)).collect();
        let count = circuits.len();
        let cut = Cut {
            circuits: circuits.into_iter(),
            reason: Reason::Operator,
            removed: None,
        };
        self.cut(now, cut, actions);
        count
    }

    /// Cuts what comes first of these circuits, and leaves the rest to the ticks that follow. Cuts are made in the order in which they began, so
    /// that nothing of a line is left to be cut when it is removed.
    pub(crate) fn cut(&mut self, now: Time, cut: Cut, actions: &mut Actions) {
        if cut.circuits.len() == 0 && cut.removed.is_none() {
            return;
        }
        self.cuts.push_back(cut);
        if self.cuts.len() == 1 {
            self.cut_some(now, actions);
        }
    }

    /// Cuts a slice of what is to be cut.
    pub(crate) fn cut_some(&mut self, now: Time, actions: &mut Actions) {
        let Some(mut cut) = self.cuts.pop_front() else {
            return;
        };
        for (id, side) in cut.circuits.by_ref().take(self.cuts_at_once) {
            let Some(index) = self.find(id) else { continue };
            match side {
                Some(side) => self.lose(now, index, side, cut.reason, actions),
                None => self.kill(now, index, cut.reason, actions),
            }
        }
        if cut.circuits.len() > 0 {
            self.cuts.push_front(cut);
        } else if let Some(line) = cut.removed {
            self.forget_line(line);
        }
    }

    /// Forgets a line that was removed, when all its circuits are cut.
    pub(crate) fn forget_line(&mut self, id: LineId) {
        // Ends that still drain elsewhere keep only the identifier, never the number of the line.
        let names = |circuit: &Circuit| {
            circuit.call.names(id)
                || circuit.origin == Some(Origin::Vm(id))
                || circuit.ends.iter().any(|end| end.owner() == Some(id))
        };
        let concerned = self.circuits.iter().filter(|(_, circuit)| names(circuit));
        let concerned: Vec<usize> = concerned.map(|(index, _)| index).collect();
        for index in concerned {
            let circuit = &mut self.circuits[index];
            circuit.call.forget(id);
            if circuit.origin == Some(Origin::Vm(id)) {
                circuit.origin = Some(Origin::Outside(Outsider::default()));
            }
            for end in &mut circuit.ends {
                if end.owner() == Some(id) {
                    end.party = Party::Departed { cid: end.cid() };
                }
            }
        }
        self.lines.remove(id.0 as usize);
        for (_, line) in &mut self.lines {
            line.shares.forget(id);
        }
    }

    /// Takes the ends of a line, which are lost from now on.
    pub(crate) fn take_ends(&mut self, id: LineId) -> Vec<(CircuitId, Option<Side>)> {
        let Some(line) = self.line_mut(id) else {
            return Vec::new();
        };
        line.epoch = line.epoch.wrapping_add(1);
        let ends = std::mem::take(&mut line.ends);
        let circuits = &self.circuits;
        let id_of = |(index, side): (u32, Side)| (circuits[index as usize].id, Some(side));
        ends.into_iter().map(id_of).collect()
    }

    /// Puts the ends of a new circuit on the lists of their lines.
    pub(crate) fn list_ends(&mut self, index: usize) {
        for side in [Side::Caller, Side::Callee] {
            let end = &mut self.circuits[index].ends[side.index()];
            let Some(id) = end.owner() else { continue };
            if let Some(line) = self.lines.get_mut(id.0 as usize) {
                end.epoch = line.epoch;
                end.place = line.ends.len() as u32;
                line.ends.push((index as u32, side));
            }
        }
    }

    /// Takes the ends of a circuit that is over from the lists of their lines.
    pub(crate) fn strike_ends(&mut self, index: usize) {
        for side in [Side::Caller, Side::Callee] {
            let end = self.circuits[index].end(side);
            let (epoch, place) = (end.epoch, end.place as usize);
            let Some(id) = end.owner() else { continue };
            let line = self.lines.get_mut(id.0 as usize);
            let Some(line) = line.filter(|line| line.epoch == epoch) else {
                continue;
            };
            line.ends.swap_remove(place);
            if let Some((moved, moved_side)) = line.ends.get(place).copied() {
                let end = self.circuits[moved as usize].end_mut(moved_side);
                end.place = place as u32;
            }
        }
    }

    /// Whether an end is of a line that has gone down since, and has yet to be cut.
    pub(crate) fn is_lost(&self, end: &End) -> bool {
        let line = end.owner().and_then(|id| self.lines.get(id.0 as usize));
        !end.gone && line.is_some_and(|line| line.epoch != end.epoch)
    }

    /// Cuts the circuit that is known by these ports, if an end of it is lost: before its turn, as its ports are wanted.
    pub(crate) fn cut_lost(&mut self, now: Time, key: &EndKey, actions: &mut Actions) {
        for side in [Side::Caller, Side::Callee] {
            let Some((index, _)) = self.by_end.get(key).copied() else {
                return;
            };
            let end = self.circuits[index as usize].end(side);
            if !self.is_lost(end) {
                continue;
            }
            let line = end.owner().and_then(|id| self.lines.get(id.0 as usize));
            let reason = match line.is_some_and(|line| line.removed) {
                true => Reason::Operator,
                false => Reason::LineDown,
            };
            self.lose(now, index as usize, side, reason, actions);
        }
    }

    /// The VM at `side` is gone with its line.
    fn lose(&mut self, now: Time, index: usize, side: Side, reason: Reason, actions: &mut Actions) {
        let end = self.circuits[index].end_mut(side);
        if end.gone {
            return;
        }
        // Its line's round has been emptied.
        end.queued = false;
        match end.is_host() {
            true => self.kill(now, index, reason, actions),
            false => self.guest_lost(now, index, side, reason, actions),
        }
    }
}
