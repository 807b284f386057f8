//! What would go on if the daemon ended now, and another one followed.

use std::collections::{BTreeMap, HashSet};

use policy::LineId;
use vsock::{CircuitId, CircuitReport};

use super::Fabric;
use super::journal::ring_record;
use crate::circuit::CircuitIo;
use crate::line::LineIo;
use crate::vsock::{RX, TX};

/// What would become of a line with rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineProspect {
    /// It goes on.
    GoesOn,
    /// No VMM is connected.
    Detached,
    /// Its VMM's connection goes on, and nothing of its guest is seen: its memory is not shared.
    Unseen,
    /// Its VMM's connection goes on, and its guest runs no rings.
    NoRings,
}

/// What would become of a circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CircuitProspect {
    /// It goes on.
    GoesOn,
    /// It is reset: one of its ends is the host's.
    HostEnd,
    /// It is reset: a line of it ends or connects anew.
    LineEnds,
    /// It is reset: bytes of it are stored in the daemon.
    Stored,
}

impl Fabric {
    /// What would become of the lines with rings, by the full names of their VMs.
    pub fn line_prospects(&self) -> BTreeMap<String, LineProspect> {
        let lines = self.lines.iter().filter_map(|(_, line)| line.as_ref());
        let lines = lines.filter(|line| line.frontend.is_some());
        let prospect = |line: &LineIo| match line.attached {
            true if line.last_fault.is_unseen() => LineProspect::Unseen,
            true if self.would_go_on(line) => LineProspect::GoesOn,
            true => LineProspect::NoRings,
            false => LineProspect::Detached,
        };
        lines
            .map(|line| (line.name.clone(), prospect(line)))
            .collect()
    }

    /// What would become of a slice of the circuits, and where the next slice begins. The first begins at 0.
    pub fn circuit_prospects(&self, from: usize) -> (Vec<CircuitProspect>, Option<usize>) {
        let (places, next) = self.slice(from);
        let circuits = self.switch.circuits_at(places);
        let prospects = circuits.map(|circuit| self.circuit_prospect(&circuit));
        (prospects.collect(), next)
    }

    /// The circuits that would go on.
    pub(super) fn circuits_that_go_on(&self) -> HashSet<CircuitId> {
        let (mut found, mut next) = (HashSet::new(), Some(0));
        while let Some(from) = next {
            let (places, after) = self.slice(from);
            let circuits = self.switch.circuits_at(places);
            let goes_on = circuits
                .filter(|circuit| self.circuit_prospect(circuit) == CircuitProspect::GoesOn);
            found.extend(goes_on.map(|circuit| circuit.id));
            next = after;
        }
        found
    }

    fn circuit_prospect(&self, circuit: &CircuitReport) -> CircuitProspect {
        let (Some(caller), Some(callee)) = (circuit.caller.line, circuit.callee.line) else {
            return CircuitProspect::HostEnd;
        };
        let goes_on = |id: LineId| {
            let line = self.lines.get(id.0 as usize).and_then(Option::as_ref);
            line.is_some_and(|line| self.would_go_on(line))
        };
        let io = self.peek_circuit(circuit.id);
        match (goes_on(caller) && goes_on(callee), io) {
            (false, _) => CircuitProspect::LineEnds,
            (true, Some(io)) if CircuitIo::has_stored(io) => CircuitProspect::Stored,
            (true, _) => CircuitProspect::GoesOn,
        }
    }

    /// Its rings run, and another daemon knows where.
    fn would_go_on(&self, line: &LineIo) -> bool {
        let is_recorded = |index| ring_record(line, index).is_some();
        self.keeper.is_some() && line.attached && is_recorded(TX) && is_recorded(RX)
    }
}
