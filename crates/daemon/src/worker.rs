//! The worker: the one thread that moves bytes, and the handle by which the control plane reaches it.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use config::{LineSpec, VmmSocket};
use device::{
    AgentSecret, Arrival, Bound, CaptureError, CaptureFilter, CaptureOptions, Change, Changed,
    CircuitFilter, CircuitSnapshot, DecisionSink, Dialer, Fabric, HybridConfig, LineConfig,
    LineSnapshot, NewLine, Observer, OpenLineError, ProgramCall, PublishedCall, RefusedLine,
    SerialConfig, TakenOver,
};
use keeper::Keeper;
use policy::{Address, LineId};
use vsock::{AddLineError, CircuitId, Limits, LineReport, Reason, Side};

use crate::capture::CaptureSender;
use crate::line::{
    Counters, Figures, LineChange, LineError, LineFault, LineFigures, LineStatus, LineWorker,
    PolicyChange, PreparedLines, Prospects, SocketError,
};
use crate::shared_answer::SharedAnswer;
use device::Orders;
use hostside::arrivals::{AgentArrival, ArrivalSender, Unreachable};
use hostside::channels::{Channels, VmChannels};
use hostside::offers::Commit;
use hostside::proxy::{DialPlace, Exchange};
use hostside::serial_line::SerialLine;
use windows::switchboard::plane::DataPlane;

/// What a worker is connected with.
pub struct Wiring {
    /// Where what guests' agents have to say goes. When there is no room, the guest is refused and calls again.
    pub arrivals: ArrivalSender,
    /// Puts calls to services through.
    pub dialer: Dialer,
    /// Takes note of what became of calls.
    pub decisions: DecisionSink,
    /// Takes note of lines that come and go, and of circuits that end.
    pub observer: Observer,
    /// Where install logs are kept.
    pub state_dir: PathBuf,
    /// The group whose members may connect to host sockets.
    pub host_group: Option<u32>,
    /// Where VMMs' connections are kept for the next daemon.
    pub keeper: Option<Arc<Keeper>>,
}

/// How long a change waits for sockets at paths that others can make slow.
pub(crate) const SOCKETS_PATIENCE: Duration = Duration::from_secs(2);

/// A running worker.
pub struct Worker {
    orders: Orders<Fabric>,
    lines: SharedAnswer<KnownLines>,
    figures: SharedAnswer<Figures>,
    /// The serial lines, by full name.
    serial_lines: Mutex<BTreeMap<String, SerialLine>>,
    unreachable: Unreachable,
    channels: Mutex<VmsChannels>,
    state_dir: PathBuf,
    host_group: Option<u32>,
    keeper: Option<Arc<Keeper>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The lines, and the payload in our keeping of each, in bytes.
type KnownLines = (Vec<LineSnapshot>, HashMap<LineId, u64>);

/// Serves channels, once there are some, and the channels by the full name of their VM.
#[derive(Default)]
struct VmsChannels {
    server: Option<Arc<Channels>>,
    by_vm: BTreeMap<String, VmChannels>,
}

impl Worker {
    /// Starts a worker without lines. While guests and programs answer quickly it looks for up to `spin` before it sleeps.
    ///
    /// # Errors
    /// When the system has no threads or descriptors left.
    pub fn start(wiring: Wiring, spin: Duration) -> io::Result<Arc<Worker>> {
        let Wiring {
            arrivals,
            dialer,
            decisions,
            observer,
            state_dir,
            host_group,
            keeper,
        } = wiring;
        let unreachable = arrivals.unreachable();
        let sink = Box::new(move |arrival: Arrival| {
            let arrival = AgentArrival {
                vm: arrival.vm,
                source_port: arrival.source_port,
                attachment: arrival.attachment,
                stream: arrival.stream,
            };
            arrivals.offer(arrival)
        });
        let mut fabric = Fabric::new(Limits::default(), wire::agent::PORT, sink)?;
        fabric.set_spin(spin);
        fabric.set_host_group(host_group);
        if let Some(keeper) = &keeper {
            fabric.set_keeper(keeper.clone())?;
        }
        fabric.set_own_user(Some(rustix::process::geteuid().as_raw()));
        fabric.set_dialer(dialer);
        fabric.set_decision_sink(decisions);
        fabric.set_observer(observer);
        let (orders, thread) = Orders::start("worker", fabric)?;
        Ok(Arc::new(Worker {
            orders,
            lines: SharedAnswer::default(),
            figures: SharedAnswer::default(),
            serial_lines: Mutex::default(),
            unreachable,
            channels: Mutex::default(),
            state_dir,
            host_group,
            keeper,
            thread: Mutex::new(Some(thread)),
        }))
    }

