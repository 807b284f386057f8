//! The two rings of a lean guest driver.
//!
//! Every receive descriptor and every transmit slot has its place in the tables for good, so that a packet costs a few stores and
//! no allocation. What the device sees is what Linux's `virtio_ring` would have written.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use guestmem::queue::QueueSetup;
use guestmem_driver::{Arena, DriverQueue, RawDescriptor};
use rustix::event::{EventfdFlags, eventfd};
use wire::vsock::{HEADER_LEN, Header, MAX_PAYLOAD_LEN};

/// Where the guest's memory begins, in its own addresses.
pub(super) const GUEST_BASE: u64 = 0x4000_0000;

/// Entries of each ring, as QEMU's device has them.
const RING_SIZE: u16 = 128;

/// Length of a page, in bytes.
const PAGE_LEN: usize = 4096;

/// Descriptors of the largest packet: the header and the pages of the payload.
const MAX_DESCRIPTORS: usize = 1 + MAX_PAYLOAD_LEN as usize / PAGE_LEN;

/// Memory for one packet to the device, in bytes: a page in whose end the header lies, and the payload.
const SLOT_LEN: usize = PAGE_LEN + MAX_PAYLOAD_LEN as usize;

/// Length of a descriptor, in bytes (virtio 1.2, section 2.7.5).
const DESCRIPTOR_LEN: usize = 16;

/// How packets to the device lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub enum TransmitLayout {
    /// A descriptor for the header and one for the payload: Linux until 6.16.
    #[default]
    Linear,
    /// A descriptor for the header and one for every page of the payload: Linux since 6.17.
    Pages,
}

/// What both rings need: the queue, the indices on this side, and the way to notify.
struct Side {
    queue: DriverQueue,
    kick: OwnedFd,
    event_index: bool,
    next_available: u16,
    published: u16,
    next_used: u16,
    kicks: u64,
}

impl Side {
    fn new(arena: &Arc<Arena>, event_index: bool, indirect: bool) -> std::io::Result<Side> {
        let arena = Arc::clone(arena);
        Ok(Side {
            queue: DriverQueue::new(arena, GUEST_BASE, RING_SIZE, event_index, indirect),
            kick: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            event_index,
            next_available: 0,
            published: 0,
            next_used: 0,
            kicks: 0,
        })
    }

    fn make_available(&mut self, head: u16) {
        self.queue.set_available_entry(self.next_available, head);
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Publishes what was made available, and kicks if the device wants to know.
    fn publish(&mut self) {
        let (old, new) = (self.published, self.next_available);
        if old == new {
            return;
        }
        self.queue.set_available_index(new);
        self.published = new;
        fence(Ordering::SeqCst);
        let wanted = match self.event_index {
            // virtio 1.2, section 2.7.7.2: the device's mark lies among what is new.
            true => {
                let event = self.queue.available_event();
                new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
            }
            false => self.queue.used_flags() & 1 == 0,
        };
        if wanted {
            self.kick();
        }
    }

    fn kick(&mut self) {
        self.kicks += 1;
        // A full counter is a notification, too.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.queue.used_index() == self.next_used {
            return None;
        }
        let (head, written) = self.queue.used_entry(self.next_used);
        self.next_used = self.next_used.wrapping_add(1);
        Some((head as u16, written))
    }

    fn has_used(&self) -> bool {
        self.queue.used_index() != self.next_used
    }

    fn disable_interrupts(&self) {
        match self.event_index {
            true => self.queue.set_used_event(self.next_used.wrapping_sub(1)),
            false => self.queue.set_available_flags(1),
        }
    }

    /// Returns whether something came back already.
    fn enable_interrupts(&self) -> bool {
        match self.event_index {
            true => self.queue.set_used_event(self.next_used),
            false => self.queue.set_available_flags(0),
        }
        fence(Ordering::SeqCst);
        self.has_used()
    }

    fn setup(&self) -> QueueSetup {
        self.queue.setup()
    }
}

