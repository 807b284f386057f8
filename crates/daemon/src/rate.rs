//! Rates in real time: the moments for [`TokenBucket`]s, and a bucket for each VM.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use policy::{Time, TokenBucket};
use tokio::time::{Instant, sleep};

/// The time since a start of the process's own.
pub(crate) fn now() -> Time {
    /// A runtime whose clock stands still, as in tests, may have begun before the first question: its moments are not negative.
    const AHEAD: Duration = Duration::from_secs(24 * 60 * 60);
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let start = *START;
    (Instant::now() + AHEAD).saturating_duration_since(start)
}

/// Waits until a debt is paid ([`TokenBucket::in_debt_until`]).
pub(crate) async fn wait_until(paid_at: Time) {
    sleep(paid_at.saturating_sub(now())).await;
}

/// A bucket for each VM, all alike.
#[derive(Debug)]
pub(crate) struct VmBuckets {
    full: TokenBucket,
    by_vm: Mutex<HashMap<String, TokenBucket>>,
}

impl VmBuckets {
    /// Full buckets, as by [`TokenBucket::new`].
    pub(crate) fn new(per_second: u64, depth: Duration) -> VmBuckets {
        VmBuckets {
            full: TokenBucket::new(per_second, depth),
            by_vm: Mutex::default(),
        }
    }

    /// Charges a VM, by its full name, one token. Returns until when it has to wait.
    pub(crate) fn charge(&self, vm: &str, now: Time) -> Option<Time> {
        let mut by_vm = self.by_vm.lock().unwrap_or_else(PoisonError::into_inner);
        if !by_vm.contains_key(vm) {
            // A VM that is new pays for those that are full again, so that the table never outgrows the VMs that use it.
            by_vm.retain(|_, bucket| !bucket.is_full(now));
        }
        let bucket = by_vm.entry(vm.to_owned());
        let bucket = bucket.or_insert_with(|| self.full.clone());
        bucket.charge(now, 1);
        bucket.in_debt_until(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn each_vm_has_its_own_below_at_and_above_the_limit() {
        let buckets = VmBuckets::new(2, SECOND);
        let charge = |vm, now| buckets.charge(vm, now);
        assert_eq!(charge("web", SECOND), None, "below");
        assert_eq!(charge("web", SECOND), None, "at the limit");
        assert_eq!(charge("web", SECOND), Some(SECOND * 3 / 2), "above");
        assert_eq!(charge("db", SECOND), None);
        // Those that are full again are forgotten when another VM comes.
        assert_eq!(charge("mail", 4 * SECOND), None);
        let known = buckets.by_vm.lock().expect("no panic").len();
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