    fn open_channels(&self, spec: &LineSpec) -> Result<Option<VmChannels>, LineError> {
        if spec.channels.is_empty() {
            return Ok(None);
        }
        let server = self.channel_server()?;
        // Without the lock, for which every answer about lines waits: the directories of its sockets may hold this up.
        Ok(Some(server.open(spec, &self.state_dir)?))
    }

    fn channel_server(&self) -> io::Result<Arc<Channels>> {
        let mut channels = sys::lock(&self.channels);
        if let Some(server) = &channels.server {
            return Ok(server.clone());
        }
        let server = Arc::new(Channels::start()?);
        channels.server = Some(server.clone());
        Ok(server)
    }

    /// A line to open, and what runs beside it from before it is.
    fn prepare_line(
        &self,
        spec: LineSpec,
    ) -> Result<(NewLine, Option<SerialLine>, Option<VmChannels>), LineError> {
        let name = spec.full_name();
        let channels = self.open_channels(&spec)?;
        let (limits, host) = (spec.limits, spec.host);
        let address = Address {
            domain: spec.domain,
            name: spec.name,
            cid: spec.cid,
            groups: spec.groups,
        };
        let line = match spec.vmm {
            VmmSocket::Vsock(vhost_user) => NewLine::Rings(LineConfig {
                address,
                limits,
                vhost_user,
                host,
            }),
            VmmSocket::Hybrid(path) => NewLine::Hybrid(HybridConfig {
                address,
                limits,
                path,
                host,
            }),
            VmmSocket::Serial(chardev) => {
                let (orders, unreachable) = (self.orders.clone(), self.unreachable.clone());
                let serial = SerialLine::start(&name, &chardev, orders, unreachable)?;
                let config = SerialConfig {
                    address,
                    limits,
                    host,
                };
                let line = NewLine::Serial(config, serial.carrier());
                return Ok((line, Some(serial), channels));
            }
        };
        Ok((line, None, channels))
    }

    /// Goes through all circuits, a slice between two turns. Returns the payload in our keeping of each line, in bytes.
    fn survey(&self) -> HashMap<LineId, u64> {
        let mut kept_bytes = HashMap::new();
        let mut next = Some(0);
        while let Some(from) = next {
            let slice = self.orders.ask(move |fabric| fabric.survey_circuits(from));
            let slice = slice.unwrap_or_default();
            for (line, bytes) in slice.kept_bytes {
                *kept_bytes.entry(line).or_default() += bytes;
            }
            next = slice.next;
        }
        kept_bytes
    }

    fn change_lines(
        &self,
        change: LineChange,
        (added, bound): (Vec<NewLine>, Bound),
        commit: Commit,
    ) -> Result<Changed, LineFault> {
        let PolicyChange {
            policy,
            groups,
            aliases,
            enforce_existing,
        } = change.policy;
        let change = Change {
            added,
            bound,
            leaves_out: change.leaves_out,
            removed: change.removed,
            services: change.services,
            policy,
            groups,
            aliases,
            enforce_existing,
            commit,
        };
        let changed = self.orders.ask(move |fabric| fabric.change(change));
        match changed {
            Some(changed) => changed.map_err(line_fault),
            None => Err(LineFault {
                vm: None,
                error: stopped(),
            }),
        }
    }

