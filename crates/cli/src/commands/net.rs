//! `ringdown net`: the networks of the running daemon.

use std::collections::BTreeMap;
use std::fmt::Display;

use api::{LinkRequest, MacInfo, NetworkDetails, NetworkInfo, NetworkPort, PortKind, VmPort};

use super::table::{row, table};
use super::{print, print_json, print_named};
use crate::arguments::{LinkState, NetCapture, NetCommand, NetLink, NetList, NetMacs, NetShow};
use crate::client::Client;
use crate::failure::Failure;

/// Does what the command asks for.
pub fn run(client: &Client, command: &NetCommand) -> Result<(), Failure> {
    match command {
        NetCommand::Ls(options) => list(client, options),
        NetCommand::Show(options) => show(client, options),
        NetCommand::Macs(options) => macs(client, options),
        NetCommand::Link(options) => link(client, options),
        NetCommand::Capture(options) => capture(client, options),
    }
}

fn list(client: &Client, options: &NetList) -> Result<(), Failure> {
    let list = client.networks()?;
    if options.json {
        return print_json(&list);
    }
    if list.networks.is_empty() {
        // On standard error: a script that counts lines counts none.
        eprintln!(
            "no networks yet: add a [[network]] to the configuration file, or start the daemon with --network NAME"
        );
        return Ok(());
    }
    print(&networks_in_words(&list.networks))
}

fn show(client: &Client, options: &NetShow) -> Result<(), Failure> {
    let details = client.network(&options.network)?;
    match options.json {
        true => print_named("network", &details),
        false => print(&network_in_words(&details)),
    }
}

fn macs(client: &Client, options: &NetMacs) -> Result<(), Failure> {
    let list = client.macs(&options.network)?;
    match options.json {
        true => print_json(&list),
        false => print(&macs_in_words(&list.macs)),
    }
}

fn link(client: &Client, options: &NetLink) -> Result<(), Failure> {
    let up = options.state == LinkState::Up;
    // By its full name: an alias may have been written.
    let vm = match client.show(&options.vm) {
        Ok(vm) => vm.full_name(),
        Err(_) if is_swapped(client, &options.vm, &options.network) => {
            return Err(Failure::usage(format!(
                "{vm:?} is a network and {network:?} a VM, and the VM comes first: `ringdown net link {network} {vm} {state}`",
                vm = options.vm,
                network = options.network,
                state = if up { "up" } else { "down" },
            )));
        }
        Err(unknown) => return Err(unknown),
    };
    client.set_link(&options.network, &vm, LinkRequest { up })?;
    if !options.json {
        return Ok(());
    }
    let details = client.network(&options.network)?;
    let mut ports = details.ports.iter();
    let port = ports.find(|port| port.vm.as_deref() == Some(&vm));
    print_named("port", port)
}

fn capture(client: &Client, options: &NetCapture) -> Result<(), Failure> {
    let network = &options.network;
    match (client.network(network), options.of_vm()) {
        (Ok(_), _) => super::capture::network(client, options),
        (Err(_), Some(vm)) if is_swapped(client, vm, network) => Err(Failure::usage(format!(
            "{network:?} is a VM and {vm:?} a network, and the network comes first: `ringdown net capture {vm} {network}`"
        ))),
        (Err(unknown), _) => Err(unknown),
    }
}

/// Whether the network was given for the VM, and the VM for the network.
fn is_swapped(client: &Client, vm: &str, network: &str) -> bool {
    client.network(vm).is_ok() && client.show(network).is_ok()
}

fn networks_in_words(networks: &[NetworkInfo]) -> String {
    let header = [
        "NAME", "IPV4", "IPV6", "MTU", "UPLINK", "VMS", "ATTACHED", "RECEIVED", "REFUSED",
    ];
    let cells = |network: &NetworkInfo| {
        vec![
            network.full_name(),
            or_dash(network.ipv4.as_ref()),
            or_dash(network.ipv6.as_ref()),
            network.mtu.to_string(),
            or_dash(network.uplink.as_ref()),
            network.vms.to_string(),
            network.attached.to_string(),
            count(&network.counters, "received_frames"),
            count(&network.counters, "refused_frames"),
        ]
    };
    let rows = std::iter::once(row(header)).chain(networks.iter().map(cells));
    table(&rows.collect::<Vec<_>>())
}

