//! What can go wrong with a window, and what ends a circuit.

use thiserror::Error;

use crate::spec::{MAX_PAGE_LEN, MAX_RING_LEN, MIN_RING_LEN};

/// Why a window cannot be used.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Error)]
pub enum WindowError {
    #[error(
        "a ring of {found} bytes: expected a power of two from {MIN_RING_LEN} to {MAX_RING_LEN}"
    )]
    RingLen { found: u64 },
    #[error(
        "a window whose pages have {found} bytes: expected a power of two from {least} to {MAX_PAGE_LEN}"
    )]
    PageLen {
        found: u64,
        /// What the file's pages have, or any file's can, in bytes.
        least: u64,
    },
    #[error("generation {found}: expected 1 to 2^56 - 1")]
    Generation { found: u64 },
    #[error(
        "the window needs {needed} bytes from its offset on and its file has {found}: make the file larger, or the rings smaller"
    )]
    FileTooShort { needed: u64, found: u64 },
    #[error(
        "the window begins at {offset} in its file: expected a multiple of {page_len}, the size of its pages"
    )]
    Misaligned { offset: u64, page_len: usize },
    #[error(
        "the window's {field} is {found:#x}, expected {expected:#x}: this is another window, or another life of it"
    )]
    Header {
        field: &'static str,
        found: u64,
        expected: u64,
    },
    #[error("a window must be an ordinary file in memory, or a device: {0}")]
    File(#[from] guestmem::guest::MemoryError),
    #[error("the window could not be mapped: {0}")]
    Map(#[source] std::io::Error),
    #[error("{max} windows and regions are mapped in this process, which is the most: close some")]
    TooManyMappings { max: usize },
}

/// What ends a circuit.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CircuitError {
    #[error("the peer has reset the circuit")]
    Reset,
    #[error("the peer has closed its reading side: what is written now would be lost")]
    ReaderGone,
    #[error("this end of the circuit was closed here before")]
    Closed,
    #[error("the window of the circuit was revoked: connect again")]
    Revoked,
    #[error(
        "the peer's {count} is {found}, expected {least} to {most}: it broke the rules, and the circuit ends"
    )]
    Count {
        count: &'static str,
        found: u64,
        /// The last that is known.
        least: u64,
        /// What it could be by now.
        most: u64,
    },
    #[error(
        "the peer's state is {found:#x}, which does not exist: it broke the rules, and the circuit ends"
    )]
    State { found: u64 },
    #[error("{asked} bytes at once, of which at most {most} can be: {hint}")]
    TooLong {
        /// What was asked for, in bytes.
        asked: usize,
        most: usize,
        hint: &'static str,
    },
}