    fn change(
        &self,
        change: LineChange,
        added: (Vec<NewLine>, Bound),
        beside: Vec<(String, Option<SerialLine>, Option<VmChannels>)>,
        commit: Commit,
    ) -> Result<Vec<LineFault>, LineFault> {
        let removed = change.removed.clone();
        let Changed { ended, left_out } = self.change_lines(change, added, commit)?;
        if ended > 0 {
            tracing::info!(circuits = ended, "ended what is not allowed any more");
        }
        let is_left_out = |vm: &String| left_out.iter().any(|(name, _)| name == vm);
        for (vm, serial, channels) in beside.into_iter().filter(|(vm, ..)| !is_left_out(vm)) {
            if let Some(channels) = channels {
                sys::lock(&self.channels).by_vm.insert(vm.clone(), channels);
            }
            if let Some(line) = serial {
                // Its guest may have answered before there was a line.
                line.tell_of_guest();
                sys::lock(&self.serial_lines).insert(vm, line);
            }
        }
        for name in removed {
            // Only now: ending a serial line waits for its thread, which the worker must not do.
            let line = sys::lock(&self.serial_lines).remove(&name);
            drop(line);
            // Its sockets' files go without the lock, for which every answer about lines waits.
            let channels = sys::lock(&self.channels).by_vm.remove(&name);
            drop(channels);
        }
        if let Some(done) = self.orders.ask(Fabric::all_done) {
            // Where a directory's owner holds its lock, the sockets come later.
            let _ = done.recv_timeout(SOCKETS_PATIENCE);
        }
        Ok(left_out.into_iter().map(line_fault).collect())
    }
}

impl LineWorker for Worker {
    fn prepare(&self, mut change: LineChange) -> Result<PreparedLines<'_>, LineFault> {
        let (mut added, mut beside) = (Vec::new(), Vec::new());
        let mut bound = Bound::new(self.host_group, self.keeper.clone());
        let mut left_out = Vec::new();
        for spec in std::mem::take(&mut change.added) {
            let vm = spec.full_name();
            let prepared = self.prepare_line(spec).and_then(|prepared| {
                let (services, policy) = (&change.services, &change.policy.policy);
                let made = prepared.0.make_sockets(&mut bound, services, policy);
                made.map_err(|error| line_error(&vm, error))?;
                Ok(prepared)
            });
            match prepared {
                Ok((line, serial, channels)) => {
                    added.push(line);
                    beside.push((vm, serial, channels));
                }
                Err(error) => {
                    let vm = Some(vm);
                    let fault = LineFault { vm, error };
                    if !change.leaves_out {
                        return Err(fault);
                    }
                    left_out.push(fault);
                }
            }
        }
        Ok(Box::new(move |commit| {
            left_out.extend(self.change(change, (added, bound), beside, commit)?);
            Ok(left_out)
        }))
    }

    fn next_turn(&self) -> bool {
        self.orders.next_turn()
    }

    fn lines(&self) -> Vec<LineStatus> {
        let known = self.lines.answer(|| {
            let kept_bytes = self.survey();
            let lines = self.orders.ask(|fabric| fabric.lines());
            (lines.unwrap_or_default(), kept_bytes)
        });
        let (lines, kept_bytes) = &*known;
        let (serial_lines, channels) = (sys::lock(&self.serial_lines), sys::lock(&self.channels));
        let lines = lines.iter().map(|line| {
            let name = line.report.address.full_name();
            let mut status = LineStatus {
                attached: line.attached,
                last_fault: line.last_fault.clone(),
                last_fault_at: line.last_fault_at,
                cut_off: line.cut_off,
                another_waits: line.another_waits,
                paused: line.paused,
                driver_ready: line.report.up,
                circuits: line.report.circuits,
                half_open_circuits: line.report.half_open,
                buffered_bytes: kept_bytes.get(&line.report.id).copied().unwrap_or(0),
                buffered_messages: line.kept_messages,
                granted_bytes: line.report.granted_bytes,
                counters: counters(&line.report),
                channels: Vec::new(),
                cid: line.report.address.cid,
                name,
            };
            if let Some(serial_line) = serial_lines.get(&status.name) {
                let (is_connected, counted) = serial_line.status();
                status.attached = is_connected;
                status.counters.extend(counted);
            }
            if let Some(channels) = channels.by_vm.get(&status.name) {
                status.channels = channels.states();
            }
            status
        });
        lines.collect()
    }

