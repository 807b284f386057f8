//! A worker for tests: its lines have real sockets and nobody behind them, and their state is what the test says.

mod daemon;

pub use daemon::{FakeDaemon, router, start};

use std::collections::BTreeMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use crate::line::{AgentArrival, AllowRule, Counters, LineError, LineSpec, LineStatus, LineWorker};
use crate::runtime::{RuntimeError, listen_privately};

/// See the module's documentation.
#[derive(Debug)]
pub struct FakeWorker {
    state: Mutex<State>,
    arrivals: Mutex<Option<mpsc::Sender<AgentArrival>>>,
}

#[derive(Debug, Default)]
struct State {
    lines: BTreeMap<String, Line>,
    rules: Vec<AllowRule>,
    stopped: bool,
}

#[derive(Debug)]
struct Line {
    status: LineStatus,
    paths: [PathBuf; 2],
    listeners: [UnixListener; 2],
}

impl FakeWorker {
    /// A worker without a line.
    pub fn new(arrivals: mpsc::Sender<AgentArrival>) -> FakeWorker {
        FakeWorker {
            state: Mutex::default(),
            arrivals: Mutex::new(Some(arrivals)),
        }
    }

    /// Changes the state of a line, if there is one of this name.
    pub fn set_state(&self, name: &str, attached: bool, driver_ready: bool) {
        if let Some(line) = self.state().lines.get_mut(name) {
            line.status.attached = attached;
            line.status.driver_ready = driver_ready;
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
            stream,
        };
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let arrivals = arrivals.as_ref().expect("the worker works");
        arrivals
            .try_send(arrival)
            .expect("there is room for an arrival");
        guest
    }

    /// The listening host socket of a line, on which the test may do what a worker does.
    ///
    /// # Panics
    /// There is no line of this name.
    pub fn host_listener(&self, vm: &str) -> UnixListener {
        let state = self.state();
        let [_, host] = &state.lines.get(vm).expect("the line exists").listeners;
        host.try_clone().expect("a descriptor is left")
    }

    /// Ends as a worker does whose thread has panicked.
    pub fn die(&self) {
        *self.arrivals.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The rules that were set last.
    pub fn rules(&self) -> Vec<AllowRule> {
        self.state().rules.clone()
    }

    /// Whether the worker was stopped.
    pub fn stopped(&self) -> bool {
        self.state().stopped
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LineWorker for FakeWorker {
    fn add_line(&self, spec: LineSpec) -> Result<(), LineError> {
        let listen = |path: &PathBuf| {
            listen_privately(path).map_err(|error| match error {
                RuntimeError::InUse { path } | RuntimeError::NotASocket { path } => {
                    LineError::AddressInUse { path }
                }
                other => LineError::Io(std::io::Error::other(other)),
            })
        };
        let listeners = [listen(&spec.vhost_user)?, listen(&spec.host)?];
        let status = LineStatus {
            name: spec.name.clone(),
            cid: spec.cid,
            attached: false,
            driver_ready: false,
            circuits: 0,
            half_open_circuits: 0,
            buffered_bytes: 0,
            buffered_messages: 0,
            granted_bytes: 0,
            counters: Counters::from([("circuits_opened", 0)]),
        };
        let line = Line {
            status,
            paths: [spec.vhost_user, spec.host],
            listeners,
        };
        self.state().lines.insert(spec.name, line);
        Ok(())
    }

    fn remove_line(&self, name: &str) -> Result<(), LineError> {
        let line = self.state().lines.remove(name);
        let line = line.ok_or_else(|| LineError::Unknown {
            name: name.to_owned(),
        })?;
        for path in &line.paths {
            std::fs::remove_file(path)?;
        }
        Ok(())
    }

    fn lines(&self) -> Vec<LineStatus> {
        self.state()
            .lines
            .values()
            .map(|line| line.status.clone())
            .collect()
    }

    fn set_rules(&self, rules: Vec<AllowRule>) {
        self.state().rules = rules;
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
