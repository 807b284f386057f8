//! From what was asked for to lines that can be opened: names, context identifiers and paths that have one owner each.

mod networks;
mod ports;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use policy::DEFAULT_DOMAIN;

pub use ports::MAX_PORTS;

use networks::PlannedNetwork;
use ports::PortRefusal;

use crate::input::{InputError, check_socket_path, nearest_full_name};
use crate::line::{LineSpec, VmmSocket};
use crate::{
    Addresses, Channel, Chardev, ChardevRequest, Cids, Config, ConfigError, GroupRequest,
    MAX_WINDOWS_OF_ALL, StateError, VmRequest, WindowsSpec, full_name, refuse,
};

/// The most VMs that one daemon serves.
pub const MAX_VMS: usize = 1024;

/// The most memberships in groups, over all VMs of a daemon.
pub const MAX_MEMBERSHIPS: usize = 4096;

/// The lines of one daemon, and what they occupy. A line keeps its context identifier as long as it lives.
#[derive(Debug, Clone)]
pub struct Plan {
    runtime_dir: PathBuf,
    /// By full name.
    lines: BTreeMap<String, LineSpec>,
    /// The groups that `[[group]]` puts a VM into, by domain and by the name it uses, which may be an alias.
    members: BTreeMap<(String, String), BTreeSet<String>>,
    cids: Cids,
    /// By full name.
    networks: BTreeMap<String, PlannedNetwork>,
    addresses: Addresses,
}

impl Plan {
    /// A plan without a line. `runtime_dir` is absolute; `cids` is what is remembered of earlier VMs.
    pub fn new(runtime_dir: PathBuf, cids: Cids) -> Plan {
        Plan {
            runtime_dir,
            lines: BTreeMap::new(),
            members: BTreeMap::new(),
            cids,
            networks: BTreeMap::new(),
            addresses: Addresses::default(),
        }
    }

    /// A plan with the VMs of a configuration.
    ///
    /// # Errors
    /// [`ConfigError::Input`] with the place of the VM that collides with another.
    pub fn from_config(
        runtime_dir: PathBuf,
        config: &Config,
        cids: Cids,
    ) -> Result<Plan, ConfigError> {
        let mut plan = Plan::new(runtime_dir, cids);
        plan.change(config, &BTreeSet::new())?;
        Ok(plan)
    }

    /// Makes the plan what a configuration says: VMs that it names anew are added, those of `known` that it no longer names are
    /// struck out, and of the rest groups and aliases become what it says. Context identifiers that were asked for are given first, so
    /// that an assigned one never takes what a later VM names. What was changed when an error came is not undone.
    ///
    /// # Errors
    /// [`ConfigError::Input`] with the place of the VM that collides with another, or that would have to change what cannot change.
    pub fn change(
        &mut self,
        config: &Config,
        known: &BTreeSet<String>,
    ) -> Result<PlanChange, ConfigError> {
        let names: BTreeSet<String> = config.vms.iter().map(|vm| vm.value.full_name()).collect();
        self.set_members(config.groups.iter().map(|group| &group.value));
        let occupied = self.occupied();
        self.change_networks(config, &occupied)?;
        let asked_for: BTreeSet<(&str, u32)> = config
            .vms
            .iter()
            .filter_map(|vm| Some((vm.value.domain.as_str(), vm.value.cid?)))
            .collect();
        let mut change = PlanChange::default();
        let mut seen = BTreeSet::new();
        // Struck out last: what they occupy is in use until the new lines are open.
        let gone = known
            .difference(&names)
            .filter_map(|name| self.lines.get(name));
        change.removed = gone.cloned().collect();
        // Aliases go first, so that a name may move from one VM to another.
        let gone: Vec<String> = change.removed.iter().map(LineSpec::full_name).collect();
        let kept = config.vms.iter().map(|vm| vm.value.full_name());
        for name in kept.chain(gone) {
            if let Some(line) = self.lines.get_mut(&name) {
                line.aliases.clear();
            }
        }
        for vm in &config.vms {
            let (request, full_name) = (&vm.value, vm.value.full_name());
            let is_repeated = !seen.insert(full_name.clone());
            if self.lines.contains_key(&full_name) && !is_repeated {
                refuse(&vm.place, self.keep(request))?;
            } else {
                let spec = refuse(&vm.place, self.resolve(request, &asked_for))?;
                self.lines.insert(full_name, spec.clone());
                change.added.push(spec);
            }
        }
        for line in &change.removed {
            self.lines.remove(&line.full_name());
        }
        self.renew_groups();
        if let Some(vm) = config.vms.last() {
            refuse(&vm.place, self.check_memberships())?;
        }
        self.renew_ports(&occupied)
            .map_err(|PortRefusal { vm, place, error }| {
                let mut configured = config.vms.iter();
                let written = configured.find(|written| written.value.full_name() == vm);
                let by_hand = || format!("the configuration, for VM {vm:?}");
                let place = place
                    .filter(|_| written.is_some())
                    .or_else(|| Some(written?.place.clone()));
                let place = place.unwrap_or_else(by_hand);
                ConfigError::Input { place, error }
            })?;
        for line in &mut change.added {
            if let Some(planned) = self.lines.get(&line.full_name()) {
                line.clone_from(planned);
            }
        }
        Ok(change)
    }