fn network_in_words(details: &NetworkDetails) -> String {
    let network = &details.network;
    let answers = [
        ("DHCP", network.dhcp),
        ("DNS", network.dns),
        ("router advertisements", network.router_advertisements),
    ];
    let answers: Vec<&str> = answers
        .into_iter()
        .filter_map(|(what, is_on)| is_on.then_some(what))
        .collect();
    let answers = match answers.is_empty() {
        true => "-".to_owned(),
        false => answers.join(", "),
    };
    let uplink = network.uplink.as_ref().map(|uplink| match network.gateway {
        Some(gateway) => format!("{uplink}, gateway {gateway}"),
        None => uplink.clone(),
    });
    let facts = [
        ("network", network.full_name()),
        ("ipv4", or_dash(network.ipv4.as_ref())),
        ("ipv6", or_dash(network.ipv6.as_ref())),
        ("pool", or_dash(network.pool.as_ref())),
        ("mtu", network.mtu.to_string()),
        ("names", format!("NAME.{}", network.dns_domain)),
        ("answers", answers),
        ("uplink", or_dash(uplink.as_ref())),
        ("thread", or_dash(network.thread.as_ref())),
    ];
    let facts = facts.map(|(name, value)| vec![format!("{name}:"), value]);
    let mut text = table(&facts);
    text.push('\n');
    text.push_str(&ports_in_words(details));
    for port in &details.ports {
        let reasons = port.refused.iter().filter(|(_, count)| **count > 0);
        let reasons: Vec<String> = reasons
            .map(|(reason, count)| format!("{} {count}", reason.replace('_', " ")))
            .collect();
        if !reasons.is_empty() {
            let owner = owner(port.kind, port.vm.as_ref());
            text.push_str(&format!("refused from {owner}: {}\n", reasons.join(", ")));
        }
        let attachment = port.attachment.as_ref();
        if let Some(fault) = attachment.and_then(|attachment| attachment.last_fault.as_ref()) {
            let owner = owner(port.kind, port.vm.as_ref());
            text.push_str(&format!("the last fault of {owner}: {fault}\n"));
        }
    }
    text
}

fn ports_in_words(details: &NetworkDetails) -> String {
    let network = &details.network;
    let own_ipv4 = network
        .ipv4
        .as_ref()
        .and_then(|ipv4| ipv4.split('/').next());
    let header = [
        "PORT",
        "MAC",
        "IPV4",
        "VLAN",
        "LINK",
        "VMM",
        "RECEIVED",
        "SENT",
        "REFUSED",
        "DROPPED",
        "INTERRUPTS",
        "KICKS",
    ];
    let cells = |port: &NetworkPort| {
        let of_vm = |tell: fn(&VmPort) -> String| port.attachment.as_ref().map(tell);
        let saved = |what: &str| {
            let saved = port.counters.get(format!("{what}_saved").as_str());
            let saved = saved.map(|saved| format!(" ({saved})"));
            format!(
                "{}{}",
                count(&port.counters, what),
                saved.unwrap_or_default()
            )
        };
        let (mac, ipv4) = match port.kind {
            PortKind::Station => (network.mac.to_string(), or_dash(own_ipv4)),
            _ => (
                or_dash(of_vm(|port| port.mac.to_string())),
                or_dash(of_vm(|port| or_dash(port.ipv4))),
            ),
        };
        vec![
            owner(port.kind, port.vm.as_ref()),
            mac,
            ipv4,
            or_dash(of_vm(|port| port.vlan.clone())),
            if port.link_up { "up" } else { "down" }.to_owned(),
            match (port.kind, port.attached, port.driver_ready) {
                (PortKind::Station, ..) => "-",
                // Whether there still is one cannot be seen.
                (_, false, _) if !port.link_up => "taken off",
                (_, false, _) => "waiting",
                (_, true, false) => "attached",
                (_, true, true) => "running",
            }
            .to_owned(),
            count(&port.counters, "received_frames"),
            count(&port.counters, "sent_frames"),
            count(&port.counters, "refused_frames"),
            count(&port.counters, "dropped_frames"),
            saved("interrupts"),
            saved("kicks"),
        ]
    };
    let rows = std::iter::once(row(header)).chain(details.ports.iter().map(cells));
    table(&rows.collect::<Vec<_>>())
}

fn macs_in_words(macs: &[MacInfo]) -> String {
    let cells = |entry: &MacInfo| {
        let seconds = |age_ms: u64| format!("{} s ago", age_ms / 1000);
        vec![
            entry.mac.to_string(),
            or_dash(entry.vlan),
            owner(entry.kind, entry.vm.as_ref()),
            if entry.fixed { "given" } else { "learned" }.to_owned(),
            or_dash(entry.age_ms.map(seconds)),
        ]
    };
    let header = row(["MAC", "VLAN", "PORT", "KIND", "SEEN"]);
    let rows = std::iter::once(header).chain(macs.iter().map(cells));
    table(&rows.collect::<Vec<_>>())
}

