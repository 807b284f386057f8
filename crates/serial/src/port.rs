//! What a driver needs from its owner: the port, and the targets of channels.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use wire::serial::Refusal;

/// The owner of a driver. All methods are called from the driver's thread, which does nothing else meanwhile: they must not wait.
pub trait Port: Send {
    /// A descriptor for the port: a character device, a terminal in raw mode, or a connected stream socket. The driver makes it non-blocking.
    ///
    /// Called at the start, and after the descriptor that was returned came to its end.
    ///
    /// # Errors
    /// There is no port yet. It is asked for again when [`Port::awaited`] is readable, or, where there is no such descriptor, after a wait that
    /// doubles from 20 ms to 2 s.
    fn open(&mut self, now: Instant) -> io::Result<OwnedFd>;

    /// Whose readability means that [`Port::open`] may have something now: a listening socket.
    fn awaited(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// What is behind this port, for a channel that the peer opens.
    ///
    /// # Errors
    /// The reason that the peer gets.
    fn accept(&mut self, port: u32) -> Result<Stream, Refusal>;

    /// Something happened to the other side of the link.
    fn on_peer(&mut self, event: PeerEvent) {
        let _ = event;
    }
}

/// A connected stream socket, which the driver makes non-blocking, and what a UNIX socket cannot say about its end.
#[derive(Debug)]
pub struct Stream {
    /// The socket.
    pub socket: OwnedFd,
    /// Set before the socket is closed by whichever side had more to say or has lost the rest: what the other then reads is no end.
    pub cut: Cut,
}

/// Whether a socket was closed before its time. Both of its sides have it.
pub type Cut = Arc<AtomicBool>;

impl<S: Into<OwnedFd>> From<S> for Stream {
    /// A socket whose other side does not know that word, to which every end is one.
    fn from(socket: S) -> Stream {
        Stream {
            socket: socket.into(),
            cut: Cut::default(),
        }
    }
}

/// What happened to the other side of the link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerEvent {
    /// It answers: channels can be opened. Also after it restarted.
    Came,
    /// The port lost its other end. Channels stay, and go on when it is back with the same peer.
    Disconnected,
    /// The port found its other end again, and the peer is the same: channels go on, nothing is lost.
    Resumed,
    /// It has acknowledged nothing for some seconds: it is paused, or gone, or its port is closed. Channels stay.
    Silent,
    /// It answers again after [`PeerEvent::Silent`].
    Speaks,
    /// The session is over, and all channels were reset; why, in words. [`PeerEvent::Came`] follows if there is another.
    Ended(String),
    /// The port cannot be used, for another reason than that its other end is absent: it cannot be opened, or the other end has another version.
    /// Reported once until it changes.
    NoPort(String),
}

/// What a driver may use.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How many bytes the peer may have on their way on one channel. At most `MAX_WINDOW` of the link.
    pub window: u32,
    /// The most channels at a time, those of both sides and those whose last bytes are still being delivered together.
    pub channels: usize,
    /// How long a lost peer is waited for before all channels are reset.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            window: 256 * 1024,
            channels: 256,
            patience: Duration::from_secs(60),
        }
    }
}

/// How a link is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Status {
    /// The port has another end, as far as can be seen.
    pub is_connected: bool,
    /// The peer answers: channels can be opened.
    pub has_peer: bool,
    /// Channels at present.
    pub channels: usize,
    /// Counters since the start.
    pub counters: Counters,
}

/// What a link has counted since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Bytes of channels that were sent, those sent again not counted.
    pub sent_bytes: u64,
    /// Bytes of channels that were received, each once.
    pub received_bytes: u64,
    /// Frames sent again because the port had lost them.
    pub replayed_frames: u64,
    /// Bytes received that belonged to no whole frame.
    pub discarded_bytes: u64,
    /// Frames received that were damaged or cut.
    pub damaged_frames: u64,
    /// Frames received that were received before, or belonged to another session.
    pub stale_frames: u64,
    /// How often a frame was found to be missing.
    pub gaps: u64,
    /// How often the port found its other end.
    pub connections: u64,
    /// How often the other side began anew.
    pub sessions: u64,
    /// How often the other side broke the protocol.
    pub violations: u64,
    /// Channels opened, by either side.
    pub channels: u64,
    /// Channels that were refused, by either side.
    pub refused_channels: u64,
    /// Channels that were reset: by either side, or because the session ended.
    pub reset_channels: u64,
}
