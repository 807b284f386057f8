//! Connecting to TCP servers of several addresses.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use config::listeners::Spoken;
use rustix::net::sockopt::set_socket_keepalive;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use vsock::Reason;

use config::MAX_ADDRESSES;

use super::identity::About;
use super::own::OwnListeners;

/// How long one address is waited for before the next is tried beside it (RFC 8305, section 5).
const HEAD_START: Duration = Duration::from_millis(250);

/// Connects to the first address that answers: they are tried in their order, each a little after the one before, or at once
/// when that one has failed.
///
/// # Errors
/// What the addresses have answered; of several answers, the one that says most. That one is the daemon's own counts as failed.
pub(crate) async fn connect(
    addresses: &[SocketAddr],
    timeout: Duration,
    about: &About,
    own: &OwnListeners,
) -> Result<TcpStream, Reason> {
    let deadline = Instant::now() + timeout;
    for address in addresses {
        // Before a port is connected to, which calls its VM.
        refuse_own(None, *address, Spoken::Tcp, about, own)?;
    }
    let mut waiting = addresses.iter().copied().take(MAX_ADDRESSES);
    // What is still being tried when this ends is given up.
    let mut attempts = JoinSet::new();
    let mut failure = None;
    loop {
        match waiting.next() {
            Some(address) => {
                attempts.spawn(TcpStream::connect(address));
            }
            None if attempts.is_empty() => return Err(failure.unwrap_or(Reason::Unreachable)),
            None => {}
        }
        let more = waiting.len() > 0;
        tokio::select! {
            Some(done) = attempts.join_next() => match done {
                Ok(Ok(stream)) => {
                    // It may have become the host's, or a published port, meanwhile.
                    let (from, to) = ends(stream.local_addr(), stream.peer_addr())?;
                    refuse_own(Some(from), to, Spoken::Tcp, about, own)?;
                    set_options(&stream).map_err(|_| Reason::HostFailed)?;
                    return Ok(stream);
                }
                Ok(Err(error)) => failure = more_telling(failure, reason_of(&error, about)),
                Err(_) => failure = more_telling(failure, Reason::HostFailed),
            },
            () = sleep(HEAD_START), if more => {}
            () = sleep_until(deadline) => {
                return Err(more_telling(failure, Reason::ServiceTimedOut).unwrap_or(Reason::ServiceTimedOut));
            }
        }
    }
}

/// Sets what every connection of the proxy has.
pub(crate) fn set_options(stream: &TcpStream) -> io::Result<()> {
    // A circuit forwards what it gets at once; waiting for more is its sender's business.
    stream.set_nodelay(true)?;
    // A peer that has gone without a word must not keep its place for ever.
    Ok(set_socket_keepalive(stream, true)?)
}

/// The addresses of a connected socket.
pub(crate) fn ends(
    from: io::Result<SocketAddr>,
    to: io::Result<SocketAddr>,
) -> Result<(SocketAddr, SocketAddr), Reason> {
    from.and_then(|from| Ok((from, to?)))
        .map_err(|_| Reason::HostFailed)
}

/// Refuses a way to a published port, or one of which that is not known. `from` is known once the socket is connected.
pub(crate) fn refuse_own(
    from: Option<SocketAddr>,
    to: SocketAddr,
    spoken: Spoken,
    About { name, vm }: &About,
    own: &OwnListeners,
) -> Result<(), Reason> {
    match own.are_reached(spoken, from, to) {
        Ok(false) => return Ok(()),
        Ok(true) => {
            tracing::error!(name, vm, address = %to, "not called: expected a server, found a published port of the daemon's own: name another one in the service's to, or write a rule that lets the guest call the VM");
        }
        Err(error) => {
            tracing::error!(name, vm, address = %to, %error, "not called: a port of this number is published, and the kernel does not say whether the address is the host's: let the daemon use netlink");
        }
    }
    Err(Reason::HostFailed)
}

