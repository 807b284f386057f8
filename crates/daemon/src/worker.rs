//! The worker: the one thread that moves bytes, and the handle by which the control plane reaches it.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use device::{
    AgentSecret, Arrival, CaptureError, CaptureFilter, CaptureOptions, CircuitFilter,
    CircuitSnapshot, DecisionSink, Dialer, Fabric, HybridConfig, LineConfig, Observer,
    OpenLineError, ProgramCall, PublishedCall, SerialConfig,
};
use switch::{AddLineError, Address, CircuitId, Limits, LineReport, Reason, ServiceEntry, Side};
use tokio::sync::mpsc::Sender as ArrivalSender;

use crate::capture::CaptureSender;
use crate::channels::{Channels, VmChannels};
use crate::config::Chardev;
use crate::line::{
    AgentArrival, Counters, Figures, LineError, LineFigures, LineSpec, LineStatus, LineWorker,
    PolicyChange,
};
use crate::orders::Orders;
use crate::proxy::Exchange;
use crate::serial_line::SerialLine;
use crate::switchboard::plane::DataPlane;

/// What a worker is connected with.
pub struct Wiring {
    /// Where what guests' agents have to say goes. When there is no room, the guest is refused and calls again.
    pub arrivals: ArrivalSender<AgentArrival>,
    /// Who puts calls to services through.
    pub dialer: Dialer,
    /// Who takes note of what became of calls.
    pub decisions: DecisionSink,
    /// Who takes note of lines that come and go, and of circuits that end.
    pub observer: Observer,
    /// Where install logs are kept.
    pub state_dir: PathBuf,
    /// The group whose members may connect to host sockets.
    pub host_group: Option<u32>,
}

/// A running worker.
pub struct Worker {
    orders: Orders<Fabric>,
    /// The serial lines, by full name.
    serial_lines: Mutex<BTreeMap<String, SerialLine>>,
    channels: Mutex<VmsChannels>,
    state_dir: PathBuf,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Who serves channels, once there are some, and the channels by the full name of their VM.
#[derive(Default)]
struct VmsChannels {
    server: Option<Channels>,
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
        } = wiring;
        let sink = Box::new(move |arrival: Arrival| {
            let arrival = AgentArrival {
                vm: arrival.vm,
                source_port: arrival.source_port,
                attachment: arrival.attachment,
                stream: arrival.stream,
            };
            arrivals.try_send(arrival).is_ok()
        });
        let mut fabric = Fabric::new(Limits::default(), wire::agent::PORT, sink)?;
        fabric.set_spin(spin);
        fabric.set_host_group(host_group);
        fabric.set_dialer(dialer);
        fabric.set_decision_sink(decisions);
        fabric.set_observer(observer);
        let (orders, thread) = Orders::start("worker", fabric)?;
        Ok(Arc::new(Worker {
            orders,
            serial_lines: Mutex::default(),
            channels: Mutex::default(),
            state_dir,
            thread: Mutex::new(Some(thread)),
        }))
    }

    fn serial_lines(&self) -> MutexGuard<'_, BTreeMap<String, SerialLine>> {
        // Nothing panics while it holds the lock.
        self.serial_lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn channels(&self) -> MutexGuard<'_, VmsChannels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_channels(&self, spec: &LineSpec) -> Result<(), LineError> {
        if spec.channels.is_empty() {
            return Ok(());
        }
        let mut channels = self.channels();
        let server = match channels.server.take() {
            Some(server) => server,
            None => Channels::start()?,
        };
        let opened = server.open(spec, &self.state_dir);
        channels.server = Some(server);
        channels.by_vm.insert(spec.full_name(), opened?);
        Ok(())
    }

    /// Opens the line of a VM whose guest is reached by a serial port.
    fn add_serial_line(
        &self,
        chardev: &Chardev,
        config: SerialConfig,
        aliases: Vec<String>,
    ) -> Result<(), LineError> {
        let name = config.address.full_name();
        let line = SerialLine::start(&name, chardev, self.orders.clone())?;
        let carrier = line.carrier();
        let opened = self.orders.ask(move |fabric| {
            fabric.open_serial_line(&config, carrier)?;
            fabric.set_aliases(vec![(config.address.full_name(), aliases)]);
            Ok(())
        });
        opened
            .ok_or_else(stopped)?
            .map_err(|error| line_error(&name, error))?;
        // Its guest may have answered before there was a line.
        line.tell_of_guest();
        self.serial_lines().insert(name, line);
        Ok(())
    }
}

