//! A worker for tests: its lines have real sockets and no VMs behind them, and their state is what the test says.

mod capture;
mod circuits;
mod net;
mod offers;
mod running;

pub use capture::FakeCapture;
pub use circuits::FakeCircuits;
pub use net::FakeNet;
pub use offers::FakeOffers;
pub use running::{FakeDaemon, router, routes, start};

use std::collections::BTreeMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use config::{Chardev, LineSpec, VmmSocket};
use device::{AgentSecret, Attachment, CaptureFilter, CaptureOptions, SocketFile};
use policy::ServiceEntry;

use daemon::capture::CaptureSender;
use daemon::line::{
    Counters, Figures, LineChange, LineError, LineFault, LineStatus, LineWorker, PolicyChange,
    PreparedLines,
};
use hostside::arrivals::AgentArrival;
use hostside::arrivals::ArrivalSender;
use hostside::chardev::OpenError;
use hostside::offers::Commit;
use runtime::directory::listen_privately;

/// See the module's documentation.
#[derive(Debug)]
pub struct FakeWorker {
    state: Mutex<State>,
    arrivals: Mutex<Option<ArrivalSender>>,
    gate: Mutex<Gate>,
    gate_changed: Condvar,
}

/// Where callers for the lines wait, while it is shut.
#[derive(Debug, Default)]
struct Gate {
    is_shut: bool,
    waiting: usize,
}

/// The longest that one waits there, so that a test which would wait for ever fails.
const GATE_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct State {
    lines: BTreeMap<String, Line>,
    policy: Option<PolicyChange>,
    /// Changes of the policy so far.
    policy_changes: u64,
    services: Vec<ServiceEntry>,
    captures: Vec<FakeCapture>,
    figures: Figures,
    networks_stood_still: bool,
    stopped: bool,
}

#[derive(Debug)]
struct Line {
    status: LineStatus,
    groups: Vec<String>,
    /// The host socket last.
    sockets: Vec<(UnixListener, SocketFile)>,
}

impl FakeWorker {
    /// Has counted this.
    pub fn set_figures(&self, figures: Figures) {
        self.state().figures = figures;
    }

    /// A worker without a line.
    pub fn new(arrivals: ArrivalSender) -> FakeWorker {
        FakeWorker {
            state: Mutex::default(),
            arrivals: Mutex::new(Some(arrivals)),
            gate: Mutex::default(),
            gate_changed: Condvar::new(),
        }
    }

    /// Lets callers for the lines wait, or lets them go on.
    pub fn hold(&self, is_shut: bool) {
        self.gate().is_shut = is_shut;
        self.gate_changed.notify_all();
    }

    /// How many wait for the lines.
    pub fn held(&self) -> usize {
        self.gate().waiting
    }

