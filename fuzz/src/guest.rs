//! A guest in user space: its VMM's handshake, and a scripted virtio-vsock driver.

use std::collections::VecDeque;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use guestmem::guest::Range;
use guestmem_driver::{Arena, DriverQueue};
use rustix::event::{EventfdFlags, eventfd};
use wire::vsock::{HEADER_LEN, Header};

use crate::house::House;
use crate::vmm::{
    FEATURES, NEED_REPLY, PROTOCOL_FEATURES, VERSION, address_payload, message, quads,
    region_payload, request, send_bytes, words,
};

/// Ring 0: packets to the guest.
pub(crate) const RX: usize = 0;
/// Ring 1: packets from the guest.
pub(crate) const TX: usize = 1;

/// Where the guest sees its memory.
pub(crate) const BASE: u64 = 0x1_0000_0000;
/// In bytes: rings, tables, and slots for packets.
const ARENA_BYTES: usize = 2 << 20;
/// Where the second region begins, in bytes.
pub(crate) const BORDER: usize = ARENA_BYTES / 2;
/// The most bytes that one packet has, header included.
pub(crate) const PACKET_BYTES: usize = 20 * 1024;
/// What lies between two pieces of a packet, in bytes.
const GAP_BYTES: usize = 24;
/// The most pieces of a packet.
pub(crate) const PIECES: usize = 16;
/// Room for one packet with its gaps, in bytes.
const SLOT_BYTES: usize = PACKET_BYTES + GAP_BYTES * (PIECES + 1);
/// The pattern where nothing may be written.
const UNTOUCHED: u8 = 0xee;
/// Entries of each ring, and slots for each.
pub(crate) const RING_SIZE: u16 = 32;

pub(crate) struct Guest {
    pub(crate) cid: u32,
    pub(crate) arena: Arc<Arena>,
    pub(crate) queues: [DriverQueue; 2],
    kicks: [OwnedFd; 2],
    calls: [OwnedFd; 2],
    pub(crate) vmm: UnixStream,
    /// By ring: slots that the device does not have.
    free: [Vec<usize>; 2],
    /// The buffers posted, by token: the slot and how it was cut.
    posted: Vec<Option<(usize, Vec<Range>)>>,
    /// Packets received.
    inbox: VecDeque<(Header, Vec<u8>)>,
}

impl Guest {
    /// Attaches to the line of this name. Its rings run when this returns.
    pub(crate) fn attach(house: &mut House, name: &str, cid: u32) -> Guest {
        let arena = Arc::new(Arena::new(ARENA_BYTES).expect("an arena"));
        let slots = || {
            (0..RING_SIZE)
                .map(|_| arena.allocate(SLOT_BYTES, 64))
                .collect()
        };
        let free = [slots(), slots()];
        let queue = || DriverQueue::new(Arc::clone(&arena), BASE, RING_SIZE, true, true);
        let event = || {
            let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
            eventfd(0, flags).expect("an eventfd")
        };
        let mut guest = Guest {
            cid,
            queues: [queue(), queue()],
            kicks: [event(), event()],
            calls: [event(), event()],
            vmm: house.connect_vmm(name),
            free,
            posted: vec![None; usize::from(RING_SIZE)],
            inbox: VecDeque::new(),
            arena,
        };
        guest.handshake(house);
        house.until("the guest's driver runs", |house| {
            house.line(name).report.up
        });
        guest
    }

