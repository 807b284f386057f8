//! Finding frames in a stream that may be cut anywhere.

use std::ops::Range;

use super::{HEADER_LEN, Header, Kind, MAGIC, MAX_FRAME_LEN, checksum};

/// The most that a decoder keeps, in bytes: one frame, and room to receive more without moving it each time.
pub const MAX_BUFFER_LEN: usize = 2 * MAX_FRAME_LEN;

/// How many bytes of damaged payloads may be searched again for each byte that was received. A stream made of headers whose
/// payloads overlap would cost its receiver a thousand times its length otherwise.
const SEARCHES_PER_BYTE: usize = 4;

/// What was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Discarded {
    /// Bytes that belong to no frame.
    pub bytes: u64,
    /// Frames whose payload was damaged, or that were cut.
    pub frames: u64,
}

/// Takes bytes in any pieces, and gives the frames that are whole among them.
///
/// Nothing that it receives is an error: what is no frame is skipped, and counted. When a payload is damaged the search goes on right behind the start of its
/// header, because a frame that was cut is followed by frames that are whole, and these would be inside its payload.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// The header at `start`, once it was found, whose payload is awaited.
    found: Option<Header>,
    /// Where the payload of the last whole frame is.
    payload: Range<usize>,
    /// Bytes of damaged payloads that may be searched again.
    searches: usize,
    discarded: Discarded,
}

impl Default for Decoder {
    fn default() -> Decoder {
        Decoder::new()
    }
}

impl Decoder {
    /// Nothing received.
    pub fn new() -> Decoder {
        Decoder {
            buffer: vec![0; MAX_BUFFER_LEN],
            start: 0,
            end: 0,
            found: None,
            payload: 0..0,
            searches: 0,
            discarded: Discarded::default(),
        }
    }

    /// The payload of the frame that was given last, until bytes are received.
    pub fn payload(&self) -> &[u8] {
        &self.buffer[self.payload.clone()]
    }

    /// Where to receive to; never empty once [`Decoder::next_frame`] has given all frames.
    pub fn space(&mut self) -> &mut [u8] {
        self.payload = 0..0;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        // What is kept is less than a frame, so half of the buffer is free again after it was moved.
        if self.buffer.len() - self.end < MAX_FRAME_LEN / 2 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.buffer[self.end..]
    }

    /// So many bytes were received.
    ///
    /// # Panics
    /// More than there was space for.
    pub fn advance(&mut self, count: usize) {
        assert!(
            count <= self.buffer.len() - self.end,
            "the caller received more than there was space for"
        );
        self.end += count;
        self.searches = (self.searches + count * SEARCHES_PER_BYTE).min(2 * MAX_BUFFER_LEN);
    }

    /// The header of the next frame that is whole. [`Decoder::payload`] has the rest.
    pub fn next_frame(&mut self) -> Option<Header> {
        loop {
            let header = match self.found {
                Some(header) => header,
                None => self.find_header()?,
            };
            let frame_len = HEADER_LEN + header.payload_len;
            if self.end - self.start < frame_len {
                self.found = Some(header);
                return None;
            }
            self.found = None;
            let payload = self.start + HEADER_LEN..self.start + frame_len;
            if checksum(&self.buffer[payload.clone()]) == header.payload_crc {
                self.start += frame_len;
                self.payload = payload;
                return Some(header);
            }
            self.discarded.frames += 1;
            if self.searches >= header.payload_len {
                self.searches -= header.payload_len;
                self.skip(1);
            } else {
                self.skip(frame_len);
            }
        }
    }

    /// Forget what was received of a frame that is not whole: the stream begins anew.
    pub fn restart(&mut self) {
        self.discarded.bytes += (self.end - self.start) as u64;
        self.discarded.frames += u64::from(self.found.is_some());
        (self.start, self.end, self.found) = (0, 0, None);
    }

    /// Whether the beginning of a frame was received, and not the rest.
    pub fn is_inside_frame(&self) -> bool {
        self.start != self.end
    }

    /// The frame that was begun may never be finished: gives it up if a frame of the link's own, which its sender repeats while it waits for an answer, is
    /// whole behind its header. Otherwise the frame is still waited for, as its sender may only be slow.
    ///
    /// Returns whether there are frames to take.
    pub fn give_up_if_overtaken(&mut self) -> bool {
        if self.found.is_none() || !self.is_overtaken() {
            return false;
        }
        self.found = None;
        self.discarded.frames += 1;
        self.skip(1);
        true
    }

    /// What was skipped so far.
    pub fn discarded(&self) -> Discarded {
        self.discarded
    }

    fn is_overtaken(&self) -> bool {
        let bytes = &self.buffer[self.start..self.end];
        let candidates = (HEADER_LEN..bytes.len()).filter(|at| bytes[*at] == MAGIC[0]);
        for at in candidates {
            let Some(header) = bytes[at..].first_chunk().and_then(Header::from_bytes) else {
                continue;
            };
            let payload = bytes[at + HEADER_LEN..].get(..header.payload_len);
            // These are short, so that a search costs little.
            let is_own = matches!(header.kind, Kind::Hello | Kind::Probe | Kind::Resend);
            if is_own && payload.is_some_and(|payload| checksum(payload) == header.payload_crc) {
                return true;
            }
        }
        false
    }

    /// Skips what cannot be a frame, up to a header, if there is one.
    fn find_header(&mut self) -> Option<Header> {
        loop {
            let bytes = &self.buffer[self.start..self.end];
            let garbage = bytes.iter().position(|byte| *byte == MAGIC[0]);
            let garbage = garbage.unwrap_or(bytes.len());
            self.skip(garbage);
            let bytes = &self.buffer[self.start..self.end];
            let Some(candidate) = bytes.first_chunk::<HEADER_LEN>() else {
                // A few bytes that may become a header; or that cannot, and then the search goes on.
                let len = bytes.len().min(MAGIC.len());
                if bytes[..len] == MAGIC[..len] {
                    return None;
                }
                self.skip(1);
                continue;
            };
            match Header::from_bytes(candidate) {
                Some(header) => return Some(header),
                None => self.skip(1),
            }
        }
    }

    fn skip(&mut self, count: usize) {
        self.start += count;
        self.discarded.bytes += count as u64;
    }
}
