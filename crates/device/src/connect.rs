//! Connecting to UNIX sockets in directories that others may write.
//!
//! A link in such a directory could lead to another VM's VMM, or to a service of root's: see [`sys::links`]. The socket that was found is connected to by its descriptor:
//! what its name stands for by then does not matter. Nor may the path lead into a FUSE file system: many VMs wait for this thread, and its program may never
//! answer.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf, absolute};

use rustix::fs::{FileType, Stat};
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

impl crate::slow::Outcome for Option<Dial> {}

/// A listener that is dialled for several callers of a VM, one after another: it is looked up for the first, and again once it is not reached any more.
pub(crate) struct Callee {
    path: PathBuf,
    vm: String,
    found: Option<io::Result<OwnedFd>>,
    was_reached: bool,
}

impl Callee {
    pub(crate) fn at(path: PathBuf, vm: String) -> Callee {
        Callee {
            path,
            vm,
            found: None,
            was_reached: false,
        }
    }

    /// Dials it without waiting for it.
    pub(crate) fn dial(&mut self, socket_type: wire::vsock::SocketType) -> Dial {
        let look_up = || find(&absolute(&self.path)?, Fuse::Refused);
        let found = self.found.get_or_insert_with(look_up);
        let dialled = dial_found(found, &self.path, socket_type, &self.vm);
        match dialled {
            // Another may have taken its place.
            Dial::Failed(_) if std::mem::take(&mut self.was_reached) => {
                self.found = None;
                self.dial(socket_type)
            }
            _ => {
                self.was_reached |= matches!(dialled, Dial::Reached(_));
                dialled
            }
        }
    }
}

/// Dials the listener of this name for a VM without waiting for it. None if a link has the name, which may lead anywhere.
pub(crate) fn dial_at(
    place: &Entry,
    socket_type: wire::vsock::SocketType,
    vm: &str,
) -> Option<Dial> {
    let found = place.find();
    let is_link = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
    if found.as_ref().is_ok_and(|(_, stat)| is_link(stat)) {
        return None;
    }
    let found = found.map(|(file, _)| file);
    Some(dial_found(&found, place.path(), socket_type, vm))
}

fn dial_found(
    found: &io::Result<OwnedFd>,
    path: &Path,
    socket_type: wire::vsock::SocketType,
    vm: &str,
) -> Dial {
    let socket_type = match socket_type {
        wire::vsock::SocketType::Stream => SocketType::STREAM,
        wire::vsock::SocketType::SeqPacket => SocketType::SEQPACKET,
    };
    let failed = |error: &io::Error| match Errno::from_io_error(error) {
        Some(Errno::AGAIN) => Dial::Busy,
        Some(Errno::NOENT | Errno::CONNREFUSED) => Dial::Failed(Reason::NoListener),
        Some(Errno::PROTOTYPE) => Dial::Failed(Reason::WrongType),
        _ => {
            tracing::warn!(vm, path = %path.display(), %error, "cannot reach the host's listener");
            Dial::Failed(Reason::HostFailed)
        }
    };
    let connected = found
        .as_ref()
        .map(|found| connect_to_found(found, socket_type));
    match connected {
        Ok(Ok(socket)) => Dial::Reached(socket),
        Ok(Err(error)) => failed(&error),
        Err(error) => failed(error),
    }
}

#[cfg(test)]
mod tests;
