//! What frames say, in types.

use std::fmt;

use super::{Header, Kind};

/// The longest reason of a refusal, in bytes.
pub const MAX_REASON_LEN: usize = 256;

/// The length of a hello, in bytes.
const HELLO_LEN: usize = 32;

/// The sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The version of the protocol that the sender speaks.
    pub version: u16,
    /// The sender does not know yet whether the receiver takes it for what it is, and wants a hello back.
    pub wants_answer: bool,
    /// How often the sender found its port connected in this epoch. The first hello with a new number makes the receiver send again what is not acknowledged.
    pub connection: u32,
    /// A random number for this life of the sender, never 0.
    pub epoch: u64,
    /// The epoch of the receiver, as far as the sender knows it; otherwise 0.
    pub peer_epoch: u64,
    /// How many bytes the receiver may send on a channel at first.
    pub window: u32,
}

/// Why a channel is not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RefusalKind {
    /// Nothing is there at this port.
    NobodyListens = 1,
    /// It is not allowed.
    Forbidden = 2,
    /// There are too many already.
    Busy = 3,
    /// The other side of the link is not there.
    NotConnected = 4,
    /// Something else, in words.
    Failed = 5,
}

/// A refusal to open a channel, with a reason for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason for a program.
    pub kind: RefusalKind,
    /// The reason in words: one line, at most [`MAX_REASON_LEN`] bytes.
    pub message: String,
}

impl Refusal {
    /// A refusal with these words, of which only as many are kept as may be sent.
    pub fn new(kind: RefusalKind, message: impl Into<String>) -> Refusal {
        let mut message: String = message.into();
        let mut end = message.len().min(MAX_REASON_LEN);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        let message = message.replace(char::is_control, " ");
        Refusal { kind, message }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

/// Why a channel was reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ResetReason {
    /// What is behind the channel failed, or was taken away.
    Aborted = 1,
    /// The sender of the reset comes to its end.
    Stopped = 2,
}

impl fmt::Display for ResetReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            ResetReason::Aborted => "the other side aborted the connection",
            ResetReason::Stopped => "the other side was stopped",
        })
    }
}

/// What a frame says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// [`Kind::Hello`].
    Hello(Hello),
    /// [`Kind::Acknowledge`].
    Acknowledge,
    /// [`Kind::Probe`].
    Probe,
    /// [`Kind::Answer`].
    Answer,
    /// [`Kind::Resend`].
    Resend,
    /// [`Kind::Open`].
    Open {
        /// The port.
        port: u32,
    },
    /// [`Kind::Opened`].
    Opened,
    /// [`Kind::Refused`].
    Refused(Refusal),
    /// [`Kind::Data`]: the payload, at least one byte, is what it says.
    Data,
    /// [`Kind::End`].
    End,
    /// [`Kind::Stop`].
    Stop,
    /// [`Kind::Reset`].
    Reset(ResetReason),
    /// [`Kind::Credit`].
    Credit {
        /// So many more than before; at least one.
        bytes: u32,
    },
}

/// A frame that is whole and yet makes no sense. Its sender is wrong, not the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the payload of a frame of kind {kind:?} makes no sense ({len} bytes)")]
pub struct MessageError {
    /// The frame's kind.
    pub kind: Kind,
    /// The length of its payload.
    pub len: usize,
}

