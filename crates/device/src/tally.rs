//! What is stored on behalf of one line, counted by what is there: an entry leaves the count when it is dropped, on whatever
//! way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A sum of weights. One thread uses it; it is atomic so that the fabric may be handed to that thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally(Arc<AtomicU64>);

/// Something that is counted as long as it lives.
#[derive(Debug)]
pub(crate) struct Entry {
    tally: Tally,
    weight: u64,
}

impl Tally {
    /// Counts something of this weight.
    pub(crate) fn enter(&self, weight: u64) -> Entry {
        self.0.fetch_add(weight, Ordering::Relaxed);
        Entry {
            tally: self.clone(),
            weight,
        }
    }

    /// The weight of everything that is there.
    pub(crate) fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.tally.0.fetch_sub(self.weight, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_is_not_counted() {
        let tally = Tally::default();
        let first = tally.enter(3);
        let second = tally.enter(4);
        assert_eq!(tally.total(), 7);
        drop(first);
        assert_eq!(tally.total(), 4);
        drop(second);
        assert_eq!(tally.total(), 0);
    }
}
