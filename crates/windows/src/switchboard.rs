//! Makes zero-copy circuits: the host's switchboard.
//!
//! # Theory of operation
//!
//! A circuit of this kind is an ordinary one to which a *window* of shared memory is attached. So everything about it is decided as for any other: the policy when the call is made, the
//! limits, the audit. The stream stays the truth: here it is only found out whether both programs of a circuit that the data plane carries want a window, and whether there is one
//! ([`board`]). Otherwise the stream carries the bytes.
//!
//! - In a guest its agent speaks for the programs: it calls the port of [`wire::switchboard::link`] ([`session`]).
//! - On the host programs come to a socket beside the control socket, as [`wire::switchboard::program`] says ([`program`]).
//! - Windows are the [`pool`]'s: which there are, whose they are, and when one may be used again.
//!
//! One thread does this, with a runtime of its own, as taking a window may have to wait for a VMM. While nothing happens it sleeps: there are timers only for halves that wait for
//! the other and for holders that were asked to let go.

mod board;
mod effects;
mod lines;
pub mod plane;
pub mod pool;
mod program;
mod session;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use device::{Called, CircuitFilter, CircuitSnapshot, Dialer, Endpoint, ServiceCall};
use policy::full_name;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use vsock::{CircuitId, CircuitState, Reason};

pub use self::board::BoardCounts;
use self::board::{Board, Effect};
use self::plane::DataPlane;
use self::pool::{WindowId, WindowPool, WindowStatus};
use self::program::{Delivery, Listener};
use self::session::SessionHandle;
use runtime::thread::RuntimeThread;

/// Calls of guests that wait for the switchboard's thread. Further ones are refused at once.
const MAX_WAITING_CALLS: usize = 1024;

/// Threads for what cannot be done without waiting: the pool, and questions to the data plane. The VMM of each VM may hold up one, when the VM's agent
/// comes, beside those that take windows.
const MAX_BLOCKING_THREADS: usize = 512;

/// Windows that are being taken at once, each of which may have to wait for a VMM and two guests; more wait. The other threads are for what never waits.
const MAX_TAKEN_AT_ONCE: usize = 48;

/// Of those, such for circuits of one VM; more get streams. No VM has as many windows of one sort.
const MAX_TAKEN_AT_ONCE_PER_VM: usize = 8;

/// Of those, such for circuits of the same two VMs: one VMM that is silent leaves its peer places for others.
const MAX_TAKEN_AT_ONCE_PER_PAIR: usize = 4;

/// How long one half of a circuit waits for the other.
pub const PAIRING_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a holder that was asked to let go of a window may take.
pub const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// The most circuits that are listed at once.
pub const MAX_LISTED: usize = 10_000;

/// The pages of a window, in bytes: those of a guest's device.
pub const PAGE_LEN: u64 = 2 << 20;

/// A circuit, as it is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedCircuit {
    /// What the data plane knows. If the stream is over and only the window is left, what it knew, with nothing counted.
    pub circuit: CircuitSnapshot,
    /// Whether it has a window.
    pub is_zero_copy: bool,
    /// Whether only the window is left.
    pub is_draining: bool,
}

/// Circuits, as they are listed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CircuitList {
    /// The circuits.
    pub circuits: Vec<ListedCircuit>,
    /// How many more there are.
    pub more: usize,
}

/// Figures of the switchboard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SwitchboardReport {
    /// What has happened.
    pub counts: BoardCounts,
    /// Agents that have a session.
    pub sessions: usize,
    /// Places where programs of the host listen.
    pub listeners: usize,
}

/// What the control plane asks about circuits. Its methods may wait for the data plane.
pub trait Circuits: Send + Sync + 'static {
    /// Serves programs of the host at this socket.
    fn serve(&self, listener: UnixListener) -> io::Result<()>;

    /// Circuits that pass the filter.
    fn list(&self, filter: &CircuitFilter) -> CircuitList;

    /// Ends a circuit: both sides see a reset, and its window is taken away. Returns whether it was there.
    fn end(&self, id: CircuitId) -> bool;

    /// All windows.
    fn windows(&self) -> Vec<WindowStatus>;

    /// Circuits that the policy does not allow any more have been ended: takes their windows away.
    fn enforce(&self);

    /// A VM has been removed, by its full name: takes windows away that were its and another's.
    fn removed(&self, vm: &str);

    /// What has been done.
    fn report(&self) -> SwitchboardReport;

    /// Ends everything.
    fn stop(&self);
}

/// The host's switchboard. Dropping it ends it.
pub struct Switchboard {
    shared: Arc<Shared>,
    calls: mpsc::Sender<ServiceCall>,
    thread: RuntimeThread,
}

