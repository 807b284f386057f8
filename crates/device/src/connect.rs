//! Connecting to UNIX sockets in directories that others may write.
//!
//! A link in such a directory could lead to another VM's VMM, or to a service of root's: see [`sys::links`]. The socket that was found is connected to by its descriptor:
//! what its name stands for by then does not matter. Nor may the path lead into a FUSE file system: many VMs wait for who connects here, and its program may never
//! answer.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, absolute};

use rustix::io::Errno;
use rustix::net::{SocketType, connect};
use sys::links::{Entry, Fuse, address_of, find};
use vsock::Reason;

use crate::socket::{is_own, unix_socket};

/// Connects to the listener at `path` without waiting, and does not block afterwards. No descriptors can be sent to it. If its backlog is full this fails with `EAGAIN`.
///
/// # Errors
/// What the system says to finding the socket and to connecting; and, without a number of the system's, when there is a link that does not count here, a FUSE file system, or one of the
/// daemon's own sockets (see [`is_own`]).
pub fn connect_to(path: &Path, socket_type: SocketType) -> io::Result<OwnedFd> {
    connect_to_found(&find(&absolute(path)?, Fuse::Refused)?, socket_type)
}

fn connect_to_found(found: &OwnedFd, socket_type: SocketType) -> io::Result<OwnedFd> {
    let socket = unix_socket(socket_type)?;
    connect(&socket, &address_of(found)?)?;
    if is_own(&socket) {
        return Err(io::Error::other(
            "expected the socket of a VMM or a program, found one of the daemon's own: name another one",
        ));
    }
    Ok(socket)
}

/// What became of an attempt to reach a listener without waiting.
pub(crate) enum Dial {
    /// Connected.
    Reached(OwnedFd),
    /// The listener is there and its backlog is full: try again in a while.
    Busy,
    /// It will not work.
    Failed(Reason),
}

impl crate::slow::Outcome for Dial {}

/// Dials the listener at `path` for a VM without waiting for it.
pub(crate) fn dial(path: &Path, socket_type: wire::vsock::SocketType, vm: &str) -> Dial {
    let find = || find(&absolute(path)?, Fuse::Refused);
    dial_found(find, path, socket_type, vm)
}

/// Dials the listener of this name for a VM without waiting for it.
pub(crate) fn dial_at(place: &Entry, socket_type: wire::vsock::SocketType, vm: &str) -> Dial {
    dial_found(|| place.find_behind_links(), place.path(), socket_type, vm)
}

fn dial_found(
    find: impl FnOnce() -> io::Result<OwnedFd>,
    path: &Path,
    socket_type: wire::vsock::SocketType,
    vm: &str,
) -> Dial {
    let socket_type = match socket_type {
        wire::vsock::SocketType::Stream => SocketType::STREAM,
        wire::vsock::SocketType::SeqPacket => SocketType::SEQPACKET,
    };
    let error = match find().and_then(|found| connect_to_found(&found, socket_type)) {
        Ok(socket) => return Dial::Reached(socket),
        Err(error) => error,
    };
    match Errno::from_io_error(&error) {
        Some(Errno::AGAIN) => Dial::Busy,
        Some(Errno::NOENT | Errno::CONNREFUSED) => Dial::Failed(Reason::NoListener),
        Some(Errno::PROTOTYPE) => Dial::Failed(Reason::WrongType),
        _ => {
            tracing::warn!(vm, path = %path.display(), %error, "cannot reach the host's listener");
            Dial::Failed(Reason::HostFailed)
        }
    }
}

#[cfg(test)]
mod tests;
