//! Following a chain of descriptors.

use super::{Chain, MAX_CHAIN_LEN, MAX_CHAIN_RANGES, QueueError, QueueSetup};
use crate::area::Area;
use crate::guest::{GuestMemory, Range};
use crate::sync::Ordering;

/// Size of a descriptor (virtio 1.2, section 2.7.5), in bytes.
pub(crate) const DESCRIPTOR_LEN: usize = 16;

/// The descriptor has a next one.
pub(crate) const NEXT: u16 = 1;
/// The device may write to the descriptor's memory, and not read it.
pub(crate) const WRITE: u16 = 2;
/// The descriptor's memory holds a table of descriptors.
pub(crate) const INDIRECT: u16 = 4;

/// Fills `chain` with the ranges of the chain that starts at `chain.head`, which is an index of the table.
pub(super) fn read(
    descriptors: &Area,
    setup: &QueueSetup,
    memory: &GuestMemory,
    chain: &mut Chain,
) -> Result<(), QueueError> {
    chain.readable.clear();
    chain.writable.clear();
    let head = chain.head;
    let mut reader = Reader {
        memory,
        chain,
        count: 0,
        bytes: 0,
    };
    let mut index = head;
    // A chain with more descriptors than the table has visits one of them twice.
    for entries in 1..=setup.size {
        reader.chain.entries = entries;
        let descriptor = Descriptor::from_queue(descriptors, index);
        if descriptor.flags & INDIRECT != 0 {
            if !setup.indirect {
                return Err(QueueError::IndirectNotNegotiated { head, index });
            }
            if descriptor.flags & NEXT != 0 {
                return Err(QueueError::IndirectWithNext { head, index });
            }
            return reader.add_table(index, descriptor);
        }
        reader.add(index, descriptor)?;
        if descriptor.flags & NEXT == 0 {
            return Ok(());
        }
        if descriptor.next >= setup.size {
            return Err(QueueError::NextOutOfRange {
                head,
                index,
                next: descriptor.next,
                entries: setup.size,
            });
        }
        index = descriptor.next;
    }
    Err(QueueError::Loop {
        head,
        entries: setup.size,
    })
}

/// A descriptor, copied out.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    #[inline]
    fn from_queue(descriptors: &Area, index: u16) -> Descriptor {
        let offset = DESCRIPTOR_LEN * usize::from(index);
        Descriptor::from_words(
            descriptors.load_u64(offset, Ordering::Relaxed),
            descriptors.load_u64(offset + 8, Ordering::Relaxed),
        )
    }

    #[inline]
    fn from_words(address: u64, rest: u64) -> Descriptor {
        Descriptor {
            address,
            len: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }
}

/// A chain in the making.
struct Reader<'a> {
    memory: &'a GuestMemory,
    chain: &'a mut Chain,
    /// Descriptors so far.
    count: usize,
    /// Their bytes so far.
    bytes: u64,
}

impl Reader<'_> {
    /// Adds the memory of one descriptor.
    #[inline]
    fn add(&mut self, index: u16, descriptor: Descriptor) -> Result<(), QueueError> {
        let head = self.chain.head;
        let Descriptor {
            address,
            len,
            flags,
            ..
        } = descriptor;
        self.count += 1;
        if self.count > MAX_CHAIN_LEN {
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
    fn add_table(&mut self, outer: u16, table: Descriptor) -> Result<(), QueueError> {
        let head = self.chain.head;
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
            let descriptor = Descriptor::from_words(words as u64, (words >> 64) as u64);
            if descriptor.flags & INDIRECT != 0 {
                return Err(QueueError::IndirectInIndirect { head, index });
            }
            self.add(index, descriptor)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            if descriptor.next >= entries {
                return Err(QueueError::NextOutOfRange {
                    head,
                    index,
                    next: descriptor.next,
                    entries,
                });
            }
            index = descriptor.next;
        }
        Err(QueueError::Loop { head, entries })
    }
}
