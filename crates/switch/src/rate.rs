//! How often something may happen: a budget that fills up again with time.

use std::time::Duration;

use crate::Time;

/// A bucket of tokens that is described by one moment: when it will be full again. Each use moves that moment by the time
/// that one token takes to come back. So nothing has to be refilled, and a use costs a comparison and an addition.
#[derive(Debug, Clone)]
pub(crate) struct Bucket {
    /// How long one token takes to come back. None never come when there is no such time.
    interval: Option<Duration>,
    /// How long an empty bucket takes to fill: what may happen at once, as a time.
    depth: Duration,
    full_at: Time,
}

impl Bucket {
    /// A full bucket of the tokens that come in `depth`, at `per_second`. With 0 a second there are none to
    /// [`take`](Self::take), and [`charge`](Self::charge) counts none.
    pub(crate) fn new(per_second: u32, depth: Duration) -> Bucket {
        // Rounded down to whole nanoseconds, so that a full bucket holds at least what it should. Up to 1,000,000 a
        // second the error is below 0.1 %, up to 10,000,000 below 1 %.
        let interval = 1_000_000_000_u64.checked_div(u64::from(per_second));
        Bucket {
            interval: interval.map(|nanos| Duration::from_nanos(nanos.max(1))),
            depth,
            full_at: Time::ZERO,
        }
    }

    /// Takes so many tokens at once, or none.
    #[must_use]
    pub(crate) fn take_many(&mut self, now: Time, count: u32) -> bool {
        let taken = self
            .interval
            .map(|interval| self.full_at.max(now) + interval * count)
            .filter(|full_at| *full_at <= now + self.depth);
        self.full_at = taken.unwrap_or(self.full_at);
        taken.is_some()
    }

    /// Takes a token, if there is one.
    #[must_use]
    pub(crate) fn take(&mut self, now: Time) -> bool {
        let granted = self.has(now);
        if granted {
            self.charge(now);
        }
        granted
    }

    /// Whether there is a token to take.
    pub(crate) fn has(&self, now: Time) -> bool {
        self.interval
            .is_some_and(|interval| self.full_at.max(now) + interval <= now + self.depth)
    }

    /// Takes a token, and goes into debt if there is none.
    pub(crate) fn charge(&mut self, now: Time) {
        if let Some(interval) = self.interval {
            self.full_at = self.full_at.max(now) + interval;
        }
    }

    /// When the debt will be paid, if there is one.
    pub(crate) fn in_debt_until(&self, now: Time) -> Option<Time> {
        let paid_at = self.full_at.saturating_sub(self.depth);
        (paid_at > now).then_some(paid_at)
    }
}

/// As a [`Bucket`], but for things of different sizes that are known only when they have passed.
#[derive(Debug)]
pub(crate) struct Meter {
    bytes_per_second: u64,
    depth: Duration,
    full_at: Time,
}

impl Meter {
    /// With 0 bytes a second one packet or one turn a day passes: what allows nothing is said otherwise.
    pub(crate) fn new(bytes_per_second: u64, depth: Duration) -> Meter {
        Meter {
            bytes_per_second,
            depth,
            full_at: Time::ZERO,
        }
    }

    pub(crate) fn charge(&mut self, now: Time, len: u32) {
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        let nanos = u64::from(len) * 1_000_000_000;
        let time = nanos
            .checked_div(self.bytes_per_second)
            .map_or(DAY, |nanos| Duration::from_nanos(nanos.max(1)));
        self.full_at = self.full_at.max(now) + time;
    }

    pub(crate) fn in_debt_until(&self, now: Time) -> Option<Time> {
        let paid_at = self.full_at.saturating_sub(self.depth);
        (paid_at > now).then_some(paid_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn taken(bucket: &mut Bucket, now: Time) -> u32 {
        let mut count = 0;
        while bucket.take(now) {
            count += 1;
        }
        count
    }

    #[test]
    fn a_full_bucket_holds_what_comes_in_its_depth() {
        for per_second in [1, 2, 3, 7, 1000, 20_000] {
            let mut bucket = Bucket::new(per_second, SECOND);
            assert_eq!(taken(&mut bucket, Time::ZERO), per_second);
            assert_eq!(taken(&mut bucket, SECOND), per_second, "full again");
            assert_eq!(taken(&mut bucket, 100 * SECOND), per_second, "and no more");
        }
    }

    #[test]
    fn tokens_come_back_one_by_one() {
        let mut bucket = Bucket::new(10, SECOND);
        assert_eq!(taken(&mut bucket, SECOND), 10);
        let tenth = SECOND / 10;
        assert!(!bucket.take(SECOND + tenth - Duration::from_nanos(1)));
        assert!(bucket.take(SECOND + tenth));
        assert!(!bucket.take(SECOND + tenth));
        assert_eq!(taken(&mut bucket, SECOND + 4 * tenth), 3);
    }

    #[test]
    fn a_bucket_of_none_is_always_empty() {
        let mut bucket = Bucket::new(0, SECOND);
        assert!(!bucket.take(Time::ZERO));
        assert!(!bucket.take(1_000_000 * SECOND));
        bucket.charge(SECOND);
        assert_eq!(bucket.in_debt_until(SECOND), None);
    }

    #[test]
    fn debt_is_paid_by_time_alone() {
        let mut bucket = Bucket::new(1000, SECOND / 10);
        for _ in 0..100 {
            bucket.charge(SECOND);
        }
        assert_eq!(bucket.in_debt_until(SECOND), None, "that was all there was");
        bucket.charge(SECOND);
        let paid_at = SECOND + Duration::from_millis(1);
        assert_eq!(bucket.in_debt_until(SECOND), Some(paid_at));
        assert_eq!(bucket.in_debt_until(paid_at), None);
        assert!(!bucket.take(paid_at), "paid, and empty");
    }
}
