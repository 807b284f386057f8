//! Zero-copy circuits for applications: one connection, with a ring in shared memory each way.
//!
//! What is written is written where the peer reads it. A circuit has a [`Writer`] and a [`Reader`], which can go to threads of their own:
//!
//! ```
//! use std::io::{Read, Write};
//! use circuit::{Circuit, Options};
//!
//! let (mut here, there) = Circuit::pair(&Options::default())?;
//! let answering = std::thread::spawn(move || -> std::io::Result<()> {
//!     let (mut writer, mut reader) = there.into_split();
//!     let mut question = String::new();
//!     reader.read_to_string(&mut question)?;
//!     writer.write_all(question.to_uppercase().as_bytes())
//! });
//! here.writer().write_all(b"hello")?;
//! here.writer().finish()?;
//! let mut answer = String::new();
//! here.reader().read_to_string(&mut answer)?;
//! assert_eq!(answer, "HELLO");
//! # answering.join().unwrap()?;
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # Programs in guests and on their host
//!
//! [`connect`] and [`listen`] ask the *switchboard* of this machine: in a guest its agent, on the host the daemon. It applies the operator's policy,
//! as to any call, and gives both sides a window if there is one for the two machines. Without one the circuit goes through a stream: the same
//! functions do the same, with copies; see [`Circuit::is_zero_copy`].
//!
//! ```no_run
//! use std::io::{Read, Write};
//!
//! // In the guest `db`:
//! let mut listener = circuit::listen(5432)?;
//! let (mut writer, mut reader) = listener.accept()?.into_split();
//! let mut question = Vec::new();
//! reader.read_to_end(&mut question)?;
//! writer.write_all(&question)?;
//!
//! // In the guest `web`, or on the host:
//! let mut circuit = circuit::connect("db:5432")?;
//! circuit.writer().write_all(b"hello")?;
//! circuit.writer().finish()?;
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Three things are different without a window. An end looks the same as the death of the peer, unless that was in the middle of a record. A reset
//! may look like an end. And `commit` waits until the system has taken the bytes, if it may wait.
//!
//! # How much is copied
//!
//! | with | copies |
//! | --- | --- |
//! | [`Writer::reserve`] and [`Reader::peek`], filled and read chunk by chunk or through pointers | none |
//! | [`Write`](std::io::Write) and [`Reader::peek`], or [`Writer::reserve`] and [`Read`](std::io::Read) | one |
//! | [`Write`](std::io::Write) and [`Read`](std::io::Read); [`Writer::send`] and [`Reader::receive`] | two |
//!
//! Without a window each of them has two more, and those of the system and the machine between the two sides.
//!
//! # Waiting
//!
//! An idle end busy-polls for a while, as long as that has paid lately, and then sleeps on the *wake channel*: a stream socket that both sides hold.
//! One byte there means "check the rings", and nothing else; its end means that the peer is gone. [`Options::spin`] limits the busy polling. A
//! program with an event loop of its own uses the `try_` functions, `arm`, and the descriptor ([`AsFd`](std::os::fd::AsFd)).
//!
//! # Ends
//!
//! [`Writer::finish`], or dropping it, is a half-close: the peer reads what is there and then the end. After a reader is dropped, the peer's next
//! write fails with "broken pipe". A process that dies does neither, and so its peer gets [`Error::PeerGone`], never an end that was not sent. So
//! does the peer of a writer that is dropped once its circuit is over.
//!
//! The peer is not trusted: see [`shmring`] for what is checked, and docs/circuit-abi.md for what each boundary protects.

mod channel;
mod connect;
mod error;
mod line;
mod reader;
mod setup;
mod spin;
mod stream;
mod switchboard;
mod writer;

#[cfg(feature = "tokio")]
pub mod asynchronous;

pub use connect::{Connector, Listener, connect, listen};
pub use error::Error;
pub use reader::Reader;
pub use setup::{Circuit, Options};
pub use shmring::{
    CircuitError, Identity, Kind, MAX_RING_LEN, MIN_RING_LEN, Side, Span, Window, WindowError,
    WindowSpec, system_page_len,
};
pub use wire::switchboard::Place;
pub use wire::switchboard::program::ErrorCode;
pub use writer::{Room, Writer};

/// The result of whatever is done with a circuit.
pub type Result<T> = std::result::Result<T, Error>;

/// Before each record stands its length, in as many bytes.
const RECORD_HEADER_LEN: usize = 8;

/// What a record takes up in the ring: its header, itself, and what it takes to the next multiple of eight. `None` for more than can be counted.
fn record_room(len: usize) -> Option<usize> {
    u32::try_from(len).ok()?;
    RECORD_HEADER_LEN
        .checked_add(len)?
        .checked_next_multiple_of(RECORD_HEADER_LEN)
}

#[cfg(test)]
mod tests {
    use super::record_room;

    #[test]
    fn records_are_padded_to_eight_bytes() {
        for (len, room) in [(0, 8), (1, 16), (8, 16), (9, 24), (4088, 4096)] {
            assert_eq!(record_room(len), Some(room));
        }
        assert_eq!(record_room(u32::MAX as usize + 1), None);
        assert_eq!(record_room(usize::MAX), None);
    }
}
