//! Figures of networks and their ports.

use api::{NetworkDetails, NetworkPort};

use super::page::Page;

/// Figures of a network and of each of its ports. Networks and ports have limits, and so have the names of what is counted.
pub(super) fn figures(page: &mut Page, details: &NetworkDetails) {
    let name = details.network.full_name();
    let of_network = [("network", name.as_str())];
    page.set(
        "ringdown_network_vms",
        &of_network,
        details.network.vms as f64,
    );
    page.set(
        "ringdown_network_attached",
        &of_network,
        details.network.attached as f64,
    );
    for port in &details.ports {
        // No name has parentheses.
        let kind = port.kind.to_string();
        let owner = port.vm.as_deref().unwrap_or(&kind);
        figures_of_port(page, &name, owner, port);
    }
}

fn figures_of_port(page: &mut Page, network: &str, owner: &str, port: &NetworkPort) {
    let of_port = [("network", network), ("vm", owner)];
    page.set(
        "ringdown_network_port_up",
        &of_port,
        f64::from(u8::from(port.link_up && port.driver_ready)),
    );
    let events = &port.counters;
    page.set_each(
        "ringdown_network_port_events_total",
        &of_port,
        "event",
        events,
    );
    let refused = &port.refused;
    page.set_each(
        "ringdown_network_port_refused_frames_total",
        &of_port,
        "reason",
        refused,
    );
}
