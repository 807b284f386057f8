use std::sync::Arc;

use thiserror::Error;

use super::Arena;
use crate::area::Area;
use crate::guest::Range;
use crate::queue::{
    AVAILABLE_FLAGS, AVAILABLE_INDEX, AVAILABLE_RING, DESCRIPTOR_LEN, INDIRECT, NEXT, NO_INTERRUPT,
    NO_NOTIFY, QueueSetup, USED_FLAGS, USED_INDEX, USED_RING, WRITE, needs_event,
};
use crate::sync::{Ordering, fence};

/// There are not enough free descriptors for this chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the queue has no room for this chain")]
pub struct Full;

/// A descriptor to be written as it is, right or wrong (virtio 1.2, section 2.7.5).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub len: u32,
    /// 1: there is a next one; 2: for the device to write; 4: indirect.
    pub flags: u16,
    /// Index of the next one.
    pub next: u16,
}

impl RawDescriptor {
    /// [`flags`](Self::flags): there is a next one.
    pub const NEXT: u16 = NEXT;
    /// [`flags`](Self::flags): for the device to write.
    pub const WRITE: u16 = WRITE;
    /// [`flags`](Self::flags): the memory holds a table of descriptors.
    pub const INDIRECT: u16 = INDIRECT;

    /// The descriptor as it lies in memory.
    pub fn to_bytes(self) -> [u8; 16] {
        let [address, rest] = self.words();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..].copy_from_slice(&rest.to_le_bytes());
        bytes
    }

    pub(super) fn words(self) -> [u64; 2] {
        [
            self.address,
            u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48,
        ]
    }
}

/// The driver's side of one split virtqueue.
///
/// # Example
/// ```
/// use std::sync::Arc;
/// use memory::driver::{Arena, DriverQueue};
/// use memory::guest::{GuestMemory, Range};
/// use memory::queue::{Chain, Queue};
///
/// let arena = Arc::new(Arena::new(1 << 20)?);
/// let memory = Arc::new(GuestMemory::with_regions(vec![arena.region(0)?])?);
/// let mut driver = DriverQueue::new(Arc::clone(&arena), 0, 128, true, true);
/// let mut queue = Queue::new(driver.setup(), Arc::clone(&memory))?;
///
/// let offset = arena.allocate(64, 1);
/// driver.add(&[], &[Range { address: offset as u64, len: 64 }], 7)?;
/// assert!(driver.kick_needed());
///
/// let mut chain = Chain::default();
/// assert!(queue.pop(&mut chain)?);
/// memory.write(&chain.writable, 0, b"hello")?;
/// queue.complete(chain.head, 5);
/// assert!(queue.publish(), "the driver wants an interrupt");
///
/// assert_eq!(driver.take_used(), Some((7, 5)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DriverQueue {
    arena: Arc<Arena>,
    guest_base: u64,
    setup: QueueSetup,
    descriptors: Area,
    available: Area,
    used: Area,
    /// Free descriptors; the last is taken first.
    free: Vec<u16>,
    /// By head.
    chains: Vec<Option<Added>>,
    /// By head: the indirect table that it was given.
    tables: Vec<Option<Table>>,
    /// The available index, with what is not yet published.
    next_available: u16,
    published_available: u16,
    /// The used index up to which chains were taken back.
    next_used: u16,
    interrupts: bool,
}

/// A chain that the device may have.
#[derive(Debug)]
struct Added {
    token: u64,
    /// Its descriptors in the queue's table, the head first.
    descriptors: Vec<u16>,
}

#[derive(Debug, Clone, Copy)]
struct Table {
    /// In the arena, in bytes.
    offset: usize,
    /// In descriptors.
    capacity: usize,
}

impl DriverQueue {
    /// A queue of `size` entries, in memory that it takes from the arena. The guest sees the arena's start at `guest_base`.
    ///
    /// # Panics
    /// If the size is zero, no power of two, or more than the arena has room for.
    pub fn new(
        arena: Arc<Arena>,
        guest_base: u64,
        size: u16,
        event_index: bool,
        indirect: bool,
    ) -> DriverQueue {
        assert!(size.is_power_of_two(), "a queue of {size}");
        let entries = usize::from(size);
        let lens = [
            DESCRIPTOR_LEN * entries,
            AVAILABLE_RING + 2 * entries + 2,
            USED_RING + 8 * entries + 2,
        ];
        let [descriptors, available, used] = [(lens[0], 16), (lens[1], 2), (lens[2], 4)]
            .map(|(len, align)| arena.allocate(len, align));
        let base = arena.base();
        DriverQueue {
            guest_base,
            setup: QueueSetup {
                size,
                descriptors: base + descriptors as u64,
                available: base + available as u64,
                used: base + used as u64,
                next_available: 0,
                event_index,
                indirect,
            },
            descriptors: arena.area(descriptors, lens[0]),
            available: arena.area(available, lens[1]),
            used: arena.area(used, lens[2]),
            free: (0..size).rev().collect(),
            chains: (0..size).map(|_| None).collect(),
            tables: vec![None; entries],
            next_available: 0,
            published_available: 0,
            next_used: 0,
            interrupts: true,
            arena,
        }
    }

