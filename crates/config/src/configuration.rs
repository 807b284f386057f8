//! Everything that was configured.

use std::path::PathBuf;
use std::time::Duration;

use policy::Rule;

use crate::control::ControlGroups;
use crate::hosts::Hosts;
use crate::network::NetworkRequest;
use crate::request::{GroupRequest, VmRequest};
use crate::services::{Publish, Service};
use crate::workers::Workers;
use crate::written::Written;

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
    /// Over how many threads networks are spread, if that was said.
    pub workers: Option<Workers>,
    /// The socket of the keeper, if there is one.
    pub keeper: Option<PathBuf>,
    /// Users of the control socket beside the daemon's own user.
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
        self.workers = later.workers.or(self.workers.take());
        self.keeper = later.keeper.or(self.keeper.take());
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
