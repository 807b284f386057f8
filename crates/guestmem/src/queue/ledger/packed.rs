//! The ledger of a packed queue.
//!
//! The ring itself has little for a successor: the driver writes its next chains over what it was given back. So the ledger has, for each chain that is out, a
//! mark by its identifier, with the number of its descriptors; the place up to which everything is published; and before a publication, where that will be. A
//! chain that is given back has a mark of another kind until its publication is over.
//!
//! A publication is the store of one descriptor's flags. As long as it has not happened, that descriptor is what the driver made available in this round of
//! the ring. Afterwards it is used, or available in the next round, and either way its USED flag is the device's wrap counter there. So that one
//! flag, at a place that is noted with its wrap counter, says on which side of the store a process ended.

use super::{Found, Ledger, SIZE};
use crate::area::Area;
use crate::crash::Point;
use crate::queue::packed::fields::Position;
use crate::queue::{MAX_CHAIN_LEN, QueueError};
use crate::sync::Ordering;

/// Descriptors that are out for ever, as the VMM said when it set the queue up: the place of what is available is so far ahead.
const LOST: usize = 2;
/// Identifiers below this one may have marks. Zero in the ledger of a split queue.
const LIMIT: usize = 4;
/// What is being published: from the position in the lower half to the one in the upper half. The same twice: nothing is.
const SPAN: usize = 8;
/// Where the marks begin, two bytes for each identifier: the chain's descriptors, and zero while it is not out.
const MARKS: usize = 16;

const IDENTIFIERS: u32 = 1 << 16;

/// In a mark: the chain is given back, and maybe not published.
const BACK: u16 = 1 << 15;

const _: () = assert!(MAX_CHAIN_LEN < BACK as usize);
const _: () = assert!(MARKS + 2 * IDENTIFIERS as usize <= super::QUEUE_BYTES);

/// Where a predecessor has left a queue.
pub(in crate::queue) struct Left {
    pub(in crate::queue) next_available: Position,
    pub(in crate::queue) next_used: Position,
    /// The chains that are out: identifiers, and numbers of descriptors.
    pub(in crate::queue) out: Vec<(u16, u16)>,
}

/// The ledger of one packed queue.
#[derive(Debug)]
pub(in crate::queue) struct PackedLedger {
    of_queue: Ledger,
    limit: u32,
    /// Chains that were given back since the last publication.
    back: Vec<u16>,
}

impl PackedLedger {
    pub(in crate::queue) fn new(of_queue: Ledger) -> PackedLedger {
        PackedLedger {
            of_queue,
            limit: 0,
            back: Vec::new(),
        }
    }

    pub(in crate::queue) fn found(&self) -> Found {
        self.of_queue.found
    }

    fn area(&self) -> &Area {
        &self.of_queue.area
    }

    /// Begins anew, with no chain out.
    pub(in crate::queue) fn begin(&mut self, size: u16, available: Position, used: Position) {
        self.limit = 0;
        self.raise(u32::from(size));
        let lost = available.ahead_of(used, size) as u16;
        for (at, value) in [(SIZE, size), (LOST, lost)] {
            self.area()
                .publish_u16(Point::LedgerSize, at, value, Ordering::Relaxed);
        }
        self.set_published(used);
    }

    /// Where a predecessor has left the queue. `is_used` says whether the ring's descriptor at a position is used, or available in the next round.
    pub(in crate::queue) fn recover(
        &mut self,
        size: u16,
        is_used: impl Fn(Position) -> bool,
    ) -> Result<Left, QueueError> {
        let area = self.area();
        let noted = area.load_u16(SIZE, Ordering::Acquire);
        let limit = area.load_u32(LIMIT, Ordering::Acquire);
        let span = area.load_u32(SPAN, Ordering::Acquire);
        let lost = area.load_u16(LOST, Ordering::Acquire);
        let [from, to] = [span, span >> 16].map(|bits| Position::from_bits(bits as u16));
        let unfit = QueueError::Ledger { size, noted };
        let is_limit = (u32::from(size)..=IDENTIFIERS).contains(&limit);
        let is_inside = from.index() < size && to.index() < size;
        if noted != size || !is_limit || !is_inside || to.ahead_of(from, size) > size.into() {
            return Err(unfit);
        }
        self.limit = limit;
        let is_published = from != to && is_used(from);
        let next_used = if is_published { to } else { from };
        let (mut out, mut descriptors) = (Vec::new(), u32::from(lost));
        for identifier in 0..limit {
            let identifier = identifier as u16;
            let mark = self.area().load_u16(place(identifier), Ordering::Relaxed);
            match mark & !BACK {
                _ if is_published && mark & BACK != 0 => self.clear(identifier),
                0 if mark == 0 => {}
                0 => return Err(unfit),
                entries => {
                    descriptors += u32::from(entries);
                    out.push((identifier, entries));
                }
            }
        }
        if descriptors > u32::from(size) {
            return Err(unfit);
        }
        self.set_published(next_used);
        Ok(Left {
            next_available: next_used.plus(descriptors as u16, size),
            next_used,
            out,
        })
    }

    /// A chain is out from now on. Called before anything is done with it.
    #[inline]
    pub(in crate::queue) fn mark(&mut self, identifier: u16, entries: u16) {
        if u32::from(identifier) >= self.limit {
            self.raise(u32::from(identifier) + 1);
        }
        self.set_mark(Point::LedgerMark, identifier, entries);
    }

    /// It is given back, and not published yet.
    #[inline]
    pub(in crate::queue) fn mark_back(&mut self, identifier: u16, entries: u16) {
        self.set_mark(Point::LedgerBack, identifier, entries | BACK);
        self.back.push(identifier);
    }

    /// It counts as not taken.
    #[inline]
    pub(in crate::queue) fn clear(&self, identifier: u16) {
        self.set_mark(Point::LedgerClear, identifier, 0);
    }

    /// Everything that was given back is about to be published, by a store at the first of these positions.
    #[inline]
    pub(in crate::queue) fn begin_publication(&self, from: Position, to: Position) {
        self.set_span(Point::LedgerSpan, from, to);
    }

    /// It is published.
    #[inline]
    pub(in crate::queue) fn end_publication(&mut self, to: Position) {
        let mut back = std::mem::take(&mut self.back);
        for identifier in back.drain(..) {
            self.clear(identifier);
        }
        self.back = back;
        self.set_published(to);
    }

    pub(in crate::queue) fn note_unseen(&self, is_unseen: bool) {
        self.of_queue.note_unseen(is_unseen);
    }

    /// Has marks for identifiers up to this one, which it has not. Until then there may be anything in their places, such as a split queue's.
    #[cold]
    fn raise(&mut self, limit: u32) {
        for identifier in self.limit..limit {
            self.clear(identifier as u16);
        }
        self.limit = limit;
        self.area()
            .publish_u32(Point::LedgerSize, LIMIT, limit, Ordering::Release);
    }

    fn set_published(&self, used: Position) {
        self.set_span(Point::LedgerPublished, used, used);
    }

    #[inline]
    fn set_span(&self, at: Point, from: Position, to: Position) {
        let span = u32::from(from.to_bits()) | u32::from(to.to_bits()) << 16;
        self.area().publish_u32(at, SPAN, span, Ordering::Release);
    }

    #[inline]
    fn set_mark(&self, at: Point, identifier: u16, mark: u16) {
        self.area()
            .publish_u16(at, place(identifier), mark, Ordering::Release);
    }
}

fn place(identifier: u16) -> usize {
    MARKS + 2 * usize::from(identifier)
}
