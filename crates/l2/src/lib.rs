//! Networks of layer 2: the switch and what it answers itself. It only decides: there is no I/O, thread or clock, and times are arguments.
//!
//! - [`bridge`]: to which ports a frame goes, and whether it may: addresses and their owners, filters, VLANs, rates.
//! - [`Station`]: what a network itself answers: DHCP, router advertisements, DNS, ARP, neighbour discovery, pings.

mod advertise;
mod asker;
pub mod bridge;
mod config;
mod dhcp;
mod dns;
mod frame;
mod hosts;
mod neighbour;
mod stack;
mod station;

pub use asker::Asker;
pub use config::{
    Host, HostError, Ipv4Settings, MAX_HOSTS, MAX_POOL_ADDRESSES, StationConfig,
    StationConfigError, slaac_address,
};
pub use dhcp::Lease;
pub use station::{MAX_ANSWERS, MAX_QUEUED_FRAMES, Station, StationCounters};
