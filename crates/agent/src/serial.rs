//! The host over a virtio-serial port, for guests without vsock.
//!
//! A port has one user: this process. So it carries what the host asks for, channels to [`wire::agent::PORT`], which become sessions as connections over
//! vsock do; and what the guest asks the host for: the agent's own announcement, and whatever other programs dial through the
//! [host socket](crate::host_socket). The other end of the port is the host, by how the machine is built.

mod device;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serial::{Answered, Driver, Handle, Options, PeerEvent, Port, Refusal, RefusalKind, Stream};

use crate::log::say;
use device::Finder;

/// How long the host may take to answer a dial, if it is there.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);

/// Which port the agent uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SerialPort {
    /// The virtio-serial port of this name.
    Named(String),
    /// A UNIX socket that takes the port's place, for trying things out without a machine.
    Socket(PathBuf),
}

impl std::fmt::Display for SerialPort {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SerialPort::Named(name) => write!(formatter, "the virtio-serial port {name}"),
            SerialPort::Socket(path) => write!(formatter, "the serial socket {}", path.display()),
        }
    }
}

/// The host, at the other end of a port.
#[derive(Debug, Default)]
pub struct SerialHost {
    driver: OnceLock<Handle>,
    has_peer: Mutex<bool>,
    came: Condvar,
}

impl SerialHost {
    /// Serves a port, now if it is there, and whenever it comes. `take` is given what the host connects to [`wire::agent::PORT`], and must not wait;
    /// `offer` is called once the port has been there, for other programs of the guest.
    ///
    /// # Errors
    /// The system has no threads or descriptors left.
    pub fn start(
        port: SerialPort,
        take: impl Fn(OwnedFd) + Send + 'static,
        offer: impl FnOnce(&Arc<SerialHost>) + Send + 'static,
    ) -> io::Result<Arc<SerialHost>> {
        let host = Arc::new(SerialHost::default());
        let guest_port = GuestPort {
            finder: Finder::new(&port),
            port,
            take: Box::new(take),
            host: Arc::clone(&host),
            offer: Some(Box::new(offer)),
        };
        let driver = Driver::start("serial", Box::new(guest_port), Options::default())?;
        // It is set here only.
        let _ = host.driver.set(driver);
        Ok(host)
    }

    /// Waits until the host is there.
    pub fn wait(&self) {
        let has_peer = sys::lock(&self.has_peer);
        drop(self.came.wait_while(has_peer, |has_peer| !*has_peer));
    }

    /// Dials a port of the host: a socket that is non-blocking.
    ///
    /// # Errors
    /// The host's refusal, or that it is not there.
    pub fn dial(&self, port: u32) -> io::Result<OwnedFd> {
        let (ours, theirs) = pair()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        // If it comes late, its receiver is gone.
        let answered = move |answer| drop(sender.try_send(answer));
        self.hand_over(port, theirs, Box::new(answered));
        match receiver.recv_timeout(DIAL_TIMEOUT) {
            Ok(Ok(())) => Ok(ours),
            Ok(Err(refusal)) => Err(refused(&refusal)),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Connects a socket to a port of the host.
    pub(crate) fn hand_over(&self, port: u32, socket: OwnedFd, answered: Answered) {
        match self.driver.get() {
            Some(driver) => driver.dial(port, socket.into(), answered),
            None => {
                let words = "the serial port is not open yet";
                answered(Err(Refusal::new(RefusalKind::NotConnected, words)));
            }
        }
    }
}

fn refused(refusal: &Refusal) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionRefused, refusal.to_string())
}

/// Two connected sockets, both non-blocking.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

type Offer = Box<dyn FnOnce(&Arc<SerialHost>) + Send>;

/// The driver's view of the agent.
struct GuestPort {
    port: SerialPort,
    finder: Finder,
    take: Box<dyn Fn(OwnedFd) + Send>,
    host: Arc<SerialHost>,
    /// Offers programs of the guest a way to the host.
    offer: Option<Offer>,
}

impl Port for GuestPort {
    fn open(&mut self, now: Instant) -> io::Result<OwnedFd> {
        let descriptor = self.finder.open(now)?;
        // Not each time that its other end has been away.
        if let Some(offer) = self.offer.take() {
            say!("listening on {}", self.port);
            offer(&self.host);
        }
        Ok(descriptor)
    }

    fn awaited(&self) -> Option<BorrowedFd<'_>> {
        self.finder.awaited()
    }

    fn accept(&mut self, port: u32) -> Result<Stream, Refusal> {
        if port != wire::agent::PORT {
            let words = format!("nothing listens at port {port} of this guest's serial port");
            return Err(Refusal::new(RefusalKind::NobodyListens, words));
        }
        let failed = |error: io::Error| Refusal::new(RefusalKind::Failed, error.to_string());
        let (ours, theirs) = pair().map_err(failed)?;
        (self.take)(ours);
        Ok(theirs.into())
    }

    fn on_peer(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::Came => {
                say!("the host answers at {}", self.port);
                *sys::lock(&self.host.has_peer) = true;
                self.host.came.notify_all();
            }
            PeerEvent::Ended(words) => {
                say!("the connections over {} have ended: {words}", self.port);
                *sys::lock(&self.host.has_peer) = false;
            }
            PeerEvent::NoPort(words) => say!("cannot open {}: {words}", self.port),
            PeerEvent::Disconnected
            | PeerEvent::Resumed
            | PeerEvent::Silent
            | PeerEvent::Speaks => {}
        }
    }
}

#[cfg(test)]
mod tests;
