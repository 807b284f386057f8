//! What both formats' chains are made of: descriptors, indirect tables, and the ranges that they turn into.

use super::{Chain, MAX_CHAIN_LEN, MAX_CHAIN_RANGES, QueueError};
use crate::guest::{GuestMemory, Range};
use crate::prefetch;

/// Size of a descriptor (virtio 1.2, sections 2.7.5 and 2.8.13), in bytes.
pub const DESCRIPTOR_LEN: usize = 16;

/// The descriptor has a next one.
pub const NEXT: u16 = 1;
/// The device may write to the descriptor's memory, and not read it.
pub const WRITE: u16 = 2;
/// The descriptor's memory holds a table of descriptors.
pub const INDIRECT: u16 = 4;

/// A descriptor, copied out: address and length are in the same places in both formats.
#[derive(Debug, Clone, Copy)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
    /// All of the second word: besides the length and the flags, it has the next descriptor's index or the buffer's name.
    word: u64,
}

impl Descriptor {
    /// From the words of a split ring's descriptor, or of an indirect table's.
    #[inline]
    pub(super) fn from_words(address: u64, word: u64) -> Descriptor {
        Descriptor {
            address,
            len: word as u32,
            flags: (word >> 32) as u16,
            word,
        }
    }

    /// From those of a packed ring's, where flags come last.
    #[inline]
    pub(super) fn from_packed_words(address: u64, word: u64) -> Descriptor {
        Descriptor {
            address,
            len: word as u32,
            flags: (word >> 48) as u16,
            word,
        }
    }

    /// The identifier of the chain, in a packed ring's last one.
    #[inline]
    pub(super) fn identifier(&self) -> u16 {
        (self.word >> 32) as u16
    }

    /// The index of the next descriptor, in a split ring's.
    #[inline]
    pub(super) fn next(&self) -> u16 {
        (self.word >> 48) as u16
    }
}

/// What is done with the memory of a descriptor with these flags.
#[inline]
fn intent(flags: u16) -> prefetch::Use {
    match flags & WRITE {
        0 => prefetch::Use::Read,
        _ => prefetch::Use::Write,
    }
}

/// Asks for the beginning of what a descriptor stands for, whatever it is: nothing is concluded from it.
#[inline]
pub(super) fn prefetch(memory: &GuestMemory, address: u64, len: u32, flags: u16) {
    if let Some((place, room)) = memory.locate(address) {
        let to = intent(flags);
        prefetch::beginning(place.as_ptr(), room.min(len as usize), to);
    }
}

/// Fills `chain` with a descriptor that is all of it and lies in one region, as nearly all are. `false` if it is another one, and then
/// [`Reader`] is to be asked.
#[inline]
pub(super) fn take_only(
    memory: &GuestMemory,
    chain: &mut Chain,
    address: u64,
    len: u32,
    flags: u16,
) -> bool {
    if flags & (NEXT | INDIRECT) != 0 || len == 0 {
        return false;
    }
    match memory.locate(address) {
        Some((place, room)) if room >= len as usize => {
            prefetch::beginning(place.as_ptr(), len as usize, intent(flags));
        }
        _ => return false,
    }
    chain.entries = 1;
    chain.descriptors = 1;
    chain.readable.clear();
    chain.writable.clear();
    let list = if flags & WRITE == 0 {
        &mut chain.readable
    } else {
        &mut chain.writable
    };
    list.push(Range { address, len });
    true
}

/// How the descriptors of an indirect table follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TableOrder {
    /// As their flags and their `next` say, from the first on (2.7.5.3).
    Linked,
    /// All of them, in the order of the table; of their flags only WRITE counts (2.8.7).
    Sequential,
}

/// A chain in the making.
pub(super) struct Reader<'a> {
    memory: &'a GuestMemory,
    chain: &'a mut Chain,
    /// What errors call the chain.
    head: u16,
    /// Their bytes so far.
    bytes: u64,
}

