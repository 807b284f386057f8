//! The VMs of a running daemon: which there are, how far each has come, and how one is added, removed or waited for.

mod circuits;
mod figures;
mod hand_over;
mod networks;
mod own_vmms;
mod why;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use api::{
    ChannelStatus, ChardevInfo, EventDetails, EventKind, LineKind, NewVm, Unanswered, VmState,
    VmStatus, VmWindows,
};
use config::limits::members;
use config::{Channel, Chardev, LineSpec, Plan, VmRequest, VmmSocket};
use device::{CaptureFilter, CaptureOptions, CircuitFilter, NO_CARD, NO_VSOCK_DEVICE, NOT_SHARED};
use tokio::sync::{Mutex, Notify};
use tokio::time::{Instant, timeout_at};

use crate::added;
use crate::capture::CaptureReader;
use crate::control_error::ControlError;
use crate::events::{rfc_3339, waiting_callers};
use crate::in_force::{InForce, Manner, Parts};
use crate::line::{Counters, LineStatus};
use crate::metrics::Pages;
use crate::questions::Questions;
use crate::readiness::Readiness;
use windows::memory;

pub use hand_over::formats;

/// How often a VM that is waited for is checked for a fault.
const FAULT_LOOK: Duration = Duration::from_secs(1);

/// How long a VMM is waited for after one that was hung up on before the wait began: another may just be starting.
const START_PATIENCE: Duration = Duration::from_secs(5);

/// What the workers know at the moment, by full names.
struct Known {
    lines: HashMap<String, LineStatus>,
    networks: networks::Known,
    /// Of VMMs with a vsock device of their own.
    own_vmms: HashMap<String, own_vmms::Seen>,
    /// Of callers that agents leave without an answer.
    waiting: HashMap<String, Unanswered>,
}

/// The VMs of a running daemon, and what is in force about them.
pub struct Control {
    pub(crate) parts: Arc<Parts>,
    in_force: RwLock<Arc<InForce>>,
    /// Held while something comes into force, so that one change begins where the other has ended.
    pub(crate) changing: Mutex<()>,
    pub(crate) readiness: Arc<Readiness>,
    questions: Questions,
    pub(crate) pages: Pages,
    hands_over: Notify,
}

impl Control {
    /// The control of a worker whose lines and rules are those that are in force.
    pub fn new(parts: Arc<Parts>, in_force: InForce, readiness: Arc<Readiness>) -> Control {
        Control {
            parts,
            in_force: RwLock::new(Arc::new(in_force)),
            changing: Mutex::new(()),
            readiness,
            questions: Questions::default(),
            pages: Pages::default(),
            hands_over: Notify::new(),
        }
    }

