//! A stream of bytes that both ends of a test can compute, so that every byte that arrives is checked and none has to be sent twice.

use anyhow::{Result, bail};

/// A position in the stream of a seed. Streams of different seeds differ, so that bytes of another circuit are noticed.
#[derive(Debug, Clone)]
pub struct Pattern {
    seed: u64,
    offset: u64,
}

impl Pattern {
    /// The beginning of the stream of `seed`.
    pub fn new(seed: u64) -> Pattern {
        Pattern { seed, offset: 0 }
    }

    /// How many bytes have been taken or checked.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Takes the next bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let word = self.word();
            let skip = (self.offset % 8) as usize;
            let len = rest.len().min(8 - skip);
            rest[..len].copy_from_slice(&word[skip..skip + len]);
            rest = &mut rest[len..];
            self.offset += len as u64;
        }
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }

    /// Checks that these are the next bytes.
    ///
    /// # Errors
    /// Names the offset of the first byte that differs.
    pub fn check(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let word = self.word();
            let skip = (self.offset % 8) as usize;
            let len = rest.len().min(8 - skip);
            if rest[..len] != word[skip..skip + len] {
                bail!("wrong bytes at offset {} or up to 7 behind it", self.offset);
            }
            rest = &rest[len..];
            self.offset += len as u64;
        }
        Ok(())
    }

    /// The eight bytes around the offset: splitmix64 of their number.
    fn word(&self) -> [u8; 8] {
        let number = (self.offset / 8).wrapping_add(self.seed << 40);
        let mut mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_gives_the_same_stream() {
        let whole = Pattern::new(5).take(1000);
        let mut cut = Pattern::new(5);
        let mut pieces = Vec::new();
        for len in [1, 2, 3, 5, 8, 13, 21, 947] {
            pieces.extend(cut.take(len));
        }
        assert_eq!(pieces, whole);
        let mut check = Pattern::new(5);
        check.check(&whole[..333]).unwrap();
        check.check(&whole[333..]).unwrap();
        assert_eq!(check.offset(), 1000);
    }

    #[test]
    fn a_lost_a_doubled_and_a_foreign_byte_are_noticed() {
        let whole = Pattern::new(0).take(64);
        assert!(Pattern::new(0).check(&whole[1..]).is_err());
        let mut doubled = whole.clone();
        doubled.insert(10, whole[10]);
        assert!(Pattern::new(0).check(&doubled).is_err());
        assert!(Pattern::new(1).check(&whole).is_err());
    }
}
