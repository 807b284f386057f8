//! The guest's rings, with the buffers in them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use guestmem::guest::Range;
use guestmem_driver::{Arena, DriverQueue};
use rustix::event::{EventfdFlags, eventfd};
use wire::vsock::{HEADER_LEN, Header};

use super::layout::SLOT_LEN;
use super::{GUEST_BASE, GuestConfig, Layout, VirtualGuest};
use crate::frontend::{EVENT, FEATURE_EVENT_INDEX, FEATURE_INDIRECT, RX, TX};

/// Buffers for events, and the length of each in bytes, as in Linux.
const EVENT_BUFFERS: usize = 8;
const EVENT_LEN: u32 = 4;

/// The token of a chain that has no slot.
pub(super) const NO_SLOT: u64 = u64::MAX;

pub(super) struct Rings {
    pub(super) queues: [DriverQueue; 3],
    pub(super) kicks: [OwnedFd; 3],
    pub(super) calls: [OwnedFd; 3],
    /// By token: where each receive buffer is in the arena.
    buffers: Vec<usize>,
    buffer_lens: &'static [u32],
    /// Where the event buffers are in the arena; none without an event ring.
    event_buffers: Vec<usize>,
    slots: Vec<usize>,
    /// Slots for packets, free to be used.
    free_slots: Vec<usize>,
}

impl Rings {
    pub(super) fn new(arena: &Arc<Arena>, config: &GuestConfig) -> io::Result<Rings> {
        let queues = std::array::from_fn(|_| queue(arena, config));
        let buffer_lens = config.receive_layout.lens();
        let stride = buffer_lens.iter().sum::<u32>() as usize;
        let entries = usize::from(config.ring_size);
        let in_ring = match config.has(FEATURE_INDIRECT) {
            true => entries,
            false => entries / buffer_lens.len(),
        };
        let event = |count| eventfd(count, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let slots: Vec<usize> = (0..entries)
            .map(|_| arena.allocate(SLOT_LEN, 4096))
            .collect();
        Ok(Rings {
            queues,
            // As QEMU makes them: signalled once.
            kicks: [event(1)?, event(1)?, event(1)?],
            calls: [event(0)?, event(0)?, event(0)?],
            buffers: (0..in_ring).map(|_| arena.allocate(stride, 64)).collect(),
            buffer_lens,
            event_buffers: match config.event_ring {
                true => (0..EVENT_BUFFERS.min(entries))
                    .map(|_| arena.allocate(EVENT_LEN as usize, 8))
                    .collect(),
                false => Vec::new(),
            },
            free_slots: slots.clone(),
            slots,
        })
    }

    /// Rings as a driver that has just started makes them: empty, from index zero on. The buffers are the old ones.
    pub(super) fn renew(&mut self, arena: &Arc<Arena>, config: &GuestConfig) {
        self.queues = std::array::from_fn(|_| queue(arena, config));
        self.free_slots.clone_from(&self.slots);
    }

    /// Packets that the device has and has not given back.
    pub(super) fn slots_in_use(&self) -> usize {
        self.slots.len() - self.free_slots.len()
    }

    /// Posts every buffer for packets and events.
    pub(super) fn fill(&mut self) {
        for token in 0..self.event_buffers.len() {
            self.post_event(token);
        }
        for token in 0..self.buffers.len() {
            self.post(token);
        }
    }

    /// Posts one receive buffer.
    pub(super) fn post(&mut self, token: usize) {
        let mut address = GUEST_BASE + self.buffers[token] as u64;
        let ranges: Vec<Range> = self
            .buffer_lens
            .iter()
            .map(|len| {
                let range = Range { address, len: *len };
                address += u64::from(*len);
                range
            })
            .collect();
        self.queues[RX]
            .add(&[], &ranges, token as u64)
            .expect("there are no more buffers than the ring has room for");
    }

    fn post_event(&mut self, token: usize) {
        let range = Range {
            address: GUEST_BASE + self.event_buffers[token] as u64,
            len: EVENT_LEN,
        };
        self.queues[EVENT]
            .add(&[], &[range], token as u64)
            .expect("there are no more buffers than the ring has room for");
    }

    /// The next event from the device, if there is one (virtio 1.2, section 5.10.6.7).
    pub(super) fn take_event(&mut self, arena: &Arena) -> Option<u32> {
        let (token, _) = self.queues[EVENT].take_used()?;
        let mut bytes = [0; 4];
        arena.read(self.event_buffers[token as usize], &mut bytes);
        self.post_event(token as usize);
        Some(u32::from_le_bytes(bytes))
    }

    /// The packet in a receive buffer.
    pub(super) fn read(&self, arena: &Arena, token: usize, written: usize) -> (Header, Vec<u8>) {
        let offset = self.buffers[token];
        let mut header = [0; HEADER_LEN];
        arena.read(offset, &mut header);
        let mut payload = vec![0; written.saturating_sub(HEADER_LEN)];
        arena.read(offset + HEADER_LEN, &mut payload);
        (Header::from_bytes(&header), payload)
    }

    /// The room of a receive buffer, in bytes.
    pub(super) fn buffer_len(&self) -> usize {
        self.buffer_lens.iter().sum::<u32>() as usize
    }

    /// Puts a packet into the transmit ring, if there is room.
    pub(super) fn transmit(
        &mut self,
        arena: &Arena,
        layout: Layout,
        header: &Header,
        payload: &[u8],
    ) -> bool {
        let Some(slot) = self.free_slots.last().copied() else {
            return false;
        };
        let ranges = layout.write(arena, slot, &header.to_bytes(), payload);
        if self.queues[TX].add(&ranges, &[], slot as u64).is_err() {
            return false;
        }
        self.free_slots.pop();
        true
    }

    /// Takes back what the device has sent.
    pub(super) fn reclaim(&mut self) {
        while let Some((slot, _)) = self.queues[TX].take_used() {
            if slot != NO_SLOT {
                self.free_slots.push(slot as usize);
            }
        }
    }
}

fn queue(arena: &Arc<Arena>, config: &GuestConfig) -> DriverQueue {
    let mut queue = DriverQueue::new(
        Arc::clone(arena),
        GUEST_BASE,
        config.ring_size,
        config.has(FEATURE_EVENT_INDEX),
        config.has(FEATURE_INDIRECT),
    );
    queue.start_at(config.first_index);
    queue
}

impl VirtualGuest {
    /// Publishes what was added to a ring, and notifies the device if it wants to know.
    pub(super) fn kick(&mut self, index: usize) {
        if self.rings.queues[index].kick_needed() {
            self.notify(index);
        }
    }

    /// Notifies the device, whether it wants to know or not.
    pub fn notify(&mut self, index: usize) {
        self.counts.kicks += 1;
        // A full counter is a notification, too.
        let _ = rustix::io::write(&self.rings.kicks[index], &1_u64.to_ne_bytes());
    }

    /// Packets that the device has not given back.
    pub fn packets_in_ring(&self) -> usize {
        self.rings.slots_in_use()
    }

    /// Packets that have found no room in the transmit ring yet.
    pub fn packets_queued(&self) -> usize {
        self.queued.len()
    }
}