    fn handshake(&mut self, house: &mut House) {
        use request::*;
        let plain =
            |number, payload: Vec<u8>| message(number, VERSION, payload.len() as u32, &payload);
        let send = |bytes: Vec<u8>| {
            let sent = send_bytes(&self.vmm, &bytes, &[]).expect("the socket has room");
            assert_eq!(sent, bytes.len());
        };
        send(plain(SET_OWNER, Vec::new()));
        send(plain(GET_FEATURES, Vec::new()));
        send(plain(SET_FEATURES, quads(&[FEATURES])));
        send(plain(GET_PROTOCOL_FEATURES, Vec::new()));
        send(plain(SET_PROTOCOL_FEATURES, quads(&[PROTOCOL_FEATURES])));
        // Two regions that touch, with the border inside a slot for a packet to send: some packets lie across.
        let parts = [0, BORDER].map(|offset| {
            let part = self.arena.part(BASE + offset as u64, offset, BORDER);
            part.expect("a descriptor")
        });
        let mut table = words(&[parts.len() as u32, 0]);
        parts
            .iter()
            .for_each(|part| table.extend(region_payload(part)));
        let table = plain(SET_MEM_TABLE, table);
        let files = [parts[0].file.as_fd(), parts[1].file.as_fd()];
        send_bytes(&self.vmm, &table, &files).expect("the socket has room");
        for index in [RX, TX] {
            let number = index as u32;
            let setup = self.queues[index].setup();
            send(plain(SET_VRING_NUM, words(&[number, setup.size.into()])));
            send(plain(SET_VRING_ADDR, address_payload(number, &setup)));
            send(plain(SET_VRING_BASE, words(&[number, 0])));
            for (number, descriptor) in [
                (SET_VRING_CALL, &self.calls[index]),
                (SET_VRING_KICK, &self.kicks[index]),
            ] {
                let bytes = plain(number, quads(&[index as u64]));
                send_bytes(&self.vmm, &bytes, &[descriptor.as_fd()]).expect("the socket has room");
            }
            send(plain(SET_VRING_ENABLE, words(&[number, 1])));
        }
        // The answer to this one says that all of the above has been done. Those before it are two of 8 bytes.
        let config = [words(&[0, 8, 0]), vec![0; 8]].concat();
        send(message(
            GET_CONFIG,
            VERSION | NEED_REPLY,
            config.len() as u32,
            &config,
        ));
        let expected = 2 * (12 + 8) + 12 + config.len();
        let mut answers = Vec::new();
        let mut vmm = &self.vmm;
        house.until("the handshake ends", |_| {
            let mut bytes = [0; 256];
            match vmm.read(&mut bytes) {
                Ok(0) => panic!("the device hung up on an honest VMM"),
                Ok(len) => answers.extend_from_slice(&bytes[..len]),
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            answers.len() >= expected
        });
        let cid = &answers[expected - 8..];
        assert_eq!(cid, u64::from(self.cid).to_le_bytes());
    }

    /// Whether the transmit ring has room for a packet cut into at most `pieces`.
    pub(crate) fn can_send(&mut self) -> bool {
        self.reclaim();
        !self.free[TX].is_empty() && self.queues[TX].free_descriptors() > 0
    }

    /// Puts a packet into the ring, if there is room, cut after each of these lengths in bytes.
    pub(crate) fn send(&mut self, header: &Header, payload: &[u8], cuts: &[usize]) -> bool {
        if !self.can_send() || HEADER_LEN + payload.len() > PACKET_BYTES {
            return false;
        }
        let Some(slot) = self.free[TX].pop() else {
            return false;
        };
        let bytes = [&header.to_bytes()[..], payload].concat();
        let ranges = cut(slot, bytes.len(), cuts);
        let mut rest = &bytes[..];
        for range in &ranges {
            let (piece, after) = rest.split_at(range.len as usize);
            self.arena.write((range.address - BASE) as usize, piece);
            rest = after;
        }
        let added = self.queues[TX].add(&ranges, &[], slot as u64);
        assert!(
            added.is_ok(),
            "tables are indirect: one descriptor is enough"
        );
        if self.queues[TX].kick_needed() {
            self.notify(TX);
        }
        true
    }

    /// Posts a buffer of `len` bytes, cut after each of these lengths.
    pub(crate) fn post(&mut self, len: usize, cuts: &[usize]) -> bool {
        let token = self.posted.iter().position(Option::is_none);
        let (Some(token), true) = (token, self.queues[RX].free_descriptors() > 0) else {
            return false;
        };
        let Some(slot) = self.free[RX].pop() else {
            return false;
        };
        let ranges = cut(slot, len.min(PACKET_BYTES), cuts);
        // What was there before must not look as if it had arrived.
        self.arena
            .write(slot, &[UNTOUCHED; SLOT_BYTES][..span(slot, &ranges)]);
        let added = self.queues[RX].add(&[], &ranges, token as u64);
        assert!(
            added.is_ok(),
            "tables are indirect: one descriptor is enough"
        );
        self.posted[token] = Some((slot, ranges));
        if self.queues[RX].kick_needed() {
            self.notify(RX);
        }
        true
    }

    /// Sends a packet whose bytes lie in these ranges, whatever they are.
    pub(crate) fn send_ranges(&mut self, ranges: &[Range]) {
        // No slot belongs to it, so it must not come back as one.
        let added = self.queues[TX].add(ranges, &[], u64::MAX);
        assert!(added.is_ok(), "the ring has room");
        if self.queues[TX].kick_needed() {
            self.notify(TX);
        }
    }

    pub(crate) fn notify(&self, index: usize) {
        // A full counter is a notification, too.
        let _ = rustix::io::write(&self.kicks[index], &1_u64.to_ne_bytes());
    }

    /// The next packet from the device.
    pub(crate) fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        while let Some((token, written)) = self.queues[RX].take_used() {
            let buffer = self.posted.get_mut(token as usize).and_then(Option::take);
            let (slot, ranges) = buffer.expect("a buffer that was posted");
            let room: u32 = ranges.iter().map(|range| range.len).sum();
            assert!(
                (HEADER_LEN as u32..=room).contains(&written),
                "{written} bytes in a buffer of {room}"
            );
            let mut bytes = self.read_pieces(slot, &ranges);
            let behind = &bytes[written as usize..];
            assert!(
                behind == &[UNTOUCHED; SLOT_BYTES][..behind.len()],
                "the device wrote more than it said"
            );
            bytes.truncate(written as usize);
            let mut header = [0; HEADER_LEN];
            header.copy_from_slice(&bytes[..HEADER_LEN]);
            let header = Header::from_bytes(&header);
            assert_eq!(header.len as usize, bytes.len() - HEADER_LEN, "{header:?}");
            assert_eq!(header.dst_cid, u64::from(self.cid), "{header:?}");
            self.inbox.push_back((header, bytes.split_off(HEADER_LEN)));
            self.free[RX].push(slot);
        }
        self.inbox.pop_front()
    }

