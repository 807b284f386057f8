//! What passes while a line is measured: throughput each way, and round trips.
//!
//! # Theory of operation
//!
//! One connection to an agent is one *stream* of a benchmark. On it, [`Message`]s pass as frames, and the payload as
//! plain bytes between them: after a [`Message::Segment`] as many bytes follow as it says, and then the next frame. So
//! a write is as long as the messages that are measured, one header comes for many of them, and the end of the bytes
//! never means "finished": only [`Message::End`], with the sum, does.
//!
//! ```text
//! host, the line measured:                 between guests, host on two lines:
//! host                       agent         host ──── Start(Listen) ────► agent of "db"
//!   Start ───────────────────►             host ◄─── Listening(port) ─── agent of "db"
//!         ◄─────────────────── Ready       host ──── Start(Dial) ──────► agent of "web"
//!   Go ──────────────────────► (if the     agent of "web" ── Join ─────► agent of "db"
//!                              agent sends) host ◄─── Ready, from both
//!   Segment, bytes … End ─────►            host ──── Go ───────────────► the agent that sends
//!         ◄─────────────────── Outcome     Segment, bytes … End, then Outcome, between the agents
//! (or the other way around; Stop is        host ◄─── Progress … Outcome, from both
//!  the host's word to a sender)
//! ```
//!
//! The receiver counts, and what was received counts: the sender's sum has to agree with it, or the run has failed. Of
//! round trips, a segment is a number of messages, each of which is answered before the next is sent.

mod content;
mod payload;

pub use content::{Mismatch, Pattern};
pub use payload::{Arrival, Messages, Received};

use serde::{Deserialize, Serialize};

use super::Invalid;

/// The longest message, in bytes.
pub const MAX_MESSAGE_LEN: u32 = 16 * 1024 * 1024;

/// The longest segment, in bytes.
pub const MAX_SEGMENT_LEN: u32 = MAX_MESSAGE_LEN;

/// The most streams that an agent serves at once.
pub const MAX_STREAMS: usize = 128;

/// The longest run, in milliseconds: an hour.
pub const MAX_DURATION_MS: u32 = 3_600_000;

/// The most memory for messages that an agent sets aside for all its streams together, in bytes.
pub const MAX_BUFFERED: usize = 64 * 1024 * 1024;

/// A segment has as many messages as fit into this, in bytes, …
const SEGMENT_LEN: u32 = 1024 * 1024;

/// … but at least one, and at most so many: a sender heeds [`Message::Stop`] only between segments.
const MAX_SEGMENT_MESSAGES: u32 = 64;

/// How many messages of this length, in bytes, at least 1, a segment has.
pub fn segment_messages(message_len: u32) -> u32 {
    (SEGMENT_LEN / message_len.max(1)).clamp(1, MAX_SEGMENT_MESSAGES)
}

/// What a stream's two ends say to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Host to agent: take this part.
    Start(Start),
    /// Agent to host: it waits for the other guest's agent at this vsock port.
    Listening {
        /// The port.
        port: u32,
    },
    /// Agent to host, and to an agent that has joined: both ends are connected.
    Ready,
    /// Host to an agent that sends: begin.
    Go,
    /// The next so many bytes are payload, 1 to [`MAX_SEGMENT_LEN`].
    Segment {
        /// How many.
        len: u32,
    },
    /// There is no more payload.
    End {
        /// How much there was, in bytes.
        bytes: u64,
    },
    /// Host to an agent that sends: end after this segment.
    Stop,
    /// Agent to host, from time to time, when the payload does not pass the host's program.
    Progress {
        /// What has been received so far, in bytes; of round trips, what has come back.
        bytes: u64,
        /// How many of them were not what they should be.
        wrong_bytes: u64,
    },
    /// The final result of the stream, from its receiver to its sender, and from an agent to the host.
    Outcome(Outcome),
    /// Agent to the agent that listens: it is the one that was promised.
    Join {
        /// The secret that the host gave to both.
        nonce: [u8; 16],
    },
}

/// What an agent is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Its part.
    pub role: Role,
    /// The other part's side.
    pub peer: Peer,
    /// The length of each message, in bytes, 1 to [`MAX_MESSAGE_LEN`].
    pub message_len: u32,
    /// If the content is to be checked: what it is made from.
    pub seed: Option<u64>,
    /// When a sender ends although it gets no `Stop`, in milliseconds, 1 to [`MAX_DURATION_MS`].
    pub limit_ms: u32,
}

/// What one end of a stream does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// It sends.
    Source,
    /// It receives.
    Sink,
    /// It sends a message and waits until it has come back, again and again.
    Ping,
    /// It sends each message back.
    Echo,
}

impl Role {
    /// Whether it begins, and waits for messages to go and to stop.
    pub fn sends(self) -> bool {
        matches!(self, Role::Source | Role::Ping)
    }
}

