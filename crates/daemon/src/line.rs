//! What the control plane asks of the data plane: lines with their names, addresses, rules and counts.
//!
//! The control plane knows the data plane only through [`LineWorker`]. The daemon implements it with the worker
//! that moves bytes; tests implement it with a table in memory.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use config::LineSpec;
use device::{
    AgentSecret, CaptureFilter, CaptureOptions, CircuitProspect, LineProspect, MAX_CAPTURES,
    RingCounts, TakenOver,
};
use policy::{Policy, ServiceEntry};
use runtime::directory::RuntimeError;
use vsock::{RuleReport, SetUpTimes};

use crate::capture::CaptureSender;
use hostside::channels::ChannelState;
use hostside::chardev::OpenError;
use hostside::offers::Commit;

/// Everything that comes into force together: see [`LineWorker::prepare`].
pub struct LineChange {
    /// Lines to open.
    pub added: Vec<LineSpec>,
    /// Whether a line that cannot be opened is left out. Otherwise nothing is changed then.
    pub leaves_out: bool,
    /// Lines to close, by full name.
    pub removed: Vec<String>,
    /// All services of the host that guests can call.
    pub services: Vec<ServiceEntry>,
    /// The rules, and the names that they are about.
    pub policy: PolicyChange,
}

/// A change that is ready to be made, with what others keep of the same configuration: see [`LineWorker::prepare`]. Returns why lines were left out.
pub type PreparedLines<'a> = Box<dyn FnOnce(Commit) -> Result<Vec<LineFault>, LineFault> + 'a>;

/// Rules, and the names that they are about.
#[derive(Debug, Clone)]
pub struct PolicyChange {
    /// The rules.
    pub policy: Arc<Policy>,
    /// The groups that each VM is in from now on, by its full name.
    pub groups: Vec<(String, Vec<String>)>,
    /// The aliases that each VM has from now on, by its full name.
    pub aliases: Vec<(String, Vec<String>)>,
    /// Whether circuits that would not be allowed any more are ended. Else only new ones are asked about.
    pub enforce_existing: bool,
}

/// Why a change was not made, and the VM whose line stands in the way, if one does.
#[derive(Debug)]
pub struct LineFault {
    /// Its full name.
    pub vm: Option<String>,
    /// What stands in the way.
    pub error: LineError,
}

/// What the worker knows about a line at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineStatus {
    /// Full name of the VM.
    pub name: String,
    /// Context identifier of the guest.
    pub cid: u32,
    /// A VMM is connected to the vhost-user socket.
    pub attached: bool,
    /// Why the last VMM's connection, or the guest's device, ended as it should not, until another VMM speaks or a driver runs again.
    pub last_fault: Option<String>,
    /// When that was.
    pub last_fault_at: Option<SystemTime>,
    /// The last VMM was hung up on for that.
    pub cut_off: bool,
    /// A second VMM has connected, and waits until the first leaves.
    pub another_waits: bool,
    /// The VMM has stopped the rings of a guest that has circuits.
    pub paused: bool,
    /// The guest's driver runs its rings.
    pub driver_ready: bool,
    /// Circuits, in any state.
    pub circuits: u32,
    /// Circuits of those whose dial has not been answered yet.
    pub half_open_circuits: u32,
    /// Payload that waits for receivers, in bytes: what the guest sent, and messages of host programs to it.
    pub buffered_bytes: u64,
    /// Messages of the guest that are stored for receivers.
    pub buffered_messages: u64,
    /// Credit that guests and programs hold or may get for what the guest sends, in bytes.
    pub granted_bytes: u64,
    /// What has happened on the line since it was opened.
    pub counters: Counters,
    /// The VM's channels, in the order of its description.
    pub channels: Vec<ChannelState>,
}

/// What would go on if the daemon ended now.
#[derive(Debug, Clone, Default)]
pub struct Prospects {
    /// What would become of lines with rings, by the full name of the VM.
    pub lines: BTreeMap<String, LineProspect>,
    /// What would become of circuits, and of how many.
    pub circuits: BTreeMap<CircuitProspect, u64>,
}

/// What the data plane has counted, beside the counters of its lines.
#[derive(Debug, Clone, Default)]
pub struct Figures {
    /// Of each line.
    pub lines: Vec<LineFigures>,
    /// Of each rule in force, before them those of what holds without one.
    pub rules: Vec<RuleReport>,
    /// How long the worker's thread has run on a processor.
    pub worker_busy: Duration,
}

/// What the data plane has counted of a line.
#[derive(Debug, Clone)]
pub struct LineFigures {
    /// Full name of the VM.
    pub name: String,
    /// Its domain.
    pub domain: String,
    /// How often the guest's driver and the device notified each other.
    pub notified: RingCounts,
    /// Descriptors of the guest's that it gets back when what they hold has been taken.
    pub parked_descriptors: usize,
    /// How long calls to the guest, and its own to the host, took to be answered.
    pub set_up: SetUpTimes,
}

