//! Services that are UDP servers: a circuit is a session with a socket of its own, so that the server can tell one from another and
//! its answers find their way back.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Mutex;
use std::time::Duration;

use config::listeners::Spoken;
use rustix::net::RecvFlags;
use tokio::net::UdpSocket;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep_until};
use vsock::Reason;

use super::datagram::{FromGuest, MAX_DATAGRAM_LEN, ToGuest};
use super::identity::About;
use super::own::OwnListeners;
use super::tcp::{is_itself, reason_of, refuse_own};

/// How long a session lives without a datagram in either direction.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// A socket that speaks to one server.
pub(crate) struct Server {
    socket: UdpSocket,
    from: SocketAddr,
    to: SocketAddr,
}

impl Server {
    /// Sends a datagram, unless a port has been published at the address since, where the guest would be taken for a caller from outside.
    async fn send(&self, datagram: &[u8], own: &OwnListeners) -> io::Result<usize> {
        loop {
            consume_budget().await;
            self.socket.writable().await?;
            let send = || self.socket.try_send(datagram);
            let sent = own.unless_reached(Spoken::Udp, self.from, self.to, send);
            let sent =
                sent.ok_or_else(|| io::Error::other("a port is published at its address now"))?;
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => return sent,
            }
        }
    }
}

/// A socket that speaks to one server. Nothing is sent: whether a server listens shows later.
///
/// # Errors
/// That there is no route, or no socket, or that the server is a published port.
pub(crate) async fn connect(
    server: SocketAddr,
    about: &About,
    own: &OwnListeners,
) -> Result<Server, Reason> {
    refuse_own(None, server, Spoken::Udp, about, own)?;
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let failed = |error: io::Error| reason_of(&error, about);
    let socket = UdpSocket::bind((any, 0)).await.map_err(failed)?;
    let (from, to) = speak_to(&socket, server).await.map_err(failed)?;
    refuse_own(Some(from), to, Spoken::Udp, about, own)?;
    Ok(Server { socket, from, to })
}

