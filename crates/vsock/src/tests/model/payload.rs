//! Payload without bytes: which part of whose stream it is. What is lost, doubled or out of order cannot hide.

use std::collections::VecDeque;

use wire::vsock::SEQPACKET_END_OF_MESSAGE;

use crate::{CircuitId, Side};

/// A piece of what one side of a circuit has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) circuit: CircuitId,
    pub(crate) from: Side,
    /// Bytes that the side has sent before this piece.
    pub(crate) offset: u64,
    pub(crate) len: u32,
    /// Flags of a SEQPACKET packet; they belong to the last byte.
    pub(crate) flags: u32,
}

/// Where the bytes of a hostile guest belong is known when they are taken.
pub(crate) const NOWHERE: CircuitId = CircuitId {
    index: u32::MAX,
    generation: u32::MAX,
};

/// Pieces in order. Neighbours are joined, as bytes in a buffer are.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChunkQueue {
    chunks: VecDeque<Chunk>,
    bytes: u32,
}

impl ChunkQueue {
    pub(crate) fn len(&self) -> u32 {
        self.bytes
    }

    pub(crate) fn push(&mut self, chunk: Chunk) {
        self.bytes += chunk.len;
        let neighbour = self.chunks.back_mut().filter(|last| {
            last.flags == 0
                && (last.circuit, last.from) == (chunk.circuit, chunk.from)
                && last.offset + u64::from(last.len) == chunk.offset
        });
        if let Some(last) = neighbour {
            last.len += chunk.len;
            last.flags = chunk.flags;
            return;
        }
        self.chunks.push_back(chunk);
    }

    /// Takes up to `max` bytes, never beyond the end of a message.
    pub(crate) fn take(&mut self, max: u32) -> Option<Chunk> {
        let first = self.chunks.front_mut()?;
        if max == 0 {
            return None;
        }
        let taken = if first.len <= max {
            self.chunks.pop_front()?
        } else {
            let head = Chunk {
                len: max,
                flags: 0,
                ..*first
            };
            first.offset += u64::from(max);
            first.len -= max;
            head
        };
        self.bytes -= taken.len;
        Some(taken)
    }

    /// The length of the first message, if all of it is here.
    pub(crate) fn message_len(&self) -> Option<u32> {
        let mut len = 0;
        for chunk in &self.chunks {
            len += chunk.len;
            if chunk.flags & SEQPACKET_END_OF_MESSAGE != 0 {
                return Some(len);
            }
        }
        None
    }

    pub(crate) fn clear(&mut self) {
        *self = ChunkQueue::default();
    }
}
