//! What a network knows of a port.

use core::net::Ipv4Addr;
use std::time::Duration;

use policy::{Time, TokenBucket};
use wire::ethernet::MacAddress;

use super::{PortConfig, PortKind, Rates, Refusal, Vlan, VlanId};

/// Frames and bytes that may pass at once are those of this time. Beyond it the port waits.
const SENT_AT_ONCE: Duration = Duration::from_millis(50);
/// The same for what is thrown away beyond its rate: a burst of requests for neighbours comes at once.
const STORM_AT_ONCE: Duration = Duration::from_secs(1);

/// What a port has sent and was sent. Frames that became several or went to several count as often as the field says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames that came from the port, refused ones too.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that were to go to the port. Whether there was room for them is the device's to count.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Of the frames that came, those that were to go to several ports.
    pub flooded_frames: u64,
    /// Of the frames that came, those that went nowhere, by [`Refusal`] as a number.
    pub refused_frames: [u64; Refusal::COUNT],
}

impl Default for PortCounters {
    fn default() -> PortCounters {
        PortCounters {
            received_frames: 0,
            received_bytes: 0,
            sent_frames: 0,
            sent_bytes: 0,
            flooded_frames: 0,
            refused_frames: [0; Refusal::COUNT],
        }
    }
}

impl PortCounters {
    /// Frames that went nowhere for this reason.
    pub fn refused(&self, refusal: Refusal) -> u64 {
        self.refused_frames[refusal as usize]
    }

    /// Frames that went nowhere.
    pub fn refused_total(&self) -> u64 {
        self.refused_frames.iter().sum()
    }
}

/// Which of a port's budgets a frame to several ports is charged to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Storm {
    Broadcast,
    Multicast,
    Unknown,
}

impl Storm {
    pub(super) fn refusal(self) -> Refusal {
        match self {
            Storm::Broadcast => Refusal::BroadcastRate,
            Storm::Multicast => Refusal::MulticastRate,
            Storm::Unknown => Refusal::UnknownRate,
        }
    }
}

/// What every frame from a port or to it needs of it, in one cache line. The rest is in [`Port`].
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(super) struct Gate {
    /// The only address that it may use, as a number, or [`Gate::LEARNS`].
    pub(super) mac: u64,
    pub(super) received_frames: u64,
    pub(super) received_bytes: u64,
    pub(super) sent_frames: u64,
    pub(super) sent_bytes: u64,
    /// The VLAN of an access port, `None` for a trunk.
    pub(super) access: Option<VlanId>,
    /// The only address that a guest may use.
    pub(super) ipv4: Option<Ipv4Addr>,
    pub(super) place: Place,
    pub(super) is_up: bool,
    /// Whether frames and bytes have a rate.
    pub(super) has_rate: bool,
}

impl Gate {
    /// Instead of a port's address where addresses are learned. No frame can have it as its source, which has 48 bits.
    pub(super) const LEARNS: u64 = u64::MAX;

    /// Of a number that is no port's.
    pub(super) const NONE: Gate = Gate {
        mac: Gate::LEARNS,
        received_frames: 0,
        received_bytes: 0,
        sent_frames: 0,
        sent_bytes: 0,
        access: None,
        ipv4: None,
        place: Place {
            kind: PortKind::Guest,
            isolated: true,
        },
        is_up: false,
        has_rate: false,
    };

    /// Of a new port.
    pub(super) fn new(config: &PortConfig) -> Gate {
        let mut gate = Gate {
            is_up: true,
            ..Gate::NONE
        };
        gate.set_config(config);
        gate
    }

    pub(super) fn set_config(&mut self, config: &PortConfig) {
        let rates = config.rates;
        let only = config.mac.filter(|_| !config.learns());
        self.mac = only.map_or(Gate::LEARNS, MacAddress::to_u64);
        self.access = match config.vlan {
            Vlan::Access(vlan) => Some(vlan),
            Vlan::Trunk { .. } => None,
        };
        let has_one = config.kind == PortKind::Guest && !config.learns();
        self.ipv4 = config.ipv4.filter(|_| has_one);
        self.place = Place {
            kind: config.kind,
            isolated: config.isolated,
        };
        self.has_rate = rates.frames_per_second.is_some() || rates.bytes_per_second.is_some();
    }

