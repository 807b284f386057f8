//! A daemon from its configuration to its end.
//!
//! [`Daemon::start`] brings everything to listen: the runtime directory and its lock, the worker with its lines, the
//! control socket. [`Daemon::run`] then serves until it is told to end, on the calling thread. Dropping a daemon
//! closes its lines and removes its sockets, however far it has come. [`serve`] is the whole of it for a process.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::future::Future;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::api;
use crate::config::{Config, ConfigError, MAX_RULES, Plan, default_runtime_dir};
use crate::control::{Control, ControlError, open_line};
use crate::input::{InputError, check_socket_path};
use crate::line::{AgentArrival, AllowRule, LineWorker};
use crate::readiness::{MAX_WAITING_ARRIVALS, Readiness};
use crate::runtime::{
    RuntimeError, RuntimeLock, control_socket, listen_privately, prepare_directory,
};

/// Why the daemon did not start, or ended otherwise than it was told to.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The configuration cannot be meant.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The runtime directory or the control socket is not as it should be.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The line of a VM could not be opened.
    #[error("VM {name:?}: {error}")]
    Line {
        /// The VM.
        name: String,
        /// What stands in the way.
        error: ControlError,
    },
    /// The worker's thread ended by itself, so no byte would move any more.
    #[error(
        "the worker has ended unexpectedly: its last words are in the log; start the daemon again"
    )]
    WorkerEnded,
    /// The system refused something that the daemon cannot do without.
    #[error("cannot {what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        error: io::Error,
    },
}

impl ServeError {
    /// Whether the words were wrong rather than the machine: an exit code of 2 rather than 1.
    pub fn is_usage(&self) -> bool {
        matches!(self, ServeError::Config(ConfigError::Input { .. }))
    }
}

/// Starts a worker that hands over its arrivals to this channel. It keeps the channel for as long as it works: the
/// daemon takes the channel's end for the worker's. It must not wait for room there: when there is none,
/// the guest's connection is reset.
pub type StartWorker =
    Box<dyn FnOnce(mpsc::Sender<AgentArrival>) -> io::Result<Arc<dyn LineWorker>>>;

/// A daemon whose sockets listen.
pub struct Daemon {
    // In the order in which they are to end: the lock is given free when no socket is left.
    worker: RunningWorker,
    control_socket: ControlSocket,
    runtime: Runtime,
    plan: Plan,
    arrivals: mpsc::Receiver<AgentArrival>,
    _lock: RuntimeLock,
}

impl Daemon {
    /// Brings everything to listen.
    ///
    /// # Errors
    /// [`ServeError`]. No socket remains then.
    pub fn start(config: &Config, start_worker: StartWorker) -> Result<Daemon, ServeError> {
        Daemon::listen(Prepared::new(config)?, start_worker)
    }

    fn listen(prepared: Prepared, start_worker: StartWorker) -> Result<Daemon, ServeError> {
        let Prepared {
            runtime_dir,
            plan,
            rules,
        } = prepared;
        let lock = RuntimeLock::acquire(&runtime_dir)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| ServeError::System {
                what: "start the control thread",
                error,
            })?;
        let (sender, arrivals) = mpsc::channel(MAX_WAITING_ARRIVALS);
        let worker = start_worker(sender).map_err(|error| ServeError::System {
            what: "start the worker",
            error,
        })?;
        let worker = RunningWorker(worker);
        worker.0.set_rules(rules);
        for spec in plan.lines() {
            open_line(worker.0.as_ref(), spec.clone()).map_err(|error| ServeError::Line {
                name: spec.name.clone(),
                error,
            })?;
            tracing::info!(vm = spec.name, cid = spec.cid, "opened a line");
        }
        // Last, so that whoever finds the control socket finds the VMs too.
        let control_socket = ControlSocket::listen(&control_socket(&runtime_dir))?;
        tracing::info!(runtime_dir = %runtime_dir.display(), "every socket listens");
        Ok(Daemon {
            worker,
            control_socket,
            runtime,
            plan,
            arrivals,
            _lock: lock,
        })
    }

    /// Serves until the future that `end` makes is there. `end` is called on the daemon's runtime, before anything
    /// else, so that it can install what it waits for.
    ///
    /// # Errors
    /// What `end` says, that the control socket cannot be watched, or [`ServeError::WorkerEnded`].
    pub fn run<F: Future<Output = ()>>(
        self,
        end: impl FnOnce() -> io::Result<F>,
    ) -> Result<(), ServeError> {
        // Locals end in the reverse order: the lock is given free last.
        let Daemon {
            _lock,
            plan,
            arrivals,
            worker,
            control_socket,
            runtime,
        } = self;
        runtime.block_on(async {
            let system = |what| move |error| ServeError::System { what, error };
            let end = end().map_err(system("watch for the end"))?;
            let readiness = Arc::new(Readiness::default());
            // The worker holds the other end of the channel for as long as its thread lives.
            let worker_end = tokio::spawn(readiness.clone().run(arrivals));
            let worker_ended = Cell::new(false);
            let end = async {
                tokio::select! {
                    () = end => {}
                    _ = worker_end => worker_ended.set(true),
                }
            };
            let control = Arc::new(Control::new(worker.0.clone(), plan, readiness));
            let listener = control_socket
                .tokio_listener()
                .map_err(system("watch the control socket"))?;
            api::serve(listener, api::router(control), end).await;
            if worker_ended.get() {
                return Err(ServeError::WorkerEnded);
            }
            Ok(())
        })
    }
}

