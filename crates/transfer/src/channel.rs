//! The connection, as both ends use it: messages and chunks that go out together, messages and chunks that come in.
//!
//! No wait is unbounded: each ends with [`STALL_TIMEOUT`] or by cancelling. Nor do the two ends wait for each other: while a sender's bytes do not
//! leave, it takes in the receiver's messages, so the receiver can always send.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use wire::agent::transfer::{
    CHUNK_HEADER_LEN, MAX_CHUNK_LEN, MAX_MESSAGE_LEN, Message, WINDOW, chunk_header,
};
use wire::agent::{Decoder, Frame, HEADER_LEN, OPERATION_CHANNEL};
use xxhash_rust::xxh64::xxh64;

use crate::error::Stop;

/// How long nothing may pass before the connection counts as broken. A guest without KVM on a busy machine is slow.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(120);

/// How often a wait checks whether the transfer was cancelled.
const CANCEL_INTERVAL: Duration = Duration::from_millis(250);

/// How long the message that the transfer is cancelled may take to leave.
const LAST_WORD_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a side that is busy says that it is alive.
const ALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// What waits for leaving is sent when it has this length, in bytes …
const FLUSH_LEN: usize = MAX_CHUNK_LEN;

/// … and so there is room for it, a message, and a chunk behind it.
const OUT_LEN: usize = FLUSH_LEN + HEADER_LEN + MAX_MESSAGE_LEN + CHUNK_HEADER_LEN + MAX_CHUNK_LEN;

/// How much is read beyond the end of a chunk, in bytes: the next header, and little of what would have to be copied.
const READ_AHEAD: usize = 4096;

/// The most messages that are kept while something else is waited for: the receiver says few things of each entry in the window.
const MAX_PENDING: usize = 4 * WINDOW;

/// A connection to the other side, between hello and the end.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    decoder: Decoder,
    /// Messages that came while bytes were leaving.
    pending: VecDeque<Message>,
    out: Box<[u8]>,
    filled: usize,
    /// How much of that has left.
    sent: usize,
    encoded: Vec<u8>,
    cancelled: Arc<AtomicBool>,
    last_word: Instant,
    stall_timeout: Duration,
    /// Whether this is the receiver's end, to which chunks come.
    receives: bool,
}