    fn figures(&self) -> Figures {
        let figures = self.figures.answer(|| {
            self.survey();
            let figures = self.orders.ask(figures);
            figures.unwrap_or_default()
        });
        Figures::clone(&figures)
    }

    fn prospects(&self) -> Prospects {
        let lines = self.orders.ask(|fabric| fabric.line_prospects());
        let mut circuits = BTreeMap::new();
        let mut next = Some(0);
        while let Some(from) = next {
            let slice = self
                .orders
                .ask(move |fabric| fabric.circuit_prospects(from));
            let (prospects, then) = slice.unwrap_or_default();
            for prospect in prospects {
                *circuits.entry(prospect).or_default() += 1;
            }
            next = then;
        }
        Prospects {
            lines: lines.unwrap_or_default(),
            circuits,
        }
    }

    fn taken_over(&self) -> TakenOver {
        loop {
            match self.orders.ask(|fabric| fabric.taken_over()) {
                Some(Some(taken_over)) => return taken_over,
                Some(None) if self.keeper.is_some() && self.next_turn() => {}
                _ => return TakenOver::default(),
            }
        }
    }

    fn set_agent_secret(&self, vm: &str, secret: AgentSecret) {
        let vm = vm.to_owned();
        // Waited for, so that a client that sees the VM ready can call.
        self.orders
            .ask(move |fabric| fabric.set_agent_secret(&vm, secret));
    }

    fn capture(
        &self,
        filter: CaptureFilter,
        options: CaptureOptions,
        sender: CaptureSender,
    ) -> Result<(), LineError> {
        let begun = self
            .orders
            .ask(move |fabric| fabric.capture(&filter, options, Box::new(sender)));
        match begun.ok_or_else(stopped)? {
            Ok(()) => Ok(()),
            Err(CaptureError::NoLine(name)) => Err(LineError::Unknown { name }),
            Err(CaptureError::TooMany) => Err(LineError::TooManyCaptures),
        }
    }

    fn end_host_calls(&self) -> usize {
        let count = self.orders.ask(Fabric::end_host_calls);
        // All are asked before any is awaited.
        let VmsChannels { server, by_vm } = std::mem::take(&mut *sys::lock(&self.channels));
        drop(by_vm);
        drop(server);
        count.unwrap_or_default()
    }

    fn stop(&self) {
        self.end_host_calls();
        self.orders.ask(Fabric::stop);
        let serial_lines = std::mem::take(&mut *sys::lock(&self.serial_lines));
        drop(serial_lines);
        let thread = sys::lock(&self.thread).take();
        if let Some(thread) = thread {
            // It was asked to end; if it panicked, that has been printed.
            let _ = thread.join();
        }
    }
}

impl Exchange for Worker {
    fn dial_guest(&self, call: PublishedCall, place: DialPlace) {
        self.orders
            .order(move |fabric| fabric.dial_guest(call, Box::new(place)));
    }

    fn resolve(&self, vm: &str, name: &str) -> Option<u32> {
        let (vm, name) = (vm.to_owned(), name.to_owned());
        self.orders
            .ask(move |fabric| fabric.resolve(&vm, &name))
            .flatten()
    }

    fn resolve_service(&self, vm: &str, name: &str) -> Option<u32> {
        let (vm, name) = (vm.to_owned(), name.to_owned());
        self.orders
            .ask(move |fabric| fabric.resolve_service(&vm, &name))
            .flatten()
    }
}

