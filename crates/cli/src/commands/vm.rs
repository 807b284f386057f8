//! `ringdown vm`: the VMs of the running daemon.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use api::{
    ChardevInfo, LineKind, NewSerial, NewVm, PartKind, Restart, VMM_RUNS_ON, VmPort, VmStatus,
};
use config::input::{InputError, check_socket_path, parse_cid, parse_full_name};
use config::limits::parse_member;
use config::{NewPort, parse_net_option};
use jiff::{SignedDuration, Timestamp};

use super::{print, print_json, print_named};
use crate::arguments::{VmAdd, VmList, VmRemove};
use crate::client::Client;
use crate::failure::Failure;
use crate::lines::note;
use crate::windows;

/// For so long a restart of the daemon is shown beside the VMs.
const RESTART_IS_NEWS: SignedDuration = SignedDuration::from_hours(1);

/// `ringdown vm add`.
pub fn add(client: &Client, options: VmAdd) -> Result<(), Failure> {
    let (domain, name) = parse_full_name("a VM", &options.name)?;
    let domain = match (options.domain, options.name.contains('/')) {
        (Some(other), true) if other != domain => {
            let message = format!(
                "{:?} is of another domain than {other:?}: leave --domain out",
                options.name
            );
            return Err(Failure::usage(message));
        }
        (Some(domain), _) => Some(domain),
        (None, is_scoped) => is_scoped.then(|| domain.to_owned()),
    };
    let cid = options.cid.as_deref().map(parse_cid).transpose()?;
    let status = client.add(&NewVm {
        name: name.to_owned(),
        domain,
        groups: options.group,
        aliases: options.alias,
        cid: cid.map(u64::from),
        vhost_user: options.vhost_user.as_deref().map(socket).transpose()?,
        host: options.host.as_deref().map(socket).transpose()?,
        hybrid: options.hybrid.as_deref().map(socket).transpose()?,
        serial: match &options.serial {
            None => None,
            Some(None) => Some(NewSerial::Default(true)),
            Some(Some(path)) => Some(NewSerial::At(socket(path)?)),
        },
        serial_connect: options.serial_connect.as_deref().map(socket).transpose()?,
        nets: nets(&options.net)?,
        windows: options.windows,
        qmp: options.qmp.as_deref().map(socket).transpose()?,
        limits: limits(&options.limit)?,
    })?;
    windows::note_not_in_memory(&status);
    note_unkept(client);
    if options.json {
        return print_named("vm", &status);
    }
    let (name, cid, host) = (status.full_name(), status.cid, status.host.display());
    let see = |path: &Path| format!("{} (see `ringdown args {name} --vmm qemu`)", path.display());
    let vmm = match (&status.vhost_user, &status.serial) {
        (Some(path), _) | (None, Some(ChardevInfo::Listen(path))) => see(path),
        (None, Some(ChardevInfo::Connect(path))) => format!("listens at {}", see(path)),
        (None, None) => {
            let socket = status.vmm_socket().display();
            format!("its own at {socket}, with the sockets that it calls at {socket}_PORT")
        }
    };
    let net = |port: &VmPort| {
        let ipv4 = port.ipv4.map(|ipv4| format!(" and {ipv4}"));
        let ipv4 = ipv4.unwrap_or_default();
        format!("  net:  {} with {}{ipv4}\n", port.network, port.mac)
    };
    let nets: String = status.nets.iter().map(net).collect();
    print(&format!(
        "added {name} with CID {cid}\n  VMM:  {vmm}\n  host: {host}\n{nets}"
    ))
}

/// Says of VMs that were just added that they are not kept, where the keeper has ended.
pub(super) fn note_unkept(client: &Client) {
    if client.health().is_ok_and(|health| health.keeper_ended) {
        note(
            "warning: the keeper has ended: what was added is served, and cut off when the daemon ends (`ringdown check`)",
        );
    }
}

/// `ringdown vm ls`.
pub fn list(client: &Client, options: &VmList) -> Result<(), Failure> {
    let list = client.list()?;
    if options.json {
        return print_json(&list);
    }
    if list.vms.is_empty() {
        // On standard error: a script that counts lines counts none.
        eprintln!("no VMs yet: add one with `ringdown vm add NAME`");
        return Ok(());
    }
    print(&table(&list.vms))?;
    for vm in list.vms.iter().filter(|vm| vm.is_quiet()) {
        note(&format!("{}: {}", vm.full_name(), vm.state_in_words()));
    }
    // Those of VMs are in the table.
    let beside = list.unavailable.iter();
    for part in beside.filter(|part| part.kind != PartKind::Vm) {
        eprintln!("{part}");
    }
    let restart = list.restart.iter();
    for restart in restart.filter(|restart| is_news(restart, Timestamp::now())) {
        eprintln!("{} {restart}", restart.time);
    }
    Ok(())
}

