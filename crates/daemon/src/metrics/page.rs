//! A page in the text format of Prometheus: families of series, each family in one piece, each series once.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// The most that a page has, in bytes: what is beyond is left out and counted. A thousand guests with all they may have stay below it.
pub(super) const MAX_PAGE_LEN: usize = 15 * 1024 * 1024;

/// Each family and what it is. Those whose names end in `_total` are counters.
pub(super) const FAMILIES: &str = "\
ringdown_info The daemon.
ringdown_guest_up Whether the guest's agent reported its figures.
ringdown_vm_ready Whether the guest's agent is there.
ringdown_vm_circuits Circuits of the VM, in any state.
ringdown_vm_usage What the VM uses of what is limited.
ringdown_vm_limit What the VM may use.
ringdown_vm_condition Whether this is so of the VM.
ringdown_unavailable VMs, uplinks and published ports that cannot be had at the moment.
ringdown_process_ended Whether this process beside the daemon has ended, which was there at its start.
ringdown_vm_events_total What has happened on the VM's line.
ringdown_guest_uptime_seconds Time since the guest's boot.
ringdown_guest_tasks Processes and threads.
ringdown_guest_cpus Processors that are on.
ringdown_guest_load Processes that want to run, averaged.
ringdown_guest_cpu_seconds_total What the processors did.
ringdown_guest_memory_bytes Memory and swap.
ringdown_guest_filesystem_size_bytes Size of a file system.
ringdown_guest_filesystem_free_bytes What is free of it.
ringdown_guest_filesystem_avail_bytes What is free of it for users other than root.
ringdown_guest_filesystem_files How many files it can have.
ringdown_guest_filesystem_files_free How many more files it can have.
ringdown_guest_disk_reads_total Reads done.
ringdown_guest_disk_read_bytes_total Bytes read.
ringdown_guest_disk_writes_total Writes done.
ringdown_guest_disk_written_bytes_total Bytes written.
ringdown_guest_disk_busy_seconds_total Time with something to do.
ringdown_guest_network_receive_bytes_total Bytes received.
ringdown_guest_network_receive_packets_total Packets received.
ringdown_guest_network_receive_errors_total Packets that arrived damaged.
ringdown_guest_network_receive_drops_total Packets that were dropped.
ringdown_guest_network_transmit_bytes_total Bytes sent.
ringdown_guest_network_transmit_packets_total Packets sent.
ringdown_guest_network_transmit_errors_total Packets that could not be sent.
ringdown_guest_network_transmit_drops_total Packets dropped before they were sent.
ringdown_network_vms VMs with a port in the network.
ringdown_network_attached VMs in the network whose VMM is connected.
ringdown_network_port_up Whether the port's link is up and its driver runs.
ringdown_network_port_events_total What has happened at the port.
ringdown_network_port_refused_frames_total Frames that came from the port and went nowhere.
ringdown_worker_busy_seconds_total Processor time of the thread that moves bytes, with that in which it looks for work before it sleeps.
ringdown_restarts_total Daemons that have followed another since the keeper was started.
ringdown_restart_pause_seconds Time without a daemon before this one.
ringdown_restart_circuits Circuits of the daemon before, by what became of them.
ringdown_event_readers Readers of events.
ringdown_event_readers_dropped_total Readers of events that did not keep up and were dropped.
ringdown_capture_readers Captures that are under way, of lines and of networks.
ringdown_capture_lost_packets_total Packets that captures have lost as their readers did not keep up.
ringdown_control_clients_stalled_total Clients of the control socket that took nothing for 30 seconds and were cut off, readers of events and captures among them.
ringdown_vm_circuits_opened_total Circuits of the VM that were set up, by either side.
ringdown_vm_bytes_total Payload that the guest has sent and received.
ringdown_vm_packets_total Packets that the guest has sent and received.
ringdown_vm_ended_total Calls of the VM that were refused, and circuits that were cut short.
ringdown_vm_queued_bytes Payload on its way from the guest, parked in its memory or stored in the daemon's, and messages of host programs to it.
ringdown_vm_parked_descriptors Descriptors of the guest's that hold payload for receivers that have no room.
ringdown_vm_kicks_total Times that the guest notified the device.
ringdown_vm_kicks_saved_total Times that packets were found without the guest's having notified the device.
ringdown_vm_interrupts_total Times that the device interrupted the guest.
ringdown_vm_interrupts_saved_total Times that buffers were given to the guest without an interrupt of their own.
ringdown_vm_setup_seconds Time from a call to its answer: of calls to the guest, and of its own to the host.
ringdown_rule_circuits Circuits that the rule allows, in any state.
ringdown_rule_circuits_opened_total Circuits that the rule has allowed.
ringdown_rule_bytes_total Payload of the rule's circuits that has arrived, by direction.
ringdown_rule_refused_total Calls about which the rule decided and that became no circuit.
ringdown_rule_cut_short_total Circuits of the rule that were cut short.
ringdown_switchboard_events_total What became of circuits for which a program asked.
ringdown_switchboard_sessions Agents that can be given windows.
ringdown_switchboard_listeners Places where programs of the host listen for circuits.
ringdown_windows Windows, by how they stand.
ringdown_metrics_left_out Series that this page had no room for, and VMs beyond those that it has.
";

#[derive(Debug, Default)]
pub(super) struct Page {
    families: Vec<Family>,
    by_name: HashMap<&'static str, usize>,
    series: HashSet<String>,
    len: usize,
    left_out: u64,
}

#[derive(Debug)]
struct Family {
    name: &'static str,
    kind: &'static str,
    text: String,
}

