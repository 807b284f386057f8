//! How often something may happen: a budget that fills up again with time.

use std::time::Duration;

use crate::ids::Time;

/// What one use of a bucket without tokens costs, if it is charged.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A bucket of tokens: calls, frames, bytes or whatever else has a rate. It is described by one moment: when it will be full again. Each use
/// moves that moment by the time that its tokens take to come back. So nothing has to be refilled, and a use of one token costs a comparison
/// and an addition.
///
/// What can be refused is [taken](Self::take). What has happened already is [charged](Self::charge), and the bucket can be in debt: then its user
/// waits ([`in_debt_until`](Self::in_debt_until)).
#[derive(Debug, Clone)]
pub struct TokenBucket {
    per_second: u64,
    /// How long one token takes to come back.
    interval: Duration,
    /// How long an empty bucket takes to fill: what may happen at once, as a time.
    depth: Duration,
    full_at: Time,
}

impl TokenBucket {
    /// A full bucket of the tokens that come in `depth`, at `per_second`. With 0 a second there are none to [`take`](Self::take), and
    /// each [`charge`](Self::charge) is a day's debt.
    pub fn new(per_second: u64, depth: Duration) -> TokenBucket {
        TokenBucket {
            per_second,
            interval: time_of(1, per_second),
            depth,
            full_at: Time::ZERO,
        }
    }

    /// This bucket in the place of another one, as when a configuration is read again: if both have the same rate and depth, what was used
    /// stays used. Else it begins full.
    #[must_use]
    pub fn replacing(self, old: Option<TokenBucket>) -> TokenBucket {
        old.filter(|old| self.is_like(old)).unwrap_or(self)
    }

    /// Whether both have the same rate and depth.
    pub fn is_like(&self, other: &TokenBucket) -> bool {
        (self.per_second, self.depth) == (other.per_second, other.depth)
    }

    /// Tokens that come in a second.
    pub fn per_second(&self) -> u64 {
        self.per_second
    }

    /// Takes a token, if there is one.
    #[must_use]
    #[inline]
    pub fn take(&mut self, now: Time) -> bool {
        self.take_many(now, 1)
    }

    /// Takes so many tokens at once, or none.
    #[must_use]
    #[inline]
    pub fn take_many(&mut self, now: Time, tokens: u64) -> bool {
        let granted = self.has(now, tokens);
        if granted {
            self.charge(now, tokens);
        }
        granted
    }

    /// Whether there are so many tokens to take.
    #[inline]
    pub fn has(&self, now: Time, tokens: u64) -> bool {
        self.per_second > 0 && self.full_after(now, tokens) <= now.saturating_add(self.depth)
    }

    /// Takes tokens, and goes into debt if there are too few.
    #[inline]
    pub fn charge(&mut self, now: Time, tokens: u64) {
        self.full_at = self.full_after(now, tokens);
    }

    /// When the debt will be paid, if there is one.
    #[inline]
    pub fn in_debt_until(&self, now: Time) -> Option<Time> {
        let paid_at = self.full_at.saturating_sub(self.depth);
        (paid_at > now).then_some(paid_at)
    }

    /// Whether it is as when it was made.
    pub fn is_full(&self, now: Time) -> bool {
        self.full_at <= now
    }

    /// When it would be full again after so many tokens more.
    #[inline]
    fn full_after(&self, now: Time, tokens: u64) -> Time {
        let cost = match tokens {
            1 => self.interval,
            tokens => time_of(tokens, self.per_second),
        };
        self.full_at.max(now).saturating_add(cost)
    }
}

