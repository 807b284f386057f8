//! What `ringdown check` finds wrong, as figures to be alerted on.
//!
//! Reasons are of a fixed set, and each VM has all of them, so that an alert ends with its cause.

use api::{LineKind, NetworkDetails, PartKind, UnavailablePart, VmState, VmStatus};

use super::figures::MAX_VMS;
use super::page::Page;

/// What is known of the daemon as a whole.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    /// What cannot be had at the moment.
    pub(crate) unavailable: Vec<UnavailablePart>,
    /// The daemon was started with a keeper, and that has ended.
    pub(crate) keeper_ended: bool,
    /// The process that makes and removes files in directories of others has ended.
    pub(crate) paths_ended: bool,
}

/// Adds all of it to a page.
pub(super) fn add(page: &mut Page, vms: &[VmStatus], networks: &[NetworkDetails], whole: &Whole) {
    for vm in vms.iter().take(MAX_VMS) {
        of_vm(page, vm, networks);
    }
    let kinds = [
        ("vm", PartKind::Vm),
        ("uplink", PartKind::Uplink),
        ("published_port", PartKind::PublishedPort),
    ];
    for (word, kind) in kinds {
        let parts = whole.unavailable.iter().filter(|part| part.kind == kind);
        let labels = [("kind", word)];
        page.set("ringdown_unavailable", &labels, parts.count() as f64);
    }
    for (process, ended) in [("keeper", whole.keeper_ended), ("paths", whole.paths_ended)] {
        let labels = [("process", process)];
        page.set("ringdown_process_ended", &labels, one_if(ended));
    }
}

fn of_vm(page: &mut Page, vm: &VmStatus, networks: &[NetworkDetails]) {
    let name = vm.full_name();
    // That of a VMM that has left is history. A hybrid line's is of its sockets.
    let is_faulty = vm.last_fault.is_some() && (vm.attached || vm.kind == LineKind::Hybrid);
    let has_faulty_card = || {
        let faulty = vm.nets.iter().filter(|card| card.last_fault.is_some());
        let mut faulty = faulty.map(|card| &card.network);
        faulty.any(|network| is_attached(networks, network, &name))
    };
    for (reason, is_so) in [
        ("unavailable", vm.unavailable.is_some()),
        (
            "no_vmm",
            vm.state == VmState::Waiting && vm.unavailable.is_none(),
        ),
        ("another_vmm", vm.another_waits),
        ("fault", is_faulty),
        ("card_fault", has_faulty_card()),
        ("paused", vm.paused),
        ("unanswered", vm.unanswered.is_some()),
    ] {
        let labels = [
            ("vm", name.as_str()),
            ("domain", vm.domain.as_str()),
            ("reason", reason),
        ];
        page.set("ringdown_vm_condition", &labels, one_if(is_so));
    }
}

/// Whether a VMM is connected for the card of this VM.
fn is_attached(networks: &[NetworkDetails], network: &str, vm: &str) -> bool {
    let details = networks.iter();
    let details = details.filter(|details| details.network.full_name() == network);
    let mut ports = details.flat_map(|details| &details.ports);
    ports.any(|port| port.vm.as_deref() == Some(vm) && port.attached)
}

fn one_if(is_so: bool) -> f64 {
    f64::from(u8::from(is_so))
}
