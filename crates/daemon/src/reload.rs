//! A configuration that is read again: it comes into force as a whole, or not at all.
//!
//! The file is read and checked as a whole; [`in_force`](crate::in_force) has how the rest happens in one moment.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::{EventDetails, EventKind, ReloadRequest, Reloaded, VMM_RUNS_ON};
use config::{Cids, Config, ConfigError, LineSpec, Plan, PlanChange};

use crate::added;
use crate::control::Control;
use crate::in_force::{Hindrance, InForce, Manner, Part};
use crate::policy::Rulebook;
use crate::sandbox;

/// Why a configuration did not come into force. Nothing has changed then.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    #[error(
        "the daemon was started without --config, so it has no file to read, and nothing has changed: start it with `ringdown serve --config FILE`"
    )]
    NoFile,
    #[error(
        "the file cannot be {name:?}: expected the name of one beside the daemon's own, without its directory, and \"check\": true"
    )]
    NotBeside { name: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The file is valid. What is in force speaks against it.
    #[error(transparent)]
    Running(ConfigError),
    #[error(transparent)]
    Change(#[from] Hindrance),
    #[error("the daemon dropped the request: see its log")]
    Lost,
}

impl InForce {
    /// What a configuration makes of this.
    pub(crate) fn changed(&self, config: &Config) -> Result<(InForce, PlanChange), ConfigError> {
        let (book, change) = self.book.changed(config, &self.configured)?;
        let mut next = InForce {
            book,
            configured: config.vms.iter().map(|vm| vm.value.full_name()).collect(),
            audit: config.audit.clone(),
            unavailable: self.unavailable.clone(),
        };
        next.forget_unwanted();
        Ok((next, change))
    }
}

impl Control {
    /// Reads the configuration again and brings it into force. VMs that were added by hand stay. When it fails, everything is as it was,
    /// and the log says so too. Of a request that only checks there is the answer, and nothing else.
    ///
    /// # Errors
    /// [`ReloadError`].
    pub async fn reload(self: &Arc<Self>, request: ReloadRequest) -> Result<Reloaded, ReloadError> {
        let control = self.clone();
        // On its own task: a client that hangs up must not leave it half done, nor let another change begin beside it.
        let task = tokio::spawn(async move {
            let is_check = request.check;
            let reloaded = control.reload_now(request).await;
            match &reloaded {
                _ if is_check => {}
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
        events.tell_of_change(rules);
        events.tell(EventKind::Reload, EventDetails::default());
    }

    async fn reload_now(self: &Arc<Self>, request: ReloadRequest) -> Result<Reloaded, ReloadError> {
        // Held from the reading on: of two reloads at once, the one that comes into force last has read last.
        let _changing = self.changing.lock().await;
        let is_check = request.check;
        let put = self.ask(move |control| {
            let (parts, current) = (&control.parts, control.in_force());
            let file = parts.settings.file.as_ref().ok_or(ReloadError::NoFile)?;
            let other = request.file.as_deref();
            let other = other.map(|name| beside(file, name, request.check));
            let config = (parts.read_config)(other.transpose()?.as_deref())?;
            let fitting = parts.settings.check(&config);
            let fitting = fitting.and_then(|()| sandbox::check_config(&config));
            let changed = fitting.and_then(|()| current.changed(&config));
            let (next, change) = changed.map_err(|error| {
                let plan = Plan::new(parts.settings.runtime_dir.clone(), Cids::default());
                let by_itself = Rulebook::new(plan, &config).map(|_| ReloadError::Running(error));
                by_itself.unwrap_or_else(ReloadError::Config)
            })?;
            // Before it comes into force: nothing is known of them any more then.
            let has_vmm = |spec: &&LineSpec| control.status_of(&current, spec).attached;
            let cut_off = change.removed.iter().filter(has_vmm);
            let cut_off: Vec<String> = cut_off.map(LineSpec::full_name).collect();
            let next = match request.check {
                true => {
                    parts.can_offer(&next)?;
                    Arc::new(next)
                }
                false => {
                    let enforces = request.enforce_existing;
                    parts.put_in_force(&current, &next, Manner::Whole, enforces)?;
                    // From now on they come and go with the file.
                    for name in next.configured.difference(&current.configured) {
                        added::forget(parts.keeper.as_deref(), name);
                    }
                    let unavailable: Vec<Part> = next.unavailable.keys().cloned().collect();
                    control.set_in_force(parts.try_to_have(next, &unavailable));
                    control.in_force()
                }
            };
            let findings = next.book.check_at_once();
            let (before, now) = (&current.book, &next.book);
            let publishes = [now.published_beside(before), before.published_beside(now)];
            Ok::<_, ReloadError>((next, change, cut_off, findings, publishes))
        });
        let (in_force, change, cut_off, findings, [published, unpublished]) =
            put.await.map_err(|_| ReloadError::Lost)??;
        let gone = change.removed.iter().filter(|_| !is_check);
        for name in gone.map(LineSpec::full_name) {
            self.readiness.forget(&name);
            match cut_off.contains(&name) {
                true => tracing::warn!(vm = name, "removed a VM; {VMM_RUNS_ON}"),
                false => tracing::info!(vm = name, "removed a VM"),
            }
        }
        let [rules, services, publishes] = in_force.book.counts();
        let names = |lines: &[LineSpec]| lines.iter().map(LineSpec::full_name).collect();
        Ok(Reloaded {
            added: names(&change.added),
            removed: names(&change.removed),
            cut_off,
            published,
            unpublished,
            vms: in_force.book.plan.lines().count(),
            networks: in_force.book.plan.networks().count(),
            rules,
            services,
            publishes,
            findings,
        })
    }
}

/// The file of this name beside the daemon's own, for a check. A client is not to have other files read.
fn beside(file: &Path, name: &str, is_check: bool) -> Result<PathBuf, ReloadError> {
    match is_check && Path::new(name).file_name() == Some(name.as_ref()) {
        true => Ok(file.with_file_name(name)),
        false => Err(ReloadError::NotBeside { name: name.into() }),
    }
}

#[cfg(test)]
mod tests;
