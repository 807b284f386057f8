//! Napping while a guest streams to programs of the host.
//!
//! A worker that is faster than the guest takes its packets one by one: each costs a system call of its own and wakes the program for
//! little, and in between the worker looks in vain. While it naps, packets gather, and the guest and the program are left alone.
//! To go to sleep and be woken by a timer is not free either: on a virtual machine it costs about as much time as to carry two
//! packets of 64 KiB. So it pays only where the guest has credit for many times that: towards a program that has kept up
//! so long that its credit has grown to the most there is. Between guests, and to them, credit and sockets hold a
//! quarter of that, and senders would soon sleep, too. Several streams need no naps: their packets gather while the
//! others are carried.
//!
//! Whether naps slow a stream down depends on the guest, the program, and the processors that they share with each other. So it is tried:
//! for a few milliseconds naps are taken, and they go on only if the stream then costs less of our processor than without them, and is
//! hardly slower.

use std::io;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use rustix::thread::set_current_timer_slack;
use vsock::CircuitId;

use crate::reactor::Reactor;

/// The length of a nap: at 40 Gbit/s a guest sends 240 KiB meanwhile.
const NAP: Duration = Duration::from_micros(50);

/// How late the kernel may end it, to do more at a time.
const TIMER_SLACK_NS: u64 = 1000;

/// Credit, in bytes, that lets a guest go on while we nap and still while we then carry what has gathered.
const ENOUGH_CREDIT: usize = 768 * 1024;

/// A faster stream would fill more than a program's socket during a nap, and what does not fit has to be stored: 400 KiB in 80 µs, since
/// falling asleep and waking up take their time, too.
const MOST_BYTES_PER_MS: u64 = 400 * 1024 * 1000 / 80;

/// How long a stream is watched for its speed, and when a gap in it makes that useless.
const PERIOD: Duration = Duration::from_millis(4);
const GAP: Duration = Duration::from_millis(12);

/// Periods with naps until a stream's speed without them is measured again.
const GOOD_PERIODS: u32 = 2500;

/// Periods without naps until they are tried: after the first failure, and at most, after ever more.
const BAD_PERIODS: std::ops::RangeInclusive<u32> = 4..=512;

/// The share of the speed without naps, in hundredths, that must be reached with them.
const SPEED_KEPT: u64 = 95;

/// The share of the cost without naps, in hundredths, that must not be exceeded with them.
const COST_KEPT: u64 = 90;

/// What a stream does.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    bytes_per_ms: u64,
    /// Of our processor's time.
    ns_per_mib: u64,
}

/// Whether to nap before looking.
#[derive(Debug)]
pub(crate) struct Nap {
    /// The circuit on which a guest's bytes went to a program since the last wait, with its credit in bytes.
    stream: Option<(CircuitId, usize)>,
    /// There were others, too.
    several: bool,
    napping: bool,
    /// When the period began, by the clock and by our processor's time, and the bytes carried in it.
    since: Option<(Instant, Duration)>,
    bytes: u64,
    /// Periods that are to follow in the same way.
    left: u32,
    /// In the last period without naps.
    without: Pace,
    /// How many periods the next failure of naps puts them off.
    put_off: u32,
    /// The thread's timers have been set to be precise.
    is_precise: bool,
}

impl Pace {
    fn is_better_than(self, without: Pace) -> bool {
        self.bytes_per_ms * 100 >= without.bytes_per_ms * SPEED_KEPT
            && self.ns_per_mib * 100 <= without.ns_per_mib * COST_KEPT
    }
}

impl Default for Nap {
    fn default() -> Nap {
        Nap {
            stream: None,
            several: false,
            napping: false,
            since: None,
            bytes: 0,
            left: 1,
            without: Pace::default(),
            put_off: *BAD_PERIODS.start(),
            is_precise: false,
        }
    }
}

impl Nap {
    /// So many bytes of a guest went to a program, on a circuit with so much credit.
    pub(crate) fn carried(&mut self, bytes: usize, circuit: CircuitId, credit: usize) {
        self.bytes += bytes as u64;
        let before = self.stream.replace((circuit, credit));
        self.several |= before.is_some_and(|(other, _)| other != circuit);
    }

    /// Whether the wait that begins now should begin with a nap. `processor_time` is what this thread has used up so far.
    pub(crate) fn is_due(&mut self, now: Instant, processor_time: impl Fn() -> Duration) -> bool {
        let credit = self.stream.take().map_or(0, |(_, credit)| credit);
        if std::mem::take(&mut self.several) || credit < ENOUGH_CREDIT {
            return false;
        }
        let age = |(since, _)| now.saturating_duration_since(since);
        match self.since.map(age) {
            Some(age) if age < PERIOD => return self.napping,
            Some(age) if age < GAP => self.judge(age, processor_time()),
            _ => {}
        }
        self.since = Some((now, processor_time()));
        self.bytes = 0;
        self.napping
    }

