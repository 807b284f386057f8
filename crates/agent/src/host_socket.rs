//! A way to the host for programs of a guest that has no vsock: a UNIX socket at which the agent, with the serial port, takes calls.
//!
//! A program says `CONNECT <port>\n`, and is answered `OK <port>\n`, after which the socket is a connection to that port of the host; or `ERR <reason>\n`.
//! It is the same convention as at a VM's host socket ([`wire::connect`]), the other way round. Root may connect, and the agent's own
//! user. `ringdown-agent resolve`, `service`, `whoami` and `forward` use it where there is no vsock.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wire::connect::{MAX_REQUEST_LEN, Request, accepted, refused, request};

use crate::log::say;
use crate::serial::SerialHost;
use crate::share::Share;
use crate::stream::{send_all, wait};
use crate::transport::{HOST_CID, Listener, dial_guest, dial_host_for_root};

/// Where it is, unless [`VARIABLE`] says otherwise.
pub const DEFAULT_PATH: &str = "/run/ringdown/host.sock";

/// The environment variable that names another place, for the agent and for its subcommands; empty for none.
pub const VARIABLE: &str = "RINGDOWN_HOST_SOCKET";

/// How long a program may take to say what it wants.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the host may take to answer, and a little more than the agent waits for it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(35);

/// How many programs may be about to say what they want. Further ones are turned away.
const MAX_CALLERS: usize = 64;

/// The stack of a caller's thread, in bytes.
const STACK_SIZE: usize = 64 * 1024;

/// The longest answer, in bytes with its line feed.
const MAX_ANSWER_LEN: usize = 512;

/// The wait after an error of accept that says the system is short of something.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Where it is; nothing if it is not wanted.
fn path() -> Option<PathBuf> {
    let named = std::env::var_os(VARIABLE);
    let path = named.unwrap_or_else(|| OsString::from(DEFAULT_PATH));
    (!path.is_empty()).then(|| path.into())
}

/// Takes calls of the guest's programs from here on, if the system lets it.
pub(crate) fn offer(host: &Arc<SerialHost>) {
    let Some(path) = path() else {
        return;
    };
    let host = Arc::clone(host);
    let offered = listen(&path).and_then(|listener| {
        std::thread::Builder::new()
            .name("host-socket".into())
            .stack_size(STACK_SIZE)
            .spawn(move || serve(&listener, &host))
    });
    match offered {
        Ok(_) => say!(
            "programs of this guest reach the host at {}",
            path.display()
        ),
        Err(error) => say!(
            "programs of this guest cannot reach the host at {}: {error}",
            path.display()
        ),
    }
}

fn listen(path: &Path) -> io::Result<Listener> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    Listener::unix(path)
}

fn serve(listener: &Listener, host: &Arc<SerialHost>) {
    let callers = Arc::new(AtomicUsize::new(0));
    loop {
        let caller = match listener.accept() {
            Ok(caller) => caller,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                say!("cannot take a call to the host: {error}");
                if error.kind() != io::ErrorKind::PermissionDenied {
                    std::thread::sleep(ACCEPT_BACKOFF);
                }
                continue;
            }
        };
        let Some(share) = Share::take(&callers, 1, MAX_CALLERS) else {
            answer(&caller, &refused("too many programs call the host at once"));
            continue;
        };
        let host = Arc::clone(host);
        let thread = std::thread::Builder::new()
            .name("caller".into())
            .stack_size(STACK_SIZE)
            .spawn(move || {
                let _share = share;
                take(caller, &host);
            });
        if let Err(error) = thread {
            say!("cannot start a thread: {error}");
        }
    }
}

/// Learns what a caller wants, and hands its socket to the driver.
fn take(caller: OwnedFd, host: &SerialHost) {
    let port = match read_request(&caller, Instant::now() + REQUEST_TIMEOUT) {
        Ok(Request::Connect { port, .. }) if port == wire::agent::PORT => {
            let words = format!("port {port} of the host is for the agent itself");
            return answer(&caller, &refused(words));
        }
        Ok(Request::Connect { port, .. }) => port,
        Ok(Request::Invalid(error)) => return answer(&caller, &refused(error)),
        // It has said nothing, or is gone.
        Ok(Request::Partial) | Err(_) => return,
    };
    let Ok(answering) = caller.try_clone() else {
        return answer(&caller, &refused("the agent has no descriptors left"));
    };
    let answered = move |answer_of_host: Result<(), serial::Refusal>| match answer_of_host {
        Ok(()) => answer(&answering, &accepted(port)),
        Err(refusal) => answer(&answering, &refused(refusal)),
    };
    host.hand_over(port, caller, Box::new(answered));
}

