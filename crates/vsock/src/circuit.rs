//! A circuit: two ends and the flows between them.

use policy::{LineId, RuleId, Time};
use serde::{Deserialize, Serialize};
use wire::vsock::SocketType;

use crate::call::{Call, callee_id};
use crate::end::{End, Party};
use crate::flow::Flow;
use crate::share::Origin;
use crate::{CalleeId, CircuitId, Reason, Side};

/// How far a circuit has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CircuitState {
    /// The callee has yet to answer.
    Dialling,
    /// Both ends know each other.
    Open,
    /// At least one end is gone.
    Closing,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Circuit {
    pub(crate) id: CircuitId,
    pub(crate) socket_type: SocketType,
    /// One way or the other.
    pub(crate) answered: bool,
    /// The callee has accepted, and that was announced.
    pub(crate) put_through: bool,
    pub(crate) ends: [End; 2],
    /// By the side that sends.
    pub(crate) flows: [Flow; 2],
    pub(crate) call: Call,
    /// Whose share of the called VM's limits it takes, unless the VM's host called.
    pub(crate) origin: Option<Origin>,
    /// Where it stands among those of which nothing passes until their rule's share of time has come.
    #[serde(skip)]
    pub(crate) throttled: Option<Throttle>,
    pub(crate) deadline: Option<Deadline>,
    /// It has ended in order at sockets of the host's, whose peers have yet to take what is left in them: until [`Event::Taken`](crate::Event::Taken) it keeps its
    /// places.
    #[serde(skip)]
    pub(crate) untaken: bool,
    #[serde(skip)]
    pub(crate) opened_at: Time,
    /// Bytes that have reached the other side, by the side that sent them.
    pub(crate) passed: [u64; 2],
    /// Those of them that its rule's figures have in them already.
    #[serde(skip)]
    pub(crate) accounted: [u64; 2],
    /// Why it was cut short, if it was: what the log and the host program get.
    pub(crate) reason: Option<Reason>,
}

/// What a successor has to know of a circuit that it resets: its ends, and if they know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    parties: [Party; 2],
    gone: [bool; 2],
    /// The callee's guest has yet to hear of the call.
    is_unannounced: bool,
    answered: bool,
}

/// Until when a circuit is throttled, and after how many others that were throttled before. So those that have waited go first when
/// several may go on at one moment.
pub(crate) type Throttle = (Time, u64);

/// What a circuit waits for, one thing at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Deadline {
    #[serde(skip)]
    pub(crate) at: Time,
    pub(crate) kind: DeadlineKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DeadlineKind {
    /// The callee's answer.
    Handshake,
    /// The guest's confirmation that the circuit is over.
    Linger,
    /// A receiver's answer to the question what it has consumed.
    CreditPoll,
}

impl Circuit {
    pub(crate) fn end(&self, side: Side) -> &End {
        &self.ends[side.index()]
    }

    pub(crate) fn end_mut(&mut self, side: Side) -> &mut End {
        &mut self.ends[side.index()]
    }

    /// Whose share of the limits at `side` it takes.
    pub(crate) fn origin_at(&self, side: Side) -> Option<Origin> {
        self.origin.filter(|_| side == Side::Callee)
    }

    /// The flow that `side` sends.
    pub(crate) fn flow_from(&mut self, side: Side) -> &mut Flow {
        &mut self.flows[side.index()]
    }

    /// The flow that `side` receives.
    pub(crate) fn flow_to(&mut self, side: Side) -> &mut Flow {
        &mut self.flows[side.other().index()]
    }

    /// Whether new room should be announced to `side` for what it sends.
    pub(crate) fn starves(&self, side: Side) -> bool {
        // Its own buffer is what it announces for the other direction.
        let buffer = match self.end(side).is_host() {
            true => u32::MAX,
            false => self.flows[side.other().index()].window(),
        };
        self.flows[side.index()].update_is_due(buffer)
    }

    /// Bytes that its rule's figures do not contain yet, by the side that sent them.
    pub(crate) fn unaccounted(&self) -> [u64; 2] {
        [0, 1].map(|side| self.passed[side] - self.accounted[side])
    }

    /// How it stands, if it ends with this process since an end is at the host.
    pub(crate) fn standing(&self) -> Option<Standing> {
        self.host_side()?;
        let [caller, callee] = &self.ends;
        Some(Standing {
            parties: [caller.party, callee.party],
            gone: [caller.gone, callee.gone],
            is_unannounced: callee.outbox.request,
            answered: self.answered,
        })
    }

    /// The side where a program of the host is, if there is one.
    pub(crate) fn host_side(&self) -> Option<Side> {
        [Side::Caller, Side::Callee]
            .into_iter()
            .find(|side| self.end(*side).is_host())
    }

    /// Whether both ends are sockets of the host's, so that no byte of it passes by a guest's ring.
    pub(crate) fn is_relayed(&self) -> bool {
        self.ends.iter().all(End::is_host)
    }

    pub(crate) fn report(&self) -> CircuitReport {
        let report = |side: Side| {
            let end = self.end(side);
            EndReport {
                line: end.owner(),
                cid: end.cid(),
                port: end.port,
                passed_bytes: self.passed[side.index()],
                kept_bytes: self.flows[side.index()].kept(),
                credit_bytes: self.flows[side.other().index()].credit(),
            }
        };
        CircuitReport {
            id: self.id,
            socket_type: self.socket_type,
            state: self.state(),
            opened_at: self.opened_at,
            is_cut_short: self.reason.is_some(),
            rule: self.call.rule,
            dialled: callee_id(self.call.dialled, self.call.dialled_port),
            reached: callee_id(self.call.reached, self.end(Side::Callee).port),
            caller: report(Side::Caller),
            callee: report(Side::Callee),
        }
    }

    pub(crate) fn state(&self) -> CircuitState {
        if self.ends[0].gone || self.ends[1].gone {
            CircuitState::Closing
        } else if self.answered {
            CircuitState::Open
        } else {
            CircuitState::Dialling
        }
    }
}

/// One end of a circuit, for a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndReport {
    /// The guest's line; none for a program on the host.
    pub line: Option<LineId>,
    /// Context identifier; 2 for the host.
    pub cid: u32,
    /// Port.
    pub port: u32,
    /// Bytes of this end's that have reached the other.
    pub passed_bytes: u64,
    /// Bytes in our keeping that this end has sent.
    pub kept_bytes: u32,
    /// Bytes this end may still be sent before it must make room.
    pub credit_bytes: u32,
}

/// A circuit that was put through and is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedCircuit {
    /// How it stood at its end.
    pub circuit: CircuitReport,
    /// Why it was cut short, if it was.
    pub reason: Option<Reason>,
}

/// A circuit, for a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CircuitReport {
    /// Its number.
    pub id: CircuitId,
    /// Its type.
    pub socket_type: SocketType,
    /// How far it has come.
    pub state: CircuitState,
    /// When it was set up.
    pub opened_at: Time,
    /// Whether it has been cut short, so that its ends have only to hear of it.
    pub is_cut_short: bool,
    /// The rule that allows it, of the policy in force; without one, what holds without a rule, or nothing any more.
    pub rule: Option<RuleId>,
    /// The callee meant, unless that VM has gone since.
    pub dialled: Option<CalleeId>,
    /// The callee, which a redirection may change.
    pub reached: Option<CalleeId>,
    /// The side that dialled.
    pub caller: EndReport,
    /// The side that was dialled.
    pub callee: EndReport,
}
