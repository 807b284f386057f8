//! A daemon from its configuration to its end.
//!
//! [`Daemon::start`] brings everything to listen: the runtime directory and its lock, the worker with its lines, the
//! control socket. [`Daemon::run`] then serves until asked to end, on the calling thread. Dropping a daemon
//! closes its lines and removes its sockets, however far it has come. [`serve`] is the whole of it for a process.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::future::Future;
use std::io::{self, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use api::Finding;
use config::directories::{circuit_socket, control_socket};
use config::input::check_socket_path;
use config::{Addresses, Cids, Config, ConfigError, Plan, Settings, StateError};
use keeper::{Keeper, KeeperError};
use rustix::fs::Mode;
use tokio::runtime::Runtime;

use crate::added;
use crate::api::Access;
use crate::audit::{Audit, AuditWriter};
use crate::capture::Captures;
use crate::control::Control;
use crate::events::Events;
use crate::in_force::{Hindrance, InForce, Parts, ReadConfig, Unavailable};
use crate::line::LineWorker;
use crate::net::NetWorker;
use crate::policy::Rulebook;
use crate::questions::MAX_QUESTIONS;
use crate::readiness::{MAX_GATES, Readiness};
use crate::restart::{self, Before, take_over};
use crate::sandbox::{self, SandboxError};
use crate::service_manager::{self, HandedOverError, notify};
use crate::stalled_clients::StalledClients;
use crate::{log_budget, log_writer};
use hostside::arrivals::{ArrivalSender, Arrivals, arrivals};
use hostside::offers::Offers;
use runtime::directory::{
    RuntimeError, RuntimeLock, give_to_group, operators, prepare_directory, set_ended_aside,
    writable_by_all,
};
use windows::memory::{Windows, WindowsError};
use windows::switchboard::Circuits;

use self::private_socket::PrivateSocket;
use self::signals::Signals;

mod private_socket;
mod signals;

/// The most findings about a configuration that are logged.
const MAX_TOLD_FINDINGS: usize = 20;

/// How long the end waits for answers that are being made. What hangs in a directory of others' may take longer, and changes nothing.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// How long a keeper is waited for that is started at the same moment.
const KEEPER_WAIT: Duration = Duration::from_secs(5);

/// How long the ready line is waited for.
const READY_WAIT: Duration = Duration::from_secs(1);

/// Why the daemon did not start, or ended otherwise than asked to.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Change(#[from] Hindrance),
    #[error(transparent)]
    Windows(#[from] WindowsError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    HandedOver(#[from] HandedOverError),
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    #[error(transparent)]
    NewerKept(#[from] device::NewerKept),
    #[error("cannot open the audit's file {}: {error}; check its path and its permissions", path.display())]
    Audit { path: PathBuf, error: io::Error },
    #[error(
        "the worker has ended unexpectedly: see the log for the cause, and start the daemon again"
    )]
    WorkerEnded,
    #[error("cannot {what}: {error}")]
    System {
        what: &'static str,
        error: io::Error,
    },
}

impl ServeError {
    /// Whether the command line or the file is wrong rather than the machine: an exit code of 2 rather than 1.
    pub fn is_usage(&self) -> bool {
        matches!(self, ServeError::Config(ConfigError::Input { .. }))
    }
}

/// What the system said to something.
fn system(what: &'static str) -> impl FnOnce(io::Error) -> ServeError {
    move |error| ServeError::System { what, error }
}

/// What a worker is given when it starts.
pub struct Surroundings {
    /// Where it hands over the connections of guests' agents. It keeps the channel for as long as it works: the daemon takes the
    /// channel's end for the worker's. It must not wait for room there: when there is none, the guest's connection is reset.
    pub arrivals: ArrivalSender,
    /// Where it writes down what it decided.
    pub audit: Audit,
    /// Where it reports events.
    pub events: Events,
    /// The state directory, from the root.
    pub state_dir: PathBuf,
    /// The windows of all VMs.
    pub windows: Arc<Windows>,
    /// The group whose members may operate the daemon, and so may connect to host sockets.
    pub operators: Option<u32>,
    /// Where what VMMs hold on to is kept for the next daemon.
    pub keeper: Option<Arc<Keeper>>,
}

/// What has been started.
pub struct Started {
    /// The data plane.
    pub worker: Arc<dyn LineWorker>,
    /// The part of it that switches frames.
    pub net: Arc<dyn NetWorker>,
    /// Serves services and published ports.
    pub offers: Arc<dyn Offers>,
    /// Sets zero-copy circuits up.
    pub circuits: Arc<dyn Circuits>,
}

/// Starts a worker, and whatever serves beside it.
pub type StartWorker = Box<dyn FnOnce(Surroundings) -> io::Result<Started>>;

