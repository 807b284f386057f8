//! The daemon's end of a circuit that carries datagrams: each is a message where the guest uses SEQPACKET, and has its length
//! before it, as two bytes in network order, where the guest uses a stream (as DNS does over TCP: RFC 7766, section 8).

use std::io;
use std::os::fd::OwnedFd;

use runtime::sockets::watch_descriptor;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::coop::consume_budget;
use wire::vsock::SocketType;

/// The largest datagram, in bytes: what UDP over IPv4 can carry. A guest's larger message is dropped.
pub(crate) const MAX_DATAGRAM_LEN: usize = 65_507;

/// The half that datagrams of the guest come from.
pub(crate) enum FromGuest {
    Stream(OwnedReadHalf),
    SeqPacket(std::sync::Arc<AsyncFd<OwnedFd>>),
}

/// The half that datagrams for the guest go to.
pub(crate) enum ToGuest {
    Stream(OwnedWriteHalf),
    SeqPacket(std::sync::Arc<AsyncFd<OwnedFd>>),
}

/// The halves of the daemon's end.
///
/// # Errors
/// When the runtime cannot watch it.
pub(crate) fn halves(socket: OwnedFd, socket_type: SocketType) -> io::Result<(FromGuest, ToGuest)> {
    match socket_type {
        SocketType::Stream => {
            let (read, write) = UnixStream::from_std(socket.into())?.into_split();
            Ok((FromGuest::Stream(read), ToGuest::Stream(write)))
        }
        SocketType::SeqPacket => {
            let socket = std::sync::Arc::new(watch_descriptor(socket)?);
            Ok((
                FromGuest::SeqPacket(socket.clone()),
                ToGuest::SeqPacket(socket),
            ))
        }
    }
}

impl FromGuest {
    /// The guest's next datagram, in `buffer`, which has [`MAX_DATAGRAM_LEN`] bytes. There is none when the guest has ended the
    /// circuit, or has ended it inside a datagram.
    ///
    /// # Errors
    /// When the circuit was reset.
    pub(crate) async fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            let len = match self {
                FromGuest::Stream(stream) => receive_framed(stream, buffer).await?,
                FromGuest::SeqPacket(socket) => receive_message(socket, buffer).await?,
            };
            match len {
                Some(len) if len > MAX_DATAGRAM_LEN => {
                    tracing::debug!(len, "dropped a guest's message that no datagram can carry");
                }
                len => return Ok(len),
            }
        }
    }
}

/// The length may be larger than a datagram's: then the bytes have been passed over.
async fn receive_framed(
    stream: &mut OwnedReadHalf,
    buffer: &mut [u8],
) -> io::Result<Option<usize>> {
    let len = match stream.read_u16().await {
        Ok(len) => usize::from(len),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut left = len;
    while left > 0 {
        let start = (len - left).min(MAX_DATAGRAM_LEN);
        // Past the largest datagram the same few bytes are overwritten: nothing of it is used.
        let room = match start {
            MAX_DATAGRAM_LEN => &mut buffer[..left.min(MAX_DATAGRAM_LEN)],
            start => &mut buffer[start..len.min(MAX_DATAGRAM_LEN)],
        };
        match stream.read(room).await? {
            0 => return Ok(None),
            got => left -= got,
        }
    }
    Ok(Some(len))
}

async fn receive_message(
    socket: &AsyncFd<OwnedFd>,
    buffer: &mut [u8],
) -> io::Result<Option<usize>> {
    loop {
        // A socket that is always ready would never give other tasks their turn.
        consume_budget().await;
        let mut guard = socket.readable().await?;
        let attempt = guard.try_io(|socket| {
            // With TRUNC the length is the message's, however much of it fits.
            let (_, len) = rustix::net::recv(socket.get_ref(), &mut *buffer, RecvFlags::TRUNC)?;
            Ok(len)
        });
        match attempt {
            Ok(Ok(0)) if has_ended(socket.get_ref()) => return Ok(None),
            Ok(result) => return result.map(Some),
            Err(_) => {}
        }
    }
}

/// Tells the end of a circuit from an empty message, which look the same to a reader.
fn has_ended(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let ending = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    rustix::event::poll(&mut polled, Some(&now)).is_err() || polled[0].revents().intersects(ending)
}

impl ToGuest {
    /// Sends the guest a datagram of at most [`MAX_DATAGRAM_LEN`] bytes, when it has room. An empty one cannot be told from
    /// the circuit's end by a guest that uses SEQPACKET, and is dropped.
    ///
    /// # Errors
    /// When the circuit has ended.
    pub(crate) async fn send(&mut self, datagram: &[u8]) -> io::Result<()> {
        match self {
            ToGuest::Stream(stream) => {
                let len = u16::try_from(datagram.len())
                    .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
                // In one piece, so that a guest that reads it wakes up once.
                let mut framed = Vec::with_capacity(2 + datagram.len());
                framed.extend(len.to_be_bytes());
                framed.extend(datagram);
                stream.write_all(&framed).await
            }
            ToGuest::SeqPacket(_) if datagram.is_empty() => Ok(()),
            ToGuest::SeqPacket(socket) => loop {
                consume_budget().await;
                let mut guard = socket.writable().await?;
                let attempt = guard.try_io(|socket| {
                    let sent = rustix::net::send(socket.get_ref(), datagram, SendFlags::NOSIGNAL)?;
                    Ok(sent)
                });
                if let Ok(result) = attempt {
                    return result.map(drop);
                }
            },
        }
    }
}
