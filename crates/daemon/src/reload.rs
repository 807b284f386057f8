//! A configuration that is read again: it comes into force as a whole, or not at all.
//!
//! Everything that can fail is done before anything that cannot be undone: the file is read and checked, listeners are made, new lines
//! are opened. Then the rules change, and only then go the lines that are no longer named, and with them their circuits.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::api::StalledClients;
use crate::api::types::{EventDetails, EventKind, Reloaded};
use crate::audit::Audit;
use crate::capture::Captures;
use crate::config::{
    Config, ConfigError, ControlGroups, DEFAULT_SPIN, PlanChange, StateError, default_runtime_dir,
    default_state_dir,
};
use crate::control::{Control, ControlError, open_line};
use crate::events::Events;
use crate::input::InputError;
use crate::line::{LineError, LineSpec, LineWorker, PolicyChange};
use crate::net::{NetChange, NetFault, NetWorker};
use crate::offers::{OfferError, Offers};
use crate::policy::Rulebook;
use crate::sandbox;
use crate::switchboard::Circuits;
use crate::windows::Windows;

/// Reads the configuration again, from all its sources. It may take its time.
pub type ReadConfig = Box<dyn Fn() -> Result<Config, ConfigError> + Send + Sync>;

/// Why a configuration did not come into force. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The configuration cannot be meant, or would change what cannot change.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// What is remembered of VMs cannot be written.
    #[error(transparent)]
    State(#[from] StateError),
    /// Something cannot be offered.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// The audit's file cannot be opened.
    #[error("cannot open the audit's file {}: {error}; check its path and its permissions", path.display())]
    Audit {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The line of a new VM cannot be opened.
    #[error("VM {name:?}: {error}")]
    Line {
        /// The VM's full name.
        name: String,
        /// What stands in the way.
        error: Box<ControlError>,
    },
    /// A new network, or a new port in one, cannot be opened.
    #[error(transparent)]
    Net(#[from] NetFault),
    /// The worker cannot do what the configuration says.
    #[error(transparent)]
    Worker(#[from] LineError),
    /// A part of the daemon ended without an answer.
    #[error("the daemon dropped the request: see its log")]
    Lost,
}

/// What a configuration says that holds for as long as the daemon runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The runtime directory, from the root.
    pub runtime_dir: PathBuf,
    /// The state directory, from the root.
    pub state_dir: PathBuf,
    /// How long the worker looks before it sleeps.
    pub spin: Duration,
    /// Who may use the control socket beside the daemon's own user.
    pub control: ControlGroups,
}

impl Settings {
    /// What a configuration says, or what holds where it says nothing.
    ///
    /// # Errors
    /// When a relative path has no directory to start at.
    pub fn of(config: &Config) -> std::io::Result<Settings> {
        let runtime_dir = config.runtime_dir.clone();
        let runtime_dir = std::path::absolute(runtime_dir.unwrap_or_else(default_runtime_dir))?;
        let state_dir = config.state_dir.clone();
        let state_dir = state_dir.unwrap_or_else(|| default_state_dir(&runtime_dir));
        Ok(Settings {
            state_dir: std::path::absolute(state_dir)?,
            runtime_dir,
            spin: config.spin.unwrap_or(DEFAULT_SPIN),
            control: config.control,
        })
    }

    /// Refuses what would have to change while the daemon runs.
    fn check(&self, config: &Config) -> Result<(), ConfigError> {
        let fixed = |key, was: String| ConfigError::Input {
            place: "the configuration".to_owned(),
            error: InputError::FixedSetting { key, was },
        };
        // The directories were found when the daemon started, and are still there.
        let wanted = Settings::of(config).unwrap_or_else(|_| self.clone());
        if wanted.runtime_dir != self.runtime_dir {
            let was = self.runtime_dir.display().to_string();
            return Err(fixed("runtime-dir", was));
        }
        if wanted.state_dir != self.state_dir {
            let was = self.state_dir.display().to_string();
            return Err(fixed("state-dir", was));
        }
        if wanted.spin != self.spin {
            let was = self.spin.as_micros().to_string();
            return Err(fixed("spin-microseconds", was));
        }
        if wanted.control != self.control {
            let of = |group: Option<u32>| group.map_or("nobody".to_owned(), |id| id.to_string());
            let (read, operate) = (of(self.control.read), of(self.control.operate));
            let was = format!("read-group {read}, operate-group {operate}");
            return Err(fixed("control", was));
        }
        Ok(())
    }
}

/// What is in force, and changes only as a whole.
#[derive(Debug, Clone)]
pub struct InForce {
    /// The VMs, the rules and the offers.
    pub book: Rulebook,
    /// Full names of the VMs that the configuration named, as against those that were added by hand.
    pub configured: BTreeSet<String>,
    /// The file of the audit.
    pub audit: Option<PathBuf>,
}

impl InForce {
    /// What a configuration makes of this.
    fn changed(&self, config: &Config) -> Result<(InForce, PlanChange), ConfigError> {
        let (book, change) = self.book.changed(config, &self.configured)?;
        let next = InForce {
            book,
            configured: config.vms.iter().map(|vm| vm.value.full_name()).collect(),
            audit: config.audit.clone(),
        };
        Ok((next, change))
    }
}

impl Control {
    /// Reads the configuration again and brings it into force. VMs that were added by hand stay. When it fails, everything is as it was,
    /// and the log says so too.
    ///
    /// # Errors
    /// [`ReloadError`].
    pub async fn reload(self: &Arc<Self>, enforce_existing: bool) -> Result<Reloaded, ReloadError> {
        let control = self.clone();
        // On its own task: a client that hangs up must not leave it half done.
        let task = tokio::spawn(async move {
            let reloaded = control.reload_now(enforce_existing).await;
            match &reloaded {
                Ok(reloaded) => {
                    control.tell_of_reload(reloaded);
                    tracing::info!(
                        added = reloaded.added.len(),
                        removed = reloaded.removed.len(),
                        rules = reloaded.rules,
                        "read the configuration again"
                    );
                }
                Err(error) => {
                    let details = EventDetails {
                        reason: Some(error.to_string()),
                        ..EventDetails::default()
                    };
                    control.parts.events.tell(EventKind::Reload, details);
                    tracing::error!(
                        "the configuration was not taken, and what was in force stays: {error}"
                    );
                }
            }
            reloaded
        });
        task.await.map_err(|_| ReloadError::Lost)?
    }

    fn tell_of_reload(&self, reloaded: &Reloaded) {
        let events = &self.parts.events;
        for (kind, names) in [
            (EventKind::VmAdded, &reloaded.added),
            (EventKind::VmRemoved, &reloaded.removed),
        ] {
            for name in names {
                events.tell(kind, EventDetails::of_vm(name));
            }
        }
        let rules = EventDetails {
            count: Some(reloaded.rules as u64),
            ..EventDetails::default()
        };
        events.tell(EventKind::PolicyChanged, rules);
        events.tell(EventKind::Reload, EventDetails::default());
    }

    async fn reload_now(&self, enforce_existing: bool) -> Result<Reloaded, ReloadError> {
        // Held from the reading on: of two reloads at once, the one that comes into force last has read last.
        let mut in_force = self.in_force.lock().await;
        let parts = self.parts.clone();
        let current = in_force.clone();
        let put = tokio::task::spawn_blocking(move || {
            let config = (parts.read_config)()?;
            parts.settings.check(&config)?;
            sandbox::check_config(&config).map_err(|error| ConfigError::Input {
                place: "the configuration".to_owned(),
                error,
            })?;
            let (next, change) = current.changed(&config)?;
            parts.put_in_force(&current, &next, &change, enforce_existing)?;
            Ok::<_, ReloadError>((next, change))
        });
        let (next, change) = put.await.map_err(|_| ReloadError::Lost)??;
        for line in &change.removed {
            self.readiness.forget(&line.full_name());
        }
        *in_force = next;
        let [rules, services, publishes] = in_force.book.counts();
        let names = |lines: &[LineSpec]| lines.iter().map(LineSpec::full_name).collect();
        Ok(Reloaded {
            added: names(&change.added),
            removed: names(&change.removed),
            vms: in_force.book.plan.lines().count(),
            networks: in_force.book.plan.networks().count(),
            rules,
            services,
            publishes,
            findings: in_force.book.check_names(),
        })
    }
}

/// What the control plane works with.
pub struct Parts {
    /// The data plane.
    pub worker: Arc<dyn LineWorker>,
    /// The part of it that switches frames.
    pub net: Arc<dyn NetWorker>,
    /// Who serves services and published ports.
    pub offers: Arc<dyn Offers>,
    /// Who sets zero-copy circuits up, and knows all circuits.
    pub circuits: Arc<dyn Circuits>,
    /// The windows of all VMs.
    pub windows: Arc<Windows>,
    /// Where decisions are written.
    pub audit: Audit,
    /// Where it is told what happens.
    pub events: Events,
    /// Who looks at what passes.
    pub captures: Captures,
    /// Whom the control API has cut off.
    pub stalled_clients: StalledClients,
    /// What holds for as long as the daemon runs.
    pub settings: Settings,
    /// Where the configuration comes from.
    pub read_config: ReadConfig,
}

impl Parts {
    /// Brings everything into force that a configuration changes, or nothing.
    fn put_in_force(
        &self,
        current: &InForce,
        next: &InForce,
        change: &PlanChange,
        enforce_existing: bool,
    ) -> Result<(), ReloadError> {
        self.remember(&current.book, &next.book)?;
        let mut offer = next.book.offer();
        offer.enforce_existing = enforce_existing;
        let entries = offer.entries();
        let commit = self.offers.prepare(offer)?;
        self.move_audit(current, next)?;
        let undo = |opened: &[LineSpec]| {
            self.close(opened);
            // It was open a moment ago.
            if let Err(error) = self.move_audit(next, current) {
                tracing::error!("{error}");
            }
        };
        for (count, spec) in change.added.iter().enumerate() {
            if let Err(error) = open_line(self.worker.as_ref(), &self.windows, spec.clone()) {
                undo(&change.added[..count]);
                let name = spec.full_name();
                let error = Box::new(error);
                return Err(ReloadError::Line { name, error });
            }
        }
        let networks = NetChange::between(&current.book.plan, &next.book.plan);
        if let Err(error) = networks.open(self.net.as_ref()) {
            undo(&change.added);
            return Err(error.into());
        }
        let policy = PolicyChange {
            policy: next.book.policy(),
            groups: next.book.groups(),
            aliases: next.book.aliases(),
            enforce_existing,
        };
        // Services that are new cannot be called before a rule says so, and those that are gone are refused by their number.
        let set = self
            .worker
            .set_directory(entries)
            .and_then(|()| self.worker.set_policy(policy));
        if let Err(error) = set {
            networks.undo(self.net.as_ref());
            undo(&change.added);
            if let Err(error) = self.worker.set_directory(current.book.offer().entries()) {
                tracing::error!("cannot go back to the services of before: {error}");
            }
            return Err(error.into());
        }
        if enforce_existing {
            self.circuits.enforce();
        }
        commit();
        networks.settle(self.net.as_ref());
        networks.close(self.net.as_ref());
        self.close(&change.removed);
        Ok(())
    }

    /// Writes down which context identifiers and which addresses belong to which names, if that has changed.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn remember(&self, current: &Rulebook, next: &Rulebook) -> Result<(), StateError> {
        let (cids, addresses) = (current.plan.cids(), current.plan.addresses());
        next.plan.save(&self.settings.state_dir, cids, addresses)
    }

    fn move_audit(&self, from: &InForce, to: &InForce) -> Result<(), ReloadError> {
        if from.audit == to.audit {
            return Ok(());
        }
        let moved = self.audit.move_to(to.audit.as_deref());
        moved.map_err(|error| ReloadError::Audit {
            path: to.audit.clone().unwrap_or_default(),
            error,
        })
    }

    pub(crate) fn close(&self, lines: &[LineSpec]) {
        for line in lines {
            let name = line.full_name();
            // Behind the line, so that no circuit of the VM has them.
            match self.worker.remove_line(&name) {
                Ok(()) => {
                    self.circuits.removed(&name);
                    tracing::info!(vm = name, "removed a VM");
                }
                Err(error) => tracing::error!(vm = name, %error, "cannot remove a VM"),
            }
            self.windows.close(&name);
        }
    }
}

#[cfg(test)]
mod tests;
