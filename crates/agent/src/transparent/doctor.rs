//! `ringdown-agent doctor`: what this guest offers to `ringdown-agent run`, which ways it takes, and why. Each is tried, with no other program than this one.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::process::Command;

use rustix::io::Errno;
use rustix::net::sockopt::socket_domain;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use sys::supervise::{self, SpawnError, Supervision, SystemCall, Thread, Watched, When};

use super::address::Family;
use super::datagrams::Starting;
use super::supervisor::kernel_socket;
use super::{AF_INET, DEFAULT_SERVICE, Egress, check_vsock, hint, port_of, start_datagrams};
use crate::transport::dial_host_to_announce;

/// The argument that makes this program the one that is watched on trial. It is not for people.
pub const PROBE: &str = "doctor-probe";

/// So many calls of the program on trial are answered at most.
const MAX_PROBED: usize = 16;

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
pub struct Doctor {
    egress: Egress,
}

/// What was found: lines, each of a subject and words.
#[derive(Debug)]
pub struct Report {
    lines: Vec<(&'static str, String)>,
    /// Whether `run` works at all.
    pub works: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (subject, words) in &self.lines {
            writeln!(formatter, "{subject:<12}{words}")?;
        }
        Ok(())
    }
}

impl Doctor {
    /// Reads `[--egress NAME|PORT]`. Nothing if help is asked for.
    ///
    /// # Errors
    /// What was expected, in words.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Option<Doctor>, String> {
        let mut arguments = arguments.into_iter();
        let mut egress = Egress::Named(DEFAULT_SERVICE.to_owned());
        while let Some(argument) = arguments.next() {
            match argument.to_str() {
                Some("--help" | "-h") => return Ok(None),
                Some("--egress") => egress = Egress::parse(arguments.next())?,
                _ => return Err(format!("doctor: unexpected argument {argument:?}")),
            }
        }
        Ok(Some(Doctor { egress }))
    }

    /// Tries everything.
    pub fn examine(&self) -> Report {
        let datagrams = start_datagrams();
        let calls = calls();
        let vsock = check_vsock();
        let port = match (&vsock, &self.egress) {
            (Err(_), _) => Err("it is reached by vsock, which does not work here".to_owned()),
            (Ok(()), Egress::Port(port)) => Ok(*port),
            (Ok(()), Egress::Named(name)) => port_of(name),
        };
        let works = calls.is_ok() && port.is_ok();
        let mut lines = vec![("kernel", kernel()), ("calls", said(&calls))];
        lines.push((
            "vsock",
            match &vsock {
                Ok(()) => "yes".to_owned(),
                Err(why) => format!("no: {why}"),
            },
        ));
        lines.push((
            "egress",
            match &port {
                Ok(port) => format!("vsock port {port} of the host"),
                Err(why) => format!("no: {why}"),
            },
        ));
        if let Ok(port) = port {
            lines.push(("connect", connect(port)));
        }
        lines.push(("own TCP", own_tcp()));
        lines.push(("datagrams", sockets_of(datagrams)));
        lines.push(("setuid", setuid()));
        let verdict = if works { "works" } else { "does not work" };
        lines.push(("run", verdict.to_owned()));
        Report { lines, works }
    }
}

fn said(result: &Result<String, String>) -> String {
    match result {
        Ok(words) => words.clone(),
        Err(why) => format!("no: {why}"),
    }
}

fn kernel() -> String {
    let name = rustix::system::uname();
    let word = |word: &std::ffi::CStr| word.to_string_lossy().into_owned();
    format!("Linux {} on {}", word(name.release()), word(name.machine()))
}

/// Whether calls of a program can be answered here, with descriptors (seccomp user notification, `SECCOMP_ADDFD_FLAG_SEND`), and its descriptors be had.
fn calls() -> Result<String, String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("run is tried on x86-64 only".to_owned());
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg(PROBE);
    let supervision = Supervision {
        watched: &[Watched {
            call: SystemCall::Socket,
            when: When::Are(&[(0, AF_INET)]),
        }],
        missing: &[],
        may_gain_privileges: true,
    };
    let (mut child, listener) = supervise::spawn(command, &supervision).map_err(|error| {
        let hint = hint(&error);
        match error {
            SpawnError::Supervision(error) if error.raw_os_error() == invalid() => {
                "this kernel has no notifications of seccomp (CONFIG_SECCOMP_FILTER, Linux 5.14)"
                    .to_owned()
            }
            error => format!("{error}{hint}"),
        }
    })?;
    let answered = answer_probe(&listener);
    drop(listener);
    // A program whose call was not answered ends by itself: the call fails.
    let status = child.wait().map_err(|error| error.to_string())?;
    answered.map_err(|error| {
        format!("a watched program's call could not be answered: {error} (needs Linux 5.14, and to look into one's own programs: kernel.yama.ptrace_scope)")
    })?;
    match status.success() {
        true => Ok("answered by seccomp's notifications, with descriptors".to_owned()),
        false => Err("an answer did not arrive".to_owned()),
    }
}

fn invalid() -> Option<i32> {
    Some(Errno::INVAL.raw_os_error())
}

/// Answers the one call of the program on trial with a UNIX socket.
fn answer_probe(listener: &supervise::Listener) -> io::Result<()> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    for _ in 0..MAX_PROBED {
        let Some(call) = listener.receive()? else {
            continue;
        };
        Thread(call.thread).descriptor(0)?;
        Thread(call.thread).writable_memory()?;
        return listener.answer_with_descriptor(&call, std::os::fd::AsFd::as_fd(&socket), true);
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// What the program on trial does: it asks for a socket of IPv4, and says whether it has got another.
pub fn probe() -> bool {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
    socket.is_ok_and(|socket| socket_domain(&socket) == Ok(AddressFamily::UNIX))
}

fn connect(port: u32) -> String {
    match dial_host_to_announce(port, 0) {
        Ok(_) => "announced from a privileged port: a socket that does not block is being connected as with TCP".to_owned(),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            "asked for on the program's socket, as this is not root: connect returns when it is known what has become of it, also of a socket that does not block".to_owned()
        }
        Err(error) => format!("asked for on the program's socket, as a call from a privileged port failed: {error}"),
    }
}

/// Sockets of the guest's kernel, for servers and the loopback.
fn own_tcp() -> String {
    let found: Vec<&str> = [(Family::V4, "IPv4"), (Family::V6, "IPv6")]
        .into_iter()
        .filter(|(family, _)| kernel_socket(*family).is_ok())
        .map(|(_, name)| name)
        .collect();
    match found.is_empty() {
        false => format!("{}: servers, and the guest's loopback", found.join(", ")),
        true => "AF_UNIX in its place, as this kernel has no INET: servers, and the guest's loopback for programs of `run`".to_owned(),
    }
}

fn sockets_of(starting: io::Result<Starting>) -> String {
    match starting.and_then(Starting::finish) {
        Ok(_) => "UDP sockets of a network namespace".to_owned(),
        Err(error) => {
            format!("pairs, which do not show who has answered: no network namespace: {error}")
        }
    }
}

fn setuid() -> String {
    match rustix::process::geteuid().is_root() {
        true => "programs keep their rights, as this is root".to_owned(),
        false => "programs run without their rights (no_new_privs), as this is not root".to_owned(),
    }
}
