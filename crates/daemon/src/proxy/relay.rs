//! Carrying bytes between two sockets, each direction by itself: the end of one is passed on and leaves the other open.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf as TcpReadHalf, WriteHalf as TcpWriteHalf};
use tokio::net::unix::{ReadHalf as UnixReadHalf, WriteHalf as UnixWriteHalf};
use tokio::net::{TcpStream, UnixStream};

use super::rules::Share;

/// A stream socket of the host.
pub(crate) trait Socket {
    type Reader<'a>: AsyncRead + Unpin
    where
        Self: 'a;
    type Writer<'a>: AsyncWrite + Unpin
    where
        Self: 'a;

    /// Its two directions.
    fn directions(&mut self) -> (Self::Reader<'_>, Self::Writer<'_>);

    /// Makes its end a reset where it knows such a thing, so that the other end does not take what it has got for everything.
    fn reset(&self);
}

impl Socket for TcpStream {
    type Reader<'a> = TcpReadHalf<'a>;
    type Writer<'a> = TcpWriteHalf<'a>;

    fn directions(&mut self) -> (TcpReadHalf<'_>, TcpWriteHalf<'_>) {
        self.split()
    }

    fn reset(&self) {
        // It fails only for what is no TCP socket.
        let _ = rustix::net::sockopt::set_socket_linger(self.as_fd(), Some(Duration::ZERO));
    }
}

impl Socket for UnixStream {
    type Reader<'a> = UnixReadHalf<'a>;
    type Writer<'a> = UnixWriteHalf<'a>;

    fn directions(&mut self) -> (UnixReadHalf<'_>, UnixWriteHalf<'_>) {
        self.split()
    }

    /// A UNIX socket is reset when it is closed with something unread in it, and not otherwise: all that is left is to close both
    /// directions, which is what follows.
    fn reset(&self) {}
}

/// Carries bytes until both directions have ended. When one breaks, both are cut, as a reset. The sockets are to be closed then.
pub(crate) async fn relay(one: &mut impl Socket, other: &mut impl Socket, share: &Share) {
    let result = {
        let (mut from_one, mut to_one) = one.directions();
        let (mut from_other, mut to_other) = other.directions();
        tokio::try_join!(
            carry(&mut from_one, &mut to_other, share),
            carry(&mut from_other, &mut to_one, share),
        )
    };
    if result.is_err() {
        one.reset();
        other.reset();
    }
}

async fn carry(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    share: &Share,
) -> io::Result<()> {
    let mut buffer = vec![0; share.piece()];
    loop {
        let len = from.read(&mut buffer).await?;
        if len == 0 {
            return match to.shutdown().await {
                // It has ended by itself, as it was to.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
                result => result,
            };
        }
        share.pay(len).await;
        to.write_all(&buffer[..len]).await?;
    }
}
