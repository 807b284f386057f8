//! How often something may happen, in real time: a budget that fills up again.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A bucket of tokens that is described by one moment: when it will be full again. Each use moves that moment by the time that
/// its tokens take to come back.
#[derive(Debug)]
pub struct Bucket {
    per_second: u64,
    /// How long an empty bucket takes to fill: what may happen at once, as a time.
    depth: Duration,
    full_at: Instant,
}

impl Bucket {
    /// A full bucket of the tokens that come in `depth`, at `per_second`.
    pub fn new(per_second: u64, depth: Duration) -> Bucket {
        Bucket {
            per_second,
            depth,
            full_at: Instant::now(),
        }
    }

    /// Takes a token, if there is one.
    #[must_use]
    pub fn take(&mut self, now: Instant) -> bool {
        let Some(cost) = self.cost(1) else {
            return false;
        };
        let full_at = self.full_at.max(now) + cost;
        let granted = full_at <= now + self.depth;
        if granted {
            self.full_at = full_at;
        }
        granted
    }

    /// Whether it is as when it was made.
    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.full_at <= now
    }

    /// Takes tokens, and goes into debt if there are too few. Returns until when whoever took them has to wait.
    pub(crate) fn charge(&mut self, now: Instant, tokens: u64) -> Option<Instant> {
        let cost = self.cost(tokens).unwrap_or(MAX_DEBT).min(MAX_DEBT);
        self.full_at = self.full_at.max(now) + cost;
        let paid_at = self.full_at.checked_sub(self.depth)?;
        (paid_at > now).then_some(paid_at)
    }

    /// How long this many tokens take to come. They never come with 0 a second.
    fn cost(&self, tokens: u64) -> Option<Duration> {
        let nanos = u128::from(tokens) * 1_000_000_000;
        let nanos = nanos.checked_div(u128::from(self.per_second))?;
        Some(Duration::from_nanos(
            u64::try_from(nanos).unwrap_or(u64::MAX),
        ))
    }
}

/// A bucket for each VM, all alike.
#[derive(Debug)]
pub(crate) struct Buckets {
    per_second: u64,
    depth: Duration,
    by_vm: Mutex<HashMap<String, Bucket>>,
}

impl Buckets {
    /// Full buckets, as by [`Bucket::new`].
    pub(crate) fn new(per_second: u64, depth: Duration) -> Buckets {
        Buckets {
            per_second,
            depth,
            by_vm: Mutex::default(),
        }
    }

    /// Charges a VM, by its full name ([`Bucket::charge`]).
    pub(crate) fn charge(&self, vm: &str, now: Instant, tokens: u64) -> Option<Instant> {
        let mut by_vm = self.by_vm.lock().unwrap_or_else(PoisonError::into_inner);
        if !by_vm.contains_key(vm) {
            // A VM that is new pays for those that are full again, so that the table never outgrows the VMs that use it.
            by_vm.retain(|_, bucket| !bucket.is_full(now));
        }
        let new = || Bucket::new(self.per_second, self.depth);
        let bucket = by_vm.entry(vm.to_owned()).or_insert_with(new);
        bucket.charge(now, tokens)
    }
}

/// The longest that one use can make others wait: sums of such times stay far from the end of the clock.
const MAX_DEBT: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_may_happen_at_once_is_what_comes_in_the_depth() {
        let mut bucket = Bucket::new(10, SECOND);
        let now = Instant::now() + SECOND;
        let taken = (0..20).filter(|_| bucket.take(now)).count();
        assert_eq!(taken, 10);
        assert!(bucket.take(now + SECOND / 10));
        assert!(!bucket.take(now + SECOND / 10));
        let mut none = Bucket::new(0, SECOND);
        assert!(!none.take(now));
    }

    #[test]
    fn debt_is_paid_by_time() {
        let mut bucket = Bucket::new(1000, SECOND);
        let now = Instant::now() + SECOND;
        assert_eq!(bucket.charge(now, 1000), None, "all there was");
        assert_eq!(bucket.charge(now, 500), Some(now + SECOND / 2));
        assert_eq!(bucket.charge(now + SECOND, 500), None);
        let mut none = Bucket::new(0, SECOND);
        assert!(none.charge(now, 1).is_some_and(|until| until > now));
    }
}
