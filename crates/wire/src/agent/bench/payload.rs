//! The payload of a stream, at the end that sends and at the end that receives, without any I/O.

use super::super::{DecodeError, Decoder, Frame, Invalid, OPERATION_CHANNEL};
use super::{Message, Mismatch, Pattern, segment_messages};

/// What a sender sends: messages, with the header of a segment before the first of each.
#[derive(Debug)]
pub struct Messages {
    /// The header, then room for one message.
    buffer: Vec<u8>,
    header_len: usize,
    per_segment: u32,
    left_in_segment: u32,
    pattern: Option<Pattern>,
    bytes: u64,
}

impl Messages {
    /// Messages of this length in bytes. With a seed each has the pattern's next bytes; without, all are alike.
    ///
    /// # Errors
    /// The length is 0 or above [`MAX_MESSAGE_LEN`](super::MAX_MESSAGE_LEN).
    pub fn new(message_len: u32, seed: Option<u64>) -> Result<Messages, Invalid> {
        let per_segment = segment_messages(message_len);
        let len = message_len.saturating_mul(per_segment);
        let mut buffer = Frame::Bench(Message::Segment { len }).to_bytes(OPERATION_CHANNEL)?;
        let header_len = buffer.len();
        buffer.resize(header_len + message_len as usize, 0);
        Pattern::new(0).fill(&mut buffer[header_len..]);
        Ok(Messages {
            buffer,
            header_len,
            per_segment,
            left_in_segment: 0,
            pattern: seed.map(Pattern::new),
            bytes: 0,
        })
    }

    /// Whether everything so far is whole segments: only then may the sender end.
    pub fn is_between_segments(&self) -> bool {
        self.left_in_segment == 0
    }

    /// The next message as it is to be sent, with the header if a segment begins with it.
    pub fn next_message(&mut self) -> &[u8] {
        if let Some(pattern) = &mut self.pattern {
            pattern.fill(&mut self.buffer[self.header_len..]);
        }
        self.bytes += self.message().len() as u64;
        if self.left_in_segment == 0 {
            self.left_in_segment = self.per_segment - 1;
            &self.buffer
        } else {
            self.left_in_segment -= 1;
            self.message()
        }
    }

    /// The last message without a header: what an echo has to be.
    pub fn message(&self) -> &[u8] {
        &self.buffer[self.header_len..]
    }

    /// The payload so far, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What a receiver has received.
#[derive(Debug)]
pub struct Received {
    pattern: Option<Pattern>,
    bytes: u64,
    left_in_segment: usize,
    wrong: Option<Mismatch>,
}

/// What came next.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival<'a> {
    /// Not enough to say: more is to be received.
    Nothing,
    /// Payload, which is counted and checked already.
    Payload(&'a [u8]),
    /// The header of a segment.
    Segment,
    /// A frame that is not about payload; or [`Message::End`], whose sum is right.
    Frame(Frame<'a>),
    /// The sender says that it has sent another sum of bytes than has come.
    WrongSum {
        /// What it says, in bytes.
        said: u64,
    },
}

impl Received {
    /// Nothing yet. With a seed, everything is compared with its pattern.
    pub fn new(seed: Option<u64>) -> Received {
        Received {
            pattern: seed.map(Pattern::new),
            bytes: 0,
            left_in_segment: 0,
            wrong: None,
        }
    }

    /// What is next of that which the decoder has received.
    ///
    /// # Errors
    /// The bytes are not frames.
    pub fn next<'a>(&mut self, decoder: &'a mut Decoder) -> Result<Arrival<'a>, DecodeError> {
        if self.left_in_segment > 0 {
            let payload = decoder.take_raw(self.left_in_segment);
            if payload.is_empty() {
                return Ok(Arrival::Nothing);
            }
            self.left_in_segment -= payload.len();
            self.count(payload);
            return Ok(Arrival::Payload(payload));
        }
        Ok(match decoder.next_frame()? {
            None => Arrival::Nothing,
            Some((_, Frame::Bench(Message::Segment { len }))) => {
                self.left_in_segment = len as usize;
                Arrival::Segment
            }
            Some((_, Frame::Bench(Message::End { bytes }))) if bytes != self.bytes => {
                Arrival::WrongSum { said: bytes }
            }
            Some((_, frame)) => Arrival::Frame(frame),
        })
    }

    /// Counts payload that came without a header, as echoes do.
    pub fn count(&mut self, payload: &[u8]) {
        self.bytes += payload.len() as u64;
        let Some(pattern) = &mut self.pattern else {
            return;
        };
        if let Some(found) = pattern.check(payload) {
            let known = self.wrong.get_or_insert(Mismatch {
                first: found.first,
                count: 0,
            });
            known.count += found.count;
        }
    }

    /// The payload so far, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many bytes were wrong.
    pub fn wrong_bytes(&self) -> u64 {
        self.wrong.map_or(0, |wrong| wrong.count)
    }

    /// Where the first wrong byte was.
    pub fn first_wrong(&self) -> Option<u64> {
        self.wrong.map(|wrong| wrong.first)
    }
}
