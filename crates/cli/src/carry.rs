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
//! - Once connected, an abstract name is bound to the socket that says who is at the other end ([`address::CarriedName`]). `getpeername` and
//!   `getsockname` read it there; nothing has to be remembered here.
//! - Everything else goes on to the kernel.
//!
//! An AF_UNIX socket connects only once. After a refusal the program's socket is shut down, and only if it tries again with the same socket, a new one is
//! put in its place, at each descriptor of that process.
//!
//! `connect` returns when it is known what has become of the call, also on a non-blocking socket, and until then no signal interrupts it.

mod address;
mod dial;
mod process;
mod route;
mod supervisor;

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::Arc;

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpgrp, pidfd_open, pidfd_send_signal,
    set_child_subreaper, wait,
};
use rustix::termios::tcgetpgrp;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use sys::supervise::{self, SpawnError, SystemCall, Watched};

pub use route::{MAX_ROUTES, Route};
pub use supervisor::{Directory, Settings};

use crate::exec::ignored_signals;
use supervisor::Supervisor;

/// What stops on its way to the kernel. Everything else is as fast as ever.
const WATCHED: [Watched; 4] = [
    Watched {
        call: SystemCall::Socket,
        first_argument: Some(address::AF_VSOCK as u32),
    },
    Watched {
        call: SystemCall::Connect,
        first_argument: None,
    },
    Watched {
        call: SystemCall::GetSockName,
        first_argument: None,
    },
    Watched {
        call: SystemCall::GetPeerName,
        first_argument: None,
    },
];

/// The signals that are the command's. Others it has in common with this process, such as those of the terminal, or they are not sent.
const FORWARDED: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// Why the command's end is not known.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It was not started.
    #[error("cannot run {program:?}: {source}{}", hint(source))]
    Spawn {
        /// The command.
        program: String,
        /// Why.
        source: SpawnError,
    },
    /// This process could not do its part.
    #[error("cannot {what}: {source}")]
    Local {
        /// What it could not do.
        what: &'static str,
        /// The system's reason.
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
    // Where a process may look into its descendants only, they have to stay that when their parents end.
    set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|errno| local("adopt the command's processes")(errno.into()))?;
    let ignored = ignored_signals();
    let wanted = FORWARDED
        .into_iter()
        .filter(|signal| ignored & (1 << (signal - 1)) == 0);
    // Before the command is there, so that no signal is lost; they wait until the command is there.
    let signals = Signals::new(wanted).map_err(local("take signals"))?;
    let program = command.get_program().to_string_lossy().into_owned();
    let spawned = supervise::spawn(command, &WATCHED);
    let (child, listener) = spawned.map_err(|source| RunError::Spawn { program, source })?;
    let pid = Pid::from_child(&child);
    let supervisor = Arc::new(Supervisor::new(listener, settings));
    let supervise = move || supervisor.run();
    start("supervisor", supervise).map_err(local("start a thread"))?;
    forward(signals, pid).map_err(local("forward signals"))?;
    let status = wait_for(pid).map_err(local("wait for the command"))?;
    Ok(exit_code(status))
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(work).map(drop)
}

fn forward(mut signals: Signals, pid: Pid) -> io::Result<()> {
    let command = pidfd_open(pid, PidfdFlags::empty())?;
    start("signals", move || {
        for number in signals.forever() {
            let Some(signal) = Signal::from_named_raw(number) else {
                continue;
            };
            // Keys of the terminal are for the whole foreground group, the command in it.
            let is_typed = matches!(signal, Signal::INT | Signal::QUIT) && is_in_foreground();
            if !is_typed {
                // A process that has ended is as good.
                let _ = pidfd_send_signal(&command, signal);
            }
        }
    })
}

fn is_in_foreground() -> bool {
    let terminal = std::fs::File::open("/dev/tty");
    terminal.is_ok_and(|terminal| tcgetpgrp(&terminal).is_ok_and(|group| group == getpgrp()))
}

/// Waits until the command has ended, and meanwhile buries those of its processes that came to this one when their parents ended.
fn wait_for(pid: Pid) -> io::Result<ExitStatus> {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended == pid => {
                return Ok(ExitStatus::from_raw(status.as_raw()));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    // Both are below 256 by the definition of a status, and signals below 128.
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.unwrap_or(255) as u8
}
