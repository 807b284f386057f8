//! The daemon that runs: whether it answers, and how far its guests have come.

use std::collections::BTreeSet;
use std::path::Path;

use api::{
    Health, LineKind, NetworkDetails, PartKind, Unanswered, UnavailablePart, VmState, VmStatus,
};
use runtime::directory::{check_directory, writable_by_all};
use rustix::fs::{Access, access};
use rustix::io::Errno;

use super::{Finding, calls, vms as vms_of};
use crate::client::{ANSWER_TIMEOUT, Client, ClientError, how_to_start, say_if_slow};
use crate::guest::access_remedy;

const ABOUT: &str = "daemon";

const ABOUT_KEEPER: &str = "keeper";

/// The first finding says whether it answers. `is_expected` says that there should be one.
pub(super) fn look(
    client: &Client,
    runtime_dir: &Path,
    config: Option<&Path>,
    is_expected: bool,
) -> Vec<Finding> {
    let what = || Some("the daemon to answer".to_owned());
    match say_if_slow(ANSWER_TIMEOUT, what, || client.list()) {
        Ok(list) => {
            let count = list.vms.len();
            let found = format!(
                "it answers at {}, with {}",
                runtime_dir.display(),
                vms_of(count)
            );
            let networks = networks(client, &list.vms);
            let vms = list.vms.iter().map(guest);
            std::iter::once(Finding::fine(ABOUT, found))
                .chain(processes_of(client))
                .chain(list.unavailable.iter().filter_map(unavailable))
                .chain(vms)
                .chain(list.vms.iter().filter_map(windows))
                .chain(cards(&list.vms, &networks))
                .chain(idle_cards(&list.vms, &networks))
                .chain(missing_cards(&list.vms, &networks))
                .chain(links_down(&list.vms, &networks))
                .chain(host_sockets(&list.vms))
                .chain(writers(runtime_dir, &list.vms))
                .chain(calls::look(client))
                .collect()
        }
        Err(ClientError::NoDaemon { .. }) => {
            let found = format!("none serves {}", runtime_dir.display());
            let remedy = format!("start it with {}", how_to_start(runtime_dir, config));
            // One that has died has left its socket.
            let finding = match is_expected || client.socket().exists() {
                true => Finding::error(ABOUT, found, remedy),
                false => Finding::warning(ABOUT, found, remedy),
            };
            let mut findings = vec![finding];
            findings.extend(place(runtime_dir));
            findings.extend(writers(runtime_dir, &[]));
            findings
        }
        Err(ClientError::Denied { socket }) => vec![Finding::error(
            ABOUT,
            format!(
                "no permission to use the daemon's control socket {}",
                socket.display()
            ),
            access_remedy(&socket),
        )],
        Err(error @ ClientError::Stopped { .. }) => {
            vec![Finding::refused(ABOUT, error.to_string())]
        }
        Err(error) => vec![Finding::error(
            ABOUT,
            error.to_string(),
            "see the daemon's log",
        )],
    }
}

/// The processes beside the daemon.
fn processes_of(client: &Client) -> Vec<Finding> {
    let Ok(health) = client.health() else {
        return Vec::new();
    };
    let paths = health.paths_ended.then(|| {
        Finding::error(
            ABOUT,
            "its process `ringdown-paths` has ended: nothing can be added or removed whose path is in a directory that others may read or write, and calls to services at sockets there fail",
            "restart the daemon",
        )
    });
    paths
        .into_iter()
        .chain(keeper_of(client, &health))
        .collect()
}

/// What is known of the keeper, which the daemon asks something as for an upgrade: one that is stopped lives.
fn keeper_of(client: &Client, health: &Health) -> Vec<Finding> {
    let lives = health.keeper == Some(true);
    let what = || Some("the keeper to answer".to_owned());
    let ask = || client.hand_over_prospect().ok()?.hindrance;
    let hindrance = lives.then(|| say_if_slow(ANSWER_TIMEOUT, what, ask));
    keeper(health, hindrance.flatten())
}