fn owner(kind: PortKind, vm: Option<&String>) -> String {
    vm.cloned().unwrap_or_else(|| kind.to_string())
}

fn or_dash(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn count(counters: &BTreeMap<String, u64>, name: &str) -> String {
    or_dash(counters.get(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn details() -> NetworkDetails {
        let details = serde_json::json!({
            "name": "lan", "domain": "default", "mtu": 1500, "mac": "02:00:00:01:00:00", "ipv4": "10.64.0.1/24",
            "dns_domain": "lan", "dhcp": true, "dns": true, "router_advertisements": false, "uplink": "tap rd0",
            "gateway": "10.64.0.2", "thread": "net-2", "vms": 1, "attached": 1, "counters": { "received_frames": 7 },
            "ports": [
                {
                    "kind": "vm", "vm": "web", "attached": true, "driver_ready": true, "link_up": true,
                    "attachment": {
                        "network": "lan", "vhost_user": "/r/web.net-lan.vhost", "mac": "02:00:00:01:00:03",
                        "ipv4": "10.64.0.3", "mtu": 1500, "queue_pairs": 1, "vlan": "1", "isolated": false,
                        "learn": false, "moderation": "adaptive",
                    },
                    "counters": {
                        "received_frames": 7, "sent_frames": 5, "refused_frames": 2, "interrupts": 3, "interrupts_saved": 2,
                    },
                    "refused": { "other_source": 2, "rogue_dhcp": 0 },
                },
                { "kind": "station", "attached": true, "driver_ready": true, "link_up": true },
            ],
        });
        serde_json::from_value(details).unwrap()
    }

    #[test]
    fn a_network_is_shown_with_its_ports_and_what_was_refused() {
        assert_eq!(
            network_in_words(&details()),
            "network:  lan\n\
             ipv4:     10.64.0.1/24\n\
             ipv6:     -\n\
             pool:     -\n\
             mtu:      1500\n\
             names:    NAME.lan\n\
             answers:  DHCP, DNS\n\
             uplink:   tap rd0, gateway 10.64.0.2\n\
             thread:   net-2\n\
             \n\
             PORT       MAC                IPV4       VLAN  LINK  VMM      RECEIVED  SENT  REFUSED  DROPPED  INTERRUPTS  KICKS\n\
             web        02:00:00:01:00:03  10.64.0.3  1     up    running  7         5     2        -        3 (2)       -\n\
             (network)  02:00:00:01:00:00  10.64.0.1  -     up    -        -         -     -        -        -           -\n\
             refused from web: other source 2\n"
        );
    }

    #[test]
    fn a_port_is_shown_with_its_last_fault() {
        let mut details = details();
        let web = details.ports[0].attachment.as_mut().unwrap();
        web.last_fault = Some("a word of it".to_owned());
        let text = network_in_words(&details);
        assert!(
            text.ends_with("\nthe last fault of web: a word of it\n"),
            "{text}"
        );
    }

    #[test]
    fn a_port_whose_link_is_down_says_that_its_vmm_is_taken_off() {
        let mut details = details();
        let port = &mut details.ports[0];
        (port.attached, port.driver_ready, port.link_up) = (false, false, false);
        let text = network_in_words(&details);
        assert!(text.contains("down  taken off"), "{text}");
    }

    #[test]
    fn networks_are_a_table() {
        assert_eq!(
            networks_in_words(&[details().network]),
            "NAME  IPV4          IPV6  MTU   UPLINK   VMS  ATTACHED  RECEIVED  REFUSED\n\
             lan   10.64.0.1/24  -     1500  tap rd0  1    1         7         -\n"
        );
    }

    #[test]
    fn addresses_are_a_table() {
        let mac = |text: &str| serde_json::from_str(text).unwrap();
        let macs = [
            mac(r#"{"mac":"02:00:00:01:00:03","kind":"vm","vm":"web","fixed":true}"#),
            mac(
                r#"{"mac":"52:54:00:00:00:01","vlan":10,"kind":"uplink","fixed":false,"age_ms":5400}"#,
            ),
        ];
        assert_eq!(
            macs_in_words(&macs),
            "MAC                VLAN  PORT      KIND     SEEN\n\
             02:00:00:01:00:03  -     web       given    -\n\
             52:54:00:00:00:01  10    (uplink)  learned  5 s ago\n"
        );
    }
}
