//! Frames on their way to the host.
//!
//! One buffer of fixed size. Output of the command is read straight into it behind its header, and only while a part
//! of the buffer stays free for the small frames, which therefore always fit.

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use wire::agent::{
    ErrorKind, ErrorReport, Frame, HEADER_LEN, MAX_DATA_LEN, OPERATION_CHANNEL, Stream, data_header,
};

/// Kept free of data for everything else, in bytes. Between two data frames the agent has to send at most four grants of
/// standard input (each is a quarter of its window), three ends of streams, and one final frame, of which an error is the
/// longest with little over 1 KiB.
const CONTROL_RESERVE: usize = 4096;

/// Room for three full frames of data, and the reserve.
const CAPACITY: usize = 3 * (HEADER_LEN + MAX_DATA_LEN) + CONTROL_RESERVE;

#[derive(Debug)]
pub(crate) struct Outgoing {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Outgoing {
    pub(crate) fn new() -> Outgoing {
        Outgoing {
            buffer: vec![0; CAPACITY].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Whether a full frame of data fits.
    pub(crate) fn has_room_for_data(&self) -> bool {
        CAPACITY - (self.end - self.start) >= HEADER_LEN + MAX_DATA_LEN + CONTROL_RESERVE
    }

    /// Add a frame other than data.
    ///
    /// # Errors
    /// The frame exceeds a limit of the protocol, or the reserve is used up: both are faults of the agent.
    pub(crate) fn push(&mut self, channel: u16, frame: &Frame<'_>) -> Result<(), ErrorReport> {
        let internal = |message: String| ErrorReport::new(ErrorKind::Internal, message);
        let bytes = frame
            .to_bytes(channel)
            .map_err(|error| internal(error.to_string()))?;
        self.make_room(bytes.len());
        let Some(space) = self.buffer[self.end..].get_mut(..bytes.len()) else {
            return Err(internal("the agent's outgoing buffer is full".to_owned()));
        };
        space.copy_from_slice(&bytes);
        self.end += bytes.len();
        Ok(())
    }

    /// Read up to `limit` bytes of a stream and add them as one frame: how many (0 at the end of the stream). Call it
    /// only when there is room for data, with a limit of at least 1.
    pub(crate) fn read_data(
        &mut self,
        stream: Stream,
        source: impl AsFd,
        limit: usize,
    ) -> Result<usize, Errno> {
        let limit = limit.min(MAX_DATA_LEN);
        self.make_room(HEADER_LEN + limit);
        let body = self.end + HEADER_LEN;
        let count = rustix::io::read(source, &mut self.buffer[body..body + limit])?;
        if let Ok(header) = data_header(stream, OPERATION_CHANNEL, count) {
            self.buffer[self.end..body].copy_from_slice(&header);
            self.end = body + count;
        }
        Ok(count)
    }

    /// Send what the socket takes now.
    ///
    /// # Errors
    /// The host is gone.
    pub(crate) fn send(&mut self, socket: impl AsFd) -> io::Result<()> {
        while self.start < self.end {
            let bytes = &self.buffer[self.start..self.end];
            match rustix::net::send(&socket, bytes, rustix::net::SendFlags::NOSIGNAL) {
                Ok(count) => self.start += count,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        (self.start, self.end) = (0, 0);
        Ok(())
    }

    /// Move what is there to the front if `len` bytes do not fit behind it.
    fn make_room(&mut self, len: usize) {
        if self.end + len > CAPACITY {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
    }
}
