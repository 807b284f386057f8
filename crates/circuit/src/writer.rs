//! The end of a circuit that writes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shmring::{CircuitError, Kind, Producer, Reservation, Span};

use crate::channel::Patience;
use crate::error::expect_kind;
use crate::line::{Line, Wait};
use crate::spin::Spin;
use crate::stream::{LINGER, Stream};
use crate::{Error, RECORD_HEADER_LEN, Result, record_room};

/// Writes into the ring that the peer reads. Dropped, it is finished.
#[derive(Debug)]
pub struct Writer {
    producer: Producer,
    line: Arc<Line>,
    spin: Spin,
    timeout: Option<Duration>,
}

/// Room in the ring, to be filled in place. Dropped without [`commit`](Self::commit), it is as if it had not been.
#[derive(Debug)]
pub struct Room<'a> {
    reservation: Reservation<'a>,
    line: &'a Line,
    wait: Wait,
}

impl Room<'_> {
    /// In bytes.
    #[allow(clippy::len_without_is_empty)] // The caller of reserve knows.
    pub fn len(&self) -> usize {
        self.reservation.len()
    }

    /// The room itself.
    pub fn span(&mut self) -> Span<'_> {
        self.reservation.span()
    }

    /// Gives the first `len` bytes to the peer. Without a window this waits until the system has taken them all, if one may wait for room; otherwise what it
    /// does not take now is sent with whatever is done next with the circuit.
    ///
    /// # Errors
    /// The window was revoked, the peer's end of a stream is closed, or it is more than the room has.
    #[inline]
    pub fn commit(self, len: usize) -> Result<()> {
        let must_wake = self.reservation.commit(len)?;
        self.line.published(must_wake, self.wait)
    }
}

impl Writer {
    pub(crate) fn new(producer: Producer, line: &Arc<Line>, spin: Duration) -> Writer {
        Writer {
            producer,
            line: Arc::clone(line),
            spin: Spin::new(spin),
            timeout: None,
        }
    }

    /// The length of the ring in bytes: the most that can be reserved at once.
    pub fn capacity(&self) -> usize {
        self.producer.capacity()
    }

    /// Whether what is written is written where the peer reads it.
    pub fn is_zero_copy(&self) -> bool {
        matches!(&*self.line, Line::Window(_))
    }

    /// How many bytes were ever written. For records, with their headers.
    pub fn position(&self) -> u64 {
        self.producer.position()
    }

