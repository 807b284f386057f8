//! How something comes into force: the whole of a configuration, or one VM that is added or removed by hand.
//!
//! Everything that can fail is done before anything that a guest could notice: listeners are made, and networks opened. What judges calls and what
//! carries them out then changes in one go, between two turns of the worker ([`LineWorker::prepare`]): lines, services, rules, groups and
//! aliases, and with them what the proxy keeps ([`Offers::prepare`]). Networks change right after it on their own thread, which passes no frame meanwhile
//! ([`NetWorker::prepare`]). So no call is judged by a part of one configuration and a part of another, or
//! judged by one and carried out by another.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::PartKind;
use config::{Chardev, Config, ConfigError, LineSpec, Plan, Settings, StateError, VmmSocket};

use crate::audit::Audit;
use crate::capture::Captures;
use crate::control_error::ControlError;
use crate::events::Events;
use crate::line::{LineChange, LineFault, LineWorker, PolicyChange};
use crate::net::{NetChange, NetFault, NetWorker};
use crate::policy::Rulebook;
use crate::stalled_clients::StalledClients;
use hostside::offers::{Commit, Offers};
use keeper::Keeper;
use runtime::directory::{check_directory, remove_stale_socket};
use windows::memory::Windows;
use windows::switchboard::Circuits;

/// Reads the configuration again, from all its sources, or with this file in place of its own. It may take its time.
pub type ReadConfig = Box<dyn Fn(Option<&Path>) -> Result<Config, ConfigError> + Send + Sync>;

/// Something that one daemon may lack and serve the rest: its kind, and the full name of the VM or the network, or where a published port listens.
pub type Part = (PartKind, String);

/// Why each part is unavailable that is.
pub type Unavailable = BTreeMap<Part, String>;

/// What is in force, and changes only as a whole.
#[derive(Debug, Clone)]
pub struct InForce {
    /// The VMs, the rules and the offers.
    pub book: Rulebook,
    /// Full names of the VMs that the configuration named, as against those that were added by hand.
    pub configured: BTreeSet<String>,
    /// The file of the audit.
    pub audit: Option<PathBuf>,
    /// What of it cannot be had at the moment.
    pub unavailable: Unavailable,
}

/// What becomes of the whole when a VM cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Nothing changes.
    Whole,
    /// The VM is left out.
    WithoutSome,
}

/// What stands in the way of something coming into force. Nothing has changed then, unless it was [left out](Manner::WithoutSome).
#[derive(Debug, thiserror::Error)]
pub struct Hindrance {
    /// The VM that it is about, by full name, if it is about one.
    pub vm: Option<String>,
    /// What it is.
    pub error: Box<ControlError>,
}

impl fmt::Display for Hindrance {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.vm {
            Some(vm) => write!(formatter, "VM {vm:?}: {}", self.error),
            None => self.error.fmt(formatter),
        }
    }
}

impl<E: Into<ControlError>> From<E> for Hindrance {
    fn from(error: E) -> Hindrance {
        Hindrance {
            vm: None,
            error: Box::new(error.into()),
        }
    }
}

/// What the control plane works with.
pub struct Parts {
    /// The data plane.
    pub worker: Arc<dyn LineWorker>,
    /// The part of it that switches frames.
    pub net: Arc<dyn NetWorker>,
    /// Serves services and published ports.
    pub offers: Arc<dyn Offers>,
    /// Sets zero-copy circuits up, and knows all circuits.
    pub circuits: Arc<dyn Circuits>,
    /// The windows of all VMs.
    pub windows: Arc<Windows>,
    /// Where decisions are written.
    pub audit: Audit,
    /// Where events are reported.
    pub events: Events,
    /// The captures of what passes.
    pub captures: Captures,
    /// Callers that the API cut off.
    pub stalled_clients: StalledClients,
    /// Where things are kept for the next daemon.
    pub keeper: Option<Arc<Keeper>>,
    /// What was taken over from the daemon before.
    pub restart: Option<api::Restart>,
    /// What holds for as long as the daemon runs.
    pub settings: Settings,
    /// Where the configuration comes from.
    pub read_config: ReadConfig,
}

impl Parts {
    /// Brings what is next into force. Returns which VMs were left out: something of each may be there, and goes with the VM when that is no part of what
    /// comes into force next.
    ///
    /// # Errors
    /// [`Hindrance`].
    pub fn put_in_force(
        &self,
        current: &InForce,
        next: &InForce,
        manner: Manner,
        enforce_existing: bool,
    ) -> Result<Vec<Hindrance>, Hindrance> {
        // First, as nothing may be in force that a restart would not find again.
        let remembered = self.remember(&current.book, &next.book);
        let put = remembered
            .map_err(Hindrance::from)
            .and_then(|()| self.put(current, next, manner, enforce_existing));
        if put.is_err() {
            if let Err(error) = self.remember(&next.book, &current.book) {
                tracing::error!("{error}");
            }
        }
        put
    }

    /// Whether what is next can be offered. It listens at new addresses for that, for a moment.
    ///
    /// # Errors
    /// [`Hindrance`].
    pub(crate) fn can_offer(&self, next: &InForce) -> Result<(), Hindrance> {
        drop(self.offers.prepare(next.offer())?);
        Ok(())
    }

