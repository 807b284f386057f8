//! What a successor of this process has to know of a device's queues: kept in a file of memory that outlives the process. This is about split queues; what
//! differs for packed ones is said [there](packed).
//!
//! Where a queue goes on is not in the guest's memory: that has the used index, and not how many chains were taken, nor which are out. A ledger has a
//! mark for each chain that is out. A mark is set before the chain is used, and taken away after the driver can see the chain in the used ring. So at any
//! instruction the number of chains taken is the used index plus the number of marks, once the marks of what is in the used ring are away:
//! the ledger also has the used index up to which they are. (The region of vhost-user's GET_INFLIGHT_FD does the same.) A device that works in turns, and
//! writes down its positions at the end of each, sets the marks then: most chains are given back in the turn that has taken them, and need none.
//!
//! What a successor finds is checked as if a guest had written it: a wrong ledger costs its own queue.

use std::fs::File;

use super::{MAX_QUEUE_SIZE, QueueError};
use crate::area::Area;
use crate::crash::Point;
use crate::guest::{GuestMemory, MemoryError, RegionSpec};
use crate::sync::Ordering;

mod packed;

pub(super) use packed::{Left, PackedLedger};

/// Where the marks begin, eight bytes for each head: how many chains had been taken when it was, and zero while it is not out.
const MARKS: usize = 8;
const SIZE: usize = 0;
const PUBLISHED: usize = 2;

/// Bytes before the first queue's: what is of the device as a whole.
const HEADER_BYTES: usize = 4096;
/// The flag of [`Ledgers::set_answering`].
const ANSWERING: usize = 0;
/// Whether a queue's driver has notified, and nothing that it writes was seen.
const UNSEEN: usize = 4;

/// Bytes of one queue. Those that are never written cost no memory.
const QUEUE_BYTES: usize = MARKS + 8 * MAX_QUEUE_SIZE as usize;

/// The ledgers of all queues of a device.
#[derive(Debug)]
pub struct Ledgers {
    memory: GuestMemory,
    header: Area,
}

impl Ledgers {
    /// How long the file of so many queues is, in bytes.
    pub fn file_bytes(queues: usize) -> u64 {
        (HEADER_BYTES + queues * QUEUE_BYTES) as u64
    }

    /// Those in this file, which is in memory and of the right length.
    ///
    /// # Errors
    /// What the file's mapping meets.
    pub fn new(file: File, queues: usize) -> Result<Ledgers, MemoryError> {
        let memory = GuestMemory::with_regions(vec![RegionSpec {
            guest_address: 0,
            size: Ledgers::file_bytes(queues),
            frontend_address: 0,
            file,
            file_offset: 0,
        }])?;
        let header = header(&memory).ok_or(MemoryError::NotMapped { address: 0 })?;
        Ok(Ledgers { memory, header })
    }

    /// The ledger of one queue; none for more queues than the file has room for.
    pub fn queue(&self, index: usize, found: Found) -> Option<Ledger> {
        let start = HEADER_BYTES + index.checked_mul(QUEUE_BYTES)?;
        let area = super::area(&self.memory, "ledger", start as u64, QUEUE_BYTES, 8);
        let area = area.ok()?;
        Some(Ledger {
            header: header(&self.memory)?,
            area,
            found,
            taken: 0,
        })
    }

    /// Notes that a message of the VMM's is being read and answered, or that it has been.
    pub fn set_answering(&self, is_answering: bool) {
        self.header.publish_u32(
            Point::LedgerAnswering,
            ANSWERING,
            is_answering.into(),
            Ordering::Release,
        );
    }

    /// Whether the process before ended in the middle of an answer.
    pub fn is_answering(&self) -> bool {
        self.header.load_u32(ANSWERING, Ordering::Acquire) != 0
    }

    /// Whether nothing is seen of what the device's driver writes, as far as a process has found out.
    pub fn is_unseen(&self) -> bool {
        self.header.load_u32(UNSEEN, Ordering::Acquire) != 0
    }
}

