//! Shares of what there is only so much of: places for operations, memory for messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A part of a limited amount; given back when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    used: Arc<AtomicUsize>,
    amount: usize,
}

impl Share {
    /// Takes so much, if the limit allows it beside what others have.
    pub(crate) fn take(used: &Arc<AtomicUsize>, amount: usize, limit: usize) -> Option<Share> {
        used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            now.checked_add(amount).filter(|sum| *sum <= limit)
        })
        .ok()
        .map(|_| Share {
            used: Arc::clone(used),
            amount,
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.used.fetch_sub(self.amount, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_as_much_as_the_limit_says() {
        let used = Arc::new(AtomicUsize::new(0));
        let first = Share::take(&used, 2, 3).unwrap();
        let second = Share::take(&used, 1, 3).unwrap();
        assert!(Share::take(&used, 1, 3).is_none());
        drop(second);
        assert!(Share::take(&used, 2, 3).is_none());
        assert!(Share::take(&used, usize::MAX, 3).is_none());
        assert!(Share::take(&used, 1, 3).is_some(), "a share comes back");
        drop(first);
        assert_eq!(used.load(Ordering::Acquire), 0);
    }
}