    /// How long to wait for room before [`Error::TimedOut`]. Forever, at first.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// Room for at least `least` bytes, and up to `most` if there is as much; waits for it.
    ///
    /// Do not ask for more than one byte if the peer may wait, without releasing, for more than it has.
    ///
    /// # Errors
    /// The circuit is over, carries records, or cannot have so much room.
    #[inline]
    pub fn reserve(&mut self, least: usize, most: usize) -> Result<Room<'_>> {
        self.expect(Kind::Bytes)?;
        self.wait_for_room(least, most, true)?;
        self.known_room(least, most, Wait::For(self.timeout))
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve), and [`Error::WouldBlock`].
    #[inline]
    pub fn try_reserve(&mut self, least: usize, most: usize) -> Result<Room<'_>> {
        self.expect(Kind::Bytes)?;
        self.wait_for_room(least, most, false)?;
        self.known_room(least, most, Wait::Never)
    }

    /// Gives the next `len` bytes to the peer, which were written through [`Span::pieces`] of a room that is gone. It is for callers unable to keep a
    /// [`Room`], such as programs in C.
    ///
    /// # Errors
    /// The window was revoked, or there is no room for so many.
    pub fn commit(&mut self, len: usize) -> Result<()> {
        let must_wake = self.producer.commit(len)?;
        self.line.published(must_wake, Wait::For(self.timeout))
    }

    /// Writes as much as there is room for, and does not wait. Returns how much that was.
    ///
    /// # Errors
    /// As [`try_reserve`](Self::try_reserve): [`Error::WouldBlock`] if there is no room at all.
    pub fn try_write(&mut self, bytes: &[u8]) -> Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let mut room = self.try_reserve(1, bytes.len())?;
        let len = room.len();
        room.span().write(0, &bytes[..len]);
        room.commit(len)?;
        Ok(len)
    }

    /// Sends one record, and waits for room if there is none.
    ///
    /// # Errors
    /// The circuit is over, carries bytes, or is too small for the record: one has at most 8 bytes less than the ring.
    pub fn send(&mut self, record: &[u8]) -> Result<()> {
        self.put(record, true)
    }

    /// Sends one record if there is room for it, and otherwise nothing: what one does with datagrams.
    ///
    /// # Errors
    /// As [`send`](Self::send), and [`Error::WouldBlock`].
    pub fn try_send(&mut self, record: &[u8]) -> Result<()> {
        self.put(record, false)
    }

    /// Says that no more will come: the half-close. Further calls do nothing.
    ///
    /// # Errors
    /// None now; it is for what comes.
    pub fn finish(&mut self) -> Result<()> {
        self.producer.finish();
        self.line.ended();
        Ok(())
    }

    /// Ends this direction at once: the peer's reader gets an error. Without a window it ends both, and the peer may take it for an end.
    pub fn reset(&mut self) {
        self.producer.reset();
        self.line.ended();
    }

    /// Waits until the peer has released everything that was written; also after [`finish`](Self::finish). Without a window, until the system has taken it.
    ///
    /// # Errors
    /// The circuit is over, or the time is.
    pub fn drain(&mut self) -> Result<()> {
        if self.producer.is_drained()? {
            return Ok(());
        }
        if let Line::Stream(stream) = &*self.line {
            let patience = Patience::new(self.timeout);
            return match stream.flush(patience.deadline())? {
                true => Ok(()),
                false => patience.check(),
            };
        }
        match self.sleep_for_room(self.capacity()) {
            Err(Error::Circuit(CircuitError::ReaderGone)) if self.producer.is_drained()? => Ok(()),
            other => other,
        }
    }

    /// Asks for a byte on the wake channel when there is room for `least` bytes. `true`: there is not, so wait for the descriptor and then call
    /// [`clear`](Self::clear). `false`: try again.
    ///
    /// # Errors
    /// The circuit is over.
    pub fn arm(&mut self, least: usize) -> Result<bool> {
        let sleep = self.producer.arm(least)?;
        if let Line::Stream(stream) = &*self.line {
            return arm_stream(stream);
        }
        self.check_gone(sleep)?;
        Ok(sleep)
    }

    /// Takes what is on the wake channel. For event loops, after the descriptor was readable and before the next try.
    ///
    /// # Errors
    /// What the system reports.
    pub fn clear(&mut self) -> Result<()> {
        self.line.clear()
    }

    /// Sends what was left over, without waiting.
    #[cfg(feature = "tokio")]
    pub(crate) fn try_flush(&mut self) -> Result<()> {
        match &*self.line {
            Line::Stream(stream) if !stream.push()? => Err(Error::WouldBlock),
            _ => Ok(()),
        }
    }

    /// Asks for the descriptor to become readable when more of what was left over can be sent. `false`: try again.
    #[cfg(feature = "tokio")]
    pub(crate) fn arm_flush(&mut self) -> Result<bool> {
        match &*self.line {
            Line::Stream(stream) => arm_stream(stream),
            Line::Window(_) => Ok(false),
        }
    }

    fn put(&mut self, record: &[u8], wait: bool) -> Result<()> {
        self.expect(Kind::Records)?;
        let most = self.capacity() - RECORD_HEADER_LEN;
        let room = record_room(record.len()).filter(|room| *room <= self.capacity());
        let room_len = room.ok_or(CircuitError::TooLong {
            asked: record.len(),
            most,
            hint: "send it in several records, or make the rings larger",
        })?;
        self.wait_for_room(room_len, room_len, wait)?;
        let wait = match wait {
            true => Wait::For(self.timeout),
            false => Wait::Never,
        };
        let mut room = self.known_room(room_len, room_len, wait)?;
        let header = record.len() as u64;
        let mut span = room.span();
        span.write(0, &header.to_le_bytes());
        span.write(RECORD_HEADER_LEN, record);
        room.commit(room_len)
    }

    /// What was just found.
    fn known_room(&mut self, least: usize, most: usize, wait: Wait) -> Result<Room<'_>> {
        let reservation = self.producer.reserve(least, most)?;
        Ok(Room {
            reservation: reservation.ok_or(Error::WouldBlock)?,
            line: &self.line,
            wait,
        })
    }

    #[inline]
    fn wait_for_room(&mut self, least: usize, most: usize, wait: bool) -> Result<()> {
        if self.producer.reserve(least, most)?.is_some() {
            return match &*self.line {
                // A call without wait leaves at most one room's bytes over.
                Line::Stream(stream) if !wait && !stream.push()? => Err(Error::WouldBlock),
                _ => Ok(()),
            };
        }
        match wait {
            true => self.sleep_for_room(least),
            false => {
                self.check_gone(true)?;
                Err(Error::WouldBlock)
            }
        }
    }

    #[cold]
    fn sleep_for_room(&mut self, least: usize) -> Result<()> {
        let patience = Patience::new(self.timeout);
        let line = Arc::clone(&self.line);
        let channel = match &*line {
            Line::Window(channel) => channel,
            Line::Stream(stream) => return self.wait_for_stream(stream, least, patience),
        };
        // Woken for each bit of room in a full ring, a stream would go on byte by byte. So it is woken once half of the ring is free; a reader that
        // waits for more than it has left, before that, wakes us (see `Reader::sleep`).
        let comfortable = match self.producer.free()? {
            0 => least.max(self.capacity() / 2),
            _ => least,
        };
        loop {
            let producer = &mut self.producer;
            let look = || producer.free().map(|free| free >= least);
            if self.spin.look(patience.deadline(), look)? {
                return Ok(());
            }
            if self.spin.never_sleeps() {
                channel.clear()?;
                self.check_gone(true)?;
                patience.check()?;
                continue;
            }
            let ticket = channel.ticket();
            if !self.producer.arm(comfortable)? || self.producer.free()? >= least {
                return Ok(());
            }
            self.check_gone(true)?;
            let started = Instant::now();
            if !channel.wait(ticket, patience.deadline())? {
                patience.check()?;
            }
            self.spin.slept(started.elapsed());
        }
    }

    fn wait_for_stream(&mut self, stream: &Stream, least: usize, patience: Patience) -> Result<()> {
        loop {
            stream.push()?;
            if self.producer.free()? >= least {
                return Ok(());
            }
            if !stream.wait_for_room(patience.deadline())? {
                patience.check()?;
            }
        }
    }

    /// When the peer has gone without a word, and there is no room, there will never be.
    fn check_gone(&mut self, is_stuck: bool) -> Result<()> {
        if is_stuck && self.line.is_gone() {
            // Its last word may have been said in between.
            self.producer.free()?;
            return Err(Error::PeerGone);
        }
        Ok(())
    }

    /// Sends the leftovers of calls that could not wait.
    fn linger(&self) {
        let Line::Stream(stream) = &*self.line else {
            return;
        };
        if !matches!(stream.push(), Ok(false)) {
            return;
        }
        let line = Arc::clone(&self.line);
        let flush = move || {
            if let Line::Stream(stream) = &*line {
                // What cannot be sent is lost, as with any socket.
                let _ = stream.flush(Instant::now().checked_add(LINGER));
            }
        };
        let thread = std::thread::Builder::new().name("circuit-linger".to_owned());
        // Without a thread it is lost, too.
        let _ = thread.spawn(flush);
    }

    fn expect(&self, expected: Kind) -> Result<()> {
        expect_kind(self.producer.window().spec().kind, expected)
    }
}

/// Whether to wait for the descriptor: whether there is something left over.
fn arm_stream(stream: &Stream) -> Result<bool> {
    let is_sent = stream.push()?;
    if !is_sent {
        stream.want_room()?;
    }
    Ok(!is_sent)
}

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let mut room = self.reserve(1, bytes.len())?;
        let len = room.len();
        room.span().write(0, &bytes[..len]);
        room.commit(len)?;
        Ok(len)
    }

    /// There is nothing to flush: what was written can be read.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Writer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A circuit that was ended from outside is over for both sides, and the first to see it must not show the other an end that was not meant.
        match self.line.is_gone() {
            true => self.producer.reset(),
            false => self.producer.finish(),
        }
        self.line.ended();
        self.linger();
    }
}
