//! A frame's beginning, copied out of the guest's memory.

use l2::bridge::Tagging;
use wire::ethernet::{Head, Layer3, SNAPSHOT_LEN, TAG_LEN, TAG_OFFSET, Transport};
use wire::net_header::{NET_HEADER_LEN, Offload};

/// Room for a virtio header, the frame's first bytes, and a tag more.
const BUFFER_LEN: usize = NET_HEADER_LEN + SNAPSHOT_LEN + TAG_LEN;

/// What is known of a frame.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    /// The virtio header, and behind it the frame's first bytes.
    buffer: [u8; BUFFER_LEN],
    /// How many of the frame's bytes are in the buffer.
    head_len: usize,
    rest_from: usize,
    /// Length of the frame in bytes.
    pub(super) len: usize,
    /// How many descriptors its sender has put it into; none if it is in memory of our own.
    pub(super) descriptors: usize,
    /// What its sender has left to be done.
    offload: Offload,
}

impl Default for Frame {
    fn default() -> Self {
        Frame {
            buffer: [0; BUFFER_LEN],
            head_len: 0,
            rest_from: 0,
            len: 0,
            descriptors: 0,
            offload: Offload::default(),
        }
    }
}

impl Frame {
    /// Where a frame of `len` bytes with its virtio header is to be copied to, as far as it fits.
    pub(super) fn receive(&mut self, len: usize) -> &mut [u8] {
        self.len = len;
        self.head_len = len.min(SNAPSHOT_LEN);
        self.rest_from = self.head_len;
        self.offload = Offload::default();
        &mut self.buffer[..NET_HEADER_LEN + self.head_len]
    }

    /// Takes the beginning of a frame without a virtio header, for which nothing is left to be done.
    pub(super) fn receive_whole(&mut self, bytes: &[u8]) {
        self.descriptors = 0;
        let room = self.receive(bytes.len());
        let (_, head) = room.split_at_mut(NET_HEADER_LEN);
        head.copy_from_slice(&bytes[..head.len()]);
        self.set_offload(Offload::NONE);
    }

    /// The virtio header as the guest has written it.
    pub(super) fn header(&self) -> &[u8; NET_HEADER_LEN] {
        self.buffer.first_chunk().expect("the buffer is longer")
    }

    /// What its sender has left to be done.
    pub(super) fn offload(&self) -> Offload {
        self.offload
    }

    /// The frame's first bytes.
    pub(super) fn head(&self) -> &[u8] {
        &self.buffer[NET_HEADER_LEN..NET_HEADER_LEN + self.head_len]
    }

    /// A number for the flow that the frame is of, the same in both directions.
    pub(super) fn flow(&self) -> u32 {
        let head = self.head();
        let Some(ethernet) = Head::parse(head) else {
            return 0;
        };
        let ports = |transport: Transport| match transport {
            Transport::Tcp {
                source_port,
                destination_port,
                ..
            }
            | Transport::Udp {
                source_port,
                destination_port,
            } => u32::from(source_port ^ destination_port),
            _ => 0,
        };
        let number = match ethernet.layer3(head, self.len) {
            Layer3::Ipv4(ip) => {
                ip.source.to_bits() ^ ip.destination.to_bits() ^ ports(ip.transport)
            }
            Layer3::Ipv6(ip) => {
                let both = ip.source.to_bits() ^ ip.destination.to_bits();
                (both ^ both >> 32 ^ both >> 64 ^ both >> 96) as u32 ^ ports(ip.transport)
            }
            _ => (ethernet.source.to_u64() ^ ethernet.destination.to_u64()) as u32,
        };
        // Multiplied, so that each bit has a say in the upper half, which is folded into the lower (Knuth, volume 3, section 6.4).
        let mixed = number.wrapping_mul(0x9e37_79b1);
        mixed ^ mixed >> 16
    }

    /// From which byte of the sender's frame on the rest has not been copied yet.
    pub(super) fn rest_from(&self) -> usize {
        self.rest_from
    }

    /// How many bytes that is.
    pub(super) fn rest_len(&self) -> usize {
        self.len - self.head_len
    }

    /// Says what is left to be done for the frame, in a virtio header that is made anew: nothing that the sender wrote there is passed on
    /// unchecked.
    ///
    /// This is done when the frame is judged, and not just before it is copied: a copy that loads in one piece what has been stored in several waits until
    /// all stores before have left the processor, which go to memory that another processor has.
    #[inline]
    pub(super) fn set_offload(&mut self, offload: Offload) {
        self.buffer[..NET_HEADER_LEN].copy_from_slice(&offload.header(1).encode());
        self.offload = offload;
    }

    /// The beginning as it is to be written, with its virtio header.
    pub(super) fn front(&mut self) -> &mut [u8] {
        &mut self.buffer[..NET_HEADER_LEN + self.head_len]
    }

    /// The frame as a destination gets it that wants tags otherwise.
    pub(super) fn retagged(&self, tagging: Tagging) -> Frame {
        let mut frame = self.clone();
        let head = &mut frame.buffer[NET_HEADER_LEN..];
        let shift = match tagging {
            Tagging::Keep => 0,
            Tagging::Strip => {
                head.copy_within(TAG_OFFSET + TAG_LEN..self.head_len, TAG_OFFSET);
                -(TAG_LEN as i16)
            }
            Tagging::Insert(control) => {
                head.copy_within(TAG_OFFSET..self.head_len, TAG_OFFSET + TAG_LEN);
                head[TAG_OFFSET..TAG_OFFSET + TAG_LEN].copy_from_slice(&control.to_bytes());
                TAG_LEN as i16
            }
            Tagging::Replace(control) => {
                head[TAG_OFFSET..TAG_OFFSET + TAG_LEN].copy_from_slice(&control.to_bytes());
                0
            }
        };
        frame.head_len = frame.head_len.saturating_add_signed(shift.into());
        frame.len = frame.len.saturating_add_signed(shift.into());
        frame.set_offload(self.offload.shifted(shift));
        frame
    }
}
