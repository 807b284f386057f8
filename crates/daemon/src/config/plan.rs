//! From what was asked for to lines that can be opened: names, context identifiers and paths that belong to nobody else.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use wire::vsock::{CID_ANY, MIN_GUEST_CID};

use super::{Config, ConfigError, VmRequest, refuse};
use crate::input::{InputError, check_socket_path};
use crate::line::LineSpec;

/// The most VMs that one daemon serves.
pub const MAX_VMS: usize = 1024;

/// The lines of one daemon, and what they occupy. A line keeps its context identifier as long as it lives.
#[derive(Debug, Clone)]
pub struct Plan {
    runtime_dir: PathBuf,
    lines: BTreeMap<String, LineSpec>,
}

impl Plan {
    /// A plan without a line. `runtime_dir` is absolute.
    pub fn new(runtime_dir: PathBuf) -> Plan {
        Plan {
            runtime_dir,
            lines: BTreeMap::new(),
        }
    }

    /// A plan with the VMs of a configuration. Context identifiers that were asked for are given first, so that an
    /// assigned one never takes what a later VM names.
    ///
    /// # Errors
    /// [`ConfigError::Input`] with the place of the VM that collides with another.
    pub fn from_config(runtime_dir: PathBuf, config: &Config) -> Result<Plan, ConfigError> {
        let mut plan = Plan::new(runtime_dir);
        let asked_for: BTreeSet<u32> = config.vms.iter().filter_map(|vm| vm.value.cid).collect();
        for vm in &config.vms {
            let spec = refuse(&vm.place, plan.resolve(&vm.value, &asked_for))?;
            plan.lines.insert(spec.name.clone(), spec);
        }
        Ok(plan)
    }

    /// Fills in what the request left open and enters the line.
    ///
    /// # Errors
    /// [`InputError`] when a name, a context identifier or a path belongs to another line, or a default path is too long.
    pub fn add(&mut self, request: &VmRequest) -> Result<LineSpec, InputError> {
        let spec = self.resolve(request, &BTreeSet::new())?;
        self.lines.insert(spec.name.clone(), spec.clone());
        Ok(spec)
    }

    /// Strikes a line out, and returns it if there was one.
    pub fn remove(&mut self, name: &str) -> Option<LineSpec> {
        self.lines.remove(name)
    }

    /// The line with this name.
    pub fn get(&self, name: &str) -> Option<&LineSpec> {
        self.lines.get(name)
    }

    /// The lines, by name.
    pub fn lines(&self) -> impl Iterator<Item = &LineSpec> {
        self.lines.values()
    }

    fn resolve(
        &self,
        request: &VmRequest,
        kept_free: &BTreeSet<u32>,
    ) -> Result<LineSpec, InputError> {
        if self.lines.len() >= MAX_VMS {
            return Err(InputError::TooMany {
                what: "VMs",
                limit: MAX_VMS,
            });
        }
        let name = request.name.clone();
        if self.lines.contains_key(&name) {
            return Err(InputError::DuplicateName { name });
        }
        let cid = match request.cid {
            Some(cid) => self.unowned_cid(cid)?,
            None => self.free_cid(kept_free),
        };
        let default_path = |suffix| self.runtime_dir.join(format!("{name}.{suffix}"));
        let vhost_user = request
            .vhost_user
            .clone()
            .unwrap_or_else(|| default_path("vhost"));
        let host = request.host.clone().unwrap_or_else(|| default_path("sock"));
        self.unowned_path(&vhost_user)?;
        self.unowned_path(&host)?;
        if vhost_user == host {
            return Err(InputError::DuplicatePath {
                path: host,
                owner: "this VM's vhost-user socket".to_owned(),
            });
        }
        Ok(LineSpec {
            name,
            cid,
            vhost_user,
            host,
            limits: request.limits,
        })
    }

    fn unowned_cid(&self, cid: u32) -> Result<u32, InputError> {
        match self.lines.values().find(|line| line.cid == cid) {
            Some(line) => Err(InputError::DuplicateCid {
                cid,
                owner: line.name.clone(),
            }),
            None => Ok(cid),
        }
    }

    fn free_cid(&self, kept_free: &BTreeSet<u32>) -> u32 {
        let owned: BTreeSet<u32> = self
            .lines
            .values()
            .map(|line| line.cid)
            .chain(kept_free.iter().copied())
            .collect();
        // At most MAX_VMS are owned and about as many kept free, so one of four billion remains.
        (MIN_GUEST_CID..CID_ANY)
            .find(|cid| !owned.contains(cid))
            .expect("there are more CIDs than VMs")
    }

    fn unowned_path(&self, path: &Path) -> Result<(), InputError> {
        check_socket_path(path)?;
        let owner = if path == crate::runtime::control_socket(&self.runtime_dir) {
            Some("the control API".to_owned())
        } else if path == crate::runtime::lock_file(&self.runtime_dir) {
            Some("the daemon's lock".to_owned())
        } else {
            let line = self
                .lines
                .values()
                .find(|line| line.vhost_user == path || line.host == path);
            line.map(|line| format!("VM {:?}", line.name))
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
