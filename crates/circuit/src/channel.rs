//! The wake channel: a stream socket with the peer at its other end.
//!
//! # Theory of operation
//!
//! A byte means "check the rings". It carries no ring and no reason: if the socket is full and a byte cannot be sent, the peer has bytes to take
//! anyway, and then sees the state of both rings. It is a socket, not an eventfd, because each side has a file description of its own: a hostile peer
//! could fill a shared eventfd and clear its non-blocking flag, so that a write blocks. The end of the socket also shows that the peer is gone.
//!
//! Reader and writer of one side may sleep in two threads, on one socket. One of them, the *leader*, waits for the socket; the other waits for the
//! leader. Each batch of bytes taken from the socket advances the *epoch* and wakes both. An end takes a ticket, the epoch, before it asks to be
//! woken. If the epoch has moved since, the other end may have taken its byte, and it checks the ring once more.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::{Error, Result};

#[cfg(test)]
#[path = "channel/tests/model.rs"]
mod model;
#[cfg(test)]
mod tests;

/// How many bytes are taken from the socket at once. More may be there, of a peer that wakes us for fun; they stay for the next time.
const TAKEN_AT_ONCE: usize = 256;

#[derive(Debug)]
pub(crate) struct Channel {
    socket: OwnedFd,
    /// Its end informs the switchboard or daemon that gave the window that it is out of use.
    _lease: Option<OwnedFd>,
    sleepers: Mutex<Sleepers>,
    epoch_moved: Condvar,
    is_gone: AtomicBool,
    /// The socket's own timeout in seconds, or zero for none. The leader's.
    socket_timeout_s: AtomicU64,
}

#[derive(Debug, Default)]
struct Sleepers {
    epoch: u64,
    has_leader: bool,
    /// Those awaiting a leader.
    followers: usize,
}

/// The epoch before one said that one wants to be woken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket(u64);

impl Channel {
    pub(crate) fn new(socket: OwnedFd, lease: Option<OwnedFd>) -> Channel {
        Channel {
            socket,
            _lease: lease,
            sleepers: Mutex::default(),
            epoch_moved: Condvar::new(),
            is_gone: AtomicBool::new(false),
            socket_timeout_s: AtomicU64::new(0),
        }
    }

    /// Wakes the peer. Never blocks, never raises a signal.
    pub(crate) fn wake(&self) {
        loop {
            match send(
                &self.socket,
                &[1],
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Err(Errno::INTR) => {}
                // It has bytes to come for.
                Ok(_) | Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return,
                Err(_) => return self.is_gone.store(true, Ordering::Release),
            }
        }
    }

