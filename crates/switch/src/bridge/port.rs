//! What a network knows of a port.

use std::time::Duration;

use super::{PortConfig, PortKind, Rates, Refusal};
use crate::Time;
use crate::rate::{Bucket, Meter};

/// Who has been quiet for so long may send at once what passes in this time, beyond which it waits.
const DEPTH: Duration = Duration::from_millis(50);
/// The same for what is thrown away beyond its rate: a burst of requests for neighbours comes at once.
const STORM_DEPTH: Duration = Duration::from_secs(1);

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

#[derive(Debug)]
pub(super) struct Port {
    pub(super) config: PortConfig,
    pub(super) is_up: bool,
    pub(super) counters: PortCounters,
    frames: Option<Bucket>,
    bytes: Option<Meter>,
    storms: [Bucket; 3],
}

impl Port {
    pub(super) fn new(config: PortConfig) -> Port {
        let mut port = Port {
            is_up: true,
            counters: PortCounters::default(),
            frames: None,
            bytes: None,
            storms: [0; 3].map(|none| Bucket::new(none, STORM_DEPTH)),
            config,
        };
        port.set_rates();
        port
    }

    pub(super) fn set_config(&mut self, config: PortConfig) {
        let same_rates = self.config.rates == config.rates;
        self.config = config;
        // What was used up stays so, unless there is another rate.
        if !same_rates {
            self.set_rates();
        }
    }

    fn set_rates(&mut self) {
        let Rates {
            frames_per_second,
            bytes_per_second,
            broadcasts_per_second,
            multicasts_per_second,
            unknown_per_second,
        } = self.config.rates;
        self.frames = frames_per_second.map(|rate| Bucket::new(rate, DEPTH));
        self.bytes = bytes_per_second.map(|rate| Meter::new(rate, DEPTH));
        self.storms = [
            broadcasts_per_second,
            multicasts_per_second,
            unknown_per_second,
        ]
        .map(|rate| Bucket::new(rate, STORM_DEPTH));
    }

    /// Charges a frame, whatever becomes of it.
    #[inline]
    pub(super) fn charge(&mut self, now: Time, frame_len: usize) {
        self.counters.received_frames += 1;
        self.counters.received_bytes += frame_len as u64;
        if let Some(frames) = &mut self.frames {
            frames.charge(now);
        }
        if let Some(bytes) = &mut self.bytes {
            bytes.charge(now, u32::try_from(frame_len).unwrap_or(u32::MAX));
        }
    }

    pub(super) fn take(&mut self, now: Time, storm: Storm) -> Result<(), Refusal> {
        match self.storms[storm as usize].take(now) {
            true => Ok(()),
            false => Err(storm.refusal()),
        }
    }

    pub(super) fn rests_until(&self, now: Time) -> Option<Time> {
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

    #[inline]
    pub(super) fn sent(&mut self, frame_len: usize) {
        self.counters.sent_frames += 1;
        self.counters.sent_bytes += frame_len as u64;
    }
}

/// What decides which ports a port reaches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    kind: PortKind,
    isolated: bool,
}

impl PortConfig {
    pub(super) fn place(&self) -> Place {
        Place {
            kind: self.kind,
            isolated: self.isolated,
        }
    }
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
