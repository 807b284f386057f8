//! Figures of all lines and guests, in the text format of Prometheus (version 0.0.4).
//!
//! A guest's figures are asked of its agent through the VM's host socket, as a program of the host would: of all guests that are ready at
//! the same time, each with a deadline, so that a guest that does not answer costs its own figures and nothing else. What a guest says is
//! its word: names are escaped, their number is limited, and a name that comes twice counts once, because a reader refuses a page on which
//! a series is repeated.

mod circuits;
mod conditions;
mod figures;
mod guest;
mod network;
mod page;

use std::future::Future;
use std::sync::{Arc, Mutex};

use api::{NetworkDetails, Restart, VmState, VmStatus, WindowsInfo};
use axum::body::Bytes;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use wire::agent::job::Stats;

use crate::capture::Captures;
use crate::events::Events;
use crate::line::Figures;
pub(crate) use conditions::Whole;
use guest::{GUEST_TIMEOUT, SILENT_TIMEOUT, ask};
use hostside::gates::Gates;
use page::Page;
use windows::switchboard::SwitchboardReport;

/// The media type of the page.
pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How many guests are asked at once.
const MAX_ASKED: usize = 64;

/// The page that is being made, if one is. All callers that ask meanwhile get it, so that none waits for more than one page.
#[derive(Debug, Default)]
pub(crate) struct Pages(Mutex<Option<watch::Receiver<Option<Bytes>>>>);

impl Pages {
    /// Where the page comes that is being made: by `make`, unless one is being made already. It is made also if the caller has gone.
    pub(crate) fn join<F>(&self, make: impl FnOnce() -> F) -> watch::Receiver<Option<Bytes>>
    where
        F: Future<Output = Bytes> + Send + 'static,
    {
        let mut under_way = sys::lock(&self.0);
        // The sender is gone once there is a page, or if making it has panicked.
        if let Some(page) = under_way.as_ref().filter(|page| page.has_changed().is_ok()) {
            return page.clone();
        }
        let (sender, page) = watch::channel(None);
        let making = make();
        tokio::spawn(async move {
            sender.send_replace(Some(making.await));
        });
        *under_way = Some(page.clone());
        page
    }
}

/// The most file systems, disks and network links of one guest, of each.
const MAX_LISTED: usize = 16;

/// What the agents of these VMs say, of those ready and able to report. One that is paused is not asked.
pub(crate) async fn ask_guests(gates: &Arc<Gates>, vms: &[VmStatus]) -> Vec<Option<Box<Stats>>> {
    let mut guests = JoinSet::new();
    let places = Arc::new(Semaphore::new(MAX_ASKED));
    for (index, vm) in vms.iter().enumerate() {
        let can_tell = vm.agent.as_ref().is_some_and(|agent| {
            agent
                .capabilities
                .iter()
                .any(|name| name == wire::agent::job::CAPABILITY_STATS)
        });
        if vm.state != VmState::Ready || vm.paused || !can_tell {
            continue;
        }
        let patience = match vm.unanswered {
            Some(_) => SILENT_TIMEOUT,
            None => GUEST_TIMEOUT,
        };
        let (host, places, name) = (vm.host.clone(), places.clone(), vm.full_name());
        let gates = gates.clone();
        guests.spawn(async move {
            let _place = places.acquire_owned().await;
            let answer = tokio::time::timeout(patience, ask(&gates, &host)).await;
            let stats = match answer {
                Ok(Ok(stats)) => Some(stats),
                Ok(Err(error)) => {
                    tracing::debug!(vm = name, %error, "a guest's agent does not report its figures");
                    None
                }
                Err(_) => {
                    tracing::debug!(vm = name, "a guest's agent did not report its figures in time");
                    None
                }
            };
            (index, stats)
        });
    }
    let mut stats: Vec<Option<Box<Stats>>> = vec![None; vms.len()];
    while let Some(joined) = guests.join_next().await {
        if let Ok((index, answer)) = joined {
            stats[index] = answer;
        }
    }
    stats
}

/// What the page is made of.
pub(crate) struct Facts<'a> {
    /// The VMs.
    pub(crate) vms: &'a [VmStatus],
    /// What their agents say, in the same order.
    pub(crate) stats: &'a [Option<Box<Stats>>],
    /// The networks.
    pub(crate) networks: &'a [NetworkDetails],
    /// What the data plane has counted.
    pub(crate) counted: &'a Figures,
    /// Readers of events.
    pub(crate) events: &'a Events,
    /// The captures of what passes.
    pub(crate) captures: &'a Captures,
    /// What was taken over from the daemon before.
    pub(crate) restart: Option<&'a Restart>,
    /// What is known of the daemon as a whole.
    pub(crate) whole: &'a Whole,
    /// Clients of the control socket that were cut off.
    pub(crate) stalled_clients: u64,
    /// What the switchboard has counted.
    pub(crate) switchboard: &'a SwitchboardReport,
    /// The windows.
    pub(crate) windows: &'a WindowsInfo,
}

/// The page.
pub(crate) fn write(facts: &Facts<'_>) -> String {
    let mut page = page(facts.vms, facts.stats, facts.networks);
    figures::add(&mut page, facts.vms, facts.counted);
    conditions::add(&mut page, facts.vms, facts.networks, facts.whole);
    figures::add_readers(
        &mut page,
        facts.events,
        facts.captures,
        facts.stalled_clients,
    );
    figures::add_restart(&mut page, facts.restart);
    circuits::add(&mut page, facts.switchboard, facts.windows);
    page.finish()
}

