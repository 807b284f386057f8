//! UNIX sockets of the host.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, chownat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use sys::peer::refuse_descriptors;

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

/// Whether a UNIX socket that was connected to is one of the daemon's own, by whatever path. Who calls there is taken for a program of the host, for a VMM or for
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

/// The file of a socket. It is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have removed it already; nothing is lost then.
        let _ = fs::remove_file(&self.0);
    }
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

/// Listens at `path`, for the owner and the members of this group. A stale socket file is taken over.
pub(crate) fn listen_for(
    group: Option<u32>,
    path: &Path,
    socket_type: SocketType,
) -> io::Result<Listener> {
    listen_with(unix_socket(socket_type)?, group, path)
}

/// Listens at `path`, with room for [`BACKLOG`] who wait. No descriptors can be sent to what it accepts.
///
/// # Errors
/// What the system says.
pub fn listen_without_descriptors(path: &Path) -> io::Result<UnixListener> {
    let socket = unix_socket(SocketType::STREAM)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn listen_with(socket: OwnedFd, group: Option<u32>, path: &Path) -> io::Result<Listener> {
    let address = SocketAddrUnix::new(path)?;
    match bind(&socket, &address) {
        Err(Errno::ADDRINUSE) if is_stale(path, &address)? => {
            tracing::warn!(path = %path.display(), "took over the socket of a program that is gone");
            fs::remove_file(path)?;
            bind(&socket, &address)?;
        }
        other => other?,
    }
    let listener = Listener {
        socket,
        file: SocketFile(path.to_owned()),
    };
    // Nobody connects before somebody listens: the group is the right one from the first connection on.
    if let Some(gid) = group {
        give_to(gid, path)?;
    }
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    set_socket_mode(path, mode)?;
    listen(&listener.socket, BACKLOG)?;
    Ok(listener)
}

/// Sets the mode of the socket at `path`, and of nothing else: where another user may write in the directory, a link may stand there.
///
/// # Errors
/// No socket stands there, or what the system says.
pub fn set_socket_mode(path: &Path, mode: u32) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::open(path, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) != FileType::Socket {
        return Err(io::Error::other(
            "expected the socket that was made there, found something else: remove it",
        ));
    }
    set_mode_of(&found, mode)
}

/// Sets the mode of a file by a descriptor that only names it, as `O_PATH` gives, which has no other way to its file's mode.
///
/// # Errors
/// What the system says.
pub fn set_mode_of(found: &OwnedFd, mode: u32) -> io::Result<()> {
    let file = format!("/proc/self/fd/{}", found.as_raw_fd());
    fs::set_permissions(file, fs::Permissions::from_mode(mode))
}

fn give_to(gid: u32, path: &Path) -> io::Result<()> {
    let group = Some(Gid::from_raw(gid));
    // What stands there by now may be somebody else's link.
    let given = chownat(CWD, path, None, group, AtFlags::SYMLINK_NOFOLLOW);
    given.map_err(|error| {
        let error = io::Error::from(error);
        let words = format!(
            "it cannot be given to the group {gid}: {error}; start the daemon as a member of that group, or as root"
        );
        io::Error::new(error.kind(), words)
    })
}

/// Whether there is a socket file with nobody behind it. Somebody who is there does not notice: the probe is of another type
/// than whoever listens, so that it is refused for that (`EPROTOTYPE`) and not accepted.
fn is_stale(path: &Path, address: &SocketAddrUnix) -> io::Result<bool> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    let probe = unix_socket(SocketType::DGRAM)?;
    Ok(matches!(connect(&probe, address), Err(Errno::CONNREFUSED)))
}

/// The path of the listener that a guest's dial to `port` of the host reaches.
pub(crate) fn port_path(host: &Path, port: u32) -> PathBuf {
    let mut path = host.as_os_str().to_owned();
    path.push(format!("_{port}"));
    PathBuf::from(path)
}

#[cfg(test)]
mod tests;
