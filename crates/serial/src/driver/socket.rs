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
    /// Whom to tell when the channel is open. Nothing is read or written before.
    pub(super) answered: Option<Answered>,
    /// The peer's end has arrived; it is passed on behind what is pending.
    pub(super) has_ended: bool,
    /// The end was passed on.
    is_shut: bool,
    /// The program takes nothing any more.
    pub(super) is_deaf: bool,
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
    pub(super) fn read(&mut self, space: &mut [u8]) -> Result<usize, Errno> {
        loop {
            match recv(&self.descriptor, &mut *space, RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
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
                match self.write(&bytes[taken..])? {
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
            match write(&self.descriptor, chunk)? {
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

    /// The peer takes nothing any more: the program is told when it writes.
    pub(super) fn stop_source(&mut self) {
        self.is_source_over = true;
        // An error says that the program is gone.
        let _ = shutdown(&self.descriptor, Shutdown::Read);
    }

    fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        write(&self.descriptor, bytes)
    }
}

/// An empty buffer larger than this is given back.
const KEPT_CAPACITY: usize = 64 * 1024;

/// Writes without waiting; 0 if nothing is taken now.
fn write(descriptor: &OwnedFd, bytes: &[u8]) -> Result<usize, Errno> {
    loop {
        match send(descriptor, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            result => return result,
        }
    }
}