    /// What a device needs to know, with the addresses of this process as the front end's.
    pub fn setup(&self) -> QueueSetup {
        self.setup
    }

    /// Lets the queue go on as if `index` chains had gone through it already, on both sides: the setup says so too. For tests of
    /// what happens when indices wrap.
    ///
    /// # Panics
    /// If the queue is in use.
    pub fn start_at(&mut self, index: u16) {
        assert_eq!(
            self.free.len(),
            usize::from(self.setup.size),
            "the queue is in use"
        );
        self.next_available = index;
        self.published_available = index;
        self.next_used = index;
        self.setup.next_available = index;
        self.set_available_index(index);
        self.set_used_index(index);
        self.set_used_event(index);
        self.used
            .store_u16(self.available_event_offset(), index, Ordering::Relaxed);
    }

    /// Adds a chain: what the device may read, then what it may write. The device does not see it before
    /// [`kick_needed`](Self::kick_needed).
    ///
    /// # Errors
    /// [`Full`], with nothing added. An empty chain is full of nothing and refused as well.
    pub fn add(&mut self, readable: &[Range], writable: &[Range], token: u64) -> Result<(), Full> {
        let count = readable.len() + writable.len();
        let readable = readable.iter().map(|range| (range, 0));
        let writable = writable.iter().map(|range| (range, WRITE));
        let mut parts = readable
            .chain(writable)
            .map(|(range, flags)| (*range, flags));
        let indirect = self.setup.indirect && count > 1;
        let needed = if indirect { 1 } else { count };
        if needed == 0 || needed > self.free.len() {
            return Err(Full);
        }
        let descriptors: Vec<u16> = self.free.drain(self.free.len() - needed..).rev().collect();
        let head = descriptors[0];
        if indirect {
            let table = self.write_table(head, parts, count);
            self.write_descriptor(head, table);
        } else {
            for (position, index) in descriptors.iter().enumerate() {
                let (range, flags) = parts.next().expect("as many parts as descriptors");
                let next = descriptors.get(position + 1).copied();
                let flags = flags | if next.is_some() { NEXT } else { 0 };
                let next = next.unwrap_or(0);
                self.write_descriptor(
                    *index,
                    RawDescriptor {
                        address: range.address,
                        len: range.len,
                        flags,
                        next,
                    },
                );
            }
        }
        self.chains[usize::from(head)] = Some(Added { token, descriptors });
        self.set_available_entry(self.next_available, head);
        self.next_available = self.next_available.wrapping_add(1);
        Ok(())
    }

    /// Publishes what was added since the last call. `true` when the device wants a notification for it.
    pub fn kick_needed(&mut self) -> bool {
        let (old, new) = (self.published_available, self.next_available);
        if old == new {
            return false;
        }
        self.available
            .store_u16(AVAILABLE_INDEX, new, Ordering::Release);
        self.published_available = new;
        fence(Ordering::SeqCst);
        if self.setup.event_index {
            needs_event(self.available_event(), old, new)
        } else {
            self.used_flags() & NO_NOTIFY == 0
        }
    }

    /// Takes back a chain that the device is done with: its token and how many bytes were written.
    ///
    /// # Panics
    /// If the device gives back a chain that it does not have, or more of them than there can be.
    pub fn take_used(&mut self) -> Option<(u64, u32)> {
        let ahead = self.used_index().wrapping_sub(self.next_used);
        if ahead == 0 {
            return None;
        }
        assert!(
            ahead <= self.setup.size,
            "{ahead} chains came back of a queue of {}",
            self.setup.size
        );
        let (id, written) = self.used_entry(self.next_used);
        let slot = self.chains.get_mut(id as usize).and_then(Option::take);
        let added = slot.unwrap_or_else(|| panic!("chain {id} came back and was not out"));
        self.free.extend(added.descriptors.iter().rev());
        self.next_used = self.next_used.wrapping_add(1);
        if self.interrupts && self.setup.event_index {
            self.set_used_event(self.next_used);
            fence(Ordering::SeqCst);
        }
        Some((added.token, written))
    }

    /// Asks for interrupts. `true`: something came back already, look again.
    pub fn enable_interrupts(&mut self) -> bool {
        self.interrupts = true;
        self.set_used_event(self.next_used);
        self.set_available_flags(0);
        fence(Ordering::SeqCst);
        self.used_index() != self.next_used
    }

