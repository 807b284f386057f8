//! Points at which a test has the process end: at each store that a driver or a successor sees, and at each step of the control path that is kept.
//!
//! A store to memory that others share goes through `Area::publish_u16` and its like, which take the point that it is. So a store without a point does not
//! compile, unless it is written in the words that are for drivers, which `cargo xtask tidy` finds. Without the feature `crash-points` nothing of this is left.

use crate::area::Area;
use crate::sync::Ordering;

macro_rules! points {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What is about to be done, or has just been done.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Point { $($(#[$doc])* $name,)* }

        impl Point {
            /// All of them.
            pub const ALL: &'static [Point] = &[$(Point::$name,)*];
        }
    };
}

points! {
    /// The journal's file says how many records it has room for.
    JournalRecords,
    /// It says what it is.
    JournalMagic,
    /// What a turn wrote that did not end is taken away.
    JournalForget,
    /// There is one record more.
    JournalWritten,
    /// A place is of the next turn.
    JournalPlace,
    /// A record's length.
    JournalLen,
    /// Its checksum.
    JournalChecksum,
    /// Eight bytes of it.
    JournalWord,
    /// The turn counts.
    JournalTurn,
    /// A ledger has so many entries.
    LedgerSize,
    /// A chain is out.
    LedgerMark,
    /// It is not any more.
    LedgerClear,
    /// A chain of a packed ring is given back, and not published.
    LedgerBack,
    /// What is about to be published in a packed ring.
    LedgerSpan,
    /// The marks are away up to this index.
    LedgerPublished,
    /// A message is being answered, or was.
    LedgerAnswering,
    /// Whether what the driver writes is seen.
    LedgerUnseen,
    /// A chain in the used ring.
    UsedHead,
    /// How much was written into it.
    UsedLen,
    /// The used ring's index.
    UsedIndex,
    /// When the driver is to notify, with event indices.
    AvailableEvent,
    /// Whether it is to, without.
    UsedFlags,
    /// A descriptor of a packed ring.
    PackedDescriptor,
    /// When the driver of a packed ring is to notify.
    PackedEvent,
    /// A guest is interrupted.
    Interrupt,
    /// A ring is stopped, maybe in the middle of a turn that goes on for others.
    RingStops,
    /// A line or a network's port has failed, likewise.
    LineFails,
    /// What a predecessor wrote down of circuits, or of a network's port, is about to be gone on with.
    TakeOver,
    /// What a predecessor parked of a line is about to be parked again.
    ParkAgain,
    /// A VMM's thread is answered.
    Answer,
    /// The keeper gets something, or lets something go.
    Keeper,
}

/// Ends here, if a test wants it so.
#[inline(always)]
pub fn point(_at: Point) {
    #[cfg(test)]
    armed::point();
    #[cfg(feature = "crash-points")]
    process::point(_at);
}

macro_rules! publishers {
    ($($publish:ident, $store:ident, $integer:ty;)*) => {
        impl Area {
            $(
                /// Writes a field, unless the process ends before; it may end right behind it as well.
                #[inline(always)]
                pub(crate) fn $publish(&self, at: Point, offset: usize, value: $integer, ordering: Ordering) {
                    point(at);
                    self.$store(offset, value, ordering);
                    point(at);
                }
            )*
        }
    };
}

publishers! {
    publish_u16, store_u16, u16;
    publish_u32, store_u32, u32;
    publish_u64, store_u64, u64;
}

/// The end of the whole process, as a signal would bring it.
#[cfg(feature = "crash-points")]
pub mod process {
    use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
    use std::time::Duration;

    use super::Point;

    /// The exit status of a process that ended at the first of [`Point::ALL`]; that of the next is one more. A test that fails ends with 101.
    pub const FIRST_STATUS: i32 = 110;

    const PAUSE: Duration = Duration::from_millis(2);
    const NONE: u32 = u32::MAX;
    const ANY: u32 = u32::MAX - 1;

    static WHERE: AtomicU32 = AtomicU32::new(NONE);
    static LEFT: AtomicU64 = AtomicU64::new(0);
    static THEN: AtomicU64 = AtomicU64::new(0);
    static PAUSES: AtomicBool = AtomicBool::new(false);

    /// Has this process end when one of its threads comes to this point, or to any, after so many times. Then it
    /// passes `then` more points of any kind. For odd numbers the other threads run on for a moment.
    pub fn arm(at: Option<Point>, after: u64, then: u64) {
        THEN.store(then, Ordering::Relaxed);
        LEFT.store(after, Ordering::Relaxed);
        PAUSES.store((after + then) % 2 == 1, Ordering::Relaxed);
        let at = at.map_or(ANY, |at| at as u32);
        WHERE.store(at, Ordering::Release);
    }

    #[inline]
    pub(super) fn point(at: Point) {
        let armed = WHERE.load(Ordering::Acquire);
        if (armed == ANY || armed == at as u32) && LEFT.fetch_sub(1, Ordering::Relaxed) == 0 {
            let then = THEN.swap(0, Ordering::Relaxed);
            if then > 0 {
                LEFT.store(then - 1, Ordering::Relaxed);
                return WHERE.store(ANY, Ordering::Release);
            }
            if PAUSES.load(Ordering::Relaxed) {
                std::thread::sleep(PAUSE);
            }
            // SAFETY: nothing of this process is needed any more, and nothing of it runs.
            unsafe { libc::_exit(FIRST_STATUS + at as i32) };
        }
    }
}

#[cfg(test)]
pub(crate) mod armed {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// What the end looks like to a test.
    pub(crate) struct Ended;

    /// Ends at the point after so many others; never, for none.
    pub(crate) fn arm(after: Option<u32>) {
        LEFT.set(after);
    }

    pub(crate) fn point() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                std::panic::resume_unwind(Box::new(Ended));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}