    #[inline]
    pub(super) fn received(&mut self, frame_len: usize) {
        self.received_frames += 1;
        self.received_bytes += frame_len as u64;
    }

    #[inline]
    pub(super) fn sent(&mut self, frame_len: usize) {
        self.sent_frames += 1;
        self.sent_bytes += frame_len as u64;
    }
}

/// What only some frames need of a port.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) config: PortConfig,
    /// Frames from it that were to go to several ports.
    pub(super) flooded_frames: u64,
    /// Frames from it that went nowhere.
    pub(super) refused_frames: [u64; Refusal::COUNT],
    frames: Option<TokenBucket>,
    bytes: Option<TokenBucket>,
    /// In the order of [`Storm`].
    storms: [TokenBucket; 3],
}

impl Port {
    pub(super) fn new(config: PortConfig) -> Port {
        let (frames, bytes, storms) = budgets(config.rates);
        Port {
            config,
            flooded_frames: 0,
            refused_frames: [0; Refusal::COUNT],
            frames,
            bytes,
            storms,
        }
    }

    /// What was used of a rate stays used, unless it is another one now.
    pub(super) fn set_config(&mut self, config: PortConfig) {
        let (frames, bytes, storms) = budgets(config.rates);
        self.config = config;
        for (old, new) in [(&mut self.frames, frames), (&mut self.bytes, bytes)] {
            *old = new.map(|new| new.replacing(old.take()));
        }
        for (old, new) in self.storms.iter_mut().zip(storms) {
            *old = new.replacing(Some(old.clone()));
        }
    }

    /// Charges a frame, whatever becomes of it.
    pub(super) fn charge(&mut self, now: Time, frame_len: usize) {
        if let Some(frames) = &mut self.frames {
            frames.charge(now, 1);
        }
        if let Some(bytes) = &mut self.bytes {
            bytes.charge(now, frame_len as u64);
        }
    }

    /// Takes from the budget for what goes to many ports: a frame that is to be cut counts as often as there will be frames of it.
    pub(super) fn take(&mut self, now: Time, storm: Storm, frames: u32) -> Result<(), Refusal> {
        match self.storms[storm as usize].take_many(now, frames.into()) {
            true => Ok(()),
            false => Err(storm.refusal()),
        }
    }

    pub(super) fn throttled_until(&self, now: Time) -> Option<Time> {
        let frames = self
            .frames
            .as_ref()
            .and_then(|frames| frames.in_debt_until(now));
        let bytes = self
            .bytes
            .as_ref()
            .and_then(|bytes| bytes.in_debt_until(now));
        frames.max(bytes)
    }

    pub(super) fn counters(&self, gate: &Gate) -> PortCounters {
        PortCounters {
            received_frames: gate.received_frames,
            received_bytes: gate.received_bytes,
            sent_frames: gate.sent_frames,
            sent_bytes: gate.sent_bytes,
            flooded_frames: self.flooded_frames,
            refused_frames: self.refused_frames,
        }
    }
}

/// Full budgets for frames, bytes, and what goes to many ports.
fn budgets(rates: Rates) -> (Option<TokenBucket>, Option<TokenBucket>, [TokenBucket; 3]) {
    let sent = |rate| TokenBucket::new(rate, SENT_AT_ONCE);
    let storms = [
        rates.broadcasts_per_second,
        rates.multicasts_per_second,
        rates.unknown_per_second,
    ];
    (
        rates.frames_per_second.map(u64::from).map(sent),
        rates.bytes_per_second.map(sent),
        storms.map(|rate| TokenBucket::new(rate.into(), STORM_AT_ONCE)),
    )
}

/// What decides which ports a port reaches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) kind: PortKind,
    pub(super) isolated: bool,
}

/// Whether frames go from one port to another at all.
#[inline]
pub(super) fn reaches(from: Place, to: Place) -> Result<(), Refusal> {
    match (from.kind, to.kind) {
        (PortKind::Uplink, PortKind::Uplink) => Err(Refusal::Transit),
        (PortKind::Guest, PortKind::Guest) if from.isolated || to.isolated => {
            Err(Refusal::Isolated)
        }
        _ => Ok(()),
    }
}
