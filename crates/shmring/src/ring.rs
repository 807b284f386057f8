//! The two ends of a ring.

use std::sync::Arc;

use guestmem::sync::{Ordering, full_fence};

use crate::error::CircuitError;
use crate::layout::{RingFields, State};
use crate::span::Span;
use crate::spec::Side;
use crate::window::Window;

impl Window {
    /// Takes the two ends of this side: the one that writes and the one that reads.
    pub fn split(self, side: Side) -> (Producer, Consumer) {
        let window = Arc::new(self);
        (Producer::new(&window, side), Consumer::new(&window, side))
    }

    /// The two ends of each side, for a ring pair that is used within one process: here the first side's, there the second's.
    pub fn split_both(self) -> ((Producer, Consumer), (Producer, Consumer)) {
        let window = Arc::new(self);
        let ends = |side| (Producer::new(&window, side), Consumer::new(&window, side));
        (ends(Side::First), ends(Side::Second))
    }
}

/// Whether a count that moved from `old` to `new` has come to the one at which its peer wants to be woken. All of them may wrap.
///
/// It is true for one publication only, so a sleeper is woken once. A new window's events are zero, which no count comes to.
#[inline]
pub(super) fn passes(event: u64, old: u64, new: u64) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

/// What both ends have: the peer's state, as it was seen last.
#[derive(Debug)]
struct Peer {
    state: State,
    /// Which field it is in.
    field: usize,
}

impl Peer {
    fn new(field: usize) -> Peer {
        Peer {
            state: State::Absent,
            field,
        }
    }

    /// Reads the state once. What was finished stays so; what was there is not absent again.
    #[inline]
    fn look(&mut self, window: &Window) -> Result<State, CircuitError> {
        let word = window.load(self.field, Ordering::Acquire);
        window.check_revoked()?;
        let generation = window.generation();
        let state = match State::parse(word, generation) {
            Some(state) => state,
            None if word >> 8 == generation => return Err(CircuitError::State { found: word }),
            None => return Err(CircuitError::Revoked),
        };
        match (self.state, state) {
            (_, State::Reset) => return Err(CircuitError::Reset),
            (State::Open | State::Finished, State::Absent) => return Err(CircuitError::Revoked),
            (State::Finished, State::Open) => return Err(CircuitError::State { found: word }),
            _ => self.state = state,
        }
        Ok(state)
    }
}

/// The end of a ring that writes.
#[derive(Debug)]
pub struct Producer {
    window: Arc<Window>,
    ring: Side,
    fields: RingFields,
    /// Bytes published. Ours: what stands in the window is a copy that is never read back.
    head: u64,
    /// The peer's tail, as it was read and checked last.
    tail: u64,
    state: State,
    peer: Peer,
}

/// Room in the ring, to be filled. Nothing is seen by the peer before [`commit`](Self::commit); dropped, it is as if it had not been.
#[derive(Debug)]
pub struct Reservation<'a> {
    producer: &'a mut Producer,
    len: usize,
}

impl Producer {
    fn new(window: &Arc<Window>, side: Side) -> Producer {
        let fields = RingFields::written_by(side);
        let state = State::Open;
        window.store(
            fields.producer_state,
            state.word(window.generation()),
            Ordering::Release,
        );
        Producer {
            window: Arc::clone(window),
            ring: side,
            fields,
            head: 0,
            tail: 0,
            state,
            peer: Peer::new(fields.consumer_state),
        }
    }

    /// The length of the ring in bytes: the most that can be reserved.
    pub fn capacity(&self) -> usize {
        self.window.ring_len()
    }

    /// How many bytes were ever published.
    pub fn position(&self) -> u64 {
        self.head
    }