/// Runs the daemon for this process: until SIGTERM, SIGINT or SIGHUP, with `ready` on `out` and a word to the service
/// manager when every socket listens.
///
/// # Errors
/// [`ServeError`] when it could not start.
pub fn serve(
    config: &Config,
    start_worker: StartWorker,
    mut out: impl Write,
) -> Result<(), ServeError> {
    raise_descriptor_limit();
    let prepared = Prepared::new(config)?;
    // Sockets belong to this user from their first moment. Not earlier: a directory needs its search permission.
    rustix::process::umask(Mode::from_raw_mode(0o177));
    let daemon = Daemon::listen(prepared, start_worker)?;
    daemon.run(|| {
        let signals = [
            SignalKind::terminate(),
            SignalKind::interrupt(),
            SignalKind::hangup(),
        ];
        let [terminate, interrupt, hangup] = signals.map(signal);
        let mut signals = (terminate?, interrupt?, hangup?);
        // Nobody may read the line any more; the daemon has its job to do all the same.
        if let Err(error) = out.write_all(b"ready\n").and_then(|()| out.flush()) {
            tracing::warn!(%error, "cannot write the ready line");
        }
        notify(sd_notify::NotifyState::Ready);
        Ok(async move {
            let name = first_signal(&mut signals).await;
            tracing::info!(signal = name, "ending");
            notify(sd_notify::NotifyState::Stopping);
        })
    })
}

/// A configuration that holds together, and a directory for it.
struct Prepared {
    runtime_dir: PathBuf,
    plan: Plan,
    rules: Vec<AllowRule>,
}

impl Prepared {
    fn new(config: &Config) -> Result<Prepared, ServeError> {
        let runtime_dir = runtime_dir(config)?;
        let plan = Plan::from_config(runtime_dir.clone(), config)?;
        let rules = rules(config, &plan)?;
        prepare_directory(&runtime_dir)?;
        Ok(Prepared {
            runtime_dir,
            plan,
            rules,
        })
    }
}

struct RunningWorker(Arc<dyn LineWorker>);

impl Drop for RunningWorker {
    fn drop(&mut self) {
        self.0.stop();
    }
}

struct ControlSocket {
    path: PathBuf,
    listener: std::os::unix::net::UnixListener,
}

impl ControlSocket {
    fn listen(path: &Path) -> Result<ControlSocket, RuntimeError> {
        Ok(ControlSocket {
            path: path.to_owned(),
            listener: listen_privately(path)?,
        })
    }

    fn tokio_listener(&self) -> io::Result<tokio::net::UnixListener> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        tokio::net::UnixListener::from_std(listener)
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(socket = %self.path.display(), %error, "cannot remove the control socket");
        }
    }
}

/// The runtime directory of a configuration, from the root.
fn runtime_dir(config: &Config) -> Result<PathBuf, ServeError> {
    let path = config
        .runtime_dir
        .clone()
        .unwrap_or_else(default_runtime_dir);
    let path = std::path::absolute(path).map_err(|error| ServeError::System {
        what: "find the runtime directory",
        error,
    })?;
    check_socket_path(&control_socket(&path)).map_err(|error| ConfigError::Input {
        place: "the runtime directory".to_owned(),
        error,
    })?;
    Ok(path)
}

fn rules(config: &Config, plan: &Plan) -> Result<Vec<AllowRule>, ServeError> {
    if let Some(rule) = config.rules.get(MAX_RULES) {
        let error = InputError::TooMany {
            what: "rules",
            limit: MAX_RULES,
        };
        return Err(ConfigError::Input {
            place: rule.place.clone(),
            error,
        }
        .into());
    }
    let named = config
        .rules
        .iter()
        .flat_map(|rule| [&rule.value.from, &rule.value.to])
        .flatten();
    for name in named.collect::<BTreeSet<_>>() {
        if plan.get(name).is_none() {
            tracing::warn!(
                vm = name,
                "a rule names a VM that does not exist yet; it will hold once the VM is added"
            );
        }
    }
    Ok(config.rules.iter().map(|rule| rule.value.clone()).collect())
}

/// Lets this process open as many descriptors as it may: each circuit to a program of the host needs one.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

fn notify(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "cannot tell the service manager");
    }
}

async fn first_signal(
    (terminate, interrupt, hangup): &mut (Signal, Signal, Signal),
) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        _ = hangup.recv() => "SIGHUP",
    }
}

#[cfg(test)]
mod tests;
