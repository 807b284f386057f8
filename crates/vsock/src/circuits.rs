//! The table of circuits, and which of them have changed.

use std::ops::{Index, IndexMut};

use slab::Slab;

use crate::circuit::Circuit;

/// Circuits by their index.
#[derive(Debug, Default)]
pub(crate) struct Circuits {
    entries: Slab<Entry>,
    /// Whether changes are noted, and which: some may be noted twice, some are gone.
    notes_changes: bool,
    changed: Vec<u32>,
}

#[derive(Debug)]
struct Entry {
    circuit: Circuit,
    is_noted: bool,
}

impl Circuits {
    /// Notes from now on which circuits change.
    pub(crate) fn note_changes(&mut self) {
        self.notes_changes = true;
    }

    /// The changed circuits, each once unless it was replaced; none of an index whose circuit is gone.
    pub(crate) fn take_changed(&mut self, mut each: impl FnMut(u32, Option<&Circuit>)) {
        let mut changed = std::mem::take(&mut self.changed);
        for index in changed.drain(..) {
            let entry = self.entries.get_mut(index as usize);
            let circuit = entry.map(|entry| {
                entry.is_noted = false;
                &entry.circuit
            });
            each(index, circuit);
        }
        self.changed = changed;
    }

    fn note(&mut self, index: usize) {
        if !self.notes_changes {
            return;
        }
        let entry = self.entries.get_mut(index);
        let was_noted = entry.map(|entry| std::mem::replace(&mut entry.is_noted, true));
        if was_noted == Some(false) {
            self.changed.push(index as u32);
        }
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Circuit> {
        self.entries.get(index).map(|entry| &entry.circuit)
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut Circuit> {
        self.note(index);
        self.entries.get_mut(index).map(|entry| &mut entry.circuit)
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, &Circuit)> {
        self.entries
            .iter()
            .map(|(index, entry)| (index, &entry.circuit))
    }

    /// All of them, for changes that need not be noted.
    pub(crate) fn iter_mut_quietly(&mut self) -> impl Iterator<Item = &mut Circuit> {
        self.entries.iter_mut().map(|(_, entry)| &mut entry.circuit)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.entries.capacity()
    }

    /// The index that the next circuit gets.
    pub(crate) fn vacant_key(&self) -> usize {
        self.entries.vacant_key()
    }

    /// Has these circuits, at these indices, in place of none.
    pub(crate) fn restore(&mut self, circuits: impl Iterator<Item = (usize, Circuit)>) {
        let is_noted = self.notes_changes;
        let entry = |(index, circuit)| (index, Entry { circuit, is_noted });
        self.entries = circuits.map(entry).collect();
        if is_noted {
            let indices = self.entries.iter().map(|(index, _)| index as u32);
            self.changed.extend(indices);
        }
    }

    /// Enters a circuit at the [vacant](Self::vacant_key) index.
    pub(crate) fn insert(&mut self, index: usize, circuit: Circuit) {
        let entry = Entry {
            circuit,
            is_noted: false,
        };
        let entered = self.entries.insert(entry);
        debug_assert_eq!(entered, index, "a circuit knows its index");
        self.note(index);
    }

    pub(crate) fn remove(&mut self, index: usize) -> Circuit {
        self.note(index);
        self.entries.remove(index).circuit
    }
}

impl Index<usize> for Circuits {
    type Output = Circuit;

    fn index(&self, index: usize) -> &Circuit {
        &self.entries[index].circuit
    }
}

impl IndexMut<usize> for Circuits {
    fn index_mut(&mut self, index: usize) -> &mut Circuit {
        self.note(index);
        &mut self.entries[index].circuit
    }
}
