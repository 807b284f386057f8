//! What peers have yet to take of connections that have ended: bytes in the buffers of sockets, which the host's memory holds.
//!
//! Of a socket that is closed with such bytes, the kernel keeps them uncounted. So it stays open until they are taken, and its connection
//! counts as long.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use policy::Time;
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_linger, set_tcp_user_timeout, socket_error};

use crate::dialer::Hold;
use crate::slow::Party;

/// How long a TCP peer may have no room for what is left.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the peer of a socket has yet to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Nothing, or the connection is no more.
    Nothing,
    /// Something.
    Something,
    /// It is a TCP connection that the kernel has given up, as the peer had no room for 60 seconds.
    GivenUp,
}

/// Everything has passed to this socket: its close is no reset, and what its peer has yet to take goes out with its end, whatever becomes of this process. A
/// TCP peer that has no room for 60 seconds is given up by the kernel, and finds a reset.
pub fn end_in_order(socket: impl AsFd) {
    // They fail only for a socket that is no TCP connection any more.
    let _ = set_socket_linger(&socket, None);
    let _ = set_tcp_user_timeout(&socket, PATIENCE.as_millis() as u32);
}

/// What the peer of this socket has yet to take.
pub fn left_in(socket: BorrowedFd<'_>) -> Left {
    match sys::sockets::untaken(socket) {
        Ok(0) => Left::Nothing,
        Ok(_) => Left::Something,
        Err(_) => match socket_error(socket) {
            Ok(Err(Errno::TIMEDOUT)) => Left::GivenUp,
            _ => Left::Nothing,
        },
    }
}

/// When to look again at what has been waited for that long: most of it is taken at once, and some never.
pub fn next_look(waited: Duration) -> Duration {
    waited.clamp(Duration::from_millis(1), Duration::from_secs(1))
}

/// A socket, whose the other end is if not ours, and what lasts as long.
pub(crate) type Held = (OwnedFd, Option<Party>, Option<Hold>);

/// Sockets to which everything has passed, and whose peers have yet to take it.
pub(crate) struct Remainder {
    since: Time,
    pub(crate) sockets: Vec<Held>,
}

impl Remainder {
    pub(crate) fn new(since: Time, sockets: Vec<Held>) -> Remainder {
        for (socket, ..) in &sockets {
            end_in_order(socket);
        }
        Remainder { since, sockets }
    }

    pub(crate) fn left(&self) -> Left {
        let mut of_all = Left::Nothing;
        for (socket, ..) in &self.sockets {
            match left_in(socket.as_fd()) {
                Left::Nothing => {}
                Left::Something => return Left::Something,
                Left::GivenUp => of_all = Left::GivenUp,
            }
        }
        of_all
    }

    pub(crate) fn next_look(&self, now: Time) -> Time {
        now + next_look(now.saturating_sub(self.since))
    }
}
