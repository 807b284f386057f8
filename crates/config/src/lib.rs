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
mod control;
mod dialled;
pub mod directories;
mod fields;
mod file;
mod files;
mod hosts;
pub mod input;
pub mod limits;
mod line;
pub mod listeners;
pub mod net;
mod network;
mod offer;
mod option;
mod pattern;
mod places;
mod plan;
mod port;
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

#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use addresses::{Addresses, MAX_REMEMBERED_HOSTS, MAX_REMEMBERED_NETWORKS};
pub use channel::{
    AGENT_PORT, Channel, ChannelTarget, Chardev, ChardevRequest, DEFAULT_MAX_BYTES,
    INSTALL_LOG_PORT, MAX_CHANNELS,
};
pub use cids::{Cids, MAX_REMEMBERED};
pub use control::ControlGroups;
pub use file::{MAX_FILE_LEN, parse_file, read_file};
pub use hosts::{Hosts, ListedAddress, MAX_ADDRESSES, MAX_HOSTS};
pub use line::LineSpec;
pub use network::{
    AddressRequest, DEFAULT_MTU, MAX_NETWORKS, MAX_POOL_ADDRESSES, MTU_BOUNDS, NetworkRequest,
    check_dns_domain, parse_ipv4_subnet, parse_ipv6_subnet,
};
pub use option::{parse_allow_option, parse_network_option, parse_vm_option};
pub use pattern::{parse_callee, parse_caller};
pub use pattern::{parse_dns_name, parse_port};
pub use plan::{MAX_MEMBERSHIPS, MAX_PORTS, MAX_VMS, Plan, PlanChange};
pub use port::{
    MAX_NETS, NET_KEYS, NewPort, PortRequest, check_ports, parse_moderation, parse_net_option,
};
pub use services::{
    DEFAULT_CONNECT_TIMEOUT, DEFAULT_MAX_CONNECTIONS, DEFAULT_SOCKET_MODE, GuestPort,
    MAX_COMMAND_WORDS, MAX_CONNECT_TIMEOUT_MS, MAX_PUBLISHES, MAX_SERVICES, MOST_CONNECTIONS,
    Publish, PublishListen, PublishedPort, Service, ServiceTarget,
};
pub use settings::Settings;
pub use switch::full_name;

use switch::{DEFAULT_DOMAIN, Limits, Rule};

use crate::input::InputError;

pub use dialled::{check_dialled, check_dialled_with};
pub use files::{check_sockets, check_targets};
pub use source::MAX_LIST_LEN;
pub use state::StateError;
pub use state::{StateFile, check_version};
pub use users::load_name_services;
pub use users::{group_words, groups_of, parse_user, parse_user_group};
pub use whole::check_whole;
pub use windows::expected as expected_windows;
pub use windows::{MAX_WINDOWS, MAX_WINDOWS_OF_ALL, WindowsSpec, parse_windows};

/// How long the worker looks before it sleeps, when nothing else is said and while guests and programs answer quickly: somewhat
/// longer than they take to be woken and to answer.
pub const DEFAULT_SPIN: Duration = Duration::from_micros(100);

/// The longest that it can be told to look, in microseconds.
pub const MAX_SPIN_MICROSECONDS: u64 = 1000;

/// The most rules that one daemon holds, `[[rule]]` and `[[allow]]` together.
pub const MAX_RULES: usize = 16_384;

/// The most `[[group]]` tables of one file.
pub const MAX_GROUPS: usize = 1024;

/// A VM as a person described it: what was left out is still open. What is there has been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmRequest {
    /// The domain it belongs to.
    pub domain: String,
    /// Name of the VM.
    pub name: String,
    /// Other names of it, at most [`MAX_LIST_LEN`].
    pub aliases: Vec<String>,
    /// The groups it is in, at most [`MAX_LIST_LEN`], beside those that name it as a member.
    pub groups: Vec<String>,
    /// Context identifier; `None` asks for the one that this name had before, or the lowest free one from 3 up.
    pub cid: Option<u32>,
    /// The vhost-user socket; `None` asks for `NAME.vhost` in the runtime directory.
    pub vhost_user: Option<PathBuf>,
    /// The host socket; `None` asks for `NAME.sock` in the runtime directory.
    pub host: Option<PathBuf>,
    /// The socket of a VMM that has a vsock device of its own, instead of both of the above.
    pub hybrid: Option<PathBuf>,
    /// How its VMM and the daemon meet for the virtio-serial port of its agent, instead of the vhost-user socket.
    pub serial: Option<ChardevRequest>,
    /// Its other virtio-serial ports, at most [`MAX_CHANNELS`], each name once.
    pub channels: Vec<Channel<ChardevRequest>>,
    /// Its ports in networks, at most [`MAX_NETS`], each network once.
    pub ports: Vec<PortRequest>,
    /// The memory of its zero-copy circuits.
    pub windows: Option<WindowsSpec>,
    /// The control socket of its QEMU, where windows are added while it runs.
    pub qmp: Option<PathBuf>,
    /// What the VM may use; what was left out has its default.
    pub limits: Limits,
}