struct Shared {
    pool: Arc<dyn WindowPool>,
    plane: OnceLock<Arc<dyn DataPlane>>,
    runtime: OnceLock<Handle>,
    state: Mutex<State>,
    /// Held while the board takes an input and its effects are carried out. Taken before `state`.
    order: Mutex<()>,
    next_ticket: AtomicU64,
    takers: Semaphore,
}

#[derive(Default)]
struct State {
    board: Board,
    /// By the full name of the VM.
    sessions: HashMap<String, SessionHandle>,
    /// By port, and VM if it is for one.
    listeners: HashMap<(u32, Option<String>), Listener>,
    /// Connections to programs of the host that are being decided about, by ticket.
    deliveries: HashMap<u64, Delivery>,
    /// Files of windows that are about to be handed to programs of the host.
    files: HashMap<(WindowId, u64), OwnedFd>,
    /// Of which VMs, in order of their full names, are the circuits for which windows are being taken.
    taking: Vec<Vec<String>>,
    /// Our ends of leases, by ticket.
    leases: HashMap<u64, Arc<UnixStream>>,
}

impl Switchboard {
    /// Starts a switchboard with these windows.
    pub fn start(pool: Arc<dyn WindowPool>) -> io::Result<Switchboard> {
        let shared = Arc::new(Shared {
            pool,
            plane: OnceLock::new(),
            runtime: OnceLock::new(),
            state: Mutex::default(),
            order: Mutex::default(),
            next_ticket: AtomicU64::new(1),
            takers: Semaphore::new(MAX_TAKEN_AT_ONCE),
        });
        let (calls, waiting) = mpsc::channel(MAX_WAITING_CALLS);
        let served = shared.clone();
        let thread =
            RuntimeThread::start("switchboard", MAX_BLOCKING_THREADS, move |stopped| async {
                tokio::select! {
                    () = take_calls(served, waiting) => {}
                    _ = stopped => {}
                }
            })?;
        // It is set once.
        let _ = shared.runtime.set(thread.runtime().clone());
        Ok(Switchboard {
            shared,
            calls,
            thread,
        })
    }

    /// Takes the calls that are the switchboard's, and leaves the others to this dialer. It never waits.
    pub fn dialer(&self, others: Dialer) -> Dialer {
        let calls = self.calls.clone();
        Box::new(move |call| match call.called {
            Called::Switchboard | Called::Listener => {
                if let Err(error) = calls.try_send(call) {
                    error.into_inner().reply.failed(Reason::BacklogFull);
                }
            }
            Called::Service(_) | Called::Directory => others(call),
        })
    }

    /// Sets the data plane, once. Until then there are no circuits.
    pub fn set_plane(&self, plane: Arc<dyn DataPlane>) {
        // A second one is the first one's own mistake, and changes nothing.
        let _ = self.shared.plane.set(plane);
    }
}

impl Drop for Switchboard {
    fn drop(&mut self) {
        self.thread.stop();
    }
}

async fn take_calls(shared: Arc<Shared>, mut calls: mpsc::Receiver<ServiceCall>) {
    while let Some(call) = calls.recv().await {
        match call.called {
            Called::Listener => program::called(&shared, call),
            _ => session::called(&shared, call),
        }
    }
}