    /// Whether the peer has closed its end, as far as is known. It was the last that it said: read the rings once more.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    pub(crate) fn ticket(&self) -> Ticket {
        Ticket(sys::lock(&self.sleepers).epoch)
    }

    /// Sleeps until the epoch is past that of the ticket. False when the deadline is.
    pub(crate) fn wait(&self, ticket: Ticket, deadline: Option<Instant>) -> Result<bool> {
        let mut sleepers = sys::lock(&self.sleepers);
        while sleepers.epoch == ticket.0 && !self.is_gone() {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(false);
            }
            if sleepers.has_leader {
                sleepers = self.follow(sleepers, left);
                continue;
            }
            sleepers.has_leader = true;
            drop(sleepers);
            let taken = self.take(left);
            sleepers = sys::lock(&self.sleepers);
            sleepers.has_leader = false;
            // A follower has to lead if this one gives up.
            if sleepers.followers > 0 {
                self.epoch_moved.notify_all();
            }
            if taken? {
                sleepers.epoch += 1;
            }
        }
        Ok(true)
    }

    /// Takes what is there, without waiting: what an event loop does once the descriptor is readable.
    pub(crate) fn clear(&self) -> Result<()> {
        if self.take(Some(Duration::ZERO))? {
            let mut sleepers = sys::lock(&self.sleepers);
            sleepers.epoch += 1;
            // A system call, also without a sleeping peer.
            if sleepers.followers > 0 {
                self.epoch_moved.notify_all();
            }
        }
        Ok(())
    }

    /// Takes bytes, or the end, from the socket. False when there was nothing for so long.
    ///
    /// Whole seconds are waited for in the call that takes the bytes, and only what is left in a call before it: each call shows in a round trip.
    fn take(&self, patience: Option<Duration>) -> Result<bool> {
        let mut bytes = [0; TAKEN_AT_ONCE];
        // The caller has just checked the socket: an attempt before poll would be in vain.
        let (flags, mut polls) = match patience.map(|patience| patience.as_secs()) {
            None => (RecvFlags::empty(), false),
            Some(0) => (RecvFlags::DONTWAIT, patience != Some(Duration::ZERO)),
            Some(seconds) => (RecvFlags::empty(), !self.has_socket_timeout(seconds)),
        };
        let deadline = match patience {
            Some(patience) if !patience.is_zero() => Instant::now().checked_add(patience),
            _ => None,
        };
        loop {
            if polls {
                let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                match self.poll(left) {
                    Ok(0) => return Ok(false),
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            match recv(&self.socket, &mut bytes[..], flags) {
                Ok((0, _)) | Err(Errno::CONNRESET | Errno::NOTCONN) => {
                    self.is_gone.store(true, Ordering::Release);
                    return Ok(true);
                }
                Ok(_) => return Ok(true),
                // The socket's own timeout would begin anew, and with signals that come often never be over.
                Err(Errno::INTR) => polls = deadline.is_some(),
                Err(Errno::AGAIN) if patience == Some(Duration::ZERO) => return Ok(false),
                // The whole seconds are over; or the socket's owner has made it non-blocking, or another has taken what there was.
                Err(Errno::AGAIN) => polls = true,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Gives the socket a timeout of so many seconds, unless it has it already. False if it cannot be had.
    fn has_socket_timeout(&self, seconds: u64) -> bool {
        if self.socket_timeout_s.load(Ordering::Relaxed) == seconds {
            return true;
        }
        let timeout = Some(Duration::from_secs(seconds));
        let is_set = set_socket_timeout(&self.socket, Timeout::Recv, timeout).is_ok();
        if is_set {
            self.socket_timeout_s.store(seconds, Ordering::Relaxed);
        }
        is_set
    }

    fn poll(&self, patience: Option<Duration>) -> rustix::io::Result<usize> {
        let timeout = patience.map(|patience| Timespec {
            tv_sec: patience.as_secs().min(i32::MAX as u64) as i64,
            tv_nsec: patience.subsec_nanos().into(),
        });
        let mut waiting = [PollFd::new(&self.socket, PollFlags::IN)];
        poll(&mut waiting, timeout.as_ref())
    }

    fn follow<'a>(
        &'a self,
        mut sleepers: MutexGuard<'a, Sleepers>,
        patience: Option<Duration>,
    ) -> MutexGuard<'a, Sleepers> {
        sleepers.followers += 1;
        let mut sleepers = match patience {
            None => self
                .epoch_moved
                .wait(sleepers)
                .unwrap_or_else(PoisonError::into_inner),
            Some(patience) => {
                let woken = self.epoch_moved.wait_timeout(sleepers, patience);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        sleepers.followers -= 1;
        sleepers
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// When to give up, and what to say then.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    started: Instant,
    deadline: Option<Instant>,
}

impl Patience {
    pub(crate) fn new(timeout: Option<Duration>) -> Patience {
        let started = Instant::now();
        Patience {
            started,
            deadline: timeout.and_then(|timeout| started.checked_add(timeout)),
        }
    }

    pub(crate) fn deadline(self) -> Option<Instant> {
        self.deadline
    }

    /// An error once the time is over.
    pub(crate) fn check(self) -> Result<()> {
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(Error::TimedOut {
                waited_ms: self.started.elapsed().as_millis(),
            }),
            _ => Ok(()),
        }
    }
}
