//! What a successor of this process has to know of a device's split queues: kept in a file of memory that outlives the process.
//!
//! Where a queue goes on is not in the guest's memory: that has the used index, and not how many chains were taken, nor which are out. A ledger has a
//! mark for each chain that is out. A mark is set before the chain is used, and taken away after the driver can see the chain in the used ring. So at any
//! instruction the number of chains taken is the used index plus the number of marks, once the marks of what is in the used ring are away:
//! the ledger also has the used index up to which they are. (The region of vhost-user's GET_INFLIGHT_FD does the same.)
//!
//! What a successor finds is checked as if a guest had written it: a wrong ledger costs its own queue.

use std::fs::File;

use super::{MAX_QUEUE_SIZE, QueueError, crash};
use crate::area::Area;
use crate::guest::{GuestMemory, MemoryError, RegionSpec};
use crate::sync::Ordering;

/// Where the marks begin, two bytes for each head.
const MARKS: usize = 8;
const SIZE: usize = 0;
const PUBLISHED: usize = 2;

/// Bytes before the first queue's: the flag of [`Ledgers::set_answering`].
const HEADER_BYTES: usize = 4096;

/// Bytes of one queue. Those that are never written cost no memory.
const QUEUE_BYTES: usize = MARKS + 2 * MAX_QUEUE_SIZE as usize;

/// Bytes of a record: four numbers.
const RECORD_BYTES: usize = 16;

/// The ledgers of all queues of a device, and a list of records for whatever else has to be known of it.
#[derive(Debug)]
pub struct Ledgers {
    memory: GuestMemory,
    header: Area,
    queues: usize,
    records: usize,
}

impl Ledgers {
    /// How long the file of so many queues and records is, in bytes.
    pub fn file_bytes(queues: usize, records: usize) -> u64 {
        (HEADER_BYTES + queues * QUEUE_BYTES + (1 + records) * RECORD_BYTES) as u64
    }

    /// Those in this file, which is in memory and of the right length.
    ///
    /// # Errors
    /// What the file's mapping meets.
    pub fn new(file: File, queues: usize, records: usize) -> Result<Ledgers, MemoryError> {
        let memory = GuestMemory::with_regions(vec![RegionSpec {
            guest_address: 0,
            size: Ledgers::file_bytes(queues, records),
            frontend_address: 0,
            file,
            file_offset: 0,
        }])?;
        let no_place = MemoryError::NotMapped { address: 0 };
        let header = super::area(&memory, "ledger", 0, HEADER_BYTES, 8);
        let header = header.map_err(|_| no_place)?;
        Ok(Ledgers {
            memory,
            header,
            queues,
            records,
        })
    }

    /// The list of records.
    pub fn records(&self) -> Option<Records> {
        let start = HEADER_BYTES + self.queues * QUEUE_BYTES;
        let bytes = (1 + self.records) * RECORD_BYTES;
        let area = super::area(&self.memory, "list", start as u64, bytes, 8).ok()?;
        let room = self.records;
        Some(Records { area, room })
    }

    /// The ledger of one queue; none for more queues than the file has room for.
    pub fn queue(&self, index: usize, found: Found) -> Option<Ledger> {
        let start = HEADER_BYTES + index.checked_mul(QUEUE_BYTES)?;
        let area = super::area(&self.memory, "ledger", start as u64, QUEUE_BYTES, 8);
        let area = area.ok()?;
        Some(Ledger { area, found })
    }

    /// Notes that a message of the VMM's is being read and answered, or that it has been.
    pub fn set_answering(&self, is_answering: bool) {
        self.header
            .store_u32(0, is_answering.into(), Ordering::Release);
    }

    /// Whether the process before ended in the middle of an answer.
    pub fn is_answering(&self) -> bool {
        self.header.load_u32(0, Ordering::Acquire) != 0
    }
}

/// A list of records of four numbers, in the file of a device's ledgers.
#[derive(Debug)]
pub struct Records {
    area: Area,
    room: usize,
}

impl Records {
    /// What stands there: as it was left, if another process wrote it.
    pub fn read(&self) -> Vec<[u32; 4]> {
        let len = self.area.load_u32(0, Ordering::Acquire) as usize;
        let field = |place, index| self.area.load_u32(field(place, index), Ordering::Relaxed);
        let record = |place| std::array::from_fn(|index| field(place, index));
        (0..len.min(self.room)).map(record).collect()
    }

    /// Writes a record at its place, and makes the list longer if it was not so long. A place behind the room has no effect.
    pub fn set(&self, place: usize, record: [u32; 4]) {
        if place >= self.room {
            return;
        }
        for (index, number) in record.into_iter().enumerate() {
            let field = field(place, index);
            self.area.store_u32(field, number, Ordering::Relaxed);
        }
        if self.area.load_u32(0, Ordering::Relaxed) as usize <= place {
            self.truncate(place + 1);
        }
    }

    /// Makes the list so long.
    pub fn truncate(&self, len: usize) {
        let len = len.min(self.room) as u32;
        self.area.store_u32(0, len, Ordering::Release);
    }
}

fn field(place: usize, index: usize) -> usize {
    (1 + place) * RECORD_BYTES + 4 * index
}

/// What a ledger holds when a queue is set up with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing of use: the queue goes on where its [`QueueSetup`](super::QueueSetup) says.
    Nothing,
    /// What a process wrote that ran this queue until it ended.
    Predecessors,
}

/// The ledger of one split queue.
#[derive(Debug)]
pub struct Ledger {
    area: Area,
    found: Found,
}

impl Ledger {
    /// Whether a predecessor ran the queue.
    pub fn has_predecessor(&self) -> bool {
        self.found == Found::Predecessors
    }

    /// Begins anew, with no chain out.
    pub(super) fn begin(&mut self, size: u16, used: u16) {
        for head in 0..size {
            self.clear(head);
        }
        self.area.store_u16(SIZE, size, Ordering::Relaxed);
        self.set_published(used);
        self.found = Found::Nothing;
    }

    /// The heads of the chains that a predecessor had out. `used` is the index in the guest's memory, and `head_at` gives the head in the used ring at an index.
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
        let is_out = |head: &u16| self.area.load_u16(mark(*head), Ordering::Relaxed) != 0;
        let out = (0..size).filter(is_out).collect();
        self.found = Found::Nothing;
        Ok(out)
    }

    /// A chain is out from now on. Called before anything is done with it.
    #[inline]
    pub(super) fn mark(&self, head: u16) {
        crash::point();
        self.area.store_u16(mark(head), 1, Ordering::Release);
        crash::point();
    }

    /// It is not any more. Called after the driver can see so.
    #[inline]
    pub(super) fn clear(&self, head: u16) {
        crash::point();
        self.area.store_u16(mark(head), 0, Ordering::Release);
    }

    /// The marks of what is in the used ring up to here are away.
    #[inline]
    pub(super) fn set_published(&self, used: u16) {
        crash::point();
        self.area.store_u16(PUBLISHED, used, Ordering::Release);
        crash::point();
    }
}

fn mark(head: u16) -> usize {
    MARKS + 2 * usize::from(head)
}