    /// What is in force at the moment. While something else comes into force it is what was before.
    pub(crate) fn in_force(&self) -> Arc<InForce> {
        let in_force = self.in_force.read();
        in_force.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// This is in force from now on. It takes a holder of `changing`.
    pub(crate) fn set_in_force(&self, next: InForce) {
        let mut in_force = self
            .in_force
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *in_force = Arc::new(next);
    }

    /// Does what takes time or waits for a worker, beside the control thread and in the caller's turn ([`Questions`]).
    pub(crate) async fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Control) -> T + Send + 'static,
    ) -> Result<T, ControlError> {
        let control = self.clone();
        let answer = self.questions.answer(move || work(&control)).await;
        answer.ok_or(ControlError::Lost)
    }

    /// Adds a VM, which was described so. Its sockets listen when this returns.
    ///
    /// # Errors
    /// [`ControlError`] when it collides with another VM or a socket cannot be made. Nothing of it remains then.
    pub async fn add(
        self: &Arc<Self>,
        new: &NewVm,
        request: VmRequest,
    ) -> Result<VmStatus, ControlError> {
        crate::sandbox::check_vm(&request)?;
        let control = self.clone();
        let described = serde_json::to_vec(new).unwrap_or_default();
        // On its own task: a client that hangs up must not leave the plan and the worker apart.
        let task = tokio::spawn(async move {
            let _changing = control.changing.lock().await;
            let mut next = InForce::clone(&control.in_force());
            let spec = next.book.add(&request)?;
            control.bring(next).await?;
            added::keep(control.parts.keeper.as_deref(), &spec, &described);
            tracing::info!(vm = spec.full_name(), cid = spec.cid, "added a VM");
            let details = EventDetails::of_vm(spec.full_name());
            control.parts.events.tell(EventKind::VmAdded, details);
            let status = move |control: &Control| control.status_of(&control.in_force(), &spec);
            control.ask(status).await
        });
        task.await.map_err(|_| ControlError::Lost)?
    }

    /// Captures what passes the lines, or the line of one VM, which may be named by an alias.
    ///
    /// # Errors
    /// [`ControlError::Unknown`], [`ControlError::Line`].
    pub async fn capture_lines(
        self: &Arc<Self>,
        mut filter: CaptureFilter,
        options: CaptureOptions,
    ) -> Result<CaptureReader, ControlError> {
        let in_force = self.in_force();
        if let Some(name) = filter.vm.take() {
            filter.vm = Some(known_vm(&in_force.book.plan, &name)?.full_name());
        }
        let (vm, port) = (filter.vm.clone(), filter.port);
        let (sender, reader) = self.parts.captures.queue();
        let begin = move |control: &Control| control.parts.worker.capture(filter, options, sender);
        self.ask(begin).await??;
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
            let _changing = control.changing.lock().await;
            let in_force = control.in_force();
            let spec = known_vm(&in_force.book.plan, &name)?;
            let name = spec.full_name();
            let mut next = InForce::clone(&in_force);
            next.book.plan.remove(&name);
            next.forget_unwanted();
            if !spec.aliases.is_empty() {
                next.book.renew_policy();
            }
            control.bring(next).await?;
            added::forget(control.parts.keeper.as_deref(), &name);
            control.readiness.forget(&name);
            tracing::info!(vm = name, "removed a VM");
            let details = EventDetails::of_vm(name);
            control.parts.events.tell(EventKind::VmRemoved, details);
            Ok(())
        });
        task.await.map_err(|_| ControlError::Lost)?
    }

    /// Brings what is next into force.
    async fn bring(self: &Arc<Self>, next: InForce) -> Result<(), ControlError> {
        let put = move |control: &Control| {
            let current = control.in_force();
            let parts = &control.parts;
            let put = parts.put_in_force(&current, &next, Manner::Whole, false);
            put.map_err(|hindrance| *hindrance.error)?;
            control.set_in_force(next);
            Ok(())
        };
        self.ask(put).await?
    }

    /// The VMs, by full name. Waits for the worker.
    pub fn list(&self) -> Vec<VmStatus> {
        let has_networks = self.in_force().book.plan.networks().next().is_some();
        let mut known = self.known(has_networks);
        // Behind what the workers know: of a VM that has just gone nothing is shown.
        let in_force = self.in_force();
        known.own_vmms = self.look_at_vmms(in_force.book.plan.lines());
        let specs = in_force.book.plan.lines();
        let status = |spec| self.status(&in_force, spec, &known);
        specs.map(status).collect()
    }

    /// How many VMs there are.
    pub fn count(&self) -> usize {
        self.in_force().book.plan.lines().count()
    }

    /// The lines, and the networks if they matter, as their workers know them.
    fn known(&self, has_ports: bool) -> Known {
        let networks = has_ports.then(|| self.parts.net.networks());
        let lines = self.parts.worker.lines().into_iter();
        let to_agents = CircuitFilter {
            vm: None,
            port: Some(wire::agent::PORT),
        };
        Known {
            waiting: waiting_callers(self.parts.circuits.list(&to_agents)),
            lines: lines.map(|line| (line.name.clone(), line)).collect(),
            networks: networks::Known::new(networks.unwrap_or_default()),
            own_vmms: HashMap::new(),
        }
    }

    /// What there is to know of one VM.
    pub(crate) fn status_of(&self, in_force: &InForce, spec: &LineSpec) -> VmStatus {
        self.status(in_force, spec, &self.known_of(spec))
    }

    fn known_of(&self, spec: &LineSpec) -> Known {
        Known {
            own_vmms: self.look_at_vmms(std::iter::once(spec)),
            ..self.known(!spec.ports.is_empty())
        }
    }

    /// One VM, by its full name or an alias.
    ///
    /// # Errors
    /// [`ControlError::Unknown`] when there is none of this name.
    pub async fn get(self: &Arc<Self>, name: &str) -> Result<VmStatus, ControlError> {
        let name = name.to_owned();
        self.ask(move |control| {
            let in_force = control.in_force();
            let spec = known_vm(&in_force.book.plan, &name)?;
            let known = control.known_of(spec);
            Ok(control.status(&in_force, spec, &known))
        })
        .await?
    }

    /// Opens the audit's file anew, after it was moved away.
    ///
    /// # Errors
    /// [`ControlError::Audit`]. The old one stays in use then.
    pub async fn rotate_audit(self: &Arc<Self>) -> Result<(), ControlError> {
        if self.in_force().audit.is_none() {
            return Err(ControlError::NoAudit);
        }
        let rotated = self.ask(|control| control.parts.audit.rotate()).await?;
        rotated.map_err(ControlError::Audit)
    }

    /// One VM, once its agent is there and it is not paused.
    ///
    /// # Errors
    /// [`ControlError::NotReady`] with its state when `timeout` has passed, or once it has a fault that waiting does not cure;
    /// [`ControlError::Unknown`] when there is none of this name, or no longer.
    pub async fn wait_ready(
        self: &Arc<Self>,
        name: &str,
        timeout: Duration,
    ) -> Result<VmStatus, ControlError> {
        let begun = Instant::now();
        let deadline = begun + timeout;
        // Subscribed before the first look, so that a change between look and wait is seen.
        let mut changes = self.readiness.subscribe();
        let mut look_at = begun;
        let mut in_vain_from = begun + START_PATIENCE;
        loop {
            let full_name = known_vm(&self.in_force().book.plan, name)?.full_name();
            // The worker is asked now and then as long as there is no agent: many may wait.
            let now = Instant::now();
            if self.readiness.agent(&full_name).is_some() || now >= look_at.min(deadline) {
                // The state may have changed without the agent since it was last read: the message has the new one.
                let status = self.get(name).await?;
                if status.state == VmState::Ready && !status.paused {
                    return Ok(status);
                }
                let in_vain = needs_new_vmm(&status);
                if in_vain.is_none() {
                    in_vain_from = begun;
                }
                let is_in_vain = in_vain.is_some();
                // What has connected after one that was cut off may be a VMM that is about to speak.
                let is_lost = status.attached && !status.cut_off;
                if now >= deadline || is_in_vain && (is_lost || now >= in_vain_from) {
                    return Err(ControlError::NotReady {
                        name: name.to_owned(),
                        state: status.state,
                        words: status.state_in_words() + &in_vain.unwrap_or_default(),
                        waited: timeout.min(in_tenths(now - begun)),
                    });
                }
                look_at = now + FAULT_LOOK;
            }
            let _ = timeout_at(look_at.min(deadline), changes.changed()).await;
        }
    }

    fn status(&self, in_force: &InForce, spec: &LineSpec, known: &Known) -> VmStatus {
        let plan = &in_force.book.plan;
        let full_name = spec.full_name();
        let line = known.lines.get(&full_name);
        let agent = self.readiness.agent(&full_name);
        let own_vmm = known.own_vmms.get(&full_name);
        let unavailable = in_force.vm_unavailable(&full_name).cloned();
        let state = match own_vmm {
            _ if unavailable.is_some() => VmState::Waiting,
            _ if agent.is_some() => VmState::Ready,
            Some((state, _)) => *state,
            None => line.map_or(VmState::Waiting, |line| state_without_agent(spec, line)),
        };
        let unanswered = match state == VmState::Ready && !line.is_some_and(|line| line.paused) {
            true => {
                let waiting = known.waiting.get(&full_name).cloned();
                waiting.or_else(|| self.parts.events.unanswered(&full_name))
            }
            false => None,
        };
        let fault = line.and_then(|line| line.last_fault.clone());
        let vhost_user = match &spec.vmm {
            VmmSocket::Vsock(path) => Some(path.clone()),
            VmmSocket::Hybrid(_) | VmmSocket::Serial(_) => None,
        };
        VmStatus {
            name: spec.name.clone(),
            domain: spec.domain.clone(),
            aliases: spec.aliases.clone(),
            groups: spec.groups.clone(),
            cid: spec.cid,
            kind: LineKind::from(&spec.vmm),
            state,
            // A hybrid line is there without a VMM.
            attached: line.is_some_and(|line| line.attached)
                && own_vmm.is_none_or(|(state, _)| *state != VmState::Waiting),
            last_fault_time: line.and_then(|line| line.last_fault_at).map(rfc_3339),
            last_fault: fault.or_else(|| own_vmm.and_then(|(_, fault)| fault.clone())),
            cut_off: line.is_some_and(|line| line.cut_off),
            another_waits: line.is_some_and(|line| line.another_waits),
            paused: line.is_some_and(|line| line.paused),
            unavailable,
            configured: in_force.configured.contains(&full_name),
            vhost_user,
            serial: spec.serial().map(chardev),
            hybrid: spec.hybrid().map(Path::to_owned),
            host: spec.host.clone(),
            channels: channels(spec, line),
            nets: networks::ports_of(plan, spec, &known.networks),
            windows: spec.windows.map(|windows| VmWindows {
                count: windows.count,
                bytes: windows.len,
                files: memory::files(plan.runtime_dir(), spec),
                qmp: spec.qmp.clone(),
            }),
            agent,
            unanswered,
            circuits: line.map(|line| line.circuits).unwrap_or_default(),
            limits: members(&spec.limits),
            usage: line.map(usage).unwrap_or_default(),
            counters: line.map(|line| owned(&line.counters)).unwrap_or_default(),
        }
    }
}

