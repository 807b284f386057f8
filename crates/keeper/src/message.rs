//! Messages between daemon and keeper.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use sys::descriptors::{self, MAX_DESCRIPTORS};

/// The longest message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;

/// How long the other side may take to answer, or to make room for a message.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Kind and length of the key.
const HEADER_BYTES: usize = 3;

/// What a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Attach,
    Put,
    Drop,
    Release,
    End,
    Busy,
}

const KINDS: [(Kind, u8); 6] = [
    (Kind::Attach, b'A'),
    (Kind::Put, b'P'),
    (Kind::Drop, b'D'),
    (Kind::Release, b'R'),
    (Kind::End, b'E'),
    (Kind::Busy, b'B'),
];

/// A message that came.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Not all descriptors that were sent arrived.
    pub(crate) is_cut: bool,
}

/// Sends one message, whole or not at all.
pub(crate) fn send(
    socket: impl AsFd,
    kind: Kind,
    key: &[u8],
    value: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let key_len = u16::try_from(key.len()).map_err(|_| Errno::MSGSIZE)?;
    let code = KINDS.iter().find(|(known, _)| *known == kind);
    let mut bytes = vec![code.map_or(0, |(_, code)| *code)];
    bytes.extend(key_len.to_le_bytes());
    bytes.extend(key);
    bytes.extend(value);
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(Errno::MSGSIZE);
    }
    loop {
        match descriptors::send(&socket, &bytes, descriptors, flags) {
            Err(Errno::INTR) => {}
            sent => return sent.map(|_| ()),
        }
    }
}

/// Receives one message; none at the end of the connection.
///
/// # Errors
/// `EBADMSG` for what is no message; otherwise what the system says.
pub(crate) fn receive(socket: impl AsFd, flags: RecvFlags) -> Result<Option<Message>, Errno> {
    let mut bytes = vec![0; MAX_MESSAGE_BYTES + 1];
    let mut descriptors = Vec::new();
    let received = loop {
        match descriptors::receive(
            &socket,
            &mut bytes,
            &mut descriptors,
            MAX_DESCRIPTORS,
            flags,
        ) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    if received.len == 0 {
        return Ok(None);
    }
    bytes.truncate(received.len);
    let message = parse(&bytes).ok_or(Errno::BADMSG)?;
    Ok(Some(Message {
        descriptors,
        is_cut: received.truncated,
        ..message
    }))
}

fn parse(bytes: &[u8]) -> Option<Message> {
    if bytes.len() > MAX_MESSAGE_BYTES {
        return None;
    }
    let (header, rest) = bytes.split_at_checked(HEADER_BYTES)?;
    let (kind, _) = KINDS.iter().find(|(_, code)| *code == header[0])?;
    let key_len = usize::from(u16::from_le_bytes([header[1], header[2]]));
    let (key, value) = rest.split_at_checked(key_len)?;
    Some(Message {
        kind: *kind,
        key: key.to_vec(),
        value: value.to_vec(),
        descriptors: Vec::new(),
        is_cut: false,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

    use super::*;

    #[test]
    fn what_is_no_message_is_refused() {
        for bad in [&b""[..], b"P", b"P\0", b"X\0\0", b"P\x02\0a"] {
            assert!(parse(bad).is_none(), "{bad:?}");
        }
        let mut long = vec![b'P', 1, 0, b'k'];
        long.resize(MAX_MESSAGE_BYTES, 7);
        let message = parse(&long).unwrap();
        assert_eq!((message.kind, message.key), (Kind::Put, b"k".to_vec()));
        long.push(7);
        assert!(parse(&long).is_none());
    }
}