    /// The window that the ring is in.
    pub fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// Room for at least `least` bytes, and for up to `most` of those that there is room for. `None` while there is less; ask
    /// [`arm`](Self::arm) before sleeping.
    ///
    /// # Errors
    /// The connection is over, `finish` was called, or `least` is more than the ring has. It is a mistake to ask for less than nothing: `most` counts as
    /// `least` if it is smaller.
    #[inline]
    pub fn reserve(
        &mut self,
        least: usize,
        most: usize,
    ) -> Result<Option<Reservation<'_>>, CircuitError> {
        let most = most.max(least);
        if self.state != State::Open {
            return Err(self.refuse_commit(0, 0));
        }
        let mut free = self.known_free();
        if free < most {
            free = self.free()?;
        }
        if free < least {
            self.check_len(least)?;
            return Ok(None);
        }
        let len = most.min(free);
        Ok(Some(Reservation {
            producer: self,
            len,
        }))
    }

    /// Room in bytes, from the peer's current tail. It is valid after `finish`, too.
    ///
    /// # Errors
    /// The connection is over.
    pub fn free(&mut self) -> Result<usize, CircuitError> {
        if self.state == State::Reset {
            return Err(CircuitError::Reset);
        }
        let tail = self.window.load(self.fields.tail, Ordering::Acquire);
        self.window.check_revoked()?;
        if tail.wrapping_sub(self.tail) > self.head.wrapping_sub(self.tail) {
            return Err(CircuitError::Count {
                count: "tail",
                found: tail,
                least: self.tail,
                most: self.head,
            });
        }
        self.tail = tail;
        match self.peer.look(&self.window)? {
            State::Finished => Err(CircuitError::ReaderGone),
            _ => Ok(self.known_free()),
        }
    }

    /// Publishes the next `len` bytes, which were written through a reservation. `true`: wake the other side.
    ///
    /// # Errors
    /// The window was revoked, or there was no room for so many.
    #[inline]
    pub fn commit(&mut self, len: usize) -> Result<bool, CircuitError> {
        let free = self.known_free();
        if len > free || self.state != State::Open {
            return Err(self.refuse_commit(len, free));
        }
        if len == 0 {
            return Ok(false);
        }
        self.window.check_revoked()?;
        let (old, new) = (self.head, self.head.wrapping_add(len as u64));
        self.head = new;
        // Everything written before is visible to the peer with the new head. Publish first, read the peer's event second: the peer does it the other
        // way round.
        self.window.publish(self.fields.head, new);
        let event = self
            .window
            .load(self.fields.consumer_event, Ordering::Relaxed);
        Ok(passes(event, old, new))
    }

    /// Asks to be woken when there is room for `least` bytes. `true`: there is not, so sleep. `false`: try again, there may be no wake-up.
    ///
    /// # Errors
    /// The connection is over, or `least` is more than the ring has.
    pub fn arm(&mut self, least: usize) -> Result<bool, CircuitError> {
        self.check_len(least)?;
        let missing = self.capacity() - least;
        let event = self.head.wrapping_sub(missing as u64);
        self.window
            .store(self.fields.producer_event, event, Ordering::Relaxed);
        full_fence();
        Ok(self.free()? < least)
    }

    /// Says that no more bytes will come: the half-close. The other side is to be woken afterwards, whatever it asked for.
    pub fn finish(&mut self) {
        if self.state == State::Open {
            self.set_state(State::Finished);
        }
    }

    /// Ends the connection at once. The other side is to be woken afterwards, whatever it asked for.
    pub fn reset(&mut self) {
        self.set_state(State::Reset);
    }

    /// Whether the peer has released everything that was published; also once either side has finished.
    ///
    /// # Errors
    /// The connection is over in another way.
    pub fn is_drained(&mut self) -> Result<bool, CircuitError> {
        match self.free() {
            Ok(_) | Err(CircuitError::ReaderGone) => Ok(self.head == self.tail),
            Err(error) => Err(error),
        }
    }

    fn set_state(&mut self, state: State) {
        self.state = state;
        let word = state.word(self.window.generation());
        self.window
            .store(self.fields.producer_state, word, Ordering::Release);
        // A peer about to sleep sees it, or is woken by what follows.
        full_fence();
    }

    #[inline]
    fn known_free(&self) -> usize {
        // The tail was checked: no more is out than the ring has.
        self.capacity() - self.head.wrapping_sub(self.tail) as usize
    }

    fn check_len(&self, len: usize) -> Result<(), CircuitError> {
        if len > self.capacity() {
            return Err(CircuitError::TooLong {
                asked: len,
                most: self.capacity(),
                hint: "send less at a time, or make the rings larger",
            });
        }
        Ok(())
    }

    #[cold]
    fn refuse_commit(&self, len: usize, free: usize) -> CircuitError {
        match self.state {
            State::Reset => CircuitError::Reset,
            State::Absent | State::Finished => CircuitError::Closed,
            State::Open => CircuitError::TooLong {
                asked: len,
                most: free,
                hint: "commit what was reserved, once",
            },
        }
    }
}

