//! Where this process listens on the host.

use std::io;
use std::path::PathBuf;

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sys::links::{Entry, Fuse};
use sys::socket_file::SocketFile;
use tokio::net::{TcpListener, UnixListener};
use wire::agent::forward::Place;

use super::specification;
use super::stream::{LocalStream, path_of};

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 128;

/// A socket that listens; a UNIX socket's file is removed at the end.
pub(super) enum Listener {
    Tcp(TcpListener, Place),
    Unix {
        listener: UnixListener,
        path: PathBuf,
        /// Removed with the listener.
        _file: Box<SocketFile>,
    },
}

impl Listener {
    /// # Errors
    /// The place cannot be had; the words name it.
    pub(super) async fn bind(place: &Place) -> io::Result<Listener> {
        let bound =
            match place {
                Place::Tcp { host, port } => TcpListener::bind((host.as_str(), *port))
                    .await
                    .and_then(|listener| {
                        let port = listener.local_addr()?.port();
                        let host = host.clone();
                        Ok(Listener::Tcp(listener, Place::Tcp { host, port }))
                    }),
                Place::Unix { path } => bind_unix(path_of(path)),
            };
        bound.map_err(|error| {
            let remedy = match error.kind() {
                io::ErrorKind::AddrInUse => "; `ss -lntup` shows the program that uses it",
                _ => "",
            };
            let at = specification::words(place);
            let message = format!("cannot listen at {at}: {error}{remedy}");
            io::Error::new(error.kind(), message)
        })
    }

    /// Where it listens, in words.
    pub(super) fn place(&self) -> String {
        match self {
            Listener::Tcp(_, place) => specification::words(place),
            Listener::Unix { path, .. } => path.display().to_string(),
        }
    }

    pub(super) async fn accept(&self) -> io::Result<LocalStream> {
        match self {
            Listener::Tcp(listener, _) => Ok(LocalStream::tcp(listener.accept().await?.0)),
            Listener::Unix { listener, .. } => Ok(LocalStream::Unix(listener.accept().await?.0)),
        }
    }
}

/// For this user only. A socket whose owner is gone is replaced.
fn bind_unix(path: PathBuf) -> io::Result<Listener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives the file the mode of the socket that is bound. Later the path may lead to another file, and others may have connected.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    let (file, _) = SocketFile::take_over(&socket, Entry::at(&path, Fuse::Entered)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    let listener = std::os::unix::net::UnixListener::from(socket);
    let listener = UnixListener::from_std(listener)?;
    Ok(Listener::Unix {
        listener,
        path,
        _file: Box::new(file),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn a_socket_is_private_and_taken_over_only_from_the_dead() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        // A dropped socket would not do: a process that another test starts may hold it for a moment.
        let kind = rustix::fs::FileType::Socket;
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, Mode::RWXU, 0).unwrap();
        let place = Place::Unix {
            path: path.as_os_str().as_encoded_bytes().to_vec(),
        };
        let listener = Listener::bind(&place).await.unwrap();
        let mode = std::fs::symlink_metadata(&path).unwrap().permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        let error = Listener::bind(&place).await.err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "precious").unwrap();
        let error = Listener::bind(&place).await.err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }
}
