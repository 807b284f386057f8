//! Bytes that say where they belong: what is lost, doubled, moved or of another stream does not compare equal.

/// A prime, so that no packet, page or message is a multiple of it.
const PERIOD: usize = 65_521;

/// The most bytes that can be had at once.
pub const MAX_LEN: usize = 256 * 1024;

/// An endless stream of known bytes, any part of which can be borrowed.
#[derive(Debug, Clone)]
pub struct Pattern {
    bytes: std::sync::Arc<[u8]>,
}

impl Default for Pattern {
    fn default() -> Pattern {
        // A generator by Marsaglia (xorshift64) gives bytes without short periods.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let period: Vec<u8> = (0..PERIOD)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 24) as u8
            })
            .collect();
        Pattern {
            bytes: period
                .iter()
                .copied()
                .cycle()
                .take(PERIOD + MAX_LEN)
                .collect(),
        }
    }
}

impl Pattern {
    /// `len` bytes of the stream with this number, from byte `position` on.
    ///
    /// # Panics
    /// For more than [`MAX_LEN`] bytes.
    pub fn slice(&self, stream: usize, position: u64, len: usize) -> &[u8] {
        let start = ((position + stream as u64 * 7919) % PERIOD as u64) as usize;
        &self.bytes[start..start + len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_positions_and_streams_differ() {
        let pattern = Pattern::default();
        let whole = pattern.slice(0, 0, 64);
        assert_ne!(whole, pattern.slice(0, 1, 64));
        assert_ne!(whole, pattern.slice(1, 0, 64));
        assert_ne!(whole, pattern.slice(0, 4096, 64));
        assert_eq!(&whole[10..], pattern.slice(0, 10, 54));
        assert_eq!(pattern.slice(0, PERIOD as u64 - 1, 2)[1], whole[0]);
        assert_eq!(
            pattern.slice(63, u64::from(u32::MAX), MAX_LEN).len(),
            MAX_LEN
        );
    }
}