/// A daemon whose sockets listen.
pub struct Daemon {
    // In the order in which they are to end: the lock is given free when no socket is left.
    running: Running,
    control_socket: PrivateSocket,
    circuit_socket: PrivateSocket,
    runtime: Runtime,
    parts: Arc<Parts>,
    in_force: InForce,
    arrivals: Arrivals,
    _audit_writer: AuditWriter,
    _locks: Vec<RuntimeLock>,
}

impl Daemon {
    /// Brings everything to listen. `read_config` is asked once now, and again for each reload.
    ///
    /// # Errors
    /// [`ServeError`]. No socket remains then.
    pub fn start(read_config: ReadConfig, start_worker: StartWorker) -> Result<Daemon, ServeError> {
        let config = read_config(None)?;
        Daemon::listen(Prepared::new(config, read_config)?, start_worker)
    }

    fn listen(prepared: Prepared, start_worker: StartWorker) -> Result<Daemon, ServeError> {
        let Prepared {
            settings,
            config,
            read_config,
            handed_over,
            keeper,
            before,
        } = prepared;
        let locks = lock(&settings)?;
        // Only now: another daemon that was about to end may have written until now.
        let nothing = nothing_in_force(&settings, &config)?;
        let (in_force, _) = nothing.changed(&config)?;
        let runtime = control_runtime().map_err(system("start the control thread"))?;
        let (audit, audit_writer) = start_audit(config.audit.as_deref())?;
        let (groups, is_handed_over) = (settings.control, handed_over.is_some());
        let operators = operators(&settings.runtime_dir, groups, is_handed_over)?;
        let (sender, arrivals) = arrivals();
        let windows = Arc::new(Windows::new(&settings.runtime_dir)?);
        let events = Events::default();
        windows.set_observer(events.of_windows());
        let surroundings = Surroundings {
            arrivals: sender,
            audit: audit.clone(),
            events: events.clone(),
            state_dir: settings.state_dir.clone(),
            windows: windows.clone(),
            operators,
            keeper: keeper.clone(),
        };
        let started = start_worker(surroundings).map_err(system("start the worker"))?;
        let running = Running::all_of(&started);
        let mut parts = Parts {
            worker: started.worker,
            net: started.net,
            offers: started.offers,
            circuits: started.circuits,
            windows,
            audit,
            events,
            captures: Captures::default(),
            stalled_clients: StalledClients::default(),
            keeper,
            restart: None,
            settings,
            read_config,
        };
        let in_force = added::add_again(&parts, parts.start(&nothing, in_force)?);
        added::remove_left_sockets(&in_force.book.plan);
        parts.windows.sweep();
        let settings = &parts.settings;
        // Last, so that a client with the control socket has the VMs too.
        let circuit_socket = serve_circuits(&parts, operators)?;
        let control_socket = PrivateSocket::control(settings, handed_over)?;
        tracing::info!(runtime_dir = %settings.runtime_dir.display(), "every socket listens");
        // Behind all that can fail: until here, what was kept is for the next daemon.
        take_over(&mut parts, before);
        Ok(Daemon {
            running,
            control_socket,
            circuit_socket,
            runtime,
            parts: Arc::new(parts),
            in_force,
            arrivals,
            _audit_writer: audit_writer,
            _locks: locks,
        })
    }