impl Page {
    /// A series of a family that is a gauge or a counter.
    pub(super) fn set(&mut self, name: &'static str, labels: &[(&str, &str)], value: f64) {
        self.add(name, "", labels, value);
    }

    /// Several that differ in one more label.
    pub(super) fn set_each<'a>(
        &mut self,
        name: &'static str,
        labels: &[(&str, &str)],
        label: &str,
        values: impl IntoIterator<Item = (impl AsRef<str>, &'a u64)>,
    ) {
        for (of, value) in values {
            self.set(
                name,
                &[labels, &[(label, of.as_ref())]].concat(),
                *value as f64,
            );
        }
    }

    /// How values are spread: as many counts as there are bounds, of what is as large or smaller and larger than the bound before, and one of what is
    /// larger than all; and the sum of the values.
    pub(super) fn histogram(
        &mut self,
        name: &'static str,
        labels: &[(&str, &str)],
        bounds: &[f64],
        counts: &[u64],
        sum: f64,
    ) {
        let mut total = 0;
        for (index, count) in counts.iter().enumerate() {
            total += count;
            let bound = bounds.get(index).map_or("+Inf".to_owned(), f64::to_string);
            let labels = [labels, &[("le", bound.as_str())]].concat();
            self.add(name, "_bucket", &labels, total as f64);
        }
        self.add(name, "_sum", labels, sum);
        self.add(name, "_count", labels, total as f64);
    }

    /// So many that might have been on the page are not.
    pub(super) fn leave_out(&mut self, count: usize) {
        self.left_out += count as u64;
    }

    /// A series of a family, whose name has this behind the family's.
    fn add(&mut self, name: &'static str, suffix: &str, labels: &[(&str, &str)], value: f64) {
        let labels: Vec<String> = labels
            .iter()
            .map(|(label, value)| format!("{label}=\"{}\"", escape(value)))
            .collect();
        let series = match labels.is_empty() {
            true => format!("{name}{suffix}"),
            false => format!("{name}{suffix}{{{}}}", labels.join(",")),
        };
        let len = series.len() + 24;
        if self.len + len > MAX_PAGE_LEN {
            self.left_out += 1;
            return;
        }
        // A guest that has two disks of one name, or says so.
        if !self.series.insert(series.clone()) {
            return;
        }
        self.len += len;
        let index = *self.by_name.entry(name).or_insert_with(|| {
            self.families.push(Family {
                name,
                kind: match suffix {
                    "" if name.ends_with("_total") => "counter",
                    "" => "gauge",
                    _ => "histogram",
                },
                text: String::new(),
            });
            self.families.len() - 1
        });
        // Writing to a string does not fail.
        let _ = writeln!(self.families[index].text, "{series} {value}");
    }

    pub(super) fn finish(mut self) -> String {
        let left_out = self.left_out as f64;
        self.len = 0;
        self.set("ringdown_metrics_left_out", &[], left_out);
        let mut page = String::new();
        for family in &self.families {
            let Family { name, kind, text } = family;
            let mut lines = FAMILIES.lines();
            let help = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            let help = help.unwrap_or_default();
            let _ = write!(page, "# HELP {name} {help}\n# TYPE {name} {kind}\n{text}");
        }
        page
    }
}

/// A label's value as the format wants it, and without what could steer a terminal.
fn escape(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for character in value.chars() {
        match character {
            '\\' => escaped.push_str("\\\\"),
            '"' => escaped.push_str("\\\""),
            '\n' => escaped.push_str("\\n"),
            character if character.is_control() => escaped.push('\u{fffd}'),
            character => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_in_one_piece_and_series_come_once() {
        let mut page = Page::default();
        let (up, busy) = (
            "ringdown_guest_up",
            "ringdown_guest_disk_busy_seconds_total",
        );
        page.set(up, &[("vm", "one")], 1.0);
        page.set(busy, &[("vm", "one")], 2.5);
        page.set(up, &[("vm", "two")], 3.0);
        page.set(up, &[("vm", "two")], 4.0);
        let expected = "# HELP ringdown_guest_up Whether the guest's agent reported its figures.\n# TYPE ringdown_guest_up gauge\n\
                        ringdown_guest_up{vm=\"one\"} 1\nringdown_guest_up{vm=\"two\"} 3\n\
                        # HELP ringdown_guest_disk_busy_seconds_total Time with something to do.\n\
                        # TYPE ringdown_guest_disk_busy_seconds_total counter\nringdown_guest_disk_busy_seconds_total{vm=\"one\"} 2.5\n\
                        # HELP ringdown_metrics_left_out Series that this page had no room for, and VMs beyond those that it has.\n\
                        # TYPE ringdown_metrics_left_out gauge\nringdown_metrics_left_out 0\n";
        assert_eq!(page.finish(), expected);
    }

    #[test]
    fn values_of_labels_cannot_make_series_of_their_own() {
        assert_eq!(escape("a\"} 1\nb\\\x1b["), "a\\\"} 1\\nb\\\\\u{fffd}[");
        let mut page = Page::default();
        page.set("a", &[("x", "{} ")], 1.0);
        assert!(page.finish().contains("a{x=\"{} \"} 1\n"));
    }

    #[test]
    fn a_page_has_its_limit() {
        let mut page = Page::default();
        let long = "x".repeat(1024 * 1024);
        for number in 0..20 {
            page.set("a", &[("x", &format!("{number}{long}"))], 1.0);
        }
        let text = page.finish();
        assert!(text.len() <= MAX_PAGE_LEN);
        assert!(
            text.ends_with("ringdown_metrics_left_out 6\n"),
            "{}",
            &text[text.len() - 40..]
        );
    }
}
