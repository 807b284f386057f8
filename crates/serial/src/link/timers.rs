//! When a link has to be polled although nothing happens.
//!
//! A session in which all is acknowledged has no timer: an idle link never wakes up.

use std::time::{Duration, Instant};

/// The wait between hellos that are not answered, at first and at most.
const GREETING: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(60));

/// The wait before a probe, and between probes that are not answered: at first and at most.
const PROBING: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// The wait between probes from which on the peer counts as silent: some seconds without an answer.
const SILENT_FROM: Duration = Duration::from_secs(4);

/// How long nothing arrives of a frame before it is looked whether others arrived behind it.
pub(super) const STALLED_AFTER: Duration = Duration::from_millis(200);

/// How long a peer is not spoken to that broke the protocol: the first time, and at most.
const MUTE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// A peer that kept to the protocol for so long is treated as if it always had.
const FORGIVEN_AFTER: Duration = Duration::from_secs(60);

/// How often the speaker is asked for, if not the peer.
const BETWEEN_STRANGERS: Duration = Duration::from_millis(500);

/// The times, each of them if it is awaited.
#[derive(Debug, Default)]
pub(super) struct Timers {
    pub(super) greet: Option<Instant>,
    pub(super) acknowledge: Option<Instant>,
    pub(super) probe: Option<Instant>,
    pub(super) stalled: Option<Instant>,
    pub(super) lost: Option<Instant>,
    pub(super) muted: Option<Instant>,
    greeting_wait: Duration,
    probe_wait: Duration,
    mute_wait: Duration,
    last_mute: Option<Instant>,
    last_stranger: Option<Instant>,
}

impl Timers {
    pub(super) fn next(&self) -> Option<Instant> {
        let all = [
            self.greet,
            self.acknowledge,
            self.probe,
            self.stalled,
            self.lost,
            self.muted,
        ];
        all.into_iter().flatten().min()
    }

    pub(super) fn start_greeting(&mut self, now: Instant) {
        self.greeting_wait = GREETING.0;
        self.greet = Some(now + self.greeting_wait);
    }

    pub(super) fn greet_again(&mut self, now: Instant) {
        self.greeting_wait = (self.greeting_wait * 2).clamp(GREETING.0, GREETING.1);
        self.greet = Some(now + self.greeting_wait);
    }

    /// Something was sent: ask for it after a while, unless that is already planned.
    pub(super) fn arm_probe(&mut self, now: Instant) {
        if self.probe.is_none() {
            self.restart_probe(now);
        }
    }

    /// Something was acknowledged, and not all.
    pub(super) fn restart_probe(&mut self, now: Instant) {
        self.probe_wait = PROBING.0;
        self.probe = Some(now + self.probe_wait);
    }

    pub(super) fn probe_again(&mut self, now: Instant) {
        self.probe_wait = (self.probe_wait * 2).clamp(PROBING.0, PROBING.1);
        self.probe = Some(now + self.probe_wait);
    }

    /// Whether probes have gone without an answer for so long that the peer counts as silent.
    pub(super) fn is_probing_in_vain(&self) -> bool {
        self.probe_wait >= SILENT_FROM
    }

    /// Whether it is time again to ask for a name.
    pub(super) fn may_greet_stranger(&mut self, now: Instant) -> bool {
        let may = self
            .last_stranger
            .is_none_or(|last| now - last >= BETWEEN_STRANGERS);
        if may {
            self.last_stranger = Some(now);
        }
        may
    }

    /// Send nothing and ignore hellos for a while, which is longer each time.
    pub(super) fn mute(&mut self, now: Instant) {
        if self
            .last_mute
            .is_none_or(|last| now - last > FORGIVEN_AFTER)
        {
            self.mute_wait = Duration::ZERO;
        }
        self.last_mute = Some(now);
        self.mute_wait = (self.mute_wait * 2).clamp(MUTE.0, MUTE.1);
        self.muted = Some(now + self.mute_wait);
        self.greet = None;
    }

    pub(super) fn stop_all_but_mute(&mut self) {
        self.end_session();
        self.greet = None;
        self.stalled = None;
    }

    pub(super) fn end_session(&mut self) {
        self.acknowledge = None;
        self.probe = None;
        self.lost = None;
    }
}
