//! A stream of events on its way to a reader, in the form of server-sent events (HTML Living Standard, section 9.2).

use std::convert::Infallible;
use std::fmt::Write;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use api::{Event, EventDetails, EventKind};
use hyper::body::{Body, Bytes, Frame};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::log::{Asked, Events, Next, Position};

/// The most events of one piece of the stream. One piece waits for the reader, and one is being made.
const PIECE_EVENTS: usize = 64;

/// How often an idle reader is shown that the daemon is there, and the daemon finds out whether the reader is.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// How long a dropped reader is given to hear of it.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// A reader of events. A follower has a place in the ring for as long as this is there.
#[derive(Debug)]
pub struct EventReader {
    events: Events,
    position: Position,
    asked: Asked,
    changed: watch::Receiver<()>,
}

impl Drop for EventReader {
    fn drop(&mut self) {
        if let Position::Followed(number) = self.position {
            self.events.leave(number);
        }
    }
}

impl EventReader {
    pub(super) fn new(
        events: Events,
        position: Position,
        asked: Asked,
        changed: watch::Receiver<()>,
    ) -> EventReader {
        EventReader {
            events,
            position,
            asked,
            changed,
        }
    }

    /// The stream, which begins with `first`. What makes it is a task that ends with it.
    pub fn stream(self, first: Option<Event>) -> EventStream {
        let (sender, pieces) = mpsc::channel(1);
        tokio::spawn(self.run(sender, first));
        EventStream { pieces }
    }

    async fn run(mut self, pieces: mpsc::Sender<String>, first: Option<Event>) {
        // Something at once, so that a reader sees that it has been heard.
        let mut piece = ": events\n\n".to_owned();
        if let Some(first) = &first {
            write_event(&mut piece, first);
        }
        let mut quiet_since = Instant::now();
        loop {
            if !piece.is_empty() {
                // One taking nothing is cut off by the connection, which ends this.
                if pieces.send(std::mem::take(&mut piece)).await.is_err() {
                    return;
                }
                quiet_since = Instant::now();
            }
            let next = self
                .events
                .next(&mut self.position, &self.asked, PIECE_EVENTS);
            let missed = match next {
                Next::End => return,
                Next::Events(events) => {
                    for event in &events {
                        write_event(&mut piece, &event.to_event());
                    }
                    continue;
                }
                Next::Nothing => {
                    // What happens and is not wanted is silence to this reader.
                    let sign_of_life = sleep_until(quiet_since + SIGN_OF_LIFE);
                    tokio::select! {
                        _ = self.changed.changed() => {}
                        () = sign_of_life => piece.push_str(":\n\n"),
                        () = pieces.closed() => return,
                    }
                    continue;
                }
                Next::Dropped(missed) => missed,
            };
            // Its place is free for another from now on.
            let events = self.events.clone();
            drop(self);
            let mut last = String::new();
            let details = EventDetails {
                count: Some(missed),
                reason: Some("the reader was too slow, and the stream ends: request what is after the last event".to_owned()),
                ..EventDetails::default()
            };
            write_last(&mut last, &events.now(EventKind::ReaderDropped, details));
            // If not taken in time, there is no reader.
            let _ = tokio::time::timeout(LAST_WORDS, pieces.send(last)).await;
            return;
        }
    }
}

fn write_event(text: &mut String, event: &Event) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "id: {}", event.id);
    write_last(text, event);
}

/// An event without a number of its own: the reader's next question is about the one before it.
fn write_last(text: &mut String, event: &Event) {
    // Numbers and strings only, and keys that are strings: it does not fail. There is no line break in JSON's strings.
    let data = serde_json::to_string(event).unwrap_or_default();
    let _ = write!(text, "event: {}\ndata: {data}\n\n", event.kind);
}

/// The bytes of a stream of events.
#[derive(Debug)]
pub struct EventStream {
    pieces: mpsc::Receiver<String>,
}

impl Body for EventStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = ready!(self.pieces.poll_recv(context));
        Poll::Ready(piece.map(|piece| Ok(Frame::data(Bytes::from(piece)))))
    }
}
