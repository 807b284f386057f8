//! The end of a circuit that reads.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shmring::{Consumer, Kind, Peeked, Span};

use crate::channel::Patience;
use crate::error::expect_kind;
use crate::line::Line;
use crate::spin::Spin;
use crate::{Error, RECORD_HEADER_LEN, Result, record_room};

/// Reads from the ring that the peer writes. Dropping it closes the reading side for the peer.
#[derive(Debug)]
pub struct Reader {
    consumer: Consumer,
    line: Arc<Line>,
    spin: Spin,
    timeout: Option<Duration>,
}

/// Whether there is something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Bytes,
    Nothing,
    End,
}

impl Reader {
    pub(crate) fn new(consumer: Consumer, line: &Arc<Line>, spin: Duration) -> Reader {
        Reader {
            consumer,
            line: Arc::clone(line),
            spin: Spin::new(spin),
            timeout: None,
        }
    }

    /// The length of the ring in bytes: the most that can be there at once.
    pub fn capacity(&self) -> usize {
        self.consumer.capacity()
    }

    /// Whether the peer's bytes are read where it wrote them.
    pub fn is_zero_copy(&self) -> bool {
        matches!(&*self.line, Line::Window(_))
    }

    /// How many bytes were ever released. For records, with their headers.
    pub fn position(&self) -> u64 {
        self.consumer.position()
    }