impl Worker {
    fn open_line(&self, spec: LineSpec) -> Result<(), LineError> {
        let full_name = spec.full_name();
        let (limits, host, aliases) = (spec.limits, spec.host, spec.aliases);
        let address = Address {
            domain: spec.domain,
            name: spec.name,
            cid: spec.cid,
            groups: spec.groups,
        };
        let name = full_name.clone();
        if let Some(chardev) = &spec.serial {
            let config = SerialConfig {
                address,
                limits,
                host,
            };
            return self.add_serial_line(chardev, config, aliases);
        }
        let opened = self.orders.ask(move |fabric| {
            match spec.hybrid {
                Some(path) => fabric.open_hybrid_line(&HybridConfig {
                    address,
                    limits,
                    path,
                    host,
                })?,
                None => fabric.open_line(&LineConfig {
                    address,
                    limits,
                    vhost_user: spec.vhost_user.unwrap_or_default(),
                    host,
                })?,
            }
            fabric.set_aliases(vec![(name, aliases)]);
            Ok(())
        });
        match opened {
            Some(result) => result.map_err(|error| line_error(&full_name, error)),
            None => Err(stopped()),
        }
    }
}

impl LineWorker for Worker {
    fn add_line(&self, spec: LineSpec) -> Result<(), LineError> {
        self.open_line(spec.clone())?;
        self.open_channels(&spec).inspect_err(|_| {
            // It was opened a moment ago.
            let _ = self.remove_line(&spec.full_name());
        })
    }

    fn remove_line(&self, name: &str) -> Result<(), LineError> {
        let wanted = name.to_owned();
        let closed = self.orders.ask(move |fabric| fabric.close_line(&wanted));
        // Only now: whoever ends a serial line waits for its thread, and the worker's must not be the one.
        let line = self.serial_lines().remove(name);
        drop(line);
        self.channels().by_vm.remove(name);
        match closed {
            Some(true) => Ok(()),
            _ => Err(LineError::Unknown {
                name: name.to_owned(),
            }),
        }
    }

    fn lines(&self) -> Vec<LineStatus> {
        let lines = self.orders.ask(|fabric| fabric.lines()).unwrap_or_default();
        let (serial_lines, channels) = (self.serial_lines(), self.channels());
        let lines = lines.into_iter().map(|line| {
            let name = line.report.address.full_name();
            let mut status = LineStatus {
                attached: line.attached,
                last_fault: line.last_fault,
                driver_ready: line.report.up,
                circuits: line.report.circuits,
                half_open_circuits: line.report.half_open,
                buffered_bytes: line.report.kept_bytes,
                buffered_messages: line.kept_messages,
                granted_bytes: line.report.granted_bytes,
                counters: counters(&line.report),
                channels: Vec::new(),
                cid: line.report.address.cid,
                name,
            };
            if let Some(serial_line) = serial_lines.get(&status.name) {
                serial_line.describe(&mut status);
            }
            if let Some(channels) = channels.by_vm.get(&status.name) {
                status.channels = channels.states();
            }
            status
        });
        lines.collect()
    }

    fn figures(&self) -> Figures {
        let figures = self.orders.ask(|fabric| {
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
        });
        figures.unwrap_or_default()
    }

    fn set_policy(&self, change: PolicyChange) -> Result<(), LineError> {
        let PolicyChange {
            policy,
            groups,
            aliases,
            enforce_existing,
        } = change;
        let ended = self.orders.ask(move |fabric| {
            fabric.set_aliases(aliases);
            fabric.set_policy(policy, groups, enforce_existing)
        });
        match ended {
            None => return Err(stopped()),
            Some(0) => {}
            Some(circuits) => tracing::info!(circuits, "ended what is not allowed any more"),
        }
        Ok(())
    }

    fn set_directory(&self, services: Vec<ServiceEntry>) -> Result<(), LineError> {
        self.orders
            .ask(move |fabric| fabric.set_services(services))
            .ok_or_else(stopped)
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

    fn stop(&self) {
        self.orders.ask(Fabric::stop);
        let serial_lines = std::mem::take(&mut *self.serial_lines());
        drop(serial_lines);
        // All are told before any is waited for.
        let VmsChannels { server, by_vm } = std::mem::take(&mut *self.channels());
        drop(by_vm);
        drop(server);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // It has been told to end; if it panicked, that has been printed.
            let _ = thread.join();
        }
    }
}

impl Exchange for Worker {
    fn dial_guest(&self, call: PublishedCall) {
        self.orders.order(move |fabric| fabric.dial_guest(call));
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
        self.orders
            .ask(move |fabric| fabric.list_circuits(&filter, limit))
            .unwrap_or_default()
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

/// How long the calling thread has run on a processor. Time in which it looks for work before it sleeps is part of it.
fn own_processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn stopped() -> LineError {
    LineError::Io(io::Error::other("the worker has stopped"))
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
        OpenLineError::Socket { path, error } if error.kind() == io::ErrorKind::AddrInUse => {
            LineError::AddressInUse { path }
        }
        OpenLineError::Socket { path, error } => LineError::Directory { path, error },
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
        ("rests_for_control_messages", counted.rests),
    ]);
    for reason in Reason::ALL {
        counters.insert(reason.name(), counted.ended[reason.index()]);
    }
    counters
}