    fn put(
        &self,
        current: &InForce,
        next: &InForce,
        manner: Manner,
        enforce_existing: bool,
    ) -> Result<Vec<Hindrance>, Hindrance> {
        let (before, after) = (current.available_plan(), next.available_plan());
        let (added, removed) = (lines_beside(&after, &before), lines_beside(&before, &after));
        let networks = NetChange::between(&before, &after).without_uplinks(
            current.missing_uplinks(),
            next.missing_uplinks(),
            &after,
        );
        let mut offer = next.offer();
        offer.enforce_existing = enforce_existing;
        let services = offer.entries();
        let commit = self.offers.prepare(offer)?;
        let lines = LineChange {
            added: added.clone(),
            leaves_out: manner == Manner::WithoutSome,
            removed: removed.iter().map(LineSpec::full_name).collect(),
            services,
            policy: PolicyChange {
                policy: next.book.policy(),
                groups: next.book.groups(),
                aliases: next.book.aliases(),
                enforce_existing,
            },
        };
        self.move_audit(current, next)?;
        let changed = self.change(lines, networks, commit);
        let left_out = changed.inspect_err(|_| {
            self.close_windows(&added, current);
            // It was open a moment ago.
            if let Err(error) = self.move_audit(next, current) {
                tracing::error!("{error}");
            }
        })?;
        if enforce_existing {
            self.circuits.enforce();
        }
        for spec in &removed {
            // Before the windows, so that no circuit of the VM has them.
            self.circuits.removed(&spec.full_name());
        }
        self.close_windows(&removed, next);
        Ok(left_out)
    }

    /// Closes the windows of VMs that are no part of what is in force. Guests of those that are may have them, also while they are unavailable.
    fn close_windows(&self, lines: &[LineSpec], in_force: &InForce) {
        let names = lines.iter().map(LineSpec::full_name);
        for name in names.filter(|name| in_force.book.plan.line(name).is_none()) {
            self.windows.close(&name);
        }
    }

    /// Changes lines and networks, or nothing but the windows of new lines.
    fn change(
        &self,
        mut lines: LineChange,
        networks: NetChange,
        offers: Commit,
    ) -> Result<Vec<Hindrance>, Hindrance> {
        let mut left_out = Vec::new();
        lines.added.retain(|spec| {
            let prepared = self.prepare_line(spec).map_err(|error| Hindrance {
                vm: Some(spec.full_name()),
                error: Box::new(error),
            });
            prepared.map_err(|found| left_out.push(found)).is_ok()
        });
        let is_whole = !lines.leaves_out;
        // Nor is anything changed for nothing but VMs that are left out.
        let ends = is_whole || lines.added.is_empty();
        if let Some(found) = ends.then(|| left_out.pop()).flatten() {
            return Err(found);
        }
        let hindrance = |fault: LineFault| Hindrance {
            vm: fault.vm,
            error: Box::new(fault.error.into()),
        };
        let of_port = |fault: NetFault| Hindrance {
            vm: fault.vm.clone(),
            error: Box::new(fault.into()),
        };
        let lines = self.worker.prepare(lines).map_err(hindrance)?;
        // Last, as networks stand still from here on.
        let (networks, mut faults) = self.net.prepare(networks)?;
        if let Some(fault) = is_whole.then(|| faults.pop()).flatten() {
            drop(networks);
            self.net.settle();
            return Err(of_port(fault));
        }
        left_out.extend(faults.into_iter().map(of_port));
        let changed = lines(Box::new(move || {
            offers();
            networks();
        }));
        self.net.settle();
        left_out.extend(changed.map_err(hindrance)?.into_iter().map(hindrance));
        Ok(left_out)
    }

    /// Writes down which context identifiers and which addresses belong to which names, if that has changed.
    fn remember(&self, current: &Rulebook, next: &Rulebook) -> Result<(), StateError> {
        let (cids, addresses) = (current.plan.cids(), current.plan.addresses());
        next.plan.save(&self.settings.state_dir, cids, addresses)
    }

    fn move_audit(&self, from: &InForce, to: &InForce) -> Result<(), ControlError> {
        if from.audit == to.audit {
            return Ok(());
        }
        let moved = self.audit.move_to(to.audit.as_deref());
        moved.map_err(|error| ControlError::AuditFile {
            path: to.audit.clone().unwrap_or_default(),
            error,
        })
    }

    /// Gets ready for a line to be opened: checks its directories, takes over stale sockets, and makes its windows.
    fn prepare_line(&self, spec: &LineSpec) -> Result<(), ControlError> {
        // Where a VMM listens there may be nothing yet, and nothing has to be made.
        let ours = |chardev: &Chardev, option| match chardev {
            Chardev::Listen(path) => Some((path.clone(), option, true)),
            Chardev::Connect(_) => None,
        };
        let mut sockets = vec![(spec.host.clone(), "host=PATH", true)];
        sockets.extend(match &spec.vmm {
            VmmSocket::Vsock(path) => Some((path.clone(), "vhost-user=PATH", true)),
            VmmSocket::Hybrid(path) => Some((path.clone(), "hybrid=PATH", false)),
            VmmSocket::Serial(chardev) => ours(chardev, "serial=PATH"),
        });
        for channel in &spec.channels {
            sockets.extend(ours(&channel.chardev, "listen = \"PATH\""));
            let listens_at = channel.listens_at();
            sockets.extend(listens_at.map(|path| (path.to_owned(), "to = \"listen:PATH\"", true)));
        }
        for (path, option, is_ours) in &sockets {
            check_directory(path.parent().unwrap_or(Path::new("/")), option)?;
            let keeper = self.keeper.as_deref();
            if keeper.is_some_and(|keeper| device::is_kept(keeper, path)) {
                continue;
            }
            if *is_ours && remove_stale_socket(path)? {
                tracing::warn!(
                    vm = spec.full_name(),
                    socket = %path.display(),
                    "took over the stale socket of a daemon that has died"
                );
            }
        }
        Ok(self.windows.open(spec)?)
    }
}

/// The lines that one plan has and another has not.
fn lines_beside(plan: &Plan, other: &Plan) -> Vec<LineSpec> {
    let lines = plan.lines();
    let lines = lines.filter(|line| other.line(&line.full_name()).is_none());
    lines.cloned().collect()
}