    /// Fills in what the request left open and enters the line.
    ///
    /// # Errors
    /// [`InputError`] when a name, a context identifier or a path belongs to another line, or a default path is too long.
    pub fn add(&mut self, request: &VmRequest) -> Result<LineSpec, InputError> {
        let spec = self.resolve(request, &BTreeSet::new())?;
        let name = spec.full_name();
        self.lines.insert(name.clone(), spec);
        self.renew_groups();
        let occupied = self.occupied();
        let ports = self.renew_ports(&occupied).map_err(|refusal| refusal.error);
        if let Err(error) = self.check_memberships().and(ports) {
            self.lines.remove(&name);
            return Err(error);
        }
        Ok(self.lines[&name].clone())
    }

    /// Strikes a line out, and returns it if there was one. Its name keeps its context identifier.
    pub fn remove(&mut self, full_name: &str) -> Option<LineSpec> {
        self.lines.remove(full_name)
    }

    /// The line with this full name.
    pub fn line(&self, full_name: &str) -> Option<&LineSpec> {
        self.lines.get(full_name)
    }

    /// The line with this full name, or of which it is an alias.
    pub fn get(&self, full_name: &str) -> Option<&LineSpec> {
        let (domain, name) = full_name
            .split_once('/')
            .unwrap_or((DEFAULT_DOMAIN, full_name));
        self.find(domain, name)
    }

    /// The line of a domain with this name or alias.
    pub fn find(&self, domain: &str, name: &str) -> Option<&LineSpec> {
        let by_name = self.lines.get(&full_name(domain, name));
        by_name.or_else(|| {
            let is_alias = |line: &&LineSpec| line.aliases.iter().any(|alias| alias == name);
            self.lines
                .values()
                .filter(|line| line.domain == domain)
                .find(is_alias)
        })
    }

    /// Of the names and aliases of VMs, the one that may be meant by another.
    pub fn nearest_vm(&self, full_name: &str) -> Option<String> {
        // A CID is taken for a name now and then.
        let numbered = full_name.parse().ok().and_then(|cid: u32| {
            let mut lines = self.lines.values();
            lines.find(|line| line.cid == cid)
        });
        if let Some(line) = numbered {
            return Some(line.full_name());
        }
        let names = self.lines.values().flat_map(|line| {
            let names = std::iter::once(&line.name).chain(&line.aliases);
            names.map(|name| policy::full_name(&line.domain, name))
        });
        nearest_full_name(full_name, &names.collect::<Vec<_>>())
    }