/// Whether a restart is recent enough to be shown beside the VMs.
fn is_news(restart: &Restart, now: Timestamp) -> bool {
    let time = restart.time.parse::<Timestamp>();
    time.is_ok_and(|time| now.duration_since(time) < RESTART_IS_NEWS)
}

/// Removes a VM.
pub fn remove(client: &Client, options: &VmRemove) -> Result<(), Failure> {
    let vm = client.show(&options.name)?;
    client.remove(&options.name)?;
    if options.json {
        return print_named("vm", &vm);
    }
    let name = vm.full_name();
    let vmm = match vm.attached {
        true => format!("; {VMM_RUNS_ON}"),
        false => String::new(),
    };
    let again = match vm.configured {
        true => {
            "; the configuration names it, and the next `ringdown reload` adds it again: take it out there, too"
        }
        false => "",
    };
    print(&format!("removed {name}{vmm}{again}\n"))
}

/// Each port as it was written; the daemon checks what it says.
fn nets(options: &[String]) -> Result<Vec<NewPort>, Failure> {
    // Where there is no working directory, a relative path is refused as one.
    let directory = std::env::current_dir().unwrap_or_default();
    let nets = options
        .iter()
        .map(|text| parse_net_option(text, &directory));
    Ok(nets.collect::<Result<_, InputError>>()?)
}

/// Each limit once: of two it would not be clear which one is meant.
fn limits(options: &[String]) -> Result<BTreeMap<String, u64>, Failure> {
    let mut limits = BTreeMap::new();
    for option in options {
        let (name, value) = parse_member(option)?;
        if limits.insert(name, value).is_some() {
            let key = option.split('=').next().unwrap_or_default().to_owned();
            return Err(InputError::RepeatedKey { key }.into());
        }
    }
    Ok(limits)
}

/// The daemon has a working directory of its own, so a path is sent from the root.
fn socket(path: &Path) -> Result<PathBuf, Failure> {
    let absolute = std::path::absolute(path)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    check_socket_path(&absolute)?;
    Ok(absolute)
}

fn table(vms: &[VmStatus]) -> String {
    // A person who has one domain need not know that there are domains.
    let domains = vms.iter().any(|vm| vm.domain != vms[0].domain);
    let mut header = vec!["NAME", "CID", "STATE", "CIRCUITS", "GUEST", "HOST SOCKET"];
    // Nor that there are other lines than those of vsock.
    let kinds = vms.iter().any(|vm| vm.kind != LineKind::Vsock);
    if kinds {
        header.insert(2, "LINE");
    }
    if domains {
        header.insert(0, "DOMAIN");
    }
    let faults = vms.iter().any(|vm| vm.fault().is_some());
    if faults {
        header.push("FAULT");
    }
    let header = header.into_iter().map(str::to_owned).collect();
    let rows = vms.iter().map(|vm| {
        let guest = vm
            .agent
            .as_ref()
            .map_or("-", |agent| agent.hostname.as_str());
        let mut cells = vec![
            if domains {
                vm.name.clone()
            } else {
                vm.full_name()
            },
            vm.cid.to_string(),
            vm.state.to_string(),
            vm.circuits.to_string(),
            guest.to_owned(),
            vm.host.display().to_string(),
        ];
        if kinds {
            cells.insert(2, vm.kind.to_string());
        }
        if domains {
            cells.insert(0, vm.domain.clone());
        }
        if faults {
            cells.push(vm.fault().unwrap_or("-".into()).into_owned());
        }
        cells
    });
    let rows: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
    super::table::table(&rows)
}

#[cfg(test)]
mod tests {
    use api::{AgentInfo, VmState};

    use super::*;

