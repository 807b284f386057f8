//! How much the log is told of something that others can make happen without end.

use std::time::Duration;

use tokio::time::Instant;

use crate::proxy::bucket::Bucket;

/// Lines at once, and seconds until as many may be written again: one each second in the long run.
const LINES: u64 = 20;

/// The budget of one line or channel.
#[derive(Debug)]
pub(crate) struct LogBudget {
    bucket: Bucket,
    held_back: u64,
}

impl LogBudget {
    pub(crate) fn new() -> LogBudget {
        LogBudget {
            bucket: Bucket::new(1, Duration::from_secs(LINES)),
            held_back: 0,
        }
    }

    /// Whether the log may be told. If so, it is told first of what it was not told before.
    pub(crate) fn admits(&mut self, vm: &str) -> bool {
        if !self.bucket.take(Instant::now()) {
            self.held_back += 1;
            return false;
        }
        let held_back = std::mem::take(&mut self.held_back);
        if held_back > 0 {
            tracing::warn!(
                vm,
                held_back,
                "too much happens at a serial port to tell of all of it"
            );
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_told_of_in_part_and_then_again() {
        let mut budget = LogBudget::new();
        let told = (0..1000).filter(|_| budget.admits("web")).count();
        assert_eq!(told as u64, LINES);
        assert_eq!(budget.held_back, 1000 - LINES);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(budget.admits("web"));
        assert!(!budget.admits("web"));
        assert_eq!(budget.held_back, 1);
    }
}
