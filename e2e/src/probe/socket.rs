//! AF_VSOCK sockets of a guest.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};

/// Any context identifier: this guest, in an address to bind to.
const ANY_CID: u32 = u32::MAX;

/// A type of socket by its word in a step: nothing or `stream`, or `seqpacket`.
pub(super) fn socket_type(word: Option<&str>) -> anyhow::Result<SockType> {
    match word {
        None | Some("stream") => Ok(SockType::Stream),
        Some("seqpacket") => Ok(SockType::SeqPacket),
        Some(other) => anyhow::bail!("{other:?} is not a type of socket"),
    }
}

fn new(socket_type: SockType) -> io::Result<OwnedFd> {
    Ok(nix::sys::socket::socket(
        AddressFamily::Vsock,
        socket_type,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?)
}

pub(super) fn connect(cid: u32, port: u32, socket_type: SockType) -> io::Result<OwnedFd> {
    let socket = new(socket_type)?;
    nix::sys::socket::connect(socket.as_raw_fd(), &VsockAddr::new(cid, port))?;
    Ok(socket)
}

/// Dials without waiting for the answer, from this port of the guest if one is given.
pub(super) fn dial(
    cid: u32,
    port: u32,
    socket_type: SockType,
    from: Option<u32>,
) -> io::Result<OwnedFd> {
    let socket = new(socket_type)?;
    if let Some(from) = from {
        nix::sys::socket::bind(socket.as_raw_fd(), &VsockAddr::new(ANY_CID, from))?;
    }
    rustix::io::ioctl_fionbio(&socket, true)?;
    match nix::sys::socket::connect(socket.as_raw_fd(), &VsockAddr::new(cid, port)) {
        Ok(()) | Err(nix::errno::Errno::EINPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn listen(port: u32, socket_type: SockType, backlog: i32) -> io::Result<OwnedFd> {
    let socket = new(socket_type)?;
    nix::sys::socket::bind(socket.as_raw_fd(), &VsockAddr::new(ANY_CID, port))?;
    rustix::net::listen(&socket, backlog)?;
    Ok(socket)
}

pub(super) fn accept(listener: impl AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?)
}

/// The context identifier and port at the other end.
pub(super) fn peer(socket: &OwnedFd) -> io::Result<(u32, u32)> {
    let address: VsockAddr = nix::sys::socket::getpeername(socket.as_raw_fd())?;
    Ok((address.cid(), address.port()))
}

/// Receives into `buffer`; a signal is no reason to stop.
pub(super) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    flags: RecvFlags,
) -> Result<usize, Errno> {
    loop {
        match rustix::net::recv(&socket, &mut *buffer, flags) {
            Ok((count, _)) => return Ok(count),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Sends all of `bytes` in as many calls as it takes.
pub(super) fn send_all(socket: impl AsFd, mut bytes: &[u8], flags: SendFlags) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::net::send(&socket, bytes, flags | SendFlags::NOSIGNAL) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The name of an error, `ECONNRESET` for instance.
pub(super) fn name(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => format!("{:?}", nix::errno::Errno::from_raw(number)),
        None => error.to_string(),
    }
}
