//! What has left one end of a circuit and not yet reached the other.

use std::collections::VecDeque;

use guestmem::guest::GuestMemory;
use guestmem::queue::Chain;
use policy::LineId;
use wire::vsock::SEQPACKET_END_OF_MESSAGE;

use crate::tally::{Entry, Tally};

/// Bytes are stored in pieces of at most this size, so that a piece that has been delivered is given back soon.
const PIECE_BYTES: usize = 64 * 1024;

/// Messages, or pieces of them, that are stored for one receiver. The credit bounds their bytes, but a message of one byte
/// costs a hundred: more than this and the circuit ends, as it would in a Linux receiver that counts packets.
const KEPT_MESSAGES: usize = 4096;

/// The messages that one sender has stored, and how many they may be.
#[derive(Debug)]
pub(crate) struct Messages {
    pub(crate) tally: Tally,
    pub(crate) most: u64,
}

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

    pub(crate) fn front(&mut self) -> Option<&mut Parcel> {
        self.parcels.front_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Parcel> {
        self.parcels.iter()
    }

    pub(crate) fn pop(&mut self) -> Option<Parcel> {
        self.parcels.pop_front()
    }

    pub(crate) fn push(&mut self, parcel: Parcel) {
        self.parcels.push_back(parcel);
    }

    /// Whether `len` more bytes become part of the last parcel.
    fn merges(&self, len: usize, is_stream: bool) -> bool {
        match self.parcels.back() {
            Some(Parcel::Stored { bytes, flags, .. }) => {
                let ends = !is_stream && flags & SEQPACKET_END_OF_MESSAGE != 0;
                !ends && bytes.len() + len <= PIECE_BYTES
            }
            _ => false,
        }
    }

    /// Whether `len` more bytes may be stored. `messages` are their sender's; a stream has none.
    pub(crate) fn may_store(&self, len: usize, messages: Option<&Messages>) -> bool {
        messages.is_none_or(|Messages { tally, most }| {
            self.merges(len, false) || self.parcels.len() < KEPT_MESSAGES && tally.total() < *most
        })
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

    /// Copies what a guest has parked into memory of our own, put together as what is stored at once. Returns what is to be given back to the guest, and
    /// whether all of it may be stored. If not, it is lost, and its circuit has to end.
    pub(crate) fn unpark(
        &mut self,
        (of, vm): (LineId, &str),
        memory: &GuestMemory,
        messages: Option<&Messages>,
    ) -> (Vec<Parcel>, bool) {
        let is_parked =
            |parcel: &Parcel| matches!(parcel, Parcel::Parked { line, .. } if *line == of);
        let (mut returned, mut fits) = (Vec::new(), true);
        if !self.parcels.iter().any(is_parked) {
            return (returned, fits);
        }
        for parcel in std::mem::take(&mut self.parcels) {
            let (len, flags) = (parcel.left(), parcel.flags());
            let entry = || messages.map(|messages| messages.tally.enter(1));
            match &parcel {
                Parcel::Parked { chain, offset, .. } if is_parked(&parcel) => {
                    fits = fits && self.may_store(len, messages);
                    if fits {
                        let room = self.store(len, flags, entry());
                        if let Err(error) = memory.read(&chain.readable, *offset, room) {
                            // The guest took its memory away while it sent: it gets zeros delivered, and has lost its line anyway.
                            tracing::warn!(vm, %error, "a parked packet could not be read");
                        }
                    }
                    returned.push(parcel);
                }
                Parcel::Stored { bytes, offset, .. } if self.merges(len, messages.is_none()) => {
                    let room = self.store(len, flags, entry());
                    room.copy_from_slice(&bytes[*offset..]);
                }
                _ => self.push(parcel),
            }
        }
        (returned, fits)
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

    const GUEST: LineId = LineId(3);

    /// A packet of one byte, which the guest has at this place.
    fn parked(address: u64, flags: u32) -> Parcel {
        let range = guestmem::guest::Range { address, len: 1 };
        let mut chain = Chain::default();
        chain.readable.push(range);
        Parcel::Parked {
            line: GUEST,
            chain,
            offset: 0,
            left: 1,
            flags,
            weight: 1,
        }
    }

    fn memory(bytes: &[u8]) -> GuestMemory {
        let arena = guestmem_driver::Arena::new(4096).unwrap();
        arena.write(0, bytes);
        GuestMemory::with_regions(vec![arena.region(0).unwrap()]).unwrap()
    }

    #[test]
    fn what_is_unparked_is_put_together_with_what_is_stored() {
        let memory = memory(b"parked");
        let mut kept = Kept::default();
        for _ in 0..3 {
            for address in 0..6 {
                kept.push(parked(address, 0));
            }
            // Stored, as no more could be parked.
            kept.store(1, 0, None)[0] = b'+';
            let (returned, fits) = kept.unpark((GUEST, "web"), &memory, None);
            assert!(fits);
            assert_eq!(returned.len(), 6);
        }
        assert_eq!(kept.parcels.len(), 1);
        let Some(Parcel::Stored { bytes, .. }) = kept.front() else {
            panic!("nothing is stored");
        };
        assert_eq!(bytes, b"parked+parked+parked+");
    }

    #[test]
    fn what_another_guest_has_parked_stays() {
        let memory = memory(b"parked");
        let mut kept = Kept::default();
        kept.push(parked(0, 0));
        let (returned, fits) = kept.unpark((LineId(4), "db"), &memory, None);
        assert!(returned.is_empty() && fits);
        assert!(matches!(kept.front(), Some(Parcel::Parked { .. })));
    }

    #[test]
    fn no_more_messages_are_unparked_than_may_be_stored() {
        let memory = memory(b"parked");
        let messages = Messages {
            tally: Tally::default(),
            most: 4,
        };
        for (count, expected) in [(4, true), (5, false)] {
            let mut kept = Kept::default();
            for address in 0..count {
                kept.push(parked(address, SEQPACKET_END_OF_MESSAGE));
            }
            let (returned, fits) = kept.unpark((GUEST, "web"), &memory, Some(&messages));
            assert_eq!((returned.len() as u64, fits), (count, expected));
            assert_eq!(messages.tally.total(), 4);
        }
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
