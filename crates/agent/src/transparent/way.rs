//! The way out: sockets that become circuits, through an egress service of the host.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::socket::{SockFlag, SockType, VsockAddr};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use wire::destination::Destination;
use wire::socks::{self, METHOD_ACCEPTED, Reply};

use crate::stream::until;
use crate::transport::HOST_CID;

/// Where the sockets come from that stand in for the programs' own, and how one reaches the egress service. It is a trait, so that tests need no AF_VSOCK.
pub(crate) trait Way: Send + Sync {
    /// A stream socket that is not connected, and is closed on exec.
    ///
    /// # Errors
    /// The system's reason.
    fn socket(&self) -> io::Result<OwnedFd>;

    /// Connects such a socket, whether it blocks or not, to the egress service.
    ///
    /// # Errors
    /// The system's reason.
    fn connect(&self, socket: BorrowedFd<'_>, deadline: Instant) -> Result<(), Errno>;

    /// The number that the socket has at this end, once it is connected.
    fn own_port(&self, socket: BorrowedFd<'_>) -> u32;
}

/// The way over vsock: a program's socket is the circuit.
#[derive(Debug)]
pub(crate) struct VsockWay {
    /// The port of the egress service.
    pub(crate) port: u32,
}

/// How long the host may take to answer a vsock request, which it does before it knows where the call is to go.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

impl Way for VsockWay {
    fn socket(&self) -> io::Result<OwnedFd> {
        let family = nix::sys::socket::AddressFamily::Vsock;
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = nix::sys::socket::socket(family, SockType::Stream, flags, None)?;
        sys::sockets::set_vsock_connect_timeout(socket.as_fd(), REQUEST_TIMEOUT)?;
        Ok(socket)
    }

    fn connect(&self, socket: BorrowedFd<'_>, deadline: Instant) -> Result<(), Errno> {
        let address = VsockAddr::new(HOST_CID, self.port);
        let connected = nix::sys::socket::connect(socket.as_raw_fd(), &address);
        match connected.map_err(|errno| Errno::from_raw_os_error(errno as i32)) {
            Err(Errno::INPROGRESS) => {
                wait(socket, PollFlags::OUT, deadline)?;
                rustix::net::sockopt::socket_error(socket)?
            }
            connected => connected,
        }
    }

    fn own_port(&self, socket: BorrowedFd<'_>) -> u32 {
        let own: Result<VsockAddr, _> = nix::sys::socket::getsockname(socket.as_raw_fd());
        own.map_or(0, |own| own.port())
    }
}

/// Makes a program's socket a circuit to this destination. Of the proxy's answer nothing is left in the socket, and nothing behind it is read.
///
/// # Errors
/// What the program's call is to fail with. The socket cannot be used again then.
pub(crate) fn open(
    way: &dyn Way,
    socket: BorrowedFd<'_>,
    to: &Destination,
    deadline: Instant,
) -> Result<(), Errno> {
    way.connect(socket, deadline).map_err(unreachable)?;
    let opened = ask(socket, to, deadline);
    if opened.is_err() {
        // If that fails it is not connected, which is as good.
        let _ = rustix::net::shutdown(socket, Shutdown::Both);
    }
    opened
}

/// The egress service is the whole network: without it there is none.
fn unreachable(errno: Errno) -> Errno {
    match errno {
        Errno::ISCONN | Errno::ALREADY | Errno::INTR => errno,
        _ => Errno::NETUNREACH,
    }
}

fn ask(socket: BorrowedFd<'_>, to: &Destination, deadline: Instant) -> Result<(), Errno> {
    let words = [&socks::GREETING[..], &socks::request(to)].concat();
    let mut rest = &words[..];
    while !rest.is_empty() {
        match rustix::net::send(socket, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => rest = &rest[count..],
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, deadline)?,
            Err(Errno::INTR) => {}
            Err(_) => return Err(Errno::CONNREFUSED),
        }
    }
    let mut method = [0; 2];
    read(socket, &mut method, deadline)?;
    let mut head = [0; 5];
    read(socket, &mut head, deadline)?;
    let len = socks::reply_rest_len(head).filter(|_| method == METHOD_ACCEPTED);
    // An address behind a byte for its length.
    let mut rest = [0; 255 + 2];
    read(socket, &mut rest[..len.ok_or(Errno::PROTO)?], deadline)?;
    match Reply::from_byte(head[1]) {
        Some(Reply::Succeeded) => Ok(()),
        Some(reply) => Err(errno(reply)),
        None => Err(Errno::PROTO),
    }
}

/// What a program sees of a refusal.
fn errno(reply: Reply) -> Errno {
    match reply {
        Reply::NotAllowed => Errno::ACCESS,
        Reply::NetworkUnreachable => Errno::NETUNREACH,
        Reply::HostUnreachable => Errno::HOSTUNREACH,
        Reply::ConnectionRefused => Errno::CONNREFUSED,
        Reply::TimedOut => Errno::TIMEDOUT,
        Reply::Succeeded
        | Reply::GeneralFailure
        | Reply::CommandNotSupported
        | Reply::AddressTypeNotSupported => Errno::CONNABORTED,
    }
}

/// Reads exactly so many bytes.
fn read(socket: BorrowedFd<'_>, bytes: &mut [u8], deadline: Instant) -> Result<(), Errno> {
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::net::recv(socket, &mut bytes[filled..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(Errno::CONNREFUSED),
            Ok((count, _)) => filled += count,
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, deadline)?,
            Err(Errno::INTR) => {}
            Err(_) => return Err(Errno::CONNREFUSED),
        }
    }
    Ok(())
}

fn wait(socket: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> Result<(), Errno> {
    loop {
        let timeout = until(deadline);
        let mut polled = [PollFd::new(&socket, flags)];
        match rustix::event::poll(&mut polled, Some(&timeout)) {
            Ok(0) if Instant::now() >= deadline => return Err(Errno::TIMEDOUT),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno),
        }
    }
}
