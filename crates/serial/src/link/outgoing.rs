//! Numbered frames, from when they are made until they are acknowledged.

use std::collections::VecDeque;

use wire::serial::{Channel, HEADER_LEN, Header, Kind, MAX_FRAME_LEN, MAX_PAYLOAD_LEN, checksum};

/// How many bytes of channels are kept to be sent again, at most; one frame may go beyond it.
pub const MAX_REPLAY_LEN: usize = 1024 * 1024;

/// How many bytes are fetched from channels before the port takes them, at most; one frame may go beyond it.
pub const MAX_UNSENT_LEN: usize = 64 * 1024;

/// How many frames are kept at most. A peer that waits for more answers than that does not acknowledge what it asks for.
pub const MAX_FRAMES: usize = 8192;

/// How many frames of data may be among them: the others are for what channels need beside data.
const MAX_DATA_FRAMES: usize = 4096;

/// Payloads from this length on are kept in the buffer that they were read into, shorter ones in one of their own.
const KEPT_IN_PLACE: usize = 16 * 1024;

/// Buffers that are kept for the next payloads.
const SPARE_BUFFERS: usize = 4;

/// A numbered frame.
#[derive(Debug)]
pub(super) struct Frame {
    kind: Kind,
    channel: Channel,
    /// The payload, in a buffer that may be longer.
    buffer: Vec<u8>,
    len: usize,
    crc: u32,
}

impl Frame {
    pub(super) fn new(kind: Kind, channel: Channel, payload: Vec<u8>) -> Frame {
        Frame {
            kind,
            channel,
            len: payload.len(),
            crc: checksum(&payload),
            buffer: payload,
        }
    }
}

/// What was probed for.
#[derive(Debug, Clone, Copy)]
struct Probe {
    token: u64,
    /// The number behind the last frame that was sent before the probe.
    sent: u64,
}

/// All frames that are not acknowledged.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    frames: VecDeque<Frame>,
    /// The number of the first of them.
    first: u64,
    /// The number of the frame that is sent next.
    next: u64,
    /// The number behind the last frame that was ever sent.
    furthest: u64,
    /// The memory of all of them, and of those that are not sent yet.
    kept_len: usize,
    unsent_len: usize,
    probe: Option<Probe>,
    last_token: u64,
    scratch: Vec<u8>,
    spare: Vec<Vec<u8>>,
    /// Frames that were sent again.
    pub(super) replayed: u64,
}

impl Outgoing {
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Whether frames were sent that are not acknowledged.
    pub(super) fn has_sent(&self) -> bool {
        self.next > self.first
    }

    pub(super) fn wants_data(&self) -> bool {
        self.kept_len < MAX_REPLAY_LEN
            && self.unsent_len < MAX_UNSENT_LEN
            && self.frames.len() < MAX_DATA_FRAMES
    }

    /// Adds a frame of data, as long as `fill` makes it; none if that is nothing.
    pub(super) fn push_data<E>(
        &mut self,
        channel: Channel,
        limit: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<usize, E> {
        if self.scratch.is_empty() {
            let spare = self.spare.pop();
            self.scratch = spare.unwrap_or_else(|| vec![0; MAX_PAYLOAD_LEN]);
        }
        let len = fill(&mut self.scratch[..limit.min(MAX_PAYLOAD_LEN)])?;
        if len == 0 {
            return Ok(0);
        }
        let buffer = match len >= KEPT_IN_PLACE {
            true => std::mem::take(&mut self.scratch),
            false => self.scratch[..len].to_vec(),
        };
        self.push(Frame {
            kind: Kind::Data,
            channel,
            crc: checksum(&buffer[..len]),
            buffer,
            len,
        });
        Ok(len)
    }

    pub(super) fn push(&mut self, frame: Frame) {
        self.kept_len += frame.buffer.len();
        self.unsent_len += frame.len;
        self.frames.push_back(frame);
    }

    /// Appends frames to what is written next, as far as there is room: whether there were any.
    pub(super) fn stage(
        &mut self,
        mut room: usize,
        session: u32,
        acknowledged: u64,
        out: &mut Vec<u8>,
    ) -> bool {
        let before = out.len();
        while let Some(frame) = self.frames.get((self.next - self.first) as usize) {
            let frame_len = HEADER_LEN + frame.len;
            // The longest frame only fits if nothing else is written with it.
            if frame_len > room {
                break;
            }
            let header = Header {
                kind: frame.kind,
                channel: frame.channel,
                payload_len: frame.len,
                session,
                sequence: self.next,
                acknowledged,
                payload_crc: frame.crc,
            };
            out.extend_from_slice(&header.to_bytes());
            out.extend_from_slice(&frame.buffer[..frame.len]);
            room -= frame_len;
            self.unsent_len -= frame.len;
            self.replayed += u64::from(self.next < self.furthest);
            self.next += 1;
            self.furthest = self.furthest.max(self.next);
        }
        debug_assert!(out.len() <= MAX_FRAME_LEN);
        out.len() != before
    }

    /// The peer expects this number next: whether that is news. Nothing if it cannot.
    pub(super) fn acknowledge(&mut self, expected: u64) -> Option<bool> {
        if expected > self.furthest {
            return None;
        }
        let is_news = expected > self.first;
        while self.first < expected {
            // Only frames that were sent can be acknowledged, and these are kept until they are.
            let frame = self.frames.pop_front()?;
            self.kept_len -= frame.buffer.len();
            if self.first >= self.next {
                // It was to be sent again, and arrived the first time.
                self.unsent_len -= frame.len;
                self.next += 1;
            }
            if frame.buffer.len() == MAX_PAYLOAD_LEN && self.spare.len() < SPARE_BUFFERS {
                self.spare.push(frame.buffer);
            }
            self.first += 1;
        }
        Some(is_news)
    }

    /// Everything that is not acknowledged is to be sent again.
    pub(super) fn rewind(&mut self) {
        let sent = (self.next - self.first) as usize;
        self.unsent_len += self
            .frames
            .iter()
            .take(sent)
            .map(|frame| frame.len)
            .sum::<usize>();
        self.next = self.first;
        self.probe = None;
    }

    /// The token of a probe for everything that was sent by now.
    pub(super) fn probe(&mut self) -> u64 {
        self.last_token += 1;
        self.probe = Some(Probe {
            token: self.last_token,
            sent: self.next,
        });
        self.last_token
    }

    /// The answer to a probe, after what it acknowledges: whether something was lost, which is then to be sent again.
    pub(super) fn answered(&mut self, token: u64) -> bool {
        match self.probe.take_if(|probe| probe.token == token) {
            Some(probe) if self.first < probe.sent => {
                self.rewind();
                true
            }
            _ => false,
        }
    }

    /// Forgets all frames, and counts from zero.
    pub(super) fn clear(&mut self) {
        *self = Outgoing {
            scratch: std::mem::take(&mut self.scratch),
            spare: std::mem::take(&mut self.spare),
            replayed: self.replayed,
            last_token: self.last_token,
            ..Outgoing::default()
        };
    }
}