/// What a restart of the daemon does, and what is in the way of that. A daemon of before does not say.
pub(super) fn keeper(health: &Health, hindrance: Option<String>) -> Vec<Finding> {
    let Some(has_keeper) = health.keeper else {
        return Vec::new();
    };
    let finding = match has_keeper {
        true if hindrance.is_some() => {
            Finding::refused(ABOUT_KEEPER, hindrance.unwrap_or_default())
        }
        true => Finding::fine(
            ABOUT_KEEPER,
            "in use: lines and networks of VMs, QEMU's too, go on when the daemon is restarted",
        ),
        false if health.keeper_ended => Finding::error(
            ABOUT_KEEPER,
            "it has ended since the daemon was started, and the daemon uses no other: a restart of the daemon cuts VMs off, and QEMU has to be started anew; VMs that are added are served, and not kept either",
            "when VMs may be started anew: see that a keeper runs (`systemctl restart ringdown-keeper`, or `ringdown hold --socket PATH`), and restart the daemon",
        ),
        false => Finding::fine(
            ABOUT_KEEPER,
            "none: a restart of the daemon cuts VMs off, and QEMU has to be started anew (`ringdown hold` and `serve --keeper` keep them)",
        ),
    };
    let restart = health.restart.iter();
    let restart = restart.map(|restart| format!("{} {restart}", restart.time));
    let restart = restart.map(|found| Finding::fine(ABOUT_KEEPER, found));
    std::iter::once(finding).chain(restart).collect()
}

/// Host sockets that this user may not connect to. Users with read access only have none.
pub(super) fn host_sockets(vms: &[VmStatus]) -> Option<Finding> {
    let is_denied = |vm: &&VmStatus| access(&vm.host, Access::WRITE_OK) == Err(Errno::ACCESS);
    let mut denied = vms.iter().filter(is_denied);
    let socket = &denied.next()?.host;
    let others = match denied.count() {
        0 => String::new(),
        others => format!(" and those of {} more", vms_of(others)),
    };
    Some(Finding::warning(
        "permissions",
        format!(
            "this user may not connect to {}{others}: exec, cp, forward and the other commands for guests fail",
            socket.display()
        ),
        access_remedy(socket),
    ))
}

/// Directories of host sockets in which every user may make sockets.
fn writers(runtime_dir: &Path, vms: &[VmStatus]) -> Vec<Finding> {
    let of_vms = vms.iter().filter_map(|vm| vm.host.parent());
    let directories: BTreeSet<&Path> = of_vms.chain([runtime_dir]).collect();
    let found = directories.into_iter().filter_map(writable_by_all);
    found
        .map(|(found, remedy)| Finding::error("permissions", found, format!("`{remedy}`")))
        .collect()
}

/// Whether a daemon that this user starts could make its runtime directory.
fn place(runtime_dir: &Path) -> Option<Finding> {
    let directory = match runtime_dir.exists() {
        true => runtime_dir,
        false => runtime_dir.parent()?,
    };
    let error = check_directory(directory, "--runtime-dir").err()?;
    Some(Finding::warning(
        "permissions",
        error.to_string(),
        "this matters only if this user is to run the daemon",
    ))
}

/// What a way to what is unavailable needs from outside.
const AGAIN: &str = "do what the reason says, or name another in the configuration and `ringdown reload`; the daemon tries again every few seconds by itself";

/// What the daemon lacks. VMs have findings of their own.
pub(super) fn unavailable(part: &UnavailablePart) -> Option<Finding> {
    let about = match part.kind {
        PartKind::Vm => return None,
        PartKind::Uplink => "networks",
        PartKind::PublishedPort => "ports",
    };
    Some(Finding::error(about, part.to_string(), AGAIN))
}

