//! What others hold of a called VM's limits.
//!
//! A circuit counts against the VM that is called, too. So each other VM, and each caller of published ports, has a part of these limits at most, and all that is not called by
//! the VM itself or by programs of its host leaves a part free: no caller can use them up for the rest.

use std::collections::HashMap;

use policy::LineId;
use serde::{Deserialize, Serialize};

use crate::event::{HostCaller, Outsider};
use crate::{Limits, Reason};

/// One VM, or one caller of published ports, may hold this part of a called VM's limit, and all others together leave as much free.
const PART: u64 = 4;

/// Packets that a call pays for its callee: the answer, and the confirmation of the end.
pub(crate) const PREPAID: u32 = 2;

/// Where a call comes from that neither the callee nor a program of the host made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Origin {
    /// Another VM.
    Vm(LineId),
    /// A published port, or, as an unknown one, a VM that has been removed since.
    Outside(Outsider),
}

impl Origin {
    /// Of a call to a VM, by a program of the host or by a VM.
    pub(crate) fn of(host: Option<HostCaller>, caller: Option<LineId>) -> Option<Origin> {
        match (host, caller) {
            (Some(HostCaller::Program(_)), _) => None,
            (Some(HostCaller::Published(outsider) | HostCaller::ForPublished(outsider)), _) => {
                Some(Origin::Outside(outsider))
            }
            (None, None) => Some(Origin::Outside(Outsider::default())),
            (None, Some(line)) => Some(Origin::Vm(line)),
        }
    }
}

/// Circuits, those of them that have not been answered, and what they may have sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) circuits: u32,
    pub(crate) half_open: u32,
    /// What the grants of the called VM's flows to them add up to, in bytes.
    pub(crate) granted_bytes: u64,
}

impl Places {
    fn add(&mut self, other: Places) {
        self.circuits += other.circuits;
        self.half_open += other.half_open;
        self.granted_bytes += other.granted_bytes;
    }

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
    pub(crate) by_origin: HashMap<Origin, Places>,
    /// Of all others together.
    pub(crate) all: Places,
}

/// What one VM, or one caller of published ports, may hold of such a limit. With less than a part for each, one.
fn of_one(limit: u64) -> u64 {
    (limit / PART).max(1).min(limit)
}

/// What all others together may hold of such a limit.
fn of_all(limit: u64) -> u64 {
    limit - limit / PART
}

impl Shares {
    /// Whether there is room for another call from there.
    pub(crate) fn admit(&self, origin: Origin, limits: &Limits) -> Result<(), Reason> {
        let own = self.own(origin);
        let is_full = |own: u32, all: u32, limit: u32| {
            let limit = u64::from(limit);
            u64::from(own) >= of_one(limit) || u64::from(all) >= of_all(limit)
        };
        if is_full(own.circuits, self.all.circuits, limits.circuits) {
            return Err(Reason::CircuitShare);
        }
        if is_full(own.half_open, self.all.half_open, limits.half_open) {
            return Err(Reason::HalfOpenShare);
        }
        Ok(())
    }

    /// What is left of this many bytes for grants of circuits from there.
    pub(crate) fn left_bytes(&self, origin: Origin, limit: u64) -> u64 {
        let of_one = of_one(limit).saturating_sub(self.own(origin).granted_bytes);
        let of_all = of_all(limit).saturating_sub(self.all.granted_bytes);
        of_one.min(of_all)
    }

    /// What others have been granted of this many bytes beyond their part: the least that every circuit gets.
    pub(crate) fn excess_bytes(&self, limit: u64) -> u64 {
        self.all.granted_bytes.saturating_sub(of_all(limit))
    }

    fn own(&self, origin: Origin) -> Places {
        self.by_origin.get(&origin).copied().unwrap_or_default()
    }

    pub(crate) fn reserve(&mut self, origin: Origin, bytes: u32) {
        self.all.granted_bytes += u64::from(bytes);
        self.by_origin.entry(origin).or_default().granted_bytes += u64::from(bytes);
    }

    pub(crate) fn release(&mut self, origin: Origin, bytes: u32) {
        let less = |places: &mut Places| {
            places.granted_bytes = places.granted_bytes.saturating_sub(u64::from(bytes));
        };
        less(&mut self.all);
        self.by_origin.get_mut(&origin).map(less);
    }

    /// Has what a VM holds that is removed be of the unknown, until its circuits end.
    pub(crate) fn forget(&mut self, vm: LineId) {
        if let Some(places) = self.by_origin.remove(&Origin::Vm(vm)) {
            let unknown = Origin::Outside(Outsider::default());
            self.by_origin.entry(unknown).or_default().add(places);
        }
    }

    pub(crate) fn open(&mut self, origin: Origin) {
        self.all.open();
        self.by_origin.entry(origin).or_default().open();
    }

    pub(crate) fn answer(&mut self, origin: Origin) {
        self.all.answer();
        self.by_origin.entry(origin).or_default().answer();
    }

    pub(crate) fn close(&mut self, origin: Origin) {
        self.all.close();
        let places = self.by_origin.entry(origin).or_default();
        places.close();
        if places.circuits == 0 {
            self.by_origin.remove(&origin);
        }
    }
}
