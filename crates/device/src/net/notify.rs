//! Waiting for something to do, and notifying guests of results.

use std::io;
use std::time::{Duration, Instant};

use super::moderation::Due;
use super::port::{PortRing, is_transmit};
use super::{NetFabric, cost};
use crate::reactor::{EventFlags, Token};
use crate::ring::{Lazily, VAIN_LOOKS};

/// How long a guest may have to wait until it is notified that frames it sent have left, unless it is so many that it may want the
/// descriptors, or so much that its TCP may.
const SENT_DELAY: Duration = Duration::from_micros(100);

/// So many bytes that have left are news at once. Linux gives its card no more of a flow than two of the longest frames, or what the flow sends in a millisecond, until
/// it is notified that they have left ("TCP small queues", `tcp_small_queue_check`).
const SENT_BYTES: usize = 128 << 10;

/// Polls the rings between two polls of the descriptors, when there is nothing else to do.
const LOOKS_AT_RINGS: u32 = 16;

impl NetFabric {
    /// This ring's guest has sent something, or may have.
    pub(super) fn make_ready(&mut self, number: usize, index: usize) {
        let ring = self.ports.get_mut(number).and_then(|port| port.ring(index));
        if ring.is_some_and(|ring| !std::mem::replace(&mut ring.is_ready, true)) {
            self.ready.push_back((number, index));
        }
    }

    /// This ring was empty. As long as we do not sleep its guest need not notify when it no longer is.
    pub(super) fn leave_unarmed(&mut self, number: usize, index: usize) {
        let Some(ring) = self.ports.get_mut(number).and_then(|port| port.ring(index)) else {
            return;
        };
        ring.vain_looks = 0;
        if !std::mem::replace(&mut ring.is_unarmed, true) {
            self.unarmed.push((number, index));
        }
    }

    /// Waits until something happens: looks for a moment if that is likely to be enough, and else sleeps.
    pub(super) fn wait(
        &mut self,
        limit: Option<Duration>,
        happened: &mut Vec<(Token, EventFlags)>,
    ) -> io::Result<()> {
        let is_busy = !self.ready.is_empty();
        if is_busy && self.answering.is_empty() {
            // Those keeping us at work must not keep the others, which were not asked to notify, waiting.
            self.look_at_unarmed();
            self.arm_idle();
            if self.blind_cost < cost::MAX_BLIND {
                return Ok(());
            }
        }
        self.blind_cost = 0;
        if is_busy || !self.answering.is_empty() {
            return self.reactor.wait(Some(Duration::ZERO), happened);
        }
        let look_for = self.spin.patience();
        if !look_for.is_zero() {
            let found = self.look(look_for, happened)?;
            match found {
                Some(after) => {
                    self.arm_idle();
                    self.spin.found(after);
                }
                None => self.spin.missed(),
            }
            if found.is_some() {
                return Ok(());
            }
        }
        if self.arm() {
            return self.reactor.wait(Some(Duration::ZERO), happened);
        }
        let asleep_since = Instant::now();
        self.reactor.wait(self.patience(limit), happened)?;
        if !happened.is_empty() {
            self.spin.slept(asleep_since.elapsed());
        }
        Ok(())
    }

    /// Looks for something to do, for this long. Returns after which time there was something.
    fn look(
        &mut self,
        look_for: Duration,
        happened: &mut Vec<(Token, EventFlags)>,
    ) -> io::Result<Option<Duration>> {
        let start = Instant::now();
        loop {
            self.reactor.wait(Some(Duration::ZERO), happened)?;
            for _ in 0..LOOKS_AT_RINGS {
                let sent = self.look_at_unarmed();
                if sent || !happened.is_empty() {
                    return Ok(Some(start.elapsed()));
                }
                std::hint::spin_loop();
            }
            let elapsed = start.elapsed();
            self.now = self.start.elapsed();
            self.pay_interrupts();
            if elapsed >= look_for {
                return Ok(None);
            }
        }
    }

    /// Asks every guest to notify us of what it sends. Returns whether one has sent something already.
    fn arm(&mut self) -> bool {
        let sent = self.unarmed_rings(|ring| ring.queue().enable_notifications());
        while let Some((number, index)) = self.unarmed.pop() {
            if let Some(ring) = self.ports.get_mut(number).and_then(|port| port.ring(index)) {
                ring.is_unarmed = false;
            }
        }
        sent
    }