    /// Serves until the future that `end` makes is there. `end` is called on the daemon's runtime, before anything
    /// else, so that it can install what it waits for; it is given the control, to which it may pass on what it gets meanwhile.
    ///
    /// # Errors
    /// What `end` says, that the control socket cannot be watched, or [`ServeError::WorkerEnded`].
    pub fn run<F: Future<Output = ()>>(
        self,
        end: impl FnOnce(Arc<Control>) -> io::Result<F>,
    ) -> Result<(), ServeError> {
        // Locals end in the reverse order: the locks are given free last, and the audit hears the last words of the rest.
        let Daemon {
            _locks,
            _audit_writer,
            parts,
            in_force,
            arrivals,
            running: _running,
            circuit_socket: _circuit_socket,
            control_socket,
            runtime,
        } = self;
        let keeper = parts.keeper.clone();
        let restarts = parts.restart.as_ref().map_or(0, |restart| restart.restarts);
        let ended = runtime.block_on(async {
            let worker = parts.worker.clone();
            let secrets = Box::new(move |vm: &str, secret| worker.set_agent_secret(vm, secret));
            let readiness = Arc::new(Readiness::telling(parts.events.clone(), secrets));
            let control_thread = tokio::runtime::Handle::current();
            service_manager::give_signs_of_life(control_thread, parts.worker.clone())
                .map_err(system("start the watchdog thread"))?;
            tokio::spawn(log_budget::report());
            tokio::spawn(parts.events.clone().tell_held());
            if let Some(keeper) = &parts.keeper {
                tokio::spawn(restart::watch(keeper.clone()));
            }
            let control = Arc::new(Control::new(parts.clone(), in_force, readiness.clone()));
            tokio::spawn(control.clone().keep_trying());
            let end = end(control.clone()).map_err(system("watch for the end"))?;
            // The worker holds the other end of the channel for as long as its thread lives.
            let worker_end = tokio::spawn(readiness.run(arrivals));
            let worker_ended = Cell::new(false);
            let end = async {
                tokio::select! {
                    () = end => {}
                    _ = worker_end => worker_ended.set(true),
                }
            };
            let listener = control_socket
                .tokio_listener()
                .map_err(system("watch the control socket"))?;
            let access = Access::new(parts.settings.control);
            let stalled = parts.stalled_clients.clone();
            crate::api::serve(listener, crate::api::router(control), access, stalled, end).await;
            if worker_ended.get() {
                return Err(ServeError::WorkerEnded);
            }
            Ok(())
        });
        // Programs may take their time to end: guests' circuits go on meanwhile.
        let cut = parts.worker.end_host_calls();
        parts.offers.stop();
        if let Some(keeper) = keeper {
            if ended.is_ok() {
                restart::leave(&keeper, restarts, cut);
            }
            keeper.leave();
        }
        runtime.shutdown_timeout(END_PATIENCE);
        ended
    }
}

/// No VM and no rule yet, but the numbers and addresses that VMs had.
fn nothing_in_force(settings: &Settings, config: &Config) -> Result<InForce, ServeError> {
    let cids = Cids::load(&settings.state_dir)?;
    let addresses = Addresses::load(&settings.state_dir)?;
    let plan = Plan::new(settings.runtime_dir.clone(), cids).remembering(addresses);
    Ok(InForce {
        book: Rulebook::without_rules(plan),
        configured: BTreeSet::new(),
        audit: config.audit.clone(),
        unavailable: Unavailable::new(),
    })
}

fn control_runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_QUESTIONS + MAX_GATES)
        .build()
}

/// Starts the audit, to a file if there is one.
fn start_audit(path: Option<&Path>) -> Result<(Audit, AuditWriter), ServeError> {
    Audit::start(path).map_err(|error| match path {
        Some(path) => ServeError::Audit {
            path: path.to_owned(),
            error,
        },
        None => system("start the audit")(error),
    })
}

/// Listens for programs that want circuits, of the operators too if there is such a group.
fn serve_circuits(parts: &Parts, operators: Option<u32>) -> Result<PrivateSocket, ServeError> {
    let path = circuit_socket(&parts.settings.runtime_dir);
    let socket = PrivateSocket::listen(&path)?;
    if let Some(group) = operators {
        give_to_group(&path, group)?;
    }
    let listener = socket.listener().map_err(system("listen"))?;
    let served = parts.circuits.serve(listener);
    served.map_err(system("watch the socket for programs that want circuits"))?;
    Ok(socket)
}

