//! The table of mapped spans, which a signal handler reads without a lock while other threads change it.
//!
//! The file is compiled a second time where `loom` enumerates interleavings, with other atomics: they come from the parent.

use super::atomics::{AtomicBool, AtomicUsize, Ordering, fence};

/// The entry of one mapped span in the table, given back when dropped.
#[derive(Debug)]
pub(crate) struct Registration {
    slot: &'static Slot,
}

impl Registration {
    /// Enters a span, in bytes, whose pages are `page_len` bytes long. `None` when the table is full.
    pub(super) fn enter(
        slots: &'static [Slot],
        start: usize,
        len: usize,
        page_len: usize,
    ) -> Option<Registration> {
        let slot = slots
            .iter()
            .find(|slot| !slot.taken.swap(true, Ordering::Acquire))?;
        // Release: a handler that sees one of these must see that the span before, whose other half it may have read, is gone.
        slot.start.store(start, Ordering::Release);
        slot.len.store(len, Ordering::Release);
        slot.page_len.store(page_len, Ordering::Release);
        slot.poisoned.store(false, Ordering::Relaxed);
        slot.generation.fetch_add(1, Ordering::Release);
        Some(Registration { slot })
    }

    /// Whether a page of the span was lost since it was entered.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.slot.poisoned.load(Ordering::Acquire)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.slot.generation.fetch_add(1, Ordering::AcqRel);
        self.slot.taken.store(false, Ordering::Release);
    }
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) taken: AtomicBool,
    /// Odd when the span is valid: it starts at zero, and every entry and every removal adds one.
    pub(super) generation: AtomicUsize,
    pub(super) start: AtomicUsize,
    pub(super) len: AtomicUsize,
    pub(super) page_len: AtomicUsize,
    pub(super) poisoned: AtomicBool,
}

/// A span as the handler read it.
pub(super) struct Span {
    pub(super) slot: &'static Slot,
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) page_len: usize,
}

pub(super) fn find(slots: &'static [Slot], address: usize) -> Option<Span> {
    slots.iter().find_map(|slot| {
        let generation = slot.generation.load(Ordering::Acquire);
        let span = Span {
            slot,
            start: slot.start.load(Ordering::Relaxed),
            len: slot.len.load(Ordering::Relaxed),
            page_len: slot.page_len.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        let consistent =
            generation % 2 == 1 && slot.generation.load(Ordering::Relaxed) == generation;
        (consistent && address.wrapping_sub(span.start) < span.len).then_some(span)
    })
}
