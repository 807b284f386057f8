//! Connecting to TCP servers of several addresses.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use config::listeners::Spoken;
use device::{EndedFirst, Left};
use rustix::net::sockopt::{set_socket_keepalive, set_socket_linger};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use vsock::Reason;

use config::MAX_ADDRESSES;

use super::identity::About;
use super::own::OwnListeners;
use super::ports::{PortRoom, Ports};
use super::relay::Socket;

/// How long one address is waited for before the next is tried beside it (RFC 8305, section 5).
const HEAD_START: Duration = Duration::from_millis(250);

/// A server that has been reached. Its close is a reset until it is known to have ended.
pub(crate) struct Server {
    pub(crate) stream: TcpStream,
    /// Dropped behind the stream.
    pub(crate) port: PortRoom,
}

impl Socket for Server {
    type Reader<'a> = ReadHalf<'a>;
    type Writer<'a> = WriteHalf<'a>;

    fn directions(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        self.stream.split()
    }

    fn ended_first(&self) -> Option<EndedFirst> {
        Some(self.port.ended_first())
    }

    fn end(&mut self) {
        self.stream.end();
    }

    fn left(&self) -> Left {
        self.stream.left()
    }
}

/// Connects to the first address that answers: they are tried in their order, each a little after the one before, or at once
/// when that one has failed, or the VM has its share of the ports towards it.
///
/// # Errors
/// What the addresses have answered; of several answers, the one that says most. That one is the daemon's own counts as failed.
pub(crate) async fn connect(
    addresses: &[SocketAddr],
    timeout: Duration,
    about: &About,
    own: &OwnListeners,
    ports: &Ports,
) -> Result<Server, Reason> {
    let deadline = Instant::now() + timeout;
    if ports.connections().refuses(&about.vm) {
        return Err(has_filled_memory(about));
    }
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
            Some(address) => match ports.take(&about.vm, address) {
                Some(port) => {
                    attempts.spawn(attempt(socket_for(address), address, port));
                }
                None => {
                    failure = more_telling(failure, has_its_share(address, about));
                    continue;
                }
            },
            None if attempts.is_empty() => return Err(failure.unwrap_or(Reason::Unreachable)),
            None => {}
        }
        let more = waiting.len() > 0;
        tokio::select! {
            Some(done) = attempts.join_next() => match done {
                Ok(Ok(mut server)) => {
                    let stream = &server.stream;
                    // It may have become the host's, or a published port, meanwhile.
                    let (from, to) = ends(stream.local_addr(), stream.peer_addr())?;
                    refuse_own(Some(from), to, Spoken::Tcp, about, own)?;
                    set_options(stream).map_err(|_| Reason::HostFailed)?;
                    let counted = server.port.connected(stream);
                    counted.map_err(|_| Reason::HostFailed)?;
                    return Ok(server);
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

fn socket_for(address: SocketAddr) -> io::Result<TcpSocket> {
    match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }
}

async fn attempt(
    socket: io::Result<TcpSocket>,
    address: SocketAddr,
    port: PortRoom,
) -> io::Result<Server> {
    let socket = socket?;
    // Also of one that is given up: an end would keep the port for a minute.
    set_socket_linger(&socket, Some(Duration::ZERO))?;
    let stream = socket.connect(address).await?;
    if is_itself(stream.local_addr()?, stream.peer_addr()?) {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(Server { stream, port })
}

/// Refuses an address because of what the VM has there already.
fn has_its_share(address: SocketAddr, About { name, vm }: &About) -> Reason {
    tracing::warn!(name, vm, %address, "not called: a quarter of the host's ports for connections to this address are this VM's, with those that were ended from here in the last minute: let its programs keep connections open, or widen net.ipv4.ip_local_port_range");
    Reason::ServiceShare
}

/// Refuses a call because of what was in the queues of the VM's other connections.
fn has_filled_memory(About { name, vm }: &About) -> Reason {
    tracing::warn!(
        name,
        vm,
        "not called: what this VM's connections had in their queues filled the host's memory for TCP less than a minute ago"
    );
    Reason::ServiceShare
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

/// Whether a socket has reached itself: no listener, and the system has given it the very port that it calls (RFC 9293, section 3.5). It would
/// answer instead of the server, and keep the server from its port.
pub(crate) fn is_itself(from: SocketAddr, to: SocketAddr) -> bool {
    (from.ip(), from.port()) == (to.ip(), to.port())
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
        Reason::ServiceShare => 4,
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
    use crate::proxy::ports::LocalPorts;
    use std::net::{Ipv4Addr, TcpListener};

    const PATIENCE: Duration = Duration::from_secs(30);

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
    }

    /// An address without a listener: it is closed, and the port has not been given away since.
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
            &Ports::default(),
        ));
        let stream = stream.expect("connected").stream;
        assert_eq!(stream.peer_addr().expect("a peer"), address);
        assert!(stream.nodelay().expect("an option"));
        assert_eq!(rustix::net::sockopt::socket_keepalive(&stream), Ok(true));
    }

    #[test]
    fn a_call_to_a_port_where_nobody_listens_does_not_reach_itself() {
        let ports = Ports::default();
        runtime().block_on(async {
            for any in ["127.0.0.1:0", "[::1]:0"] {
                let any = any.parse().expect("an address");
                let socket = socket_for(any).expect("a socket");
                // As the system does it by chance, one time in some thousands.
                socket.bind(any).expect("a port");
                let itself = socket.local_addr().expect("an address");
                let port = ports.take("web", itself).expect("a port");
                let error = attempt(Ok(socket), itself, port).await.err();
                let error = error.expect("nobody listens");
                assert_eq!(
                    reason_of(&error, &About::default()),
                    Reason::NoListener,
                    "{error}"
                );
                TcpListener::bind(itself).expect("the server can start");
            }
        });
    }

    #[test]
    fn one_vm_has_a_quarter_of_the_ports_towards_an_address() {
        let listeners = [1, 2].map(|last| {
            let address = Ipv4Addr::new(127, 0, 0, last);
            TcpListener::bind((address, 0)).expect("a listener")
        });
        let [one, other] = listeners.each_ref().map(|listener| {
            let address = listener.local_addr();
            address.expect("an address")
        });
        let ports = Ports::new(LocalPorts {
            count: 8,
            reuses_loopback: true,
        });
        let runtime = runtime();
        let connect = |vm: &str, addresses: &[SocketAddr]| {
            let about = About {
                name: "db".to_owned(),
                vm: vm.to_owned(),
            };
            let own = OwnListeners::default();
            runtime.block_on(connect(addresses, PATIENCE, &about, &own, &ports))
        };
        let mut held: Vec<Server> = (0..2)
            .map(|_| connect("web", &[one]).expect("its share"))
            .collect();
        let (refused, _keep) = closed();
        assert_eq!(connect("web", &[one]).err(), Some(Reason::ServiceShare));
        for addresses in [[one, refused], [refused, one]] {
            assert_eq!(connect("web", &addresses).err(), Some(Reason::ServiceShare));
        }
        let further = connect("web", &[one, other]).expect("another address");
        assert_eq!(further.stream.peer_addr().expect("a peer"), other);
        assert!(connect("db", &[one]).is_ok());
        held.pop();
        assert!(connect("web", &[one]).is_ok());
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
            &Ports::default(),
        ));
        assert_eq!(result.err(), Some(Reason::Unreachable));
        for addresses in [[nowhere, refused], [refused, nowhere]] {
            let result = runtime().block_on(connect(
                &addresses,
                PATIENCE,
                &About::default(),
                &OwnListeners::default(),
                &Ports::default(),
            ));
            assert_eq!(result.err(), Some(Reason::NoListener));
        }
        assert_eq!(
            runtime()
                .block_on(connect(
                    &[],
                    PATIENCE,
                    &About::default(),
                    &OwnListeners::default(),
                    &Ports::default()
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
                &Ports::default(),
            )) {
                Ok(server) => held.push(server),
                Err(refusal) => break refusal,
            }
            assert!(held.len() < 100, "a backlog of 0 is full at some time");
        };
        assert_eq!(refusal, Reason::ServiceTimedOut);
    }
}
