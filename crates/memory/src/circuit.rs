//! The rings of a zero-copy circuit: one window of shared memory for each connection, and two byte rings in it, one each way.
//!
//! # Theory of operation
//!
//! Whoever makes a window writes its header and hands the file to two parties. Each maps it with [`Window::attach`] and takes its two ends by
//! [`Window::split`]: a [`Producer`] of one ring, a [`Consumer`] of the other.
//!
//! A ring has two running counts of bytes, *head* (produced) and *tail* (released), each written by one end only. The bytes between them belong
//! to the consumer, the others to the producer. A count is published with release and read with acquire, so whoever sees the count
//! sees the bytes.
//!
//! **Sleeping.** An end that finds nothing to do may look again, or sleep. Before it sleeps it says at which count of the other end it wants to be woken
//! (its *event*, as in virtio's event index), and looks once more behind a full fence. The other end publishes its count and reads the event, with a full
//! fence in between. So one of the two sees the other: either the sleeper finds the new count, or the publisher finds the event and answers
//! `true`, which means "wake the other side now". How it is woken is no business of this module. While nobody sleeps, the event's cache line does not
//! change, and reading it costs nothing.
//!
//! **Ends.** Beside its count each end has a state: open, finished (no more bytes come, or no more are wanted: a half-close), or reset. Finished is
//! written after the last count, and looked at before it: whoever sees it, and then finds no byte, has seen all. Who changes its state wakes
//! the other side, whatever that has asked for.
//!
//! # Who trusts what
//!
//! The other party can write anywhere in the window at any time. So an end keeps its own count privately and never reads it back; it reads the other's
//! once, and checks it: it may not go back, nor be further on than there were bytes or is room. Anything else is an error that ends the connection.
//! Nothing that the peer writes is used as an address or a length without that check. The bytes themselves can change even after they were
//! published: they are copied out before they are judged, and no reference to them is ever made; [`Span`] says what there is instead.
//! A peer can lie about its event and cause wake-ups that nobody needs, one for each publication, and on its own circuit only.
//!
//! When the pages of a window are taken away (its device was unbound, its file truncated), [`fault`](crate::fault) puts empty memory in their place, and
//! what is published or released after fails with [`CircuitError::Revoked`].
//!
//! # Limits
//!
//! A ring has [`MIN_RING_LEN`] to [`MAX_RING_LEN`] bytes. Counts have 64 bits and would wrap after some thirty years at 20 GB/s; nothing goes wrong then.
//!
//! # Rings that never end
//!
//! The rings' pages are mapped twice in a row, so that a span that goes over a ring's end goes on in the second mapping: every span is contiguous. Where pages
//! are larger than the ring that cannot be, and spans have two pieces there.

use thiserror::Error;

#[cfg(all(feature = "driver", not(loom)))]
pub mod bare;
#[cfg_attr(loom, allow(dead_code))] // A modelled window has no header.
mod layout;
mod ring;
#[cfg_attr(loom, path = "circuit/span/modelled.rs")]
mod span;
#[cfg_attr(loom, path = "circuit/window/modelled.rs")]
mod window;

#[cfg(test)]
#[cfg(loom)]
mod interleavings;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use ring::{Consumer, Peeked, Producer, Reservation};
pub use span::Span;
pub use window::Window;

/// The least that a ring may have, in bytes.
pub const MIN_RING_LEN: u64 = 4096;

/// The most that a ring may have, in bytes.
pub const MAX_RING_LEN: u64 = 1 << 30;

/// The most that a page of a window may have, in bytes.
pub const MAX_PAGE_LEN: u64 = 1 << 30;

/// Which of the two parties of a window one is. Who makes the window says who is which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one that writes into the first ring.
    First,
    /// The one that writes into the second ring.
    Second,
}

impl Side {
    /// The peer's.
    pub const fn other(self) -> Side {
        match self {
            Side::First => Side::Second,
            Side::Second => Side::First,
        }
    }

    const fn index(self) -> usize {
        match self {
            Side::First => 0,
            Side::Second => 1,
        }
    }
}

/// What the bytes in the rings are. Both sides have to agree, so the window says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A stream: there are no boundaries.
    Bytes,
    /// Messages, each with its length before it.
    Records,
}

impl Kind {
    #[cfg_attr(loom, allow(dead_code))] // A modelled window has no header.
    const fn code(self) -> u32 {
        match self {
            Kind::Bytes => 0,
            Kind::Records => 1,
        }
    }
}

