//! Programs that know nothing of Ringdown, and whose connections it carries: `ringdown run -- COMMAND`.
//!
//! # Theory of operation
//!
//! The command runs under a filter ([`sys::supervise`]) that stops `socket(AF_VSOCK)`, `connect`, and the two calls that ask for addresses. This
//! process, its parent, answers them:
//!
//! - `socket(AF_VSOCK)` never reaches the kernel. The program is given an AF_UNIX stream socket in its place.
//! - `connect` of such a socket to a CID and port: this process takes a descriptor *of the same socket*, connects it to the host socket of the VM
//!   that has the CID, says `CONNECT <port>`, reads the answer, and then has the program's call succeed. So the socket stays the one that it was: copies of
//!   the descriptor, other processes that have it, an epoll that watches it, options and `O_NONBLOCK` are none of our business.
//! - `connect` of an AF_UNIX socket of the program's own to a path that `--unix` names: likewise.
//! - Once connected, an abstract name is bound to the socket that names the peer ([`address::CarriedName`]). `getpeername` and
//!   `getsockname` read it there; nothing has to be remembered here.
//! - Everything else goes on to the kernel.
//!
//! An AF_UNIX socket connects only once. After a refusal the program's socket is shut down, and only if it tries again with the same socket, a new one is
//! put in its place, at each descriptor of that process.
//!
//! `connect` returns when it is known what has become of the call, also on a non-blocking socket, and until then no signal interrupts it.

mod address;
mod dial;
mod route;
mod supervisor;

use std::io;
use std::process::Command;
use std::sync::Arc;

use sys::foreground::Foreground;
use sys::supervise::{self, SpawnError, Supervision, SystemCall, Watched, When};

pub use dial::DialError;
pub use route::{MAX_ROUTES, Route};
pub use supervisor::{Directory, Settings};

use supervisor::Supervisor;

/// What stops on its way to the kernel. Everything else is as fast as ever.
const SUPERVISION: Supervision<'_> = Supervision {
    watched: &WATCHED,
    missing: &[],
    may_gain_privileges: false,
};

const WATCHED: [Watched; 4] = [
    Watched {
        call: SystemCall::Socket,
        when: When::Are(&[(0, address::AF_VSOCK as u32)]),
    },
    Watched {
        call: SystemCall::Connect,
        when: When::Always,
    },
    Watched {
        call: SystemCall::GetSockName,
        when: When::Always,
    },
    Watched {
        call: SystemCall::GetPeerName,
        when: When::Always,
    },
];

/// Why the command's end is not known.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot run {program:?}: {source}{}", hint(source))]
    Spawn { program: String, source: SpawnError },
    #[error("cannot {what}: {source}")]
    Local {
        /// What it could not do.
        what: &'static str,
        source: io::Error,
    },
}

fn hint(error: &SpawnError) -> &'static str {
    match error {
        SpawnError::Supervision(error)
            if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) =>
        {
            "; this is inside another `ringdown run`, or in a container whose manager supervises it, and there can be one supervisor only"
        }
        _ => "",
    }
}

impl RunError {
    /// The exit code, as other programs have it that run a command: 127 if there is none, 126 if it cannot be executed.
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Spawn {
                source: SpawnError::Program(error),
                ..
            } if error.kind() == io::ErrorKind::NotFound => 127,
            RunError::Spawn {
                source: SpawnError::Program(_),
                ..
            } => 126,
            _ => crate::failure::FAILURE,
        }
    }
}

/// Runs the command, and returns its exit code, or 128 and the signal that ended it. The process is expected to exit then.
pub fn run(command: Command, settings: Settings) -> Result<u8, RunError> {
    let local = |what| move |source| RunError::Local { what, source };
    let foreground = Foreground::begin().map_err(local("take the command's signals"))?;
    let program = command.get_program().to_string_lossy().into_owned();
    let spawned = supervise::spawn(command, &SUPERVISION);
    let (child, listener) = spawned.map_err(|source| RunError::Spawn { program, source })?;
    let supervisor = Arc::new(Supervisor::new(listener, settings));
    let supervise = move || supervisor.run();
    let thread = std::thread::Builder::new().name("supervisor".to_owned());
    thread.spawn(supervise).map_err(local("start a thread"))?;
    foreground
        .attend(&child)
        .map_err(local("wait for the command"))
}
