//! The VMs of a running daemon: which there are, how far each has come, and how one is added, removed or waited for.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use crate::api::types::{VmState, VmStatus};
use crate::config::{Plan, VmRequest};
use crate::input::InputError;
use crate::limits::members;
use crate::line::{LineError, LineSpec, LineStatus, LineWorker};
use crate::readiness::Readiness;
use crate::runtime::{RuntimeError, check_directory, remove_stale_socket};

/// Why the daemon did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// What was asked for cannot be meant, or collides with another VM.
    #[error(transparent)]
    Input(#[from] InputError),
    /// A directory or a socket is not as it should be.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The worker could not open or close the line.
    #[error(transparent)]
    Line(#[from] LineError),
    /// No VM has this name.
    #[error(
        "there is no VM named {name:?}: `ringdown vm ls` shows those that exist, `ringdown vm add` makes one"
    )]
    Unknown {
        /// The name.
        name: String,
    },
    /// The VM did not become ready in time.
    #[error("VM {name:?} did not become ready within {}: {}", seconds(*waited), state.meaning())]
    NotReady {
        /// The name.
        name: String,
        /// How far it had come at the end.
        state: VmState,
        /// How long was waited.
        waited: Duration,
    },
    /// A part of the daemon ended without an answer.
    #[error("the daemon dropped the request: see its log")]
    Lost,
}

/// The VMs of a running daemon.
pub struct Control {
    worker: Arc<dyn LineWorker>,
    /// Held while a line is opened or closed, so that the plan and the worker never disagree.
    plan: Mutex<Plan>,
    readiness: Arc<Readiness>,
}

impl Control {
    /// The control of a worker whose lines are those of `plan`.
    pub fn new(worker: Arc<dyn LineWorker>, plan: Plan, readiness: Arc<Readiness>) -> Control {
        Control {
            worker,
            plan: Mutex::new(plan),
            readiness,
        }
    }

    /// Adds a VM. Its sockets listen when this returns.
    ///
    /// # Errors
    /// [`ControlError`] when it collides with another VM or a socket cannot be made. Nothing of it remains then.
    pub async fn add(self: &Arc<Self>, request: VmRequest) -> Result<VmStatus, ControlError> {
        let control = self.clone();
        // On its own task: a client that hangs up must not leave the plan and the worker apart.
        let task = tokio::spawn(async move {
            let mut plan = control.plan.lock().await;
            let spec = plan.add(&request)?;
            let (worker, to_open) = (control.worker.clone(), spec.clone());
            let opened =
                tokio::task::spawn_blocking(move || open_line(worker.as_ref(), to_open)).await;
            if let Err(error) = opened
                .map_err(|_| ControlError::Lost)
                .and_then(|result| result)
            {
                plan.remove(&spec.name);
                return Err(error);
            }
            tracing::info!(vm = spec.name, cid = spec.cid, "added a VM");
            Ok(control.status(&spec, &control.worker.lines()))
        });
        task.await.map_err(|_| ControlError::Lost)?
    }

    /// Removes a VM: its circuits are reset, its sockets removed.
    ///
    /// # Errors
    /// [`ControlError::Unknown`] when there is none of this name.
    pub async fn remove(self: &Arc<Self>, name: &str) -> Result<(), ControlError> {
        let (control, name) = (self.clone(), name.to_owned());
        let task = tokio::spawn(async move {
            let mut plan = control.plan.lock().await;
            if plan.get(&name).is_none() {
                return Err(ControlError::Unknown { name });
            }
            let (worker, to_close) = (control.worker.clone(), name.clone());
            let closed = tokio::task::spawn_blocking(move || worker.remove_line(&to_close)).await;
            closed.map_err(|_| ControlError::Lost)??;
            plan.remove(&name);
            control.readiness.forget(&name);
            tracing::info!(vm = name, "removed a VM");
            Ok(())
        });
        task.await.map_err(|_| ControlError::Lost)?
    }