    /// The lines, by full name.
    pub fn lines(&self) -> impl Iterator<Item = &LineSpec> {
        self.lines.values()
    }

    /// What is remembered of context identifiers, also of VMs that are away.
    pub fn cids(&self) -> &Cids {
        &self.cids
    }

    /// Where VMs that are away had their sockets, unless they had them elsewhere.
    pub fn sockets_of_absent(&self) -> impl Iterator<Item = PathBuf> {
        let absent = self.cids.full_names();
        let absent = absent.filter(|name| !self.lines.contains_key(name));
        absent.flat_map(|name| {
            let host = self.default_path(&name, "sock");
            let messages = wire::connect::seqpacket_path(&host);
            [host, messages, self.default_path(&name, "vhost")]
        })
    }

    /// Writes into a state directory what is remembered, as far as it differs from what is there.
    ///
    /// # Errors
    /// [`StateError::Unwritable`].
    pub fn save(
        &self,
        state_dir: &Path,
        cids: &Cids,
        addresses: &Addresses,
    ) -> Result<(), StateError> {
        if self.cids != *cids {
            self.cids.save(state_dir)?;
        }
        if self.addresses != *addresses {
            self.addresses.save(state_dir)?;
        }
        Ok(())
    }

    /// Where its sockets are, unless a VM says otherwise.
    pub fn runtime_dir(&self) -> &Path {
        &self.runtime_dir
    }

