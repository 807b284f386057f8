//! Messages of vhost-user, right or wrong, byte by byte.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::SendFlags;

/// Numbers of requests (vhost-user, "Front-end message types").
pub mod request {
    #![allow(missing_docs)] // The names are the specification's.
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// Header flags of an ordinary message: version 1.
pub const VERSION: u32 = 1;
/// Header flag: an answer is wanted.
pub const NEED_REPLY: u32 = 1 << 3;

/// How long the device may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Length of a message's header, in bytes.
const HEADER_LEN: usize = 12;

/// A bare connection to a vhost-user socket.
#[derive(Debug)]
pub struct RawVmm {
    stream: UnixStream,
}

impl RawVmm {
    /// Connects.
    pub fn connect(path: &Path) -> io::Result<RawVmm> {
        let stream = UnixStream::connect(path)?;
        RawVmm::from_stream(stream)
    }

    /// Takes over a connection on which something may have been said already.
    pub fn from_stream(stream: UnixStream) -> io::Result<RawVmm> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(RawVmm { stream })
    }

    /// The socket.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a message with a true length.
    pub fn send(&self, request: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_header(request, VERSION, payload.len() as u32, payload, files)
    }

    /// Sends a message whose header says anything.
    pub fn send_header(
        &self,
        request: u32,
        flags: u32,
        len: u32,
        payload: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_LEN + payload.len());
        for word in [request, flags, len] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
        self.send_bytes(&bytes, files)
    }

    /// Sends bytes that need be no message at all.
    pub fn send_bytes(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let sent = sys::descriptors::send(&self.stream, bytes, files, SendFlags::empty())?;
        match sent == bytes.len() {
            true => Ok(()),
            false => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Reads one answer: its request, flags and payload.
    ///
    /// # Errors
    /// When the device is gone, or says nothing in time.
    pub fn receive(&self) -> io::Result<(u32, u32, Vec<u8>)> {
        let mut header = [0; HEADER_LEN];
        (&self.stream).read_exact(&mut header)?;
        let word = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let mut payload = vec![0; word(8) as usize];
        (&self.stream).read_exact(&mut payload)?;
        Ok((word(0), word(4), payload))
    }

    /// Waits until the device has hung up. Whatever it says before is thrown away.
    pub fn wait_for_hang_up(&self) -> io::Result<()> {
        let mut bytes = [0; 256];
        loop {
            match (&self.stream).read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for RawVmm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