/// What a ledger holds when a queue is set up with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing of use: the queue goes on where its [`QueueSetup`](super::QueueSetup) says.
    Nothing,
    /// What a process wrote that ran this queue until it ended. What it had out is given back.
    Predecessors,
    /// Likewise, and what it did since it was at these positions has not happened: chains that it took are taken again, and the others that were out
    /// stay out.
    Since(Positions),
}

/// How far a split queue has come, modulo 65536.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Positions {
    /// Chains taken.
    pub available: u16,
    /// Chains given back.
    pub used: u16,
}

/// The ledger of one queue.
#[derive(Debug)]
pub struct Ledger {
    header: Area,
    area: Area,
    found: Found,
    /// Chains taken, by this process.
    taken: u64,
}

impl Ledger {
    /// Whether a predecessor ran the queue.
    pub fn has_predecessor(&self) -> bool {
        self.found != Found::Nothing
    }

    pub(super) fn found(&self) -> Found {
        self.found
    }

    /// Begins anew, with no chain out.
    pub(super) fn begin(&mut self, size: u16, used: u16) {
        for head in 0..size {
            self.clear(head);
        }
        self.area
            .publish_u16(Point::LedgerSize, SIZE, size, Ordering::Relaxed);
        self.set_published(used);
        self.found = Found::Nothing;
    }

    /// The heads of the chains that a predecessor had out, in the order in which they were taken. `used` is the index in the guest's memory, and `head_at`
    /// gives the head in the used ring at an index.
    pub(super) fn recover(
        &mut self,
        size: u16,
        used: u16,
        head_at: impl Fn(u16) -> u32,
    ) -> Result<Vec<u16>, QueueError> {
        let noted = self.area.load_u16(SIZE, Ordering::Acquire);
        let published = self.area.load_u16(PUBLISHED, Ordering::Acquire);
        if noted != size || used.wrapping_sub(published) > size {
            return Err(QueueError::Ledger { size, noted });
        }
        for step in 0..used.wrapping_sub(published) {
            match u16::try_from(head_at(published.wrapping_add(step))) {
                Ok(head) if head < size => self.clear(head),
                _ => return Err(QueueError::Ledger { size, noted }),
            }
        }
        self.set_published(used);
        let out = self.out(size);
        self.taken = out.last().map_or(0, |head| self.taken_at(*head));
        self.found = Found::Nothing;
        Ok(out)
    }

    /// The heads of the chains that are out, in the order in which they were taken.
    pub(super) fn out(&self, size: u16) -> Vec<u16> {
        let mut out: Vec<u16> = (0..size).filter(|head| self.taken_at(*head) != 0).collect();
        out.sort_by_key(|head| self.taken_at(*head));
        out
    }

    fn taken_at(&self, head: u16) -> u64 {
        self.area.load_u64(mark(head), Ordering::Relaxed)
    }

    /// A chain is out from now on. Called before anything is done with it.
    #[inline]
    pub(super) fn mark(&mut self, head: u16) {
        self.taken = self.taken.saturating_add(1);
        self.area
            .publish_u64(Point::LedgerMark, mark(head), self.taken, Ordering::Release);
    }

    /// It is not any more. Called after the driver can see so.
    #[inline]
    pub(super) fn clear(&self, head: u16) {
        self.area
            .publish_u64(Point::LedgerClear, mark(head), 0, Ordering::Release);
    }

    /// Notes that nothing is seen of what the device's driver writes, or that it is.
    pub(super) fn note_unseen(&self, is_unseen: bool) {
        let (at, order) = (Point::LedgerUnseen, Ordering::Release);
        self.header.publish_u32(at, UNSEEN, is_unseen.into(), order);
    }

    /// The marks of what is in the used ring up to here are away.
    #[inline]
    pub(super) fn set_published(&self, used: u16) {
        self.area
            .publish_u16(Point::LedgerPublished, PUBLISHED, used, Ordering::Release);
    }
}

fn header(memory: &GuestMemory) -> Option<Area> {
    super::area(memory, "ledger", 0, HEADER_BYTES, 8).ok()
}

fn mark(head: u16) -> usize {
    MARKS + 8 * usize::from(head)
}