impl Message {
    /// Reads what a whole frame says.
    pub fn parse(header: &Header, payload: &[u8]) -> Result<Message, MessageError> {
        let error = MessageError {
            kind: header.kind,
            len: payload.len(),
        };
        let message = match header.kind {
            Kind::Hello => Message::Hello(Hello::parse(payload).ok_or(error)?),
            Kind::Open => Message::Open {
                port: double(payload).ok_or(error)?,
            },
            Kind::Credit => Message::Credit {
                bytes: double(payload).filter(|bytes| *bytes > 0).ok_or(error)?,
            },
            Kind::Refused => Message::Refused(Refusal::parse(payload).ok_or(error)?),
            Kind::Reset => match payload {
                [1] => Message::Reset(ResetReason::Aborted),
                [2] => Message::Reset(ResetReason::Stopped),
                _ => return Err(error),
            },
            Kind::Data if !payload.is_empty() => Message::Data,
            Kind::Data => return Err(error),
            _ if !payload.is_empty() => return Err(error),
            Kind::Acknowledge => Message::Acknowledge,
            Kind::Probe => Message::Probe,
            Kind::Answer => Message::Answer,
            Kind::Resend => Message::Resend,
            Kind::Opened => Message::Opened,
            Kind::End => Message::End,
            Kind::Stop => Message::Stop,
        };
        Ok(message)
    }

    /// Its kind, for the header.
    pub fn kind(&self) -> Kind {
        match self {
            Message::Hello(_) => Kind::Hello,
            Message::Acknowledge => Kind::Acknowledge,
            Message::Probe => Kind::Probe,
            Message::Answer => Kind::Answer,
            Message::Resend => Kind::Resend,
            Message::Open { .. } => Kind::Open,
            Message::Opened => Kind::Opened,
            Message::Refused(_) => Kind::Refused,
            Message::Data => Kind::Data,
            Message::End => Kind::End,
            Message::Stop => Kind::Stop,
            Message::Reset(_) => Kind::Reset,
            Message::Credit { .. } => Kind::Credit,
        }
    }

    /// Appends its payload; that of data is the caller's.
    pub fn write_payload(&self, out: &mut Vec<u8>) {
        match self {
            Message::Hello(hello) => hello.write(out),
            Message::Open { port } => out.extend_from_slice(&port.to_le_bytes()),
            Message::Credit { bytes } => out.extend_from_slice(&bytes.to_le_bytes()),
            Message::Refused(refusal) => {
                out.push(refusal.kind as u8);
                out.extend_from_slice(refusal.message.as_bytes());
            }
            Message::Reset(reason) => out.push(*reason as u8),
            _ => {}
        }
    }
}

impl Hello {
    fn parse(payload: &[u8]) -> Option<Hello> {
        let (version, rest) = payload.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (connection, rest) = rest.split_first_chunk()?;
        let (epoch, rest) = rest.split_first_chunk()?;
        let (peer_epoch, rest) = rest.split_first_chunk()?;
        let (window, rest) = rest.split_first_chunk()?;
        // A later version may say more.
        let hello = Hello {
            version: u16::from_le_bytes(*version),
            wants_answer: u16::from_le_bytes(*flags) & 1 == 1,
            connection: u32::from_le_bytes(*connection),
            epoch: u64::from_le_bytes(*epoch),
            peer_epoch: u64::from_le_bytes(*peer_epoch),
            window: u32::from_le_bytes(*window),
        };
        (hello.epoch != 0 && rest.len() >= 4).then_some(hello)
    }

    fn write(&self, out: &mut Vec<u8>) {
        let before = out.len();
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&u16::from(self.wants_answer).to_le_bytes());
        out.extend_from_slice(&self.connection.to_le_bytes());
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.peer_epoch.to_le_bytes());
        out.extend_from_slice(&self.window.to_le_bytes());
        out.resize(before + HELLO_LEN, 0);
    }
}

impl Refusal {
    fn parse(payload: &[u8]) -> Option<Refusal> {
        let (kind, message) = payload.split_first()?;
        let kind = match kind {
            1 => RefusalKind::NobodyListens,
            2 => RefusalKind::Forbidden,
            3 => RefusalKind::Busy,
            4 => RefusalKind::NotConnected,
            5 => RefusalKind::Failed,
            _ => return None,
        };
        if message.len() > MAX_REASON_LEN {
            return None;
        }
        Some(Refusal::new(kind, std::str::from_utf8(message).ok()?))
    }
}

fn double(payload: &[u8]) -> Option<u32> {
    payload.try_into().map(u32::from_le_bytes).ok()
}