/// The ring of packets to the guest.
pub(super) struct ReceiveRing {
    side: Side,
    arena: Arc<Arena>,
    buffer_len: u32,
    /// Where each buffer is in the arena.
    buffers: Vec<usize>,
    /// Last in, first out: what was read last is posted next, as the kernel's allocator does it.
    free_buffers: Vec<u32>,
    free_heads: Vec<u16>,
    /// By head: the buffer that was posted with it.
    posted: Vec<u32>,
}

/// A packet from the device, still in its buffer.
pub(super) struct Arrived {
    pub(super) buffer: u32,
    /// Header and payload, in bytes.
    pub(super) len: u32,
}

impl ReceiveRing {
    pub(super) fn new(
        arena: &Arc<Arena>,
        buffer_len: u32,
        event_index: bool,
    ) -> std::io::Result<ReceiveRing> {
        let mut ring = ReceiveRing {
            side: Side::new(arena, event_index, false)?,
            arena: Arc::clone(arena),
            buffer_len,
            buffers: Vec::new(),
            free_buffers: Vec::new(),
            free_heads: (0..RING_SIZE).rev().collect(),
            posted: vec![0; usize::from(RING_SIZE)],
        };
        ring.fill();
        ring.side
            .queue
            .set_available_index(ring.side.next_available);
        ring.side.published = ring.side.next_available;
        Ok(ring)
    }

    pub(super) fn setup(&self) -> QueueSetup {
        self.side.setup()
    }

    pub(super) fn kick_descriptor(&self) -> &OwnedFd {
        &self.side.kick
    }

    pub(super) fn kicks(&self) -> u64 {
        self.side.kicks
    }

    /// Posts buffers up to the ring's size.
    fn fill(&mut self) {
        while let Some(head) = self.free_heads.pop() {
            let buffer = self.free_buffers.pop().unwrap_or_else(|| {
                // The kernel's allocator has sizes that are powers of two.
                let room = (self.buffer_len as usize).next_power_of_two();
                self.buffers.push(self.arena.allocate(room, PAGE_LEN));
                self.buffers.len() as u32 - 1
            });
            self.posted[usize::from(head)] = buffer;
            self.side.queue.write_descriptor(
                head,
                RawDescriptor {
                    address: GUEST_BASE + self.buffers[buffer as usize] as u64,
                    len: self.buffer_len,
                    flags: RawDescriptor::WRITE,
                    next: 0,
                },
            );
            self.side.make_available(head);
        }
    }

    /// Linux's rule: the ring is filled when less than half of it is posted.
    pub(super) fn fill_if_low(&mut self) {
        if self.free_heads.len() > usize::from(RING_SIZE) / 2 {
            self.fill();
            self.side.publish();
        }
    }

    pub(super) fn take(&mut self) -> Option<Arrived> {
        let (head, len) = self.side.take_used()?;
        self.free_heads.push(head);
        Some(Arrived {
            buffer: self.posted[usize::from(head)],
            len,
        })
    }

    pub(super) fn has_arrived(&self) -> bool {
        self.side.has_used()
    }

    pub(super) fn disable_interrupts(&self) {
        self.side.disable_interrupts();
    }

    pub(super) fn enable_interrupts(&self) -> bool {
        self.side.enable_interrupts()
    }

    pub(super) fn header(&self, buffer: u32) -> Header {
        let mut bytes = [0; HEADER_LEN];
        self.arena.read(self.buffers[buffer as usize], &mut bytes);
        Header::from_bytes(&bytes)
    }

    /// Copies payload out, from `offset` bytes behind the header on.
    pub(super) fn copy_payload(&self, buffer: u32, offset: usize, into: &mut [u8]) {
        self.arena
            .read(self.buffers[buffer as usize] + HEADER_LEN + offset, into);
    }

    pub(super) fn release(&mut self, buffer: u32) {
        self.free_buffers.push(buffer);
    }
}

/// The ring of packets from the guest.
pub(super) struct TransmitRing {
    side: Side,
    arena: Arc<Arena>,
    layout: TransmitLayout,
    indirect: bool,
    /// Descriptors that each slot has in the ring's table: one with indirect descriptors.
    descriptors_each: u16,
    slots: Vec<Slot>,
    free_slots: Vec<u16>,
}

