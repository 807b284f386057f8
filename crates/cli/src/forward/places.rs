//! Where this process listens on the host.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use tokio::net::{TcpListener, UnixListener};
use wire::agent::forward::Place;

use super::specification;
use super::stream::{LocalStream, path_of};

/// A socket that listens; a UNIX socket's file is removed at the end.
pub(super) enum Listener {
    Tcp(TcpListener, Place),
    Unix(UnixListener, PathBuf),
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
            let message = format!("cannot listen at {}: {error}", specification::words(place));
            io::Error::new(error.kind(), message)
        })
    }

    /// Where it listens, in words.
    pub(super) fn place(&self) -> String {
        match self {
            Listener::Tcp(_, place) => specification::words(place),
            Listener::Unix(_, path) => path.display().to_string(),
        }
    }

    pub(super) async fn accept(&self) -> io::Result<LocalStream> {
        match self {
            Listener::Tcp(listener, _) => Ok(LocalStream::tcp(listener.accept().await?.0)),
            Listener::Unix(listener, _) => Ok(LocalStream::Unix(listener.accept().await?.0)),
        }
    }
}

/// For this user only. A socket whose owner is gone is replaced.
fn bind_unix(path: PathBuf) -> io::Result<Listener> {
    let listener = match UnixListener::bind(&path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_dead(&path) => {
            std::fs::remove_file(&path)?;
            UnixListener::bind(&path)?
        }
        bound => bound?,
    };
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok(Listener::Unix(listener, path))
}

fn is_dead(path: &std::path::Path) -> bool {
    std::os::unix::net::UnixStream::connect(path)
        .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            // Somebody may have removed it, which is as good.
            let _ = std::fs::remove_file(path);
        }
    }
}
