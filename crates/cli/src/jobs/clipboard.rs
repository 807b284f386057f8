//! The clipboard of a guest's desktop, and locking its screen.

use wire::agent::job::{Answer, Ask, MAX_CLIPBOARD_LEN};
use wire::agent::{Frame, MAX_DATA_LEN, OPERATION_CHANNEL, Stream};

use super::{Job, unexpected};
use crate::guest::{Agent, GuestError};

/// The text in the clipboard, [`MAX_CLIPBOARD_LEN`] at most.
pub fn get(agent: Agent<'_>) -> Result<Vec<u8>, GuestError> {
    let mut job = Job::ask(agent, Ask::ClipboardGet)?;
    let len = match job.answer()? {
        Answer::Clipboard { len } => len as usize,
        other => return Err(unexpected(&other)),
    };
    let mut text = Vec::new();
    loop {
        match job.connection.next_frame()? {
            Frame::Data {
                stream: Stream::Stdout,
                bytes,
            } if text.len() + bytes.len() <= len => text.extend_from_slice(bytes),
            Frame::EndOfStream(Stream::Stdout) if text.len() == len => return Ok(text),
            other => return Err(unexpected(&other)),
        }
    }
}

/// Put a text into the clipboard.
///
/// # Errors
/// [`GuestError`], also if it is too long.
pub fn set(agent: Agent<'_>, text: &[u8]) -> Result<(), GuestError> {
    let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
    if len > MAX_CLIPBOARD_LEN {
        return Err(GuestError::Request(wire::agent::Invalid::BodyTooLong {
            len: text.len(),
            max: MAX_CLIPBOARD_LEN as usize,
        }));
    }
    let mut frames = Vec::new();
    for bytes in text.chunks(MAX_DATA_LEN) {
        let stream = Stream::Stdin;
        Frame::Data { stream, bytes }.encode(OPERATION_CHANNEL, &mut frames)?;
    }
    let mut job = Job::ask(agent, Ask::ClipboardSet { len })?;
    job.connection.say(&frames)?;
    match job.answer()? {
        Answer::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

/// Lock the screen.
pub fn lock(agent: Agent<'_>) -> Result<(), GuestError> {
    match Job::ask(agent, Ask::Lock)?.answer()? {
        Answer::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}
