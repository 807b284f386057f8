//! Figures of the data path: of each VM's line, of each rule, and of the worker.
//!
//! Labels are names from the configuration: VMs, domains and rules, and of a fixed set of reasons. Nothing that a guest chooses is a label here, so guests
//! cannot make series. Beyond [`MAX_VMS`] VMs further ones are left out and counted, beyond [`MAX_RULES`] rules the others are added up under one name.

use std::collections::BTreeMap;
#[cfg(test)]
use std::time::Duration;

use api::{Restart, VmStatus};
use vsock::{Reason, RuleCounters, RuleReport, SetUpTimes};

use super::page::Page;
use crate::capture::Captures;
use crate::events::Events;
use crate::line::{Figures, LineFigures};

/// The most VMs with figures of their own. What is left out of the page is counted in it.
pub(super) const MAX_VMS: usize = 1000;

/// The most rules with figures of their own.
pub(super) const MAX_RULES: usize = 256;

/// The rule of what holds without one, and the one of all beyond [`MAX_RULES`]. No name has parentheses.
const NO_RULE: &str = "(none)";
const OTHER_RULES: &str = "(other)";

/// What the counters of a VM that are reasons begin with.
const REASON: &str = "ended_";

/// Adds all of them to a page.
pub(super) fn add(page: &mut Page, vms: &[VmStatus], figures: &Figures) {
    for vm in vms.iter().take(MAX_VMS) {
        let name = vm.full_name();
        of_vm(page, vm, &name);
        if let Some(line) = figures.lines.iter().find(|line| line.name == name) {
            of_line(page, line);
        }
    }
    page.leave_out(vms.len().saturating_sub(MAX_VMS));
    of_rules(page, &figures.rules);
    page.set(
        "ringdown_worker_busy_seconds_total",
        &[],
        figures.worker_busy.as_secs_f64(),
    );
}

/// Adds what the daemon has taken over from the one before.
pub(super) fn add_restart(page: &mut Page, restart: Option<&Restart>) {
    let restarts = restart.map_or(0, |restart| restart.restarts);
    page.set("ringdown_restarts_total", &[], restarts as f64);
    let Some(restart) = restart else { return };
    if let Some(pause_ms) = restart.pause_ms {
        let seconds = pause_ms as f64 / 1000.0;
        page.set("ringdown_restart_pause_seconds", &[], seconds);
    }
    for (fate, circuits) in [("went_on", restart.circuits), ("reset", restart.reset)] {
        let labels = [("fate", fate)];
        page.set("ringdown_restart_circuits", &labels, circuits as f64);
    }
}

/// Adds those of readers: events, captures, anything.
pub(super) fn add_readers(page: &mut Page, events: &Events, captures: &Captures, stalled: u64) {
    let (_, readers) = events.counts();
    page.set("ringdown_event_readers", &[], readers as f64);
    page.set(
        "ringdown_event_readers_dropped_total",
        &[],
        events.dropped_readers() as f64,
    );
    page.set("ringdown_capture_readers", &[], captures.readers() as f64);
    page.set(
        "ringdown_capture_lost_packets_total",
        &[],
        captures.lost_packets() as f64,
    );
    page.set(
        "ringdown_control_clients_stalled_total",
        &[],
        stalled as f64,
    );
}

fn of_vm(page: &mut Page, vm: &VmStatus, name: &str) {
    let labels = [("vm", name), ("domain", vm.domain.as_str())];
    let count = |event: &str| vm.counters.get(event).copied().unwrap_or_default() as f64;
    page.set(
        "ringdown_vm_circuits_opened_total",
        &labels,
        count("circuits_opened"),
    );
    for (direction, bytes, packets) in [
        ("sent", "bytes_from_guest", "packets_from_guest"),
        ("received", "bytes_to_guest", "packets_to_guest"),
    ] {
        let labels = [labels[0], labels[1], ("direction", direction)];
        page.set("ringdown_vm_bytes_total", &labels, count(bytes));
        page.set("ringdown_vm_packets_total", &labels, count(packets));
    }
    let ended = vm.counters.iter().filter(|(_, count)| **count > 0);
    let ended = ended.filter_map(|(event, count)| Some((event.strip_prefix(REASON)?, count)));
    page.set_each("ringdown_vm_ended_total", &labels, "reason", ended);
    let queued = vm.usage.get("buffered_bytes").copied().unwrap_or_default();
    page.set("ringdown_vm_queued_bytes", &labels, queued as f64);
}