/// How far the guest of a line has come of which no agent is known.
fn state_without_agent(spec: &LineSpec, line: &LineStatus) -> VmState {
    match line.attached {
        // The link keeps what is open for a minute. There is no guest meanwhile.
        false if spec.serial().is_some() => VmState::Waiting,
        // It is the driver of another device.
        true if line.last_fault.as_deref() == Some(NO_VSOCK_DEVICE) => VmState::Attached,
        _ if line.driver_ready => VmState::Booted,
        true => VmState::Attached,
        false => VmState::Waiting,
    }
}

/// The VM of this full name or alias.
fn known_vm<'a>(plan: &'a Plan, name: &str) -> Result<&'a LineSpec, ControlError> {
    plan.get(name).ok_or_else(|| ControlError::Unknown {
        name: name.to_owned(),
        nearest: plan.nearest_vm(name),
    })
}

/// Why waiting does not help, and what does, if nothing of its guest can be seen until its VMM is started again.
fn needs_new_vmm(vm: &VmStatus) -> Option<String> {
    let of_line = vm.last_fault.as_deref();
    let is_line_lost = vm.cut_off
        || vm.attached
            && of_line.is_some_and(|fault| [NOT_SHARED, NO_VSOCK_DEVICE].contains(&fault));
    // Its VMM has left then, and may come to the socket of its line.
    let card = vm
        .nets
        .iter()
        .find(|card| vm.state == VmState::Waiting && card.last_fault.as_deref() == Some(NO_CARD));
    if !is_line_lost && card.is_none() {
        return None;
    }
    let of_card = card.map(|card| format!("; its card in {}: {NO_CARD}", card.network));
    Some(format!(
        "{}; waiting does not help: end its VMM, and start it with what `ringdown args {} --vmm qemu` prints",
        of_card.unwrap_or_default(),
        vm.full_name()
    ))
}

/// A time as it is shown.
fn in_tenths(time: Duration) -> Duration {
    Duration::from_millis(time.as_secs() * 1000 + u64::from(time.subsec_millis()) / 100 * 100)
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
