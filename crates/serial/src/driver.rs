//! One thread that runs a link over a port's descriptor and the sockets of its channels.

use std::io;
use std::os::fd::OwnedFd;

use wire::serial::Refusal;

use crate::port::{Options, Port, Status};

/// Called once from the driver's thread when the peer has answered. If it accepted, nothing has been written to the socket yet, and nothing is read
/// from or written to it before this returns. It must not wait.
pub type Answered = Box<dyn FnOnce(Result<(), Refusal>) + Send>;

/// Starts drivers.
#[derive(Debug)]
pub struct Driver;

impl Driver {
    /// Starts a thread for this port.
    ///
    /// # Errors
    /// The system has no thread or no descriptors left.
    pub fn start(name: &str, port: Box<dyn Port>, options: Options) -> io::Result<Handle> {
        let _ = (name, port, options);
        todo!()
    }
}

/// A running driver. It ends when this is dropped, or by [`Handle::stop`].
#[derive(Debug)]
pub struct Handle {}

impl Handle {
    /// Opens a channel to a port of the peer for this connected stream socket, which the driver makes non-blocking, and owns from here on. If
    /// the channel is refused the socket is closed after `answered` was called. Where there is no peer, that is at once.
    pub fn dial(&self, port: u32, socket: OwnedFd, answered: Answered) {
        let _ = (port, socket, answered);
        todo!()
    }

    /// How the link is doing.
    pub fn status(&self) -> Status {
        todo!()
    }

    /// Resets all channels, closes the port and waits for the thread.
    pub fn stop(self) {}
}
