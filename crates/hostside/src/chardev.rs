//! Where the daemon and a VMM meet for a virtio-serial port: a UNIX socket, at which one of them listens and to which the other connects
//! again and again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use config::Chardev;
use device::{SocketFile, connect_to, remove_file};
use rustix::net::SocketType;

use runtime::directory::{RuntimeError, listen_privately};

/// Why a socket for VMMs cannot be had.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Socket(#[from] RuntimeError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The daemon's end of it, between connections. None of it waits.
#[derive(Debug)]
pub(crate) enum Meeting {
    Listening(Box<PrivateListener>),
    Connecting(PathBuf),
}

/// A socket that only this user may connect to. Its file goes with it.
#[derive(Debug)]
pub(crate) struct PrivateListener {
    listener: UnixListener,
    file: Mutex<Option<SocketFile>>,
}

impl PrivateListener {
    /// Listens at `path`, without blocking.
    pub(crate) fn bind(path: &Path) -> Result<PrivateListener, OpenError> {
        let (listener, file) = listen_privately(path)?;
        listener.set_nonblocking(true)?;
        Ok(PrivateListener {
            listener,
            file: Mutex::new(Some(file)),
        })
    }

    /// Removes the socket's file. No new program can connect then.
    pub(crate) fn remove(&self) {
        if let Some(file) = sys::lock(&self.file).take() {
            remove_file(file);
        }
    }

    /// The same listener for the runtime that this is called in.
    pub(crate) fn watched(&self) -> io::Result<tokio::net::UnixListener> {
        tokio::net::UnixListener::from_std(self.listener.try_clone()?)
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
    /// Begins to listen, if this side listens.
    pub(crate) fn prepare(chardev: &Chardev) -> Result<Meeting, OpenError> {
        match chardev {
            Chardev::Listen(path) => Ok(Meeting::Listening(Box::new(PrivateListener::bind(path)?))),
            Chardev::Connect(path) => Ok(Meeting::Connecting(path.clone())),
        }
    }

    /// A connection to the VMM.
    pub(crate) fn meet(&self) -> io::Result<OwnedFd> {
        match self {
            Meeting::Listening(listener) => listener.accept(),
            Meeting::Connecting(path) => connect_to(path, SocketType::STREAM),
        }
    }

    /// Removes the socket's file, if it is ours.
    pub(crate) fn remove(&self) {
        if let Meeting::Listening(listener) = self {
            listener.remove();
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
