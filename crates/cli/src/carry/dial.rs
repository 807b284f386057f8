//! Connecting a program's socket to a port of a VM, by the host socket of that VM.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_timeout};
use rustix::net::{SendFlags, Shutdown, SocketAddrUnix};

use crate::guest::{Timed, access_remedy, printable, read_line};

/// How long to wait before a non-blocking socket knocks again at a host socket whose backlog is full: there is no event for that.
const BACKLOG_PAUSE: Duration = Duration::from_millis(1);

/// Why a dial came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error("{0}")]
    Unreachable(String),
    #[error("{0}")]
    Denied(String),
    #[error(
        "the program does not run as {own}, the user of `ringdown run`: start `ringdown run` as the program's user"
    )]
    OtherUser {
        /// The user of this process.
        own: u32,
    },
    #[error("refused: {0}")]
    Refused(String),
    #[error("no answer in time")]
    TimedOut,
    #[error("the socket is connected already")]
    Connected,
    #[error("{0}")]
    System(#[from] Errno),
}

/// Connects the socket, whatever its mode, and returns the port of the host that the daemon gave to the call.
///
/// # Errors
/// [`DialError`]. The socket is as it was, or shut down both ways if it had come to be connected.
pub fn dial(
    socket: BorrowedFd<'_>,
    host_socket: &Path,
    port: u32,
    deadline: Instant,
) -> Result<u32, DialError> {
    connect(socket, host_socket, deadline)?;
    let answered = ask(socket, port, deadline);
    if answered.is_err() {
        // If that fails it is disconnected, which is as good.
        let _ = rustix::net::shutdown(socket, Shutdown::Both);
    }
    answered
}

fn connect(socket: BorrowedFd<'_>, path: &Path, deadline: Instant) -> Result<(), DialError> {
    let address = SocketAddrUnix::new(path)?;
    // A blocking socket would wait for room in the backlog for as long as the program has set.
    let programs_own = socket_timeout(socket, Timeout::Send)?;
    let connected = knock(socket, &address, deadline);
    // However it ended: the program may try again, and send.
    set_socket_timeout(socket, Timeout::Send, programs_own)?;
    connected.map_err(|error| match error {
        DialError::System(Errno::ISCONN) => DialError::Connected,
        DialError::System(Errno::NOENT | Errno::CONNREFUSED) => DialError::Unreachable(format!(
            "no process listens at the VM's host socket {}: is the daemon running?",
            path.display()
        )),
        DialError::System(Errno::ACCESS) => DialError::Denied(format!(
            "no permission to connect to the VM's host socket: {}",
            access_remedy(path)
        )),
        error => error,
    })
}

fn knock(
    socket: BorrowedFd<'_>,
    address: &SocketAddrUnix,
    deadline: Instant,
) -> Result<(), DialError> {
    loop {
        let left = left(deadline)?;
        set_socket_timeout(socket, Timeout::Send, Some(left))?;
        match rustix::net::connect(socket, address) {
            Err(Errno::AGAIN) => thread::sleep(BACKLOG_PAUSE.min(left)),
            Err(Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// What is left of the time, which is never nothing.
fn left(deadline: Instant) -> Result<Duration, DialError> {
    let left = deadline.saturating_duration_since(Instant::now());
    match left < Duration::from_millis(1) {
        true => Err(DialError::TimedOut),
        false => Ok(left),
    }
}

fn ask(socket: BorrowedFd<'_>, port: u32, deadline: Instant) -> Result<u32, DialError> {
    let request = wire::connect::request(port);
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // A socket that was just connected has room for a line.
    rustix::net::send(socket, request.as_bytes(), flags)?;
    let answer = read_line(&mut Timed { socket, deadline }).map_err(|error| {
        match (error.kind(), Errno::from_io_error(&error)) {
            (io::ErrorKind::TimedOut, _) => DialError::TimedOut,
            (_, Some(errno)) => DialError::System(errno),
            _ => DialError::Refused(error.to_string()),
        }
    })?;
    match answer.split_once(' ').unwrap_or((&answer, "")) {
        ("OK", port) => port
            .parse()
            .map_err(|_| DialError::Refused(format!("an unexpected answer: {answer:?}"))),
        ("ERR", reason) => Err(DialError::Refused(printable(reason))),
        ("", _) => Err(DialError::Refused("the host socket was closed".to_owned())),
        _ => Err(DialError::Refused(format!(
            "an unexpected answer: {answer:?}"
        ))),
    }
}

/// Whether a connection of this socket has ended, at both ends or with a refusal.
pub fn is_over(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(&socket, PollFlags::empty())];
    let waited = poll(&mut polled, Some(&Timespec::default()));
    waited.is_ok() && polled[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};

    use super::*;

    fn stream() -> std::os::fd::OwnedFd {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    }

    #[test]
    fn a_full_backlog_leaves_the_socket_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        let address = SocketAddrUnix::new(&path).unwrap();
        let listener = stream();
        bind(&listener, &address).unwrap();
        listen(&listener, 0).unwrap();
        let _waiting: Vec<_> = std::iter::from_fn(|| {
            let caller = stream();
            rustix::net::connect(&caller, &address)
                .ok()
                .map(|()| caller)
        })
        .collect();
        let own = Duration::from_secs(7);
        let socket = stream();
        for programs_own in [None, Some(own)] {
            set_socket_timeout(&socket, Timeout::Send, programs_own).unwrap();
            let deadline = Instant::now() + Duration::from_millis(20);
            let error = dial(socket.as_fd(), &path, 80, deadline).unwrap_err();
            assert!(matches!(error, DialError::TimedOut), "{error}");
            assert_eq!(
                socket_timeout(&socket, Timeout::Send).unwrap(),
                programs_own
            );
        }
    }
}