impl DataPlane for Worker {
    fn find_circuit(
        &self,
        vm: &str,
        port: u32,
        peer: (u32, u32),
    ) -> Option<(CircuitSnapshot, Side)> {
        let vm = vm.to_owned();
        self.orders
            .ask(move |fabric| fabric.find_circuit(&vm, port, peer.0, peer.1))
            .flatten()
    }

    fn show_circuit(&self, id: CircuitId) -> Option<CircuitSnapshot> {
        self.orders
            .ask(move |fabric| fabric.show_circuit(id))
            .flatten()
    }

    fn list_circuits(&self, filter: CircuitFilter, limit: usize) -> (Vec<CircuitSnapshot>, usize) {
        let (mut circuits, mut more) = (Vec::new(), 0);
        let mut next = Some(0);
        while let Some(from) = next {
            let (filter, room) = (filter.clone(), limit - circuits.len());
            let slice = self
                .orders
                .ask(move |fabric| fabric.list_circuits(&filter, from, room));
            let slice = slice.unwrap_or_default();
            circuits.extend(slice.circuits);
            more += slice.more;
            next = slice.next;
        }
        (circuits, more)
    }

    fn end_circuit(&self, id: CircuitId) -> bool {
        let ended = self.orders.ask(move |fabric| fabric.end_circuit(id));
        ended.unwrap_or(false)
    }

    fn dial_program(&self, call: ProgramCall) {
        self.orders.order(move |fabric| fabric.dial_program(call));
    }

    fn set_listening(&self, port: u32, vm: Option<String>, listens: bool) {
        self.orders
            .ask(move |fabric| fabric.set_listening(port, vm, listens));
    }

    fn vm_named(&self, name: &str) -> Option<String> {
        let name = name.to_owned();
        self.orders
            .ask(move |fabric| fabric.vm_named(&name))
            .flatten()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the fabric has counted. What circuits have carried is as of the last survey.
fn figures(fabric: &mut Fabric) -> Figures {
    let lines = fabric.lines().into_iter().map(|line| LineFigures {
        name: line.report.address.full_name(),
        domain: line.report.address.domain,
        notified: line.notified,
        parked_descriptors: line.parked_descriptors,
        set_up: line.report.counters.set_up,
    });
    Figures {
        lines: lines.collect(),
        rules: fabric.rule_reports(),
        worker_busy: own_processor_time(),
    }
}

/// How long the calling thread has run on a processor. Time in which it looks for work before it sleeps is part of it.
fn own_processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn stopped() -> LineError {
    LineError::Io(io::Error::other("the worker has stopped"))
}

fn line_fault((vm, error): RefusedLine) -> LineFault {
    LineFault {
        error: line_error(&vm, error),
        vm: Some(vm),
    }
}

fn line_error(name: &str, error: OpenLineError) -> LineError {
    match error {
        OpenLineError::Directory(AddLineError::NameTaken(name)) => {
            LineError::DuplicateName { name }
        }
        OpenLineError::Directory(AddLineError::CidTaken { cid, .. }) => {
            LineError::DuplicateCid { cid }
        }
        OpenLineError::Directory(error) => {
            LineError::Io(io::Error::other(format!("VM {name:?}: {error}")))
        }
        OpenLineError::Socket { path, error } => SocketError::at(path, error).into(),
    }
}

fn counters(report: &LineReport) -> Counters {
    let counted = &report.counters;
    let mut counters = Counters::from([
        ("packets_from_guest", counted.packets_from_guest),
        ("packets_to_guest", counted.packets_to_guest),
        ("bytes_from_guest", counted.bytes_from_guest),
        ("bytes_to_guest", counted.bytes_to_guest),
        ("circuits_opened", counted.circuits_opened),
        ("spoofed_packets", counted.spoofed),
        ("malformed_packets", counted.malformed),
        ("resets_dropped", counted.resets_dropped),
        ("rests_for_control_messages", counted.throttles),
    ]);
    for reason in Reason::ALL {
        counters.insert(reason.name(), counted.ended[reason.index()]);
    }
    counters
}
