//! A connection of a program of the host, over TCP or a UNIX socket.

use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use sys::tcp_callers::Caller;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::{Instant, timeout_at};
use wire::agent::forward::Place;

use crate::unix::{CONNECT_TIMEOUT, connect_later};

pub(super) enum LocalStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

pub(super) fn path_of(path: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(path))
}

impl LocalStream {
    pub(super) fn tcp(stream: TcpStream) -> LocalStream {
        // What comes was put together by the program that sent it: Nagle's wait would only add to the line's.
        let _ = stream.set_nodelay(true);
        // Until all has passed its close is a reset, also when this process is killed: the program is not to take what it got for all there was.
        let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
        LocalStream::Tcp(stream)
    }

    /// Whether a program of this process's user, or of root, has connected.
    pub(super) fn is_of_this_user(&self) -> bool {
        let LocalStream::Tcp(stream) = self else {
            // The file is this user's alone.
            return true;
        };
        let (Ok(own), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else {
            return false;
        };
        let user = rustix::process::geteuid().as_raw();
        [Caller::User(user), Caller::User(0)].contains(&Caller::of(own, peer))
    }

    pub(super) async fn connect(to: &Place) -> io::Result<LocalStream> {
        let connected = async {
            match to {
                Place::Tcp { host, port } => {
                    let deadline = Instant::now() + CONNECT_TIMEOUT;
                    let addresses = lookup_host((host.as_str(), *port)).await?;
                    let stream = first_of(&addresses.collect::<Vec<_>>(), deadline).await;
                    stream.map(LocalStream::tcp)
                }
                Place::Unix { path } => connect_later(&path_of(path), CONNECT_TIMEOUT)
                    .await
                    .map(LocalStream::Unix),
            }
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, connected).await {
            Ok(connected) => connected,
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// All has passed: its close is no reset.
    pub(super) fn end_on_close(&self) {
        if let LocalStream::Tcp(stream) = self {
            let _ = rustix::net::sockopt::set_socket_linger(stream, None);
        }
    }
}

/// The first that answers. One that does not answer leaves the others their share of the time.
async fn first_of(addresses: &[SocketAddr], deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for (index, address) in addresses.iter().enumerate() {
        let to_come = u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
        let now = Instant::now();
        let share = deadline.saturating_duration_since(now) / to_come;
        match timeout_at(now + share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

impl AsyncRead for LocalStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            LocalStream::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            LocalStream::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            LocalStream::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            LocalStream::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            LocalStream::Tcp(stream) => Pin::new(stream).poll_flush(context),
            LocalStream::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            LocalStream::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            LocalStream::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[tokio::test]
    async fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&silent, 0).unwrap();
        let silent = silent.local_addr().unwrap();
        let _waiting = std::net::TcpStream::connect(silent).unwrap();
        let answering = TcpListener::bind("127.0.0.1:0").unwrap();
        let answering = answering.local_addr().unwrap();
        let deadline = || Instant::now() + Duration::from_secs(1);
        let stream = first_of(&[silent, answering], deadline()).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), answering);
        let error = first_of(&[silent, silent], deadline()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    }
}
