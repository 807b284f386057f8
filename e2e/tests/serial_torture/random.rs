//! Random numbers from a seed.

/// splitmix64.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// An independent row of numbers.
    pub(crate) fn fork(&mut self) -> Random {
        Random(self.next())
    }

    /// A number less than `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Takes one of these, of which there must be some.
    pub(crate) fn take_from<T>(&mut self, things: &mut Vec<T>) -> T {
        let place = self.below(things.len() as u64) as usize;
        things.swap_remove(place)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