/// Which life of which window this is. Whoever hands out a window tells both parties, on another way than through the window: so neither takes an
/// old window, or another's, for its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Counts the lives of a window, from 1. Below 2^56.
    pub generation: u64,
    /// Random.
    pub nonce: [u8; 16],
}

/// What a window is like: what its header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowSpec {
    /// Which one it is.
    pub identity: Identity,
    /// What is in its rings.
    pub kind: Kind,
    /// Length of each ring in bytes: a power of two from [`MIN_RING_LEN`] to [`MAX_RING_LEN`].
    pub ring_len: u64,
    /// Length of the window's pages in bytes: a power of two up to [`MAX_PAGE_LEN`], and no less than what either party's pages have, be they of memory or of
    /// a device. The rings begin at the first page behind the header. [`system_page_len`] does between two programs of one machine.
    pub page_len: u64,
}

/// The length of ordinary pages in bytes.
pub fn system_page_len() -> u64 {
    // SAFETY: no memory is involved.
    let len = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // There are no systems without; none has smaller ones than the header is long.
    u64::try_from(len).unwrap_or(layout::HEADER_LEN as u64)
}

/// Why a window cannot be used.
#[derive(Debug, Error)]
pub enum WindowError {
    /// No such length.
    #[error(
        "a ring of {found} bytes: expected a power of two from {MIN_RING_LEN} to {MAX_RING_LEN}"
    )]
    RingLen {
        /// In bytes.
        found: u64,
    },
    /// No such pages, or smaller ones than those of its file.
    #[error(
        "a window whose pages have {found} bytes: expected a power of two from {least} to {MAX_PAGE_LEN}"
    )]
    PageLen {
        /// In bytes.
        found: u64,
        /// What the file's pages have, or any file's can, in bytes.
        least: u64,
    },
    /// No such generation.
    #[error("generation {found}: expected 1 to 2^56 - 1")]
    Generation {
        /// What was asked for.
        found: u64,
    },
    /// The file ends before the window does.
    #[error(
        "the window needs {needed} bytes from its offset on and its file has {found}: make the file larger, or the rings smaller"
    )]
    FileTooShort {
        /// In bytes.
        needed: u64,
        /// In bytes.
        found: u64,
    },
    /// The window does not begin at a page of the file.
    #[error(
        "the window begins at {offset} in its file: expected a multiple of {page_len}, the size of its pages"
    )]
    Misaligned {
        /// In bytes.
        offset: u64,
        /// In bytes.
        page_len: usize,
    },
    /// The header says something else than what was agreed upon.
    #[error(
        "the window's {field} is {found:#x}, expected {expected:#x}: this is another window, or another life of it"
    )]
    Header {
        /// Which of its fields.
        field: &'static str,
        /// What is there.
        found: u64,
        /// What was agreed upon.
        expected: u64,
    },
    /// It is no file that can be mapped safely.
    #[error("a window must be an ordinary file in memory, or a device: {0}")]
    File(#[from] crate::guest::MemoryError),
    /// It could not be mapped.
    #[error("the window could not be mapped: {0}")]
    Map(#[source] std::io::Error),
    /// Too many are mapped.
    #[error("{max} windows and regions are mapped in this process, which is the most: close some")]
    TooManyMappings {
        /// The limit.
        max: usize,
    },
}

/// What ends a circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CircuitError {
    /// The peer gave the connection up.
    #[error("the peer has reset the circuit")]
    Reset,
    /// The peer reads no more.
    #[error("the peer has closed its reading side: what is written now would reach nobody")]
    ReaderGone,
    /// This end was closed here.
    #[error("this end of the circuit was closed here before")]
    Closed,
    /// The window was taken away, or lives another life.
    #[error("the window of the circuit was revoked: connect again")]
    Revoked,
    /// The peer's count is impossible.
    #[error(
        "the peer's {count} is {found}, expected {least} to {most}: it broke the rules, and the circuit ends"
    )]
    Count {
        /// Which: "head" or "tail".
        count: &'static str,
        /// What it wrote.
        found: u64,
        /// The last that is known.
        least: u64,
        /// What it could be by now.
        most: u64,
    },
    /// The peer's state is impossible.
    #[error(
        "the peer's state is {found:#x}, which does not exist: it broke the rules, and the circuit ends"
    )]
    State {
        /// What it wrote.
        found: u64,
    },
    /// More than there can be at once.
    #[error("{asked} bytes at once, of which at most {most} can be: {hint}")]
    TooLong {
        /// What was asked for, in bytes.
        asked: usize,
        /// The most, in bytes.
        most: usize,
        /// What to do.
        hint: &'static str,
    },
}
