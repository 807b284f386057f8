//! The port's descriptor, and whether there is another end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FileType;
use rustix::io::Errno;

use crate::port::Port;

/// The wait between attempts to open the port, or to find its other end: at first and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// What became of a read or a write.
pub(super) enum Moved {
    /// So many bytes.
    Some(usize),
    /// Not now.
    Nothing,
    /// The other end is gone.
    Lost,
}

/// The port.
#[derive(Debug)]
pub(super) struct Line {
    descriptor: Option<OwnedFd>,
    /// The descriptor stays good while its other end is away, as that of a virtio-serial port does.
    survives: bool,
    /// There is another end.
    is_connected: bool,
    /// When to try again.
    retry_at: Option<Instant>,
    backoff: Duration,
    is_readable: bool,
    is_writable: bool,
    /// What was said about not opening.
    problem: String,
}

/// What has changed.
pub(super) enum Change {
    None,
    Connected,
    /// It cannot be opened, in words that were not said before.
    Problem(String),
}

impl Line {
    pub(super) fn new() -> Line {
        Line {
            descriptor: None,
            survives: false,
            is_connected: false,
            retry_at: None,
            backoff: BACKOFF.0,
            is_readable: false,
            is_writable: false,
            problem: String::new(),
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.is_connected
    }

    /// What is to be polled, and for what: the port itself, or what has to happen before there is one.
    pub(super) fn polled<'a>(&'a self, port: &'a dyn Port, has_output: bool) -> Option<PollFd<'a>> {
        match &self.descriptor {
            Some(descriptor) if self.is_connected => {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, !self.is_readable);
                flags.set(PollFlags::OUT, has_output && !self.is_writable);
                Some(PollFd::from_borrowed_fd(descriptor.as_fd(), flags))
            }
            // Its other end is away, and poll would return at once each time: wait for the timer.
            Some(_) => None,
            None => {
                let awaited: BorrowedFd<'_> = port.awaited()?;
                Some(PollFd::from_borrowed_fd(awaited, PollFlags::IN))
            }
        }
    }

    /// What poll has seen.
    pub(super) fn saw(&mut self, flags: PollFlags) {
        if self.descriptor.is_none() {
            self.retry_at = None;
        } else if self.is_connected {
            let ended = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
            self.is_readable |= flags.intersects(PollFlags::IN | ended);
            self.is_writable |= flags.contains(PollFlags::OUT);
        }
    }

    /// When to try again without an event of poll.
    pub(super) fn poll_at(&self) -> Option<Instant> {
        self.retry_at
    }

    pub(super) fn has_input(&self) -> bool {
        self.is_connected && self.is_readable
    }

    pub(super) fn takes_output(&self) -> bool {
        self.is_connected && self.is_writable
    }

    /// Opens the port, or looks whether its other end is back, if it is time to.
    pub(super) fn advance(&mut self, port: &mut dyn Port, now: Instant) -> Change {
        if self.is_connected || self.retry_at.is_some_and(|at| now < at) {
            return Change::None;
        }
        let opened = match &self.descriptor {
            Some(descriptor) => is_hung_up(descriptor).map(|is_hung_up| !is_hung_up),
            None => self.open(port, now),
        };
        match opened {
            Ok(true) => {
                self.retry_at = None;
                self.backoff = BACKOFF.0;
                self.is_connected = true;
                (self.is_readable, self.is_writable) = (true, true);
                self.problem.clear();
                Change::Connected
            }
            Ok(false) => {
                self.retry(now);
                Change::None
            }
            Err(error) => {
                self.descriptor = None;
                let is_awaited = error.kind() == io::ErrorKind::WouldBlock;
                if !(is_awaited && port.awaited().is_some()) {
                    self.retry(now);
                } else {
                    // Poll says when; this only keeps the question from being asked each turn.
                    self.retry_at = Some(now + Duration::from_secs(3600));
                }
                let problem = error.to_string();
                if is_awaited || problem == self.problem {
                    return Change::None;
                }
                self.problem.clone_from(&problem);
                Change::Problem(problem)
            }
        }
    }

    fn open(&mut self, port: &mut dyn Port, now: Instant) -> io::Result<bool> {
        let descriptor = port.open(now)?;
        rustix::io::ioctl_fionbio(&descriptor, true)?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&descriptor)?.st_mode);
        self.survives = kind == FileType::CharacterDevice && !rustix::termios::isatty(&descriptor);
        let is_hung_up = self.survives && is_hung_up(&descriptor)?;
        self.descriptor = Some(descriptor);
        Ok(!is_hung_up)
    }

    fn retry(&mut self, now: Instant) {
        self.retry_at = Some(now + self.backoff);
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
    }

    pub(super) fn read(&mut self, space: &mut [u8], now: Instant) -> Moved {
        let Some(descriptor) = self.descriptor.as_ref().filter(|_| self.is_connected) else {
            return Moved::Nothing;
        };
        match rustix::io::read(descriptor, space) {
            Ok(0) => self.lose(true, now),
            Ok(count) => Moved::Some(count),
            Err(Errno::AGAIN) => {
                self.is_readable = false;
                Moved::Nothing
            }
            Err(Errno::INTR) => Moved::Nothing,
            Err(_) => self.lose(false, now),
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8], now: Instant) -> Moved {
        let Some(descriptor) = self.descriptor.as_ref().filter(|_| self.is_connected) else {
            return Moved::Nothing;
        };
        match write_quietly(descriptor, bytes) {
            Ok(count) => Moved::Some(count),
            Err(Errno::AGAIN) => {
                self.is_writable = false;
                Moved::Nothing
            }
            Err(Errno::INTR) => Moved::Nothing,
            Err(_) => self.lose(false, now),
        }
    }

    /// The other end is gone, or the port itself.
    fn lose(&mut self, may_survive: bool, now: Instant) -> Moved {
        if !(may_survive && self.survives) {
            self.descriptor = None;
        }
        self.is_connected = false;
        self.backoff = BACKOFF.0;
        self.retry(now);
        Moved::Lost
    }
}

/// Writes to a socket without SIGPIPE if its peer is gone; to anything else with write(2).
fn write_quietly(descriptor: &OwnedFd, bytes: &[u8]) -> rustix::io::Result<usize> {
    match rustix::net::send(descriptor, bytes, rustix::net::SendFlags::NOSIGNAL) {
        Err(Errno::NOTSOCK) => rustix::io::write(descriptor, bytes),
        result => result,
    }
}

fn is_hung_up(descriptor: &OwnedFd) -> io::Result<bool> {
    let mut polled = [PollFd::new(descriptor, PollFlags::empty())];
    rustix::event::poll(&mut polled, Some(&Timespec::default()))?;
    Ok(polled[0].revents().contains(PollFlags::HUP))
}
