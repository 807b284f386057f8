//! Rates in real time: the moments for [`TokenBucket`]s, and a bucket for each source.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use policy::{Time, TokenBucket};
use tokio::time::{Instant, sleep};

/// The time since a start of the process's own.
pub fn now() -> Time {
    /// A runtime whose clock stands still, as in tests, may have begun before the first question: its moments are not negative.
    const AHEAD: Duration = Duration::from_secs(24 * 60 * 60);
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let start = *START;
    (Instant::now() + AHEAD).saturating_duration_since(start)
}

/// Waits until a debt is paid ([`TokenBucket::in_debt_until`]).
pub async fn wait_until(paid_at: Time) {
    sleep(paid_at.saturating_sub(now())).await;
}

/// A bucket for each VM or another source, all alike.
#[derive(Debug)]
pub struct Buckets<K> {
    full: TokenBucket,
    by_source: Mutex<HashMap<K, TokenBucket>>,
}

impl<K: Eq + Hash> Buckets<K> {
    /// Full buckets, as by [`TokenBucket::new`].
    pub fn new(per_second: u64, depth: Duration) -> Buckets<K> {
        Buckets {
            full: TokenBucket::new(per_second, depth),
            by_source: Mutex::default(),
        }
    }

    /// Takes a token of this source, if there is one.
    #[must_use]
    pub fn take(&self, source: K, now: Time) -> bool {
        self.with(source, now, |bucket| bucket.take(now))
    }

    /// Charges this source one token. Returns until when it has to wait.
    pub fn charge(&self, source: K, now: Time) -> Option<Time> {
        self.with(source, now, |bucket| {
            bucket.charge(now, 1);
            bucket.in_debt_until(now)
        })
    }

    fn with<T>(&self, source: K, now: Time, act: impl FnOnce(&mut TokenBucket) -> T) -> T {
        let mut by_source = sys::lock(&self.by_source);
        if !by_source.contains_key(&source) {
            // A new source makes room: the table never outgrows those that were active lately.
            by_source.retain(|_, bucket| !bucket.is_full(now));
        }
        let bucket = by_source.entry(source);
        act(bucket.or_insert_with(|| self.full.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn each_source_has_its_own_below_at_and_above_the_limit() {
        let buckets = Buckets::new(2, SECOND);
        let charge = |vm, now| buckets.charge(vm, now);
        assert_eq!(charge("web", SECOND), None, "below");
        assert_eq!(charge("web", SECOND), None, "at the limit");
        assert_eq!(charge("web", SECOND), Some(SECOND * 3 / 2), "above");
        assert_eq!(charge("db", SECOND), None);
        assert!(buckets.take("cache", SECOND) && buckets.take("cache", SECOND));
        assert!(!buckets.take("cache", SECOND), "above, and not in debt");
        assert!(buckets.take("cache", SECOND * 3 / 2));
        // Those that are full again are forgotten when another one comes.
        assert_eq!(charge("mail", 4 * SECOND), None);
        let known = buckets.by_source.lock().expect("no panic").len();
        assert_eq!(known, 1);
    }

    #[test]
    fn time_goes_on_as_in_the_runtime_that_asks() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        now();
        runtime.block_on(async {
            let begun = now();
            wait_until(begun + SECOND).await;
            assert_eq!(now(), begun + SECOND);
        });
    }
}