/// What an error of connecting means to the caller.
pub(crate) fn reason_of(error: &io::Error, About { name, vm }: &About) -> Reason {
    match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset => Reason::NoListener,
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => Reason::Unreachable,
        io::ErrorKind::TimedOut => Reason::ServiceTimedOut,
        _ => {
            tracing::warn!(name, vm, %error, "cannot connect");
            Reason::HostFailed
        }
    }
}

/// Of two answers the one that says most: that a host is there says more than that another is not.
fn more_telling(first: Option<Reason>, second: Reason) -> Option<Reason> {
    let rank = |refusal: Reason| match refusal {
        Reason::NoListener => 3,
        Reason::ServiceTimedOut => 2,
        Reason::Unreachable => 1,
        _ => 0,
    };
    match first {
        Some(first) if rank(first) >= rank(second) => Some(first),
        _ => Some(second),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    const PATIENCE: Duration = Duration::from_secs(30);

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
    }

    /// An address where nobody listens: its listener is closed, and nobody else has been given the port since.
    fn closed() -> (SocketAddr, impl Sized) {
        // Bound and not listening: the port stays ours, and a connection to it is refused.
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .expect("a socket");
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        rustix::net::bind(&socket, &any).expect("a port");
        let address = rustix::net::getsockname(&socket).expect("an address");
        let address = SocketAddr::try_from(address).expect("an internet address");
        (address, socket)
    }

    #[test]
    fn the_first_address_that_answers_is_taken() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
        let address = listener.local_addr().expect("an address");
        let (refused, _keep) = closed();
        let stream = runtime().block_on(connect(
            &[refused, refused, address],
            PATIENCE,
            &About::default(),
            &OwnListeners::default(),
        ));
        let stream = stream.expect("connected");
        assert_eq!(stream.peer_addr().expect("a peer"), address);
        assert!(stream.nodelay().expect("an option"));
        assert_eq!(rustix::net::sockopt::socket_keepalive(&stream), Ok(true));
    }

    #[test]
    fn a_refusal_says_more_than_silence_or_no_route() {
        let (refused, _keep) = closed();
        // The broadcast address has no host behind it: Linux answers that the network cannot be reached.
        let nowhere = SocketAddr::from(([255, 255, 255, 255], 1));
        let result = runtime().block_on(connect(
            &[nowhere],
            PATIENCE,
            &About::default(),
            &OwnListeners::default(),
        ));
        assert_eq!(result.err(), Some(Reason::Unreachable));
        for addresses in [[nowhere, refused], [refused, nowhere]] {
            let result = runtime().block_on(connect(
                &addresses,
                PATIENCE,
                &About::default(),
                &OwnListeners::default(),
            ));
            assert_eq!(result.err(), Some(Reason::NoListener));
        }
        assert_eq!(
            runtime()
                .block_on(connect(
                    &[],
                    PATIENCE,
                    &About::default(),
                    &OwnListeners::default()
                ))
                .err(),
            Some(Reason::Unreachable)
        );
    }

    #[test]
    fn a_server_that_says_nothing_is_not_waited_for_longer_than_that() {
        // Its backlog is full, so that the next connection is not answered.
        let listener = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .expect("a socket");
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        rustix::net::bind(&listener, &any).expect("a port");
        rustix::net::listen(&listener, 0).expect("listening");
        let address = rustix::net::getsockname(&listener).expect("an address");
        let address = SocketAddr::try_from(address).expect("an internet address");
        let runtime = runtime();
        let mut held = Vec::new();
        let refusal = loop {
            match runtime.block_on(connect(
                &[address],
                Duration::from_millis(100),
                &About::default(),
                &OwnListeners::default(),
            )) {
                Ok(stream) => held.push(stream),
                Err(refusal) => break refusal,
            }
            assert!(held.len() < 100, "a backlog of 0 is full at some time");
        };
        assert_eq!(refusal, Reason::ServiceTimedOut);
    }
}
