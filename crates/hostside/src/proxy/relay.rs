//! Carrying bytes between two sockets, each direction by itself: the end of one is passed on and leaves the other open.
//!
//! A socket is cut when it is closed, unless everything has passed: whatever goes wrong, and however this ends, neither side takes what it has
//! got for everything.

use runtime::sockets;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use device::{Cut, EndedFirst, Left, end_in_order, left_in, next_look};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf as TcpReadHalf, WriteHalf as TcpWriteHalf};
use tokio::net::unix::{ReadHalf as UnixReadHalf, WriteHalf as UnixWriteHalf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, sleep};
use wire::vsock::SocketType;

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

    /// What says whether an end of it is one, where the socket cannot.
    fn cut(&self) -> Option<Cut> {
        None
    }

    /// If wanted, set when we ended it first.
    fn ended_first(&self) -> Option<EndedFirst> {
        None
    }

    /// From here on its close is a reset, where it knows such a thing, also when this process is killed.
    fn begin(&self) {}

    /// Everything has passed: its close is an end.
    fn end(&mut self) {}

    /// What its peer has yet to take, where that is in memory of the host's that nothing else counts.
    fn left(&self) -> Left {
        Left::Nothing
    }
}

impl Socket for TcpStream {
    type Reader<'a> = TcpReadHalf<'a>;
    type Writer<'a> = TcpWriteHalf<'a>;

    fn directions(&mut self) -> (TcpReadHalf<'_>, TcpWriteHalf<'_>) {
        self.split()
    }

    fn begin(&self) {
        // It fails only for what is no TCP socket.
        let _ = rustix::net::sockopt::set_socket_linger(self.as_fd(), Some(Duration::ZERO));
    }

    fn end(&mut self) {
        end_in_order(&*self);
    }

    fn left(&self) -> Left {
        left_in(self.as_fd())
    }
}

/// A UNIX socket is reset when it is closed with something unread in it, and not otherwise: it can only be closed.
impl Socket for UnixStream {
    type Reader<'a> = UnixReadHalf<'a>;
    type Writer<'a> = UnixWriteHalf<'a>;

    fn directions(&mut self) -> (UnixReadHalf<'_>, UnixWriteHalf<'_>) {
        self.split()
    }

    fn left(&self) -> Left {
        left_in(self.as_fd())
    }
}

/// The daemon's end of a circuit whose bytes it carries itself.
pub(crate) struct CircuitEnd {
    // Dropped first: it says that the circuit is cut before the socket is closed.
    guard: CutOnDrop,
    pub(crate) stream: UnixStream,
}

/// Cuts a circuit when it is dropped.
struct CutOnDrop(Option<Cut>);

impl Drop for CutOnDrop {
    fn drop(&mut self) {
        if let Some(cut) = &self.0 {
            cut.store(true, Ordering::Release);
        }
    }
}

impl CircuitEnd {
    /// Both ends: the daemon's, and the data plane's with what says whether an end of it is one.
    ///
    /// # Errors
    /// That the system has no room.
    pub(crate) fn pair() -> io::Result<(CircuitEnd, OwnedFd, Cut)> {
        let (ours, theirs) = sockets::pair(SocketType::Stream)?;
        let stream = UnixStream::from_std(ours.into())?;
        let cut = Cut::default();
        let guard = CutOnDrop(Some(cut.clone()));
        Ok((CircuitEnd { guard, stream }, theirs, cut))
    }

    /// Nothing more is to pass, and nothing is missing: its close is an end.
    pub(crate) fn ended(mut self) -> UnixStream {
        self.end();
        self.stream
    }
}

impl Socket for CircuitEnd {
    type Reader<'a> = UnixReadHalf<'a>;
    type Writer<'a> = UnixWriteHalf<'a>;

    fn directions(&mut self) -> (UnixReadHalf<'_>, UnixWriteHalf<'_>) {
        self.stream.split()
    }

    fn cut(&self) -> Option<Cut> {
        self.guard.0.clone()
    }

    fn end(&mut self) {
        self.guard.0 = None;
    }
}

/// Carries bytes until both directions have ended; the close of the sockets is an end then. When one breaks, or when this is dropped before, both
/// are cut. It lasts until the peers have taken everything.
pub(crate) async fn relay(one: &mut impl Socket, other: &mut impl Socket, share: &Share) {
    // Beside what the sockets say themselves.
    let cuts = [one.cut(), other.cut()].map(Option::unwrap_or_default);
    let ended_first = [one.ended_first(), other.ended_first()].map(Option::unwrap_or_default);
    let result = {
        let (mut from_one, mut to_one) = one.directions();
        let (mut from_other, mut to_other) = other.directions();
        let broken = [AtomicBool::new(false), AtomicBool::new(false)];
        let over = [AtomicBool::new(false), AtomicBool::new(false)];
        let [one_is, other_is] = [0, 1].map(|side| State {
            cut: &cuts[side],
            broken: &broken[side],
            over: &over[side],
            ended_first: &ended_first[side],
        });
        tokio::try_join!(
            carry((&mut from_one, one_is), (&mut to_other, other_is), share),
            carry((&mut from_other, other_is), (&mut to_one, one_is), share),
        )
        .map(|_| broken.iter().any(|broken| broken.load(Ordering::Relaxed)))
    };
    if matches!(result, Ok(false)) {
        one.end();
        other.end();
        let start = Instant::now();
        while [one.left(), other.left()].contains(&Left::Something) {
            sleep(next_look(start.elapsed())).await;
        }
    }
}

