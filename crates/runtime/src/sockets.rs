//! Pairs of sockets whose one end is the daemon's, and descriptors that a runtime watches.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags};
use tokio::io::unix::AsyncFd;
use wire::vsock::SocketType;

/// Two connected UNIX sockets of a type that do not block: the daemon's end and the guest's. No descriptors can be sent through them.
///
/// # Errors
/// When the system has no descriptors left.
pub fn pair(socket_type: SocketType) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let family = AddressFamily::UNIX;
    let (ours, theirs) = rustix::net::socketpair(family, kernel_type(socket_type), flags, None)?;
    for socket in [&ours, &theirs] {
        sys::peer::refuse_descriptors(socket.as_fd())?;
    }
    Ok((ours, theirs))
}

/// The kernel's word for a type of socket.
pub fn kernel_type(socket_type: SocketType) -> rustix::net::SocketType {
    match socket_type {
        SocketType::Stream => rustix::net::SocketType::STREAM,
        SocketType::SeqPacket => rustix::net::SocketType::SEQPACKET,
    }
}

/// Has the runtime watch a descriptor.
// In tokio's latest versions the function is deprecated for one whose caller promises that the descriptor is not closed meanwhile. An
// `OwnedFd` cannot break that promise; and making it takes a word that this crate forbids itself.
#[allow(deprecated)]
pub fn watch_descriptor(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(descriptor)
}
