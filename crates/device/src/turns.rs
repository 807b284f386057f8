//! Things to be done for several owners, which take turns.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// What waits, by its owner.
#[derive(Debug)]
pub(crate) struct Turns<K, T> {
    owners: VecDeque<K>,
    waiting: HashMap<K, VecDeque<T>>,
}

impl<K, T> Default for Turns<K, T> {
    fn default() -> Turns<K, T> {
        Turns {
            owners: VecDeque::new(),
            waiting: HashMap::new(),
        }
    }
}

impl<K: Copy + Eq + Hash, T> Turns<K, T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Owners with work that waits.
    pub(crate) fn owners(&self) -> usize {
        self.owners.len()
    }

    /// How much waits for one of them.
    pub(crate) fn waiting(&self, owner: K) -> usize {
        self.waiting.get(&owner).map_or(0, VecDeque::len)
    }

    pub(crate) fn push(&mut self, owner: K, thing: T) {
        self.entry(owner).push_back(thing);
    }

    /// All that waits for the next owner.
    pub(crate) fn pop_owner(&mut self) -> Option<(K, VecDeque<T>)> {
        let owner = self.owners.pop_front()?;
        Some((owner, self.waiting.remove(&owner)?))
    }

    /// The rest goes before what has come meanwhile, once the other owners have had their turns.
    pub(crate) fn put_back(&mut self, owner: K, mut rest: VecDeque<T>) {
        if !rest.is_empty() {
            let later = self.entry(owner);
            rest.append(later);
            *later = rest;
        }
    }

    /// The next thing of the next owner.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let (owner, mut things) = self.pop_owner()?;
        let next = things.pop_front();
        self.put_back(owner, things);
        next
    }

    fn entry(&mut self, owner: K) -> &mut VecDeque<T> {
        self.waiting.entry(owner).or_insert_with(|| {
            self.owners.push_back(owner);
            VecDeque::new()
        })
    }
}