/// Byte by byte, as what follows the line is not ours to read.
fn read_request(caller: &OwnedFd, deadline: Instant) -> io::Result<Request> {
    let mut line = Vec::with_capacity(MAX_REQUEST_LEN);
    loop {
        let mut byte = [0];
        match rustix::io::read(caller, &mut byte) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => line.push(byte[0]),
            Err(Errno::AGAIN) => wait(caller, PollFlags::IN, deadline)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        match Request::parse(&line) {
            Request::Partial => {}
            request => return Ok(request),
        }
    }
}

/// The socket is new, so its buffer has room.
fn answer(caller: &OwnedFd, line: &str) {
    let _ = send_all(caller, line.as_bytes(), Instant::now());
}

/// Dials a port of the host through the agent that has the serial port: a socket that is non-blocking.
///
/// # Errors
/// There is no such agent, or the host has refused.
pub(crate) fn dial(port: u32) -> io::Result<OwnedFd> {
    let path = path().ok_or(io::ErrorKind::NotFound)?;
    dial_at(&path, port, Instant::now() + ANSWER_TIMEOUT)
}

/// Dial a port of the host, for a program of root's or another one, over vsock or, where there is none, through the agent that has the serial port: a socket that is non-blocking.
///
/// # Errors
/// As of [`dial_guest`]. If there is no agent with a serial port either, that there is no vsock.
pub(crate) fn dial_host_port(port: u32, is_for_root: bool) -> io::Result<OwnedFd> {
    let dialled = match is_for_root {
        true => dial_host_for_root(port),
        false => dial_guest(HOST_CID, port),
    };
    let error = match dialled {
        Ok(socket) => return Ok(socket),
        Err(error) => error,
    };
    if !is_without_vsock(&error) {
        return Err(error);
    }
    let no_listener = [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused];
    match dial(port) {
        // A refusal by the host has words of its own, no number of the system's.
        Err(other) if no_listener.contains(&other.kind()) && is_of_system(&other) => Err(error),
        dialled => dialled,
    }
}

/// Whether this guest has a vsock device. The modules alone give it sockets, of which none can be connected.
pub(crate) fn has_vsock() -> bool {
    let called = dial_guest(HOST_CID, wire::directory::PORT);
    !called.is_err_and(|error| is_without_vsock(&error))
}

/// Whether a call has failed for want of a vsock driver or device.
fn is_without_vsock(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::AFNOSUPPORT | Errno::NODEV)
    )
}

fn is_of_system(error: &io::Error) -> bool {
    error.raw_os_error().is_some() || error.get_ref().is_none()
}

/// Connects a socket that blocks. An agent that hangs has a full backlog, in which the system would wait without end.
fn connect(socket: &OwnedFd, address: &SocketAddrUnix, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Rounded up: zero is without end.
        let left = left.max(Duration::from_millis(1));
        set_socket_timeout(socket, Timeout::Send, Some(left))?;
        match rustix::net::connect(socket, address) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

fn dial_at(path: &Path, port: u32, deadline: Instant) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    connect(&socket, &SocketAddrUnix::new(path)?, deadline)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    send_all(&socket, request(port).as_bytes(), deadline)?;
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        match rustix::io::read(&socket, &mut byte) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) if line.len() == MAX_ANSWER_LEN => return Err(io::ErrorKind::InvalidData.into()),
            Ok(_) => line.push(byte[0]),
            Err(Errno::AGAIN) => wait(&socket, PollFlags::IN, deadline)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if line.starts_with(b"OK ") {
        return Ok(socket);
    }
    let words = String::from_utf8_lossy(&line);
    let words = words.strip_prefix("ERR ").unwrap_or(&words).trim_end();
    Err(io::Error::new(io::ErrorKind::ConnectionRefused, words))
}

#[cfg(test)]
mod tests;