    /// The VMs, by name.
    pub async fn list(&self) -> Vec<VmStatus> {
        let plan = self.plan.lock().await;
        let lines = self.worker.lines();
        plan.lines().map(|spec| self.status(spec, &lines)).collect()
    }

    /// One VM.
    ///
    /// # Errors
    /// [`ControlError::Unknown`] when there is none of this name.
    pub async fn get(&self, name: &str) -> Result<VmStatus, ControlError> {
        let plan = self.plan.lock().await;
        let spec = plan.get(name).ok_or_else(|| ControlError::Unknown {
            name: name.to_owned(),
        })?;
        Ok(self.status(spec, &self.worker.lines()))
    }

    /// One VM, once its agent is there.
    ///
    /// # Errors
    /// [`ControlError::NotReady`] with its state when `timeout` has passed; [`ControlError::Unknown`] when there is
    /// none of this name, or no longer.
    pub async fn wait_ready(
        &self,
        name: &str,
        timeout: Duration,
    ) -> Result<VmStatus, ControlError> {
        let deadline = tokio::time::Instant::now() + timeout;
        // Subscribed before the first look, so that a change between look and wait is seen.
        let mut changes = self.readiness.subscribe();
        loop {
            let status = self.get(name).await?;
            if status.state == VmState::Ready {
                return Ok(status);
            }
            if tokio::time::timeout_at(deadline, changes.changed())
                .await
                .is_err()
            {
                // The state may have moved without the agent since the last look, and the message tells it.
                let state = self.get(name).await?.state;
                return Err(ControlError::NotReady {
                    name: name.to_owned(),
                    state,
                    waited: timeout,
                });
            }
        }
    }

    fn status(&self, spec: &LineSpec, lines: &[LineStatus]) -> VmStatus {
        let line = lines.iter().find(|line| line.name == spec.name);
        let agent = self.readiness.agent(&spec.name);
        let state = match line {
            _ if agent.is_some() => VmState::Ready,
            Some(line) if line.driver_ready => VmState::Booted,
            Some(line) if line.attached => VmState::Attached,
            _ => VmState::Waiting,
        };
        let counters = line.map(|line| {
            line.counters
                .iter()
                .map(|(name, count)| ((*name).to_owned(), *count))
                .collect()
        });
        VmStatus {
            name: spec.name.clone(),
            cid: spec.cid,
            state,
            vhost_user: spec.vhost_user.clone(),
            host: spec.host.clone(),
            agent,
            circuits: line.map(|line| line.circuits).unwrap_or_default(),
            limits: members(&spec.limits),
            usage: line.map(usage).unwrap_or_default(),
            counters: counters.unwrap_or_default(),
        }
    }
}

/// Opens a line: checks its directories, takes over stale sockets, and hands it to the worker.
///
/// # Errors
/// [`ControlError`] when a socket cannot be made.
pub fn open_line(worker: &dyn LineWorker, spec: LineSpec) -> Result<(), ControlError> {
    for (path, option) in [
        (&spec.vhost_user, "vhost-user=PATH"),
        (&spec.host, "host=PATH"),
    ] {
        check_directory(path.parent().unwrap_or(Path::new("/")), option)?;
        if remove_stale_socket(path)? {
            tracing::warn!(
                vm = spec.name,
                socket = %path.display(),
                "took over the stale socket of a daemon that has died"
            );
        }
    }
    Ok(worker.add_line(spec)?)
}

/// What a VM uses, by the names of its limits.
fn usage(line: &LineStatus) -> BTreeMap<String, u64> {
    let members = [
        ("circuits", u64::from(line.circuits)),
        ("half_open_circuits", u64::from(line.half_open_circuits)),
        ("buffered_bytes", line.buffered_bytes),
        ("buffered_messages", line.buffered_messages),
        ("granted_bytes", line.granted_bytes),
    ];
    members
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}
