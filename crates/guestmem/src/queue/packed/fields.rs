//! Fields of a packed ring and their values (virtio 1.2, section 2.8).

use std::fmt;

/// In the second word of a descriptor: the identifier, above 32 bits of length.
pub const IDENTIFIER_SHIFT: u32 = 32;
/// In the second word of a descriptor: the flags.
pub const FLAGS_SHIFT: u32 = 48;
/// In the second word of a descriptor: the driver's wrap counter, if the descriptor is available.
pub const AVAILABLE: u64 = 1 << (FLAGS_SHIFT + 7);
/// In the second word of a descriptor: the device's wrap counter, if the descriptor is used.
pub const USED: u64 = 1 << (FLAGS_SHIFT + 15);

/// Size of an event suppression structure (2.8.14), in bytes.
pub const EVENT_LEN: usize = 4;
/// In such a structure: what is wanted, above 15 bits of index and one of a wrap counter.
pub const EVENT_FLAGS_SHIFT: u32 = 16;
/// Which bits of the flags mean anything.
pub const EVENT_FLAGS: u32 = 3;
/// In such flags: after each chain.
pub const EVENT_ALWAYS: u32 = 0;
/// In such flags: not at all.
pub const EVENT_NEVER: u32 = 1;
/// In such flags: after the chain at the index.
pub const EVENT_AT: u32 = 2;

/// A place in the ring, with the wrap counter that is valid there: an index, and the counter in bit 31.
///
/// One word, for a reason: narrow fields that stand side by side may be loaded as one, and such a load waits for the store of
/// one of them to reach the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Position(u32);

const WRAP: u32 = 1 << 31;

impl Position {
    /// A place by its parts.
    pub fn new(index: u16, wrap: bool) -> Position {
        Position(u32::from(index) | if wrap { WRAP } else { 0 })
    }

    /// As 16 bits say it.
    pub fn from_bits(bits: u16) -> Position {
        Position::new(bits & 0x7fff, bits & 0x8000 != 0)
    }

    /// In 16 bits, the wrap counter above the index.
    pub fn to_bits(self) -> u16 {
        self.index() | if self.wrap() { 0x8000 } else { 0 }
    }

    /// The index.
    #[inline]
    pub fn index(self) -> u16 {
        // No index is over 32767.
        self.0 as u16
    }

    /// The wrap counter.
    #[inline]
    pub fn wrap(self) -> bool {
        self.0 & WRAP != 0
    }

    /// So many places further on; no more than the ring has.
    #[inline]
    pub fn plus(self, places: u16, size: u16) -> Position {
        let moved = self.0 + u32::from(places);
        if moved & !WRAP < u32::from(size) {
            return Position(moved);
        }
        Position((moved - u32::from(size)) ^ WRAP)
    }

    /// So many places further back; no more than the ring has.
    pub fn minus(self, places: u16, size: u16) -> Position {
        match self.index().checked_sub(places) {
            Some(index) => Position::new(index, self.wrap()),
            None => Position::new(self.index() + (size - places), !self.wrap()),
        }
    }

    /// How many places further on than `other`, on a ring which is twice as long and on which no two positions are alike.
    pub fn ahead_of(self, other: Position, size: u16) -> u32 {
        let size = u32::from(size);
        let place = |position: Position| {
            u32::from(position.index()) + if position.wrap() { 0 } else { size }
        };
        let ahead = place(self) + 2 * size - place(other);
        if ahead < 2 * size {
            ahead
        } else {
            ahead - 2 * size
        }
    }

    /// The flags that a descriptor here has when it is available.
    #[inline]
    pub fn available_flags(self) -> u64 {
        if self.wrap() { AVAILABLE } else { USED }
    }

    /// The flags that a descriptor here has when it is used.
    #[inline]
    pub fn used_flags(self) -> u64 {
        if self.wrap() { AVAILABLE | USED } else { 0 }
    }

    /// Whether a descriptor here with this second word is available.
    #[inline]
    pub fn is_available(self, word: u64) -> bool {
        word & (AVAILABLE | USED) == self.available_flags()
    }
}

impl fmt::Debug for Position {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wrap = u8::from(self.wrap());
        write!(formatter, "{} (wrap counter {wrap})", self.index())
    }
}

/// Whether going from `old` to `new`, at most once round the ring, passes the place after which an event is wanted: an index and a
/// wrap counter.
pub fn is_passed(wanted: u16, old: Position, new: Position, size: u16) -> bool {
    let wanted = Position::from_bits(wanted);
    wanted.index() < size && wanted.ahead_of(old, size) < new.ahead_of(old, size)
}
