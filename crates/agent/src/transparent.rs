//! Programs that know nothing of Ringdown, in a guest without a network: `ringdown-agent run -- PROGRAM`. Their TCP connections become circuits, through an egress service of the host.
//!
//! # Theory of operation
//!
//! The program runs under a filter ([`sys::supervise`]) that stops the calls about AF_INET and AF_INET6 sockets. This process, its parent, answers them:
//!
//! - `socket` of a TCP socket gives the program one of AF_VSOCK in its place ([`way::Way`]). That one file is the program's socket from the beginning to the end: whatever
//!   was done with its descriptor before it is connected (an epoll, a copy, a fork) holds. Nothing stands in the path of its bytes.
//! - `connect`: the address is read once. This process announces to the egress service where the next call of this very socket is to go ([`way::Way::announce`]), takes a descriptor of the same
//!   socket, and connects it. Egress answers when it is known what has become of it, and what the failure means comes over the connection of the announcement. So a
//!   non-blocking socket is being connected for as long as it really is. A program that changes its memory meanwhile changes nothing.
//! - Where announcements are not offered (this process is not root's, the host is older), this process says on the socket where to, reads the answer to its
//!   last byte and not further, and then has the program's call succeed, or fail with what the answer means ([`way::open`]), also of a non-blocking socket.
//! - `socket` of a UDP socket gives the program one of the kernel's, of a network namespace in which every address has the resolver ([`resolver`]) at port 53, and no foreign one anything else
//!   ([`datagrams`]). Where there are no such namespaces, it is one end of a pair, whose other end the resolver has.
//! - Whatever server a program asks at port 53, the resolver answers (unless that is switched off: then it passes questions on, over TCP, to that server, [`servers`]), unless one of the guest's own has that address of the loopback, with addresses that stand for names ([`names`]). `connect` to such an address asks egress for the name, so
//!   that the policy decides by the name.
//! - An address of the guest's own is its kernel's: a socket of the kernel's takes the program's place at `connect`, `bind` or `listen`.
//!   A kernel without INET has none: then both ends are AF_UNIX sockets ([`loopback`]), and `accept` is answered, too.
//! - `getsockname`, `getpeername`, `getsockopt` and `setsockopt` say what fits. What they say is remembered by the kernel's number of the socket ([`sockets`]).
//! - Everything else goes on to the kernel.
//!
//! This is compatibility and no boundary: there are ways past the filter, and what a guest may call is decided on the host. If this process ends, the calls that stop
//! fail with `ENOSYS`; circuits that are there go on.

pub mod activated;
mod address;
mod datagrams;
mod dns;
pub mod doctor;
pub(crate) mod loopback;
mod names;
mod ready;
mod resolver;
mod servers;
mod sockets;
mod supervisor;
pub mod unit;
mod way;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use sys::foreground::{Background, Foreground};
use sys::supervise::{self, SpawnError, Supervision, SystemCall, Watched, When};
use wire::directory::Request;

use crate::directory;
pub use datagrams::SUBCOMMAND;
use datagrams::Starting;
use supervisor::{Manner, Supervisor};
use way::{VsockWay, Way};

/// The service that is asked for, unless another is named.
const DEFAULT_SERVICE: &str = "egress";

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
const SOL_IP: u32 = 0;
const SOL_SOCKET: u32 = 1;
const SOL_TCP: u32 = 6;
const SOL_IPV6: u32 = 41;
const SO_TYPE: u32 = 3;
const SO_ERROR: u32 = 4;
const SO_PROTOCOL: u32 = 38;
const SO_DOMAIN: u32 = 39;
const SO_REUSEPORT: u32 = 15;

/// The request of `ioctl` for how much is there to be read.
const FIONREAD: u32 = 0x541b;

const fn watch(call: SystemCall, when: When) -> Watched {
    Watched { call, when }
}

/// What stops on its way to the kernel. Everything else is as fast as ever.
const WATCHED: [Watched; 24] = [
    watch(SystemCall::SendTo, When::Points(4)),
    watch(SystemCall::ReceiveFrom, When::Points(4)),
    watch(SystemCall::Socket, When::Are(&[(0, AF_INET)])),
    watch(SystemCall::Socket, When::Are(&[(0, AF_INET6)])),
    watch(SystemCall::Connect, When::Always),
    watch(SystemCall::Bind, When::Always),
    watch(SystemCall::Listen, When::Always),
    watch(SystemCall::GetSockName, When::Always),
    watch(SystemCall::GetPeerName, When::Always),
    watch(SystemCall::SetSockOpt, When::Are(&[(1, SOL_IP)])),
    watch(SystemCall::SetSockOpt, When::Are(&[(1, SOL_TCP)])),
    watch(SystemCall::SetSockOpt, When::Are(&[(1, SOL_IPV6)])),
    watch(SystemCall::GetSockOpt, When::Are(&[(1, SOL_IP)])),
    watch(SystemCall::GetSockOpt, When::Are(&[(1, SOL_TCP)])),
    watch(SystemCall::GetSockOpt, When::Are(&[(1, SOL_IPV6)])),
    watch(
        SystemCall::GetSockOpt,
        When::Are(&[(1, SOL_SOCKET), (2, SO_TYPE)]),
    ),
    watch(
        SystemCall::GetSockOpt,
        When::Are(&[(1, SOL_SOCKET), (2, SO_PROTOCOL)]),
    ),
    watch(
        SystemCall::GetSockOpt,
        When::Are(&[(1, SOL_SOCKET), (2, SO_DOMAIN)]),
    ),
    watch(
        SystemCall::GetSockOpt,
        When::Are(&[(1, SOL_SOCKET), (2, SO_ERROR)]),
    ),
    watch(
        SystemCall::GetSockOpt,
        When::Are(&[(1, SOL_SOCKET), (2, SO_REUSEPORT)]),
    ),
    watch(
        SystemCall::SetSockOpt,
        When::Are(&[(1, SOL_SOCKET), (2, SO_REUSEPORT)]),
    ),
    watch(SystemCall::IoControl, When::Are(&[(1, FIONREAD)])),
    watch(SystemCall::Accept, When::Always),
    watch(SystemCall::Accept4, When::Always),
];

