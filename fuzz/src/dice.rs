//! Bytes as decisions.

/// Reads decisions from bytes. When there are no more bytes, every decision is the first one.
#[derive(Debug, Clone)]
pub struct Dice<'a> {
    bytes: &'a [u8],
}

impl<'a> Dice<'a> {
    /// Decisions from these bytes, in order.
    pub fn new(bytes: &'a [u8]) -> Dice<'a> {
        Dice { bytes }
    }

    /// Whether the bytes are used up: time to come to an end.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        match self.bytes.split_first() {
            Some((first, rest)) => {
                self.bytes = rest;
                *first
            }
            None => 0,
        }
    }

    /// Two bytes, little-endian.
    pub fn word(&mut self) -> u16 {
        u16::from(self.byte()) | u16::from(self.byte()) << 8
    }

    /// Four bytes, little-endian.
    pub fn double(&mut self) -> u32 {
        u32::from(self.word()) | u32::from(self.word()) << 16
    }

    /// Eight bytes, little-endian.
    pub fn quad(&mut self) -> u64 {
        u64::from(self.double()) | u64::from(self.double()) << 32
    }

    /// A number below `limit`, which is not zero. Small limits take one byte.
    pub fn below(&mut self, limit: usize) -> usize {
        match limit {
            0..=256 => usize::from(self.byte()) % limit.max(1),
            257..=65_536 => usize::from(self.word()) % limit,
            _ => self.double() as usize % limit,
        }
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) + 1 == times
    }

    /// One of these, of which there is at least one.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Up to `len` bytes as they are.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.bytes.split_at(len.min(self.bytes.len()));
        self.bytes = rest;
        taken
    }

    /// All that is left, as it is.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    /// A number near one of the edges at which code goes wrong: small, around a power of two, near the end, or any.
    pub fn edgy(&mut self) -> u32 {
        match self.below(6) {
            0 => u32::from(self.byte()),
            1 => self.double(),
            2 => u32::MAX - u32::from(self.byte()),
            _ => {
                let power = 1_u32 << self.below(32);
                let off = self.byte() % 5;
                power.wrapping_add(u32::from(off)).wrapping_sub(2)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_come_in_order_and_end_with_the_first_choice() {
        let mut dice = Dice::new(&[7, 1, 2, 9]);
        assert_eq!(dice.byte(), 7);
        assert_eq!(dice.word(), 0x0201);
        assert_eq!(dice.pick(&["a", "b"]), "b");
        assert!(dice.is_empty());
        assert_eq!(dice.pick(&["a", "b"]), "a");
        assert_eq!(dice.double(), 0);
        assert!(dice.take(4).is_empty());
    }
}
