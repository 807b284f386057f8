//! The VMs of a running daemon: which there are, how far each has come, and how one is added, removed or waited for.

mod circuits;
mod networks;
mod why;

pub(crate) use circuits::end as circuit_end;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use device::{CaptureFilter, CaptureOptions};
use tokio::sync::Mutex;

use crate::api::types::{
    ChannelStatus, ChardevInfo, EventDetails, EventKind, LineKind, VmState, VmStatus, VmWindows,
};
use crate::capture::CaptureReader;
use crate::config::{Channel, Chardev, Plan, StateError, VmRequest};
use crate::input::InputError;
use crate::limits::members;
use crate::line::{Counters, Figures, LineError, LineSpec, LineStatus, LineWorker, PolicyChange};
use crate::net::{NetChange, NetError, NetFault};
use crate::offers::OfferError;
use crate::policy::{AskError, Rulebook};
use crate::readiness::Readiness;
use crate::reload::{InForce, Parts};
use crate::runtime::{RuntimeError, check_directory, remove_stale_socket};
use crate::windows::{self, Windows, WindowsError};

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
    /// A port in a network could not be opened.
    #[error(transparent)]
    Port(#[from] NetFault),
    /// The worker could not do something with a network.
    #[error(transparent)]
    Net(#[from] NetError),
    /// No network has this name.
    #[error(
        "there is no network named {name:?}: `ringdown net ls` shows those that exist, and [[network]] in the configuration makes one"
    )]
    UnknownNetwork {
        /// The name.
        name: String,
    },
    /// No circuit has this number.
    #[error("there is no circuit {id:?}, or not any more: `ringdown ls` shows those that exist")]
    UnknownCircuit {
        /// What was given.
        id: String,
    },
    /// What is remembered of VMs cannot be written.
    #[error(transparent)]
    State(#[from] StateError),
    /// The VM's windows cannot be made.
    #[error(transparent)]
    Windows(#[from] WindowsError),
    /// What is offered does not hold any more.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// A question about the policy has no answer.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The audit's file cannot be opened anew.
    #[error("cannot open the audit's file anew: {0}; the old one stays in use")]
    Audit(io::Error),
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

/// The VMs of a running daemon, and what is in force about them.
pub struct Control {
    pub(crate) parts: Arc<Parts>,
    /// Held while something comes into force, so that what is written here and what the worker does never disagree.
    pub(crate) in_force: Mutex<InForce>,
    pub(crate) readiness: Arc<Readiness>,
}

impl Control {
    /// The control of a worker whose lines and rules are those that are in force.
    pub fn new(parts: Arc<Parts>, in_force: InForce, readiness: Arc<Readiness>) -> Control {
        Control {
            parts,
            in_force: Mutex::new(in_force),
            readiness,
        }
    }

    /// Adds a VM. Its sockets listen when this returns.
    ///
    /// # Errors
    /// [`ControlError`] when it collides with another VM or a socket cannot be made. Nothing of it remains then.
    pub async fn add(self: &Arc<Self>, request: VmRequest) -> Result<VmStatus, ControlError> {
        crate::sandbox::check_vm(&request)?;
        let control = self.clone();
        // On its own task: a client that hangs up must not leave the plan and the worker apart.
        let task = tokio::spawn(async move {
            let mut in_force = control.in_force.lock().await;
            let mut next = in_force.book.clone();
            let spec = next.plan.add(&request)?;
            if !spec.aliases.is_empty() {
                next.renew_policy();
            }
            let (parts, current) = (control.parts.clone(), in_force.book.clone());
            let (to_open, planned) = (spec.clone(), next.clone());
            let opened = tokio::task::spawn_blocking(move || {
                parts.remember(&current, &planned)?;
                open_line(parts.worker.as_ref(), &parts.windows, to_open.clone())?;
                let networks = NetChange::between(&current.plan, &planned.plan);
                let opened = networks.open(parts.net.as_ref());
                let set = match opened {
                    Ok(()) => parts.set_policy(&current, &planned),
                    Err(fault) => Err(fault.into()),
                };
                match &set {
                    Ok(()) => networks.settle(parts.net.as_ref()),
                    Err(_) => {
                        networks.undo(parts.net.as_ref());
                        parts.close(std::slice::from_ref(&to_open));
                    }
                }
                set
            });
            opened.await.map_err(|_| ControlError::Lost)??;
            in_force.book = next;
            tracing::info!(vm = spec.full_name(), cid = spec.cid, "added a VM");
            let details = EventDetails::of_vm(spec.full_name());
            control.parts.events.tell(EventKind::VmAdded, details);
            let lines = control.parts.worker.lines();
            Ok(control.status(&in_force.book.plan, &spec, &lines))
        });
        task.await.map_err(|_| ControlError::Lost)?
    }

    /// Captures what passes the lines, or the line of one VM, which may be named by an alias.
    ///
    /// # Errors
    /// [`ControlError::Unknown`], [`ControlError::Line`].
    pub async fn capture_lines(
        &self,
        mut filter: CaptureFilter,
        options: CaptureOptions,
    ) -> Result<CaptureReader, ControlError> {
        let in_force = self.in_force.lock().await;
        if let Some(name) = filter.vm.take() {
            let line = in_force.book.plan.get(&name);
            filter.vm = Some(line.ok_or(ControlError::Unknown { name })?.full_name());
        }
        let (vm, port) = (filter.vm.clone(), filter.port);
        let (sender, reader) = self.parts.captures.queue();
        self.parts.worker.capture(filter, options, sender)?;
        tracing::info!(vm, port, "began a capture of what passes the lines");
        let details = EventDetails {
            vm,
            port,
            ..EventDetails::default()
        };
        Ok(reader.telling(&self.parts.events, details))
    }

    /// Removes a VM by its full name or an alias: its circuits are reset, its sockets removed. Its name keeps its context identifier.
    ///
    /// # Errors
    /// [`ControlError::Unknown`] when there is none of this name; others when a part of the daemon refuses. All of the VM remains then.
    pub async fn remove(self: &Arc<Self>, name: &str) -> Result<(), ControlError> {
        let (control, name) = (self.clone(), name.to_owned());
        let task = tokio::spawn(async move {
            let mut in_force = control.in_force.lock().await;
            let Some(spec) = in_force.book.plan.get(&name).cloned() else {
                return Err(ControlError::Unknown { name });
            };
            let name = spec.full_name();
            let mut next = in_force.book.clone();
            next.plan.remove(&name);
            if !spec.aliases.is_empty() {
                next.renew_policy();
            }
            let (parts, to_close) = (control.parts.clone(), name.clone());
            let (current, planned) = (in_force.book.clone(), next.clone());
            let closed = tokio::task::spawn_blocking(move || {
                // What can be refused comes first, so that the VM goes whole or stays whole.
                parts.set_policy(&current, &planned)?;
                if let Err(error) = parts.worker.remove_line(&to_close) {
                    if let Err(error) = parts.set_policy(&planned, &current) {
                        tracing::error!(vm = to_close, %error, "cannot go back to the rules of before");
                    }
                    return Err(error.into());
                }
                parts.circuits.removed(&to_close);
                parts.windows.close(&to_close);
                let networks = NetChange::between(&current.plan, &planned.plan);
                networks.settle(parts.net.as_ref());
                networks.close(parts.net.as_ref());
                Ok::<_, ControlError>(())
            });
            closed.await.map_err(|_| ControlError::Lost)??;
            in_force.book = next;
            control.readiness.forget(&name);
            tracing::info!(vm = name, "removed a VM");
            let details = EventDetails::of_vm(name);
            control.parts.events.tell(EventKind::VmRemoved, details);
            Ok(())
        });
        task.await.map_err(|_| ControlError::Lost)?
    }

    /// The VMs, by full name.
    pub async fn list(&self) -> Vec<VmStatus> {
        let in_force = self.in_force.lock().await;
        let lines = self.parts.worker.lines();
        let plan = &in_force.book.plan;
        let specs = plan.lines();
        specs.map(|spec| self.status(plan, spec, &lines)).collect()
    }

    /// What the data plane has counted.
    pub async fn figures(&self) -> Figures {
        let worker = self.parts.worker.clone();
        let figures = tokio::task::spawn_blocking(move || worker.figures()).await;
        figures.unwrap_or_default()
    }

    /// One VM, by its full name or an alias.
    ///
    /// # Errors
    /// [`ControlError::Unknown`] when there is none of this name.
    pub async fn get(&self, name: &str) -> Result<VmStatus, ControlError> {
        let in_force = self.in_force.lock().await;
        let plan = &in_force.book.plan;
        let spec = plan.get(name).ok_or_else(|| ControlError::Unknown {
            name: name.to_owned(),
        })?;
        Ok(self.status(plan, spec, &self.parts.worker.lines()))
    }

    /// What is in force at the moment, to be asked questions.
    pub async fn rulebook(&self) -> Rulebook {
        self.in_force.lock().await.book.clone()
    }

    /// Opens the audit's file anew, after it was moved away.
    ///
    /// # Errors
    /// [`ControlError::Audit`]. The old one stays in use then.
    pub async fn rotate_audit(&self) -> Result<(), ControlError> {
        let audit = self.parts.audit.clone();
        let rotated = tokio::task::spawn_blocking(move || audit.rotate()).await;
        let rotated = rotated.map_err(|_| ControlError::Lost)?;
        rotated.map_err(ControlError::Audit)
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

    fn status(&self, plan: &Plan, spec: &LineSpec, lines: &[LineStatus]) -> VmStatus {
        let line = lines.iter().find(|line| line.name == spec.full_name());
        let agent = self.readiness.agent(&spec.full_name());
        let state = match line {
            _ if agent.is_some() => VmState::Ready,
            _ if spec.is_hybrid() => VmState::Joined,
            Some(line) if line.driver_ready => VmState::Booted,
            Some(line) if line.attached => VmState::Attached,
            _ => VmState::Waiting,
        };
        VmStatus {
            name: spec.name.clone(),
            domain: spec.domain.clone(),
            aliases: spec.aliases.clone(),
            groups: spec.groups.clone(),
            cid: spec.cid,
            kind: match () {
                () if spec.serial.is_some() => LineKind::Serial,
                () if spec.is_hybrid() => LineKind::Hybrid,
                () => LineKind::Vsock,
            },
            state,
            attached: line.is_some_and(|line| line.attached),
            last_fault: line.and_then(|line| line.last_fault.clone()),
            vhost_user: spec.vhost_user.clone(),
            serial: spec.serial.as_ref().map(chardev),
            hybrid: spec.hybrid.clone(),
            host: spec.host.clone(),
            channels: channels(spec, line),
            nets: networks::ports_of(plan, spec),
            windows: spec.windows.map(|windows| VmWindows {
                count: windows.count,
                bytes: windows.len,
                files: windows::files(plan.runtime_dir(), spec),
                qmp: spec.qmp.clone(),
            }),
            agent,
            circuits: line.map(|line| line.circuits).unwrap_or_default(),
            limits: members(&spec.limits),
            usage: line.map(usage).unwrap_or_default(),
            counters: line.map(|line| owned(&line.counters)).unwrap_or_default(),
        }
    }
}

impl Parts {
    /// Tells the worker of rules that mean something else, after a VM with aliases has come or gone.
    fn set_policy(&self, current: &Rulebook, next: &Rulebook) -> Result<(), ControlError> {
        if Arc::ptr_eq(&current.policy(), &next.policy()) {
            return Ok(());
        }
        // Egress asks the same rules, and a published port may lead to an alias.
        let commit = self.offers.prepare(next.offer())?;
        self.worker.set_policy(PolicyChange {
            policy: next.policy(),
            groups: Vec::new(),
            aliases: Vec::new(),
            enforce_existing: false,
        })?;
        commit();
        Ok(())
    }
}

/// Opens a line: checks its directories, takes over stale sockets, makes its windows, and hands it to the worker.
///
/// # Errors
/// [`ControlError`] when a socket cannot be made.
pub fn open_line(
    worker: &dyn LineWorker,
    windows: &Windows,
    spec: LineSpec,
) -> Result<(), ControlError> {
    // Where a VMM listens there may be nothing yet, and nothing has to be made.
    let ours = |chardev: &Chardev, option| match chardev {
        Chardev::Listen(path) => Some((path.clone(), option, true)),
        Chardev::Connect(_) => None,
    };
    let mut sockets = vec![(spec.host.clone(), "host=PATH", true)];
    let vmm = spec.hybrid.clone();
    sockets.extend(vmm.map(|path| (path, "hybrid=PATH", false)));
    let vhost_user = spec.vhost_user.clone();
    sockets.extend(vhost_user.map(|path| (path, "vhost-user=PATH", true)));
    let serial = spec.serial.as_ref();
    sockets.extend(serial.and_then(|of| ours(of, "serial=PATH")));
    for channel in &spec.channels {
        sockets.extend(ours(&channel.chardev, "listen = \"PATH\""));
        let listens_at = channel.listens_at();
        sockets.extend(listens_at.map(|path| (path.to_owned(), "to = \"listen:PATH\"", true)));
    }
    for (path, option, is_ours) in &sockets {
        check_directory(path.parent().unwrap_or(Path::new("/")), option)?;
        if *is_ours && remove_stale_socket(path)? {
            tracing::warn!(
                vm = spec.full_name(),
                socket = %path.display(),
                "took over the stale socket of a daemon that has died"
            );
        }
    }
    windows.open(&spec)?;
    let name = spec.full_name();
    worker.add_line(spec).map_err(|error| {
        windows.close(&name);
        error.into()
    })
}

fn chardev(chardev: &Chardev) -> ChardevInfo {
    match chardev {
        Chardev::Listen(path) => ChardevInfo::Listen(path.clone()),
        Chardev::Connect(path) => ChardevInfo::Connect(path.clone()),
    }
}

/// The channels of a VM, with what the worker knows of each.
fn channels(spec: &LineSpec, line: Option<&LineStatus>) -> Vec<ChannelStatus> {
    let states = line
        .map(|line| line.channels.as_slice())
        .unwrap_or_default();
    let status = |channel: &Channel<Chardev>| {
        let state = states.iter().find(|state| state.name == channel.name);
        ChannelStatus {
            name: channel.name.clone(),
            chardev: chardev(&channel.chardev),
            attached: state.is_some_and(|state| state.attached),
            taken: state.is_some_and(|state| state.taken),
            to: channel.target.to_string(),
            file: state.and_then(|state| state.file.clone()),
            counters: state
                .map(|state| owned(&state.counters))
                .unwrap_or_default(),
        }
    };
    spec.channels.iter().map(status).collect()
}

fn owned(counters: &Counters) -> BTreeMap<String, u64> {
    let owned = |(name, count): (&&str, &u64)| ((*name).to_owned(), *count);
    counters.iter().map(owned).collect()
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