/// Runs the daemon for this process: until SIGTERM or SIGINT, with `ready` on `out` and a word to the service
/// manager when every socket listens. SIGHUP reads the configuration again, SIGUSR1 opens the audit's file anew.
///
/// # Errors
/// [`ServeError`] when it could not start.
pub fn serve(
    config: Config,
    read_config: ReadConfig,
    sandbox: &sandbox::Options,
    start_worker: StartWorker,
    out: impl Write + Send + 'static,
) -> Result<(), ServeError> {
    // Each circuit to a program of the host needs one.
    if let Err(error) = sys::descriptors::raise_limit() {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    device::keep_own_apart();
    let mut prepared = Prepared::new(config, read_config)?;
    let control_path = control_socket(&prepared.settings.runtime_dir);
    prepared.handed_over = service_manager::control_socket(&control_path)?;
    // Sockets belong to this user from their first moment, and so does what the programs of services make.
    rustix::process::umask(Mode::from_raw_mode(0o077));
    sandbox::enter(sandbox, &prepared.config, &prepared.settings)?;
    log_writer::start().map_err(system("start the log's thread"))?;
    let daemon = Daemon::listen(prepared, start_worker)?;
    daemon.run(|control| {
        let mut signals = Signals::install()?;
        say_ready(out)?;
        notify(&[sd_notify::NotifyState::Ready]);
        #[cfg(feature = "test-support")]
        sandbox::make_forbidden_call_if_told();
        Ok(async move {
            let name = signals.serve(&control).await;
            tracing::info!(signal = name, "ending");
            notify(&[sd_notify::NotifyState::Stopping]);
        })
    })
}

/// Writes the ready line from a thread of its own: its reader may have stopped, and the daemon has its job to do all the same.
fn say_ready(mut out: impl Write + Send + 'static) -> io::Result<()> {
    let (written, is_written) = mpsc::channel();
    let say = move || {
        if let Err(error) = out.write_all(b"ready\n").and_then(|()| out.flush()) {
            tracing::warn!(%error, "cannot write the ready line");
        }
        // The daemon may have gone on without it.
        let _ = written.send(());
    };
    let thread = std::thread::Builder::new().name("ready".to_owned());
    thread.spawn(say)?;
    // What follows is not seen before the line, unless its reader has stopped.
    let _ = is_written.recv_timeout(READY_WAIT);
    Ok(())
}

/// A configuration that holds together, and directories for it.
struct Prepared {
    settings: Settings,
    config: Config,
    read_config: ReadConfig,
    /// The control socket, where the service manager has made it.
    handed_over: Option<UnixListener>,
    keeper: Option<Arc<Keeper>>,
    before: Option<Before>,
}

impl Prepared {
    fn new(config: Config, read_config: ReadConfig) -> Result<Prepared, ServeError> {
        // Checked before anything is made.
        let (settings, book) = checked(&config)?;
        warn_of(&book.check_at_once());
        prepare_directory(&settings.runtime_dir, "--runtime-dir")?;
        if let Some((found, remedy)) = writable_by_all(&settings.runtime_dir) {
            tracing::warn!("{found}: `{remedy}`");
        }
        prepare_directory(&settings.state_dir, "state-dir")?;
        // Before the sandbox, and before the keeper is asked whether a daemon has it.
        set_ended_aside(&settings.runtime_dir)?;
        set_ended_aside(&settings.state_dir)?;
        let keeper = settings.keeper.as_deref();
        let keeper = keeper
            .map(|path| Keeper::attach_within(path, KEEPER_WAIT))
            .transpose()?;
        // Before anything that is kept is changed.
        keeper.as_ref().map_or(Ok(()), device::check_kept)?;
        let before = keeper.as_ref().and_then(restart::note_end_before);
        Ok(Prepared {
            settings,
            config,
            read_config,
            handed_over: None,
            keeper: keeper.map(Arc::new),
            before,
        })
    }
}

/// What a configuration comes to, before the CIDs are filled in: the memory of them is the daemon's that runs.
fn checked(config: &Config) -> Result<(Settings, Rulebook), ServeError> {
    let settings = Settings::of(config).map_err(system("find the runtime directory"))?;
    check_socket_path(&control_socket(&settings.runtime_dir)).map_err(|error| {
        ConfigError::Input {
            place: "the runtime directory".to_owned(),
            error,
        }
    })?;
    let plan = Plan::new(settings.runtime_dir.clone(), Cids::default());
    let book = Rulebook::new(plan, config)?;
    Ok((settings, book))
}

/// The full names of the VMs that a daemon would serve by this configuration. Nothing is made, and no daemon is asked.
///
/// # Errors
/// [`ServeError`] when it would not start.
pub fn dry_run(config: &Config) -> Result<Vec<String>, ServeError> {
    let (_, book) = checked(config)?;
    Ok(book.plan.lines().map(|line| line.full_name()).collect())
}

/// Logs what can hardly be meant, and of no more than a person would read.
fn warn_of(findings: &[Finding]) {
    for finding in findings.iter().take(MAX_TOLD_FINDINGS) {
        tracing::warn!("{finding}");
    }
    if findings.len() > MAX_TOLD_FINDINGS {
        tracing::warn!(
            findings = findings.len(),
            "there are more findings: run `ringdown policy check`"
        );
    }
}

/// Locks the runtime directory, and the state directory if it is another: two daemons would forget each other's CIDs.
fn lock(settings: &Settings) -> Result<Vec<RuntimeLock>, RuntimeError> {
    let mut locks = vec![RuntimeLock::acquire(&settings.runtime_dir)?];
    if settings.state_dir != settings.runtime_dir {
        locks.push(RuntimeLock::acquire(&settings.state_dir)?);
    }
    Ok(locks)
}

/// What stops when it is dropped.
struct Running {
    circuits: Arc<dyn Circuits>,
    net: Arc<dyn NetWorker>,
    worker: Arc<dyn LineWorker>,
}

impl Running {
    fn all_of(started: &Started) -> Running {
        Running {
            circuits: started.circuits.clone(),
            net: started.net.clone(),
            worker: started.worker.clone(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.circuits.stop();
        self.net.stop();
        self.worker.stop();
    }
}

#[cfg(test)]
mod tests;
