//! A guest with a serial port: its agent's end of the link, and the channels in it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use serial::{Cut, Driver, Handle, Options, PeerEvent, Port, Refusal, Stream};

use crate::support::PATIENCE;

/// An end of a channel in the guest.
pub struct Channel {
    pub stream: UnixStream,
    /// Whether an end of it is one.
    pub cut: Cut,
}

impl Channel {
    /// A channel, and what the link has of it.
    fn new() -> (Channel, Stream) {
        let (stream, carried) = UnixStream::pair().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let carried = Stream::from(carried);
        let cut = carried.cut.clone();
        (Channel { stream, cut }, carried)
    }
}

/// Dropping it is the agent's end.
pub struct SerialGuest {
    handle: Handle,
    accepted: Receiver<Channel>,
}

struct GuestPort {
    path: PathBuf,
    accepted: Sender<Channel>,
    came: Sender<()>,
}

impl SerialGuest {
    /// Connects to the daemon's socket as the VM's VMM does, and waits until the daemon answers.
    pub fn start(path: &Path) -> SerialGuest {
        let (accepted, taken) = channel();
        let (came, comes) = channel();
        let path = path.to_owned();
        let port = GuestPort {
            path,
            accepted,
            came,
        };
        let guest = SerialGuest {
            handle: Driver::start("guest", Box::new(port), Options::default()).unwrap(),
            accepted: taken,
        };
        comes.recv_timeout(PATIENCE).unwrap();
        guest
    }

    pub fn accept(&self) -> Channel {
        self.accepted.recv_timeout(PATIENCE).unwrap()
    }

    /// Asks for a port of the host, without waiting for the answer.
    pub fn dial(&self, port: u32) -> (Channel, Receiver<Result<(), Refusal>>) {
        let (channel, carried) = Channel::new();
        let (answer, answered) = std::sync::mpsc::channel();
        self.handle.dial(
            port,
            carried,
            Box::new(move |result| drop(answer.send(result))),
        );
        (channel, answered)
    }
}

impl Port for GuestPort {
    fn open(&mut self, _now: Instant) -> io::Result<OwnedFd> {
        Ok(UnixStream::connect(&self.path)?.into())
    }

    fn accept(&mut self, _port: u32) -> Result<Stream, Refusal> {
        let (channel, carried) = Channel::new();
        // The test may be over.
        let _ = self.accepted.send(channel);
        Ok(carried)
    }

    fn on_peer(&mut self, event: PeerEvent) {
        if event == PeerEvent::Came {
            let _ = self.came.send(());
        }
    }
}