impl Circuits for Switchboard {
    fn serve(&self, listener: UnixListener) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let _runtime = self.thread.runtime().enter();
        let listener = tokio::net::UnixListener::from_std(listener)?;
        self.shared
            .spawn(program::serve(self.shared.clone(), listener));
        Ok(())
    }

    fn list(&self, filter: &CircuitFilter) -> CircuitList {
        let Some(plane) = self.shared.plane() else {
            return CircuitList::default();
        };
        let (circuits, more) = plane.list_circuits(filter.clone(), MAX_LISTED);
        let mut windowed: HashMap<CircuitId, CircuitSnapshot> = {
            let state = sys::lock(&self.shared.state);
            let windowed = state.board.windowed();
            windowed
                .map(|(known, _)| (known.id, known.clone()))
                .collect()
        };
        let mut list = CircuitList {
            circuits: circuits
                .into_iter()
                .map(|circuit| ListedCircuit {
                    is_zero_copy: windowed.remove(&circuit.id).is_some(),
                    is_draining: false,
                    circuit,
                })
                .collect(),
            more,
        };
        // What is not among the first so many may be there all the same.
        let is_over = |known: &CircuitSnapshot| more == 0 || plane.show_circuit(known.id).is_none();
        let left = windowed.into_values().filter(|known| passes(filter, known));
        let draining = left.filter(is_over).map(|known| ListedCircuit {
            circuit: CircuitSnapshot {
                state: CircuitState::Closing,
                queued: [0; 2],
                credit: [0; 2],
                ..known
            },
            is_zero_copy: true,
            is_draining: true,
        });
        list.circuits.extend(draining);
        list.circuits.sort_by_key(|listed| listed.circuit.id.index);
        list
    }

    fn end(&self, id: CircuitId) -> bool {
        let ended = self
            .shared
            .plane()
            .is_some_and(|plane| plane.end_circuit(id));
        let is_known = |state: &State| state.board.windowed().any(|(known, _)| known.id == id);
        let has_window = is_known(&sys::lock(&self.shared.state));
        self.shared.apply(|board| board.revoke(id));
        ended || has_window
    }

    fn windows(&self) -> Vec<WindowStatus> {
        self.shared.pool.list()
    }

    fn enforce(&self) {
        let Some(plane) = self.shared.plane() else {
            return;
        };
        let known: Vec<CircuitId> = {
            let state = sys::lock(&self.shared.state);
            let windowed = state.board.windowed().filter(|(_, is_revoked)| !is_revoked);
            let windowed = windowed.map(|(known, _)| known.id);
            // One that is about to get a window must not get it either.
            windowed.chain(state.board.waiting()).collect()
        };
        for id in known {
            // Whether one whose stream is over is allowed is no longer known.
            let is_allowed = plane
                .show_circuit(id)
                .is_some_and(|known| known.state != CircuitState::Closing);
            if !is_allowed {
                tracing::info!(circuit = %CircuitName(id), "taking a window away: its circuit is not allowed any more, or over");
                self.shared.apply(|board| board.revoke(id));
            }
        }
    }

    fn removed(&self, vm: &str) {
        self.shared.apply(|board| board.removed(vm));
    }

    fn report(&self) -> SwitchboardReport {
        let state = sys::lock(&self.shared.state);
        SwitchboardReport {
            counts: state.board.counts,
            sessions: state.sessions.len(),
            listeners: state.listeners.len(),
        }
    }

    fn stop(&self) {
        self.thread.stop();
    }
}

/// The number of a circuit, as people read and write it: its position and the number of its use, `12-3054`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CircuitName(pub CircuitId);

impl CircuitName {
    /// Reads one.
    pub fn parse(text: &str) -> Option<CircuitName> {
        let (index, generation) = text.split_once('-')?;
        let number = |digits: &str| {
            let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| digits.parse().ok()).flatten()
        };
        Some(CircuitName(CircuitId {
            index: number(index)?,
            generation: number(generation)?,
        }))
    }
}

impl std::fmt::Display for CircuitName {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}-{}", self.0.index, self.0.generation)
    }
}

fn passes(filter: &CircuitFilter, circuit: &CircuitSnapshot) -> bool {
    let of_vm = |vm: &String| {
        [&circuit.caller, &circuit.callee].into_iter().any(
            |end| matches!(end, Endpoint::Vm { domain, name, .. } if full_name(domain, name) == *vm),
        )
    };
    let port = match &circuit.dialled {
        Endpoint::Vm { port, .. }
        | Endpoint::Service { port, .. }
        | Endpoint::Listener { port } => Some(*port),
        _ => None,
    };
    filter.vm.as_ref().is_none_or(of_vm) && filter.port.is_none_or(|wanted| port == Some(wanted))
}

impl Shared {
    fn plane(&self) -> Option<Arc<dyn DataPlane>> {
        self.plane.get().cloned()
    }

    fn ticket(&self) -> u64 {
        self.next_ticket.fetch_add(1, Ordering::Relaxed)
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = self.runtime.get() {
            runtime.spawn(task);
        }
    }

    /// Has a thread that may wait do something with the pool.
    fn with_pool(
        self: &Arc<Self>,
        job: impl FnOnce(&dyn WindowPool) + Send + 'static,
    ) -> Option<tokio::task::JoinHandle<()>> {
        let shared = self.clone();
        let runtime = self.runtime.get()?;
        Some(runtime.spawn_blocking(move || job(shared.pool.as_ref())))
    }

    /// Gives the board an event and carries out its answers. Of two at once the board takes one first, and all of that is carried out first: what
    /// takes a window away must not come before what gives it.
    fn apply(self: &Arc<Self>, event: impl FnOnce(&mut Board) -> Vec<Effect>) {
        // Nothing panics while it holds the lock.
        let _order = sys::lock(&self.order);
        let mut effects = VecDeque::from(event(&mut sys::lock(&self.state).board));
        while let Some(effect) = effects.pop_front() {
            if let Some(event) = self.perform(effect) {
                effects.extend(event(&mut sys::lock(&self.state).board));
            }
        }
    }
}

/// Has a thread that may wait ask the data plane something.
async fn ask<T: Send + 'static>(
    shared: &Shared,
    question: impl FnOnce(&dyn DataPlane) -> T + Send + 'static,
) -> Option<T> {
    let plane = shared.plane()?;
    let asked = tokio::task::spawn_blocking(move || question(plane.as_ref()));
    asked.await.ok()
}

#[cfg(test)]
mod tests;
