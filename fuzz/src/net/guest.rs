//! A guest of a network in user space: its VMM's handshake, and a scripted virtio-net driver.

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use guestmem::guest::Range;
use guestmem_driver::{Arena, DriverQueue};
use rustix::event::{EventfdFlags, eventfd};
use wire::ethernet::MacAddress;
use wire::net_header::{FLAG_NEEDS_CHECKSUM, GSO_NONE, NET_HEADER_LEN, NetHeader};

use super::House;
use crate::vmm::{
    NEED_REPLY, PROTOCOL_FEATURES, VERSION, address_payload, message, quads, region_payload,
    request, send_bytes, words,
};

/// Ring 0: frames to the guest.
pub(super) const RX: usize = 0;
/// Ring 1: frames from the guest.
pub(super) const TX: usize = 1;

/// Where the guest sees its memory.
pub(super) const BASE: u64 = 0x1_0000_0000;
/// In bytes. Only what is used takes up any.
const ARENA_BYTES: usize = 16 << 20;
/// Room for a frame that is sent, with gaps between its pieces, in bytes.
const SENT_BYTES: usize = 80 << 10;
/// What lies between two pieces, in bytes.
const GAP_BYTES: usize = 24;
/// The pattern where nothing may be written.
const UNTOUCHED: u8 = 0xee;

/// What a driver may accept beside what every device has: checksums and segmentation in both directions, buffers that merge.
pub(super) const OFFLOADS: u64 = 0x3b83 | 1 << 15 | 7 << 54;
/// Of these, what it takes unfinished.
const TAKES: u64 = 0x382 | 3 << 54;
/// Buffers that merge.
const MERGEABLE: u64 = 1 << 15;
/// Indirect descriptors, protocol features, virtio 1.
const ALWAYS: u64 = 1 << 28 | 1 << 30 | 1 << 32;
/// Event indices.
pub(super) const EVENT_INDEX: u64 = 1 << 29;

pub(super) struct Guest {
    pub(super) mac: MacAddress,
    pub(super) arena: Arc<Arena>,
    pub(super) queues: [DriverQueue; 2],
    features: u64,
    kicks: [OwnedFd; 2],
    calls: [OwnedFd; 2],
    vmm: UnixStream,
    /// Places for frames to send that the device does not have.
    free: Vec<usize>,
    /// How each buffer was cut that is posted, by its place.
    posted: HashMap<usize, Vec<Range>>,
}

impl Guest {
    /// Attaches to the port of this number. Its rings run when this returns; nothing is posted.
    pub(super) fn attach(house: &mut House, number: u8, ring_size: u16, features: u64) -> Guest {
        let arena = Arc::new(Arena::new(ARENA_BYTES).expect("an arena"));
        let event_index = features & EVENT_INDEX != 0;
        let queue = || DriverQueue::new(Arc::clone(&arena), BASE, ring_size, event_index, true);
        let event = || {
            let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
            eventfd(0, flags).expect("an eventfd")
        };
        let guest = Guest {
            mac: super::mac(number),
            queues: [queue(), queue()],
            features: features | ALWAYS,
            kicks: [event(), event()],
            calls: [event(), event()],
            vmm: house.connect_vmm(number),
            free: Vec::new(),
            posted: HashMap::new(),
            arena,
        };
        guest.say(request::SET_OWNER, Vec::new());
        guest.say(request::SET_FEATURES, quads(&[guest.features]));
        guest.say(request::SET_PROTOCOL_FEATURES, quads(&[PROTOCOL_FEATURES]));
        let region = guest.arena.region(BASE).expect("a descriptor");
        let table = [words(&[1, 0]), region_payload(&region)].concat();
        guest.hand_over(request::SET_MEM_TABLE, table, region.file.as_fd());
        for index in [RX, TX] {
            guest.start(index, 0);
        }
        guest.wait(house);
        guest
    }

    /// Closes the VMM's socket. The port takes the next VMM only then.
    pub(super) fn hang_up(&self) {
        let _ = self.vmm.shutdown(std::net::Shutdown::Both);
    }