/// The peer of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Peer {
    /// The host's program, on this connection.
    Host,
    /// The agent of this guest, which will dial.
    Listen {
        /// The guest's context identifier, at least 3.
        cid: u32,
        /// The port to listen at, or 0 for any that is free.
        port: u32,
        /// What the other has to say.
        nonce: [u8; 16],
    },
    /// The agent of this guest, which listens.
    Dial {
        /// The guest's context identifier, at least 3.
        cid: u32,
        /// The port where it listens.
        port: u32,
        /// What to say.
        nonce: [u8; 16],
    },
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// What was received, or sent by the sender, in bytes; of round trips, what came back.
    pub bytes: u64,
    /// From the first byte to the last, by the sayer's clock, in microseconds.
    pub duration_us: u64,
    /// How many bytes were not what they should be; 0 if that was not checked.
    pub wrong_bytes: u64,
    /// Where the first of them was.
    pub first_wrong: Option<u64>,
    /// How long round trips took, of the side that began, if there was one.
    pub latency: Option<Latency>,
}

/// How long round trips took, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Latency {
    /// How many there were.
    pub count: u64,
    /// The shortest.
    pub min_ns: u64,
    /// One of a hundred was shorter.
    pub p1_ns: u64,
    /// The arithmetic mean.
    pub mean_ns: u64,
    /// Half of them were shorter.
    pub p50_ns: u64,
    /// One of a hundred was longer.
    pub p99_ns: u64,
    /// One of a thousand was longer.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// The upper bound of measured round trips, in nanoseconds: two minutes, longer than anything may stall.
pub const MAX_LATENCY_NS: u64 = 120_000_000_000;

/// How exactly the durations of round trips are kept, in significant figures.
pub const LATENCY_FIGURES: u8 = 3;

impl Latency {
    /// Sums durations up, of which there are `count` between `min_ns` and `max_ns`, if there are any. `quantile` may be somewhat beyond what
    /// was measured, as the classes of histograms are.
    pub fn of(
        count: u64,
        min_ns: u64,
        mean_ns: f64,
        max_ns: u64,
        quantile: impl Fn(f64) -> u64,
    ) -> Option<Latency> {
        let at = |share| quantile(share).clamp(min_ns, max_ns);
        (count > 0).then(|| Latency {
            count,
            min_ns,
            p1_ns: at(0.01),
            mean_ns: (mean_ns as u64).clamp(min_ns, max_ns),
            p50_ns: at(0.5),
            p99_ns: at(0.99),
            p999_ns: at(0.999),
            max_ns,
        })
    }
}

/// The lowest context identifier that a guest can have.
const FIRST_GUEST_CID: u32 = 3;

impl Message {
    pub(super) fn check(&self) -> Result<(), Invalid> {
        match self {
            Message::Start(start) => start.check(),
            Message::Segment { len } => {
                check_range("the segment", *len, 1, MAX_SEGMENT_LEN, "1 B to 16 MiB")
            }
            Message::Outcome(outcome) => outcome.check(),
            Message::Listening { port } => {
                check_range("the port", *port, 1, u32::MAX - 1, "1 to 4294967294")
            }
            Message::Ready
            | Message::Go
            | Message::End { .. }
            | Message::Stop
            | Message::Progress { .. }
            | Message::Join { .. } => Ok(()),
        }
    }
}

impl Start {
    fn check(&self) -> Result<(), Invalid> {
        let len = self.message_len;
        check_range("the message", len, 1, MAX_MESSAGE_LEN, "1 B to 16 MiB")?;
        let limit = self.limit_ms;
        check_range("the duration", limit, 1, MAX_DURATION_MS, "1 to 3600000 ms")?;
        match self.peer {
            Peer::Host => Ok(()),
            Peer::Listen { cid, port, .. } => check_address(cid, port, 0),
            Peer::Dial { cid, port, .. } => check_address(cid, port, 1),
        }
    }
}

fn check_address(cid: u32, port: u32, lowest: u32) -> Result<(), Invalid> {
    let ports = "a port number below 4294967295";
    check_range("the port", port, lowest, u32::MAX - 1, ports)?;
    let cids = "3 to 4294967294";
    check_range(
        "the context identifier",
        cid,
        FIRST_GUEST_CID,
        u32::MAX - 1,
        cids,
    )
}

impl Outcome {
    fn check(&self) -> Result<(), Invalid> {
        if self.wrong_bytes > self.bytes || (self.wrong_bytes > 0) != self.first_wrong.is_some() {
            return Err(Invalid::Contradiction("the count of wrong bytes"));
        }
        match &self.latency {
            Some(latency) => latency.check(),
            None => Ok(()),
        }
    }
}

impl Latency {
    fn check(&self) -> Result<(), Invalid> {
        let order = [
            self.min_ns,
            self.p1_ns,
            self.p50_ns,
            self.p99_ns,
            self.p999_ns,
            self.max_ns,
        ];
        let mean_fits = (self.min_ns..=self.max_ns).contains(&self.mean_ns);
        if !order.is_sorted() || !mean_fits || self.count == 0 {
            return Err(Invalid::Contradiction("the row of percentiles"));
        }
        Ok(())
    }
}

fn check_range(
    what: &'static str,
    value: u32,
    lowest: u32,
    highest: u32,
    expected: &'static str,
) -> Result<(), Invalid> {
    if !(lowest..=highest).contains(&value) {
        return Err(Invalid::OutOfRange {
            what,
            value,
            expected,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(super) use tests::any_message;