struct Slot {
    /// Where the packet's memory is in the arena.
    memory: usize,
    /// Where the indirect table is in the arena.
    table: usize,
}

impl TransmitRing {
    pub(super) fn new(
        arena: &Arc<Arena>,
        layout: TransmitLayout,
        event_index: bool,
        indirect: bool,
    ) -> std::io::Result<TransmitRing> {
        let descriptors_each = match (indirect, layout) {
            (true, _) => 1,
            (false, TransmitLayout::Linear) => 2,
            (false, TransmitLayout::Pages) => MAX_DESCRIPTORS as u16,
        };
        let count = RING_SIZE / descriptors_each;
        let slots = (0..count)
            .map(|_| Slot {
                memory: arena.allocate(SLOT_LEN, PAGE_LEN),
                table: arena.allocate(MAX_DESCRIPTORS * DESCRIPTOR_LEN, 16),
            })
            .collect();
        Ok(TransmitRing {
            side: Side::new(arena, event_index, indirect)?,
            arena: Arc::clone(arena),
            layout,
            indirect,
            descriptors_each,
            slots,
            free_slots: (0..count).rev().collect(),
        })
    }

    pub(super) fn setup(&self) -> QueueSetup {
        self.side.setup()
    }

    pub(super) fn kick_descriptor(&self) -> &OwnedFd {
        &self.side.kick
    }

    pub(super) fn kicks(&self) -> u64 {
        self.side.kicks
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free_slots.is_empty()
    }

    /// Puts a packet into the ring. Its payload is `len` bytes long, of which `payload` is written and the rest left as it is.
    ///
    /// # Panics
    /// If the ring is full.
    pub(super) fn push(&mut self, header: &Header, payload: &[u8], len: usize) {
        let index = self.free_slots.pop().expect("the ring has room");
        let slot = &self.slots[usize::from(index)];
        let data = slot.memory + PAGE_LEN;
        self.arena.write(data - HEADER_LEN, &header.to_bytes());
        self.arena.write(data, payload);
        let head = index * self.descriptors_each;
        let piece_len = match self.layout {
            TransmitLayout::Linear => MAX_PAYLOAD_LEN as usize,
            TransmitLayout::Pages => PAGE_LEN,
        };
        let count = 1 + len.div_ceil(piece_len);
        for position in 0..count {
            let (offset, part_len) = match position {
                0 => (data - HEADER_LEN, HEADER_LEN),
                _ => {
                    let start = (position - 1) * piece_len;
                    (data + start, piece_len.min(len - start))
                }
            };
            let first = if self.indirect { 0 } else { head };
            let last = position + 1 == count;
            let descriptor = RawDescriptor {
                address: GUEST_BASE + offset as u64,
                len: part_len as u32,
                flags: if last { 0 } else { RawDescriptor::NEXT },
                next: if last { 0 } else { first + position as u16 + 1 },
            };
            // One descriptor alone needs no table of its own.
            if self.indirect && count > 1 {
                let place = slot.table + position * DESCRIPTOR_LEN;
                self.arena.write(place, &descriptor.to_bytes());
            } else {
                self.side
                    .queue
                    .write_descriptor(head + position as u16, descriptor);
            }
        }
        if self.indirect && count > 1 {
            let table = RawDescriptor {
                address: GUEST_BASE + slot.table as u64,
                len: (count * DESCRIPTOR_LEN) as u32,
                flags: RawDescriptor::INDIRECT,
                next: 0,
            };
            self.side.queue.write_descriptor(head, table);
        }
        self.side.make_available(head);
    }

    pub(super) fn publish(&mut self) {
        self.side.publish();
    }

    pub(super) fn has_completed(&self) -> bool {
        self.side.has_used()
    }

    /// Linux's `virtio_transport_tx_work`: takes back what was sent, with interrupts off meanwhile.
    pub(super) fn reclaim(&mut self) {
        self.side.disable_interrupts();
        loop {
            while let Some((head, _)) = self.side.take_used() {
                self.free_slots.push(head / self.descriptors_each);
            }
            if !self.side.enable_interrupts() {
                return;
            }
        }
    }
}