    /// How long to wait for bytes before [`Error::TimedOut`]. Forever, at first.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// What there is, up to `most` bytes; waits until there is something. `None` at the end. The bytes stay until they are
    /// [released](Self::release).
    ///
    /// # Errors
    /// The circuit is over without an end, or carries records.
    #[inline]
    pub fn peek(&mut self, most: usize) -> Result<Option<Span<'_>>> {
        self.expect(Kind::Bytes)?;
        self.find(0, most, true)?;
        self.known(most)
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// As [`peek`](Self::peek), and [`Error::WouldBlock`].
    #[inline]
    pub fn try_peek(&mut self, most: usize) -> Result<Option<Span<'_>>> {
        self.expect(Kind::Bytes)?;
        self.find(0, most, false)?;
        self.known(most)
    }

    /// Waits until there are more than `beyond` bytes. False if there never will be, because the end has come.
    ///
    /// # Errors
    /// The circuit is over without an end, or `beyond` is all that the ring has.
    pub fn wait(&mut self, beyond: usize) -> Result<bool> {
        Ok(self.find(beyond, usize::MAX, true)? == Found::Bytes)
    }

    /// Gives the first `len` bytes of what was peeked at back to the writer.
    ///
    /// # Errors
    /// There were not so many; or the window was revoked, and what was read since the last release means nothing.
    #[inline]
    pub fn release(&mut self, len: usize) -> Result<()> {
        if self.consumer.release(len)? {
            self.line.wake();
        }
        Ok(())
    }

    /// Reads what there is, and does not wait. Zero at the end.
    ///
    /// # Errors
    /// As [`try_peek`](Self::try_peek).
    pub fn try_read(&mut self, into: &mut [u8]) -> Result<usize> {
        self.take(into, false)
    }

    /// Receives one record in place of what was in `record`; waits for it. False at the end.
    ///
    /// # Errors
    /// The circuit is over without an end, or carries bytes; or the peer wrote what is no record.
    pub fn receive(&mut self, record: &mut Vec<u8>) -> Result<bool> {
        self.receive_record(record, true)
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// As [`receive`](Self::receive), and [`Error::WouldBlock`].
    pub fn try_receive(&mut self, record: &mut Vec<u8>) -> Result<bool> {
        self.receive_record(record, false)
    }

    /// Ends this direction at once: the peer's writer gets an error.
    pub fn reset(&mut self) {
        self.consumer.reset();
        self.line.stopped();
    }

    /// Asks for a byte on the wake channel when there are more than `beyond` bytes, or the end comes. `true`: there are not, so wait for the
    /// descriptor and then call [`clear`](Self::clear). `false`: try again.
    ///
    /// # Errors
    /// The circuit is over without an end.
    pub fn arm(&mut self, beyond: usize) -> Result<bool> {
        if !self.is_zero_copy() {
            return self.arm_stream(beyond);
        }
        let sleep = self.consumer.arm(beyond)?;
        if sleep && self.line.is_gone() {
            return self.last_look(beyond).map(|_| false);
        }
        if sleep {
            self.ask_for_more(beyond);
        }
        Ok(sleep)
    }

    /// Takes what is on the wake channel. For event loops, after the descriptor was readable and before the next try.
    ///
    /// # Errors
    /// What the system reports.
    pub fn clear(&mut self) -> Result<()> {
        self.line.clear()
    }

    fn take(&mut self, into: &mut [u8], wait: bool) -> Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        self.expect(Kind::Bytes)?;
        self.find(0, into.len(), wait)?;
        let Some(span) = self.known(into.len())? else {
            return Ok(0);
        };
        let len = span.len();
        span.read(0, &mut into[..len]);
        self.release(len)?;
        Ok(len)
    }

    fn receive_record(&mut self, record: &mut Vec<u8>, wait: bool) -> Result<bool> {
        self.expect(Kind::Records)?;
        if !self.find_record(wait)? {
            return Ok(false);
        }
        let Some(span) = self.known(usize::MAX)? else {
            return Ok(false);
        };
        // A record is published whole: what is there begins with its header and holds all of it.
        let available = span.len();
        let header = record_header(&span).unwrap_or_default();
        let len = usize::try_from(header).ok();
        let room = len.and_then(record_room).filter(|room| *room <= available);
        let (Some(len), Some(room)) = (len, room) else {
            return self.refuse_record(header, available);
        };
        record.resize(len, 0);
        span.read(RECORD_HEADER_LEN, record);
        self.release(room)?;
        Ok(true)
    }

    /// Looks for a record. False at the end.
    fn find_record(&mut self, wait: bool) -> Result<bool> {
        let mut beyond = 0;
        loop {
            if !self.is_zero_copy() {
                beyond = self.record_beyond()?;
            }
            if self.find(beyond, usize::MAX, wait)? == Found::End {
                // A record that was begun was to be ended.
                return match self.known(1)? {
                    Some(_) => Err(Error::PeerGone),
                    None => Ok(false),
                };
            }
            // A header has the length to wait for; then the whole record is there.
            if self.is_zero_copy() || self.record_beyond()? <= beyond {
                return Ok(true);
            }
        }
    }

    /// More than how many bytes have to be there for the next record, which a stream may cut anywhere: those of its header as long as it is not there.
    fn record_beyond(&mut self) -> Result<usize> {
        let Peeked::Bytes(span) = self.consumer.peek(usize::MAX)? else {
            return Ok(RECORD_HEADER_LEN - 1);
        };
        let available = span.len();
        let Some(header) = record_header(&span) else {
            return Ok(RECORD_HEADER_LEN - 1);
        };
        let capacity = self.consumer.capacity();
        let len = usize::try_from(header).ok();
        match len.and_then(record_room).filter(|room| *room <= capacity) {
            Some(room) => Ok(room - 1),
            None => self.refuse_record(header, available),
        }
    }

    /// What is no record ends the circuit.
    #[cold]
    fn refuse_record<T>(&mut self, found: u64, available: usize) -> Result<T> {
        self.reset();
        Err(Error::Record { found, available })
    }

    /// What was just found.
    fn known(&mut self, most: usize) -> Result<Option<Span<'_>>> {
        match self.consumer.peek(most)? {
            Peeked::Bytes(span) => Ok(Some(span)),
            Peeked::Finished => Ok(None),
            Peeked::Empty => Err(Error::WouldBlock),
        }
    }

    /// Looks for more than `beyond` bytes; it need not know of more than `most`.
    #[inline]
    fn find(&mut self, beyond: usize, most: usize, wait: bool) -> Result<Found> {
        match self.look(beyond, most)? {
            Found::Nothing => {}
            found => return Ok(found),
        }
        match wait {
            true => self.wait_for_more(beyond),
            false if self.line.is_gone() => self.last_look(beyond),
            false => Err(Error::WouldBlock),
        }
    }

    #[inline]
    fn look(&mut self, beyond: usize, most: usize) -> Result<Found> {
        let found = self.look_at_ring(beyond, most)?;
        if found == Found::Nothing {
            if let Line::Stream(stream) = &*self.line {
                stream.pull()?;
                return self.look_at_ring(beyond, most);
            }
        }
        Ok(found)
    }

    #[inline]
    fn look_at_ring(&mut self, beyond: usize, most: usize) -> Result<Found> {
        let len = match self.consumer.peek(most.max(beyond.saturating_add(1)))? {
            Peeked::Bytes(span) => span.len(),
            Peeked::Finished => return Ok(Found::End),
            Peeked::Empty => 0,
        };
        Ok(match len > beyond {
            true => Found::Bytes,
            // With less than what is waited for: there will be no more.
            false if self.consumer.is_at_end() => Found::End,
            false => Found::Nothing,
        })
    }

    /// Looks for a while, then sleeps until there is something.
    ///
    /// What is between the last look and the answer is in every round trip of busy pollers: so nothing is prepared for a sleep before.
    fn wait_for_more(&mut self, beyond: usize) -> Result<Found> {
        let patience = Patience::new(self.timeout);
        if !self.is_zero_copy() {
            return self.wait_for_stream(beyond, patience);
        }
        loop {
            let consumer = &mut self.consumer;
            let look = || match consumer.available() {
                Ok(available) => Ok(available > beyond || consumer.is_at_end()),
                Err(error) => Err(error),
            };
            let seen = self.spin.look(patience.deadline(), look)?;
            if seen || !self.sleep(beyond, patience)? {
                match self.look(beyond, usize::MAX)? {
                    Found::Nothing => {}
                    found => return Ok(found),
                }
            }
            if self.line.is_gone() {
                return self.last_look(beyond);
            }
        }
    }

    /// Sleeps until the peer wakes this end. False if the ring changed before. With endless busy polling it checks the wake channel instead.
    #[cold]
    fn sleep(&mut self, beyond: usize, patience: Patience) -> Result<bool> {
        let line = Arc::clone(&self.line);
        let Line::Window(channel) = &*line else {
            return Ok(false);
        };
        if self.spin.never_sleeps() {
            channel.clear()?;
            if channel.is_gone() {
                return Ok(true);
            }
            if beyond > 0 {
                // With bytes in the ring no other check finds out whether these are the last.
                self.consumer.arm(beyond)?;
            }
            patience.check()?;
            return Ok(true);
        }
        let ticket = channel.ticket();
        if !self.consumer.arm(beyond)? {
            return Ok(false);
        }
        if channel.is_gone() {
            return Ok(true);
        }
        self.ask_for_more(beyond);
        let started = Instant::now();
        if !channel.wait(ticket, patience.deadline())? {
            patience.check()?;
        }
        self.spin.slept(started.elapsed());
        Ok(true)
    }

    fn wait_for_stream(&mut self, beyond: usize, patience: Patience) -> Result<Found> {
        let line = Arc::clone(&self.line);
        let Line::Stream(stream) = &*line else {
            return Err(Error::WouldBlock);
        };
        loop {
            let waits = stream.reader_waits()?;
            // It looks for the end also where there are bytes.
            self.consumer.arm(beyond)?;
            match self.look_at_ring(beyond, usize::MAX)? {
                Found::Nothing => {}
                found => return Ok(found),
            }
            if !waits.wait(patience.deadline())? {
                patience.check()?;
            }
        }
    }

    fn arm_stream(&mut self, beyond: usize) -> Result<bool> {
        let line = Arc::clone(&self.line);
        let Line::Stream(stream) = &*line else {
            return Ok(false);
        };
        stream.pull()?;
        let beyond = match self.consumer.window().spec().kind {
            Kind::Bytes => beyond,
            Kind::Records => beyond.max(self.record_beyond()?),
        };
        let sleep = self.consumer.arm(beyond)?;
        if sleep {
            stream.want_bytes()?;
        }
        Ok(sleep)
    }

    /// A writer that has filled the ring sleeps until much of it is free. If we wait for more than is left, that may never come.
    fn ask_for_more(&self, beyond: usize) {
        if beyond > 0 {
            self.line.wake();
        }
    }

    /// The peer has gone; what it did before is there.
    fn last_look(&mut self, beyond: usize) -> Result<Found> {
        match self.look(beyond, usize::MAX)? {
            Found::Nothing => Err(Error::PeerGone),
            found => Ok(found),
        }
    }

    fn expect(&self, expected: Kind) -> Result<()> {
        expect_kind(self.consumer.window().spec().kind, expected)
    }
}

/// `None` as long as it is not whole.
fn record_header(span: &Span<'_>) -> Option<u64> {
    let mut header = [0; RECORD_HEADER_LEN];
    if span.len() < header.len() {
        return None;
    }
    span.read(0, &mut header);
    Some(u64::from_le_bytes(header))
}

impl io::Read for Reader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(self.take(into, true)?)
    }
}

impl AsFd for Reader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.consumer.close();
        self.line.stopped();
    }
}
