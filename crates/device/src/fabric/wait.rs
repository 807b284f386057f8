//! Waiting for something to do, and notifying guests of results.

use std::io;
use std::time::{Duration, Instant};

use policy::LineId;
use rustix::time::{ClockId, clock_gettime};

use super::Fabric;
use crate::reactor::{EventFlags, Token};
use crate::ring::{Lazily, Ring, VAIN_LOOKS};
use crate::vsock::TX;

/// How long a guest may have to wait until it is notified that packets it sent have left, unless it is so many that it may want the
/// descriptors.
const INTERRUPT_DELAY: Duration = Duration::from_millis(1);

impl Fabric {
    /// Waits until something happens: looks for a moment if that is likely to be enough, and else sleeps.
    pub(super) fn wait(
        &mut self,
        limit: Option<Duration>,
        happened: &mut Vec<(Token, EventFlags)>,
    ) -> io::Result<()> {
        if self.patience(limit) == Some(Duration::ZERO) {
            // Guests that were not asked to notify must not wait until those keeping us at work fall silent.
            self.look_at_unarmed();
            self.arm_idle();
            return self.reactor.wait(Some(Duration::ZERO), happened);
        }
        let look_for = self.spin.patience();
        if !look_for.is_zero() && self.nap_and_look(look_for, happened)? {
            return Ok(());
        }
        if self.arm() {
            return self.reactor.wait(Some(Duration::ZERO), happened);
        }
        let patience = self.patience(limit);
        let asleep_since = Instant::now();
        self.reactor.wait(patience, happened)?;
        if !happened.is_empty() {
            self.spin.slept(asleep_since.elapsed());
        }
        Ok(())
    }

    /// Naps if that is due, and looks for something to do for this long. Returns whether there was something.
    fn nap_and_look(
        &mut self,
        look_for: Duration,
        happened: &mut Vec<(Token, EventFlags)>,
    ) -> io::Result<bool> {
        let mut look_from = Instant::now();
        // Other guests that were not asked to notify must not wait for the end of a nap.
        if self.nap.is_due(look_from, processor_time) && self.unarmed.len() <= 1 {
            self.nap.take(&self.reactor)?;
            look_from = Instant::now();
        }
        let found = self.look(look_from, look_for, happened)?;
        match found {
            Some(after) => {
                self.arm_idle();
                self.spin.found(after);
            }
            None => self.spin.missed(),
        }
        Ok(found.is_some())
    }

    /// Looks for something to do, for this long from `start` on. Returns after which time there was something.
    fn look(
        &mut self,
        start: Instant,
        look_for: Duration,
        happened: &mut Vec<(Token, EventFlags)>,
    ) -> io::Result<Option<Duration>> {
        loop {
            self.reactor.wait(Some(Duration::ZERO), happened)?;
            let sent = self.look_at_unarmed();
            let elapsed = start.elapsed();
            if sent || !happened.is_empty() {
                return Ok(Some(elapsed));
            }
            if elapsed >= look_for {
                return Ok(None);
            }
            std::hint::spin_loop();
        }
    }

    /// Asks every guest to notify us of what it sends. Returns whether one has sent something already.
    fn arm(&mut self) -> bool {
        let sent = self.unarmed_lines(|ring| ring.queue.enable_notifications());
        while let Some(id) = self.unarmed.pop() {
            if let Some(line) = self.line(id) {
                line.unarmed = false;
            }
        }
        sent
    }

    /// Asks guests to notify us that have sent nothing in many turns.
    fn arm_idle(&mut self) {
        let mut position = 0;
        while let Some(id) = self.unarmed.get(position).copied() {
            let Some(line) = self.line(id) else {
                self.unarmed.swap_remove(position);
                continue;
            };
            line.vain_looks += 1;
            if line.vain_looks < VAIN_LOOKS {
                position += 1;
                continue;
            }
            line.unarmed = false;
            let ring = line.rings[TX].as_mut();
            let has_sent = ring.is_some_and(|ring| ring.queue.enable_notifications());
            self.unarmed.swap_remove(position);
            if has_sent {
                self.schedule_drain(id);
            }
        }
    }

    /// Looks whether guests that were not asked to notify have sent something. An error is something, too: it is met again when
    /// the ring is drained.
    fn look_at_unarmed(&mut self) -> bool {
        self.unarmed_lines(|ring| ring.queue.pending().unwrap_or(true))
    }

    /// Schedules those of the unarmed lines whose ring has something, and forgets them until they are drained. Returns
    /// whether there is one.
    fn unarmed_lines(&mut self, has_something: impl Fn(&mut Ring) -> bool) -> bool {
        let before = self.unarmed.len();
        let mut position = 0;
        while let Some(id) = self.unarmed.get(position).copied() {
            let Some(line) = self.line(id) else {
                self.unarmed.swap_remove(position);
                continue;
            };
            if !line.rings[TX].as_mut().is_some_and(&has_something) {
                position += 1;
                continue;
            }
            line.unarmed = false;
            self.unarmed.swap_remove(position);
            self.schedule_drain(id);
        }
        self.unarmed.len() < before
    }

    /// This guest's ring was empty. As long as we do not sleep it need not notify when it no longer is.
    pub(super) fn leave_unarmed(&mut self, id: LineId) {
        let Some(line) = self.line(id) else { return };
        line.vain_looks = 0;
        if !std::mem::replace(&mut line.unarmed, true) {
            self.unarmed.push(id);
        }
    }

    /// How long this turn may wait.
    fn patience(&self, limit: Option<Duration>) -> Option<Duration> {
        if !self.woken.is_empty()
            || !self.draining.is_empty()
            || !self.passing.is_empty()
            || !self.to_be_cut.is_empty()
        {
            return Some(Duration::ZERO);
        }
        let timers = [
            self.switch.poll_at(),
            self.caller_deadlines.front().map(|(at, _)| *at),
            self.redials.next_at(),
            self.remainders.first().map(|(at, _)| *at),
            self.resting_listeners.front().map(|(at, ..)| *at),
            self.throttled_lines.first().map(|(at, _)| *at),
            self.owed_interrupts.front().map(|(at, _)| *at),
            self.look_at_stopped_at,
            self.hybrid_retries.front().map(|(at, _)| *at),
        ];
        let now = self.start.elapsed();
        let until_timer = timers
            .into_iter()
            .flatten()
            .min()
            .map(|at| at.saturating_sub(now));
        [until_timer, limit].into_iter().flatten().min()
    }

    /// Shows the guests what they have been given, and interrupts those that want to know.
    pub(super) fn publish(&mut self) {
        self.commit();
        let mut touched = std::mem::take(&mut self.touched);
        for (id, index) in touched.drain(..) {
            let Some(ring) = self.line(id).and_then(|line| line.rings[index].as_mut()) else {
                continue;
            };
            if index != TX {
                ring.publish();
            } else if ring.publish_lazily(false) == Lazily::Due {
                self.owed_interrupts
                    .push_back((self.now + INTERRUPT_DELAY, id));
            }
        }
        self.touched = touched;
    }

    /// Sends the interrupts that have been held back long enough.
    pub(super) fn pay_interrupts(&mut self) {
        while let Some((at, id)) = self.owed_interrupts.front().copied() {
            if at > self.now {
                break;
            }
            self.owed_interrupts.pop_front();
            if let Some(ring) = self.line(id).and_then(|line| line.rings[TX].as_mut()) {
                ring.has_deadline = false;
                ring.pay_interrupt();
            }
        }
    }
}

/// What this thread has had of its processor so far.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
