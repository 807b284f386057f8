//! The configuration: one optional TOML file, and the same things written as options of the command line.
//!
//! ```toml
//! runtime-dir = "/run/ringdown"
//! spin-microseconds = 100                # optional: how long to look before sleeping, while busy; 0 sleeps at once
//!
//! [[vm]]
//! name = "web"
//! cid = 3                                # optional: one is assigned, from 3 up
//! vhost-user = "/run/ringdown/web.vhost" # optional: this is the default
//! host = "/run/ringdown/web.sock"        # optional: this is the default
//! limits = { circuits = 1000 }           # optional: what is left out has its default
//!
//! [[allow]]                              # without any, VMs reach the host and not each other
//! from = "web"                           # a VM's name, or "*" for any
//! to = "db"
//! port = 5432                            # a number, or "*" for any
//! ```
//!
//! A relative path of the file starts at the file's directory; one of the command line starts at the working
//! directory. On the command line a comma inside a value is written twice, as QEMU has it.

mod file;
mod option;
mod plan;
mod services;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use file::{MAX_FILE_LEN, parse_file, read_file};
pub use option::{parse_allow_option, parse_vm_option};
pub use plan::{MAX_VMS, Plan};
pub use services::{
    DEFAULT_CONNECT_TIMEOUT, DEFAULT_MAX_CONNECTIONS, DEFAULT_SOCKET_MODE, MAX_COMMAND_WORDS,
    MAX_CONNECT_TIMEOUT_MS, MAX_PUBLISHES, MAX_SERVICES, MOST_CONNECTIONS, Publish, PublishListen,
    PublishedPort, Service, ServiceTarget, full_name,
};

use switch::Limits;

use crate::input::InputError;
use crate::line::AllowRule;

/// How long the worker looks before it sleeps, when nothing else is said and while guests and programs answer quickly: somewhat
/// longer than they take to be woken and to answer.
pub const DEFAULT_SPIN: Duration = Duration::from_micros(100);

/// The longest that it can be told to look, in microseconds.
pub const MAX_SPIN_MICROSECONDS: u64 = 1000;

/// The most rules that one daemon holds.
pub const MAX_RULES: usize = 4096;

/// A VM as a person described it: what was left out is still open. What is there has been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmRequest {
    /// Name of the VM.
    pub name: String,
    /// Context identifier; `None` asks for the lowest free one from 3 up.
    pub cid: Option<u32>,
    /// The vhost-user socket; `None` asks for `NAME.vhost` in the runtime directory.
    pub vhost_user: Option<PathBuf>,
    /// The host socket; `None` asks for `NAME.sock` in the runtime directory.
    pub host: Option<PathBuf>,
    /// What the VM may use; what was left out has its default.
    pub limits: Limits,
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
    /// The runtime directory, if one was named.
    pub runtime_dir: Option<PathBuf>,
    /// How long the worker may look before it sleeps, if that was said.
    pub spin: Option<Duration>,
    /// The VMs to begin with.
    pub vms: Vec<Written<VmRequest>>,
    /// The rules to begin with.
    pub rules: Vec<Written<AllowRule>>,
}

impl Config {
    /// Adds what another source said. A runtime directory of `later` wins.
    pub fn extend(&mut self, later: Config) {
        self.runtime_dir = later.runtime_dir.or(self.runtime_dir.take());
        self.spin = later.spin.or(self.spin.take());
        self.vms.extend(later.vms);
        self.rules.extend(later.rules);
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

/// The runtime directory that holds when none is named: `$RINGDOWN_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/ringdown`,
/// else `/run/ringdown`. An empty variable counts as none.
pub fn default_runtime_dir() -> PathBuf {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable("RINGDOWN_RUNTIME_DIR")
        .or_else(|| variable("XDG_RUNTIME_DIR").map(|path| path.join("ringdown")))
        .unwrap_or_else(|| Path::new("/run/ringdown").to_owned())
}

fn refuse<T>(place: impl Into<String>, result: Result<T, InputError>) -> Result<T, ConfigError> {
    result.map_err(|error| ConfigError::Input {
        place: place.into(),
        error,
    })
}
