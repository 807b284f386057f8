//! From a stream of bytes to frames, however the bytes are cut.

use super::body::BodyError;
use super::{Frame, HEADER_LEN, Invalid, Kind, MAX_DATA_LEN};

/// Why the bytes of the other side are not frames. Nothing that follows can be trusted: the stream is to be closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// No frame has this kind.
    #[error("a frame has the unknown kind {0}")]
    UnknownKind(u8),
    /// The header's second byte is not zero.
    #[error("a frame's header has {0} where zero is expected")]
    Reserved(u8),
    /// The header announces more bytes than its kind allows.
    #[error("a frame of kind {kind} announces {len} bytes where at most {max} are allowed")]
    TooLong {
        /// The number of its kind.
        kind: u8,
        /// The announced length in bytes.
        len: u32,
        /// The limit in bytes.
        max: usize,
    },
    /// The body does not have the form of its kind.
    #[error("the body of a frame of kind {0} is malformed")]
    Malformed(u8),
    /// The body exceeds a limit or has a value that means nothing.
    #[error("a frame is refused: {0}")]
    Invalid(#[from] Invalid),
}

/// What the buffer holds at first, in bytes: a full frame of data, and the beginning of the next.
const INITIAL_CAPACITY: usize = 2 * (HEADER_LEN + MAX_DATA_LEN);

/// An incremental decoder with a buffer of its own: let the bytes of the stream be read into [`Decoder::space`], say
/// how many there were with [`Decoder::advance`], then take frames with [`Decoder::next_frame`] until there is none.
///
/// The buffer grows only when a header announces a frame that does not fit, to that frame's size; so never beyond
/// [`HEADER_LEN`] + [`MAX_EXEC_START_LEN`](super::MAX_EXEC_START_LEN).
///
/// ```
/// use wire::agent::{Decoder, Frame, OPERATION_CHANNEL};
///
/// let bytes = Frame::Signal(15).to_bytes(OPERATION_CHANNEL)?;
/// let mut decoder = Decoder::new();
/// decoder.space()[..bytes.len()].copy_from_slice(&bytes);
/// decoder.advance(bytes.len());
/// assert_eq!(decoder.next_frame(), Ok(Some((OPERATION_CHANNEL, Frame::Signal(15)))));
/// assert_eq!(decoder.next_frame(), Ok(None));
/// # Ok::<(), wire::agent::Invalid>(())
/// ```
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// The first byte that belongs to no frame taken yet.
    start: usize,
    /// Behind the last byte that was received.
    end: usize,
    /// What was wrong; it stays wrong.
    failed: Option<DecodeError>,
}

impl Default for Decoder {
    fn default() -> Decoder {
        Decoder::new()
    }
}

impl Decoder {
    /// A decoder that has received nothing.
    pub fn new() -> Decoder {
        Decoder {
            buffer: vec![0; INITIAL_CAPACITY],
            start: 0,
            end: 0,
            failed: None,
        }
    }

    /// Room for received bytes; never empty once [`Decoder::next_frame`] has returned none.
    pub fn space(&mut self) -> &mut [u8] {
        &mut self.buffer[self.end..]
    }

    /// The first `received` bytes of [`Decoder::space`] were received.
    ///
    /// # Panics
    /// `received` is more than the length of that space.
    pub fn advance(&mut self, received: usize) {
        assert!(
            received <= self.buffer.len() - self.end,
            "more bytes were received than there was room for"
        );
        self.end += received;
    }

    /// Whether bytes were received that belong to no complete frame: the stream must not end here.
    pub fn is_inside_frame(&self) -> bool {
        self.start < self.end
    }

    /// Whether [`Decoder::next_frame`] has a frame or an error to give. If not, there is room for more bytes.
    pub fn has_frame(&mut self) -> bool {
        if self.failed.is_some() {
            return true;
        }
        let frame_len = match self.header() {
            Ok(Some((_, _, len))) => HEADER_LEN + len,
            Ok(None) => HEADER_LEN,
            Err(_) => return true,
        };
        let is_complete = self.end - self.start >= frame_len;
        if !is_complete {
            self.make_room(frame_len);
        }
        is_complete
    }

    /// The next complete frame and its channel, if it has arrived.
    ///
    /// # Errors
    /// The bytes are not a frame. Each later call gives the same error.
    pub fn next_frame(&mut self) -> Result<Option<(u16, Frame<'_>)>, DecodeError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if !self.has_frame() {
            return Ok(None);
        }
        let (kind, channel, len) = match self.header() {
            Ok(Some(header)) => header,
            Ok(None) => return Ok(None),
            Err(error) => {
                self.failed = Some(error.clone());
                return Err(error);
            }
        };
        let body_start = self.start + HEADER_LEN;
        self.start = body_start + len;
        let body = &self.buffer[body_start..body_start + len];
        match Frame::decode_body(kind, body) {
            Ok(frame) => Ok(Some((channel, frame))),
            Err(error) => {
                let error = match error {
                    BodyError::Malformed => DecodeError::Malformed(kind as u8),
                    BodyError::Invalid(invalid) => DecodeError::Invalid(invalid),
                };
                self.failed = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Up to `limit` received bytes that belong to no frame, because the last frame said that such bytes follow it. None
    /// if none are there; then there is room for more.
    pub fn take_raw(&mut self, limit: usize) -> &[u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        let from = self.start;
        self.start += limit.min(self.end - from);
        &self.buffer[from..self.start]
    }

    fn header(&self) -> Result<Option<(Kind, u16, usize)>, DecodeError> {
        let received = &self.buffer[self.start..self.end];
        let Some((&[kind, reserved, channel_low, channel_high, a, b, c, d], _)) =
            received.split_first_chunk()
        else {
            return Ok(None);
        };
        let kind = Kind::from_wire(kind).ok_or(DecodeError::UnknownKind(kind))?;
        if reserved != 0 {
            return Err(DecodeError::Reserved(reserved));
        }
        let len = u32::from_le_bytes([a, b, c, d]);
        let max = kind.max_body_len();
        if len as usize > max {
            return Err(DecodeError::TooLong {
                kind: kind as u8,
                len,
                max,
            });
        }
        Ok(Some((
            kind,
            u16::from_le_bytes([channel_low, channel_high]),
            len as usize,
        )))
    }

    /// Let a frame of `frame_len` bytes that begins at `start` fit into the buffer, with at least one byte to spare.
    fn make_room(&mut self, frame_len: usize) {
        let received = self.end - self.start;
        if received == 0 {
            (self.start, self.end) = (0, 0);
        }
        // Move what is there to the front only when the frame would not fit behind it: once per buffer, not per frame.
        if self.start + frame_len > self.buffer.len() || self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, received);
        }
        if frame_len > self.buffer.len() {
            self.buffer.resize(frame_len, 0);
        }
    }
}
