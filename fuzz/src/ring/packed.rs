//! What is particular to packed rings: how they are written to, and the second reader of them (virtio 1.2, section 2.8).

use guestmem::queue::QueueSetup;
use guestmem_driver::RawDescriptor;

use super::{Collector, Found, World, Wrong};
use crate::Dice;

const AVAILABLE: u16 = RawDescriptor::AVAILABLE;
const USED: u16 = RawDescriptor::USED;

impl World {
    /// A descriptor becomes available: mostly one of those that the device will read next, mostly in the right round.
    pub(super) fn make_available(&self, dice: &mut Dice<'_>) {
        let size = self.setup().size;
        let ahead = if dice.one_in(4) {
            dice.below(usize::from(size))
        } else {
            0
        };
        let place = self.moved(self.next_available, ahead as i32);
        let first_round = (place < size) != dice.one_in(16);
        let mut descriptor = match dice.one_in(3) {
            true => self.any_descriptor(dice),
            false => self.driver.packed_descriptor(place % size),
        };
        let flags = if first_round { AVAILABLE } else { USED };
        descriptor.flags = descriptor.flags & !(AVAILABLE | USED) | flags;
        if dice.one_in(32) {
            descriptor.next = dice.word();
        }
        self.driver.write_descriptor(place % size, descriptor);
    }

    /// A place so many descriptors, or chains if the ring is split, further on.
    pub(super) fn moved(&self, place: u16, by: i32) -> u16 {
        let setup = self.setup();
        let modulus = match setup.packed {
            true => 2 * i32::from(setup.size),
            false => 65_536,
        };
        (i32::from(place) + by).rem_euclid(modulus) as u16
    }

    pub(super) fn expected_base(&self) -> u32 {
        let setup = self.setup();
        if !setup.packed {
            return u32::from(self.next_available);
        }
        let bits = |place: u16| u32::from(place % setup.size) | u32::from(place < setup.size) << 15;
        bits(self.next_available) | bits(self.next_used) << 16
    }

    /// Whether the next descriptor is available: one counter's bit is as the round says, the other is not.
    pub(super) fn is_available(&self) -> bool {
        let size = self.setup().size;
        let flags = self
            .driver
            .packed_descriptor(self.next_available % size)
            .flags;
        let round = self.next_available < size;
        (flags & AVAILABLE != 0) == round && (flags & USED != 0) != round
    }

    /// What the next pop must give.
    pub(super) fn expected_packed(&self) -> Result<Option<Found>, Wrong> {
        if !self.is_available() {
            return Ok(None);
        }
        let setup = self.setup();
        let out: u16 = self.out.iter().map(|(_, places)| *places).sum();
        let mut found = Collector::new(self);
        for count in 0..setup.size - out {
            let index = self.moved(self.next_available, i32::from(count)) % setup.size;
            let RawDescriptor {
                address,
                len,
                flags,
                next: name,
            } = self.driver.packed_descriptor(index);
            if flags & RawDescriptor::INDIRECT == 0 {
                found.descriptor(address, len, flags & RawDescriptor::WRITE != 0)?;
            } else if count > 0 || flags & RawDescriptor::NEXT != 0 {
                return Err("an indirect table stands alone");
            } else {
                found.indirect(address, len)?;
            }
            if flags & RawDescriptor::NEXT == 0 {
                return match self.out.iter().any(|(out, _)| *out == name) {
                    true => Err("the device has it already"),
                    false => Ok(Some((name, found.readable, found.writable))),
                };
            }
        }
        Err("more descriptors than there can be")
    }
}

impl Collector<'_> {
    /// All descriptors of a table, one behind the other.
    pub(super) fn packed_table(
        &mut self,
        entries: u32,
        entry: impl Fn(u16) -> Option<[u8; 16]>,
    ) -> Result<(), Wrong> {
        for index in 0..entries {
            let raw = u128::from_le_bytes(entry(index as u16).ok_or("no table there")?);
            let writable = (raw >> 112) as u16 & RawDescriptor::WRITE != 0;
            self.descriptor(raw as u64, (raw >> 64) as u32, writable)?;
        }
        Ok(())
    }
}

/// Whether a packed ring of this size can have this base: two places of the ring, of which the one for what is available is ahead, by the whole
/// ring at most.
pub(super) fn is_base(setup: &QueueSetup) -> bool {
    let size = u32::from(setup.size);
    let place = |bits: u32| (bits & 0x7fff) + if bits & 0x8000 != 0 { 0 } else { size };
    let halves = [setup.ring_base & 0xffff, setup.ring_base >> 16];
    let [available, used] = halves.map(place);
    let ahead = (0..=size).any(|ahead| (used + ahead) % (2 * size) == available);
    halves.iter().all(|bits| bits & 0x7fff < size) && ahead
}