pub(super) fn guest(vm: &VmStatus) -> Finding {
    let about = "guests";
    let name = vm.full_name();
    let found = format!("{name}: {}", vm.state_in_words());
    let is_hybrid = vm.kind == LineKind::Hybrid;
    let start = format!("start its VMM with what `ringdown args {name} --vmm qemu` prints");
    let error = |remedy: &str| Finding::error(about, &found, remedy);
    let warning = |remedy: &str| Finding::warning(about, &found, remedy);
    match vm.state {
        _ if vm.unavailable.is_some() => error(AGAIN),
        _ if vm.another_waits => warning(
            "end one of the two VMMs, or give the second a VM of its own with `ringdown vm add`",
        ),
        VmState::Ready | VmState::Attached if is_hybrid && vm.last_fault.is_some() => error(
            "see that the daemon can use the directory of its VMM's socket: it tries again every few seconds by itself",
        ),
        VmState::Ready if vm.paused => warning("have its VMM let it go on (of QEMU: `cont`)"),
        VmState::Ready => match &vm.unanswered {
            Some(unanswered) => silent_agent(about, &name, unanswered),
            None => version(about, &name, vm),
        },
        VmState::Waiting if is_hybrid => own_vmm(about, found, vm),
        // What was wrong with a VMM that is not there any more.
        VmState::Waiting if vm.last_fault.is_some() => warning(&format!(
            "end that VMM if it still runs, and start one with what `ringdown args {name} --vmm qemu` prints, memory with share=on above all: it does not connect again by itself"
        )),
        // The VMM of a vsock line does not connect again.
        VmState::Waiting if vm.kind == LineKind::Vsock => warning(&format!(
            "{start}; if one still runs that was cut off, as by `ringdown vm rm`, end it first"
        )),
        VmState::Waiting => warning(&start),
        VmState::Attached | VmState::Booted if vm.last_fault.is_some() => error(&format!(
            "{start}, memory with share=on above all; if it is, see that its guest has a driver that follows the virtio specification"
        )),
        VmState::Attached if vm.is_quiet() => {
            warning("give the guest time to boot, or have its VMM wake it up")
        }
        VmState::Attached if vm.kind == LineKind::Serial => warning(&format!(
            "give the guest time to boot; then see that its VMM has the port org.ringdown.agent.0, as `ringdown args {name} --vmm qemu` prints it, that the guest has the driver of such ports (`modprobe virtio_console`), and that ringdown-agent runs in it"
        )),
        VmState::Attached => warning(
            "give the guest time to boot; then see that its memory is shared (share=on) and that it has the vsock driver (`modprobe vmw_vsock_virtio_transport`)",
        ),
        VmState::Booted | VmState::Joined => warning(&format!(
            "give the guest time to boot; then start ringdown-agent in it: docs/agent-install.md, or `ringdown agent install {name} --to root@ADDRESS`"
        )),
    }
}

/// An agent that is there and did not answer its last caller. What is done about it is done from outside.
fn silent_agent(about: &'static str, name: &str, unanswered: &Unanswered) -> Finding {
    Finding::warning(
        about,
        format!("{name}: {unanswered}"),
        format!(
            "`ringdown exec {name} true` tries again; if it stays silent, see in its VMM's monitor whether the guest runs (of QEMU: `info status`), and reset it there (of QEMU: `system_reset`), or end its VMM and start it again"
        ),
    )
}

/// A VMM with a vsock device of its own that is not there.
fn own_vmm(about: &'static str, found: String, vm: &VmStatus) -> Finding {
    let start = format!(
        "start its VMM with what `ringdown args {} --vmm firecracker` prints, or `--vmm cloud-hypervisor`",
        vm.full_name()
    );
    match vm.last_fault {
        Some(_) => Finding::error(
            about,
            found,
            format!("take away what is there, or name another path; then {start}"),
        ),
        None => Finding::warning(about, found, start),
    }
}

/// Windows that are not in memory.
pub(super) fn windows(vm: &VmStatus) -> Option<Finding> {
    let (found, remedy) = crate::windows::not_in_memory(vm)?;
    let found = format!("{}: {found}", vm.full_name());
    Some(Finding::error("windows", found, remedy))
}

/// Cards of guests that do not work, and what was wrong with those of VMMs that have left. Where another VMM serves the line since, nothing is said.
pub(super) fn cards(vms: &[VmStatus], networks: &[NetworkDetails]) -> Vec<Finding> {
    let is_attached = |name: &String, network: &String| {
        let details = networks.iter();
        let details = details.filter(|details| details.network.full_name() == *network);
        let mut ports = details.flat_map(|details| &details.ports);
        ports.any(|port| port.vm.as_ref() == Some(name) && port.attached)
    };
    let mut findings = Vec::new();
    for vm in vms {
        let name = vm.full_name();
        for port in &vm.nets {
            let network = &port.network;
            let Some(fault) = &port.last_fault else {
                continue;
            };
            let found = format!("the card of {name} in {network}: {fault}");
            let remedy =
                format!("start its VMM with what `ringdown args {name} --vmm qemu` prints");
            match (is_attached(&name, network), vm.attached) {
                (true, _) => findings.push(Finding::error("networks", found, remedy)),
                (false, false) => findings.push(Finding::warning("networks", found, remedy)),
                (false, true) => {}
            }
        }
    }
    findings
}

/// The networks in which these VMs have cards, as far as they can be shown.
fn networks(client: &Client, vms: &[VmStatus]) -> Vec<NetworkDetails> {
    let names: BTreeSet<&String> = vms.iter().flat_map(networks_of).collect();
    let details = names.into_iter().map(|name| client.network(name));
    details.filter_map(Result::ok).collect()
}

