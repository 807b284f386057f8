//! The table of spans, read by a handler while another thread changes it: in every order that loom can think of, and with every value
//! that a processor may show. The table is compiled here once more, over loom's atomics.

use loom::thread;

use self::atomics::{AtomicBool, AtomicUsize};
use self::table::{Registration, Slot, find};

#[allow(clippy::duplicate_mod)] // That is the point.
#[path = "../table.rs"]
mod table;

mod atomics {
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
}

/// In bytes.
const PAGE_LEN: usize = 1;

/// A table for one run. Its memory stays allocated: a few hundred bytes.
fn slots(count: usize) -> &'static [Slot] {
    let empty = || Slot {
        taken: AtomicBool::new(false),
        generation: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page_len: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
    };
    Vec::leak((0..count).map(|_| empty()).collect())
}

fn found(slots: &'static [Slot], address: usize) -> Option<(usize, usize)> {
    find(slots, address).map(|span| {
        assert_eq!(span.page_len, PAGE_LEN);
        (span.start, span.len)
    })
}

/// Half of an old span and half of a new one in the same slot, taken together, may cover anything. Taking such a thing for a span would put empty
/// memory over foreign mappings.
#[test]
fn a_handler_finds_its_span_while_another_slot_changes() {
    loom::model(|| {
        let slots = slots(2);
        let old = Registration::enter(slots, 5000, 4000, PAGE_LEN).unwrap();
        let own = Registration::enter(slots, 1000, 100, PAGE_LEN).unwrap();
        let other = thread::spawn(move || {
            drop(old);
            Registration::enter(slots, 600, 100, PAGE_LEN).unwrap()
        });
        assert_eq!(found(slots, 1050), Some((1000, 100)));
        let new = other.join().unwrap();
        assert_eq!(found(slots, 650), Some((600, 100)));
        assert_eq!(found(slots, 5050), None);
        drop((own, new));
    });
}

/// Two threads never get the same slot, and what each has entered, each finds.
#[test]
fn two_threads_enter_spans_at_once() {
    loom::model(|| {
        let slots = slots(2);
        let enter = move |start| {
            let registration = Registration::enter(slots, start, 100, PAGE_LEN).unwrap();
            assert_eq!(found(slots, start + 50), Some((start, 100)));
            registration
        };
        let other = thread::spawn(move || enter(1000));
        let near = enter(2000);
        let far = other.join().unwrap();
        assert_eq!(found(slots, 1050), Some((1000, 100)));
        assert_eq!(found(slots, 2050), Some((2000, 100)));
        drop((near, far));
    });
}

/// A thread that sees the empty memory that a handler has put in place sees the mark, too.
#[test]
fn the_mark_is_there_before_the_empty_memory() {
    loom::model(|| {
        let slots = slots(1);
        let registration = Registration::enter(slots, 1000, 100, PAGE_LEN).unwrap();
        // What a page shows: the guest's bytes, or nothing any more. The kernel changes a mapping for all threads at once, which is
        // at least as ordered as this.
        let page = loom::sync::Arc::new(AtomicUsize::new(7));
        let seen = loom::sync::Arc::clone(&page);
        let handler = thread::spawn(move || {
            let span = find(slots, 1050).unwrap();
            span.slot.poisoned.store(true, atomics::Ordering::Release);
            page.store(0, atomics::Ordering::Release);
        });
        if seen.load(atomics::Ordering::Acquire) == 0 {
            assert!(registration.is_poisoned());
        }
        handler.join().unwrap();
        assert!(registration.is_poisoned());
    });
}
