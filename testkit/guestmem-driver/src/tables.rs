use std::sync::Arc;

use super::Arena;
use super::queue::RawDescriptor;
use guestmem::guest::Range;
use guestmem::queue::{DESCRIPTOR_LEN, NEXT};

/// How the descriptors of an indirect table follow each other: by their index, or as they stand there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TableOrder {
    Linked,
    Sequential,
}

/// The indirect tables of a queue, one for each chain that has needed one. They are kept, and made anew only for a longer chain.
#[derive(Debug)]
pub(crate) struct Tables {
    arena: Arc<Arena>,
    guest_base: u64,
    /// By the chain's name.
    tables: Vec<Option<Table>>,
}

#[derive(Debug, Clone, Copy)]
struct Table {
    /// In the arena, in bytes.
    offset: usize,
    /// In descriptors.
    capacity: usize,
}

impl Tables {
    pub(crate) fn new(arena: Arc<Arena>, guest_base: u64, size: u16) -> Tables {
        Tables {
            arena,
            guest_base,
            tables: vec![None; usize::from(size)],
        }
    }

    /// Writes the table of a chain: ranges with their flags. Gives where it is.
    pub(crate) fn write(
        &mut self,
        name: u16,
        parts: impl Iterator<Item = (Range, u16)>,
        count: usize,
        order: TableOrder,
    ) -> Range {
        let kept = self.tables[usize::from(name)].filter(|table| table.capacity >= count);
        let table = kept.unwrap_or_else(|| {
            let capacity = count.next_power_of_two();
            Table {
                offset: self.arena.allocate(DESCRIPTOR_LEN * capacity, 16),
                capacity,
            }
        });
        self.tables[usize::from(name)] = Some(table);
        for (position, (range, flags)) in parts.enumerate() {
            let (flags, next) = match order {
                TableOrder::Linked if position + 1 < count => (flags | NEXT, (position + 1) as u16),
                _ => (flags, 0),
            };
            let descriptor = RawDescriptor {
                address: range.address,
                len: range.len,
                flags,
                next,
            };
            let bytes = match order {
                TableOrder::Linked => descriptor.to_bytes(),
                TableOrder::Sequential => descriptor.to_packed_bytes(),
            };
            self.arena
                .write(table.offset + DESCRIPTOR_LEN * position, &bytes);
        }
        Range {
            address: self.guest_base + table.offset as u64,
            len: (DESCRIPTOR_LEN * count) as u32,
        }
    }
}
