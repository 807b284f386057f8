//! What can go wrong.

use std::io;

use shmring::{CircuitError, Kind, WindowError};
use thiserror::Error;
use wire::switchboard::Place;
use wire::switchboard::program::{ErrorCode, SOCKET_VARIABLE};

/// Why something with a circuit failed.
#[derive(Debug, Error)]
pub enum Error {
    /// The circuit is over, or was asked for more than it can.
    #[error(transparent)]
    Circuit(#[from] CircuitError),
    /// Its window cannot be used.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// The peer's process has ended, or has closed the wake channel, without a word.
    #[error("the peer has gone without closing the circuit: what it has not sent is lost")]
    PeerGone,
    /// There is nothing to read, or no room to write.
    #[error(
        "nothing can be done now: wait until the circuit's descriptor is readable, and try again"
    )]
    WouldBlock,
    /// Nothing came for as long as one wanted to wait.
    #[error("nothing happened for {waited_ms} ms")]
    TimedOut {
        /// In milliseconds.
        waited_ms: u128,
    },
    /// Bytes where there are records, or the other way round.
    #[error("this circuit carries {found}, expected {expected}: use the functions for these")]
    Kind {
        /// What it carries.
        found: &'static str,
        /// What was asked for.
        expected: &'static str,
    },
    /// The peer's record is impossible.
    #[error(
        "the peer's record says {found:#x} of itself, with {available} bytes there: it broke the rules, and the circuit ends"
    )]
    Record {
        /// Its header.
        found: u64,
        /// How many bytes there are, the header included.
        available: usize,
    },
    /// What came where a circuit was to be handed over is none.
    #[error("expected the offer of a circuit, found {found}: is this the right socket?")]
    Offer {
        /// In words.
        found: String,
    },
    /// There is nothing of the name that was called.
    #[error("{found:?} is no place to call: expected {}", Place::EXPECTED)]
    Target {
        /// What was asked for.
        found: String,
    },
    /// The switchboard does not answer.
    #[error(
        "no switchboard answers at {tried}: {source}. In a guest it is ringdown-agent, on the host `ringdown serve`; {SOCKET_VARIABLE} names another socket"
    )]
    NoSwitchboard {
        /// Where it was looked for.
        tried: String,
        /// Why the last of them did not do.
        source: io::Error,
    },
    /// The switchboard gives no circuit.
    #[error("no circuit: {text} ({code})")]
    NotGiven {
        /// Why.
        code: ErrorCode,
        /// The same in words.
        text: String,
    },
    /// The switchboard said what it may not.
    #[error("the switchboard said {found}: is it of another version?")]
    Switchboard {
        /// In words.
        found: String,
    },
    /// The system said so.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<rustix::io::Errno> for Error {
    fn from(error: rustix::io::Errno) -> Error {
        Error::Io(error.into())
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::Circuit(CircuitError::ReaderGone | CircuitError::Closed) => {
                io::ErrorKind::BrokenPipe
            }
            Error::Circuit(CircuitError::Reset | CircuitError::Revoked) | Error::PeerGone => {
                io::ErrorKind::ConnectionReset
            }
            Error::Circuit(CircuitError::TooLong { .. }) | Error::Kind { .. } => {
                io::ErrorKind::InvalidInput
            }
            Error::WouldBlock => io::ErrorKind::WouldBlock,
            Error::TimedOut { .. } => io::ErrorKind::TimedOut,
            Error::Target { .. } => io::ErrorKind::InvalidInput,
            Error::NoSwitchboard { source, .. } => source.kind(),
            Error::NotGiven { code, .. } => match code {
                ErrorCode::Refused => io::ErrorKind::ConnectionRefused,
                ErrorCode::Denied => io::ErrorKind::PermissionDenied,
                ErrorCode::Unknown => io::ErrorKind::AddrNotAvailable,
                ErrorCode::Busy => io::ErrorKind::ResourceBusy,
                ErrorCode::Invalid => io::ErrorKind::InvalidInput,
                ErrorCode::Unreachable => io::ErrorKind::HostUnreachable,
            },
            Error::Circuit(_)
            | Error::Window(_)
            | Error::Record { .. }
            | Error::Offer { .. }
            | Error::Switchboard { .. } => io::ErrorKind::InvalidData,
            Error::Io(_) => {
                let Error::Io(error) = error else {
                    unreachable!("it was just found to be one")
                };
                return error;
            }
        };
        io::Error::new(kind, error)
    }
}

/// That a circuit is of the kind that was asked for.
pub(crate) fn expect_kind(found: Kind, expected: Kind) -> Result<(), Error> {
    let word = |kind| match kind {
        Kind::Bytes => "a stream of bytes",
        Kind::Records => "records",
    };
    match found == expected {
        true => Ok(()),
        false => Err(Error::Kind {
            found: word(found),
            expected: word(expected),
        }),
    }
}