fn of_line(page: &mut Page, line: &LineFigures) {
    let labels = [("vm", line.name.as_str()), ("domain", line.domain.as_str())];
    page.set(
        "ringdown_vm_parked_descriptors",
        &labels,
        line.parked_descriptors as f64,
    );
    let notified = line.notified;
    for (name, count) in [
        ("ringdown_vm_kicks_total", notified.kicks),
        ("ringdown_vm_kicks_saved_total", notified.kicks_saved),
        ("ringdown_vm_interrupts_total", notified.interrupts),
        (
            "ringdown_vm_interrupts_saved_total",
            notified.interrupts_saved,
        ),
    ] {
        page.set(name, &labels, count as f64);
    }
    page.histogram(
        "ringdown_vm_setup_seconds",
        &labels,
        &SetUpTimes::BOUNDS.map(|bound| bound.as_secs_f64()),
        &line.set_up.counts,
        line.set_up.sum.as_secs_f64(),
    );
}

/// One rule's figures, or those of several that have one name or none of their own.
#[derive(Default)]
struct Sum {
    circuits: u32,
    counters: RuleCounters,
}

impl Sum {
    fn add(&mut self, report: &RuleReport) {
        let RuleReport {
            circuits, counters, ..
        } = report;
        self.circuits += circuits;
        self.counters.add(counters);
    }
}

fn of_rules(page: &mut Page, reports: &[RuleReport]) {
    let mut sums: Vec<(&str, Sum)> = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    for report in reports {
        let label = report.label.as_deref().unwrap_or(NO_RULE);
        // The one without a rule and the one of all others are beside those.
        let is_known = places.contains_key(label) || sums.len() <= MAX_RULES;
        let label = if is_known { label } else { OTHER_RULES };
        let place = *places.entry(label).or_insert_with(|| {
            sums.push((label, Sum::default()));
            sums.len() - 1
        });
        sums[place].1.add(report);
    }
    for (rule, sum) in &sums {
        of_rule(page, rule, sum);
    }
}

fn of_rule(page: &mut Page, rule: &str, sum: &Sum) {
    let of = [("rule", rule)];
    page.set("ringdown_rule_circuits", &of, f64::from(sum.circuits));
    page.set(
        "ringdown_rule_circuits_opened_total",
        &of,
        sum.counters.opened as f64,
    );
    let bytes = ["from_caller", "to_caller"].into_iter();
    let bytes = bytes.zip(&sum.counters.bytes);
    page.set_each("ringdown_rule_bytes_total", &of, "direction", bytes);
    for (name, counts) in [
        ("ringdown_rule_refused_total", &sum.counters.refused),
        ("ringdown_rule_cut_short_total", &sum.counters.cut_short),
    ] {
        let counts = counts.iter().map(|(reason, count)| (word(*reason), count));
        page.set_each(name, &of, "reason", counts);
    }
}

fn word(reason: Reason) -> &'static str {
    let name = reason.name();
    name.strip_prefix(REASON).unwrap_or(name)
}

/// Figures of which none is zero, for tests of what is exported.
#[cfg(test)]
pub(super) fn example() -> Figures {
    let counters = RuleCounters {
        opened: 3,
        bytes: [10, 20],
        refused: [(Reason::Denied, 2)].into(),
        cut_short: [(Reason::PeerReset, 1)].into(),
    };
    let report = |label: Option<&str>| RuleReport {
        label: label.map(str::to_owned),
        circuits: 1,
        counters: counters.clone(),
    };
    let mut set_up = SetUpTimes {
        sum: Duration::from_millis(3),
        ..SetUpTimes::default()
    };
    set_up.counts[1] = 2;
    set_up.counts[SetUpTimes::BOUNDS.len()] = 1;
    Figures {
        lines: vec![LineFigures {
            name: "web".to_owned(),
            domain: "default".to_owned(),
            notified: device::RingCounts {
                kicks: 1,
                kicks_saved: 2,
                interrupts: 3,
                interrupts_saved: 4,
            },
            parked_descriptors: 5,
            set_up,
        }],
        rules: vec![
            report(None),
            report(Some("web-to-db")),
            report(Some("web-to-db")),
        ],
        worker_busy: Duration::from_millis(1500),
    }
}
