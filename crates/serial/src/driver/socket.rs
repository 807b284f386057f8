//! The socket of one channel.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::Answered;
use crate::port::{Cut, Stream};

/// A channel's socket.
pub(super) struct Socket {
    descriptor: OwnedFd,
    cut: Cut,
    /// What the socket did not take yet: at most a channel's window.
    pending: VecDeque<u8>,
    /// The caller to notify when the channel is open. Nothing is read or written before.
    pub(super) answered: Option<Answered>,
    /// The peer's end has arrived; it is passed on behind what is pending.
    pub(super) has_ended: bool,
    /// The end was passed on.
    is_shut: bool,
    /// The program takes nothing any more.
    pub(super) is_deaf: bool,
    /// It has failed, which the system says once: the end behind what it still holds is none.
    is_broken: bool,
    /// The program's end was read, or the peer takes nothing more.
    pub(super) is_source_over: bool,
    /// There may be something to read, as far as is known.
    pub(super) is_readable: bool,
}

impl Socket {
    pub(super) fn new(stream: Stream, answered: Option<Answered>) -> Socket {
        Socket {
            descriptor: stream.socket,
            cut: stream.cut,
            pending: VecDeque::new(),
            answered,
            has_ended: false,
            is_shut: false,
            is_deaf: false,
            is_broken: false,
            is_source_over: false,
            is_readable: false,
        }
    }

    pub(super) fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    /// What to poll it for; nothing if it is to be left alone.
    pub(super) fn interest(&self, may_send: bool) -> Option<PollFlags> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::OUT, self.has_pending());
        let is_opening = self.answered.is_some();
        flags.set(
            PollFlags::IN,
            !is_opening && !self.is_source_over && may_send && !self.is_readable,
        );
        // Otherwise only that the program is gone matters, and only when it can be acted upon at once.
        let watches_end = is_opening || (self.is_source_over && !self.is_deaf && !self.is_shut);
        (!flags.is_empty() || watches_end).then_some(flags)
    }

    /// Says to the program that the end which follows is none.
    pub(super) fn cut(&self) {
        self.cut.store(true, Ordering::Release);
    }

    /// Whether the program has closed the socket before its time.
    pub(super) fn was_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Reads what the program has sent; nothing at its end.
    ///
    /// # Errors
    /// There is nothing now (`AGAIN`), or no more will come and that is no end.
    pub(super) fn read(&mut self, space: &mut [u8]) -> Result<usize, Errno> {
        loop {
            match recv(&self.descriptor, &mut *space, RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                Ok((0, _)) if self.is_broken => return Err(Errno::CONNRESET),
                // The bytes that were read, not those of a datagram that was longer.
                result => return result.map(|(count, _)| count),
            }
        }
    }

    /// Hands bytes to the program, and keeps what it does not take: how many it took.
    ///
    /// # Errors
    /// The program takes nothing any more.
    pub(super) fn deliver(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        let mut taken = 0;
        if self.pending.is_empty() {
            while taken < bytes.len() {
                match write(&self.descriptor, &bytes[taken..], &mut self.is_broken)? {
                    0 => break,
                    count => taken += count,
                }
            }
        }
        self.pending.extend(&bytes[taken..]);
        Ok(taken)
    }

    /// Hands over what was kept, and then the end if it has arrived: how many bytes.
    ///
    /// # Errors
    /// The program takes nothing any more.
    pub(super) fn flush(&mut self) -> Result<usize, Errno> {
        let mut taken = 0;
        while let (chunk @ [_, ..], _) = self.pending.as_slices() {
            match write(&self.descriptor, chunk, &mut self.is_broken)? {
                0 => return Ok(taken),
                count => {
                    taken += count;
                    self.pending.drain(..count);
                }
            }
        }
        if self.pending.capacity() > KEPT_CAPACITY {
            self.pending = VecDeque::new();
        }
        if self.has_ended && !self.is_shut {
            self.is_shut = true;
            shutdown(&self.descriptor, Shutdown::Write)?;
        }
        Ok(taken)
    }

    /// The program takes nothing any more: what was kept for it is dropped.
    pub(super) fn deafen(&mut self) {
        self.is_deaf = true;
        self.pending = VecDeque::new();
    }

    /// The peer takes nothing any more: the program's next write fails.
    pub(super) fn stop_source(&mut self) {
        self.is_source_over = true;
        // An error says that the program is gone.
        let _ = shutdown(&self.descriptor, Shutdown::Read);
    }
}

/// An empty buffer larger than this is given back.
const KEPT_CAPACITY: usize = 64 * 1024;

/// Writes without waiting; 0 if nothing is taken now.
fn write(descriptor: &OwnedFd, bytes: &[u8], is_broken: &mut bool) -> Result<usize, Errno> {
    loop {
        match send(descriptor, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            result => {
                *is_broken |= result.is_err_and(|error| error != Errno::PIPE);
                return result;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rustix::event::{PollFd, Timespec, poll};

    use super::*;

    #[test]
    fn the_end_of_a_socket_that_was_reset_is_none() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let program = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let mut socket = Socket::new(OwnedFd::from(stream).into(), None);
        rustix::net::sockopt::set_socket_linger(&program, Some(Duration::ZERO)).unwrap();
        drop(program);
        let mut polled = [PollFd::new(socket.descriptor(), PollFlags::empty())];
        let patience = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        assert_eq!(poll(&mut polled, Some(&patience)), Ok(1));
        // The system reports it once.
        assert_eq!(socket.deliver(b"x"), Err(Errno::CONNRESET));
        assert_eq!(socket.read(&mut [0; 8]), Err(Errno::CONNRESET));
    }

    #[test]
    fn a_program_that_takes_nothing_more_may_still_end() {
        let (program, stream) = UnixStream::pair().unwrap();
        let mut socket = Socket::new(OwnedFd::from(stream).into(), None);
        program.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(socket.deliver(b"x"), Err(Errno::PIPE));
        assert_eq!(socket.read(&mut [0; 8]), Ok(0));
    }
}
