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

/// What ends carrying before its time: which of the two sockets, and why.
type Failure = (usize, io::Error);

/// Carries bytes both ways between two non-blocking sockets until both directions have ended, each for itself.
///
/// # Errors
/// The first error of either socket. What that socket had received before has been passed on then.
pub(crate) fn carry(left: &OwnedFd, right: &OwnedFd) -> io::Result<()> {
    let sockets = [left, right];
    let mut directions = [Direction::new(), Direction::new()];
    carry_on(sockets, &mut directions).map_err(|(failed, error)| {
        // An error here is of the other socket, and the first one is the cause.
        let _ = directions[failed].drain(sockets[failed], sockets[1 - failed]);
        error
    })
}

fn carry_on(sockets: [&OwnedFd; 2], directions: &mut [Direction; 2]) -> Result<(), Failure> {
    loop {
        for (from, direction) in directions.iter_mut().enumerate() {
            direction
                .advance(sockets[from], sockets[1 - from])
                .map_err(|failed| match failed {
                    Failed::From(error) => (from, error.into()),
                    Failed::To(error) => (1 - from, error.into()),
                })?;
        }
        if directions.iter().all(|direction| direction.is_done) {
            return Ok(());
        }
        wait(sockets, directions)?;
    }
}

/// Waits until a direction can go on, or a socket that still matters has failed.
fn wait(sockets: [&OwnedFd; 2], directions: &[Direction; 2]) -> Result<(), Failure> {
    let mut wanted = Vec::with_capacity(2);
    let mut indices = Vec::with_capacity(2);
    for (index, socket) in sockets.iter().enumerate() {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, directions[index].wants_to_read());
        flags.set(PollFlags::OUT, directions[1 - index].wants_to_write());
        // An error of a socket to which something may yet have to be sent ends the waiting; the end of both its directions, which
        // poll reports whether asked or not, must not.
        if !flags.is_empty() || !directions[1 - index].is_done {
            wanted.push(PollFd::new(*socket, flags));
            indices.push(index);
        }
    }
    wait_for(&mut wanted).map_err(|(failed, error)| (indices[failed], error))
}

/// Waits until one of these can go on.
///
/// # Errors
/// The first of them that has failed, by its index. It may have received something before.
pub(crate) fn wait_for(wanted: &mut [PollFd<'_>]) -> Result<(), Failure> {
    loop {
        match poll(wanted, None) {
            Err(Errno::INTR) => {}
            Err(error) => return Err((0, error.into())),
            Ok(_) => break,
        }
    }
    for (index, polled) in wanted.iter().enumerate() {
        if polled.revents().contains(PollFlags::ERR) {
            let error = rustix::net::sockopt::socket_error(polled)
                .unwrap_or_else(Err)
                .err()
                .unwrap_or(Errno::CONNRESET);
            return Err((index, error.into()));
        }
        // Gone both ways although one of them was still needed.
        let hung_up = polled.revents().contains(PollFlags::HUP);
        if hung_up && !polled.revents().intersects(PollFlags::IN | PollFlags::OUT) {
            return Err((index, io::ErrorKind::ConnectionReset.into()));
        }
    }
    Ok(())
}

/// Which end of a direction has failed.
enum Failed {
    From(Errno),
    To(Errno),
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
    fn advance(&mut self, from: &OwnedFd, to: &OwnedFd) -> Result<(), Failed> {
        while !self.is_done {
            if self.wants_to_read() {
                match rustix::io::read(from, rustix::buffer::spare_capacity(&mut self.buffer)) {
                    Ok(0) => self.has_ended = true,
                    Ok(_) => {}
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(Errno::INTR) => continue,
                    Err(error) => return Err(Failed::From(error)),
                }
            }
            if !self.send(to).map_err(Failed::To)? {
                return Ok(());
            }
            if self.has_ended {
                self.is_done = true;
                match shutdown(to, Shutdown::Write) {
                    // It has gone by itself meanwhile; whatever of the other direction was left has been read.
                    Ok(()) | Err(Errno::NOTCONN) => {}
                    Err(error) => return Err(Failed::To(error)),
                }
            }
        }
        Ok(())
    }

    /// Sends what the buffer holds: whether all of it was taken.
    fn send(&mut self, to: &OwnedFd) -> Result<bool, Errno> {
        while self.sent < self.buffer.len() {
            match send(to, &self.buffer[self.sent..], SendFlags::NOSIGNAL) {
                Ok(len) => self.sent += len,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        self.buffer.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Passes on what a socket that has failed received before, and no end of it.
    fn drain(&mut self, from: &OwnedFd, to: &OwnedFd) -> io::Result<()> {
        loop {
            while !self.send(to)? {
                wait_for(&mut [PollFd::new(to, PollFlags::OUT)]).map_err(|(_, error)| error)?;
            }
            match rustix::io::read(from, rustix::buffer::spare_capacity(&mut self.buffer)) {
                Ok(1..) | Err(Errno::INTR) => {}
                Ok(0) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;

    pub(crate) const LEN: usize = 50_000;

    /// A socket whose peer has written something and reset it. Both have arrived.
    pub(crate) fn answered_and_reset() -> OwnedFd {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut peer = listener.accept().unwrap().0;
        peer.write_all(&[7; LEN]).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while rustix::io::ioctl_fionread(&socket).unwrap() < LEN as u64 {
            assert!(Instant::now() < until, "all has arrived");
            std::thread::yield_now();
        }
        let peer = OwnedFd::from(peer);
        reset_on_close(&peer);
        drop(peer);
        let mut polled = [PollFd::new(&socket, PollFlags::empty())];
        assert_eq!(poll(&mut polled, None), Ok(1));
        socket.set_nonblocking(true).unwrap();
        socket.into()
    }

    #[test]
    fn what_came_before_a_reset_is_passed_on_and_is_no_whole() {
        for index in [0, 1] {
            let (near, mut far) = UnixStream::pair().unwrap();
            near.set_nonblocking(true).unwrap();
            // The other direction meets the reset first.
            far.write_all(b"question").unwrap();
            let near = OwnedFd::from(near);
            let failed = answered_and_reset();
            let error = match index {
                0 => carry(&failed, &near),
                _ => carry(&near, &failed),
            };
            assert!(error.is_err());
            drop(near);
            let mut answer = Vec::new();
            let _ = far.read_to_end(&mut answer);
            assert_eq!(answer, [7; LEN], "{index}");
        }
    }
}
