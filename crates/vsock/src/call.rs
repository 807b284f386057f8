//! What is remembered of a call.

use policy::{LineId, RuleId, ServiceId};
use serde::{Deserialize, Serialize};

use crate::event::{CalleeId, HostCaller};

/// The callee meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Destination {
    Line(LineId),
    Service(ServiceId),
    /// What a program of the host has made for this very guest.
    Listener,
    /// A VM whose line has been removed since.
    Departed,
}

/// What is remembered of a call, so that it can be judged again under another policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    /// The host program that called, if one did.
    #[serde(skip)]
    pub(crate) host: Option<HostCaller>,
    pub(crate) dialled: Destination,
    pub(crate) dialled_port: u32,
    /// The callee.
    pub(crate) reached: Destination,
    /// The rule that allowed it.
    pub(crate) rule: Option<RuleId>,
}

impl Call {
    /// Whether this line is called, or was meant to be.
    pub(crate) fn names(&self, line: LineId) -> bool {
        [self.dialled, self.reached].contains(&Destination::Line(line))
    }

    /// A line has been removed: its number may soon be another's.
    pub(crate) fn forget(&mut self, line: LineId) {
        for destination in [&mut self.dialled, &mut self.reached] {
            if *destination == Destination::Line(line) {
                *destination = Destination::Departed;
            }
        }
    }
}

/// What others learn of the callee meant.
pub(crate) fn callee_id(destination: Destination, port: u32) -> Option<CalleeId> {
    match destination {
        Destination::Line(line) => Some(CalleeId::Guest { line, port }),
        Destination::Service(id) => Some(CalleeId::Service(id)),
        Destination::Listener => Some(CalleeId::Listener { port }),
        Destination::Departed => None,
    }
}
