//! What would go on if the daemon ended now, and how it is asked to.

use std::collections::BTreeMap;

use api::{Formats, HandOver, LineKind};
use device::{CircuitProspect, LineProspect};

use super::Control;
use crate::control_error::ControlError;

impl Control {
    /// What would go on if the daemon ended now, and another one followed. Waits for the worker.
    pub fn hand_over_prospect(&self) -> HandOver {
        let in_force = self.in_force();
        let prospects = self.parts.worker.prospects();
        let (mut lines, mut other_lines) = (Vec::new(), BTreeMap::new());
        for spec in in_force.book.plan.lines() {
            let name = spec.full_name();
            let prospect = prospects.lines.get(&name);
            if let Some(reason) = in_force.vm_unavailable(&name) {
                other_lines.insert(name, format!("it is not served: {reason}"));
                continue;
            }
            let fate = match (LineKind::from(&spec.vmm), prospect) {
                (LineKind::Hybrid | LineKind::Serial, _) => "its VMM connects again",
                (LineKind::Vsock, Some(LineProspect::GoesOn)) => {
                    lines.push(name);
                    continue;
                }
                (LineKind::Vsock, Some(LineProspect::Detached) | None) => {
                    "no VMM is connected: one that connects is served"
                }
                (LineKind::Vsock, Some(LineProspect::Unseen)) => {
                    "its memory is probably not shared, so that nothing of its guest is seen: its VMM's connection goes on"
                }
                (LineKind::Vsock, Some(LineProspect::NoRings)) => {
                    "its guest runs no rings: its VMM's connection goes on"
                }
            };
            other_lines.insert(name, fate.to_owned());
        }
        let mut reset = BTreeMap::new();
        let mut circuits = 0;
        for (prospect, count) in prospects.circuits {
            let why = match prospect {
                CircuitProspect::GoesOn => {
                    circuits += count;
                    continue;
                }
                CircuitProspect::HostEnd => "with the host",
                CircuitProspect::LineEnds => "of a line that does not go on",
                CircuitProspect::Stored => "of which bytes are stored, as a receiver does not read",
            };
            reset.insert(why.to_owned(), count);
        }
        HandOver {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            keeper: self.has_keeper(),
            hindrance: self.has_way().err().map(|error| error.to_string()),
            formats: formats(),
            lines,
            other_lines,
            circuits,
            reset,
        }
    }

    /// Has the daemon end, and leave everything to the next one. Waits for the keeper.
    ///
    /// # Errors
    /// [`ControlError::NoKeeper`] or [`ControlError::Keeper`]: its end would cut VMs off.
    pub fn hand_over(&self) -> Result<(), ControlError> {
        self.has_way()?;
        self.hands_over.notify_one();
        Ok(())
    }

    fn has_way(&self) -> Result<(), ControlError> {
        let keeper = self.parts.keeper.as_ref();
        Ok(keeper.ok_or(ControlError::NoKeeper)?.ask()?)
    }

    /// Whether a keeper lives that has what the next daemon goes on with.
    pub fn has_keeper(&self) -> bool {
        let keeper = self.parts.keeper.as_ref();
        keeper.is_some_and(|keeper| keeper.lives())
    }

    /// Whether the daemon was started with a keeper, and that has ended.
    pub fn has_lost_keeper(&self) -> bool {
        self.parts.keeper.is_some() && !self.has_keeper()
    }

    /// Waits until the daemon is to hand over.
    pub async fn is_to_hand_over(&self) {
        self.hands_over.notified().await;
    }
}

/// What a daemon of this program keeps for the next one.
pub fn formats() -> Formats {
    let formats = device::FORMATS.iter();
    formats
        .map(|(name, versions)| ((*name).to_owned(), versions.to_vec()))
        .collect()
}
