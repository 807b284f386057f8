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
//!   Leave(number) ────────────────►                           if nobody can be reached for it
//!
//!   Take(key, number) ────────────►                           on another connection
//!         ◄────────────────────────── Connected
//!   Data, EndOfStream ◄───────────► Data, EndOfStream
//! ```
//!
//! Behind [`Message::Connected`] the bytes of the two programs pass as [`Stdin`](super::Stream::Stdin) towards the guest and
//! [`Stdout`](super::Stream::Stdout) towards the host, each direction with an end of its own. There is no credit: the connection's own holds the
//! sender back. A connection that ends before both ends were said was cut, and so are those of the programs.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Invalid;
use super::body::{check_len, check_no_zero};

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

/// Where programs of the guest listen, or are to find the host's.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Place {
    /// A TCP port.
    Tcp {
        /// A name or an address as the guest knows it. To listen: one of its own addresses.
        host: String,
        /// The port. To listen, 0 stands for any that is free.
        port: u16,
    },
    /// A UNIX stream socket, by its path.
    Unix {
        /// The path, absolute.
        path: Vec<u8>,
    },
}

/// As people write it. What a guest says is to be shown without control characters.
impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Tcp { host, port } if host.contains(':') => write!(formatter, "[{host}]:{port}"),
            Place::Tcp { host, port } => write!(formatter, "{host}:{port}"),
            Place::Unix { path } => write!(formatter, "{}", String::from_utf8_lossy(path)),
        }
    }
}

/// What listens, for as long as the agent keeps it: nobody else can guess it.
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
    /// Agent to host: somebody has connected, and waits.
    Caller {
        /// Which one: counted from 0.
        number: u32,
    },
    /// Host to agent: nobody takes this caller, who is to be reset.
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

impl Place {
    fn check(&self, any_port: bool) -> Result<(), Invalid> {
        match self {
            Place::Tcp { host, port } => {
                if host.is_empty() {
                    return Err(Invalid::Empty("the name of a host"));
                }
                if *port == 0 && !any_port {
                    return Err(Invalid::OutOfRange {
                        what: "the port",
                        value: 0,
                        expected: "1 to 65535",
                    });
                }
                check_len("the name of a host", host.as_bytes(), MAX_HOST_LEN)?;
                check_no_zero("the name of a host", host.as_bytes())
            }
            Place::Unix { path } => {
                if path.first() != Some(&b'/') {
                    return Err(Invalid::Relative("the path of a socket"));
                }
                check_len("the path of a socket", path, MAX_PATH_LEN)?;
                check_no_zero("the path of a socket", path)
            }
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
    fn places_are_written_as_people_do() {
        assert_eq!(tcp("web", 80).to_string(), "web:80");
        assert_eq!(tcp("::1", 80).to_string(), "[::1]:80");
        assert_eq!(unix("/run/db").to_string(), "/run/db");
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
