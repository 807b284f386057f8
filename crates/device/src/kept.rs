//! What has left one end of a circuit and not yet reached the other.

use std::collections::VecDeque;

use guestmem::queue::Chain;
use switch::LineId;
use wire::vsock::SEQPACKET_END_OF_MESSAGE;

use crate::tally::Entry;

/// Bytes are stored in pieces of at most this size, so that a piece that has been delivered is given back soon.
const PIECE_BYTES: usize = 64 * 1024;

/// Some bytes, in order.
#[derive(Debug)]
pub(crate) enum Parcel {
    /// Still in the sender's descriptors, which are given back when the last byte has been copied.
    Parked {
        line: LineId,
        chain: Chain,
        /// Where the next byte is, from the start of the chain.
        offset: usize,
        left: usize,
        /// Flags of the packet, for its last piece.
        flags: u32,
        /// What it costs to keep, and to store when the sender's ring stops: its bytes, and so much for each of its pieces.
        weight: usize,
    },
    /// In memory of our own.
    Stored {
        bytes: Vec<u8>,
        /// Where the next byte is.
        offset: usize,
        /// Flags of the packet, for its last piece.
        flags: u32,
        /// By which a message is counted. Bytes of a stream are not: they are put together, and bounded by their credit.
        _entry: Option<Entry>,
    },
}

impl Parcel {
    pub(crate) fn left(&self) -> usize {
        match self {
            Parcel::Parked { left, .. } => *left,
            Parcel::Stored { bytes, offset, .. } => bytes.len() - offset,
        }
    }

    pub(crate) fn flags(&self) -> u32 {
        match self {
            Parcel::Parked { flags, .. } | Parcel::Stored { flags, .. } => *flags,
        }
    }

    pub(crate) fn advance(&mut self, len: usize) {
        match self {
            Parcel::Parked { offset, left, .. } => {
                *offset += len;
                *left -= len;
            }
            Parcel::Stored { offset, .. } => *offset += len,
        }
    }
}

/// What is kept of one direction of a circuit. The credit bounds its size.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    parcels: VecDeque<Parcel>,
}

impl Kept {
    pub(crate) fn is_empty(&self) -> bool {
        self.parcels.is_empty()
    }

    /// How many parcels there are.
    pub(crate) fn len(&self) -> usize {
        self.parcels.len()
    }

    pub(crate) fn front(&mut self) -> Option<&mut Parcel> {
        self.parcels.front_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Parcel> {
        self.parcels.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Parcel> {
        self.parcels.iter_mut()
    }

    pub(crate) fn pop(&mut self) -> Option<Parcel> {
        self.parcels.pop_front()
    }

    pub(crate) fn push(&mut self, parcel: Parcel) {
        self.parcels.push_back(parcel);
    }

    /// Whether `len` more bytes become part of the last parcel.
    pub(crate) fn merges(&self, len: usize, is_stream: bool) -> bool {
        match self.parcels.back() {
            Some(Parcel::Stored { bytes, flags, .. }) => {
                let ends = !is_stream && flags & SEQPACKET_END_OF_MESSAGE != 0;
                !ends && bytes.len() + len <= PIECE_BYTES
            }
            _ => false,
        }
    }

    /// Room for `len` more bytes behind what is kept. Bytes of a stream are put together, and so are the parts of one
    /// message, so that a thousand small packets cost little more than their bytes; messages, which have an entry, have parcels of
    /// their own.
    pub(crate) fn store(&mut self, len: usize, flags: u32, entry: Option<Entry>) -> &mut [u8] {
        if !self.merges(len, entry.is_none()) {
            self.parcels.push_back(Parcel::Stored {
                bytes: Vec::new(),
                offset: 0,
                flags: 0,
                _entry: entry,
            });
        }
        let Some(Parcel::Stored {
            bytes,
            flags: of_all,
            ..
        }) = self.parcels.back_mut()
        else {
            return &mut [];
        };
        *of_all |= flags;
        let start = bytes.len();
        bytes.resize(start + len, 0);
        &mut bytes[start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tally::Tally;

    #[test]
    fn small_pieces_of_a_stream_are_put_together_up_to_a_size() {
        let mut kept = Kept::default();
        for byte in 0..=PIECE_BYTES {
            kept.store(1, 0, None)[0] = byte as u8;
        }
        assert_eq!(
            kept.iter().map(Parcel::left).collect::<Vec<_>>(),
            [PIECE_BYTES, 1]
        );
    }

    #[test]
    fn messages_stay_apart_and_their_parts_together() {
        let mut kept = Kept::default();
        let tally = Tally::default();
        kept.store(1, 0, Some(tally.enter(1)));
        kept.store(2, SEQPACKET_END_OF_MESSAGE, Some(tally.enter(1)));
        kept.store(4, SEQPACKET_END_OF_MESSAGE, Some(tally.enter(1)));
        assert_eq!(tally.total(), 2, "parcels are counted, not packets");
        assert!(
            kept.iter()
                .all(|parcel| parcel.flags() == SEQPACKET_END_OF_MESSAGE)
        );
        assert_eq!(kept.iter().map(Parcel::left).collect::<Vec<_>>(), [3, 4]);
    }
}
