//! A circuit without a window: its bytes go through a stream socket.
//!
//! # Theory of operation
//!
//! Reader and writer are the same as with a window, and see a ring pair like any other. It is private to this process, and what plays the peer at its other side is in
//! here: *pushing* sends what is in the outgoing ring to the socket, *pulling* receives from the socket into the incoming ring. There is no thread for this. The
//! writer pushes when it commits, and the reader pulls when it finds too little.
//!
//! What the socket does not take stays in the outgoing ring: these are *leftovers*. A call that may wait does until there are none, and pulls
//! meanwhile, so that two peers that write to each other at once do not wait for each other. Others leave them, and they are pushed by whatever is done next
//! with the circuit: also by `clear`, since the circuit's descriptor becomes readable when the socket takes bytes again.
//!
//! That descriptor is an epoll instance with one socket in it. What it is asked to wait for is the *interest*; what has happened of it is taken out of it, so that it is
//! readable once for each time one has armed.
//!
//! # What is different with a stream
//!
//! The end of a stream is the end: a peer that dies looks like one that has finished, unless it was in the middle of a record. A reset
//! that the peer asks for looks like that, too. And "drained" means that the system has taken the bytes, not that the peer has.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use shmring::{
    CircuitError, Consumer, Identity, Kind, Peeked, Producer, Window, WindowSpec, system_page_len,
};

use crate::Result;

/// The longest rings that a circuit without a window has, in bytes. What a window of 16 MiB has, too.
pub(crate) const MAX_STREAM_RING_LEN: u64 = 4 << 20;

/// How much is received and discarded after the reader closed, to make room, in bytes: as much as the longest ring holds.
const MAX_DROPPED: usize = MAX_STREAM_RING_LEN as usize;

/// How long leftovers are still pushed after their writer is gone.
pub(crate) const LINGER: Duration = Duration::from_secs(60);

/// How long to wait for room before trying all the same.
const RETRY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Stream {
    socket: OwnedFd,
    readiness: OwnedFd,
    interest: Mutex<Interest>,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
}

/// What the readiness descriptor waits for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Interest {
    bytes: bool,
    room: bool,
}

/// The peer's side of the outgoing ring.
#[derive(Debug)]
struct Outgoing {
    consumer: Consumer,
    has_leftovers: bool,
    /// Nothing is sent any more: the end was, or it cannot be.
    is_over: bool,
    /// What the socket said.
    failure: Option<CircuitError>,
}

/// The peer's side of the incoming ring.
#[derive(Debug)]
struct Incoming {
    producer: Producer,
    /// The end has come, or the reader is closed.
    is_over: bool,
    /// The reader waits for the socket itself: if another thread took its bytes, it would not wake.
    has_reader_waiting: bool,
}

/// The two ends that a writer and a reader get.
pub(crate) struct Ends {
    pub(crate) producer: Producer,
    pub(crate) consumer: Consumer,
}

impl Stream {
    /// A circuit over this socket, with rings of so many bytes.
    pub(crate) fn new(socket: OwnedFd, kind: Kind, ring_len: u64) -> Result<(Stream, Ends)> {
        let spec = WindowSpec {
            // It never leaves this process.
            identity: Identity {
                generation: 1,
                nonce: [0; 16],
            },
            kind,
            ring_len: ring_len.min(MAX_STREAM_RING_LEN),
            page_len: system_page_len(),
        };
        let window = Window::attach(&Window::create(&spec)?, 0, &spec)?;
        let ((producer, consumer), (far_producer, far_consumer)) = window.split_both();
        let stream = Stream {
            socket,
            readiness: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            interest: Mutex::default(),
            outgoing: Mutex::new(Outgoing {
                consumer: far_consumer,
                has_leftovers: false,
                is_over: false,
                failure: None,
            }),
            incoming: Mutex::new(Incoming {
                producer: far_producer,
                is_over: false,
                has_reader_waiting: false,
            }),
        };
        Ok((stream, Ends { producer, consumer }))
    }

    /// Sends what the socket takes now. False if there are leftovers.
    pub(crate) fn push(&self) -> Result<bool> {
        sys::lock(&self.outgoing).push(self.socket.as_fd())
    }

