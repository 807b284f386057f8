//! A TCP port of the guest that leads to a port of the host: `ringdown-agent forward`.
//!
//! Programs that know nothing of vsock reach a service of the host so, an egress service above all: curl, git, pip and apt take a proxy at
//! 127.0.0.1. Each connection has a thread. At most [`MAX_CONNECTIONS`] are carried, of which a user of the guest, or an address of another machine, has as many as it leaves to others;
//! others wait for a place.
//!
//! The end of either direction is passed on and the other goes on, so a reply after a half-close arrives. A connection that fails on one side
//! is reset on the other, as far as the system knows resets there.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sys::tcp_callers::{Caller, Places};

use crate::host_socket;
use crate::pump::{carry, end_on_close, reset_on_close};

/// The most connections at a time. Each has a thread and two buffers of [`crate::pump::BUFFER_LEN`] bytes.
pub const MAX_CONNECTIONS: usize = 256;

/// The most that wait for a place; one caller may have half of them. Further ones are reset.
const MAX_WAITING: usize = 256;

/// How many may wait to be accepted, so that one caller's flood does not keep the system from noting others' connections.
const BACKLOG: i32 = 1024;

/// The stack of a connection's thread, in bytes.
const STACK_SIZE: usize = 128 * 1024;

/// The wait after an error of accept that says the system is short of something.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Failed connections that are reported in words; of further ones only every so many.
const REPORTED: usize = 16;

/// What is forwarded where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    /// Where programs of the guest connect.
    pub listen: SocketAddr,
    /// The host's port.
    pub host_port: u32,
}

impl Forward {
    /// Reads `--listen ADDRESS:PORT --to-host PORT`, in any order.
    pub fn parse(
        arguments: impl IntoIterator<Item = std::ffi::OsString>,
    ) -> Result<Forward, String> {
        let (mut listen, mut host_port) = (None, None);
        let mut arguments = arguments.into_iter();
        while let Some(option) = arguments.next() {
            let value = arguments.next();
            let text = value.as_deref().and_then(|value| value.to_str());
            match option.to_str() {
                Some("--listen") => {
                    let address = text.and_then(|text| text.parse().ok());
                    let words = "--listen expects an address and a port, such as 127.0.0.1:1080";
                    listen = Some(address.ok_or(words)?);
                }
                Some("--to-host") => {
                    let port = text.and_then(|text| text.parse().ok());
                    let port = port.filter(|port| *port != u32::MAX);
                    let words = "--to-host expects the number of a vsock port, such as 1080";
                    host_port = Some(port.ok_or(words)?);
                }
                _ => return Err(format!("forward: unexpected argument {option:?}")),
            }
        }
        Ok(Forward {
            listen: listen.ok_or("forward expects --listen ADDRESS:PORT")?,
            host_port: host_port.ok_or("forward expects --to-host PORT")?,
        })
    }

    /// Listens and forwards, for ever.
    ///
    /// # Errors
    /// It cannot listen.
    pub fn run(self) -> io::Result<Infallible> {
        let listener = TcpListener::bind(self.listen)?;
        rustix::net::listen(&listener, BACKLOG)?;
        eprintln!("ringdown-agent: forwarding {self}");
        let port = self.host_port;
        serve(&listener, move |caller| {
            host_socket::dial_host_port(port, caller == Caller::User(0))
        })
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} to port {} of the host",
            self.listen, self.host_port
        )
    }
}

/// Forwards the connections of `listener` to what `dial` reaches, for ever.
fn serve(
    listener: &TcpListener,
    dial: impl Fn(Caller) -> io::Result<OwnedFd> + Send + Sync + 'static,
) -> io::Result<Infallible> {
    let shared = Arc::new(Shared {
        dial,
        places: Places::new(MAX_CONNECTIONS),
        failures: AtomicUsize::new(0),
    });
    let waiting = Places::new(MAX_WAITING);
    loop {
        let (client, caller) = match accept(listener) {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                // A caller gone while it waited, or no descriptors: neither ends the forwarding.
                eprintln!("ringdown-agent: cannot accept a connection: {error}");
                std::thread::sleep(ACCEPT_BACKOFF);
                continue;
            }
        };
        let Some(waits) = waiting.try_take(caller) else {
            shared.failed(&format!(
                "{} of one caller's connections wait already",
                MAX_WAITING / 2
            ));
            continue;
        };
        let shared = Arc::clone(&shared);
        let forward = move || {
            let _place = shared.places.take(caller);
            drop(waits);
            if let Err(error) = connect(client, || (shared.dial)(caller)) {
                shared.failed(&error);
            }
        };
        let thread = std::thread::Builder::new()
            .name("forward".into())
            .stack_size(STACK_SIZE)
            .spawn(forward);
        if let Err(error) = thread {
            eprintln!("ringdown-agent: cannot start a thread: {error}");
        }
    }
}

/// What connections have together.
struct Shared<D> {
    dial: D,
    places: Arc<Places>,
    failures: AtomicUsize,
}

impl<D> Shared<D> {
    fn failed(&self, why: &dyn fmt::Display) {
        let count = self.failures.fetch_add(1, Ordering::Relaxed);
        if count < REPORTED || count % REPORTED == 0 {
            eprintln!("ringdown-agent: a connection ended early: {why}");
        }
    }
}

/// A connection, and its maker.
fn accept(listener: &TcpListener) -> io::Result<(OwnedFd, Caller)> {
    let (client, peer) = listener.accept()?;
    let caller = Caller::of(client.local_addr()?, peer);
    // Each direction is written as soon as there is something; Nagle's wait would only add to the line's.
    let _ = client.set_nodelay(true);
    let client = OwnedFd::from(client);
    reset_on_close(&client);
    Ok((client, caller))
}

fn connect(client: OwnedFd, dial: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&client, true)?;
    dial().and_then(|host| carry(&client, &host))?;
    end_on_close(&client);
    Ok(())
}

#[cfg(test)]
mod tests;