fn page(vms: &[VmStatus], stats: &[Option<Box<Stats>>], networks: &[NetworkDetails]) -> Page {
    let mut page = Page::default();
    let version = env!("CARGO_PKG_VERSION");
    page.set("ringdown_info", &[("version", version)], 1.0);
    for network in networks {
        network::figures(&mut page, network);
    }
    for (vm, stats) in vms.iter().zip(stats) {
        let name = vm.full_name();
        line(&mut page, vm, &name);
        let up = f64::from(u8::from(stats.is_some()));
        let of_vm = [("vm", name.as_str()), ("domain", vm.domain.as_str())];
        page.set("ringdown_guest_up", &of_vm, up);
        if let Some(stats) = stats {
            guest_figures(&mut page, &name, stats);
        }
    }
    page
}

fn line(page: &mut Page, vm: &VmStatus, name: &str) {
    let ready = f64::from(u8::from(vm.state == VmState::Ready));
    let of_vm = [("vm", name), ("domain", vm.domain.as_str())];
    page.set("ringdown_vm_ready", &of_vm, ready);
    page.set("ringdown_vm_circuits", &of_vm, f64::from(vm.circuits));
    page.set_each("ringdown_vm_usage", &of_vm, "resource", &vm.usage);
    page.set_each("ringdown_vm_limit", &of_vm, "resource", &vm.limits);
    page.set_each("ringdown_vm_events_total", &of_vm, "event", &vm.counters);
}

fn guest_figures(page: &mut Page, vm: &str, stats: &Stats) {
    let of_vm = [("vm", vm)];
    let seconds = |ms: u64| ms as f64 / 1000.0;
    page.set(
        "ringdown_guest_uptime_seconds",
        &of_vm,
        seconds(stats.uptime_ms),
    );
    page.set("ringdown_guest_tasks", &of_vm, f64::from(stats.tasks));
    page.set("ringdown_guest_cpus", &of_vm, f64::from(stats.cpus));
    for (minutes, load) in ["1", "5", "15"].into_iter().zip(stats.load) {
        let labels = [("vm", vm), ("minutes", minutes)];
        page.set("ringdown_guest_load", &labels, f64::from(load) / 100.0);
    }
    let cpu = &stats.cpu;
    let modes = [
        ("user", cpu.user),
        ("system", cpu.system),
        ("idle", cpu.idle),
        ("iowait", cpu.io_wait),
        ("interrupt", cpu.interrupt),
        ("steal", cpu.stolen),
    ];
    for (mode, ms) in modes {
        let labels = [("vm", vm), ("mode", mode)];
        page.set("ringdown_guest_cpu_seconds_total", &labels, seconds(ms));
    }
    let memory = &stats.memory;
    let kinds = [
        ("total", &memory.total),
        ("free", &memory.free),
        ("available", &memory.available),
        ("cached", &memory.cached),
        ("swap_total", &memory.swap_total),
        ("swap_free", &memory.swap_free),
    ];
    page.set_each("ringdown_guest_memory_bytes", &of_vm, "kind", kinds);
    file_systems(page, vm, stats);
    disks(page, vm, stats);
    links(page, vm, stats);
}

fn file_systems(page: &mut Page, vm: &str, stats: &Stats) {
    for fs in stats.file_systems.iter().take(MAX_LISTED) {
        let labels = [
            ("vm", vm),
            ("mountpoint", fs.mounted_at.as_str()),
            ("device", fs.device.as_str()),
            ("fstype", fs.kind.as_str()),
        ];
        for (name, value) in [
            ("ringdown_guest_filesystem_size_bytes", fs.size),
            ("ringdown_guest_filesystem_free_bytes", fs.free),
            ("ringdown_guest_filesystem_avail_bytes", fs.available),
            ("ringdown_guest_filesystem_files", fs.files),
            ("ringdown_guest_filesystem_files_free", fs.files_free),
        ] {
            page.set(name, &labels, value as f64);
        }
    }
}

fn disks(page: &mut Page, vm: &str, stats: &Stats) {
    for disk in stats.disks.iter().take(MAX_LISTED) {
        let labels = [("vm", vm), ("device", disk.name.as_str())];
        let busy = disk.busy_ms as f64 / 1000.0;
        for (name, value) in [
            ("ringdown_guest_disk_reads_total", disk.reads as f64),
            (
                "ringdown_guest_disk_read_bytes_total",
                disk.read_bytes as f64,
            ),
            ("ringdown_guest_disk_writes_total", disk.writes as f64),
            (
                "ringdown_guest_disk_written_bytes_total",
                disk.written_bytes as f64,
            ),
            ("ringdown_guest_disk_busy_seconds_total", busy),
        ] {
            page.set(name, &labels, value);
        }
    }
}

fn links(page: &mut Page, vm: &str, stats: &Stats) {
    for link in stats.links.iter().take(MAX_LISTED) {
        let labels = [("vm", vm), ("interface", link.name.as_str())];
        for (name, value) in [
            (
                "ringdown_guest_network_receive_bytes_total",
                link.received_bytes,
            ),
            (
                "ringdown_guest_network_receive_packets_total",
                link.received_packets,
            ),
            (
                "ringdown_guest_network_receive_errors_total",
                link.receive_errors,
            ),
            (
                "ringdown_guest_network_receive_drops_total",
                link.receive_drops,
            ),
            (
                "ringdown_guest_network_transmit_bytes_total",
                link.sent_bytes,
            ),
            (
                "ringdown_guest_network_transmit_packets_total",
                link.sent_packets,
            ),
            (
                "ringdown_guest_network_transmit_errors_total",
                link.send_errors,
            ),
            (
                "ringdown_guest_network_transmit_drops_total",
                link.send_drops,
            ),
        ] {
            page.set(name, &labels, value as f64);
        }
    }
}

#[cfg(test)]
mod tests;