impl Channel {
    /// A connection on this stream socket, of which the decoder has received something already. When `cancelled` becomes true every wait
    /// ends.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn new(
        socket: OwnedFd,
        decoder: Decoder,
        cancelled: Arc<AtomicBool>,
    ) -> io::Result<Channel> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Channel {
            socket,
            decoder,
            pending: VecDeque::new(),
            out: vec![0; OUT_LEN].into_boxed_slice(),
            filled: 0,
            sent: 0,
            encoded: Vec::new(),
            cancelled,
            last_word: Instant::now(),
            stall_timeout: STALL_TIMEOUT,
            receives: false,
        })
    }

    /// From here on this is the receiver's end.
    pub(crate) fn becomes_receiver(&mut self) {
        self.receives = true;
    }

    /// Puts a message behind what waits for leaving.
    pub(crate) fn queue(&mut self, message: Message) -> Result<(), Stop> {
        self.encoded.clear();
        Frame::Transfer(message).encode(OPERATION_CHANNEL, &mut self.encoded)?;
        if self.filled >= FLUSH_LEN {
            self.flush()?;
        }
        let end = self.filled + self.encoded.len();
        self.out[self.filled..end].copy_from_slice(&self.encoded);
        self.filled = end;
        Ok(())
    }

    /// Where the bytes of a chunk are to be put, at most [`MAX_CHUNK_LEN`].
    pub(crate) fn chunk_space(&mut self, len: usize) -> Result<&mut [u8], Stop> {
        if self.filled >= FLUSH_LEN {
            self.flush()?;
        }
        let start = self.filled + CHUNK_HEADER_LEN;
        Ok(&mut self.out[start..start + len.min(MAX_CHUNK_LEN)])
    }

    /// Sends the first `len` bytes of the space as a chunk, sooner or later.
    pub(crate) fn queue_chunk(&mut self, offset: u64, len: usize) -> Result<(), Stop> {
        let start = self.filled + CHUNK_HEADER_LEN;
        let checksum = xxh64(&self.out[start..start + len], 0);
        let header = chunk_header(OPERATION_CHANNEL, offset, len, checksum)?;
        self.out[self.filled..start].copy_from_slice(&header);
        self.filled = start + len;
        if self.filled >= FLUSH_LEN {
            self.flush()?;
        }
        Ok(())
    }

    /// Sends all that waits. What comes meanwhile is taken in by those not receiving chunks.
    pub(crate) fn flush(&mut self) -> Result<(), Stop> {
        while self.sent < self.filled {
            match rustix::net::send(
                &self.socket,
                &self.out[self.sent..self.filled],
                rustix::net::SendFlags::NOSIGNAL,
            ) {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => {
                    // What comes to a receiver may be a chunk: it is left where it is.
                    if self.receives {
                        self.wait(PollFlags::OUT)?;
                    } else if self
                        .wait(PollFlags::IN | PollFlags::OUT)?
                        .contains(PollFlags::IN)
                    {
                        self.take_in()?;
                    }
                }
                Err(Errno::INTR) => {}
                // It may have said why before it left.
                Err(error) => return Err(self.last_words(error)),
            }
        }
        if self.filled > 0 {
            self.last_word = Instant::now();
        }
        (self.sent, self.filled) = (0, 0);
        Ok(())
    }

    /// Says that this side is alive, if it has been silent for long.
    pub(crate) fn stay_alive(&mut self) -> Result<(), Stop> {
        self.check_cancelled()?;
        if self.last_word.elapsed() >= ALIVE_INTERVAL {
            self.queue(Message::Alive)?;
            self.flush()?;
        }
        Ok(())
    }

    /// The next message, if it is there.
    pub(crate) fn try_message(&mut self) -> Result<Option<Message>, Stop> {
        if let Some(message) = self.pending.pop_front() {
            return Ok(Some(message));
        }
        loop {
            // Also of a side that never stops talking.
            self.check_cancelled()?;
            while !self.decoder.has_frame() {
                if !self.receive()? {
                    return Ok(None);
                }
            }
            match self.decoder.next_frame()? {
                None | Some((OPERATION_CHANNEL, Frame::Transfer(Message::Alive))) => {}
                Some((OPERATION_CHANNEL, Frame::Transfer(message))) => return Ok(Some(message)),
                Some((_, Frame::Error(report))) => return Err(Stop::Reported(report)),
                Some(_) => return Err(Stop::protocol("a frame that belongs to no transfer")),
            }
        }
    }

    /// The next message. What waits for leaving is sent before this waits.
    pub(crate) fn message(&mut self) -> Result<Message, Stop> {
        loop {
            if let Some(message) = self.try_message()? {
                return Ok(message);
            }
            self.flush()?;
            if self.pending.is_empty() {
                self.wait(PollFlags::IN)?;
            }
        }
    }

    /// The bytes that follow a [`Message::Chunk`], into `chunk`.
    pub(crate) fn read_chunk(&mut self, chunk: &mut [u8]) -> Result<(), Stop> {
        let mut there = 0;
        while there < chunk.len() {
            let raw = self.decoder.take_raw(chunk.len() - there);
            if !raw.is_empty() {
                chunk[there..there + raw.len()].copy_from_slice(raw);
                there += raw.len();
                continue;
            }
            let rest = chunk.len() - there;
            let space = self.decoder.space();
            let ahead = space.len().min(READ_AHEAD);
            let mut parts = [
                IoSliceMut::new(&mut chunk[there..]),
                IoSliceMut::new(&mut space[..ahead]),
            ];
            match rustix::io::readv(&self.socket, &mut parts) {
                Ok(0) => return Err(Stop::Broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    there += count.min(rest);
                    self.decoder.advance(count.saturating_sub(rest));
                }
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::IN)?;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(Stop::Broken(error.into())),
            }
        }
        Ok(())
    }

    /// Takes in the messages that are there, for later.
    fn take_in(&mut self) -> Result<(), Stop> {
        let mut messages = std::mem::take(&mut self.pending);
        while let Some(message) = self.try_message()? {
            // A listing is asked for by the last message before a wait, and so when nothing is left to be sent.
            let is_listing = matches!(message, Message::Listing(_));
            if messages.len() >= MAX_PENDING || is_listing {
                return Err(Stop::protocol("more was said than there is to be said"));
            }
            messages.push_back(message);
        }
        self.pending = messages;
        Ok(())
    }

    /// Receives what is there into the decoder, if something is.
    fn receive(&mut self) -> Result<bool, Stop> {
        loop {
            match rustix::io::read(&self.socket, self.decoder.space()) {
                Ok(0) => return Err(Stop::Broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    self.decoder.advance(count);
                    return Ok(true);
                }
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Stop::Broken(error.into())),
            }
        }
    }

    /// Why the other side is gone: what it said before, or the system's reason.
    fn last_words(&mut self, error: Errno) -> Stop {
        // A receiver's next bytes may be those of a chunk, and the sender has said all there is to say about its leaving by leaving.
        if !self.receives {
            loop {
                match self.try_message() {
                    Ok(Some(_)) => {}
                    Err(Stop::Reported(report)) => return Stop::Reported(report),
                    Ok(None) | Err(_) => break,
                }
            }
        }
        Stop::Broken(error.into())
    }

    fn wait(&self, flags: PollFlags) -> Result<PollFlags, Stop> {
        let deadline = Instant::now() + self.stall_timeout;
        let slice = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(CANCEL_INTERVAL.subsec_nanos()),
        };
        loop {
            self.check_cancelled()?;
            let mut polled = [PollFd::new(&self.socket, flags)];
            match rustix::event::poll(&mut polled, Some(&slice)) {
                Ok(0) if Instant::now() >= deadline => {
                    return Err(Stop::Broken(io::ErrorKind::TimedOut.into()));
                }
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(polled[0].revents()),
                Err(error) => return Err(Stop::Broken(error.into())),
            }
        }
    }

    fn check_cancelled(&self) -> Result<(), Stop> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Stop::Cancelled);
        }
        Ok(())
    }

    /// Says as the last word that it is cancelled, as far as the other side takes it within a moment.
    pub(crate) fn say_cancelled(&mut self) {
        self.cancelled = Arc::default();
        self.stall_timeout = LAST_WORD_TIMEOUT;
        if self.queue(Message::Cancel).is_ok() {
            let _ = self.flush();
        }
    }
}