    fn say(&self, number: u32, payload: Vec<u8>) {
        let bytes = message(number, VERSION, payload.len() as u32, &payload);
        // A device that has hung up is noticed where it matters.
        let _ = send_bytes(&self.vmm, &bytes, &[]);
    }

    fn hand_over(&self, number: u32, payload: Vec<u8>, file: std::os::fd::BorrowedFd<'_>) {
        let bytes = message(number, VERSION, payload.len() as u32, &payload);
        let _ = send_bytes(&self.vmm, &bytes, &[file]);
    }

    /// Starts a ring as if so many chains had been taken from it.
    pub(super) fn start(&self, index: usize, base: u16) {
        let (number, setup) = (index as u32, self.queues[index].setup());
        self.say(request::SET_VRING_NUM, words(&[number, setup.size.into()]));
        self.say(request::SET_VRING_ADDR, address_payload(number, &setup));
        self.say(request::SET_VRING_BASE, words(&[number, base.into()]));
        let payload = quads(&[index as u64]);
        self.hand_over(
            request::SET_VRING_CALL,
            payload.clone(),
            self.calls[index].as_fd(),
        );
        self.hand_over(request::SET_VRING_KICK, payload, self.kicks[index].as_fd());
        self.enable(index, true);
    }

    pub(super) fn enable(&self, index: usize, enabled: bool) {
        let payload = words(&[index as u32, enabled.into()]);
        self.say(request::SET_VRING_ENABLE, payload);
    }

    /// Stops a ring. Where it stopped is not asked.
    pub(super) fn stop(&self, index: usize) {
        self.say(request::GET_VRING_BASE, words(&[index as u32, 0]));
    }

