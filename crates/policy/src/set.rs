//! Sets of rules: in bits where sets meet, in numbers where they are kept and small.

use crate::rule::RuleId;

/// Words of a [`Chunk`].
const CHUNK_WORDS: usize = 8;

/// Rules of a [`Chunk`].
pub(super) const CHUNK_RULES: usize = CHUNK_WORDS * 64;

/// One bit for each of 512 rules that follow each other: a cache line, and few enough words for the compiler to take at once.
pub(super) type Chunk = [u64; CHUNK_WORDS];

/// How many chunks have a bit for each of so many rules.
pub(super) fn chunks(rules: usize) -> usize {
    rules.div_ceil(CHUNK_RULES)
}

/// Some of a policy's rules: one bit each, in whole cache lines (2 KiB for 16,384 rules).
///
/// A set is of use only with the policy that made it. Another policy makes nothing bad of it, but no sense either: it takes
/// the rules by their positions, and knows none behind the end of the set. The default is a set of no rules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleSet {
    chunks: Box<[Chunk]>,
}

impl RuleSet {
    /// None of so many rules.
    pub(super) fn none(rules: usize) -> RuleSet {
        RuleSet {
            chunks: vec![Chunk::default(); chunks(rules)].into(),
        }
    }

    /// The bits, from the first rule on.
    pub(super) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Adds a rule, or does nothing if the set has no bit for it.
    pub(super) fn insert(&mut self, rule: u32) {
        let rule = rule as usize;
        if let Some(chunk) = self.chunks.get_mut(rule / CHUNK_RULES) {
            set(chunk, rule % CHUNK_RULES);
        }
    }

    /// Takes a rule away.
    pub(super) fn remove(&mut self, rule: u32) {
        let rule = rule as usize;
        if let Some(chunk) = self.chunks.get_mut(rule / CHUNK_RULES) {
            chunk[rule % CHUNK_RULES / 64] &= !(1 << (rule % 64));
        }
    }

    /// Adds all rules of another set.
    pub(super) fn join(&mut self, other: &RuleSet) {
        for (ours, theirs) in self.chunks.iter_mut().zip(&other.chunks) {
            for (ours, theirs) in ours.iter_mut().zip(theirs) {
                *ours |= theirs;
            }
        }
    }

    /// Keeps only what another set has too.
    pub(super) fn meet(&mut self, other: &RuleSet) {
        for (ours, theirs) in self.chunks.iter_mut().zip(&other.chunks) {
            *ours = common(ours, theirs);
        }
    }

    /// The rules, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = RuleId> + '_ {
        rules(self.chunks.iter().copied())
    }
}

/// What two chunks both have.
pub(super) fn common(left: &Chunk, right: &Chunk) -> Chunk {
    std::array::from_fn(|word| left[word] & right[word])
}

/// The first bit of a chunk.
pub(super) fn first(chunk: &Chunk) -> Option<usize> {
    let word = chunk.iter().position(|word| *word != 0)?;
    Some(word * 64 + chunk[word].trailing_zeros() as usize)
}

/// The rules of chunks that follow each other from the first rule on.
pub(super) fn rules(chunks: impl Iterator<Item = Chunk>) -> impl Iterator<Item = RuleId> {
    chunks.enumerate().flat_map(|(index, mut chunk)| {
        std::iter::from_fn(move || {
            let bit = first(&chunk)?;
            chunk[bit / 64] &= chunk[bit / 64] - 1;
            Some(RuleId((index * CHUNK_RULES + bit) as u32))
        })
    })
}

fn set(chunk: &mut Chunk, bit: usize) {
    chunk[bit / 64] |= 1 << (bit % 64);
}

/// The rules of one key of an index. Most keys have a rule or two, some have them all: numbers for the former, bits for the
/// latter. So a key costs at most 32 bytes a rule, and adding it to a set at most as many steps as the set has words.
#[derive(Debug, Clone)]
pub(super) enum Members {
    /// In order, none twice.
    Few(Vec<u32>),
    /// Of so many that numbers would cost more steps than bits.
    Many(RuleSet),
}

impl Default for Members {
    fn default() -> Members {
        Members::Few(Vec::new())
    }
}

impl Members {
    /// Adds one of so many rules. Rules come in order; one may come again.
    pub(super) fn insert(&mut self, rule: u32, rules: usize) {
        match self {
            Members::Few(few) if few.last() == Some(&rule) => {}
            // A bit that is set costs about as much as four words that are joined.
            Members::Few(few) if few.len() < chunks(rules) * CHUNK_WORDS / 4 => few.push(rule),
            Members::Few(few) => {
                let mut many = RuleSet::none(rules);
                few.iter().for_each(|rule| many.insert(*rule));
                many.insert(rule);
                *self = Members::Many(many);
            }
            Members::Many(many) => many.insert(rule),
        }
    }

    /// Adds all of them to a set.
    pub(super) fn join_to(&self, set: &mut RuleSet) {
        match self {
            Members::Few(few) => few.iter().for_each(|rule| set.insert(*rule)),
            Members::Many(many) => set.join(many),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules on both sides of the edges of words and chunks.
    const EDGES: [u32; 11] = [0, 1, 62, 63, 64, 65, 127, 511, 512, 513, 1023];

    fn numbers(set: &RuleSet) -> Vec<u32> {
        set.iter().map(|rule| rule.0).collect()
    }

    #[test]
    fn what_is_inserted_is_there_in_order_and_nothing_else() {
        let mut set = RuleSet::none(1024);
        EDGES.iter().rev().for_each(|rule| set.insert(*rule));
        assert_eq!(numbers(&set), EDGES);
        set.remove(64);
        set.remove(2);
        assert_eq!(numbers(&set).len(), EDGES.len() - 1);
        assert!(!numbers(&set).contains(&64));
    }

    #[test]
    fn a_set_has_no_place_behind_its_end() {
        let mut set = RuleSet::none(512);
        set.insert(512);
        set.remove(512);
        set.insert(u32::MAX);
        assert_eq!(numbers(&set), []);
        assert_eq!(RuleSet::none(0), RuleSet::default());
        assert_eq!(RuleSet::none(513).chunks().len(), 2);
    }

    #[test]
    fn sets_meet_and_join_by_rule() {
        let mut left = RuleSet::none(600);
        let mut right = RuleSet::none(600);
        [3, 63, 64, 599].iter().for_each(|rule| left.insert(*rule));
        [4, 64, 512, 599]
            .iter()
            .for_each(|rule| right.insert(*rule));
        let mut both = left.clone();
        both.meet(&right);
        assert_eq!(numbers(&both), [64, 599]);
        left.join(&right);
        assert_eq!(numbers(&left), [3, 4, 63, 64, 512, 599]);
    }

    #[test]
    fn few_members_and_many_are_the_same_rules() {
        // 512 rules are eight words: two members are few, the third makes them many.
        for count in 0..EDGES.len() - 3 {
            let mut members = Members::default();
            for rule in &EDGES[..count] {
                members.insert(*rule, 512);
                members.insert(*rule, 512);
            }
            assert_eq!(matches!(members, Members::Many(_)), count > 2, "{count}");
            let mut set = RuleSet::none(512);
            set.insert(300);
            members.join_to(&mut set);
            let mut expected = EDGES[..count].to_vec();
            expected.push(300);
            expected.sort_unstable();
            assert_eq!(numbers(&set), expected);
        }
    }
}
