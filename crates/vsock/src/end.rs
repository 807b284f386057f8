//! One end of a circuit, and what is still to be sent to a guest there.

use std::hash::{Hash, Hasher};

use policy::LineId;
use serde::{Deserialize, Serialize};

/// By what a guest's packet is matched to its circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EndKey {
    pub(crate) line: LineId,
    pub(crate) port: u32,
    pub(crate) peer_cid: u32,
    pub(crate) peer_port: u32,
}

/// In one piece: each packet is looked up, and SipHash takes four numbers one by one at twice the price.
impl Hash for EndKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let near = u64::from(self.line.0) << 32 | u64::from(self.port);
        let far = u64::from(self.peer_cid) << 32 | u64::from(self.peer_port);
        state.write_u128(u128::from(near) << 64 | u128::from(far));
    }
}

/// The end's party.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Party {
    /// A guest on this line, with this context identifier.
    Guest { line: LineId, cid: u32 },
    /// A program on the host.
    Host,
    /// A guest whose VMM has a vsock device of its own: to us it is a socket of the host's, but its calls are judged and
    /// counted as those of the VM on this line.
    Hybrid { line: LineId, cid: u32 },
    /// A guest whose line has been removed while the last bytes it sent were still being delivered.
    Departed { cid: u32 },
}

impl Party {
    /// A VM at an end.
    pub(crate) fn of_vm(line: LineId, cid: u32, hybrid: bool) -> Party {
        match hybrid {
            true => Party::Hybrid { line, cid },
            false => Party::Guest { line, cid },
        }
    }

    pub(crate) fn cid(self) -> u32 {
        match self {
            Party::Guest { cid, .. } | Party::Hybrid { cid, .. } | Party::Departed { cid } => cid,
            Party::Host => wire::vsock::HOST_CID,
        }
    }
}

/// An end of a circuit.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct End {
    pub(crate) party: Party,
    pub(crate) port: u32,
    /// The context identifier and the port by which the other end knows this one. They differ from its own when it is of another
    /// domain, or when the call was meant for another one.
    pub(crate) seen: (u32, u32),
    /// Nothing comes from or goes to this end any more.
    pub(crate) gone: bool,
    /// Shutdown flags that the guest has sent.
    pub(crate) heard: u32,
    /// Shutdown flags that the guest has been sent.
    pub(crate) announced: u32,
    /// The guest has asked for an announcement of room that it has not had yet.
    pub(crate) wants_credit: bool,
    pub(crate) outbox: Outbox,
    /// The epoch of its line in which it began. In another one it is lost: see [`cuts`](crate::cuts).
    pub(crate) epoch: u32,
    /// Where it is in its line's list of ends, in that epoch.
    #[serde(skip)]
    pub(crate) place: u32,
    /// Waiting in its line's round.
    #[serde(skip)]
    pub(crate) queued: bool,
    /// The host program's socket may have something to read.
    #[serde(skip)]
    pub(crate) readable: bool,
}

/// What is to be sent to a guest, as flags: each at most once, in a fixed order, with numbers taken when it is sent.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Outbox {
    pub(crate) request: bool,
    pub(crate) response: bool,
    pub(crate) credit_update: bool,
    pub(crate) credit_request: bool,
    /// Shutdown flags to send.
    pub(crate) shutdown: u32,
    pub(crate) reset: bool,
}

impl End {
    pub(crate) fn new(party: Party, port: u32) -> End {
        End {
            party,
            port,
            seen: (party.cid(), port),
            gone: false,
            heard: 0,
            announced: 0,
            wants_credit: false,
            outbox: Outbox::default(),
            epoch: 0,
            place: 0,
            queued: false,
            readable: false,
        }
    }

    /// Whether bytes enter and leave here by a socket of the host's.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.party, Party::Host | Party::Hybrid { .. })
    }

    /// Its own context identifier.
    pub(crate) fn cid(&self) -> u32 {
        self.party.cid()
    }

    /// The line whose rings carry this end's packets.
    pub(crate) fn line(&self) -> Option<LineId> {
        match self.party {
            Party::Guest { line, .. } => Some(line),
            Party::Host | Party::Hybrid { .. } | Party::Departed { .. } => None,
        }
    }

    /// The line of the VM at this end, whatever carries its bytes: whose limits and counters the circuit is part of.
    pub(crate) fn owner(&self) -> Option<LineId> {
        match self.party {
            Party::Guest { line, .. } | Party::Hybrid { line, .. } => Some(line),
            Party::Host | Party::Departed { .. } => None,
        }
    }
}
