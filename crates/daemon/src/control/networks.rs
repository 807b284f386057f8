//! The networks of a running daemon: which there are, their ports, and the links of these.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use api::{MacInfo, NetworkDetails, NetworkInfo, NetworkPort, PortKind, VmPort};
use config::net::{NetworkSpec, PortSpec, vlan_in_words};
use config::{LineSpec, Plan};
use device::CaptureOptions;
use l2::bridge::VlanId;

use super::{Control, known_vm, owned};
use crate::capture::CaptureReader;
use crate::control_error::ControlError;
use crate::events::rfc_3339;
use crate::line::Counters;
use crate::net::{MacStatus, NetError, NetworkStatus, PortOwner, PortStatus};

impl Control {
    /// The networks, by full name. Waits for their worker, as all that asks about networks does.
    pub fn networks(&self) -> Vec<NetworkInfo> {
        let details = self.networks_in_detail().into_iter();
        details.map(|details| details.network).collect()
    }

    /// One network with its ports.
    ///
    /// # Errors
    /// [`ControlError::UnknownNetwork`].
    pub fn network(&self, name: &str) -> Result<NetworkDetails, ControlError> {
        let in_force = self.in_force();
        let plan = &in_force.book.plan;
        let spec = known(plan, name)?;
        let known = Known::new(self.parts.net.networks());
        Ok(details(&Members::of(plan), spec, &known))
    }

    /// Every network with its ports.
    pub fn networks_in_detail(&self) -> Vec<NetworkDetails> {
        let known = Known::new(self.parts.net.networks());
        let in_force = self.in_force();
        let plan = &in_force.book.plan;
        let members = Members::of(plan);
        let networks = plan.networks();
        networks
            .map(|spec| details(&members, spec, &known))
            .collect()
    }

    /// The addresses that a network knows, in their order.
    ///
    /// # Errors
    /// [`ControlError::UnknownNetwork`].
    pub fn macs(&self, name: &str) -> Result<Vec<MacInfo>, ControlError> {
        let name = known(&self.in_force().book.plan, name)?.full_name();
        let mut macs = self.parts.net.macs(&name)?;
        macs.sort_by_key(|status| (status.vlan, status.mac));
        Ok(macs.into_iter().map(mac).collect())
    }

    /// Captures the frames of a network, or of one VM's port. The VM may be named by an alias.
    ///
    /// # Errors
    /// [`ControlError::UnknownNetwork`], [`ControlError::Unknown`], [`ControlError::Net`].
    pub async fn capture(
        self: &Arc<Self>,
        name: &str,
        vm: Option<&str>,
        options: CaptureOptions,
    ) -> Result<CaptureReader, ControlError> {
        let in_force = self.in_force();
        let plan = &in_force.book.plan;
        let network = known(plan, name)?.full_name();
        let vm = match vm {
            Some(vm) => Some(known_vm(plan, vm)?.full_name()),
            None => None,
        };
        let (sender, reader) = self.parts.captures.queue();
        let of = (network.clone(), vm.clone());
        let begin = move |control: &Control| {
            let net = &control.parts.net;
            net.capture(&of.0, of.1.as_deref(), options, sender)
        };
        self.ask(begin).await??;
        tracing::info!(network, vm, "began a capture of frames");
        let details = super::EventDetails {
            vm,
            reason: Some(format!("frames of the network {network}")),
            ..super::EventDetails::default()
        };
        Ok(reader.telling(&self.parts.events, details))
    }

