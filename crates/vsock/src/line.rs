//! A VM's attachment to the switch, as the switch knows it.

use std::collections::VecDeque;
use std::time::Duration;

use policy::{Address, CALLS_AT_ONCE, DomainId, LineId, Policy, RuleSet, Time, TokenBucket};
use thiserror::Error;
use wire::vsock::Header;

use crate::share::{Origin, PREPAID, Shares};
use crate::{Counters, Limits, Reason, Side};

/// Why a line cannot be added.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AddLineError {
    #[error("CID {0} is reserved; a VM's CID is from 3 to 4294967294")]
    ReservedCid(u32),
    #[error("CID {cid} already belongs to VM \"{name}\"")]
    CidTaken { cid: u32, name: String },
    #[error("there is already a VM named \"{0}\"")]
    NameTaken(String),
}

#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) address: Address,
    pub(crate) domain: DomainId,
    /// The VM's VMM has a vsock device of its own, so that there are no rings: see [`Switch::add_hybrid_line`](crate::Switch::add_hybrid_line).
    pub(crate) hybrid: bool,
    /// A hybrid line with no VMM between the guest and us, so that it is known when the guest is there, and it reaches listeners of
    /// the host by us: see [`Switch::add_serial_line`](crate::Switch::add_serial_line).
    pub(crate) serial: bool,
    pub(crate) limits: Limits,
    /// The rules that can match when this guest calls.
    pub(crate) callers: RuleSet,
    /// The rules that can match when this guest is called.
    pub(crate) callees: RuleSet,
    pub(crate) up: bool,
    /// Nothing finds it any more; it is there until its circuits are cut.
    pub(crate) removed: bool,
    /// How often the line has gone down.
    pub(crate) epoch: u32,
    /// The ends of circuits that began in this epoch: each by the circuit's index and its side. Each end knows its place.
    pub(crate) ends: Vec<(u32, Side)>,
    /// The guest's driver takes SEQPACKET (virtio 1.2, section 5.10.3, `VIRTIO_VSOCK_F_SEQPACKET`).
    pub(crate) seqpacket: bool,
    pub(crate) counters: Counters,
    /// Ends of circuits on this line that may have something to send, in turn; each at most once.
    pub(crate) round: VecDeque<Waiting>,
    /// Entries of the round whose end is gone. They are skipped, and swept out before they outnumber the others.
    pub(crate) stale: usize,
    /// Resets for packets without a circuit, at most `Limits::orphan_resets`.
    pub(crate) orphans: VecDeque<Header>,
    pub(crate) circuits: u32,
    pub(crate) half_open: u32,
    /// What of these its callers hold.
    pub(crate) shares: Shares,
    /// What the grants of this line's flows add up to, in bytes.
    pub(crate) granted_bytes: u64,
    /// The next port to give to a host program that dials this guest.
    pub(crate) next_port: u32,
    /// Dials of the guest. A driver that starts anew finds its line's budgets as they were.
    pub(crate) connects: TokenBucket,
    /// Dials of host programs to the guest.
    pub(crate) host_connects: TokenBucket,
    /// Packets without payload from the guest, if they have a limit.
    pub(crate) controls: Option<TokenBucket>,
    /// Such packets that callers of the guest have paid for.
    pub(crate) prepaid: u32,
    /// The end of the last throttle that was counted.
    pub(crate) throttled_until: Time,
}

/// An end in its line's round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiting {
    pub(crate) circuit: crate::CircuitId,
    pub(crate) side: Side,
}

/// The ports that host programs get: above those that Linux gives out by itself at random, so that they are seen to be
/// the host's.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// Packets without payload that may come at once are those of this time. They come in bursts, and of which so many cost the worker some milliseconds.
const CONTROLS_AT_ONCE: Duration = Duration::from_millis(100);

impl Line {
    pub(crate) fn new(address: Address, domain: DomainId, limits: Limits) -> Line {
        Line {
            address,
            domain,
            hybrid: false,
            serial: false,
            limits,
            callers: RuleSet::default(),
            callees: RuleSet::default(),
            up: false,
            removed: false,
            epoch: 0,
            ends: Vec::new(),
            seqpacket: false,
            counters: Counters::default(),
            round: VecDeque::new(),
            stale: 0,
            orphans: VecDeque::new(),
            circuits: 0,
            half_open: 0,
            shares: Shares::default(),
            granted_bytes: 0,
            next_port: FIRST_HOST_PORT,
            connects: TokenBucket::new(limits.connects_per_second.into(), CALLS_AT_ONCE),
            host_connects: TokenBucket::new(limits.host_connects_per_second.into(), CALLS_AT_ONCE),
            controls: (limits.controls_per_second > 0)
                .then(|| TokenBucket::new(limits.controls_per_second.into(), CONTROLS_AT_ONCE)),
            prepaid: 0,
            throttled_until: Time::ZERO,
        }
    }

