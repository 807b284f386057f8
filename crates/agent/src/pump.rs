//! Bytes between two stream sockets, both ways, by one thread.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};

/// What is on its way in one direction is at most this, in bytes.
pub(crate) const BUFFER_LEN: usize = 64 * 1024;

/// Lets the close of a socket be a reset, where the system knows resets, also when this process is killed: no peer is to take what it got for all
/// there was.
pub(crate) fn reset_on_close(socket: &OwnedFd) {
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

/// Everything has passed: the close of a socket is no reset.
pub(crate) fn end_on_close(socket: &OwnedFd) {
    let _ = rustix::net::sockopt::set_socket_linger(socket, None);
}

/// Carries bytes both ways between two non-blocking sockets until both directions have ended, each for itself.
///
/// # Errors
/// The first error of either socket; then nothing more is carried.
pub(crate) fn carry(left: &OwnedFd, right: &OwnedFd) -> io::Result<()> {
    let sockets = [left, right];
    let mut directions = [Direction::new(), Direction::new()];
    loop {
        for (from, direction) in directions.iter_mut().enumerate() {
            direction.advance(sockets[from], sockets[1 - from])?;
        }
        if directions.iter().all(|direction| direction.is_done) {
            return Ok(());
        }
        wait(&sockets, &directions)?;
    }
}

/// Waits until a direction can go on, or a socket that still matters has failed.
fn wait(sockets: &[&OwnedFd; 2], directions: &[Direction; 2]) -> io::Result<()> {
    let mut wanted = Vec::with_capacity(2);
    for (index, socket) in sockets.iter().enumerate() {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, directions[index].wants_to_read());
        flags.set(PollFlags::OUT, directions[1 - index].wants_to_write());
        // An error of a socket to which something may yet have to be sent ends the waiting; the end of both its directions, which
        // poll tells whether asked or not, must not.
        if !flags.is_empty() || !directions[1 - index].is_done {
            wanted.push(PollFd::new(*socket, flags));
        }
    }
    wait_for(&mut wanted)
}

/// Waits until one of these can go on.
///
/// # Errors
/// One of them has failed.
pub(crate) fn wait_for(wanted: &mut [PollFd<'_>]) -> io::Result<()> {
    loop {
        match poll(wanted, None) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    for polled in &*wanted {
        if polled.revents().contains(PollFlags::ERR) {
            let error = rustix::net::sockopt::socket_error(polled)?;
            return Err(error.err().unwrap_or(Errno::CONNRESET).into());
        }
        // Gone both ways although one of them was still needed.
        let hung_up = polled.revents().contains(PollFlags::HUP);
        if hung_up && !polled.revents().intersects(PollFlags::IN | PollFlags::OUT) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
    }
    Ok(())
}

/// One direction.
struct Direction {
    buffer: Vec<u8>,
    /// What of the buffer has been sent.
    sent: usize,
    has_ended: bool,
    /// The end was passed on.
    is_done: bool,
}

impl Direction {
    fn new() -> Direction {
        Direction {
            buffer: Vec::with_capacity(BUFFER_LEN),
            sent: 0,
            has_ended: false,
            is_done: false,
        }
    }

    fn wants_to_read(&self) -> bool {
        self.buffer.is_empty() && !self.has_ended
    }

    fn wants_to_write(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// Moves what can be moved without waiting.
    fn advance(&mut self, from: &OwnedFd, to: &OwnedFd) -> io::Result<()> {
        while !self.is_done {
            if self.wants_to_read() {
                match rustix::io::read(from, rustix::buffer::spare_capacity(&mut self.buffer)) {
                    Ok(0) => self.has_ended = true,
                    Ok(_) => {}
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(Errno::INTR) => continue,
                    Err(error) => return Err(error.into()),
                }
            }
            while self.sent < self.buffer.len() {
                match send(to, &self.buffer[self.sent..], SendFlags::NOSIGNAL) {
                    Ok(len) => self.sent += len,
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            self.buffer.clear();
            self.sent = 0;
            if self.has_ended {
                self.is_done = true;
                match shutdown(to, Shutdown::Write) {
                    // It has gone by itself meanwhile; whatever of the other direction was left has been read.
                    Ok(()) | Err(Errno::NOTCONN) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }
}