/// How long so many tokens take to come. It is rounded down to whole nanoseconds, so that a full bucket holds at least what it should. For single tokens
/// the error is below 0.1 % up to 1,000,000 a second, and below 1 % up to 10,000,000.
fn time_of(tokens: u64, per_second: u64) -> Duration {
    const SECOND_NANOS: u64 = 1_000_000_000;
    if per_second == 0 {
        return DAY;
    }
    let nanos = match tokens.checked_mul(SECOND_NANOS) {
        Some(nanos) => nanos / per_second,
        None => {
            let nanos = u128::from(tokens) * u128::from(SECOND_NANOS) / u128::from(per_second);
            u64::try_from(nanos).unwrap_or(u64::MAX)
        }
    };
    Duration::from_nanos(nanos.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn taken(bucket: &mut TokenBucket, now: Time) -> u64 {
        let mut count = 0;
        while bucket.take(now) {
            count += 1;
        }
        count
    }

    #[test]
    fn a_full_bucket_holds_what_comes_in_its_depth() {
        for per_second in [1, 2, 3, 7, 1000, 20_000] {
            let mut bucket = TokenBucket::new(per_second, SECOND);
            assert_eq!(taken(&mut bucket, Time::ZERO), per_second);
            assert_eq!(taken(&mut bucket, SECOND), per_second, "full again");
            assert_eq!(taken(&mut bucket, 100 * SECOND), per_second, "and no more");
        }
    }

    #[test]
    fn tokens_come_back_one_by_one() {
        let mut bucket = TokenBucket::new(10, SECOND);
        assert_eq!(taken(&mut bucket, SECOND), 10);
        let tenth = SECOND / 10;
        assert!(!bucket.take(SECOND + tenth - Duration::from_nanos(1)));
        assert!(bucket.take(SECOND + tenth));
        assert!(!bucket.take(SECOND + tenth));
        assert_eq!(taken(&mut bucket, SECOND + 4 * tenth), 3);
    }

    #[test]
    fn many_are_taken_at_the_limit_and_not_above() {
        for (tokens, granted) in [(99, true), (100, true), (101, false), (u64::MAX, false)] {
            let mut bucket = TokenBucket::new(1000, SECOND / 10);
            assert_eq!(bucket.take_many(SECOND, tokens), granted, "{tokens}");
            // What is refused costs nothing.
            let left = if granted { 100 - tokens } else { 100 };
            assert_eq!(taken(&mut bucket, SECOND), left, "{tokens}");
        }
    }

    #[test]
    fn a_bucket_of_none_is_always_empty_and_a_charge_is_paid_after_a_day() {
        let mut bucket = TokenBucket::new(0, SECOND);
        assert!(!bucket.take(Time::ZERO));
        assert!(!bucket.take(1_000_000 * SECOND));
        bucket.charge(SECOND, 1);
        assert_eq!(bucket.in_debt_until(SECOND), Some(DAY));
        bucket.charge(SECOND, u64::MAX);
        assert_eq!(bucket.in_debt_until(SECOND), Some(2 * DAY));
    }

    #[test]
    fn debt_is_paid_by_time_alone() {
        let mut bucket = TokenBucket::new(1000, SECOND / 10);
        for _ in 0..100 {
            bucket.charge(SECOND, 1);
        }
        assert_eq!(bucket.in_debt_until(SECOND), None, "that was all there was");
        bucket.charge(SECOND, 1);
        let paid_at = SECOND + Duration::from_millis(1);
        assert_eq!(bucket.in_debt_until(SECOND), Some(paid_at));
        assert_eq!(bucket.in_debt_until(paid_at), None);
        assert!(!bucket.take(paid_at), "paid, and empty");
        assert!(!bucket.is_full(paid_at));
        assert!(bucket.is_full(paid_at + SECOND / 10));
    }

    #[test]
    fn bytes_below_at_and_above_what_may_pass_at_once() {
        const PER_SECOND: u64 = 10_000_000_000;
        let depth = Duration::from_millis(50);
        let at_once = PER_SECOND / 20;
        for (bytes, debt) in [
            (at_once - 1000, None),
            (at_once, None),
            (at_once + 1000, Some(SECOND + Duration::from_nanos(100))),
            (
                u64::MAX,
                Some(SECOND + time_of(u64::MAX, PER_SECOND) - depth),
            ),
        ] {
            let mut bucket = TokenBucket::new(PER_SECOND, depth);
            bucket.charge(SECOND, bytes);
            assert_eq!(bucket.in_debt_until(SECOND), debt, "{bytes}");
        }
        // The end of time is no overflow.
        let mut slow = TokenBucket::new(1, depth);
        slow.charge(Time::MAX, u64::MAX);
        assert!(slow.is_full(Time::MAX));
    }

    #[test]
    fn what_was_used_stays_used_at_a_reload_if_the_rate_stays() {
        let mut used = TokenBucket::new(10, SECOND);
        assert_eq!(taken(&mut used, SECOND), 10);
        let left = |per_second, depth| {
            let mut next = TokenBucket::new(per_second, depth).replacing(Some(used.clone()));
            taken(&mut next, SECOND)
        };
        assert_eq!(left(10, SECOND), 0);
        assert_eq!(left(11, SECOND), 11, "another rate");
        assert_eq!(left(10, 2 * SECOND), 20, "another depth");
        assert_eq!(
            taken(&mut TokenBucket::new(10, SECOND).replacing(None), SECOND),
            10
        );
    }
}
