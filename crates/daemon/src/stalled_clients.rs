//! Clients of the control socket that are cut off.

use std::error::Error;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many clients were cut off as they took nothing of what they had asked for.
#[derive(Debug, Clone, Default)]
pub struct StalledClients(Arc<AtomicU64>);

impl StalledClients {
    /// How many until now.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts a client if that is why its connection has ended.
    pub(crate) fn note(&self, error: &hyper::Error) {
        let cause = error.source().and_then(|cause| cause.downcast_ref());
        if cause.is_some_and(|cause: &std::io::Error| cause.kind() == ErrorKind::TimedOut) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}
