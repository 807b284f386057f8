//! The chains of a split queue that are out.

/// Which chains are out, and which head each entry of the available ring had when it was taken.
#[derive(Debug)]
pub(super) struct InFlight {
    /// By head. Not as bits: one after the other would then wait for the word that the last one wrote.
    out: Box<[Out]>,
    taken: Box<[u16]>,
    count: u32,
    /// So many of them have no mark.
    unmarked: u32,
}

/// Whether a chain is out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Out {
    Not,
    /// Its ledger, if there is one, does not know yet.
    Unmarked,
    /// It has a mark.
    Marked,
}

impl InFlight {
    pub(super) fn new(size: u16) -> InFlight {
        InFlight {
            out: vec![Out::Not; usize::from(size)].into(),
            taken: vec![0; usize::from(size)].into(),
            count: 0,
            unmarked: 0,
        }
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn unmarked(&self) -> u32 {
        self.unmarked
    }

    #[inline]
    pub(super) fn contains(&self, head: u16) -> bool {
        self.out
            .get(usize::from(head))
            .is_some_and(|out| *out != Out::Not)
    }

    #[inline]
    pub(super) fn insert(&mut self, head: u16, slot: usize, out: Out) {
        self.out[usize::from(head)] = out;
        self.taken[slot] = head;
        self.count += 1;
        self.unmarked += u32::from(out == Out::Unmarked);
    }

    /// How it was out.
    #[inline]
    pub(super) fn remove(&mut self, head: u16) -> Out {
        let Some(out) = self.out.get_mut(usize::from(head)) else {
            return Out::Not;
        };
        let was = std::mem::replace(out, Out::Not);
        self.count -= u32::from(was != Out::Not);
        self.unmarked -= u32::from(was == Out::Unmarked);
        was
    }

    pub(super) fn taken_at(&self, slot: usize) -> u16 {
        self.taken[slot]
    }

    /// The chain that was taken from this entry, if it is out and had no mark until now.
    pub(super) fn mark_at(&mut self, slot: usize) -> Option<u16> {
        let head = self.taken[slot];
        let out = &mut self.out[usize::from(head)];
        (*out == Out::Unmarked).then(|| {
            *out = Out::Marked;
            self.unmarked -= 1;
            head
        })
    }
}