/// How many of them, at the beginning, are about datagram sockets that are not the kernel's own.
const WATCHED_FOR_PAIRS: usize = 2;

/// How many of them, at the end, are about listeners that are not the kernel's own.
const WATCHED_FOR_LISTENERS: usize = 2;

/// What is done about a program's calls.
fn supervision(has_pairs: bool, has_tcp: bool) -> Supervision<'static> {
    let unneeded = if has_pairs { 0 } else { WATCHED_FOR_PAIRS };
    let end = WATCHED.len() - if has_tcp { WATCHED_FOR_LISTENERS } else { 0 };
    Supervision {
        watched: &WATCHED[unneeded..end],
        // It makes the calls above past the filter. Programs do without it.
        missing: &[SystemCall::IoUringSetup],
        may_gain_privileges: true,
    }
}

/// What is run, and how.
#[derive(Debug, PartialEq, Eq)]
pub struct Run {
    program: OsString,
    arguments: Vec<OsString>,
    egress: Egress,
    is_verbose: bool,
    /// Whether the agent answers questions for names.
    resolves: bool,
    /// Whether it goes on in the background when the program has ended, and which file has the number of its main process then.
    background: Option<Option<PathBuf>>,
}

/// Which service is the way out.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Egress {
    /// By its name: the host is asked for the port.
    Named(String),
    /// By its port.
    Port(u32),
}

impl Egress {
    /// The word behind `--egress`.
    fn parse(value: Option<OsString>) -> Result<Egress, String> {
        let words = "--egress expects the name or the vsock port of a service";
        let text = value.as_deref().and_then(|value| value.to_str());
        let text = text.filter(|text| !text.is_empty()).ok_or(words)?;
        match text.parse() {
            Ok(u32::MAX) => Err(words.to_owned()),
            Ok(port) => Ok(Egress::Port(port)),
            Err(_) => Ok(Egress::Named(text.to_owned())),
        }
    }
}

/// Why the program's end is not known.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("no way out of this guest: {0}")]
    NoWay(String),
    #[error("cannot run {program:?}: {source}{}", hint(source))]
    Spawn {
        program: OsString,
        source: SpawnError,
    },
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
            "; this is inside another `ringdown-agent run`, or in a container whose manager supervises it, and there can be one supervisor only"
        }
        SpawnError::Supervision(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            "; it was ended before it began, as by a filter of system calls that forbids seccomp (SystemCallFilter= of its service)"
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
            _ => 1,
        }
    }
}

/// Whether this guest has what the sockets of programs become.
///
/// # Errors
/// What is missing, and what to do.
fn check_vsock() -> Result<(), String> {
    if !crate::host_socket::has_vsock() {
        return Err(
            "this guest has no vsock device (its line is serial?): use `ringdown-agent forward --listen 127.0.0.1:3128 --to-host 3128`, 3128 being the port of egress, and that address as the proxy"
                .to_owned(),
        );
    }
    let tried = VsockWay::new(0).socket();
    tried
        .map(drop)
        .map_err(|error| format!("there are no vsock sockets in this guest: {error}"))
}

