//! Connecting to UNIX sockets.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::time::{Instant, sleep};

use switch::Reason;

const RETRY_FIRST: Duration = Duration::from_millis(2);
const RETRY_MOST: Duration = Duration::from_millis(100);

/// Connects to a UNIX socket of a type. A full backlog is waited for: connecting to UNIX sockets either works at once or would
/// have to block.
///
/// # Errors
/// Why it did not work.
pub(crate) async fn connect(
    path: &Path,
    socket_type: SocketType,
    timeout: Duration,
) -> Result<OwnedFd, Reason> {
    let give_up_at = Instant::now() + timeout;
    let mut wait = RETRY_FIRST;
    loop {
        match attempt(path, socket_type) {
            Ok(socket) if device::is_own(&socket) => {
                tracing::error!(path = %path.display(), "not called: expected the socket of a program, found one of the daemon's own: name another one in the service's to");
                return Err(Reason::HostFailed);
            }
            Ok(socket) => return Ok(socket),
            Err(Errno::AGAIN) if Instant::now() + wait < give_up_at => sleep(wait).await,
            Err(Errno::AGAIN) => return Err(Reason::BacklogFull),
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::NOTSOCK) => {
                return Err(Reason::NoListener);
            }
            Err(Errno::PROTOTYPE) => return Err(Reason::WrongType),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot connect");
                return Err(Reason::HostFailed);
            }
        }
        wait = (wait * 2).min(RETRY_MOST);
    }
}

fn attempt(path: &Path, socket_type: SocketType) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, socket_type, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}
