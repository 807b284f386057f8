//! What payload consists of when it is checked.

/// How much is made and compared at a time, in bytes.
const PIECE_LEN: usize = 4096;

/// A row of bytes without end that depends on a seed and, in each place, on how far it is from the beginning: so that a byte that is lost,
/// doubled, changed or in the wrong place is seen.
#[derive(Debug, Clone)]
pub struct Pattern {
    seed: u64,
    offset: u64,
}

/// Bytes that are not the pattern's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// How far from the beginning of the row the first of them is.
    pub first: u64,
    /// How many there are.
    pub count: u64,
}

impl Pattern {
    /// The row's beginning.
    pub fn new(seed: u64) -> Pattern {
        Pattern { seed, offset: 0 }
    }

    /// Writes the next bytes of the row.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        // Up to where a word begins, then words, then the beginning of one.
        let inside = (self.offset % 8) as usize;
        let rest_of_word = if inside == 0 { 0 } else { 8 - inside };
        let (head, body) = bytes.split_at_mut(rest_of_word.min(bytes.len()));
        self.fill_within_word(head);
        let mut words = body.chunks_exact_mut(8);
        for place in &mut words {
            place.copy_from_slice(&word(self.seed, self.offset / 8).to_le_bytes());
            self.offset += 8;
        }
        self.fill_within_word(words.into_remainder());
    }

    /// The same for bytes that do not reach beyond the end of a word.
    fn fill_within_word(&mut self, bytes: &mut [u8]) {
        if !bytes.is_empty() {
            let inside = (self.offset % 8) as usize;
            let word = word(self.seed, self.offset / 8).to_le_bytes();
            bytes.copy_from_slice(&word[inside..inside + bytes.len()]);
            self.offset += bytes.len() as u64;
        }
    }

    /// Compares bytes with the next ones of the row.
    pub fn check(&mut self, bytes: &[u8]) -> Option<Mismatch> {
        let mut expected = [0; PIECE_LEN];
        let mut mismatch: Option<Mismatch> = None;
        for piece in bytes.chunks(PIECE_LEN) {
            let start = self.offset;
            let expected = &mut expected[..piece.len()];
            self.fill(expected);
            if expected == piece {
                continue;
            }
            let wrong = || (0..piece.len()).filter(|index| expected[*index] != piece[*index]);
            let count = wrong().count() as u64;
            let first = start + wrong().next().unwrap_or(0) as u64;
            let known = mismatch.get_or_insert(Mismatch { first, count: 0 });
            known.count += count;
        }
        mismatch
    }
}

/// A word of the row: the output function of SplitMix64 (Steele, Lea and Flood, 2014), which needs no state.
fn word(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