    fn pass_gate(&self) {
        let mut gate = self.gate();
        gate.waiting += 1;
        let passed = self
            .gate_changed
            .wait_timeout_while(gate, GATE_TIMEOUT, |gate| gate.is_shut);
        let (mut gate, _) = passed.unwrap_or_else(PoisonError::into_inner);
        gate.waiting -= 1;
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state of a line, if there is one of this name.
    pub fn set_state(&self, name: &str, attached: bool, driver_ready: bool) {
        if let Some(line) = self.state().lines.get_mut(name) {
            line.status.attached = attached;
            line.status.cut_off &= !attached;
            line.status.driver_ready = driver_ready;
        }
    }

    /// Lets a VM be paused, or go on.
    pub fn set_paused(&self, name: &str, paused: bool) {
        if let Some(line) = self.state().lines.get_mut(name) {
            line.status.paused = paused;
        }
    }

    /// Has a line remember a fault, if there is one of this name; if no VMM is attached, that it was hung up on for this.
    pub fn set_fault(&self, name: &str, fault: &str) {
        if let Some(line) = self.state().lines.get_mut(name) {
            line.status.last_fault = Some(fault.to_owned());
            line.status.last_fault_at = Some(SystemTime::now());
            line.status.cut_off = !line.status.attached;
        }
    }

    /// Lets a guest call the agent's port of the host. The guest's end is returned.
    ///
    /// # Panics
    /// The daemon does not take arrivals.
    pub fn call_agent_port(&self, vm: &str, source_port: u32) -> UnixStream {
        let (stream, guest) = UnixStream::pair().expect("a pair of sockets can be made");
        let arrival = AgentArrival {
            vm: vm.to_owned(),
            source_port,
            attachment: Attachment::Rings,
            stream,
        };
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let arrivals = arrivals.as_ref().expect("the worker works");
        // One that is refused is hung up on.
        arrivals.offer(arrival);
        guest
    }

    /// The listening host socket of a line, on which the test may do what a worker does.
    ///
    /// # Panics
    /// There is no line of this name.
    pub fn host_listener(&self, vm: &str) -> UnixListener {
        let state = self.state();
        let line = state.lines.get(vm).expect("the line exists");
        let (host, _) = line.sockets.last().expect("each line has one");
        host.try_clone().expect("a descriptor is left")
    }

    /// Ends as a worker does whose thread has panicked.
    pub fn die(&self) {
        *self.arrivals.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The policy that was set last.
    pub fn policy(&self) -> Option<PolicyChange> {
        self.state().policy.clone()
    }

    /// How often the policy was set.
    pub fn policy_changes(&self) -> u64 {
        self.state().policy_changes
    }

    /// The services that were set last.
    pub fn services(&self) -> Vec<ServiceEntry> {
        self.state().services.clone()
    }

    /// The groups of a line, as they were last set.
    pub fn groups(&self, vm: &str) -> Option<Vec<String>> {
        self.state().lines.get(vm).map(|line| line.groups.clone())
    }

    /// The captures that were asked for since the last time.
    pub fn take_captures(&self) -> Vec<FakeCapture> {
        std::mem::take(&mut self.state().captures)
    }

    /// Whether ports of new VMs were open already when their lines were prepared: networks then stand still for as long as that takes.
    pub fn networks_stood_still(&self) -> bool {
        self.state().networks_stood_still
    }

    /// Whether the worker was stopped.
    pub fn stopped(&self) -> bool {
        self.state().stopped
    }

    fn add_line(&self, spec: LineSpec) -> Result<(), LineError> {
        let listen = |path: &PathBuf| {
            listen_privately(path).map_err(|error| LineError::from(OpenError::from(error)))
        };
        let mut sockets = Vec::new();
        if let VmmSocket::Vsock(path) | VmmSocket::Serial(Chardev::Listen(path)) = &spec.vmm {
            sockets.push(listen(path)?);
        }
        sockets.push(listen(&spec.host)?);
        let status = LineStatus {
            name: spec.full_name(),
            cid: spec.cid,
            attached: false,
            last_fault: None,
            last_fault_at: None,
            cut_off: false,
            another_waits: false,
            paused: false,
            driver_ready: false,
            circuits: 0,
            half_open_circuits: 0,
            buffered_bytes: 0,
            buffered_messages: 0,
            granted_bytes: 0,
            counters: Counters::from([("circuits_opened", 0)]),
            channels: Vec::new(),
        };
        let full_name = spec.full_name();
        let line = Line {
            status,
            groups: spec.groups,
            sockets,
        };
        self.state().lines.insert(full_name, line);
        Ok(())
    }

    fn remove_line(&self, name: &str) -> Result<(), LineError> {
        let line = self.state().lines.remove(name);
        let unknown = || LineError::Unknown {
            name: name.to_owned(),
        };
        line.map(drop).ok_or_else(unknown)
    }

    fn change(&self, change: LineChange, commit: Commit) -> Result<Vec<LineFault>, LineFault> {
        let mut opened: Vec<String> = Vec::new();
        let mut left_out = Vec::new();
        for spec in change.added {
            let vm = spec.full_name();
            if let Err(error) = self.add_line(spec) {
                if change.leaves_out {
                    let vm = Some(vm);
                    left_out.push(LineFault { vm, error });
                    continue;
                }
                for name in opened {
                    // It was opened a moment ago.
                    let _ = self.remove_line(&name);
                }
                let vm = Some(vm);
                return Err(LineFault { vm, error });
            }
            opened.push(vm);
        }
        for name in &change.removed {
            let removed = self.remove_line(name);
            removed.map_err(|error| LineFault { vm: None, error })?;
        }
        let mut state = self.state();
        for (name, groups) in &change.policy.groups {
            if let Some(line) = state.lines.get_mut(name) {
                line.groups.clone_from(groups);
            }
        }
        state.services = change.services;
        state.policy = Some(change.policy);
        state.policy_changes += 1;
        drop(state);
        commit();
        Ok(left_out)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LineWorker for FakeWorker {
    fn set_agent_secret(&self, _vm: &str, _secret: AgentSecret) {}

    fn prepare(&self, change: LineChange) -> Result<PreparedLines<'_>, LineFault> {
        let mut ports = change.added.iter().flat_map(|spec| &spec.ports);
        let is_changing = ports.any(|port| UnixStream::connect(&port.socket).is_ok());
        self.state().networks_stood_still |= is_changing;
        Ok(Box::new(move |commit| self.change(change, commit)))
    }

    fn figures(&self) -> Figures {
        self.state().figures.clone()
    }

    fn next_turn(&self) -> bool {
        !self.stopped()
    }

    fn lines(&self) -> Vec<LineStatus> {
        self.pass_gate();
        self.state()
            .lines
            .values()
            .map(|line| line.status.clone())
            .collect()
    }

    fn capture(
        &self,
        filter: CaptureFilter,
        options: CaptureOptions,
        sender: CaptureSender,
    ) -> Result<(), LineError> {
        let CaptureFilter { vm, port } = filter;
        let mut state = self.state();
        if let Some(name) = vm.as_ref().filter(|vm| !state.lines.contains_key(*vm)) {
            let name = name.clone();
            return Err(LineError::Unknown { name });
        }
        state.captures.push(FakeCapture {
            network: None,
            vm,
            port,
            options,
            sender,
        });
        Ok(())
    }

    fn stop(&self) {
        let names: Vec<String> = self.state().lines.keys().cloned().collect();
        for name in names {
            // A socket that a test has removed already is no matter.
            let _ = self.remove_line(&name);
        }
        self.state().stopped = true;
    }
}
