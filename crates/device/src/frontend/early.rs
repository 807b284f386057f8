//! Rings that a VMM enables before it has accepted any feature.
//!
//! The protocol says that SET_VRING_ENABLE is for VMMs with which the protocol's features were negotiated. QEMU takes them as negotiated as
//! soon as both sides know of them, and enables the rings of a network card before it says SET_FEATURES. The crate `vhost` waits for
//! SET_FEATURES and ends the connection over this. So such a message is taken from the socket here, before the crate sees it. All
//! others are left to the crate.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, recv};
use vhost::vhost_user::{Error as ProtocolError, Result as ProtocolResult};

/// Numbers of messages.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;

/// A message begins with three numbers of 32 bits: which it is, its flags, and the length of what follows.
const HEADER_LEN: usize = 12;

/// Two numbers of 32 bits: the ring, and 1 or 0.
const BODY_LEN: usize = 8;

/// The protocol's version, in the lowest two flags.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// A message to enable a ring or to hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Enable {
    /// The ring, as the VMM counts.
    pub(super) ring: u32,
    /// Whether it is to run.
    pub(super) enabled: bool,
    /// The VMM waits for an answer.
    need_reply: bool,
}

/// Waits for the beginning of the next message. If it enables a ring, the message is taken and returned; else it stays where it is.
pub(super) fn take(mut stream: &UnixStream) -> ProtocolResult<Option<Enable>> {
    let mut header = [0; HEADER_LEN];
    loop {
        match recv(stream, &mut header, RecvFlags::PEEK | RecvFlags::WAITALL) {
            Ok((_, HEADER_LEN)) => break,
            // The crate says of an end in the middle of a message what it says of others.
            Ok(_) => return Ok(None),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(ProtocolError::SocketError(error.into())),
        }
    }
    let word = |index: usize| number(&header, index);
    if word(0) != SET_VRING_ENABLE {
        return Ok(None);
    }
    let flags = word(1);
    if flags & VERSION_MASK != VERSION || flags & FLAG_REPLY != 0 || word(2) as usize != BODY_LEN {
        return Err(ProtocolError::InvalidMessage);
    }
    let mut message = [0; HEADER_LEN + BODY_LEN];
    stream
        .read_exact(&mut message)
        .map_err(ProtocolError::SocketError)?;
    let enabled = match number(&message, 4) {
        0 => false,
        1 => true,
        _ => return Err(ProtocolError::InvalidParam),
    };
    Ok(Some(Enable {
        ring: number(&message, 3),
        enabled,
        need_reply: flags & FLAG_NEED_REPLY != 0,
    }))
}

impl Enable {
    /// Answers the VMM, if it asked for that.
    ///
    /// # Errors
    /// When the VMM is gone, and what became of it when that was an error.
    pub(super) fn answer(
        self,
        mut stream: &UnixStream,
        done: ProtocolResult<()>,
    ) -> ProtocolResult<()> {
        if self.need_reply {
            let mut reply = Vec::with_capacity(HEADER_LEN + BODY_LEN);
            for word in [SET_VRING_ENABLE, VERSION | FLAG_REPLY, BODY_LEN as u32] {
                reply.extend(word.to_ne_bytes());
            }
            reply.extend(u64::from(done.is_err()).to_ne_bytes());
            stream
                .write_all(&reply)
                .map_err(ProtocolError::SocketError)?;
        }
        done
    }
}

/// The messages by which a VMM says the features of the protocol and of the device, if it has.
pub(super) fn features_again([of_protocol, of_device]: [Option<u64>; 2]) -> Vec<Vec<u8>> {
    let message = |number: u32, body: Option<u64>| {
        let body_len = body.map_or(0, |_| BODY_LEN as u32);
        let header = [number, VERSION, body_len].map(u32::to_ne_bytes);
        let body = body.map(u64::to_ne_bytes);
        header
            .concat()
            .into_iter()
            .chain(body.into_iter().flatten())
            .collect()
    };
    let mut messages = vec![message(GET_FEATURES, None)];
    messages.extend(of_protocol.map(|features| message(SET_PROTOCOL_FEATURES, Some(features))));
    messages.extend(of_device.map(|features| message(SET_FEATURES, Some(features))));
    messages
}

/// The number at this place in a message, which is in the byte order of the machine.
fn number(message: &[u8], index: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&message[4 * index..4 * index + 4]);
    u32::from_ne_bytes(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

    use super::*;

    fn message(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// What is taken of these bytes, and how many of them are left.
    fn taken(words: &[u32]) -> (ProtocolResult<Option<Enable>>, usize) {
        let (mut vmm, ours) = UnixStream::pair().unwrap();
        vmm.write_all(&message(words)).unwrap();
        drop(vmm);
        let taken = take(&ours);
        let mut left = Vec::new();
        (&ours).read_to_end(&mut left).unwrap();
        (taken, left.len())
    }

    #[test]
    fn only_the_message_itself_is_taken() {
        let (enable, left) = taken(&[18, 1, 8, 3, 1, 2, 1, 8]);
        let expected = Enable {
            ring: 3,
            enabled: true,
            need_reply: false,
        };
        assert_eq!(enable.unwrap(), Some(expected));
        assert_eq!(left, 12);
        let (enable, _) = taken(&[18, 1, 8, 0, 0]);
        assert!(!enable.unwrap().unwrap().enabled);
        let (other, left) = taken(&[2, 1, 8, 0, 0]);
        assert_eq!((other.unwrap(), left), (None, 20));
        let (cut, left) = taken(&[18, 1]);
        assert_eq!((cut.unwrap(), left), (None, 8));
    }

    #[test]
    fn what_is_formed_otherwise_is_refused() {
        for words in [
            [18, 2, 8, 0, 1],
            [18, 5, 8, 0, 1],
            [18, 1, 7, 0, 1],
            [18, 1, 9, 0, 1],
            [18, 1, 8, 0, 2],
        ] {
            let (enable, _) = taken(&words);
            enable.unwrap_err();
        }
        // It ends in the middle.
        let (enable, _) = taken(&[18, 1, 8, 0]);
        enable.unwrap_err();
    }

    #[test]
    fn the_vmm_hears_what_became_of_it_if_it_asks() {
        let (mut vmm, ours) = UnixStream::pair().unwrap();
        vmm.write_all(&message(&[18, 1, 8, 0, 1])).unwrap();
        take(&ours).unwrap().unwrap().answer(&ours, Ok(())).unwrap();
        vmm.write_all(&message(&[18, 9, 8, 0, 1])).unwrap();
        take(&ours).unwrap().unwrap().answer(&ours, Ok(())).unwrap();
        vmm.write_all(&message(&[18, 9, 8, 7, 1])).unwrap();
        let refused = Err(ProtocolError::InvalidParam);
        let enable = take(&ours).unwrap().unwrap();
        enable.answer(&ours, refused).unwrap_err();
        drop(ours);
        let mut said = Vec::new();
        vmm.read_to_end(&mut said).unwrap();
        assert_eq!(said, message(&[18, 5, 8, 0, 0, 18, 5, 8, 1, 0]));
    }
}
