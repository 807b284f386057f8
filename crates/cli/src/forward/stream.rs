//! A connection of a program of the host, over TCP or a UNIX socket.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
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

    pub(super) async fn connect(to: &Place) -> io::Result<LocalStream> {
        let connected = async {
            match to {
                Place::Tcp { host, port } => TcpStream::connect((host.as_str(), *port))
                    .await
                    .map(LocalStream::tcp),
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