    /// A period is over.
    fn judge(&mut self, age: Duration, processor_time: Duration) {
        let used = self.since.map_or(Duration::ZERO, |(_, before)| {
            processor_time.saturating_sub(before)
        });
        let pace = Pace {
            bytes_per_ms: self.bytes * 1000 / (age.as_micros() as u64).max(1),
            ns_per_mib: ((used.as_nanos() as u64) << 20) / self.bytes.max(1),
        };
        if !self.napping {
            self.without = pace;
        } else if !pace.is_better_than(self.without) {
            self.napping = false;
            self.left = self.put_off;
            self.put_off = (self.put_off * 2).min(*BAD_PERIODS.end());
            return;
        }
        self.left -= 1;
        if self.left > 0 {
            return;
        }
        if self.without.bytes_per_ms > MOST_BYTES_PER_MS {
            self.napping = false;
            self.left = *BAD_PERIODS.end();
            return;
        }
        if self.napping {
            self.put_off = *BAD_PERIODS.start();
        }
        self.napping = !self.napping;
        self.left = if self.napping { GOOD_PERIODS } else { 1 };
    }

    /// Naps.
    pub(crate) fn take(&mut self, reactor: &Reactor) -> io::Result<()> {
        if !std::mem::replace(&mut self.is_precise, true) {
            // Without it a nap takes up to twice as long: a worse nap, but one.
            let _ = set_current_timer_slack(NonZeroU64::new(TIMER_SLACK_NS));
        }
        reactor.nap(NAP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 10_000_000;
    const STREAM: CircuitId = CircuitId {
        index: 0,
        generation: 1,
    };

    /// A stream that lasts so many periods, with so many bytes in each, and a share of our processor's time in hundredths: first
    /// without naps, then with them. Returns in how many there were naps.
    fn stream(nap: &mut Nap, periods: usize, without: (usize, u32), with: (usize, u32)) -> usize {
        let (mut now, mut used) = nap.since.unwrap_or((Instant::now(), Duration::ZERO));
        let mut naps = 0;
        for _ in 0..periods {
            let napping = nap.napping;
            naps += usize::from(napping);
            let (bytes, share) = if napping { with } else { without };
            nap.carried(0, STREAM, ENOUGH_CREDIT);
            assert_eq!(nap.is_due(now, || used), napping, "in the middle");
            now += PERIOD;
            used += PERIOD * share / 100;
            nap.carried(bytes, STREAM, ENOUGH_CREDIT);
            nap.is_due(now, || used);
        }
        naps
    }

    #[test]
    fn naps_go_on_where_they_save_time_and_do_not_slow_a_stream_down() {
        for with in [(BYTES, 80), (BYTES * 96 / 100, 80), (BYTES * 2, 99)] {
            let naps = stream(&mut Nap::default(), 10_000, (BYTES, 99), with);
            assert!(naps > 9990 && naps < 9999, "{naps}");
        }
    }

    #[test]
    fn where_they_do_not_they_become_rare() {
        for with in [(BYTES * 94 / 100, 50), (BYTES, 99), (BYTES * 96 / 100, 90)] {
            let naps = stream(&mut Nap::default(), 10_000, (BYTES, 99), with);
            assert!(naps > 20 && naps < 50, "{naps} {with:?}");
        }
    }

    #[test]
    fn a_stream_that_would_fill_a_socket_meanwhile_is_left_alone() {
        let bytes = MOST_BYTES_PER_MS as usize * 4 + 4;
        let naps = stream(&mut Nap::default(), 1000, (bytes, 99), (bytes, 50));
        assert_eq!(naps, 0);
    }

    #[test]
    fn what_was_a_failure_is_tried_again() {
        let mut nap = Nap::default();
        stream(&mut nap, 1000, (BYTES, 99), (BYTES, 99));
        let naps = stream(&mut nap, 1000, (BYTES, 99), (BYTES, 80));
        assert!(naps > 400, "{naps}");
    }

    #[test]
    fn little_credit_allows_no_nap() {
        let mut nap = Nap::default();
        stream(&mut nap, 10, (BYTES, 99), (BYTES, 80));
        assert!(nap.napping);
        let now = Instant::now();
        nap.carried(BYTES, STREAM, ENOUGH_CREDIT - 1);
        assert!(!nap.is_due(now, || Duration::ZERO));
        assert!(
            !nap.is_due(now, || Duration::ZERO),
            "nothing was carried at all"
        );
    }

    #[test]
    fn nor_do_several_streams() {
        let mut nap = Nap::default();
        stream(&mut nap, 10, (BYTES, 99), (BYTES, 80));
        let now = Instant::now();
        let other = CircuitId { index: 1, ..STREAM };
        nap.carried(BYTES, STREAM, ENOUGH_CREDIT);
        nap.carried(BYTES, other, ENOUGH_CREDIT);
        assert!(!nap.is_due(now, || Duration::ZERO));
        nap.carried(BYTES, other, ENOUGH_CREDIT);
        assert!(nap.is_due(now, || Duration::ZERO), "alone again");
    }

    #[test]
    fn a_gap_in_a_stream_tells_nothing() {
        let mut nap = Nap::default();
        let mut now = Instant::now();
        for _ in 0..100 {
            nap.carried(1, STREAM, ENOUGH_CREDIT);
            assert!(!nap.is_due(now, || Duration::ZERO));
            now += GAP;
        }
    }
}
