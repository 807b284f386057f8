//! The way of a capture from the thread that moves what is captured to its reader, and what is counted of all captures.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use api::{EventDetails, EventKind};
use device::{CaptureSink, NotTaken};
use hyper::body::{Body, Bytes, Frame};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::events::Events;

/// The most bytes of a capture that wait for its reader. What comes beyond is lost, and counted.
pub const MAX_WAITING_LEN: usize = 8 << 20;

/// The most pieces that wait for it: a piece may be as small as one packet.
const MAX_WAITING_PIECES: usize = 16 << 10;

/// All captures, of lines and of networks.
#[derive(Debug, Clone, Default)]
pub struct Captures(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    readers: AtomicUsize,
    lost_packets: AtomicU64,
}

/// A capture's end at the thread that captures.
#[derive(Debug)]
pub struct CaptureSender {
    pieces: mpsc::Sender<Vec<u8>>,
    waiting_len: Arc<AtomicUsize>,
    captures: Captures,
}

/// A capture's end at the reader: the pieces of a pcapng file, each of whole blocks.
#[derive(Debug)]
pub struct CaptureReader {
    pieces: mpsc::Receiver<Vec<u8>>,
    waiting_len: Arc<AtomicUsize>,
    captures: Captures,
    /// Where its end is reported, and what.
    told: Option<(Events, EventDetails)>,
}

impl CaptureReader {
    /// The same, whose beginning is reported now, its end later.
    pub fn telling(mut self, events: &Events, details: EventDetails) -> CaptureReader {
        events.tell(EventKind::CaptureStarted, details.clone());
        self.told = Some((events.clone(), details));
        self
    }
}

impl Drop for CaptureReader {
    fn drop(&mut self) {
        self.captures.0.readers.fetch_sub(1, Ordering::Relaxed);
        if let Some((events, details)) = self.told.take() {
            events.tell(EventKind::CaptureEnded, details);
        }
    }
}

impl Captures {
    /// Both ends of a further one.
    pub fn queue(&self) -> (CaptureSender, CaptureReader) {
        self.0.readers.fetch_add(1, Ordering::Relaxed);
        let (sender, pieces) = mpsc::channel(MAX_WAITING_PIECES);
        let waiting_len = Arc::new(AtomicUsize::new(0));
        let sender = CaptureSender {
            pieces: sender,
            waiting_len: waiting_len.clone(),
            captures: self.clone(),
        };
        let reader = CaptureReader {
            pieces,
            waiting_len,
            captures: self.clone(),
            told: None,
        };
        (sender, reader)
    }

    /// How many are read.
    pub fn readers(&self) -> usize {
        self.0.readers.load(Ordering::Relaxed)
    }

    /// How many packets they have lost, those that are over with them.
    pub fn lost_packets(&self) -> u64 {
        self.0.lost_packets.load(Ordering::Relaxed)
    }
}

impl CaptureSink for CaptureSender {
    fn offer(&mut self, blocks: Vec<u8>) -> Result<(), NotTaken> {
        let len = blocks.len();
        // Only the reader takes away meanwhile, so there is no less room than it says.
        if self.waiting_len.load(Ordering::Relaxed) + len > MAX_WAITING_LEN && !self.is_gone() {
            return Err(NotTaken::Full(blocks));
        }
        // Before it is sent, so that the reader never takes away what has not been added.
        self.waiting_len.fetch_add(len, Ordering::Relaxed);
        let refused = match self.pieces.try_send(blocks) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Full(blocks)) => NotTaken::Full(blocks),
            Err(TrySendError::Closed(_)) => NotTaken::Gone,
        };
        self.waiting_len.fetch_sub(len, Ordering::Relaxed);
        Err(refused)
    }

    fn has_room(&self) -> bool {
        let waits = self.waiting_len.load(Ordering::Relaxed);
        waits < MAX_WAITING_LEN && self.pieces.capacity() > 0 || self.is_gone()
    }

    fn lose(&mut self, packets: u64) {
        let lost = &self.captures.0.lost_packets;
        lost.fetch_add(packets, Ordering::Relaxed);
    }

    fn is_gone(&self) -> bool {
        self.pieces.is_closed()
    }
}

impl Body for CaptureReader {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = ready!(self.pieces.poll_recv(context));
        Poll::Ready(piece.map(|piece| {
            self.waiting_len.fetch_sub(piece.len(), Ordering::Relaxed);
            Ok(Frame::data(Bytes::from(piece)))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(reader: &mut CaptureReader) -> Poll<Option<usize>> {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let frame = Pin::new(reader).poll_frame(&mut context);
        frame.map(|frame| Some(frame?.unwrap().into_data().unwrap().len()))
    }

    #[test]
    fn what_a_reader_leaves_waiting_is_bounded_in_bytes() {
        let (mut sender, mut reader) = Captures::default().queue();
        let half = MAX_WAITING_LEN / 2;
        for _ in 0..2 {
            sender.offer(vec![0; half]).unwrap();
        }
        assert!(!sender.has_room());
        let over = sender.offer(vec![7]);
        assert!(matches!(over, Err(NotTaken::Full(blocks)) if blocks == [7]));
        assert_eq!(read(&mut reader), Poll::Ready(Some(half)));
        assert!(sender.has_room());
        sender.offer(vec![0; half]).unwrap();
        assert!(matches!(sender.offer(vec![7]), Err(NotTaken::Full(_))));
    }

    #[test]
    fn and_in_pieces() {
        let (mut sender, mut reader) = Captures::default().queue();
        for _ in 0..MAX_WAITING_PIECES {
            sender.offer(vec![0]).unwrap();
        }
        assert!(!sender.has_room());
        assert!(matches!(sender.offer(vec![7]), Err(NotTaken::Full(_))));
        for _ in 0..MAX_WAITING_PIECES {
            assert_eq!(read(&mut reader), Poll::Ready(Some(1)));
        }
        assert_eq!(read(&mut reader), Poll::Pending);
        // What was refused takes up no room.
        sender.offer(vec![0; MAX_WAITING_LEN]).unwrap();
    }

    #[test]
    fn those_that_are_read_are_counted_and_what_any_has_lost() {
        let captures = Captures::default();
        let (mut one, of_one) = captures.queue();
        let (mut other, of_other) = captures.queue();
        one.lose(3);
        other.lose(4);
        assert_eq!((captures.readers(), captures.lost_packets()), (2, 7));
        drop((one, of_one, of_other));
        assert_eq!((captures.readers(), captures.lost_packets()), (0, 7));
    }

    #[test]
    fn either_end_sees_that_the_other_has_gone() {
        let (mut sender, reader) = Captures::default().queue();
        assert!(!sender.is_gone());
        sender.offer(vec![0; MAX_WAITING_LEN]).unwrap();
        drop(reader);
        assert!(sender.is_gone() && sender.has_room());
        assert!(matches!(sender.offer(vec![7]), Err(NotTaken::Gone)));
        let (mut sender, mut reader) = Captures::default().queue();
        sender.offer(vec![7]).unwrap();
        drop(sender);
        assert_eq!(read(&mut reader), Poll::Ready(Some(1)));
        assert_eq!(read(&mut reader), Poll::Ready(None));
    }
}
