//! Figures of zero-copy circuits and their windows.

use std::collections::BTreeMap;

use api::WindowsInfo;

use super::page::Page;
use windows::switchboard::SwitchboardReport;

/// Adds figures of the switchboard, and how many windows stand how.
pub(super) fn add(page: &mut Page, report: &SwitchboardReport, windows: &WindowsInfo) {
    let counts = report.counts;
    let events = [
        ("zero_copy", &counts.zero_copy),
        ("stream", &counts.streams),
        ("no_window", &counts.no_window),
        ("revoked", &counts.revoked),
        ("not_released", &counts.not_released),
        ("disbelieved", &counts.disbelieved),
    ];
    page.set_each("ringdown_switchboard_events_total", &[], "event", events);
    page.set("ringdown_switchboard_sessions", &[], report.sessions as f64);
    page.set(
        "ringdown_switchboard_listeners",
        &[],
        report.listeners as f64,
    );
    let mut states: BTreeMap<&str, u64> = BTreeMap::new();
    for window in &windows.windows {
        *states.entry(&window.state).or_default() += 1;
    }
    page.set_each("ringdown_windows", &[], "state", &states);
}
