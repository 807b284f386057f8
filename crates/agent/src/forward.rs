//! A TCP port of the guest that leads to a port of the host: `ringdown-agent forward`.
//!
//! Programs that know nothing of vsock reach a service of the host so, an egress service above all: curl, git, pip and apt take a proxy at
//! 127.0.0.1. Each connection has a thread, of which there are at most [`MAX_CONNECTIONS`]; who comes when all are taken
//! waits in the listener's backlog.
//!
//! The end of either direction is passed on and the other goes on, so a reply after a half-close arrives. A connection that fails on one side
//! is reset on the other, as far as the system knows resets there.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::host_socket;
use crate::pump::{carry, end_on_close, reset_on_close};

/// The most connections at a time. Each has a thread and two buffers of [`crate::pump::BUFFER_LEN`] bytes.
pub const MAX_CONNECTIONS: usize = 256;

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
        eprintln!("ringdown-agent: forwarding {self}");
        let port = self.host_port;
        serve(&listener, move || host_socket::dial_host_port(port))
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
    dial: impl Fn() -> io::Result<OwnedFd> + Send + Sync + 'static,
) -> io::Result<Infallible> {
    let shared = Arc::new((dial, Places::default(), AtomicUsize::new(0)));
    loop {
        shared.1.take();
        let client = loop {
            match listener.accept() {
                Ok((client, _)) => break client,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Who went away while it waited, or no descriptors: neither ends the forwarding.
                    eprintln!("ringdown-agent: cannot accept a connection: {error}");
                    std::thread::sleep(ACCEPT_BACKOFF);
                }
            }
        };
        let own = Arc::clone(&shared);
        let forward = move || {
            let (dial, places, failures) = &*own;
            if let Err(error) = connect(client, dial) {
                let count = failures.fetch_add(1, Ordering::Relaxed);
                if count < REPORTED || count % REPORTED == 0 {
                    eprintln!("ringdown-agent: a connection ended early: {error}");
                }
            }
            places.give_back();
        };
        let thread = std::thread::Builder::new()
            .name("forward".into())
            .stack_size(STACK_SIZE)
            .spawn(forward);
        if let Err(error) = thread {
            eprintln!("ringdown-agent: cannot start a thread: {error}");
            shared.1.give_back();
        }
    }
}

fn connect(client: TcpStream, dial: &impl Fn() -> io::Result<OwnedFd>) -> io::Result<()> {
    // Each direction is written as soon as there is something; Nagle's wait would only add to the line's.
    let _ = client.set_nodelay(true);
    let client = OwnedFd::from(client);
    rustix::io::ioctl_fionbio(&client, true)?;
    reset_on_close(&client);
    dial().and_then(|host| carry(&client, &host))?;
    end_on_close(&client);
    Ok(())
}

/// Places for connections.
#[derive(Debug, Default)]
struct Places {
    taken: Mutex<usize>,
    freed: Condvar,
}

impl Places {
    /// Waits for a place.
    fn take(&self) {
        let taken = sys::lock(&self.taken);
        let is_full = |taken: &mut usize| *taken >= MAX_CONNECTIONS;
        let waited = self.freed.wait_while(taken, is_full);
        *waited.unwrap_or_else(PoisonError::into_inner) += 1;
    }

    fn give_back(&self) {
        *sys::lock(&self.taken) -= 1;
        self.freed.notify_one();
    }
}

#[cfg(test)]
mod tests;
