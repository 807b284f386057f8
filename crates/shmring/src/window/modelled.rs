//! What stands for a window where `loom` enumerates interleavings: every field is one of its atomics, every byte of a ring one of its cells.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};

use crate::error::CircuitError;
#[cfg(test)]
use crate::layout::RingFields;
use crate::span::Span;
use crate::spec::{Identity, Kind, Side, WindowSpec};
use crate::sync::store_and_fence;

/// One window, shared by both its sides.
#[derive(Debug, Clone)]
pub struct Window {
    shared: Arc<Shared>,
    ring_len: usize,
}

#[derive(Debug)]
struct Shared {
    /// By their offsets.
    fields: Vec<(usize, AtomicU64)>,
    rings: [Vec<UnsafeCell<u8>>; 2],
}

impl Window {
    /// Rings of so few bytes that there is something to wait for.
    #[cfg(test)]
    pub(super) fn new(ring_len: usize) -> Window {
        let fields = [Side::First, Side::Second].into_iter().flat_map(|side| {
            let fields = RingFields::written_by(side);
            [
                fields.head,
                fields.producer_state,
                fields.tail,
                fields.consumer_state,
                fields.producer_event,
                fields.consumer_event,
            ]
        });
        let ring = || (0..ring_len).map(|_| UnsafeCell::new(0)).collect();
        let shared = Shared {
            fields: fields.map(|offset| (offset, AtomicU64::new(0))).collect(),
            rings: [ring(), ring()],
        };
        Window {
            shared: Arc::new(shared),
            ring_len,
        }
    }

    /// What it would be.
    pub fn spec(&self) -> WindowSpec {
        WindowSpec {
            identity: Identity {
                generation: self.generation(),
                nonce: [0; 16],
            },
            kind: Kind::Bytes,
            ring_len: self.ring_len as u64,
            page_len: 4096,
        }
    }

    pub(super) fn ring_len(&self) -> usize {
        self.ring_len
    }

    pub(super) fn check_revoked(&self) -> Result<(), CircuitError> {
        Ok(())
    }

    pub(super) fn generation(&self) -> u64 {
        1
    }

    pub(super) fn load(&self, offset: usize, ordering: Ordering) -> u64 {
        self.field(offset).load(ordering)
    }

    pub(super) fn store(&self, offset: usize, value: u64, ordering: Ordering) {
        self.field(offset).store(value, ordering);
    }

    pub(super) fn publish(&self, offset: usize, value: u64) {
        store_and_fence(self.field(offset), value);
    }

    pub(super) fn span(&self, ring: Side, position: u64, len: usize) -> Span<'_> {
        assert!(len <= self.ring_len);
        Span {
            ring: &self.shared.rings[ring.index()],
            start: (position % self.ring_len as u64) as usize,
            len,
        }
    }

    fn field(&self, offset: usize) -> &AtomicU64 {
        let mut fields = self.shared.fields.iter();
        let found = fields.find(|(at, _)| *at == offset);
        &found.expect("there is such a field").1
    }
}
