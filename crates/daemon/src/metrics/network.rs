//! Figures of networks and their ports.

use api::{NetworkDetails, NetworkPort};

use super::page::Page;

/// Figures of a network and of each of its ports. Networks and ports have limits, and so have the names of what is counted.
pub(super) fn figures(page: &mut Page, details: &NetworkDetails) {
    let name = details.network.full_name();
    let of_network = [("network", name.as_str())];
    page.gauge(
        "ringdown_network_vms",
        "VMs with a port in the network.",
        &of_network,
        details.network.vms as f64,
    );
    page.gauge(
        "ringdown_network_attached",
        "VMs in the network whose VMM is connected.",
        &of_network,
        details.network.attached as f64,
    );
    for port in &details.ports {
        // The words in parentheses are nobody's name.
        let kind = port.kind.to_string();
        let owner = port.vm.as_deref().unwrap_or(&kind);
        figures_of_port(page, &name, owner, port);
    }
}

fn figures_of_port(page: &mut Page, network: &str, owner: &str, port: &NetworkPort) {
    let of_port = [("network", network), ("vm", owner)];
    page.gauge(
        "ringdown_network_port_up",
        "Whether the port's link is up and its driver runs.",
        &of_port,
        f64::from(u8::from(port.link_up && port.driver_ready)),
    );
    for (event, count) in &port.counters {
        let labels = [of_port[0], of_port[1], ("event", event.as_str())];
        page.counter(
            "ringdown_network_port_events_total",
            "What has happened at the port.",
            &labels,
            *count as f64,
        );
    }
    for (reason, count) in &port.refused {
        let labels = [of_port[0], of_port[1], ("reason", reason.as_str())];
        page.counter(
            "ringdown_network_port_refused_frames_total",
            "Frames that came from the port and went nowhere.",
            &labels,
            *count as f64,
        );
    }
}
