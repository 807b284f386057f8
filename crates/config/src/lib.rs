//! The configuration: one optional TOML file, and the same things written as options of the command line.
//!
//! ```toml
#![doc = include_str!("../../../docs/ringdown.toml")]
//! ```
//!
//! A relative path of the file starts at the file's directory; one of the command line starts at the working
//! directory. On the command line a comma inside a value is written twice, as QEMU has it.

mod addresses;
mod channel;
mod cids;
mod configuration;
mod control;
mod counts;
mod dialled;
pub mod directories;
mod error;
mod fields;
mod file;
mod files;
mod hosts;
pub mod input;
mod keys;
pub mod limits;
mod line;
pub mod listeners;
mod members;
pub mod net;
mod network;
mod offer;
mod option;
mod pattern;
mod places;
mod plan;
mod port;
mod request;
mod rule;
pub mod schema;
mod services;
mod settings;
mod source;
mod state;
mod users;
mod vm;
mod whole;
mod windows;
mod workers;
mod written;

#[cfg(test)]
mod tests;

pub use addresses::{Addresses, MAX_REMEMBERED_HOSTS, MAX_REMEMBERED_NETWORKS};
pub use channel::{
    AGENT_PORT, Channel, ChannelTarget, Chardev, ChardevRequest, DEFAULT_MAX_BYTES,
    INSTALL_LOG_PORT, MAX_CHANNELS,
};
pub use cids::{Cids, MAX_REMEMBERED};
pub use configuration::Config;
pub use control::ControlGroups;
pub use counts::{DEFAULT_SPIN, MAX_GROUPS, MAX_RULES, MAX_SPIN_MICROSECONDS};
pub use error::ConfigError;
use error::refuse;
pub use file::{MAX_FILE_LEN, parse_file, read_file};
pub use hosts::{Hosts, ListedAddress, MAX_ADDRESSES, MAX_HOSTS};
pub use line::{LineSpec, VmmSocket};
pub use members::parse_vm_members;
pub use network::{
    AddressRequest, DEFAULT_MTU, MAX_NETWORKS, MAX_POOL_ADDRESSES, MTU_BOUNDS, NetworkRequest,
};
pub use option::{parse_allow_option, parse_net_option, parse_network_option, parse_vm_option};
pub use pattern::{parse_callee, parse_caller};
pub use pattern::{parse_dns_name, parse_port};
pub use plan::{MAX_MEMBERSHIPS, MAX_PORTS, MAX_VMS, Plan, PlanChange};
pub use policy::full_name;
pub use port::{MAX_NETS, NewPort, PortRequest};
pub use request::{GroupRequest, VmRequest};
pub use services::{
    DEFAULT_CONNECT_TIMEOUT, DEFAULT_MAX_CONNECTIONS, DEFAULT_SOCKET_MODE, GuestPort,
    MAX_COMMAND_WORDS, MAX_CONNECT_TIMEOUT_MS, MAX_PUBLISHES, MAX_SERVICES, MOST_CONNECTIONS,
    Publish, PublishListen, PublishedPort, Service, ServiceTarget,
};
pub use settings::Settings;

pub use dialled::{check_dialled, check_dialled_with};
pub use files::{check_sockets, check_targets};
pub use source::{MAX_LIST_LEN, Reading};
pub use state::StateError;
pub use state::{StateFile, check_version};
pub use users::load_name_services;
pub use users::{group_words, groups_of, parse_user, parse_user_group};
pub use whole::check_whole;
pub use windows::{MAX_WINDOWS, MAX_WINDOWS_OF_ALL, WindowsSpec, parse_windows};
pub use workers::{MAX_WORKERS, Workers, parse_workers};
pub use written::Written;