    /// Finds the rules of a policy that this guest has to do with.
    pub(crate) fn subject_to(&mut self, policy: &Policy) {
        self.callers = policy.callers(&self.address.as_caller());
        self.callees = policy.callees(&self.address.as_callee());
    }

    /// Reserves up to `wanted_bytes` for a flow of a circuit from `origin`. While the line's share lasts, each flow gets at most half of
    /// what is left, so that the last bytes of the share are never gone and every flow gets at least the minimum.
    pub(crate) fn reserve(&mut self, origin: Option<Origin>, wanted_bytes: u32) -> u32 {
        let grant = self.offer(origin, wanted_bytes);
        self.grant(origin, grant.max(self.limits.min_grant_bytes))
    }

    /// Reserves up to `wanted_bytes` more for a flow that has its minimum: once the share is used up, nothing.
    pub(crate) fn reserve_more(&mut self, origin: Option<Origin>, wanted_bytes: u32) -> u32 {
        self.grant(origin, self.offer(origin, wanted_bytes))
    }

    pub(crate) fn grant(&mut self, origin: Option<Origin>, bytes: u32) -> u32 {
        self.granted_bytes += u64::from(bytes);
        if let Some(origin) = origin {
            self.shares.reserve(origin, bytes);
        }
        bytes
    }

    fn offer(&self, origin: Option<Origin>, wanted_bytes: u32) -> u32 {
        let most = self.limits.line_grant_bytes;
        let granted = self
            .granted_bytes
            .saturating_sub(self.shares.excess_bytes(most));
        let left = most.saturating_sub(granted);
        let left = origin.map_or(left, |origin| {
            left.min(self.shares.left_bytes(origin, most))
        });
        wanted_bytes.min(u32::try_from(left / 2).unwrap_or(u32::MAX))
    }

    /// Whether the line has room for another circuit.
    pub(crate) fn admit_circuit(&self, origin: Option<Origin>) -> Result<(), Reason> {
        if self.circuits >= self.limits.circuits {
            return Err(Reason::CircuitLimit);
        }
        if self.half_open >= self.limits.half_open {
            return Err(Reason::HalfOpenLimit);
        }
        origin.map_or(Ok(()), |origin| self.shares.admit(origin, &self.limits))
    }

    /// The guest is sent a call: what it answers is paid for. As many answers are kept paid as calls may be unanswered.
    pub(crate) fn prepay(&mut self) {
        let most = self.limits.half_open.saturating_mul(PREPAID);
        self.prepaid = self.prepaid.saturating_add(PREPAID).min(most);
    }

    /// The guest sent a packet without payload.
    pub(crate) fn charge(&mut self, now: Time) {
        match self.prepaid.checked_sub(1) {
            Some(left) => self.prepaid = left,
            None => {
                if let Some(controls) = &mut self.controls {
                    controls.charge(now, 1);
                }
            }
        }
    }

    pub(crate) fn open_circuit(&mut self, origin: Option<Origin>) {
        self.circuits += 1;
        self.half_open += 1;
        self.counters.circuits_opened += 1;
        if let Some(origin) = origin {
            self.shares.open(origin);
        }
    }

    pub(crate) fn answer_circuit(&mut self, origin: Option<Origin>) {
        self.half_open = self.half_open.saturating_sub(1);
        if let Some(origin) = origin {
            self.shares.answer(origin);
        }
    }

    pub(crate) fn close_circuit(&mut self, origin: Option<Origin>) {
        self.circuits = self.circuits.saturating_sub(1);
        if let Some(origin) = origin {
            self.shares.close(origin);
        }
    }

    pub(crate) fn release(&mut self, origin: Option<Origin>, grant: u32) {
        self.granted_bytes = self.granted_bytes.saturating_sub(u64::from(grant));
        if let Some(origin) = origin {
            self.shares.release(origin, grant);
        }
    }

    /// The next port for a host program. The caller checks that it is free.
    pub(crate) fn take_port(&mut self) -> u32 {
        let port = self.next_port;
        self.next_port = if port >= u32::MAX - 1 {
            FIRST_HOST_PORT
        } else {
            port + 1
        };
        port
    }
}

/// A line, for a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineReport {
    /// Its number.
    pub id: LineId,
    /// The VM.
    pub address: Address,
    /// Whether the guest's driver is running, or what answers at its serial port. Of a hybrid line that is not known, and taken to be so.
    pub up: bool,
    /// Whether the VM's VMM has a vsock device of its own.
    pub hybrid: bool,
    /// What it may use.
    pub limits: Limits,
    /// Circuits, in any state.
    pub circuits: u32,
    /// Circuits of those whose dial has not been answered yet.
    pub half_open: u32,
    /// Credit reserved, in bytes: the most that could be kept of what its guest sends.
    pub granted_bytes: u64,
    /// What has been counted.
    pub counters: Counters,
}
