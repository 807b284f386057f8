//! Waiting on non-blocking sockets, with a deadline.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use wire::agent::Decoder;

/// How long until `deadline`, in the form that poll takes; nothing if it has passed.
pub(crate) fn until(deadline: Instant) -> Timespec {
    let left = deadline.saturating_duration_since(Instant::now());
    // Rounded up, so that poll does not return a moment before the deadline and make the caller spin.
    let left = if left.is_zero() {
        left
    } else {
        left + Duration::from_millis(1)
    };
    Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: i64::from(left.subsec_nanos()),
    }
}

/// Wait for one of `flags`.
///
/// # Errors
/// `TimedOut` at the deadline; or the system cannot wait.
pub(crate) fn wait(socket: &OwnedFd, flags: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let timeout = until(deadline);
        match rustix::event::poll(&mut [PollFd::new(socket, flags)], Some(&timeout)) {
            Ok(0) if Instant::now() >= deadline => return Err(io::ErrorKind::TimedOut.into()),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Send all of `bytes`.
///
/// # Errors
/// `TimedOut` at the deadline; or the other side is gone.
pub(crate) fn send_all(socket: &OwnedFd, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, deadline)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Receive what is there, at least one byte, into the decoder, whose frames must have been taken.
///
/// # Errors
/// `TimedOut` at the deadline, `UnexpectedEof` at the end of the stream, or the other side is gone.
pub(crate) fn receive(
    socket: &OwnedFd,
    decoder: &mut Decoder,
    deadline: Instant,
) -> io::Result<()> {
    loop {
        match try_receive(socket, decoder)? {
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(_) => return Ok(()),
            None => wait(socket, PollFlags::IN, deadline)?,
        }
    }
}

/// Receive what is there into the decoder: how many bytes (0 at the end of the stream), or nothing if none are there.
///
/// # Errors
/// The other side is gone.
pub(crate) fn try_receive(socket: impl AsFd, decoder: &mut Decoder) -> io::Result<Option<usize>> {
    loop {
        match rustix::io::read(&socket, decoder.space()) {
            Ok(count) => {
                decoder.advance(count);
                return Ok(Some(count));
            }
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
