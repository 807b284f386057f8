//! UNIX sockets of the host.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, FileType, Gid, Stat, chownat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, listen, socket_with};
use sys::links::{Entry, FileId, file_id};
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

/// The file of a socket that listens. It is removed when this is dropped, unless another one has come in its place.
#[derive(Debug)]
pub struct SocketFile {
    entry: Entry,
    id: FileId,
    /// It is not removed.
    stays: bool,
}

impl SocketFile {
    /// Which file it is.
    pub(crate) fn id(&self) -> FileId {
        self.id
    }

    /// Leaves the file where it is: another process listens at its socket.
    pub(crate) fn stay(&mut self) {
        self.stays = true;
    }

    fn bind(socket: &OwnedFd, entry: Entry) -> io::Result<SocketFile> {
        bind(socket, &entry.address()?)?;
        SocketFile::found(entry)
    }

    /// The file that is there.
    fn found(entry: Entry) -> io::Result<SocketFile> {
        let id = file_id(&find_socket(&entry)?.1);
        Ok(SocketFile {
            entry,
            id,
            stays: false,
        })
    }

    /// Sets its mode, and that of no other file.
    ///
    /// # Errors
    /// Another file stands there by now, or what the system says.
    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        set_mode_of(&self.find()?, mode)
    }

    fn give_to(&self, gid: u32) -> io::Result<()> {
        let group = Some(Gid::from_raw(gid));
        let given = chownat(self.find()?, "", None, group, AtFlags::EMPTY_PATH);
        given.map_err(|error| {
            let error = io::Error::from(error);
            let words = format!(
                "it cannot be given to the group {gid}: {error}; start the daemon as a member of that group, or as root"
            );
            io::Error::new(error.kind(), words)
        })
    }

    fn find(&self) -> io::Result<OwnedFd> {
        let (file, stat) = find_socket(&self.entry)?;
        match file_id(&stat) == self.id {
            true => Ok(file),
            false => Err(not_what_was_made()),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.stays {
            // It may have been removed already.
            let _ = self.entry.remove(self.id);
        }
    }
}

/// Where another user may write in the directory, a link may stand there.
fn find_socket(entry: &Entry) -> io::Result<(OwnedFd, Stat)> {
    let (file, stat) = entry.find()?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Socket => Ok((file, stat)),
        _ => Err(not_what_was_made()),
    }
}

fn not_what_was_made() -> io::Error {
    io::Error::other("expected the socket that was made there, found something else: remove it")
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
    let mut file = SocketFile::found(Entry::at(path)?)?;
    if file.id != id {
        file.stay();
        return Ok(None);
    }
    // Again, so that those who call find this process there: see `is_own`.
    listen(&socket, BACKLOG)?;
    Ok(Some(Listener { socket, file }))
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
pub fn listen_without_descriptors(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let socket = unix_socket(SocketType::STREAM)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    let file = SocketFile::bind(&socket, Entry::at(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok((socket.into(), file))
}

fn listen_with(socket: OwnedFd, group: Option<u32>, path: &Path) -> io::Result<Listener> {
    let entry = Entry::at(path)?;
    if remove_stale(&entry)? {
        tracing::warn!(path = %path.display(), "took over the socket of a program that is gone");
    }
    let file = SocketFile::bind(&socket, entry)?;
    // No one connects before `listen`: the group is the right one from the first connection on.
    if let Some(gid) = group {
        file.give_to(gid)?;
    }
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    file.set_mode(mode)?;
    listen(&socket, BACKLOG)?;
    Ok(Listener { socket, file })
}

/// Sets the mode of a file by a descriptor that only names it, as `O_PATH` gives, which has no other way to its file's mode.
pub fn set_mode_of(found: &OwnedFd, mode: u32) -> io::Result<()> {
    let file = format!("/proc/self/fd/{}", found.as_raw_fd());
    fs::set_permissions(file, fs::Permissions::from_mode(mode))
}

/// Removes a socket file without a listener. A listener does not notice: the probe is of another type
/// than the listener, so that it is refused for that (`EPROTOTYPE`) and not accepted.
fn remove_stale(entry: &Entry) -> io::Result<bool> {
    let Ok(found) = entry.stat() else {
        return Ok(false);
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Ok(false);
    }
    let probe = unix_socket(SocketType::DGRAM)?;
    let is_stale = connect(&probe, &entry.address()?) == Err(Errno::CONNREFUSED);
    if is_stale {
        entry.remove(file_id(&found))?;
    }
    Ok(is_stale)
}

/// The path of the listener that a guest's dial to `port` of the host reaches.
pub(crate) fn port_path(host: &Path, port: u32) -> PathBuf {
    let mut path = host.as_os_str().to_owned();
    path.push(format!("_{port}"));
    PathBuf::from(path)
}

#[cfg(test)]
mod tests;
