use std::sync::Arc;

use thiserror::Error;

use super::Arena;
use super::packed::PackedDriver;
use super::split::SplitDriver;
use guestmem::guest::Range;
use guestmem::queue::packed_fields::{FLAGS_SHIFT, IDENTIFIER_SHIFT};
use guestmem::queue::{INDIRECT, NEXT, QueueSetup, WRITE};

/// There are not enough free descriptors for this chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the queue has no room for this chain")]
pub struct Full;

/// A descriptor to be written as it is, right or wrong (virtio 1.2, sections 2.7.5 and 2.8.13).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub len: u32,
    /// 1: there is a next one; 2: for the device to write; 4: indirect. In a packed ring also 128 and 32768, by which it is available or used.
    pub flags: u16,
    /// Index of the next one; in a packed ring the chain's identifier.
    pub next: u16,
}

impl RawDescriptor {
    /// [`flags`](Self::flags): there is a next one.
    pub const NEXT: u16 = NEXT;
    /// [`flags`](Self::flags): for the device to write.
    pub const WRITE: u16 = WRITE;
    /// [`flags`](Self::flags): the memory holds a table of descriptors.
    pub const INDIRECT: u16 = INDIRECT;

    /// [`flags`](Self::flags) in a packed ring: the driver's wrap counter.
    pub const AVAILABLE: u16 = 1 << 7;
    /// [`flags`](Self::flags) in a packed ring: the device's wrap counter.
    pub const USED: u16 = 1 << 15;

    /// The descriptor as it lies in the memory of a split queue.
    pub fn to_bytes(self) -> [u8; 16] {
        concatenate(self.words())
    }

    /// The descriptor as it lies in a packed ring.
    pub fn to_packed_bytes(self) -> [u8; 16] {
        concatenate(self.packed_words())
    }

    pub(crate) fn words(self) -> [u64; 2] {
        [
            self.address,
            u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48,
        ]
    }

    pub(crate) fn packed_words(self) -> [u64; 2] {
        [
            self.address,
            u64::from(self.len)
                | u64::from(self.next) << IDENTIFIER_SHIFT
                | u64::from(self.flags) << FLAGS_SHIFT,
        ]
    }

    pub(crate) fn from_packed_words([address, word]: [u64; 2]) -> RawDescriptor {
        RawDescriptor {
            address,
            len: word as u32,
            flags: (word >> FLAGS_SHIFT) as u16,
            next: (word >> IDENTIFIER_SHIFT) as u16,
        }
    }
}

fn concatenate([first, second]: [u64; 2]) -> [u8; 16] {
    (u128::from(first) | u128::from(second) << 64).to_le_bytes()
}

/// The driver's side of one virtqueue, split or packed.
///
/// # Example
/// ```
/// use std::sync::Arc;
/// use guestmem_driver::{Arena, DriverQueue};
/// use guestmem::guest::{GuestMemory, Range};
/// use guestmem::queue::{Chain, Queue};
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
    format: Format,
}

// One of them for each queue of a test; how large it is does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
enum Format {
    Split(SplitDriver),
    Packed(PackedDriver),
}

macro_rules! either {
    ($queue:expr, $driver:ident => $call:expr) => {
        match &$queue.format {
            Format::Split($driver) => $call,
            Format::Packed($driver) => $call,
        }
    };
    (mut $queue:expr, $driver:ident => $call:expr) => {
        match &mut $queue.format {
            Format::Split($driver) => $call,
            Format::Packed($driver) => $call,
        }
    };
}