impl Reservation<'_> {
    /// In bytes: what was asked for, or more.
    #[allow(clippy::len_without_is_empty)] // The caller of reserve knows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The room itself.
    pub fn span(&mut self) -> Span<'_> {
        self.producer
            .window
            .span(self.producer.ring, self.producer.head, self.len)
    }

    /// Publishes the first `len` bytes. `true`: wake the other side.
    ///
    /// # Errors
    /// The window was revoked, or it is more than was reserved.
    #[inline]
    pub fn commit(self, len: usize) -> Result<bool, CircuitError> {
        if len > self.len {
            return Err(self.producer.refuse_commit(len, self.len));
        }
        self.producer.commit(len)
    }
}

/// The end of a ring that reads.
#[derive(Debug)]
pub struct Consumer {
    window: Arc<Window>,
    ring: Side,
    fields: RingFields,
    /// Bytes released. Ours, as the producer's head is its own.
    tail: u64,
    /// The peer's head, as it was read and checked last.
    head: u64,
    /// The head was read after the peer had said that no more comes.
    is_end_known: bool,
    state: State,
    peer: Peer,
}

/// What there is to read.
#[derive(Debug)]
pub enum Peeked<'a> {
    /// These bytes. They stay until they are released.
    Bytes(Span<'a>),
    /// Nothing now. Ask [`Consumer::arm`] before sleeping.
    Empty,
    /// Nothing any more: the peer has said so.
    Finished,
}

impl Consumer {
    fn new(window: &Arc<Window>, side: Side) -> Consumer {
        let ring = side.other();
        let fields = RingFields::written_by(ring);
        let state = State::Open;
        window.store(
            fields.consumer_state,
            state.word(window.generation()),
            Ordering::Release,
        );
        Consumer {
            window: Arc::clone(window),
            ring,
            fields,
            tail: 0,
            head: 0,
            is_end_known: false,
            state,
            peer: Peer::new(fields.producer_state),
        }
    }

    /// The length of the ring in bytes: the most that can ever be there at once.
    pub fn capacity(&self) -> usize {
        self.window.ring_len()
    }