impl<'a> Reader<'a> {
    /// Empties the chain, to be filled.
    #[inline]
    pub(super) fn new(memory: &'a GuestMemory, chain: &'a mut Chain, head: u16) -> Reader<'a> {
        chain.descriptors = 0;
        chain.readable.clear();
        chain.writable.clear();
        Reader {
            memory,
            chain,
            head,
            bytes: 0,
        }
    }

    /// How many descriptors of the ring the chain has taken so far.
    #[inline]
    pub(super) fn set_entries(&mut self, entries: u16) {
        self.chain.entries = entries;
    }

    /// Adds the memory of one descriptor.
    #[inline]
    pub(super) fn add(&mut self, index: u16, descriptor: Descriptor) -> Result<(), QueueError> {
        let head = self.head;
        let Descriptor {
            address,
            len,
            flags,
            ..
        } = descriptor;
        self.chain.descriptors += 1;
        if usize::from(self.chain.descriptors) > MAX_CHAIN_LEN {
            return Err(QueueError::ChainTooLong { head });
        }
        // Nothing in the specification forbids it, and there is nothing to do for it.
        if len == 0 {
            return Ok(());
        }
        self.bytes += u64::from(len);
        if self.bytes > 1 << 32 {
            return Err(QueueError::TooManyBytes { head });
        }
        if flags & WRITE == 0 && !self.chain.writable.is_empty() {
            return Err(QueueError::ReadableAfterWritable { head, index });
        }
        let mut piece = Range { address, len };
        loop {
            let (_, room) = self
                .memory
                .locate(piece.address)
                .ok_or(QueueError::NotMapped {
                    head,
                    index,
                    address,
                    len,
                })?;
            if self.chain.readable.len() + self.chain.writable.len() == MAX_CHAIN_RANGES {
                return Err(QueueError::TooManyRanges { head });
            }
            let list = if flags & WRITE == 0 {
                &mut self.chain.readable
            } else {
                &mut self.chain.writable
            };
            if room >= piece.len as usize {
                list.push(piece);
                return Ok(());
            }
            // The range goes on in the next region, if that one follows without a gap.
            let room = room as u32;
            list.push(Range {
                address: piece.address,
                len: room,
            });
            let next = piece.address.checked_add(u64::from(room));
            piece.address = next.ok_or(QueueError::NotMapped {
                head,
                index,
                address,
                len,
            })?;
            piece.len -= room;
        }
    }

    /// Adds what the descriptors of an indirect table stand for.
    pub(super) fn add_table(
        &mut self,
        outer: u16,
        table: Descriptor,
        order: TableOrder,
    ) -> Result<(), QueueError> {
        let head = self.head;
        let entries = table.len as usize / DESCRIPTOR_LEN;
        if entries == 0 || entries > MAX_CHAIN_LEN || table.len as usize % DESCRIPTOR_LEN != 0 {
            return Err(QueueError::IndirectTableLength {
                head,
                len: table.len,
            });
        }
        // MAX_CHAIN_LEN fits.
        let entries = entries as u16;
        let not_mapped = QueueError::NotMapped {
            head,
            index: outer,
            address: table.address,
            len: table.len,
        };
        if table.address.checked_add(u64::from(table.len)).is_none() {
            return Err(not_mapped);
        }
        let mut index = 0;
        for _ in 0..entries {
            // The table needs no alignment and may lie across regions, so that this is a copy and no field access.
            let mut bytes = [0; DESCRIPTOR_LEN];
            let place = Range {
                address: table.address + (DESCRIPTOR_LEN * usize::from(index)) as u64,
                len: DESCRIPTOR_LEN as u32,
            };
            self.memory
                .read(&[place], 0, &mut bytes)
                .map_err(|_| not_mapped)?;
            let words = u128::from_le_bytes(bytes);
            let (address, word) = (words as u64, (words >> 64) as u64);
            if order == TableOrder::Sequential {
                self.add(index, Descriptor::from_packed_words(address, word))?;
                index += 1;
                continue;
            }
            let descriptor = Descriptor::from_words(address, word);
            if descriptor.flags & INDIRECT != 0 {
                return Err(QueueError::IndirectInIndirect { head, index });
            }
            self.add(index, descriptor)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            let next = descriptor.next();
            if next >= entries {
                return Err(QueueError::NextOutOfRange {
                    head,
                    index,
                    next,
                    entries,
                });
            }
            index = next;
        }
        match order {
            TableOrder::Sequential => Ok(()),
            TableOrder::Linked => Err(QueueError::Loop { head, entries }),
        }
    }
}