/// Whether the end of a socket is one.
#[derive(Clone, Copy)]
struct State<'a> {
    cut: &'a AtomicBool,
    /// It has been reset, which the system says once: what it sent before is still to be read.
    broken: &'a AtomicBool,
    /// No more comes from it.
    over: &'a AtomicBool,
    /// We have ended it before.
    ended_first: &'a AtomicBool,
}

impl State<'_> {
    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire) || self.broken.load(Ordering::Relaxed)
    }
}

async fn carry(
    (from, from_is): (&mut (impl AsyncRead + Unpin), State<'_>),
    (to, to_is): (&mut (impl AsyncWrite + Unpin), State<'_>),
    share: &Share,
) -> io::Result<()> {
    let mut buffer = vec![0; share.piece()];
    loop {
        let len = from.read(&mut buffer).await?;
        if len == 0 {
            if from_is.is_cut() {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            from_is.over.store(true, Ordering::Relaxed);
            if !to_is.over.load(Ordering::Relaxed) {
                to_is.ended_first.store(true, Ordering::Release);
            }
            return match to.shutdown().await {
                // It has ended by itself, as it was to.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
                result => result,
            };
        }
        share.pay(len).await;
        let sent = async {
            to.write_all(&buffer[..len]).await?;
            to.flush().await
        };
        match sent.await {
            Err(error) if is_broken(&error) => {
                to_is.broken.store(true, Ordering::Relaxed);
                return Ok(());
            }
            result => result?,
        }
    }
}

/// Whether the other side takes no more, which leaves what it has sent.
fn is_broken(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), ConnectionReset | BrokenPipe)
}

#[cfg(test)]
mod tests {
    use rustix::net::sockopt::{set_socket_recv_buffer_size, set_tcp_user_timeout};
    use tokio::net::TcpListener;
    use tokio::task::JoinHandle;

    use super::*;

    /// A server that answers before it has read everything, and closes.
    #[tokio::test]
    async fn what_was_sent_before_a_reset_still_arrives() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut server = TcpStream::connect(address).await.unwrap();
        let (mut near_server, _) = listener.accept().await.unwrap();
        let (mut guest, theirs, cut) = CircuitEnd::pair().unwrap();
        let theirs = std::os::unix::net::UnixStream::from(theirs);
        let mut theirs = UnixStream::from_std(theirs).unwrap();
        // All of it is there before the relay begins, which is the first to hear of the reset by sending.
        let answer: Vec<u8> = (0..50_000_u32).map(|index| index as u8).collect();
        near_server.write_all(b"unread").await.unwrap();
        server.readable().await.unwrap();
        server.write_all(&answer).await.unwrap();
        drop(server);
        near_server.ready(tokio::io::Interest::ERROR).await.unwrap();
        theirs.write_all(b"more").await.unwrap();
        guest.stream.readable().await.unwrap();
        let relayed = tokio::spawn(async move {
            relay(&mut guest, &mut near_server, &Share::default()).await;
        });
        let mut arrived = Vec::new();
        theirs.read_to_end(&mut arrived).await.unwrap();
        assert!(arrived == answer, "{} bytes arrived", arrived.len());
        relayed.await.unwrap();
        assert!(cut.load(Ordering::Acquire), "and it is no end");
    }

    const LEFT: usize = 64 << 10;

    /// A guest that has sent something and ended, and a TCP server that has ended and takes nothing of it. With another descriptor of our socket.
    async fn ended() -> (JoinHandle<()>, std::net::TcpStream, OwnedFd) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        set_socket_recv_buffer_size(&listener, 16384).unwrap();
        let address = listener.local_addr().unwrap();
        let mut near_server = TcpStream::connect(address).await.unwrap();
        near_server.begin();
        let ours = near_server.as_fd().try_clone_to_owned().unwrap();
        let (server, _) = listener.accept().unwrap();
        server.shutdown(std::net::Shutdown::Write).unwrap();
        let (mut guest, theirs, _) = CircuitEnd::pair().unwrap();
        let theirs = std::os::unix::net::UnixStream::from(theirs);
        let mut theirs = UnixStream::from_std(theirs).unwrap();
        let relayed = tokio::spawn(async move {
            relay(&mut guest, &mut near_server, &Share::default()).await;
        });
        theirs.write_all(&[1; LEFT]).await.unwrap();
        theirs.shutdown().await.unwrap();
        theirs.read_to_end(&mut Vec::new()).await.unwrap();
        for _ in 0..100 {
            tokio::task::yield_now().await;
            assert!(!relayed.is_finished());
        }
        (relayed, server, ours)
    }

    #[tokio::test]
    async fn a_relay_lasts_until_its_peer_has_taken_everything() {
        let (relayed, mut server, _) = ended().await;
        let reader =
            tokio::task::spawn_blocking(move || std::io::copy(&mut server, &mut std::io::sink()));
        relayed.await.unwrap();
        assert_eq!(reader.await.unwrap().unwrap(), LEFT as u64);
    }

    #[tokio::test]
    async fn a_relay_ends_when_its_peer_is_given_up() {
        let (relayed, mut server, ours) = ended().await;
        set_tcp_user_timeout(&ours, 1).unwrap();
        relayed.await.unwrap();
        drop(ours);
        let error = std::io::copy(&mut server, &mut std::io::sink()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    /// The configuration has changed, or the VM is gone.
    #[tokio::test]
    async fn what_is_left_goes_out_with_its_end_when_a_relay_is_given_up() {
        let (relayed, mut server, ours) = ended().await;
        drop(ours);
        relayed.abort();
        assert!(relayed.await.unwrap_err().is_cancelled());
        let read = std::io::copy(&mut server, &mut std::io::sink()).unwrap();
        assert_eq!(read, LEFT as u64);
    }
}
