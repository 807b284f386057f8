//! The table of circuits, and which of them have changed.

use std::ops::{Index, IndexMut};

use slab::Slab;

use crate::circuit::{Circuit, Standing};

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
    /// It is among the changed ones, or changes are not noted.
    is_noted: bool,
    /// How it stood when it was given last, if nothing else of it matters.
    given: Option<Standing>,
}

impl Circuits {
    /// Notes from now on which circuits change.
    pub(crate) fn note_changes(&mut self) {
        self.notes_changes = true;
        for (_, entry) in &mut self.entries {
            entry.is_noted = false;
        }
    }

    /// The changed circuits, each once unless it was replaced; none of an index whose circuit is gone. One that ends with this process is left out if it
    /// [stands](Circuit::standing) as when it was given last.
    pub(crate) fn take_changed(&mut self, mut each: impl FnMut(u32, Option<&Circuit>)) {
        let mut changed = std::mem::take(&mut self.changed);
        for index in changed.drain(..) {
            let Some(entry) = self.entries.get_mut(index as usize) else {
                each(index, None);
                continue;
            };
            entry.is_noted = false;
            let standing = entry.circuit.standing();
            if standing.is_none() || standing != entry.given {
                entry.given = standing;
                each(index, Some(&entry.circuit));
            }
        }
        self.changed = changed;
    }

    /// The circuit at this index, which may be changed.
    #[inline]
    fn noted(&mut self, index: usize) -> Option<&mut Circuit> {
        let entry = self.entries.get_mut(index)?;
        if !entry.is_noted {
            entry.is_noted = true;
            self.changed.push(index as u32);
        }
        Some(&mut entry.circuit)
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Circuit> {
        self.entries.get(index).map(|entry| &entry.circuit)
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut Circuit> {
        self.noted(index)
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
        let entry = |circuit| Entry::new(circuit, true);
        let entries = circuits.map(|(index, circuit)| (index, entry(circuit)));
        self.entries = entries.collect();
        if self.notes_changes {
            let indices = self.entries.iter().map(|(index, _)| index as u32);
            self.changed.extend(indices);
        }
    }

    /// Enters a circuit at the [vacant](Self::vacant_key) index.
    pub(crate) fn insert(&mut self, index: usize, circuit: Circuit) {
        let entry = Entry::new(circuit, !self.notes_changes);
        let entered = self.entries.insert(entry);
        debug_assert_eq!(entered, index, "a circuit knows its index");
        let _ = self.noted(index);
    }

    pub(crate) fn remove(&mut self, index: usize) -> Circuit {
        let _ = self.noted(index);
        self.entries.remove(index).circuit
    }
}

impl Entry {
    fn new(circuit: Circuit, is_noted: bool) -> Entry {
        Entry {
            circuit,
            is_noted,
            given: None,
        }
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
        self.noted(index).expect("an index of a circuit")
    }
}