    #[test]
    fn a_restart_is_shown_for_an_hour() {
        let restart = serde_json::json!({
            "restarts": 1, "version_before": "0.1.0", "ended": "died", "time": "2026-11-22T12:00:00.500000Z",
            "lines": 1, "circuits": 0, "reset": 0,
        });
        let restart: Restart = serde_json::from_value(restart).unwrap();
        let at = |now: &str| is_news(&restart, now.parse().unwrap());
        assert!(at("2026-11-22T12:00:00.5Z"));
        assert!(at("2026-11-22T13:00:00Z"));
        assert!(!at("2026-11-22T13:00:01Z"));
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let vm = |name: &str, state, agent| VmStatus {
            name: name.to_owned(),
            domain: "default".to_owned(),
            aliases: Vec::new(),
            groups: Vec::new(),
            cid: 3,
            kind: LineKind::Vsock,
            state,
            attached: true,
            last_fault: None,
            last_fault_time: None,
            cut_off: false,
            another_waits: false,
            unanswered: None,
            paused: false,
            unavailable: None,
            configured: false,
            vhost_user: Some("/r/v".into()),
            serial: None,
            hybrid: None,
            host: "/r/h".into(),
            channels: Vec::new(),
            nets: Vec::new(),
            windows: None,
            agent,
            circuits: 12,
            limits: Default::default(),
            usage: Default::default(),
            counters: Default::default(),
        };
        let agent = AgentInfo {
            software: String::new(),
            hostname: "db.example".to_owned(),
            boot_id: String::new(),
            generation: String::new(),
            capabilities: Vec::new(),
        };
        let booting = vm("a", VmState::Attached, None);
        assert!(!booting.is_quiet());
        let asleep = VmStatus {
            counters: [("packets_from_guest".to_owned(), 7)].into(),
            ..booting
        };
        assert!(asleep.is_quiet());
        let not_shared = VmStatus {
            last_fault: Some("memory that is not shared".to_owned()),
            ..asleep.clone()
        };
        assert!(!not_shared.is_quiet());
        assert!(
            asleep
                .state_in_words()
                .contains("as after `ringdown suspend`")
        );
        let text = table(&[
            vm("a", VmState::Waiting, None),
            vm("database", VmState::Ready, Some(agent)),
        ]);
        assert_eq!(
            text,
            "NAME      CID  STATE    CIRCUITS  GUEST       HOST SOCKET\n\
             a         3    waiting  12        -           /r/h\n\
             database  3    ready    12        db.example  /r/h\n"
        );
        let red = VmStatus {
            domain: "red".to_owned(),
            ..vm("a", VmState::Waiting, None)
        };
        assert!(table(std::slice::from_ref(&red)).contains("\nred/a  3 "));
        assert_eq!(
            table(&[vm("a", VmState::Waiting, None), red]),
            "DOMAIN   NAME  CID  STATE    CIRCUITS  GUEST  HOST SOCKET\n\
             default  a     3    waiting  12        -      /r/h\n\
             red      a     3    waiting  12        -      /r/h\n"
        );
        let serial = VmStatus {
            kind: LineKind::Serial,
            ..vm("old", VmState::Booted, None)
        };
        assert_eq!(
            table(&[vm("a", VmState::Waiting, None), serial]),
            "NAME  CID  LINE    STATE    CIRCUITS  GUEST  HOST SOCKET\n\
             a     3    vsock   waiting  12        -      /r/h\n\
             old   3    serial  booted   12        -      /r/h\n"
        );
        let faulty = VmStatus {
            last_fault: Some("a word of it".to_owned()),
            another_waits: false,
            unanswered: None,
            configured: false,
            ..vm("b", VmState::Attached, None)
        };
        assert_eq!(
            table(&[vm("a", VmState::Waiting, None), faulty]),
            "NAME  CID  STATE     CIRCUITS  GUEST  HOST SOCKET  FAULT\n\
             a     3    waiting   12        -      /r/h         -\n\
             b     3    attached  12        -      /r/h         a word of it\n"
        );
    }

    #[test]
    fn of_the_faults_of_a_line_and_its_cards_the_newest_is_shown() {
        let fault = |line: Option<&str>, card: Option<&str>| {
            let mut vm = serde_json::json!({
                "name": "web", "cid": 3, "state": "waiting", "host": "/r/web.sock", "circuits": 0, "last_fault": "of its line",
                "nets": [{
                    "network": "lan", "vhost_user": "/r/n", "mac": "02:00:00:00:00:03", "last_fault": "of its card", "mtu": 1500,
                    "queue_pairs": 1, "vlan": "1", "isolated": false, "learn": false, "moderation": "adaptive",
                }],
            });
            for (place, time) in [("", line), ("/nets/0", card)] {
                let part = vm.pointer_mut(place).unwrap();
                match time {
                    Some(time) => {
                        part["last_fault_time"] = format!("2026-11-22T12:00:{time}Z").into()
                    }
                    None => drop(part.as_object_mut().unwrap().remove("last_fault")),
                }
            }
            let vm: VmStatus = serde_json::from_value(vm).unwrap();
            vm.fault().map(|fault| fault.into_owned())
        };
        let (of_line, of_card) = (
            Some("of its line".to_owned()),
            Some("card in lan: of its card".to_owned()),
        );
        assert_eq!(fault(Some("01.000000"), Some("01.000001")), of_card);
        assert_eq!(fault(Some("02.000000"), Some("01.000001")), of_line);
        assert_eq!(fault(Some("02.000000"), None), of_line);
        assert_eq!(fault(None, Some("01.000000")), of_card);
        assert_eq!(fault(None, None), None);
    }
}