/// Connects a socket, and returns both its ends. What others have sent to it before is gone.
async fn speak_to(socket: &UdpSocket, server: SocketAddr) -> io::Result<(SocketAddr, SocketAddr)> {
    socket.connect(server).await?;
    let ends = (socket.local_addr()?, socket.peer_addr()?);
    if is_itself(ends.0, ends.1) {
        // The system chose the server's port, which is free while the server is away.
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    while rustix::net::recv(socket, &mut [0], flags).is_ok() {}
    Ok(ends)
}

/// Carries datagrams until the guest ends the circuit, the server turns out not to be there, or nothing moves any more. `header` is
/// put before each datagram for the server.
pub(crate) async fn relay(
    guest: (FromGuest, ToGuest),
    (server, own): (&Server, &OwnListeners),
    header: &[u8],
    idle_timeout: Duration,
) -> io::Result<()> {
    let (mut from_guest, mut to_guest) = guest;
    let last = Last::default();
    let to_server = async {
        let mut buffer = vec![0; header.len() + MAX_DATAGRAM_LEN];
        buffer[..header.len()].copy_from_slice(header);
        while let Some(len) = from_guest.receive(&mut buffer[header.len()..]).await? {
            last.touch();
            lost_is_lost(server.send(&buffer[..header.len() + len], own).await)?;
        }
        Ok(())
    };
    let from_server = async {
        let mut buffer = vec![0; MAX_DATAGRAM_LEN];
        loop {
            let len = server.socket.recv(&mut buffer).await?;
            last.touch();
            to_guest.send(&buffer[..len]).await?;
        }
    };
    tokio::select! {
        result = to_server => result,
        result = from_server => result,
        () = last.idle(idle_timeout) => Ok(()),
    }
}

/// When something last moved.
pub(crate) struct Last(Mutex<Instant>);

impl Default for Last {
    fn default() -> Last {
        Last(Mutex::new(Instant::now()))
    }
}

impl Last {
    /// Something moves.
    pub(crate) fn touch(&self) {
        *sys::lock(&self.0) = Instant::now();
    }

    /// When it was.
    pub(crate) fn get(&self) -> Instant {
        *sys::lock(&self.0)
    }

    /// Ends when nothing has moved for that long.
    pub(crate) async fn idle(&self, timeout: Duration) {
        loop {
            let end = self.get() + timeout;
            if end <= Instant::now() {
                return;
            }
            sleep_until(end).await;
        }
    }
}

/// A datagram that is too large for the way, or finds no buffer, is lost, as datagrams are.
pub(crate) fn lost_is_lost(sent: io::Result<usize>) -> io::Result<()> {
    use rustix::io::Errno;
    match sent {
        Err(error)
            if [Errno::MSGSIZE, Errno::NOBUFS, Errno::AGAIN]
                .iter()
                .any(|lost| error.raw_os_error() == Some(lost.raw_os_error())) =>
        {
            tracing::debug!(%error, "lost a datagram");
            Ok(())
        }
        other => other.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use runtime::sockets;

    use super::*;
    use crate::proxy::datagram;
    use wire::vsock::SocketType;

    #[test]
    fn a_session_ends_when_nothing_has_moved_for_long_enough() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // Time stands still until nothing else is left to do.
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let server = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
            let address = server.local_addr().expect("an address");
            let (about, own) = (About::default(), OwnListeners::default());
            let socket = connect(address, &about, &own).await.expect("a socket");
            let (ours, theirs) = sockets::pair(SocketType::SeqPacket).expect("two sockets");
            let halves = datagram::halves(ours, SocketType::SeqPacket).expect("halves");
            let start = Instant::now();
            let speak = async {
                for _ in 0..2 {
                    tokio::time::sleep(IDLE_TIMEOUT / 2).await;
                    let flags = rustix::net::SendFlags::empty();
                    rustix::net::send(&theirs, b"x", flags).expect("sent");
                    let mut buffer = [0; 8];
                    server.recv_from(&mut buffer).await.expect("received");
                }
            };
            let (result, ()) =
                tokio::join!(relay(halves, (&socket, &own), b"", IDLE_TIMEOUT), speak);
            assert!(result.is_ok());
            assert_eq!(start.elapsed().as_secs(), 2 * IDLE_TIMEOUT.as_secs());
        });
    }

    #[test]
    fn a_session_is_with_the_server_alone() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let bound = || UdpSocket::bind("127.0.0.1:0");
            let server = bound().await.expect("a socket");
            let (stranger, socket) = (bound().await.expect("one"), bound().await.expect("one"));
            let own = socket.local_addr().expect("an address");
            for _ in 0..3 {
                stranger.send_to(b"stranger", own).await.expect("sent");
            }
            let to = server.local_addr().expect("an address");
            assert_eq!(speak_to(&socket, to).await.expect("connected"), (own, to));
            server.send_to(b"server", own).await.expect("sent");
            let mut buffer = [0; 16];
            let len = socket.recv(&mut buffer).await.expect("received");
            assert_eq!(&buffer[..len], b"server");
            let error = speak_to(&socket, own).await.expect_err("no server");
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        });
    }

    /// They are one task's, and other VMs' circuits are tasks of the same thread.
    #[test]
    fn many_datagrams_that_wait_are_carried_in_turns() {
        const COUNT: usize = 200;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let server = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
            let address = server.local_addr().expect("an address");
            let (about, own) = (About::default(), OwnListeners::default());
            let socket = connect(address, &about, &own).await.expect("a socket");
            let (ours, theirs) = sockets::pair(SocketType::SeqPacket).expect("two sockets");
            let halves = datagram::halves(ours, SocketType::SeqPacket).expect("halves");
            for _ in 0..COUNT {
                let flags = rustix::net::SendFlags::empty();
                rustix::net::send(&theirs, b"x", flags).expect("sent");
            }
            let relayed =
                tokio::spawn(
                    async move { relay(halves, (&socket, &own), b"", IDLE_TIMEOUT).await },
                );
            let mut arrived = 0;
            while arrived == 0 {
                tokio::task::yield_now().await;
                while server.try_recv(&mut [0; 8]).is_ok() {
                    arrived += 1;
                }
            }
            assert!(arrived < COUNT, "others have their turns in between");
            while arrived < COUNT {
                server.recv(&mut [0; 8]).await.expect("received");
                arrived += 1;
            }
            drop(theirs);
            assert!(relayed.await.expect("no panic").is_ok());
        });
    }
}
