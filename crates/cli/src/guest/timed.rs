//! Reading and writing until a deadline, however the other side spreads its bytes over the time.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

/// How long something may take, and when that is over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    pub(crate) patience: Duration,
    pub(crate) at: Instant,
}

impl Deadline {
    pub(crate) fn after(patience: Duration) -> Deadline {
        let at = Instant::now() + patience;
        Deadline { patience, at }
    }
}

/// A socket until a deadline, whether it blocks or not.
pub(crate) struct Timed<'a> {
    pub(crate) socket: BorrowedFd<'a>,
    pub(crate) deadline: Instant,
}

impl Timed<'_> {
    /// Tries until it need not wait. Behind the deadline nothing is tried: what is there never ends if the other side wants it so.
    fn until_done(
        &self,
        flags: PollFlags,
        mut attempt: impl FnMut() -> Result<usize, Errno>,
    ) -> io::Result<usize> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match attempt() {
                Ok(count) => return Ok(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let left = Timespec::try_from(left).map_err(io::Error::other)?;
                    match poll(&mut [PollFd::new(&self.socket, flags)], Some(&left)) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.until_done(PollFlags::IN, || {
            let received = rustix::net::recv(self.socket, &mut *buffer, RecvFlags::DONTWAIT);
            received.map(|(count, _)| count)
        })
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        self.until_done(PollFlags::OUT, || {
            rustix::net::send(self.socket, bytes, flags)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
