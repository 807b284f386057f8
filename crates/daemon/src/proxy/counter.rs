//! How many of something there are at once, and no more.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Counts permits that have been given and not yet dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counter(Arc<AtomicU32>);

/// One of those that are counted. Dropping it makes room for another.
#[derive(Debug)]
pub(crate) struct Permit(Arc<AtomicU32>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counter {
    /// A permit, if fewer than `limit` are out.
    pub(crate) fn take(&self, limit: u32) -> Option<Permit> {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
                (count < limit).then_some(count + 1)
            });
        taken.ok().map(|_| Permit(self.0.clone()))
    }

    /// How many permits are out.
    pub(crate) fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A counter for each VM.
#[derive(Debug, Default)]
pub(crate) struct Counters(Mutex<HashMap<String, Counter>>);

impl Counters {
    /// A permit for a VM, by its full name, if fewer than `limit` of its own are out.
    pub(crate) fn take(&self, vm: &str, limit: u32) -> Option<Permit> {
        let mut counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counter) = counters.get(vm) {
            return counter.take(limit);
        }
        // A VM that is new pays for those that are gone, so that the table never outgrows the VMs that exist.
        counters.retain(|_, counter| counter.count() > 0);
        counters.entry(vm.to_owned()).or_default().take(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_given_up_to_the_limit_and_come_back() {
        let counter = Counter::default();
        assert!(counter.take(0).is_none());
        let first = counter.take(2);
        let second = counter.take(2);
        assert!(first.is_some() && second.is_some());
        assert!(counter.take(2).is_none());
        assert_eq!(counter.count(), 2);
        drop(first);
        assert!(counter.take(2).is_some());
    }

    #[test]
    fn each_vm_has_its_own_count_and_those_that_are_gone_leave_nothing() {
        let counters = Counters::default();
        let web = counters.take("web", 1);
        assert!(web.is_some());
        assert!(counters.take("web", 1).is_none());
        assert!(counters.take("db", 1).is_some());
        drop(web);
        let third = counters.take("third", 1);
        assert!(third.is_some());
        assert_eq!(counters.0.lock().expect("not poisoned").len(), 1);
    }
}
