//! What the switchboard asks of the pool of windows, and what the pool answers.
//!
//! The pool knows which windows there are, whose they are, and in which state each is. The switchboard knows circuits: it *takes* a window
//! for one, learns from both parties that they have let go of it, and says so. It never looks into a window itself.

use std::io;
use std::os::fd::OwnedFd;

use thiserror::Error;
/// The name by which the host and a guest's agent call a window: the UUID of its info block.
pub use wire::switchboard::Hex16 as WindowId;
pub use wire::switchboard::Kind;

/// The parties of a circuit's window. VMs are named in full (`blue/db`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Pair {
    /// The host's programs of one user, and a VM.
    Host {
        /// The VM.
        vm: String,
        /// The user. A window that one user had is never given to another, whose program might still have it mapped.
        uid: u32,
    },
    /// Two VMs, in either order.
    Vms {
        /// One.
        a: String,
        /// The other.
        b: String,
    },
}

/// One of the two that have a window.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Party {
    /// A program of the host.
    Host,
    /// A VM, by its full name.
    Vm(String),
}

/// A window for one circuit: zeroed and formatted for this generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lent {
    /// Which.
    pub uuid: WindowId,
    /// The number of this use of it.
    pub generation: u64,
    /// What both sides find in its header.
    pub nonce: [u8; 16],
    /// Bytes of each of the two rings: a power of two, at most what was asked for.
    pub ring_len: u64,
    /// Where the window begins in the host's file. In the guest it begins where its device does.
    pub offset: u64,
    /// What its rings carry.
    pub kind: Kind,
}

/// Why there is no window. The circuit goes on as a stream then.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoWindow {
    #[error("there are no windows for these two")]
    None,
    #[error("no window is free")]
    Busy,
    #[error("the ring asked for is too small")]
    TooSmall,
    #[error("a window could not be made")]
    Failed,
}

/// How a window stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WindowState {
    /// An agent that has to have it has not shown it yet.
    Absent,
    /// The next circuit of its pair may have it.
    Free,
    /// A circuit has it, or had it and not both parties have let go of it.
    InUse,
    /// A party has not let go of it in time: it is not given away until that party's agent confirms that it has.
    Quarantined,
}

impl WindowState {
    /// As the API and the command line have it.
    pub fn as_str(self) -> &'static str {
        match self {
            WindowState::Absent => "absent",
            WindowState::Free => "free",
            WindowState::InUse => "in use",
            WindowState::Quarantined => "quarantined",
        }
    }
}

/// Whose a window is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Owners {
    /// The host's and a VM's.
    Host {
        /// The VM.
        vm: String,
        /// The user of the host that owns it, once there is one.
        uid: Option<u32>,
    },
    /// Two VMs'.
    Vms {
        /// One.
        a: String,
        /// The other.
        b: String,
    },
}

/// A window as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowStatus {
    /// Which.
    pub uuid: WindowId,
    /// Whose.
    pub owners: Owners,
    /// Its size, in bytes.
    pub len: u64,
    /// How it stands.
    pub state: WindowState,
    /// The number of its latest use.
    pub generation: u64,
}

/// The windows of all VMs. Its methods may block (a system call, a VMM that is asked to add a device): they are called where that may be.
pub trait WindowPool: Send + Sync + 'static {
    /// A session of this VM's agent has begun. What the agent does not name with [`seen`](Self::seen) it does not have. Windows that can be added to a
    /// running VM are added now.
    fn arrived(&self, vm: &str);

    /// The agent has a device of this window, which is not mapped in the guest: it counts as released by this VM, also if it was
    /// quarantined because of it. `len` is the size of the device. Returns whether it is a window of this VM, of this size.
    fn seen(&self, vm: &str, uuid: WindowId, len: u64) -> bool;

    /// The session of this VM's agent is over. Windows that this VM has not released are quarantined, the others absent, until the next one has seen them.
    fn gone(&self, vm: &str);

    /// A free window for a circuit of this pair. `max_ring` is the most that both sides want, in bytes. May block for as long as it takes to add a
    /// device to a VM and for its agent to see it; in that time other methods must go on to work.
    fn take(&self, pair: &Pair, kind: Kind, max_ring: u64) -> Result<Lent, NoWindow>;

    /// This party has let go of the window: the host's program has ended its lease, or the VM's agent says that it is no longer mapped. When
    /// both have, it is zeroed and free again. Words about another generation, or of another than a party, change nothing: returns whether
    /// this did.
    fn released(&self, uuid: WindowId, generation: u64, by: &Party) -> bool;

    /// This party has not let go of the window in time. It may still say so later, with `seen` or `released`.
    fn quarantine(&self, uuid: WindowId, generation: u64, by: &Party);

    /// The window's file, open for reading and writing: for the host's program that has the circuit.
    fn file(&self, uuid: WindowId) -> io::Result<OwnedFd>;

    /// All windows.
    fn list(&self) -> Vec<WindowStatus>;
}