    /// Takes the link of a VM's port up or down. The VM may be named by an alias.
    ///
    /// # Errors
    /// [`ControlError::UnknownNetwork`], [`ControlError::Unknown`], [`ControlError::Net`].
    pub async fn set_link(
        self: &Arc<Self>,
        name: &str,
        vm: &str,
        up: bool,
    ) -> Result<(), ControlError> {
        let (control, name, vm) = (self.clone(), name.to_owned(), vm.to_owned());
        // On its own task: a client that hangs up must not leave it half done.
        let task = tokio::spawn(async move {
            let _changing = control.changing.lock().await;
            let in_force = control.in_force();
            let plan = &in_force.book.plan;
            let network = known(plan, &name)?.full_name();
            let line = known_vm(plan, &vm)?;
            let vm = line.full_name();
            if !line.ports.iter().any(|port| port.network == network) {
                return Err(NetError::UnknownPort { network, vm }.into());
            }
            let of = (network.clone(), vm.clone());
            let set = move |control: &Control| control.parts.net.set_link(&of.0, &of.1, up);
            control.ask(set).await??;
            let link = if up { "up" } else { "down" };
            tracing::info!(vm, network, "took the link {link}");
            Ok(())
        });
        task.await.map_err(|_| ControlError::Lost)?
    }
}

fn known<'a>(plan: &'a Plan, name: &str) -> Result<&'a NetworkSpec, ControlError> {
    // The full name may be written with the domain that is meant when none is.
    let default = format!("{}/", policy::DEFAULT_DOMAIN);
    let full_name = name.strip_prefix(&default).unwrap_or(name);
    plan.network(full_name)
        .ok_or_else(|| ControlError::UnknownNetwork {
            name: name.to_owned(),
            nearest: plan.nearest_network(name),
        })
}

/// What the worker of the networks knows of each, by full name, and of its ports.
pub(super) struct Known(HashMap<String, (NetworkStatus, HashMap<PortOwner, usize>)>);

impl Known {
    pub(super) fn new(networks: Vec<NetworkStatus>) -> Known {
        let networks = networks.into_iter().map(|status| {
            let ports = status.ports.iter().enumerate();
            let ports = ports.map(|(index, port)| (port.owner.clone(), index));
            let ports = ports.collect();
            (status.name.clone(), (status, ports))
        });
        Known(networks.collect())
    }

    fn get(&self, network: &str) -> Option<&NetworkStatus> {
        self.0.get(network).map(|(status, _)| status)
    }

    fn port(&self, network: &str, owner: &PortOwner) -> Option<&PortStatus> {
        let (status, ports) = self.0.get(network)?;
        ports.get(owner).map(|index| &status.ports[*index])
    }
}

/// The VMs of each network, each with its port there.
struct Members<'a>(HashMap<&'a str, Vec<(&'a LineSpec, &'a PortSpec)>>);

impl<'a> Members<'a> {
    fn of(plan: &'a Plan) -> Members<'a> {
        let mut members: HashMap<_, Vec<_>> = HashMap::new();
        for line in plan.lines() {
            for port in &line.ports {
                let of_network = members.entry(port.network.as_str()).or_default();
                of_network.push((line, port));
            }
        }
        Members(members)
    }
}

fn details(members: &Members<'_>, spec: &NetworkSpec, known: &Known) -> NetworkDetails {
    let name = spec.full_name();
    let members = members.0.get(name.as_str());
    let members = members.map(Vec::as_slice).unwrap_or_default();
    NetworkDetails {
        network: network(members.len(), spec, known.get(&name)),
        ports: all_ports(members, spec, known),
    }
}

fn network(vms: usize, spec: &NetworkSpec, status: Option<&NetworkStatus>) -> NetworkInfo {
    let station = &spec.station;
    let ports = status
        .map(|status| status.ports.as_slice())
        .unwrap_or_default();
    let is_vm = |port: &&PortStatus| matches!(port.owner, PortOwner::Vm(_));
    let of_vms = || ports.iter().filter(is_vm);
    let of_network = status.map(|status| &status.counters);
    let of_ports = of_vms().map(|port| &port.counters);
    let range = |pool: &std::ops::RangeInclusive<_>| format!("{}-{}", pool.start(), pool.end());
    NetworkInfo {
        name: spec.name.clone(),
        domain: spec.domain.clone(),
        mtu: spec.mtu,
        mac: station.mac,
        ipv4: station.ipv4.map(|subnet| subnet.to_string()),
        ipv6: station.ipv6.map(|subnet| subnet.to_string()),
        dns_domain: station.dns_domain.clone(),
        dhcp: station.dhcp,
        dns: station.dns,
        router_advertisements: station.router_advertisements,
        pool: station.pool.as_ref().map(range),
        gateway: station.gateway,
        uplink: spec.uplink.as_ref().map(|uplink| uplink.device.to_string()),
        thread: status.map(|status| status.thread.clone()),
        vms,
        attached: of_vms().filter(|port| port.attached).count(),
        counters: sums(of_network.into_iter().chain(of_ports)),
        refused: sums(of_vms().map(|port| &port.refused)),
    }
}

/// Counts of the same name, added up.
fn sums<'a>(counters: impl Iterator<Item = &'a Counters>) -> BTreeMap<String, u64> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for (name, count) in counters.flatten() {
        let sum = sums.entry((*name).to_owned()).or_default();
        *sum = sum.saturating_add(*count);
    }
    sums
}

