//! What a window is like, and its users.

/// The least that a ring may have, in bytes.
pub const MIN_RING_LEN: u64 = 4096;

/// The most that a ring may have, in bytes.
pub const MAX_RING_LEN: u64 = 1 << 30;

/// The most that a page of a window may have, in bytes.
pub const MAX_PAGE_LEN: u64 = 1 << 30;

/// Which of the two parties of a window one is. The maker of the window says which.
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

    pub(crate) const fn index(self) -> usize {
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
    pub(crate) const fn code(self) -> u32 {
        match self {
            Kind::Bytes => 0,
            Kind::Records => 1,
        }
    }
}

/// Which life of which window this is. The maker of the window gives it to both parties outside of the window, so that neither takes an old or
/// another window for its own.
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
    rustix::param::page_size() as u64
}