impl Run {
    /// Reads `[--egress NAME|PORT] [--verbose] [--resolver names|off] [--background [--pid-file FILE]] [--] PROGRAM [ARGUMENT]...`. Nothing if help is asked for.
    ///
    /// # Errors
    /// What was expected, in words.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Option<Run>, String> {
        let mut arguments = arguments.into_iter();
        let (mut egress, mut is_verbose) = (Egress::Named(DEFAULT_SERVICE.to_owned()), false);
        let (mut resolves, mut is_background, mut pid_file) = (true, false, None);
        let program = loop {
            let next = arguments.next().ok_or("run expects a program")?;
            match next.to_str() {
                Some("--help" | "-h") => return Ok(None),
                Some("--verbose") => is_verbose = true,
                Some("--resolver") => {
                    resolves = match arguments.next().as_deref().and_then(|word| word.to_str()) {
                        Some("names") => true,
                        Some("off") => false,
                        _ => return Err("--resolver expects names or off".to_owned()),
                    };
                }
                Some("--background") => is_background = true,
                Some("--pid-file") => {
                    let file = arguments.next().ok_or("--pid-file expects a file")?;
                    pid_file = Some(file.into());
                }
                Some("--egress") => egress = Egress::parse(arguments.next())?,
                Some("--") => break arguments.next().ok_or("run expects a program")?,
                Some(option) if option.starts_with('-') => {
                    return Err(format!("run: unexpected argument {option:?}"));
                }
                _ => break next,
            }
        };
        if pid_file.is_some() && !is_background {
            return Err("run: --pid-file is for --background".to_owned());
        }
        Ok(Some(Run {
            resolves,
            background: is_background.then_some(pid_file),
            program,
            arguments: arguments.collect(),
            egress,
            is_verbose,
        }))
    }

    /// Runs the program, and returns its exit code, or 128 and the signal that ended it. The process is expected to exit then.
    ///
    /// # Errors
    /// [`RunError`]; unless it is that of waiting, the program was not started.
    pub fn run(self) -> Result<u8, RunError> {
        if !cfg!(target_arch = "x86_64") {
            let words = "run is tried on x86-64 only, and refuses other machines";
            return Err(RunError::NoWay(words.to_owned()));
        }
        check_vsock().map_err(RunError::NoWay)?;
        // It is ready when the host has answered.
        let datagrams = start_datagrams();
        let port = match &self.egress {
            Egress::Port(port) => *port,
            Egress::Named(name) => port_of(name).map_err(RunError::NoWay)?,
        };
        self.run_by(Arc::new(VsockWay::new(port)), datagrams)
    }

    fn run_by(self, way: Arc<dyn Way>, starting: io::Result<Starting>) -> Result<u8, RunError> {
        let local = |what| move |source| RunError::Local { what, source };
        let foreground = Foreground::begin().map_err(local("take the program's signals"))?;
        let helper = starting.as_ref().ok().map(|starting| starting.process);
        let datagrams = starting.and_then(Starting::finish);
        if let (Err(error), true) = (&datagrams, self.is_verbose) {
            eprintln!(
                "ringdown-agent run: datagrams do not show where they come from: no network namespace: {error}"
            );
        }
        if let (Err(error), false) = (&datagrams, self.resolves) {
            let words = format!("--resolver off needs a network namespace for UDP: {error}");
            return Err(RunError::NoWay(words));
        }
        let datagrams = datagrams.ok();
        let mut command = activated::command(&self.program);
        command.args(&self.arguments);
        if self.background.is_some() {
            // A program that goes on in the background was not started by what asks for that.
            command.env_remove(ready::SOCKET);
        }
        let program = self.program;
        let has_tcp = loopback::kernel_has_tcp();
        let spawned = supervise::spawn(command, &supervision(datagrams.is_none(), has_tcp));
        let (child, listener) = spawned.map_err(|source| RunError::Spawn { program, source })?;
        // The program keeps its own limit. A call under way needs up to four descriptors here.
        let _ = sys::descriptors::raise_limit();
        let manner = Manner {
            has_tcp,
            resolves: self.resolves,
            is_verbose: self.is_verbose,
        };
        let supervisor = Supervisor::new(listener, way, datagrams, manner)
            .map_err(local("watch the program"))?;
        let supervisor = Arc::new(supervisor);
        let thread = std::thread::Builder::new().name("supervisor".into());
        let own = Arc::clone(&supervisor);
        thread
            .spawn(move || own.run())
            .map_err(local("start a thread"))?;
        let code = match self.background {
            None => foreground.attend(&child),
            Some(pid_file) => {
                let background = Background { pid_file, helper };
                let is_over = || supervisor.is_over();
                foreground.attend_in_background(&child, &background, is_over, ready::say)
            }
        };
        code.map_err(local("wait for the program"))
    }
}

/// Starts this program once more, as what makes datagram sockets.
fn start_datagrams() -> io::Result<Starting> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(SUBCOMMAND);
    Starting::by(command)
}

/// What this program does then: makes sockets for the peer of standard input.
///
/// # Errors
/// The other end is gone.
pub fn make_datagram_sockets() -> io::Result<()> {
    let asking = rustix::io::dup(rustix::stdio::stdin())?;
    datagrams::namespace::serve(asking.into())
}

/// The port of a service that this guest may call.
fn port_of(name: &str) -> Result<u32, String> {
    let hint = "name the service by --egress";
    let request = Request::parse(format!("SERVICE {name}").as_bytes());
    let request = request.map_err(|error| format!("{name:?} is no service: {error}"))?;
    let answer = directory::ask_host(&request)
        .map_err(|error| format!("the host says of the service {name:?}: {error}; {hint}"))?;
    let port = answer.split(' ').nth(1).and_then(|port| port.parse().ok());
    port.ok_or_else(|| format!("the host has no port for the service {name:?}: {answer}; {hint}"))
}

#[cfg(test)]
mod tests;
