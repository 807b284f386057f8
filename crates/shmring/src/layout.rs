//! What stands where in a window. docs/circuit-abi.md says the same for people who write it in another language.

use crate::error::WindowError;
use crate::spec::{MAX_PAGE_LEN, MAX_RING_LEN, MIN_RING_LEN, Side, WindowSpec};

/// What the first eight bytes of a window say: "RINGDCIR", little-endian.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"RINGDCIR");
/// The layout described here. There is no other yet.
pub(super) const VERSION: u32 = 1;

/// Bytes before the rings. They begin at the first page of the window behind it.
pub(super) const HEADER_LEN: usize = 4096;

// The header, in bytes from the window's start. Written before the window is handed out, read once.
pub(super) const HEADER_MAGIC: usize = 0;
pub(super) const HEADER_VERSION_AND_KIND: usize = 8;
pub(super) const HEADER_RING_LEN: usize = 16;
pub(super) const HEADER_DATA_OFFSET: usize = 24;
pub(super) const HEADER_GENERATION: usize = 32;
pub(super) const HEADER_NONCE: usize = 40;

/// Generations share a word with a state of eight bits.
pub(super) const MAX_GENERATION: u64 = (1 << 56) - 1;

/// The words of one ring. Each line has one writer. Lines are two cache lines apart, since processors fetch them in pairs.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingFields {
    /// Written by the producer: how many bytes there ever were.
    pub(super) head: usize,
    /// Written by the producer, on the same line: see [`State`].
    pub(super) producer_state: usize,
    /// Written by the consumer: how many bytes it ever released.
    pub(super) tail: usize,
    /// Written by the consumer, on the same line.
    pub(super) consumer_state: usize,
    /// Written by the producer: the tail at which it wants to be woken. A cache line of its own: as long as no end sleeps, the other side reads it
    /// from its cache.
    pub(super) producer_event: usize,
    /// Written by the consumer: the head at which it wants to be woken.
    pub(super) consumer_event: usize,
}

const FIRST_RING: usize = 1024;
const RING_STRIDE: usize = 1024;
const LINE: usize = 128;

impl RingFields {
    /// Of the ring into which this side writes.
    pub(super) const fn written_by(side: Side) -> RingFields {
        let base = FIRST_RING + side.index() * RING_STRIDE;
        RingFields {
            head: base,
            producer_state: base + 8,
            tail: base + LINE,
            consumer_state: base + LINE + 8,
            producer_event: base + 2 * LINE,
            consumer_event: base + 3 * LINE,
        }
    }
}

/// The state of one end of a ring. In the window it stands beside the generation, so that the state of an earlier life is not taken for the current
/// one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Not attached yet: the word is zero.
    Absent,
    /// In use.
    Open,
    /// The producer has said everything, or the consumer wants no more.
    Finished,
    /// The connection has failed.
    Reset,
}

impl State {
    pub(super) fn word(self, generation: u64) -> u64 {
        let code = match self {
            State::Absent => return 0,
            State::Open => 1,
            State::Finished => 2,
            State::Reset => 3,
        };
        generation << 8 | code
    }

    /// `None` for what no side of this generation writes.
    pub(super) fn parse(word: u64, generation: u64) -> Option<State> {
        [State::Absent, State::Open, State::Finished, State::Reset]
            .into_iter()
            .find(|state| state.word(generation) == word)
    }
}

/// Where the rings of a window lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Of one ring, in bytes: a power of two.
    pub(super) ring_len: usize,
    /// Of the first ring, in bytes from the window's start. The second one follows it.
    pub(super) data_offset: usize,
}

impl Layout {
    pub(super) fn new(spec: &WindowSpec) -> Result<Layout, WindowError> {
        let WindowSpec {
            ring_len, page_len, ..
        } = *spec;
        let fits = ring_len.is_power_of_two() && (MIN_RING_LEN..=MAX_RING_LEN).contains(&ring_len);
        if !fits {
            return Err(WindowError::RingLen { found: ring_len });
        }
        let least = HEADER_LEN as u64;
        if !page_len.is_power_of_two() || !(least..=MAX_PAGE_LEN).contains(&page_len) {
            return Err(WindowError::PageLen {
                found: page_len,
                least,
            });
        }
        Ok(Layout {
            ring_len: ring_len as usize,
            // The header has no more than the least page.
            data_offset: page_len as usize,
        })
    }

    /// Header and both rings, in bytes.
    pub(super) fn window_len(self) -> usize {
        self.data_offset + 2 * self.ring_len
    }
}