impl VmRequest {
    /// A VM of this name in the [`DEFAULT_DOMAIN`], of which nothing else is said.
    pub fn named(name: &str) -> VmRequest {
        VmRequest {
            domain: DEFAULT_DOMAIN.to_owned(),
            name: name.to_owned(),
            aliases: Vec::new(),
            groups: Vec::new(),
            cid: None,
            vhost_user: None,
            host: None,
            hybrid: None,
            serial: None,
            channels: Vec::new(),
            ports: Vec::new(),
            windows: None,
            qmp: None,
            limits: Limits::default(),
        }
    }

    /// The VM's full name.
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.name)
    }
}

/// A group as `[[group]]` describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRequest {
    /// Its name.
    pub name: String,
    /// Its domain, which is its members' too.
    pub domain: String,
    /// Names of VMs, or aliases, at most [`MAX_VMS`]. They need not exist yet.
    pub members: Vec<String>,
}

/// Something together with the place where it was written, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written<T> {
    /// The place in words, such as `ringdown.toml: line 3, column 1` or `--vm name=web`.
    pub place: String,
    /// What was written there.
    pub value: T,
}

/// Everything that was configured, from the file and from the command line, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// The files that it was read from.
    pub files: Vec<PathBuf>,
    /// The runtime directory, if one was named.
    pub runtime_dir: Option<PathBuf>,
    /// The directory where context identifiers are remembered, if one was named.
    pub state_dir: Option<PathBuf>,
    /// The file of the audit, if there is to be one.
    pub audit: Option<PathBuf>,
    /// How long the worker may look before it sleeps, if that was said.
    pub spin: Option<Duration>,
    /// Who may use the control socket beside the daemon's own user.
    pub control: ControlGroups,
    /// Directories that the sandbox leaves open beside those that are named elsewhere.
    pub sandbox_paths: Vec<PathBuf>,
    /// The networks.
    pub networks: Vec<Written<NetworkRequest>>,
    /// The VMs.
    pub vms: Vec<Written<VmRequest>>,
    /// Groups and their members, beside what the VMs say themselves.
    pub groups: Vec<Written<GroupRequest>>,
    /// The rules, in order.
    pub rules: Vec<Written<Rule>>,
    /// Permission for VMs to call each other, asked after the rules.
    pub allows: Vec<Written<Rule>>,
    /// Services of the host.
    pub services: Vec<Written<Service>>,
    /// Published ports.
    pub publishes: Vec<Written<Publish>>,
    /// Names that are not looked up.
    pub hosts: Hosts,
}

impl Config {
    /// Adds what another source said. What `later` says about directories, the audit and the worker wins.
    pub fn extend(&mut self, later: Config) {
        self.files.extend(later.files);
        self.runtime_dir = later.runtime_dir.or(self.runtime_dir.take());
        self.state_dir = later.state_dir.or(self.state_dir.take());
        self.audit = later.audit.or(self.audit.take());
        self.spin = later.spin.or(self.spin.take());
        if later.control != ControlGroups::default() {
            self.control = later.control;
        }
        self.sandbox_paths.extend(later.sandbox_paths);
        self.networks.extend(later.networks);
        self.vms.extend(later.vms);
        self.groups.extend(later.groups);
        self.rules.extend(later.rules);
        self.allows.extend(later.allows);
        self.services.extend(later.services);
        self.publishes.extend(later.publishes);
        self.hosts.extend(later.hosts);
    }

    /// Every rule in the order in which they are asked, with its place.
    pub fn all_rules(&self) -> impl Iterator<Item = &Written<Rule>> {
        self.rules.iter().chain(&self.allows)
    }
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Something in it cannot be meant.
    #[error("{place}: {error}")]
    Input {
        /// Where it was written, in words.
        place: String,
        /// What is wrong, and the remedy.
        error: InputError,
    },
    /// The file could not be read.
    #[error("cannot read the configuration file {}: {error}; check the path, or leave --config out", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

fn refuse<T>(place: impl Into<String>, result: Result<T, InputError>) -> Result<T, ConfigError> {
    result.map_err(|error| ConfigError::Input {
        place: place.into(),
        error,
    })
}
