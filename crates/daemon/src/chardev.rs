//! Where the daemon and a VMM meet for a virtio-serial port: a UNIX socket, at which one of them listens and to which the other connects
//! again and again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::config::Chardev;
use crate::line::LineError;
use crate::runtime::{RuntimeError, listen_privately};

/// The daemon's end of it, between connections. None of it waits.
#[derive(Debug)]
pub(crate) enum Meeting {
    Listening(PrivateListener),
    Connecting(PathBuf),
}

/// A socket that only this user may connect to. Its file goes with it.
#[derive(Debug)]
pub(crate) struct PrivateListener {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for PrivateListener {
    fn drop(&mut self) {
        // Somebody may have removed it already; nothing is lost then.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl PrivateListener {
    /// Listens at `path`, without blocking.
    pub(crate) fn bind(path: &Path) -> Result<PrivateListener, LineError> {
        let listener = listen_privately(path).map_err(|error| match error {
            RuntimeError::InUse { path } | RuntimeError::NotASocket { path } => {
                LineError::AddressInUse { path }
            }
            RuntimeError::System { path, error, .. } => LineError::Directory { path, error },
            other => LineError::Io(io::Error::other(other)),
        })?;
        let listener = PrivateListener {
            listener,
            path: path.to_owned(),
        };
        listener.listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// The next connection, or [`io::ErrorKind::WouldBlock`].
    pub(crate) fn accept(&self) -> io::Result<OwnedFd> {
        Ok(self.listener.accept()?.0.into())
    }
}

impl AsFd for PrivateListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Meeting {
    /// Begins to listen, if it is us who listen.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(crate) fn prepare(chardev: &Chardev) -> Result<Meeting, LineError> {
        match chardev {
            Chardev::Listen(path) => Ok(Meeting::Listening(PrivateListener::bind(path)?)),
            Chardev::Connect(path) => Ok(Meeting::Connecting(path.clone())),
        }
    }

    /// A connection to the VMM.
    ///
    /// # Errors
    /// There is none yet, or none can be had.
    pub(crate) fn meet(&self) -> io::Result<OwnedFd> {
        match self {
            Meeting::Listening(listener) => listener.accept(),
            Meeting::Connecting(path) => connect(path),
        }
    }

    /// Whose readability says that a VMM is there, if anything does.
    pub(crate) fn awaited(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Meeting::Listening(listener) => Some(listener.as_fd()),
            Meeting::Connecting(_) => None,
        }
    }
}

/// Connects to a listener, or fails at once when its backlog is full.
pub(crate) fn connect(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
