//! What can go wrong with a window, and what ends a circuit.

use thiserror::Error;

use crate::spec::{MAX_PAGE_LEN, MAX_RING_LEN, MIN_RING_LEN};

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
    File(#[from] guestmem::guest::MemoryError),
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
    #[error("the peer has closed its reading side: what is written now would be lost")]
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