fn networks_of(vm: &VmStatus) -> impl Iterator<Item = &String> {
    vm.nets.iter().map(|port| &port.network)
}

/// Cards without a driver, of guests that have booted. Of one that is paused it is not known: its VMM has stopped the card's rings too.
pub(super) fn idle_cards(vms: &[VmStatus], networks: &[NetworkDetails]) -> Vec<Finding> {
    let has_booted = |name: &String| {
        let mut vms = vms.iter();
        let is_booting = |vm: &VmStatus| matches!(vm.state, VmState::Waiting | VmState::Attached);
        vms.any(|vm| vm.full_name() == *name && !is_booting(vm) && !vm.paused)
    };
    let mut findings = Vec::new();
    for details in networks {
        let idle = details.ports.iter();
        let idle = idle.filter(|port| port.attached && !port.driver_ready);
        for name in idle.filter_map(|port| port.vm.as_ref()) {
            if !has_booted(name) {
                continue;
            }
            let network = details.network.full_name();
            findings.push(Finding::warning(
                "networks",
                format!("a VMM is connected for the card of {name} in {network}, and no driver of its guest runs it"),
                "where the VMM has no more than the card's chardev, add the netdev and the device (docs/qemu.md); else load the driver in the guest (`modprobe virtio_net`)",
            ));
        }
    }
    findings
}

/// Cards that VMMs which run do not have, as when their network was added meanwhile. A port whose link is down takes no VMM.
pub(super) fn missing_cards(vms: &[VmStatus], networks: &[NetworkDetails]) -> Vec<Finding> {
    let runs = |name: &String| {
        let mut vms = vms.iter();
        vms.any(|vm| vm.full_name() == *name && vm.attached)
    };
    let mut findings = Vec::new();
    for details in networks {
        let network = details.network.full_name();
        let missing = details.ports.iter();
        let missing = missing.filter(|port| !port.attached && port.link_up);
        for name in missing.filter_map(|port| port.vm.as_ref()) {
            if runs(name) {
                findings.push(Finding::warning(
                    "networks",
                    format!("{name} runs without a card in {network}"),
                    format!("put one in (docs/qemu.md, \"A card that comes while the guest runs\"), or end its VMM and start it with what `ringdown args {name} --vmm qemu` prints"),
                ));
            }
        }
    }
    findings
}

/// Ports that were taken off their network by hand. Those of a VM that is not served have no link.
fn links_down(vms: &[VmStatus], networks: &[NetworkDetails]) -> Vec<Finding> {
    let is_served = |name: &&String| {
        let mut vms = vms.iter();
        vms.any(|vm| vm.full_name() == **name && vm.unavailable.is_none())
    };
    let mut findings = Vec::new();
    for details in networks {
        let network = details.network.full_name();
        let down = details.ports.iter().filter(|port| !port.link_up);
        for name in down.filter_map(|port| port.vm.as_ref()).filter(is_served) {
            findings.push(Finding::warning(
                "networks",
                format!("the link of {name} in {network} was taken down by `ringdown net link`"),
                format!("`ringdown net link {name} {network} up`"),
            ));
        }
    }
    findings
}

/// The cards that are missing now, each with what to do about it.
pub(crate) fn lacking_cards(client: &Client) -> Vec<String> {
    let vms = client.list().map(|list| list.vms).unwrap_or_default();
    let findings = missing_cards(&vms, &networks(client, &vms)).into_iter();
    let words = findings.map(|found| match found.remedy {
        Some(remedy) => format!("{}: {remedy}", found.found),
        None => found.found,
    });
    words.collect()
}

fn version(about: &'static str, name: &str, vm: &VmStatus) -> Finding {
    let own = env!("CARGO_PKG_VERSION");
    let software = vm
        .agent
        .as_ref()
        .map_or("", |agent| agent.software.as_str());
    if software.split_whitespace().any(|word| word == own) {
        return Finding::fine(about, format!("{name}: {software} is ready"));
    }
    // It is the guest's word, which may be anything.
    Finding::warning(
        about,
        format!("{name}: its agent is {software:?}, this is ringdown {own}"),
        format!(
            "`ringdown cp ringdown-agent {name}:/usr/local/sbin/ringdown-agent`, and restart it there"
        ),
    )
}