    /// What is in a buffer. Between and behind its pieces nothing has changed.
    fn read_pieces(&self, slot: usize, ranges: &[Range]) -> Vec<u8> {
        let mut all = vec![0; span(slot, ranges)];
        self.arena.read(slot, &mut all);
        let mut bytes = Vec::with_capacity(all.len());
        for range in ranges {
            let start = (range.address - BASE) as usize - slot;
            let piece = &mut all[start..start + range.len as usize];
            bytes.extend_from_slice(piece);
            piece.fill(UNTOUCHED);
        }
        assert!(
            all == [UNTOUCHED; SLOT_BYTES][..all.len()],
            "the device wrote outside of the buffer"
        );
        bytes
    }

    fn reclaim(&mut self) {
        while let Some((slot, _)) = self.queues[TX].take_used() {
            if slot != u64::MAX {
                self.free[TX].push(slot as usize);
            }
        }
    }
}

/// How many bytes of a slot these pieces take up, with the gap behind the last.
fn span(slot: usize, ranges: &[Range]) -> usize {
    let end = |range: &Range| (range.address - BASE) as usize + range.len as usize;
    ranges.last().map_or(0, end) + GAP_BYTES - slot
}

/// Ranges of a slot with gaps between them, cut after each of these lengths; the last one takes the rest. Empty ones stay.
fn cut(slot: usize, len: usize, cuts: &[usize]) -> Vec<Range> {
    let mut left = len;
    let mut address = BASE + slot as u64;
    let mut ranges = Vec::new();
    for piece in cuts.iter().take(PIECES - 1).copied().chain([usize::MAX]) {
        let piece = piece.min(left);
        ranges.push(Range {
            address,
            len: piece as u32,
        });
        address += (piece + GAP_BYTES) as u64;
        left -= piece;
        if left == 0 {
            break;
        }
    }
    ranges
}
