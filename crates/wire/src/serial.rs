//! The frames of the serial link: many channels over one port that loses bytes.
//!
//! A virtio-serial port is a stream that is cut wherever one of its ends closes, opens or restarts: frames end in the middle, and what follows
//! belongs to other frames, or to another life of the sender. So each frame can be found in any stream (a magic number and a checksum of its
//! header), and is taken only whole (a checksum of its payload). What the frames are for is in `docs/serial.md` and in the `serial` crate; here is
//! how they look.
//!
//! ```text
//!  0  magic          F5 'R' 'D' 'L'
//!  4  kind           1 byte, see [`Kind`]
//!  5  flags          1 byte: 1 = the sender of this frame opened the channel; others are 0
//!  6  payload length 2 bytes, at most MAX_PAYLOAD_LEN
//!  8  session        4 bytes, see [`session`]; 0 in a hello
//! 12  channel        4 bytes; 0 in frames that belong to none
//! 16  sequence       8 bytes: the frame's number if it is a numbered one; the token of a probe and its answer; 0 otherwise
//! 24  acknowledged   8 bytes: the number of the frame that the sender expects next
//! 32  payload CRC    4 bytes, CRC32C
//! 36  header CRC     4 bytes, CRC32C of the 36 bytes before
//! 40  payload
//! ```
//!
//! All numbers are little-endian. The first byte occurs in no text, so that text is skipped quickly.

mod decoder;
mod message;

pub use decoder::{Decoder, Discarded, MAX_BUFFER_LEN};
pub use message::{
    Hello, MAX_REASON_LEN, Message, MessageError, Refusal, RefusalKind, ResetReason,
};

/// The version of the link's protocol.
pub const VERSION: u16 = 1;

/// The length of a frame's header, in bytes.
pub const HEADER_LEN: usize = 40;

/// The longest frame, in bytes: the most that a guest's driver takes in one write.
pub const MAX_FRAME_LEN: usize = 32 * 1024;

/// The longest payload, in bytes.
pub const MAX_PAYLOAD_LEN: usize = MAX_FRAME_LEN - HEADER_LEN;

/// What each frame begins with.
pub const MAGIC: [u8; 4] = [0xf5, b'R', b'D', b'L'];

/// The port's name in the guest.
pub const PORT_NAME: &str = "org.ringdown.agent.0";

/// The flag of a frame whose channel was opened by the frame's sender.
const OPENED_BY_SENDER: u8 = 1;

/// The length of what the header's checksum covers.
const CHECKED_LEN: usize = HEADER_LEN - 4;

/// What a frame is. Those from 16 on are numbered: they are acknowledged, and sent again until they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The sender, and what it expects next.
    Hello = 1,
    /// Nothing but the number of the frame that is expected next.
    Acknowledge = 2,
    /// A question for that number: what was sent before the question and is not acknowledged by its answer was lost.
    Probe = 3,
    /// The answer to a probe.
    Answer = 4,
    /// A frame is missing: everything from the acknowledged number on is to be sent again.
    Resend = 5,
    /// A new channel to a port.
    Open = 16,
    /// The channel is open.
    Opened = 17,
    /// The channel is not opened.
    Refused = 18,
    /// Bytes of a channel.
    Data = 19,
    /// There will be no more bytes from the sender of this frame.
    End = 20,
    /// The sender of this frame takes no more bytes.
    Stop = 21,
    /// The channel is over, in both directions, and not because all was said.
    Reset = 22,
    /// More bytes may be sent.
    Credit = 23,
}

impl Kind {
    /// The kind with this number.
    pub fn from_wire(number: u8) -> Option<Kind> {
        Some(match number {
            1 => Kind::Hello,
            2 => Kind::Acknowledge,
            3 => Kind::Probe,
            4 => Kind::Answer,
            5 => Kind::Resend,
            16 => Kind::Open,
            17 => Kind::Opened,
            18 => Kind::Refused,
            19 => Kind::Data,
            20 => Kind::End,
            21 => Kind::Stop,
            22 => Kind::Reset,
            23 => Kind::Credit,
            _ => return None,
        })
    }

    /// Whether frames of this kind are numbered, and belong to a channel.
    pub fn is_numbered(self) -> bool {
        self as u8 >= Kind::Open as u8
    }
}

/// A channel as the sender of a frame names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Channel {
    /// Whether the frame's sender opened it.
    pub opened_by_sender: bool,
    /// Its number among those that the same side opened, from 0 on; never used twice in a session.
    pub number: u32,
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the frame is.
    pub kind: Kind,
    /// Which channel it belongs to, if it belongs to one.
    pub channel: Channel,
    /// The bytes of its payload.
    pub payload_len: usize,
    /// The session it belongs to.
    pub session: u32,
    /// Its number, or a token.
    pub sequence: u64,
    /// What its sender expects next.
    pub acknowledged: u64,
    /// The checksum of its payload.
    pub payload_crc: u32,
}

impl Header {
    /// As it is sent. The payload is no longer than [`MAX_PAYLOAD_LEN`]; this is the caller's to see to.
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        debug_assert!(self.payload_len <= MAX_PAYLOAD_LEN);
        let mut bytes = [0; HEADER_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = if self.channel.opened_by_sender {
            OPENED_BY_SENDER
        } else {
            0
        };
        bytes[6..8].copy_from_slice(&(self.payload_len as u16).to_le_bytes());
        bytes[8..12].copy_from_slice(&self.session.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.channel.number.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.acknowledged.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc = checksum(&bytes[..CHECKED_LEN]);
        bytes[CHECKED_LEN..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header; nothing if these bytes are none.
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Option<Header> {
        let double = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let quad = |at: usize| u64::from(double(at)) | u64::from(double(at + 4)) << 32;
        if bytes[..4] != MAGIC || double(CHECKED_LEN) != checksum(&bytes[..CHECKED_LEN]) {
            return None;
        }
        let payload_len = usize::from(u16::from_le_bytes([bytes[6], bytes[7]]));
        if payload_len > MAX_PAYLOAD_LEN || bytes[5] > OPENED_BY_SENDER {
            return None;
        }
        Some(Header {
            kind: Kind::from_wire(bytes[4])?,
            channel: Channel {
                opened_by_sender: bytes[5] == OPENED_BY_SENDER,
                number: double(12),
            },
            payload_len,
            session: double(8),
            sequence: quad(16),
            acknowledged: quad(24),
            payload_crc: double(32),
        })
    }
}

/// CRC32C (Castagnoli).
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// What a frame of this sender to this receiver says it belongs to: the checksum of both epochs. Bytes that a channel carries can look like
/// frames, and may be taken for such after a loss; but their sender does not know the epochs.
pub fn session(sender_epoch: u64, receiver_epoch: u64) -> u32 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sender_epoch.to_le_bytes());
    bytes[8..].copy_from_slice(&receiver_epoch.to_le_bytes());
    checksum(&bytes)
}

#[cfg(test)]
mod tests;
