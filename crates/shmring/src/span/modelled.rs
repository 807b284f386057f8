//! Bytes in a modelled ring. An access that is not ordered behind the other side's last one is an error, whatever value it would have found.

use loom::cell::UnsafeCell;

/// Bytes in a ring.
#[derive(Debug)]
pub struct Span<'a> {
    pub(super) ring: &'a [UnsafeCell<u8>],
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Span<'_> {
    /// In bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes `from` at an offset.
    pub fn write(&mut self, offset: usize, from: &[u8]) {
        for (index, byte) in from.iter().enumerate() {
            // SAFETY: loom has just checked that no other thread accesses the cell.
            self.cell(offset + index)
                .with_mut(|place| unsafe { *place = *byte });
        }
    }

    /// Reads into `into` from an offset on.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        for (index, byte) in into.iter_mut().enumerate() {
            // SAFETY: as above.
            *byte = self.cell(offset + index).with(|place| unsafe { *place });
        }
    }

    fn cell(&self, offset: usize) -> &UnsafeCell<u8> {
        assert!(offset < self.len);
        &self.ring[(self.start + offset) % self.ring.len()]
    }
}