    fn set_members<'a>(&mut self, groups: impl Iterator<Item = &'a GroupRequest>) {
        self.members.clear();
        for group in groups {
            for member in &group.members {
                let key = (group.domain.clone(), member.clone());
                let entry = self.members.entry(key).or_default();
                entry.insert(group.name.clone());
            }
        }
    }

    /// Works out anew which groups each VM is in: what it says itself, and what groups say of it by any of its names.
    fn renew_groups(&mut self) {
        for line in self.lines.values_mut() {
            let mut groups: BTreeSet<String> = line.own_groups.iter().cloned().collect();
            for name in std::iter::once(&line.name).chain(&line.aliases) {
                let key = (line.domain.clone(), name.clone());
                groups.extend(self.members.get(&key).into_iter().flatten().cloned());
            }
            line.groups = groups.into_iter().collect();
        }
    }

    fn check_memberships(&self) -> Result<(), InputError> {
        let memberships: usize = self.lines.values().map(|line| line.groups.len()).sum();
        if memberships > MAX_MEMBERSHIPS {
            return Err(InputError::TooMany {
                what: "memberships in groups",
                limit: MAX_MEMBERSHIPS,
            });
        }
        Ok(())
    }

    /// Takes over what may change of a VM that goes on, and refuses what may not.
    fn keep(&mut self, request: &VmRequest) -> Result<(), InputError> {
        let full_name = request.full_name();
        // The caller has just found it.
        let Some(line) = self.lines.get(&full_name) else {
            return Ok(());
        };
        // Each member is named, so that a new one is not forgotten: it may change, or it may not.
        let VmRequest {
            domain,
            name: _,
            aliases,
            groups,
            cid,
            vmm: _,
            host: _,
            channels: _,
            ports,
            windows,
            qmp,
            limits,
        } = request;
        let (vmm, host) = self.sockets(request);
        let is_serial = |of: &VmmSocket| matches!(of, VmmSocket::Serial(_));
        let is_hybrid = |of: &VmmSocket| matches!(of, VmmSocket::Hybrid(_));
        let was = &line.vmm;
        let fixed = [
            ("serial", is_serial(&vmm) == is_serial(was)),
            ("hybrid", is_hybrid(&vmm) == is_hybrid(was)),
            ("cid", cid.is_none_or(|cid| cid == line.cid)),
            (was.key(), vmm == *was),
            ("host", host == line.host),
            ("channel", self.channels(request) == line.channels),
            ("windows", *windows == line.windows),
            ("qmp", *qmp == line.qmp),
            ("limits", *limits == line.limits),
            ("net", self.keeps_ports(line, request)),
        ];
        if let Some((key, _)) = fixed.into_iter().find(|(_, same)| !same) {
            let vm = full_name;
            return Err(InputError::Fixed { key, vm });
        }
        for alias in aliases {
            self.unowned_name(domain, alias)?;
        }
        if let Some(line) = self.lines.get_mut(&full_name) {
            line.aliases.clone_from(aliases);
            line.own_groups.clone_from(groups);
            line.port_requests.clone_from(ports);
        }
        Ok(())
    }

    /// Checks that no path of a VM is another's, or another of its own.
    fn unowned_paths(
        &self,
        (vmm, host): (&VmmSocket, &Path),
        channels: &[Channel<Chardev>],
        qmp: Option<&Path>,
    ) -> Result<(), InputError> {
        let met = match vmm {
            VmmSocket::Vsock(_) => "this VM's vhost-user socket",
            VmmSocket::Hybrid(_) => "the socket of this VM's VMM",
            VmmSocket::Serial(_) => "this VM's serial socket",
        };
        let own = [
            (met, Some(vmm.path())),
            ("this VM's host socket", Some(host)),
            ("this VM's control socket of QEMU", qmp),
        ];
        let of_channels = channels.iter().flat_map(|channel| {
            let paths = [Some(channel.chardev.path()), channel.listens_at()];
            paths.map(|path| ("another channel of this VM", path))
        });
        let mut seen = BTreeMap::new();
        for (what, path) in own.into_iter().chain(of_channels) {
            let Some(path) = path else { continue };
            self.unowned_path(path)?;
            if let Some(owner) = seen.insert(path, what) {
                let (path, owner) = (path.to_owned(), owner.to_owned());
                return Err(InputError::DuplicatePath { path, owner });
            }
        }
        Ok(())
    }

    fn resolve(
        &mut self,
        request: &VmRequest,
        asked_for: &BTreeSet<(&str, u32)>,
    ) -> Result<LineSpec, InputError> {
        if self.lines.len() >= MAX_VMS {
            return Err(InputError::TooMany {
                what: "VMs",
                limit: MAX_VMS,
            });
        }
        let VmRequest { domain, name, .. } = request.clone();
        self.unowned_name(&domain, &name)?;
        for alias in &request.aliases {
            self.unowned_name(&domain, alias)?;
            if *alias == name {
                let name = name.clone();
                return Err(InputError::DuplicateName { name });
            }
        }
        let cid = match request.cid {
            Some(cid) => self.unowned_cid(&domain, cid)?,
            None => self.free_cid(&domain, &name, asked_for),
        };
        let (vmm, host) = self.sockets(request);
        let channels = self.channels(request);
        let (windows, qmp) = request.windows()?;
        self.check_window_count(windows)?;
        self.unowned_paths((&vmm, &host), &channels, qmp.as_deref())?;
        let lines = &self.lines;
        let in_use = |domain: &str, name: &str| lines.contains_key(&full_name(domain, name));
        self.cids.remember(&domain, &name, cid, in_use);
        Ok(LineSpec {
            domain,
            name,
            aliases: request.aliases.clone(),
            groups: request.groups.clone(),
            own_groups: request.groups.clone(),
            cid,
            vmm,
            host,
            channels,
            port_requests: request.ports.clone(),
            ports: Vec::new(),
            windows,
            qmp,
            limits: request.limits,
        })
    }

    fn check_window_count(&self, more: Option<WindowsSpec>) -> Result<(), InputError> {
        let of_lines = self.lines.values().filter_map(|line| line.windows);
        let counts = of_lines.chain(more).map(|windows| windows.count as usize);
        if more.is_some() && counts.sum::<usize>() > MAX_WINDOWS_OF_ALL {
            let (what, limit) = ("windows of all VMs", MAX_WINDOWS_OF_ALL);
            return Err(InputError::TooMany { what, limit });
        }
        Ok(())
    }

    /// Where the VMM is met, and the socket for programs of the host.
    fn sockets(&self, request: &VmRequest) -> (VmmSocket, PathBuf) {
        let default = |suffix: &str| self.default_path(&request.full_name(), suffix);
        let host = request.host.clone().unwrap_or_else(|| default("sock"));
        (request.vmm.or_at(default), host)
    }

    /// The channels, each with its socket for the VMM: `web.org.example.log.channel` when nothing else is said.
    fn channels(&self, request: &VmRequest) -> Vec<Channel<Chardev>> {
        let resolve = |channel: &Channel<ChardevRequest>| Channel {
            name: channel.name.clone(),
            chardev: channel.chardev.or_at(|| {
                let suffix = format!("{}.channel", channel.name);
                self.default_path(&request.full_name(), &suffix)
            }),
            target: channel.target.clone(),
        };
        request.channels.iter().map(resolve).collect()
    }

    /// `web.sock`, or `red.web.sock` in the domain `red`. A VM of the default domain may be named `red.web`: then the second of
    /// them is refused, as the path belongs to the first.
    fn default_path(&self, full_name: &str, suffix: &str) -> PathBuf {
        let name = full_name.replace('/', ".");
        self.runtime_dir.join(format!("{name}.{suffix}"))
    }

    fn unowned_name(&self, domain: &str, name: &str) -> Result<(), InputError> {
        match self.find(domain, name) {
            Some(_) => Err(InputError::DuplicateName {
                name: full_name(domain, name),
            }),
            None => Ok(()),
        }
    }

    fn unowned_cid(&self, domain: &str, cid: u32) -> Result<u32, InputError> {
        let owner = self
            .lines
            .values()
            .find(|line| line.domain == domain && line.cid == cid);
        match owner {
            Some(line) => Err(InputError::DuplicateCid {
                cid,
                owner: line.full_name(),
            }),
            None => Ok(cid),
        }
    }

    /// The identifier that the name had before, or the lowest that is free.
    fn free_cid(&self, domain: &str, name: &str, asked_for: &BTreeSet<(&str, u32)>) -> u32 {
        let of_domain = self.lines.values().filter(|line| line.domain == domain);
        let owned: BTreeSet<u32> = of_domain
            .map(|line| line.cid)
            .chain(
                asked_for
                    .iter()
                    .filter(|(of, _)| *of == domain)
                    .map(|(_, cid)| *cid),
            )
            .collect();
        let remembered = self.cids.of(domain, name);
        remembered
            .filter(|cid| !owned.contains(cid))
            .or_else(|| Cids::lowest_free(&[&owned, &self.cids.of_domain(domain)]))
            // At most MAX_VMS are owned, about as many asked for, and some thousands remembered: one of four billion remains.
            .expect("there are more CIDs than names")
    }

    fn unowned_path(&self, path: &Path) -> Result<(), InputError> {
        check_socket_path(path)?;
        let owner = if path == crate::directories::control_socket(&self.runtime_dir) {
            Some("the control API".to_owned())
        } else if path == crate::directories::circuit_socket(&self.runtime_dir) {
            Some("the switchboard".to_owned())
        } else if path == crate::directories::lock_file(&self.runtime_dir) {
            Some("the daemon's lock".to_owned())
        } else {
            let line = self
                .lines
                .values()
                .find(|line| line.sockets().any(|socket| socket == path));
            line.map(|line| format!("VM {:?}", line.full_name()))
        };
        match owner {
            Some(owner) => Err(InputError::DuplicatePath {
                path: path.to_owned(),
                owner,
            }),
            None => Ok(()),
        }
    }
}

/// What a configuration changes of a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlanChange {
    /// Lines to open.
    pub added: Vec<LineSpec>,
    /// Lines to close.
    pub removed: Vec<LineSpec>,
}