/// What has happened on a line since it was opened, by name. Every count only grows. The worker chooses the names
/// from a fixed set, such as `bytes_from_guest`.
pub type Counters = BTreeMap<&'static str, u64>;

/// Why a socket could not be made.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error("another process listens on {}: choose another path", .0.display())]
    InUse(PathBuf),
    #[error(
        "cannot make a socket at {}: {error}; if its directory was made after the daemon had started, it is outside of the sandbox: start the daemon anew, or name the directory above it in sandbox-paths; else let the daemon's user write there",
        path.display()
    )]
    Denied { path: PathBuf, error: io::Error },
    #[error("cannot make a socket at {}: {error}; choose another path", path.display())]
    Directory { path: PathBuf, error: io::Error },
}

impl SocketError {
    pub(crate) fn at(path: PathBuf, error: io::Error) -> SocketError {
        match error.kind() {
            io::ErrorKind::AddrInUse => SocketError::InUse(path),
            io::ErrorKind::PermissionDenied => SocketError::Denied { path, error },
            _ => SocketError::Directory { path, error },
        }
    }
}

/// Why a line could not be opened or closed.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(
        "a VM named {name:?} exists already: choose another name, or remove it with `ringdown vm rm {name}`"
    )]
    DuplicateName { name: String },
    #[error(
        "CID {cid} belongs to another VM already: choose another, or leave it out and one is assigned"
    )]
    DuplicateCid { cid: u32 },
    #[error("there is no VM named {name:?}: `ringdown vm ls` shows those that exist")]
    Unknown { name: String },
    #[error(
        "there are {MAX_CAPTURES} captures of lines already, which is the most: end one of them first"
    )]
    TooManyCaptures,
    #[error("the line could not be opened or closed: {0}")]
    Io(#[from] io::Error),
}

impl From<OpenError> for LineError {
    fn from(error: OpenError) -> LineError {
        match error {
            OpenError::Socket(RuntimeError::InUse { path } | RuntimeError::NotASocket { path }) => {
                SocketError::InUse(path).into()
            }
            OpenError::Socket(RuntimeError::System { path, error, .. }) => {
                SocketError::at(path, error).into()
            }
            OpenError::Socket(other) => LineError::Io(io::Error::other(other)),
            OpenError::Io(error) => LineError::Io(error),
        }
    }
}

/// The data plane as the control plane sees it. Every method may be called from any thread and returns soon.
pub trait LineWorker: Send + Sync + 'static {
    /// Gets ready for a change what takes long: serial lines and channels of new VMs. What is returned makes the change, all of it in one
    /// moment: every call is judged and carried out under what was in force before, or under what is in force after. The sockets of new lines listen when it
    /// returns; those of closed ones are gone, and their circuits are reset. Before the first change nothing is allowed that needs a rule.
    ///
    /// # Errors
    /// [`LineFault`], now or then, says which socket or name stands in the way. Nothing has changed then, and the commit is dropped.
    fn prepare(&self, change: LineChange) -> Result<PreparedLines<'_>, LineFault>;

    /// The lines and their state, in any order.
    fn lines(&self) -> Vec<LineStatus>;

    /// Waits until the worker has ended another turn, which moves what circuits carry. False if it has ended.
    fn next_turn(&self) -> bool;

    /// What has been counted, beside the counters of the lines.
    fn figures(&self) -> Figures;

    /// What was taken over from the daemon before this one. To be asked once the keeper [runs](keeper::Keeper::run).
    fn taken_over(&self) -> TakenOver {
        TakenOver::default()
    }

    /// What would go on if the daemon ended now.
    fn prospects(&self) -> Prospects {
        Prospects::default()
    }

    /// What goes in front of calls of programs to the agent of this VM from now on.
    fn set_agent_secret(&self, vm: &str, secret: AgentSecret);

    /// Captures what passes the lines, until the sender's reader is dropped, the line that it is about is closed, or it has as much as it wanted.
    ///
    /// # Errors
    /// [`LineError::Unknown`], [`LineError::TooManyCaptures`], [`LineError::Io`] when the worker has stopped.
    fn capture(
        &self,
        filter: CaptureFilter,
        options: CaptureOptions,
        sender: CaptureSender,
    ) -> Result<(), LineError>;

    /// Cuts the circuits with programs of the host, and waits until those of channels have ended, which are killed if they do not. Guests' circuits go on.
    /// Returns how many circuits it cuts.
    fn end_host_calls(&self) -> usize {
        0
    }

    /// Closes every line, removes every socket and ends the worker's threads.
    fn stop(&self);
}