    /// Sends everything, and waits until that is done. False when the deadline is past.
    pub(crate) fn flush(&self, deadline: Option<Instant>) -> Result<bool> {
        while !self.push()? {
            if !self.wait_for_room(deadline)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Receives what there is now, as far as there is room.
    pub(crate) fn pull(&self) -> Result<()> {
        sys::lock(&self.incoming).pull(self.socket.as_fd())
    }

    /// The reader is closed: shuts down the receiving side for the peer.
    pub(crate) fn stop_reading(&self) {
        sys::lock(&self.incoming).is_over = true;
        // It may be gone already.
        let _ = shutdown(&self.socket, Shutdown::Read);
        // A peer that waits for room is not woken by this, but by room.
        let receive = |bytes: &mut [u8]| recv(&self.socket, bytes, RecvFlags::DONTWAIT);
        drop_bytes(|bytes| receive(bytes).map_or(0, |(len, _)| len));
    }

    /// Waits until the socket may take bytes, and receives meanwhile. False when the deadline is past.
    pub(crate) fn wait_for_room(&self, deadline: Option<Instant>) -> Result<bool> {
        let mut events = PollFlags::OUT;
        if sys::lock(&self.incoming).wants_bytes_for_others() {
            events |= PollFlags::IN;
        }
        // Only the next send shows that the peer's reader is closed, and with some sockets nothing else does.
        let next_try = Instant::now() + RETRY;
        let until = deadline.map_or(next_try, |deadline| deadline.min(next_try));
        let found = self.poll(events, Some(until))?;
        if found.contains(PollFlags::IN) {
            let mut incoming = sys::lock(&self.incoming);
            if incoming.wants_bytes_for_others() {
                incoming.pull(self.socket.as_fd())?;
            }
        }
        Ok(!found.is_empty() || deadline.is_none_or(|deadline| Instant::now() < deadline))
    }

    /// The reader is going to wait. It reads the ring once more, and then calls [`ReaderWaits::wait`].
    pub(crate) fn reader_waits(&self) -> Result<ReaderWaits<'_>> {
        let mut incoming = sys::lock(&self.incoming);
        incoming.has_reader_waiting = true;
        let waits = ReaderWaits { stream: self };
        let pulled = incoming.pull(self.socket.as_fd());
        drop(incoming);
        pulled.map(|()| waits)
    }

    /// Makes the descriptor readable once there are bytes, or the end, or leftovers can go on.
    pub(crate) fn want_bytes(&self) -> Result<()> {
        let has_leftovers = !self.push().unwrap_or(true);
        self.ask(|interest| Interest {
            bytes: true,
            room: interest.room || has_leftovers,
        })
    }

    /// Makes the descriptor readable once the socket takes bytes.
    pub(crate) fn want_room(&self) -> Result<()> {
        self.ask(|interest| Interest {
            room: true,
            ..interest
        })
    }

    /// Takes out of the interest what has happened, and pushes leftovers.
    pub(crate) fn clear(&self) -> Result<()> {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        let immediately = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let count = match epoll::wait(&self.readiness, &mut events[..], Some(&immediately)) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let flags = match count {
            0 => epoll::EventFlags::empty(),
            _ => events[0].flags,
        };
        let failed = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
        let mut has_leftovers = sys::lock(&self.outgoing).has_leftovers;
        if has_leftovers {
            // A failure is kept for the next write.
            has_leftovers = !self.push().unwrap_or(true);
        }
        self.ask(|interest| Interest {
            bytes: interest.bytes && !failed && !flags.contains(epoll::EventFlags::IN),
            room: has_leftovers
                || interest.room && !failed && !flags.contains(epoll::EventFlags::OUT),
        })
    }

    fn ask(&self, change: impl FnOnce(Interest) -> Interest) -> Result<()> {
        let mut interest = sys::lock(&self.interest);
        let (old, new) = (*interest, change(*interest));
        if old == new {
            return Ok(());
        }
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, new.bytes);
        flags.set(epoll::EventFlags::OUT, new.room);
        let data = epoll::EventData::new_u64(0);
        // Without interest it is removed: epoll reports errors and hang-ups in any case.
        let none = Interest::default();
        match (old == none, new == none) {
            (true, _) => epoll::add(&self.readiness, &self.socket, data, flags)?,
            (_, true) => epoll::delete(&self.readiness, &self.socket)?,
            _ => epoll::modify(&self.readiness, &self.socket, data, flags)?,
        }
        *interest = new;
        Ok(())
    }