/// The ports of the VMs that have one, whatever the worker knows of them, and then the others that it has.
fn all_ports(
    members: &[(&LineSpec, &PortSpec)],
    spec: &NetworkSpec,
    known: &Known,
) -> Vec<NetworkPort> {
    let name = spec.full_name();
    let statuses = known.get(&name).map(|status| status.ports.as_slice());
    let statuses = statuses.unwrap_or_default();
    let of_vms = members.iter().map(|(line, spec_of_port)| {
        let status = known.port(&name, &PortOwner::Vm(line.full_name()));
        NetworkPort {
            kind: PortKind::Vm,
            vm: Some(line.full_name()),
            attachment: Some(vm_port(spec_of_port, spec, status)),
            attached: status.is_some_and(|status| status.attached),
            driver_ready: status.is_some_and(|status| status.driver_ready),
            link_up: status.is_some_and(|status| status.link_up),
            counters: status
                .map(|status| owned(&status.counters))
                .unwrap_or_default(),
            refused: status
                .map(|status| owned(&status.refused))
                .unwrap_or_default(),
        }
    });
    let others = statuses.iter().filter_map(|status| {
        Some(NetworkPort {
            kind: match status.owner {
                PortOwner::Vm(_) => return None,
                PortOwner::Uplink => PortKind::Uplink,
                PortOwner::Station => PortKind::Station,
            },
            vm: None,
            attachment: None,
            attached: status.attached,
            driver_ready: status.driver_ready,
            link_up: status.link_up,
            counters: owned(&status.counters),
            refused: owned(&status.refused),
        })
    });
    of_vms.chain(others).collect()
}

/// The ports of a VM in networks.
pub(super) fn ports_of(plan: &Plan, line: &LineSpec, known: &Known) -> Vec<VmPort> {
    let owner = PortOwner::Vm(line.full_name());
    let port = |port: &PortSpec| {
        let network = plan.network(&port.network)?;
        let status = known.port(&port.network, &owner);
        Some(vm_port(port, network, status))
    };
    line.ports.iter().filter_map(port).collect()
}

fn vm_port(port: &PortSpec, network: &NetworkSpec, status: Option<&PortStatus>) -> VmPort {
    VmPort {
        last_fault: status.and_then(|status| status.last_fault.clone()),
        last_fault_time: status.and_then(|status| status.last_fault_at).map(rfc_3339),
        network: port.network.clone(),
        vhost_user: port.socket.clone(),
        mac: port.mac,
        ipv4: port.ipv4,
        ipv6: port.ipv6,
        mtu: network.mtu,
        queue_pairs: port.queue_pairs,
        vlan: vlan_in_words(&port.vlan),
        isolated: port.isolated,
        learn: port.learn,
        moderation: port.moderation.to_string(),
    }
}

fn mac(status: MacStatus) -> MacInfo {
    let (kind, vm) = match status.owner {
        PortOwner::Vm(name) => (PortKind::Vm, Some(name)),
        PortOwner::Uplink => (PortKind::Uplink, None),
        PortOwner::Station => (PortKind::Station, None),
    };
    let millis = |age: std::time::Duration| u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
    MacInfo {
        mac: status.mac,
        vlan: status.vlan.map(VlanId::get),
        kind,
        vm,
        fixed: status.age.is_none(),
        age_ms: status.age.map(millis),
    }
}
