//! The end of a circuit that writes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memory::circuit::{CircuitError, Kind, Producer, Reservation, Span};

use crate::channel::{Channel, Patience};
use crate::spin::Spin;
use crate::{Error, RECORD_HEADER_LEN, Result, record_room};

/// Writes into the ring that the peer reads. Dropped, it is finished.
#[derive(Debug)]
pub struct Writer {
    producer: Producer,
    channel: Arc<Channel>,
    spin: Spin,
    timeout: Option<Duration>,
}

/// Room in the ring, to be filled in place. Dropped without [`commit`](Self::commit), it is as if it had not been.
#[derive(Debug)]
pub struct Room<'a> {
    reservation: Reservation<'a>,
    channel: &'a Channel,
}

impl Room<'_> {
    /// In bytes.
    #[allow(clippy::len_without_is_empty)] // Whoever reserves knows.
    pub fn len(&self) -> usize {
        self.reservation.len()
    }

    /// The room itself.
    pub fn span(&mut self) -> Span<'_> {
        self.reservation.span()
    }

    /// Gives the first `len` bytes to the peer.
    ///
    /// # Errors
    /// The window was revoked, or it is more than the room has.
    #[inline]
    pub fn commit(self, len: usize) -> Result<()> {
        if self.reservation.commit(len)? {
            self.channel.wake();
        }
        Ok(())
    }
}

impl Writer {
    pub(crate) fn new(producer: Producer, channel: &Arc<Channel>, spin: Duration) -> Writer {
        Writer {
            producer,
            channel: Arc::clone(channel),
            spin: Spin::new(spin),
            timeout: None,
        }
    }

    /// The length of the ring in bytes: the most that can be reserved at once.
    pub fn capacity(&self) -> usize {
        self.producer.capacity()
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
        self.known_room(least, most)
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve), and [`Error::WouldBlock`].
    #[inline]
    pub fn try_reserve(&mut self, least: usize, most: usize) -> Result<Room<'_>> {
        self.expect(Kind::Bytes)?;
        self.wait_for_room(least, most, false)?;
        self.known_room(least, most)
    }

    /// Gives the next `len` bytes to the peer, which were written through [`Span::pieces`] of a room that is gone. It is for those who cannot keep a
    /// [`Room`], such as programs in C.
    ///
    /// # Errors
    /// The window was revoked, or there is no room for so many.
    pub fn commit(&mut self, len: usize) -> Result<()> {
        if self.producer.commit(len)? {
            self.channel.wake();
        }
        Ok(())
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
        self.channel.wake();
        Ok(())
    }

    /// Ends this direction at once: the peer's reader gets an error.
    pub fn reset(&mut self) {
        self.producer.reset();
        self.channel.wake();
    }

    /// Waits until the peer has released everything that was written; also after [`finish`](Self::finish).
    ///
    /// # Errors
    /// The circuit is over, or the time is.
    pub fn drain(&mut self) -> Result<()> {
        if self.producer.is_drained()? {
            return Ok(());
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
        self.check_gone(sleep)?;
        Ok(sleep)
    }

    /// Takes what is on the wake channel. For event loops, after the descriptor was readable and before the next try.
    ///
    /// # Errors
    /// What the system reports.
    pub fn clear(&mut self) -> Result<()> {
        self.channel.clear()
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
        let mut room = self.known_room(room_len, room_len)?;
        let header = record.len() as u64;
        let mut span = room.span();
        span.write(0, &header.to_le_bytes());
        span.write(RECORD_HEADER_LEN, record);
        room.commit(room_len)
    }

    /// What was just found.
    fn known_room(&mut self, least: usize, most: usize) -> Result<Room<'_>> {
        let reservation = self.producer.reserve(least, most)?;
        Ok(Room {
            reservation: reservation.ok_or(Error::WouldBlock)?,
            channel: &self.channel,
        })
    }

    #[inline]
    fn wait_for_room(&mut self, least: usize, most: usize, wait: bool) -> Result<()> {
        if self.producer.reserve(least, most)?.is_some() {
            return Ok(());
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
                self.channel.clear()?;
                self.check_gone(true)?;
                patience.check()?;
                continue;
            }
            let ticket = self.channel.ticket();
            if !self.producer.arm(comfortable)? || self.producer.free()? >= least {
                return Ok(());
            }
            self.check_gone(true)?;
            let started = Instant::now();
            if !self.channel.wait(ticket, patience.deadline())? {
                patience.check()?;
            }
            self.spin.slept(started.elapsed());
        }
    }

    /// When the peer has gone without a word, and there is no room, there will never be.
    fn check_gone(&mut self, is_stuck: bool) -> Result<()> {
        if is_stuck && self.channel.is_gone() {
            // Its last word may have been said in between.
            self.producer.free()?;
            return Err(Error::PeerGone);
        }
        Ok(())
    }

    fn expect(&self, expected: Kind) -> Result<()> {
        crate::setup::expect(self.producer.window().spec().kind, expected)
    }
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
        self.channel.as_fd()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.producer.finish();
        self.channel.wake();
    }
}