    /// Empty when the deadline is past.
    fn poll(&self, events: PollFlags, deadline: Option<Instant>) -> Result<PollFlags> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = left.map(|left| Timespec {
                tv_sec: left.as_secs().min(i32::MAX as u64) as i64,
                tv_nsec: left.subsec_nanos().into(),
            });
            let mut waiting = [PollFd::new(&self.socket, events)];
            match poll(&mut waiting, timeout.as_ref()) {
                Ok(_) => {
                    let found = waiting[0].revents();
                    // The caller's next operation returns the error.
                    let failed = found.intersects(PollFlags::ERR | PollFlags::HUP);
                    return Ok(if failed { events } else { found });
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// While it lives, only the reader receives.
pub(crate) struct ReaderWaits<'a> {
    stream: &'a Stream,
}

impl ReaderWaits<'_> {
    /// Waits until there is something to receive, and sends leftovers meanwhile. False when the deadline is past.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
        let mut events = PollFlags::IN;
        if sys::lock(&self.stream.outgoing).has_leftovers {
            events |= PollFlags::OUT;
        }
        let found = self.stream.poll(events, deadline)?;
        if found.contains(PollFlags::OUT) {
            // A failure is kept for the next write.
            let _ = self.stream.push();
        }
        Ok(!found.is_empty())
    }
}

impl Drop for ReaderWaits<'_> {
    fn drop(&mut self) {
        sys::lock(&self.stream.incoming).has_reader_waiting = false;
    }
}

impl Outgoing {
    fn push(&mut self, socket: BorrowedFd<'_>) -> Result<bool> {
        self.has_leftovers = false;
        while !self.is_over {
            let sent = match self.consumer.peek(usize::MAX) {
                Ok(Peeked::Bytes(span)) => span.send(socket),
                Ok(Peeked::Empty) => break,
                Ok(Peeked::Finished) => {
                    self.is_over = true;
                    // It may be gone already.
                    let _ = shutdown(socket, Shutdown::Write);
                    break;
                }
                // The writer has reset it.
                Err(_) => {
                    self.is_over = true;
                    let _ = shutdown(socket, Shutdown::Both);
                    break;
                }
            };
            match sent {
                Ok(len) => {
                    self.consumer.release(len)?;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.has_leftovers = true;
                    return Ok(false);
                }
                Err(error) => {
                    self.is_over = true;
                    self.failure = Some(self.fail(&error));
                }
            }
        }
        match self.failure {
            Some(failure) => Err(failure.into()),
            None => Ok(true),
        }
    }

    /// Sets the ring to the state that a peer with a window would have set.
    fn fail(&mut self, error: &std::io::Error) -> CircuitError {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => {
                self.consumer.close();
                CircuitError::ReaderGone
            }
            _ => {
                self.consumer.reset();
                CircuitError::Reset
            }
        }
    }
}

impl Incoming {
    fn pull(&mut self, socket: BorrowedFd<'_>) -> Result<()> {
        if self.is_over {
            return Ok(());
        }
        let mut room = match self.producer.reserve(1, usize::MAX) {
            Ok(Some(room)) => room,
            Ok(None) => return Ok(()),
            // The reader has gone.
            Err(_) => {
                self.is_over = true;
                return Ok(());
            }
        };
        let received = room.span().receive(socket);
        match received {
            Ok(0) => {
                self.is_over = true;
                self.producer.finish();
            }
            Ok(len) => {
                room.commit(len)?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            // Which of the two it is depends on the kind of socket.
            Err(error) if is_cut(&error) => {
                self.is_over = true;
                self.producer.reset();
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn wants_bytes_for_others(&mut self) -> bool {
        !self.is_over
            && !self.has_reader_waiting
            && matches!(self.producer.reserve(1, 1), Ok(Some(_)))
    }
}

/// Receives until there is nothing more. TCP and vsock go on receiving without a reader, so that a peer could keep this from ending: a part is enough for
/// one that waits for room.
fn drop_bytes(mut receive: impl FnMut(&mut [u8]) -> usize) {
    let mut bytes = [0; 4096];
    let mut dropped = 0;
    while dropped < MAX_DROPPED {
        match receive(&mut bytes) {
            0 => return,
            len => dropped += len,
        }
    }
}

fn is_cut(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionReset, NotConnected};
    matches!(error.kind(), ConnectionReset | NotConnected)
}

impl AsFd for Stream {
    /// Readable when something of what was wanted is there.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_never_stops_sending_does_not_keep_a_reader_that_leaves() {
        let mut sent = 0;
        drop_bytes(|bytes| {
            sent += bytes.len();
            assert!(sent <= MAX_DROPPED, "it goes on");
            bytes.len()
        });
        assert_eq!(sent, MAX_DROPPED);
    }
}
