//! The guest's way to others: vsock, or in tests what takes its place.

use std::io;
use std::os::fd::OwnedFd;

use wire::directory::Request;
use wire::switchboard::link;

use crate::directory::{self, AskError};
use crate::{host_socket, transport};

/// The guest's way to others. Its sockets block.
pub(super) trait Network: Send + Sync + std::fmt::Debug {
    /// The CID of a VM, by the name that this guest knows it by.
    fn resolve(&self, name: &str) -> Result<u32, AskError>;

    /// Calls the host's switchboard, as the guest's agent.
    fn dial_switchboard(&self) -> io::Result<OwnedFd>;

    /// A socket with a port of its own, to call from.
    fn bind(&self) -> io::Result<(OwnedFd, u32)>;

    /// Makes a call.
    fn connect(&self, socket: &OwnedFd, cid: u32, port: u32) -> io::Result<()>;

    /// Calls the host on the way that there is without vsock.
    fn connect_without_vsock(&self, port: u32) -> io::Result<OwnedFd>;

    /// Listens at a port, or at any if it is 0: the socket, which does not block, and the port.
    fn listen(&self, port: u32) -> io::Result<(OwnedFd, u32)>;

    /// The next caller, and the CID and port it calls from; nothing if there is none.
    fn accept(&self, listener: &OwnedFd) -> io::Result<Option<(OwnedFd, u32, u32)>>;
}

/// Vsock.
#[derive(Debug)]
pub(super) struct Vsock;

impl Network for Vsock {
    fn resolve(&self, name: &str) -> Result<u32, AskError> {
        let name = name.to_owned();
        let answer = directory::ask_host(&Request::Resolve { name })?;
        answer.parse().map_err(|_| AskError::Garbage)
    }

    fn dial_switchboard(&self) -> io::Result<OwnedFd> {
        transport::dial_host_as_agent(link::PORT)
    }

    fn bind(&self) -> io::Result<(OwnedFd, u32)> {
        transport::bind_anywhere()
    }

    fn connect(&self, socket: &OwnedFd, cid: u32, port: u32) -> io::Result<()> {
        transport::connect(socket, cid, port)
    }

    fn connect_without_vsock(&self, port: u32) -> io::Result<OwnedFd> {
        let socket = host_socket::dial(port)?;
        rustix::io::ioctl_fionbio(&socket, false)?;
        Ok(socket)
    }

    fn listen(&self, port: u32) -> io::Result<(OwnedFd, u32)> {
        transport::listen_for_guest(port)
    }

    fn accept(&self, listener: &OwnedFd) -> io::Result<Option<(OwnedFd, u32, u32)>> {
        transport::accept_anybody(listener)
    }
}
