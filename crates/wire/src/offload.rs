//! Checksums and segmentation in software, for receivers that do not take frames unfinished.
//!
//! Both work on a private copy of a whole frame. [`segment`] needs no second one: a segment's headers are written over the payload before
//! it, which was handed out already, so that each segment lies there in one piece.

use core::ops::ControlFlow;

use thiserror::Error;

use crate::checksum::{fold, length_sum, sum_of};
use crate::ethernet::{Ipv6, Transport};
use crate::net_header::{
    Checksum, MAX_SEGMENT_HEADER_LEN, MAX_SEGMENTS, Offload, Packet, SegmentKind, Segmentation,
};

#[cfg(test)]
mod tests;

/// A frame that does not fit the offload that was checked for it: it is another one, or was changed in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the frame is not the one that its offload was checked with")]
pub struct WrongFrame;

const FIN: u8 = 0x01;
const PUSH: u8 = 0x08;
const CONGESTION_ANSWERED: u8 = 0x80;

/// Completes a checksum of which the sum of the pseudo-header stands in its place.
pub fn complete_checksum(frame: &mut [u8], checksum: Checksum) -> Result<(), WrongFrame> {
    let start = usize::from(checksum.start);
    let place = start + usize::from(checksum.offset);
    if place + 2 > frame.len() {
        return Err(WrongFrame);
    }
    let checksum = not_zero(!fold(sum_of(&frame[start..])));
    frame[place..place + 2].copy_from_slice(&checksum.to_ne_bytes());
    Ok(())
}

/// Cuts a frame into segments with complete headers and checksums, hands each to `each` in their order until that wants no more, and says how
/// many that were. The frame is used up.
///
/// All fields that have to differ do: lengths, IPv4 identification and checksum, TCP sequence numbers; FIN and PSH are in the last segment
/// only, CWR in the first only. Checksums continue from the sender's sum of the pseudo-header, as in [`complete_checksum`].
pub fn segment(
    frame: &mut [u8],
    offload: &Offload,
    mut each: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> Result<usize, WrongFrame> {
    let plan = Plan::new(frame, offload).ok_or(WrongFrame)?;
    let mut headers = [0; MAX_SEGMENT_HEADER_LEN];
    let headers = &mut headers[..plan.header_len];
    headers.copy_from_slice(&frame[..plan.header_len]);
    for index in 0..plan.count {
        let from = index * plan.size;
        let to = (from + plan.header_len + plan.size).min(frame.len());
        let piece = &mut frame[from..to];
        piece[..plan.header_len].copy_from_slice(headers);
        plan.finish(piece, index);
        if each(piece).is_break() {
            return Ok(index + 1);
        }
    }
    Ok(plan.count)
}

struct Plan {
    packet: Packet,
    is_tcp: bool,
    header_len: usize,
    /// Payload of each segment but the last, in bytes.
    size: usize,
    count: usize,
    /// What follows IP in the whole frame, in bytes: it is part of the sum that the sender has begun.
    whole_len: usize,
}

impl Plan {
    /// Finds in the frame what its offload says, once more: an offload and a frame that do not belong together must not
    /// write anywhere.
    fn new(frame: &[u8], offload: &Offload) -> Option<Plan> {
        let Segmentation {
            kind,
            size,
            header_len,
            ..
        } = offload.segmentation?;
        let packet = Packet::parse(frame, frame.len())?;
        let is_tcp = matches!(kind, SegmentKind::Tcp4 | SegmentKind::Tcp6);
        let is_ipv6 = matches!(kind, SegmentKind::Tcp6 | SegmentKind::Udp6);
        let layer4_len = match packet.transport {
            Transport::Tcp { header_len, .. } if is_tcp => header_len,
            Transport::Udp { .. } if !is_tcp => 8,
            _ => return None,
        };
        let (size, header_len) = (usize::from(size), usize::from(header_len));
        let payload_len = frame.len().checked_sub(header_len)?;
        let fits = packet.is_ipv6 == is_ipv6
            && packet.end == frame.len()
            && packet.layer4 + layer4_len == header_len
            && header_len <= MAX_SEGMENT_HEADER_LEN;
        if !fits || size == 0 || payload_len == 0 || payload_len.div_ceil(size) > MAX_SEGMENTS {
            return None;
        }
        Some(Plan {
            is_tcp,
            header_len,
            size,
            count: payload_len.div_ceil(size),
            whole_len: frame.len() - packet.layer4,
            packet,
        })
    }

    /// Writes what differs between the segments' headers.
    fn finish(&self, piece: &mut [u8], index: usize) {
        let (layer3, layer4) = (self.packet.layer3, self.packet.layer4);
        let len = piece.len() - layer4;
        if self.packet.is_ipv6 {
            put16(piece, layer3 + 4, piece.len() - layer3 - Ipv6::HEADER_LEN);
        } else {
            put16(piece, layer3 + 2, piece.len() - layer3);
            let identification = get16(piece, layer3 + 4) as usize + index;
            put16(piece, layer3 + 4, identification);
            put16(piece, layer3 + 10, 0);
            let checksum = !fold(sum_of(&piece[layer3..layer4]));
            piece[layer3 + 10..layer3 + 12].copy_from_slice(&checksum.to_ne_bytes());
        }
        let place = if self.is_tcp {
            self.finish_tcp(&mut piece[layer4..], index);
            layer4 + 16
        } else {
            put16(piece, layer4 + 4, len);
            layer4 + 6
        };
        // The sum that the sender has begun has the length of the whole frame in it, instead of this piece's.
        let length = length_sum(len) + u64::from(!fold(length_sum(self.whole_len)));
        let checksum = not_zero(!fold(sum_of(&piece[layer4..]) + length));
        piece[place..place + 2].copy_from_slice(&checksum.to_ne_bytes());
    }

    fn finish_tcp(&self, tcp: &mut [u8], index: usize) {
        // Less than 2^32: both are below the length of a frame.
        let behind = (index * self.size) as u32;
        let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]).wrapping_add(behind);
        tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
        if index > 0 {
            tcp[13] &= !CONGESTION_ANSWERED;
        }
        if index + 1 < self.count {
            tcp[13] &= !(FIN | PUSH);
        }
    }
}

fn get16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_be_bytes([bytes[offset], bytes[offset + 1]])
}

/// Writes the low 16 bits.
fn put16(bytes: &mut [u8], offset: usize, value: usize) {
    bytes[offset..offset + 2].copy_from_slice(&(value as u16).to_be_bytes());
}

/// A checksum of zero would mean in UDP that there is none; what stands for it is right everywhere.
fn not_zero(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}