    /// Asks for no interrupts. One may still come.
    pub fn disable_interrupts(&mut self) {
        self.interrupts = false;
        if self.setup.event_index {
            // As far away as can be.
            self.set_used_event(self.next_used.wrapping_sub(1));
        } else {
            self.set_available_flags(NO_INTERRUPT);
        }
    }

    /// Number of free descriptors.
    pub fn free_descriptors(&self) -> usize {
        self.free.len()
    }

    // What follows reads and writes fields as they are, for hostile tests.

    /// The available ring's flags.
    pub fn set_available_flags(&self, flags: u16) {
        self.available
            .store_u16(AVAILABLE_FLAGS, flags, Ordering::Relaxed);
    }

    /// The available index as the device sees it.
    pub fn available_index(&self) -> u16 {
        self.available.load_u16(AVAILABLE_INDEX, Ordering::Relaxed)
    }

    /// Sets the available index, in memory only.
    pub fn set_available_index(&self, index: u16) {
        self.available
            .store_u16(AVAILABLE_INDEX, index, Ordering::Release);
    }

    /// Sets the available ring's entry for a running index.
    pub fn set_available_entry(&self, index: u16, head: u16) {
        self.available.store_u16(
            AVAILABLE_RING + 2 * self.slot(index),
            head,
            Ordering::Relaxed,
        );
    }

    /// Makes a head available whatever it stands for: the next entry, and the index.
    pub fn publish_head(&mut self, head: u16) {
        self.set_available_entry(self.next_available, head);
        self.next_available = self.next_available.wrapping_add(1);
        self.published_available = self.next_available;
        self.set_available_index(self.next_available);
    }

    /// Sets the index after which an interrupt is wanted.
    pub fn set_used_event(&self, index: u16) {
        self.available.store_u16(
            AVAILABLE_RING + 2 * usize::from(self.setup.size),
            index,
            Ordering::Relaxed,
        );
    }

    /// Writes a descriptor of the queue's table.
    pub fn write_descriptor(&self, index: u16, descriptor: RawDescriptor) {
        let offset = DESCRIPTOR_LEN * usize::from(index);
        let [address, rest] = descriptor.words();
        self.descriptors
            .store_u64(offset, address, Ordering::Relaxed);
        self.descriptors
            .store_u64(offset + 8, rest, Ordering::Relaxed);
    }

    /// The used ring's flags.
    pub fn used_flags(&self) -> u16 {
        self.used.load_u16(USED_FLAGS, Ordering::Relaxed)
    }

    /// The used index.
    pub fn used_index(&self) -> u16 {
        self.used.load_u16(USED_INDEX, Ordering::Acquire)
    }

    /// Sets the used index, which only a device should.
    pub fn set_used_index(&self, index: u16) {
        self.used.store_u16(USED_INDEX, index, Ordering::Release);
    }

    /// The used ring's entry for a running index: a head and how many bytes were written.
    pub fn used_entry(&self, index: u16) -> (u32, u32) {
        let offset = USED_RING + 8 * self.slot(index);
        (
            self.used.load_u32(offset, Ordering::Relaxed),
            self.used.load_u32(offset + 4, Ordering::Relaxed),
        )
    }

    /// The index after which the device wants a notification.
    pub fn available_event(&self) -> u16 {
        self.used
            .load_u16(self.available_event_offset(), Ordering::Relaxed)
    }

    fn write_table(
        &mut self,
        head: u16,
        parts: impl Iterator<Item = (Range, u16)>,
        count: usize,
    ) -> RawDescriptor {
        let kept = self.tables[usize::from(head)].filter(|table| table.capacity >= count);
        let table = kept.unwrap_or_else(|| {
            let capacity = count.next_power_of_two();
            Table {
                offset: self.arena.allocate(DESCRIPTOR_LEN * capacity, 16),
                capacity,
            }
        });
        self.tables[usize::from(head)] = Some(table);
        for (position, (range, flags)) in parts.enumerate() {
            let flags = flags | if position + 1 < count { NEXT } else { 0 };
            let next = (position + 1) as u16;
            let descriptor = RawDescriptor {
                address: range.address,
                len: range.len,
                flags,
                next,
            };
            self.arena.write(
                table.offset + DESCRIPTOR_LEN * position,
                &descriptor.to_bytes(),
            );
        }
        let address = self.guest_base + table.offset as u64;
        RawDescriptor {
            address,
            len: (DESCRIPTOR_LEN * count) as u32,
            flags: INDIRECT,
            next: 0,
        }
    }

    fn available_event_offset(&self) -> usize {
        USED_RING + 8 * usize::from(self.setup.size)
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.setup.size - 1))
    }
}