    /// How many bytes were ever released.
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// The window that the ring is in.
    pub fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// What there is, up to `most` bytes.
    ///
    /// # Errors
    /// The connection is over, or `close` was called.
    #[inline]
    pub fn peek(&mut self, most: usize) -> Result<Peeked<'_>, CircuitError> {
        let mut available = self.known();
        if available == 0 || available < most {
            available = self.available()?;
        }
        if available == 0 {
            return Ok(match self.peer.state {
                State::Finished => Peeked::Finished,
                _ => Peeked::Empty,
            });
        }
        let span = self.window.span(self.ring, self.tail, available.min(most));
        Ok(Peeked::Bytes(span))
    }

    /// How many bytes there are, after a read of the peer's head.
    ///
    /// # Errors
    /// The connection is over, or `close` was called.
    pub fn available(&mut self) -> Result<usize, CircuitError> {
        match self.state {
            State::Open => {}
            State::Reset => return Err(CircuitError::Reset),
            State::Absent | State::Finished => return Err(CircuitError::Closed),
        }
        let finished = self.peer.state == State::Finished;
        self.look_at_head()?;
        self.is_end_known |= finished;
        if self.known() > 0 {
            return Ok(self.known());
        }
        let state = self.peer.look(&self.window)?;
        if state == State::Finished && !finished {
            // What came before that word may have been published since we looked.
            self.look_at_head()?;
            self.is_end_known = true;
        }
        Ok(self.known())
    }

    /// Whether the peer has said that no more will come than what is there. As it was seen last.
    pub fn is_at_end(&self) -> bool {
        self.is_end_known
    }

    /// Gives the first `len` bytes back. `true`: wake the other side.
    ///
    /// # Errors
    /// The window was revoked: what was read from it since the last release may be zeros. Or there are not so many.
    #[inline]
    pub fn release(&mut self, len: usize) -> Result<bool, CircuitError> {
        if len > self.known() || self.state != State::Open {
            return Err(self.refuse_release(len));
        }
        if len == 0 {
            return Ok(false);
        }
        self.window.check_revoked()?;
        let (old, new) = (self.tail, self.tail.wrapping_add(len as u64));
        self.tail = new;
        // All reads are done before the peer sees the new tail and writes there.
        self.window.publish(self.fields.tail, new);
        let event = self
            .window
            .load(self.fields.producer_event, Ordering::Relaxed);
        Ok(passes(event, old, new))
    }

    /// Asks to be woken when there are more than `beyond` bytes. `true`: there are not, so sleep. `false`: try again, there may be no wake-up.
    ///
    /// # Errors
    /// As [`available`](Self::available); or `beyond` is all that the ring has.
    pub fn arm(&mut self, beyond: usize) -> Result<bool, CircuitError> {
        if beyond >= self.capacity() {
            return Err(CircuitError::TooLong {
                asked: beyond.saturating_add(1),
                most: self.capacity(),
                hint: "release what was read, or make the rings larger",
            });
        }
        let event = self.tail.wrapping_add(beyond as u64 + 1);
        self.window
            .store(self.fields.consumer_event, event, Ordering::Relaxed);
        full_fence();
        if self.available()? > beyond {
            return Ok(false);
        }
        // With bytes in the ring the state has not been read yet.
        Ok(self.peer.look(&self.window)? != State::Finished)
    }

    /// Says that no more bytes are wanted. The other side is to be woken afterwards, whatever it asked for.
    pub fn close(&mut self) {
        if self.state == State::Open {
            self.set_state(State::Finished);
        }
    }

    /// Ends the connection at once. The other side is to be woken afterwards, whatever it asked for.
    pub fn reset(&mut self) {
        self.set_state(State::Reset);
    }

    fn set_state(&mut self, state: State) {
        self.state = state;
        let word = state.word(self.window.generation());
        self.window
            .store(self.fields.consumer_state, word, Ordering::Release);
        full_fence();
    }

    #[inline]
    fn look_at_head(&mut self) -> Result<(), CircuitError> {
        let head = self.window.load(self.fields.head, Ordering::Acquire);
        self.window.check_revoked()?;
        let most = self.tail.wrapping_add(self.capacity() as u64);
        // Once it is finished, it stays where it was.
        let most = if self.is_end_known { self.head } else { most };
        if head.wrapping_sub(self.head) > most.wrapping_sub(self.head) {
            return Err(CircuitError::Count {
                count: "head",
                found: head,
                least: self.head,
                most,
            });
        }
        self.head = head;
        Ok(())
    }

    #[inline]
    fn known(&self) -> usize {
        // The head was checked: no more is there than the ring has.
        self.head.wrapping_sub(self.tail) as usize
    }

    #[cold]
    fn refuse_release(&self, len: usize) -> CircuitError {
        match self.state {
            State::Reset => CircuitError::Reset,
            State::Absent | State::Finished => CircuitError::Closed,
            State::Open => CircuitError::TooLong {
                asked: len,
                most: self.known(),
                hint: "release what was peeked at, once",
            },
        }
    }
}
