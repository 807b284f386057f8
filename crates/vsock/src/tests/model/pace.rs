//! How often each line does what its limits bound, counted where the model does it.

use std::time::Duration;

use policy::{LineId, Time};
use wire::vsock::{Header, Operation};

use super::log::{Input, Output};
use super::world::World;
use crate::Limits;

/// A device takes so many packets before it looks again whether the guest is to be heard.
pub(super) const BATCH: usize = 256;

/// What may still happen at this moment, as the time in which it comes back.
#[derive(Debug, Clone, Copy)]
struct Level {
    /// Below zero by what has happened beyond the limit.
    nanos: i128,
    most: i128,
    /// What one use takes.
    interval: i128,
    at: Time,
}

impl Level {
    fn new(now: Time, per_second: u32, depth: Duration) -> Level {
        let most = depth.as_nanos() as i128;
        let interval = 1_000_000_000_i128.checked_div(i128::from(per_second));
        Level {
            nanos: most,
            most,
            interval: interval.unwrap_or(i128::MAX / 2),
            at: now,
        }
    }

    fn take(&mut self, now: Time) {
        let elapsed = (now - self.at).as_nanos() as i128;
        self.nanos = (self.nanos + elapsed).min(self.most) - self.interval;
        self.at = now;
    }

    /// How many uses there were too many.
    fn debt(&self) -> i128 {
        ((-self.nanos).max(0) + self.interval - 1) / self.interval
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Pace {
    controls: Option<Level>,
    /// Packets that calls have paid for, and the most of them that are kept.
    prepaid: (u32, u32),
    dials: Level,
    host_dials: Level,
}

impl Pace {
    pub(crate) fn new(now: Time, limits: &Limits) -> Pace {
        let second = Duration::from_secs(1);
        let controls = limits.controls_per_second;
        Pace {
            controls: (controls > 0).then(|| Level::new(now, controls, second / 10)),
            prepaid: (0, limits.half_open.saturating_mul(2)),
            dials: Level::new(now, limits.connects_per_second, second),
            host_dials: Level::new(now, limits.host_connects_per_second, second),
        }
    }

    /// The guest sent a packet.
    pub(crate) fn sent(&mut self, now: Time, header: &Header) {
        let payload = header.operation == Operation::Data as u16 && header.len > 0;
        if payload {
            return;
        }
        if self.prepaid.0 > 0 {
            self.prepaid.0 -= 1;
            return;
        }
        if let Some(level) = self.controls.as_mut() {
            level.take(now);
            assert!(level.debt() <= BATCH as i128, "it says too much: {level:?}");
        }
    }

    /// The guest is sent a packet.
    pub(crate) fn is_sent(&mut self, header: &Header) {
        if header.operation == Operation::Request as u16 {
            self.prepaid.0 = (self.prepaid.0 + 2).min(self.prepaid.1);
        }
    }

    /// A dial of the guest became a circuit.
    pub(crate) fn dialled(&mut self, now: Time) {
        self.dials.take(now);
        assert_eq!(self.dials.debt(), 0, "it dials too often");
    }

    /// A dial of a host program became a circuit.
    pub(crate) fn was_dialled(&mut self, now: Time) {
        self.host_dials.take(now);
        assert_eq!(self.host_dials.debt(), 0, "it is dialled too often");
    }
}

impl World {
    pub(crate) fn pace(&mut self, line: LineId) -> &mut Pace {
        self.paces.get_mut(&line).expect("the line was added")
    }

    /// Whether the device may take packets of this guest now.
    pub(crate) fn is_heard(&mut self, line: LineId) -> bool {
        let throttle = self.switch.throttled_until(self.now, line);
        self.log.record(
            Input::Throttle(self.now, line),
            Output::Throttle(throttle),
            &[],
        );
        throttle.is_none()
    }

    /// When this guest is heard again, if it has something to say and is not heard now.
    pub(super) fn throttle_ends(&self, line: LineId) -> Option<Time> {
        let waits = self.guests.get(&line).is_some_and(|guest| {
            let hindered = guest.paused || !guest.up;
            !hindered && !guest.tx.is_empty()
        });
        let line = self.switch.lines.get(line.0 as usize)?;
        let controls = line.controls.as_ref()?;
        controls.in_debt_until(self.now).filter(|_| waits)
    }
}
