//! Connections carried between programs of the host and programs of the guest.
//!
//! # Theory of operation
//!
//! *Towards the guest*, each connection asks for itself, and becomes the connection:
//!
//! ```text
//! host                                agent
//!   Dial(where) ──────────────────►   connects
//!         ◄────────────────────────── Connected               (or Error: nothing is connected)
//!   Data, EndOfStream ◄───────────► Data, EndOfStream
//! ```
//!
//! *Towards the host*, one connection stands for the place where the agent listens, for as long as it is open, and each caller gets
//! one of its own:
//!
//! ```text
//!   Listen(where) ────────────────►   listens
//!         ◄────────────────────────── Listening(where, key)
//!         ◄────────────────────────── Caller(number)          for each that comes
//!   Leave(number) ────────────────►                           if its peer cannot be reached
//!
//!   Take(key, number) ────────────►                           on another connection
//!         ◄────────────────────────── Connected
//!   Data, EndOfStream ◄───────────► Data, EndOfStream
//! ```
//!
//! Behind [`Message::Connected`] the bytes of the two programs pass as [`Stdin`](super::Stream::Stdin) towards the guest and
//! [`Stdout`](super::Stream::Stdout) towards the host, each direction with an end of its own. There is no credit: the connection's own holds the
//! sender back. A connection that ends before both ends were said was cut, and so are those of the programs.

mod place;

use serde::{Deserialize, Serialize};

use super::Invalid;
pub use place::{Place, split_places};

/// The longest name of a host, in bytes: what the DNS has.
pub const MAX_HOST_LEN: usize = 255;

/// The longest path of a UNIX socket, in bytes (Linux's `sun_path` with its final zero has 108).
pub const MAX_PATH_LEN: usize = 107;

/// The longest body of these frames, in bytes.
pub const MAX_LEN: usize = 300;

/// The most connections that one agent carries at a time.
pub const MAX_CONNECTIONS: usize = 256;

/// The most callers of one place that wait to be taken.
pub const MAX_WAITING: usize = 64;

/// Names the listener for as long as the agent keeps it: unpredictable.
pub type Key = [u8; 16];

/// A message of forwarding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Host to agent: connect there.
    Dial(Place),
    /// Host to agent: listen there.
    Listen(Place),
    /// Agent to host: it listens, and where.
    Listening {
        /// With the port that was chosen.
        place: Place,
        /// What [`Message::Take`] is to say.
        key: Key,
    },
    /// Agent to host: a caller has connected, and waits.
    Caller {
        /// Which one: counted from 0.
        number: u32,
    },
    /// Host to agent: this caller is not taken, and is to be reset.
    Leave {
        /// Which one.
        number: u32,
    },
    /// Host to agent, on a connection of its own: carry this caller's bytes here.
    Take {
        /// Of which listener.
        key: Key,
        /// Which one.
        number: u32,
    },
    /// Agent to host: from here on the bytes of the two programs pass.
    Connected,
}

impl Message {
    pub(super) fn check(&self) -> Result<(), Invalid> {
        match self {
            Message::Dial(place) => place.check(false),
            Message::Listen(place) => place.check(true),
            Message::Listening { place, .. } => place.check(false),
            Message::Caller { .. }
            | Message::Leave { .. }
            | Message::Take { .. }
            | Message::Connected => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::{Decoder, Frame, OPERATION_CHANNEL};

    fn tcp(host: &str, port: u16) -> Place {
        let host = host.to_owned();
        Place::Tcp { host, port }
    }

    fn unix(path: &str) -> Place {
        let path = path.as_bytes().to_vec();
        Place::Unix { path }
    }

    fn encode(message: Message) -> Result<Vec<u8>, Invalid> {
        Frame::Forward(message).to_bytes(OPERATION_CHANNEL)
    }

    #[test]
    fn messages_survive_the_wire_up_to_their_limits() {
        let longest = format!("/{}", "p".repeat(MAX_PATH_LEN - 1));
        let key = [7; 16];
        let messages = [
            Message::Dial(tcp("localhost", 80)),
            Message::Dial(tcp(&"h".repeat(MAX_HOST_LEN), u16::MAX)),
            Message::Listen(tcp("::", 0)),
            Message::Listening {
                place: unix(&longest),
                key,
            },
            Message::Caller { number: u32::MAX },
            Message::Leave { number: 0 },
            Message::Take { key, number: 3 },
            Message::Connected,
        ];
        for message in messages {
            let bytes = encode(message.clone()).unwrap();
            let mut decoder = Decoder::new();
            decoder.space()[..bytes.len()].copy_from_slice(&bytes);
            decoder.advance(bytes.len());
            let expected = Ok(Some((OPERATION_CHANNEL, Frame::Forward(message))));
            assert_eq!(decoder.next_frame(), expected);
        }
    }

    #[test]
    fn what_means_nothing_is_refused() {
        let wrong = [
            Message::Dial(tcp("", 80)),
            Message::Dial(tcp("localhost", 0)),
            Message::Dial(tcp(&"h".repeat(MAX_HOST_LEN + 1), 80)),
            Message::Dial(tcp("local\0host", 80)),
            Message::Dial(unix("relative")),
            Message::Dial(unix("")),
            Message::Listen(unix(&format!("/{}", "p".repeat(MAX_PATH_LEN)))),
            Message::Listening {
                place: tcp("localhost", 0),
                key: [0; 16],
            },
        ];
        for message in wrong {
            assert!(encode(message.clone()).is_err(), "{message:?}");
        }
    }
}
