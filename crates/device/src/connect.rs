//! Connecting to UNIX sockets in directories that others may write.
//!
//! A link in such a directory could lead to a socket that whoever set it may not open: to another VM's VMM, or to a service of root's. So the path is walked name by
//! name, and a link, symbolic or hard, counts only where no user but root and this process's could have set it. The socket that was found so is connected to by its
//! descriptor: what its name stands for by then does not matter. `openat2` would walk in one call, but it keeps its flags in memory, where the sandbox's filter
//! cannot see whether it makes a file.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf, absolute};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, openat, readlinkat};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType, connect};
use rustix::process::geteuid;
use switch::Reason;

use crate::socket::{is_own, unix_socket};

/// As many links as the kernel follows in a path.
const MAX_LINKS: usize = 40;

/// Connects to the listener at `path` without waiting, and does not block afterwards. No descriptors can be sent to it. If its backlog is full this fails with `EAGAIN`.
///
/// # Errors
/// What the system says to finding the socket and to connecting; and, without a number of the system's, when there is a link that does not count here, or one of the
/// daemon's own sockets (see [`is_own`]).
pub fn connect_to(path: &Path, socket_type: SocketType) -> io::Result<OwnedFd> {
    let found = find(&absolute(path)?)?;
    // A descriptor of this kind has no other way to its file.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
    let socket = unix_socket(socket_type)?;
    connect(&socket, &address)?;
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

/// Dials the listener at `path` for a VM without waiting.
pub(crate) fn dial(path: &Path, socket_type: wire::vsock::SocketType, vm: &str) -> Dial {
    let socket_type = match socket_type {
        wire::vsock::SocketType::Stream => SocketType::STREAM,
        wire::vsock::SocketType::SeqPacket => SocketType::SEQPACKET,
    };
    let error = match connect_to(path, socket_type) {
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

/// Whether there is a link on the way to what stands at `path` that does not count here, so that the path leads nowhere.
pub fn has_link_of_others(path: &Path) -> bool {
    let found = absolute(path).and_then(|path| find(&path));
    found.is_err_and(|error| error.raw_os_error().is_none())
}

/// What stands at an absolute path.
fn find(path: &Path) -> io::Result<OwnedFd> {
    let mut names = names(path);
    let mut place = Place::root()?;
    let mut links = 0;
    while let Some(name) = names.pop() {
        let entry = openat(&place.directory, &name, PATH_ONLY, Mode::empty())?;
        let stat = fstat(&entry)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let is_firm = place.is_firm(&stat);
        let is_link = kind == FileType::Symlink || kind != FileType::Directory && stat.st_nlink > 1;
        if is_link && !is_firm {
            return Err(refused(path, &name));
        }
        if kind == FileType::Symlink {
            links += 1;
            if links > MAX_LINKS {
                return Err(Errno::LOOP.into());
            }
            let target = readlinkat(&entry, "", Vec::new())?;
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            if target.is_absolute() {
                place = place.back_to_root()?;
            }
            names.extend(self::names(&target));
        } else if names.is_empty() {
            return Ok(entry);
        } else {
            place = Place {
                directory: entry,
                stat,
                is_firm,
            };
        }
    }
    // The path is that of a directory.
    Err(Errno::CONNREFUSED.into())
}

const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A directory on the way.
struct Place {
    directory: OwnedFd,
    stat: Stat,
    /// No other user could have put it in the way, nor anything above it.
    is_firm: bool,
}

impl Place {
    fn root() -> io::Result<Place> {
        let directory = rustix::fs::open("/", PATH_ONLY, Mode::empty())?;
        let stat = fstat(&directory)?;
        Ok(Place {
            directory,
            stat,
            is_firm: true,
        })
    }

    /// A link to an absolute path counts no more than the way to it.
    fn back_to_root(&self) -> io::Result<Place> {
        Ok(Place {
            is_firm: self.is_firm,
            ..Place::root()?
        })
    }

    /// Whether no user but root and this process's could have put this entry here. In a directory like `/tmp` that is so of what is theirs, but for hard links to it.
    fn is_firm(&self, entry: &Stat) -> bool {
        let is_directory = FileType::from_raw_mode(entry.st_mode) == FileType::Directory;
        let stays = self.stat.st_mode & Mode::SVTX.bits() != 0
            && is_ours(entry)
            && (is_directory || entry.st_nlink == 1);
        // Of a file with an access control list, the group's bits are the most that the list gives anyone.
        let is_closed = self.stat.st_mode & (Mode::WGRP | Mode::WOTH).bits() == 0;
        self.is_firm && is_ours(&self.stat) && (is_closed || stays)
    }
}

fn is_ours(file: &Stat) -> bool {
    file.st_uid == 0 || file.st_uid == geteuid().as_raw()
}

/// The names in a path, the last one first.
fn names(path: &Path) -> Vec<OsString> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    let mut names: Vec<OsString> = names.collect();
    names.reverse();
    names
}

fn refused(path: &Path, name: &OsString) -> io::Error {
    io::Error::other(format!(
        "{name:?} in {} is a link, or has a second name, in a directory that others than root and the daemon's user may write, and could lead to any socket: \
         name the socket by its own path",
        path.display()
    ))
}

#[cfg(test)]
mod tests;