impl DriverQueue {
    /// A split queue of `size` entries, in memory that it takes from the arena. The guest sees the arena's start at `guest_base`.
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
        let driver = SplitDriver::new(arena, guest_base, size, event_index, indirect);
        DriverQueue {
            format: Format::Split(driver),
        }
    }

    /// The same, packed.
    ///
    /// # Panics
    /// If the size is zero, over 32768, or more than the arena has room for.
    pub fn packed(
        arena: Arc<Arena>,
        guest_base: u64,
        size: u16,
        event_index: bool,
        indirect: bool,
    ) -> DriverQueue {
        let driver = PackedDriver::new(arena, guest_base, size, event_index, indirect);
        DriverQueue {
            format: Format::Packed(driver),
        }
    }

    /// What a device needs to know, with the addresses of this process as the front end's.
    pub fn setup(&self) -> QueueSetup {
        either!(self, driver => driver.setup())
    }

    /// Lets the queue go on as if `index` chains (packed: descriptors) had gone through it already, on both sides: the setup says so too. For
    /// tests of what happens when indices wrap.
    ///
    /// # Panics
    /// If the queue is in use.
    pub fn start_at(&mut self, index: u16) {
        either!(mut self, driver => driver.start_at(index));
    }

    /// Adds a chain: what the device may read, then what it may write. The device does not see it before
    /// [`kick_needed`](Self::kick_needed).
    ///
    /// # Errors
    /// [`Full`], with nothing added. An empty chain is full of nothing and refused as well.
    #[inline]
    pub fn add(&mut self, readable: &[Range], writable: &[Range], token: u64) -> Result<(), Full> {
        either!(mut self, driver => driver.add(readable, writable, token))
    }

    /// Publishes what was added since the last call. `true` when the device wants a notification for it.
    pub fn kick_needed(&mut self) -> bool {
        either!(mut self, driver => driver.kick_needed())
    }

    /// Takes back a chain that the device is done with: its token and how many bytes were written.
    ///
    /// # Panics
    /// If the device gives back a chain that it does not have, or more of them than there can be.
    #[inline]
    pub fn take_used(&mut self) -> Option<(u64, u32)> {
        either!(mut self, driver => driver.take_used())
    }

    /// Asks for interrupts. `true`: something came back already, poll again.
    pub fn enable_interrupts(&mut self) -> bool {
        either!(mut self, driver => driver.enable_interrupts())
    }

    /// Asks for no interrupts. One may still come.
    pub fn disable_interrupts(&mut self) {
        either!(mut self, driver => driver.disable_interrupts());
    }

    /// How many chains the device has given back, modulo 65536, those that are not taken yet included.
    pub fn used_index(&self) -> u16 {
        either!(self, driver => driver.used_index())
    }

    /// Number of free descriptors.
    pub fn free_descriptors(&self) -> usize {
        either!(self, driver => driver.free_descriptors())
    }

    /// Writes a descriptor of the queue's table or ring as it is, for hostile tests.
    pub fn write_descriptor(&self, index: u16, descriptor: RawDescriptor) {
        either!(self, driver => driver.write_descriptor(index, descriptor));
    }
}

/// The fields of a split queue as they are, for hostile tests. On a packed one these panic.
impl DriverQueue {
    /// The available ring's flags.
    pub fn set_available_flags(&self, flags: u16) {
        self.split().set_available_flags(flags);
    }

    /// The available index as the device sees it.
    pub fn available_index(&self) -> u16 {
        self.split().available_index()
    }

    /// Sets the available index, in memory only.
    pub fn set_available_index(&self, index: u16) {
        self.split().set_available_index(index);
    }

    /// Sets the available ring's entry for a running index.
    pub fn set_available_entry(&self, index: u16, head: u16) {
        self.split().set_available_entry(index, head);
    }

    /// Makes a head available whatever it stands for: the next entry, and the index.
    pub fn publish_head(&mut self, head: u16) {
        self.split_mut().publish_head(head);
    }

    /// Sets the index after which an interrupt is wanted.
    pub fn set_used_event(&self, index: u16) {
        self.split().set_used_event(index);
    }

    /// The used ring's flags.
    pub fn used_flags(&self) -> u16 {
        self.split().used_flags()
    }

    /// Sets the used index, which only a device should.
    pub fn set_used_index(&self, index: u16) {
        self.split().set_used_index(index);
    }

    /// The used ring's entry for a running index: a head and how many bytes were written.
    pub fn used_entry(&self, index: u16) -> (u32, u32) {
        self.split().used_entry(index)
    }

    /// The index after which the device wants a notification.
    pub fn available_event(&self) -> u16 {
        self.split().available_event()
    }

    fn split(&self) -> &SplitDriver {
        match &self.format {
            Format::Split(driver) => driver,
            Format::Packed(_) => panic!("a packed queue has no such field"),
        }
    }

    fn split_mut(&mut self) -> &mut SplitDriver {
        match &mut self.format {
            Format::Split(driver) => driver,
            Format::Packed(_) => panic!("a packed queue has no such field"),
        }
    }
}

/// The fields of a packed queue as they are, for hostile tests. On a split one these panic.
impl DriverQueue {
    /// A descriptor of the ring.
    pub fn packed_descriptor(&self, index: u16) -> RawDescriptor {
        self.packed_driver().descriptor(index)
    }

    /// Sets the driver's event suppression structure: an index and, in bit 15, a wrap counter, and above them what is wanted (0 always, 1 never,
    /// 2 there).
    pub fn set_driver_event(&self, event: u32) {
        self.packed_driver().set_driver_event(event);
    }

    /// The driver's event suppression structure, likewise.
    pub fn driver_event(&self) -> u32 {
        self.packed_driver().driver_event()
    }

    /// The device's event suppression structure, likewise.
    pub fn device_event(&self) -> u32 {
        self.packed_driver().device_event()
    }

    fn packed_driver(&self) -> &PackedDriver {
        match &self.format {
            Format::Packed(driver) => driver,
            Format::Split(_) => panic!("a split queue has no such field"),
        }
    }
}
