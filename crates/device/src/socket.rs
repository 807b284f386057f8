//! UNIX sockets of the host.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Gid, chownat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, connect, listen, shutdown, socket_with,
};
use sys::links::{Entry, FileId, Fuse, address_of};
use sys::peer::refuse_descriptors;
use sys::socket_file::SocketFile;
use wire::connect::seqpacket_path;

/// The longest path that a UNIX socket's address holds, in bytes (unix(7)).
pub(crate) const MAX_PATH_BYTES: usize = 107;

/// Connections that wait to be accepted on one listener.
pub const BACKLOG: i32 = 1024;

/// Whether every listener of this process is the daemon's.
static LISTENERS_ARE_OURS: AtomicBool = AtomicBool::new(false);

/// From now on every listener of this process is the daemon's: see [`is_own`]. A process in which others listen as well, as in tests, does not say so.
pub fn keep_own_apart() {
    LISTENERS_ARE_OURS.store(true, Ordering::Relaxed);
}

/// Whether a UNIX socket that was connected to is one of the daemon's own, by whatever path. A caller there is taken for a program of the host, for a VMM or for
/// an operator: what a guest says must not get there in the daemon's name.
pub(crate) fn is_own(connected: impl AsFd) -> bool {
    let own = std::process::id();
    LISTENERS_ARE_OURS.load(Ordering::Relaxed)
        && sys::peer::process(connected.as_fd()).is_ok_and(|pid| u32::try_from(pid) == Ok(own))
}

/// A socket that listens at a path.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    pub(crate) file: SocketFile,
}

/// A socket that does not block, to which no descriptors can be sent.
pub(crate) fn unix_socket(socket_type: SocketType) -> io::Result<OwnedFd> {
    let socket = any_socket(socket_type)?;
    refuse_descriptors(socket.as_fd())?;
    Ok(socket)
}

fn any_socket(socket_type: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, socket_type, flags, None)?)
}

/// Listens at `path` for VMMs that speak vhost-user, which send descriptors; for the owner only. A stale socket file is taken over.
pub(crate) fn listen_for_vmm(path: &Path) -> io::Result<Listener> {
    listen_with(any_socket(SocketType::STREAM)?, None, path)
}

/// Listens with a socket that another process has left, if its file is still the one that it had.
pub(crate) fn listen_again(
    socket: OwnedFd,
    path: &Path,
    id: FileId,
) -> io::Result<Option<Listener>> {
    let mut file = SocketFile::found(Entry::at(path, Fuse::Refused)?)?;
    if file.id() != id {
        file.stay();
        return Ok(None);
    }
    // Again, so that callers find this process there: see `is_own`.
    listen(&socket, BACKLOG)?;
    Ok(Some(Listener { socket, file }))
}

/// Ends a socket that another process has left, and removes its file if that is still there.
///
/// # Errors
/// What the system says.
pub(crate) fn remove_file_of(socket: OwnedFd, path: &Path) -> io::Result<()> {
    // Its callers are refused from now on: so it differs from one that has come in its place.
    shutdown(&socket, Shutdown::Both)?;
    let mut file = SocketFile::found(Entry::at(path, Fuse::Refused)?)?;
    let probe = any_socket(SocketType::STREAM)?;
    let end = file
        .find()
        .and_then(|found| Ok(connect(&probe, &address_of(&found)?)?));
    let is_refused =
        end.is_err_and(|error| Errno::from_io_error(&error) == Some(Errno::CONNREFUSED));
    if !is_refused {
        file.stay();
    }
    Ok(())
}

/// Where programs connect to a VM: with stream sockets, and with sockets of messages if the line has rings and the path has room for that name.
pub(crate) fn paths_for_programs(
    host: &Path,
    has_rings: bool,
) -> impl Iterator<Item = (PathBuf, SocketType)> {
    let messages = seqpacket_path(host);
    let fits = messages.as_os_str().len() <= MAX_PATH_BYTES;
    let messages = (has_rings && fits).then_some((messages, SocketType::SEQPACKET));
    std::iter::once((host.to_owned(), SocketType::STREAM)).chain(messages)
}

/// Listens at `path`, for the owner and the members of this group. A stale socket file is taken over.
pub(crate) fn listen_for(
    group: Option<u32>,
    path: &Path,
    socket_type: SocketType,
) -> io::Result<Listener> {
    listen_with(unix_socket(socket_type)?, group, path)
}

/// Listens at `path`, with room for [`BACKLOG`] callers. No descriptors can be sent to what it accepts.
pub fn listen_without_descriptors(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let socket = unix_socket(SocketType::STREAM)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    let file = SocketFile::bind(&socket, Entry::at(path, Fuse::Refused)?)?;
    listen(&socket, BACKLOG)?;
    Ok((socket.into(), file))
}

fn listen_with(socket: OwnedFd, group: Option<u32>, path: &Path) -> io::Result<Listener> {
    let (file, was_stale) = SocketFile::take_over(&socket, Entry::at(path, Fuse::Refused)?)?;
    if was_stale {
        tracing::warn!(path = %path.display(), "took over the socket of a program that is gone");
    }
    // No one connects before `listen`: the group is the right one from the first connection on.
    if let Some(gid) = group {
        give(&file, gid)?;
    }
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    file.set_mode(mode)?;
    listen(&socket, BACKLOG)?;
    Ok(Listener { socket, file })
}

/// Gives it to this group, and no other file.
fn give(file: &SocketFile, gid: u32) -> io::Result<()> {
    let group = Some(Gid::from_raw(gid));
    let given = chownat(file.find()?, "", None, group, AtFlags::EMPTY_PATH);
    given.map_err(|error| {
        let error = io::Error::from(error);
        let words = format!(
            "it cannot be given to the group {gid}: {error}; start the daemon as a member of that group, or as root"
        );
        io::Error::new(error.kind(), words)
    })
}

/// The path of the listener that a guest's dial to `port` of the host reaches.
pub(crate) fn port_path(host: &Path, port: u32) -> PathBuf {
    let mut path = host.as_os_str().to_owned();
    path.push(format!("_{port}"));
    PathBuf::from(path)
}

#[cfg(test)]
mod tests;
