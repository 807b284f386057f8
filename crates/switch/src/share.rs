//! What others hold of a called VM's limits.
//!
//! A circuit counts against the VM that is called, too. So each other VM has a part of these limits at most, and all that is not called by
//! the VM itself or by programs of its host leaves a part free: no caller can use them up for the rest.

use std::collections::HashMap;

use crate::event::HostCaller;
use crate::{Limits, LineId, Reason};

/// One VM may hold this part of a called VM's limit, and all others together leave as much free.
const PART: u32 = 4;

/// Packets that a call pays for its callee: the answer, and the confirmation of the end.
pub(crate) const PREPAID: u32 = 2;

/// Where a call comes from that neither the callee nor a program of the host made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Another VM.
    Vm(LineId),
    /// A published port, or a VM that has been removed since.
    Outside,
}

impl Origin {
    /// Of a call to a VM, by a program of the host or by a VM.
    pub(crate) fn of(host: Option<HostCaller>, caller: Option<LineId>) -> Option<Origin> {
        match (host, caller) {
            (Some(HostCaller::Program(_)), _) => None,
            (Some(HostCaller::Published | HostCaller::ForPublished), _) | (None, None) => {
                Some(Origin::Outside)
            }
            (None, Some(line)) => Some(Origin::Vm(line)),
        }
    }
}

/// Circuits, and those of them that have not been answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) circuits: u32,
    pub(crate) half_open: u32,
}

impl Places {
    fn open(&mut self) {
        self.circuits += 1;
        self.half_open += 1;
    }

    fn answer(&mut self) {
        self.half_open = self.half_open.saturating_sub(1);
    }

    fn close(&mut self) {
        self.circuits = self.circuits.saturating_sub(1);
    }
}

/// What others hold of one VM's limits.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    pub(crate) by_vm: HashMap<LineId, Places>,
    /// Of all others together.
    pub(crate) all: Places,
}

/// What one VM may hold of such a limit. With less than a part for each, one.
pub(crate) fn of_one(limit: u32) -> u32 {
    (limit / PART).max(1).min(limit)
}

/// What all others together may hold of such a limit.
pub(crate) fn of_all(limit: u32) -> u32 {
    limit - limit / PART
}

impl Shares {
    /// Whether there is room for another call from there.
    pub(crate) fn admit(&self, origin: Origin, limits: &Limits) -> Result<(), Reason> {
        let own = match origin {
            Origin::Vm(line) => self.by_vm.get(&line).copied().unwrap_or_default(),
            Origin::Outside => Places::default(),
        };
        let is_full = |own, all, limit| own >= of_one(limit) || all >= of_all(limit);
        if is_full(own.circuits, self.all.circuits, limits.circuits) {
            return Err(Reason::CircuitShare);
        }
        if is_full(own.half_open, self.all.half_open, limits.half_open) {
            return Err(Reason::HalfOpenShare);
        }
        Ok(())
    }

    pub(crate) fn open(&mut self, origin: Origin) {
        self.all.open();
        if let Origin::Vm(line) = origin {
            self.by_vm.entry(line).or_default().open();
        }
    }

    pub(crate) fn answer(&mut self, origin: Origin) {
        self.all.answer();
        if let Origin::Vm(line) = origin {
            self.by_vm.entry(line).or_default().answer();
        }
    }

    pub(crate) fn close(&mut self, origin: Origin) {
        self.all.close();
        let Origin::Vm(line) = origin else { return };
        let places = self.by_vm.entry(line).or_default();
        places.close();
        if places.circuits == 0 {
            self.by_vm.remove(&line);
        }
    }
}