    /// Waits until the device has done what was said, or hung up.
    pub(super) fn wait(&self, house: &mut House) {
        let config = [words(&[0, 8, 0]), vec![0; 8]].concat();
        let flags = VERSION | NEED_REPLY;
        let bytes = message(request::GET_CONFIG, flags, config.len() as u32, &config);
        let _ = send_bytes(&self.vmm, &bytes, &[]);
        let mut vmm = &self.vmm;
        let mut answers: Vec<u8> = Vec::new();
        house.until("the device answers", |_| {
            let mut bytes = [0; 256];
            match vmm.read(&mut bytes) {
                Ok(0) => return true,
                Ok(len) => answers.extend_from_slice(&bytes[..len]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return true,
            }
            has_answer(&answers)
        });
    }

    /// Puts header and frame into the ring, if there is room, cut after each of these lengths.
    pub(super) fn send(&mut self, header: NetHeader, frame: &[u8], cuts: &[usize]) -> bool {
        while let Some((place, _)) = self.queues[TX].take_used() {
            if place != u64::MAX {
                self.free.push(place as usize);
            }
        }
        if self.queues[TX].free_descriptors() == 0 {
            return false;
        }
        let place = self.free.pop();
        let place = place.unwrap_or_else(|| self.arena.allocate(SENT_BYTES, 64));
        let bytes = [&header.encode()[..], frame].concat();
        let ranges = cut(place, bytes.len(), cuts);
        let mut rest = &bytes[..];
        for range in &ranges {
            let (piece, behind) = rest.split_at(range.len as usize);
            self.arena.write((range.address - BASE) as usize, piece);
            rest = behind;
        }
        let added = self.queues[TX].add(&ranges, &[], place as u64);
        assert!(
            added.is_ok(),
            "tables are indirect: one descriptor is enough"
        );
        self.show(TX);
        true
    }

    /// Sends these ranges, whatever they are.
    pub(super) fn send_ranges(&mut self, ranges: &[Range]) {
        if self.queues[TX].add(ranges, &[], u64::MAX).is_ok() {
            self.show(TX);
        }
    }

    /// Posts a buffer, cut after each of these lengths, if there is room.
    pub(super) fn post(&mut self, len: usize, cuts: &[usize]) -> bool {
        if self.queues[RX].free_descriptors() == 0 {
            return false;
        }
        let place = self.arena.allocate(len + GAP_BYTES * (cuts.len() + 2), 64);
        self.post_at(place, cut(place, len, cuts));
        true
    }

    fn post_at(&mut self, place: usize, ranges: Vec<Range>) {
        self.arena
            .write(place, &vec![UNTOUCHED; span(place, &ranges)]);
        let added = self.queues[RX].add(&[], &ranges, place as u64);
        assert!(
            added.is_ok(),
            "tables are indirect: one descriptor is enough"
        );
        self.posted.insert(place, ranges);
        self.show(RX);
    }

    fn show(&mut self, index: usize) {
        if self.queues[index].kick_needed() {
            self.notify(index);
        }
    }

    pub(super) fn notify(&self, index: usize) {
        // A full counter is a notification, too.
        let _ = rustix::io::write(&self.kicks[index], &1_u64.to_ne_bytes());
    }

    /// The next frame. Its header is one that this driver has agreed to, and nothing was written but the frame.
    pub(super) fn receive(&mut self) -> Option<(NetHeader, Vec<u8>)> {
        let mut bytes = self.take_buffer()?;
        let header = bytes.first_chunk::<NET_HEADER_LEN>();
        let header = NetHeader::decode(header.expect("a header in the first buffer"));
        let merges = self.features & MERGEABLE != 0;
        assert!(
            header.buffers == 1 || (merges && header.buffers > 1),
            "{header:?}"
        );
        for _ in 1..header.buffers {
            let next = self.take_buffer();
            bytes.extend(next.expect("as many buffers as the header says"));
        }
        let frame = bytes.split_off(NET_HEADER_LEN);
        assert!(frame.len() >= 14, "{} bytes are no frame", frame.len());
        if self.features & TAKES == 0 {
            let plain = NetHeader {
                buffers: header.buffers,
                ..NetHeader::default()
            };
            assert_eq!(header, plain, "it takes nothing unfinished");
        }
        if header.flags & FLAG_NEEDS_CHECKSUM != 0 {
            let place = usize::from(header.checksum_start) + usize::from(header.checksum_offset);
            assert!(place + 2 <= frame.len(), "{header:?} of {}", frame.len());
        }
        if header.gso_type != GSO_NONE {
            assert!(header.gso_size > 0 && usize::from(header.header_len) < frame.len());
        }
        Some((header, frame))
    }

    fn take_buffer(&mut self) -> Option<Vec<u8>> {
        let (place, written) = self.queues[RX].take_used()?;
        let (place, mut left) = (place as usize, written as usize);
        let ranges = self.posted.remove(&place).expect("it was posted");
        let mut all = vec![0; span(place, &ranges)];
        self.arena.read(place, &mut all);
        let mut bytes = Vec::new();
        for range in &ranges {
            let start = (range.address - BASE) as usize - place;
            let used = left.min(range.len as usize);
            let piece = &mut all[start..start + used];
            bytes.extend_from_slice(piece);
            piece.fill(UNTOUCHED);
            left -= used;
        }
        assert_eq!(left, 0, "{written} bytes are more than there was room for");
        let untouched = all.iter().all(|byte| *byte == UNTOUCHED);
        assert!(untouched, "more was written than {written} bytes");
        self.post_at(place, ranges);
        Some(bytes)
    }
}

/// Whether the last of the messages is the answer to the question for the configuration.
fn has_answer(mut bytes: &[u8]) -> bool {
    while let Some((header, rest)) = bytes.split_first_chunk::<12>() {
        let word = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        if rest.len() < word(8) as usize {
            return false;
        }
        if word(0) == request::GET_CONFIG {
            return true;
        }
        bytes = &rest[word(8) as usize..];
    }
    false
}

fn span(place: usize, ranges: &[Range]) -> usize {
    let end = |range: &Range| (range.address - BASE) as usize + range.len as usize;
    ranges.last().map_or(0, end) + GAP_BYTES - place
}

/// Ranges of memory with gaps between them, cut after each of these lengths; the last one takes the rest.
fn cut(place: usize, len: usize, cuts: &[usize]) -> Vec<Range> {
    let mut left = len;
    let mut address = BASE + place as u64;
    let mut ranges = Vec::new();
    for piece in cuts.iter().copied().chain([usize::MAX]) {
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
