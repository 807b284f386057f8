//! Figures of zero-copy circuits and their windows.

use std::collections::BTreeMap;

use api::WindowsInfo;

use super::page::Page;
use windows::switchboard::SwitchboardReport;

/// Adds figures of the switchboard, and how many windows stand how.
pub(super) fn add(page: &mut Page, report: &SwitchboardReport, windows: &WindowsInfo) {
    let counts = report.counts;
    let events = [
        ("zero_copy", counts.zero_copy),
        ("stream", counts.streams),
        ("no_window", counts.no_window),
        ("revoked", counts.revoked),
        ("not_released", counts.not_released),
        ("disbelieved", counts.disbelieved),
    ];
    for (event, count) in events {
        page.counter(
            "ringdown_switchboard_events_total",
            "What became of circuits for which a program asked.",
            &[("event", event)],
            count as f64,
        );
    }
    page.gauge(
        "ringdown_switchboard_sessions",
        "Agents that can be given windows.",
        &[],
        report.sessions as f64,
    );
    page.gauge(
        "ringdown_switchboard_listeners",
        "Places where programs of the host listen for circuits.",
        &[],
        report.listeners as f64,
    );
    let mut states: BTreeMap<&str, u32> = BTreeMap::new();
    for window in &windows.windows {
        *states.entry(&window.state).or_default() += 1;
    }
    for (state, count) in states {
        page.gauge(
            "ringdown_windows",
            "Windows, by how they stand.",
            &[("state", state)],
            f64::from(count),
        );
    }
}
