//! How often the log says why calls were refused or circuits cut short: a guest that dials in a loop must not fill the
//! host's disk.

use std::time::Duration;

use switch::{Reason, Time};

/// Reports of one reason that one VM may cause in a [`WINDOW`]. More are only counted, so that no reason hides another.
const REPORTS: u32 = 32;
const WINDOW: Duration = Duration::from_secs(10);

/// What one VM has caused to be reported.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    /// By [`Reason::index`].
    windows: [Window; Reason::ALL.len()],
}

#[derive(Debug, Clone, Copy, Default)]
struct Window {
    start: Option<Time>,
    reports: u32,
    held_back: u64,
}

impl Reports {
    /// Whether to report this reason now, and if so, how many such reports were held back since the last one.
    pub(crate) fn admit(&mut self, now: Time, reason: Reason) -> Option<u64> {
        let window = &mut self.windows[reason.index()];
        if window.start.is_none_or(|start| now >= start + WINDOW) {
            window.start = Some(now);
            window.reports = 0;
        }
        if window.reports >= REPORTS {
            window.held_back += 1;
            return None;
        }
        window.reports += 1;
        Some(std::mem::take(&mut window.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_the_limit_is_held_back_and_counted() {
        let mut reports = Reports::default();
        for _ in 0..REPORTS {
            assert_eq!(reports.admit(Time::ZERO, Reason::NoListener), Some(0));
        }
        for _ in 0..5 {
            assert_eq!(reports.admit(Time::ZERO, Reason::NoListener), None);
        }
        assert_eq!(
            reports.admit(Time::ZERO, Reason::Denied),
            Some(0),
            "no reason hides another"
        );
        let just_before = WINDOW - Duration::from_nanos(1);
        assert_eq!(reports.admit(just_before, Reason::NoListener), None);
        assert_eq!(reports.admit(WINDOW, Reason::NoListener), Some(6));
        assert_eq!(reports.admit(WINDOW, Reason::NoListener), Some(0));
    }
}
