//! What is between the two sides of a circuit beside the rings: with a window the wake channel, without one the stream.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use crate::Result;
use crate::channel::{Channel, Patience};
use crate::stream::Stream;

#[derive(Debug)]
pub(crate) enum Line {
    Window(Channel),
    Stream(Box<Stream>),
}

/// How long one may wait for what was written to be on its way.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wait {
    Never,
    For(Option<Duration>),
}

impl Line {
    /// The writer has published bytes. `must_wake`: the peer has asked to be woken for them.
    #[inline]
    pub(crate) fn published(&self, must_wake: bool, wait: Wait) -> Result<()> {
        match self {
            Line::Window(channel) if must_wake => channel.wake(),
            Line::Window(_) => {}
            // What is still there when the time is over is sent with what comes next.
            Line::Stream(stream) => {
                match wait {
                    Wait::Never => stream.push()?,
                    Wait::For(timeout) => stream.flush(Patience::new(timeout).deadline())?,
                };
            }
        }
        Ok(())
    }

    /// The writer has finished, or reset.
    pub(crate) fn ended(&self) {
        match self {
            Line::Window(channel) => channel.wake(),
            // No caller waits for what cannot be sent any more.
            Line::Stream(stream) => drop(stream.push()),
        }
    }

    /// Wakes the peer after the reader released bytes. A stream needs no wake-up.
    #[inline]
    pub(crate) fn wake(&self) {
        if let Line::Window(channel) = self {
            channel.wake();
        }
    }

    /// The reader reads no more.
    pub(crate) fn stopped(&self) {
        match self {
            Line::Window(channel) => channel.wake(),
            Line::Stream(stream) => stream.stop_reading(),
        }
    }

    /// Whether the peer is known to have gone without finishing. For a stream the ring's state has it.
    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Line::Window(channel) => channel.is_gone(),
            Line::Stream(_) => false,
        }
    }

    pub(crate) fn clear(&self) -> Result<()> {
        match self {
            Line::Window(channel) => channel.clear(),
            Line::Stream(stream) => stream.clear(),
        }
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Line::Window(channel) => channel.as_fd(),
            Line::Stream(stream) => stream.as_fd(),
        }
    }
}