    /// Asks guests to notify us that have sent nothing in many turns.
    fn arm_idle(&mut self) {
        let mut position = 0;
        while let Some((number, index)) = self.unarmed.get(position).copied() {
            let ring = self.ports.get_mut(number).and_then(|port| port.ring(index));
            let Some(ring) = ring else {
                self.unarmed.swap_remove(position);
                continue;
            };
            ring.vain_looks += 1;
            if ring.vain_looks < VAIN_LOOKS {
                position += 1;
                continue;
            }
            ring.is_unarmed = false;
            let has_sent = ring.queue().enable_notifications();
            self.unarmed.swap_remove(position);
            if has_sent {
                self.make_ready(number, index);
            }
        }
    }

    /// Looks whether guests that were not asked to notify have sent something. An error is something, too: it is met again when
    /// the ring is drained.
    fn look_at_unarmed(&mut self) -> bool {
        self.unarmed_rings(|ring| ring.queue().pending().unwrap_or(true))
    }

    /// Schedules those of the unarmed rings that have something, and forgets them until they are drained. Returns
    /// whether there is one.
    fn unarmed_rings(&mut self, has_something: impl Fn(&mut PortRing) -> bool) -> bool {
        let before = self.unarmed.len();
        let mut position = 0;
        while let Some((number, index)) = self.unarmed.get(position).copied() {
            let ring = self.ports.get_mut(number).and_then(|port| port.ring(index));
            let Some(ring) = ring else {
                self.unarmed.swap_remove(position);
                continue;
            };
            if !has_something(ring) {
                position += 1;
                continue;
            }
            ring.is_unarmed = false;
            self.unarmed.swap_remove(position);
            self.make_ready(number, index);
        }
        self.unarmed.len() < before
    }

    /// How long this turn may sleep.
    fn patience(&self, limit: Option<Duration>) -> Option<Duration> {
        let now = self.start.elapsed();
        let timers = [self.owed.first(), self.throttled.first()];
        let timers = timers.map(|first| first.map(|(at, ..)| *at));
        let timers = timers.into_iter().chain([self.station_timer]);
        let until_timer = timers.flatten().min();
        let until_timer = until_timer.map(|at| at.saturating_sub(now));
        [until_timer, limit].into_iter().flatten().min()
    }

    /// Shows a guest the frames that it has been given, and interrupts it if it wants to be and was not a moment ago.
    pub(super) fn show_received(&mut self, number: usize, index: usize, frames: u32) {
        let now = self.now;
        let port = &mut self.ports[number];
        let Some(ring) = port.rings.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        ring.moderation.count(frames);
        if !ring.ring.publish_silently() && !ring.moderation.is_pressing() {
            port.counters.interrupts_unwanted += 1;
            return;
        }
        match ring.moderation.want(now) {
            Due::Now => {
                ring.ring.interrupt();
                port.counters.interrupts += 1;
            }
            Due::At(time) => {
                port.counters.interrupts_moderated += 1;
                self.owed.insert((time, number, index));
            }
            Due::Known => port.counters.interrupts_moderated += 1,
        }
    }

    /// Gives a guest back the frames that it has sent. It is interrupted only once a quarter of its ring is back or many bytes have
    /// left, or after a while.
    pub(super) fn show_sent(&mut self, number: usize, index: usize, bytes: usize) {
        let at = self.now + SENT_DELAY;
        let port = &mut self.ports[number];
        let Some(ring) = port.rings.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        ring.sent_bytes += bytes;
        match ring.ring.publish_lazily(ring.sent_bytes >= SENT_BYTES) {
            Lazily::Quiet => {}
            Lazily::Interrupted => {
                ring.sent_bytes = 0;
                port.counters.interrupts += 1;
            }
            Lazily::Due => {
                self.owed.insert((at, number, index));
            }
        }
    }

    /// Polls again the rings of ports that have been throttled long enough.
    pub(super) fn end_throttles(&mut self) {
        while let Some((at, number, index)) = self.throttled.first().copied() {
            if at > self.now {
                break;
            }
            self.throttled.pop_first();
            self.make_ready(number, index);
        }
    }

    /// Sends the interrupts that have been held back long enough.
    pub(super) fn pay_interrupts(&mut self) {
        while let Some((at, number, index)) = self.owed.first().copied() {
            if at > self.now {
                break;
            }
            self.owed.pop_first();
            let Some(port) = self.ports.get_mut(number) else {
                continue;
            };
            let Some(ring) = port.rings.get_mut(index).and_then(Option::as_mut) else {
                continue;
            };
            let paid = if is_transmit(index) {
                ring.ring.has_deadline = false;
                ring.sent_bytes = 0;
                ring.ring.pay_interrupt()
            } else {
                let owed = ring.moderation.expire(self.now);
                if owed {
                    ring.ring.interrupt();
                }
                owed
            };
            port.counters.interrupts += u64::from(paid);
        }
    }
}
