//! Records in memory that outlives the process, of which any number change at once.
//!
//! Each record has two places. A change is written to the place that does not count, with the number of the next turn; then a single store makes that turn
//! the last one, and with it all its changes count. So wherever a process ends, its successor finds the records as they were at the end of a turn. What others
//! can see of a turn, such as a used index, is to be published after [`Journal::commit`].
//!
//! What is found is checked as if a guest had written it: each record has a checksum, and one that does not fit counts as none.

use std::cmp::Ordering::{Equal, Greater};
use std::fs::File;

use crate::area::{Area, Refusal};
use crate::crash::Point;
use crate::guest::{GuestMemory, MemoryError, RegionSpec};
use crate::sync::Ordering;

/// The longest record, in bytes.
pub const MAX_RECORD_BYTES: usize = 304;

/// Bytes of one place: turn, length, checksum, and the record.
const PLACE_BYTES: usize = 16 + MAX_RECORD_BYTES;

/// Bytes before the first record: what the file is, how many records it has room for, how many of them have been written, and the last turn.
const HEADER_BYTES: usize = 4096;
const MAGIC_AT: usize = 0;
const RECORDS_AT: usize = 8;
const WRITTEN_AT: usize = 16;
const TURN_AT: usize = 24;

/// What such a file begins with: these letters, and the number of its shape.
const LETTERS: [u8; 7] = *b"journal";
/// Which shape a journal and its records have.
pub const SHAPE: u8 = 3;
const MAGIC: u64 = {
    let [a, b, c, d, e, f, g] = LETTERS;
    u64::from_le_bytes([a, b, c, d, e, f, g, SHAPE])
};

/// Why a file is no journal.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("it is no journal")]
    Foreign,
    #[error(
        "a later version of Ringdown wrote it: start that one, or let go of what is kept (`ringdown hold --release`)"
    )]
    Newer,
    #[error("it has {found} records, and not {expected}")]
    Size { expected: usize, found: u64 },
}

/// A table of records. One process at a time writes it.
#[derive(Debug)]
pub struct Journal {
    /// Keeps the mapping.
    _memory: GuestMemory,
    area: Area,
    records: usize,
    /// The first so many records have been written. The others need not be read, which would cost memory.
    written: usize,
    turn: u64,
    /// Something was written that does not count yet.
    is_touched: bool,
}

impl Journal {
    /// How long the file of so many records is, in bytes. Records that are never written cost no memory.
    pub fn file_bytes(records: usize) -> u64 {
        (HEADER_BYTES + records * 2 * PLACE_BYTES) as u64
    }

    /// A journal without records, in a file of zeros of the right length.
    ///
    /// # Errors
    /// What the file's mapping meets.
    pub fn create(file: File, records: usize) -> Result<Journal, JournalError> {
        let journal = Journal::map(file, records)?;
        let area = &journal.area;
        area.publish_u64(
            Point::JournalRecords,
            RECORDS_AT,
            records as u64,
            Ordering::Relaxed,
        );
        area.publish_u64(Point::JournalMagic, MAGIC_AT, MAGIC, Ordering::Release);
        Ok(journal)
    }

    /// The journal that another process left in this file.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn open(file: File, records: usize) -> Result<Journal, JournalError> {
        let mut journal = Journal::map(file, records)?;
        let [letters @ .., shape] = journal
            .area
            .load_u64(MAGIC_AT, Ordering::Acquire)
            .to_le_bytes();
        match (letters == LETTERS, shape.cmp(&SHAPE)) {
            (true, Equal) => {}
            (true, Greater) => return Err(JournalError::Newer),
            _ => return Err(JournalError::Foreign),
        }
        let found = journal.area.load_u64(RECORDS_AT, Ordering::Relaxed);
        if found != records as u64 {
            return Err(JournalError::Size {
                expected: records,
                found,
            });
        }
        journal.turn = journal.area.load_u64(TURN_AT, Ordering::Acquire);
        let written = journal.area.load_u64(WRITTEN_AT, Ordering::Relaxed);
        journal.written = records.min(usize::try_from(written).unwrap_or(records));
        journal.forget_last_turn();
        Ok(journal)
    }

    fn map(file: File, records: usize) -> Result<Journal, JournalError> {
        let size = Journal::file_bytes(records);
        let memory = GuestMemory::with_regions(vec![RegionSpec {
            guest_address: 0,
            size,
            frontend_address: 0,
            file,
            file_offset: 0,
        }])?;
        let no_place = MemoryError::NotMapped { address: 0 };
        let region = memory.region_at_frontend(0).ok_or(no_place)?;
        let area = Area::new(region, 0, size as usize, 8);
        let area = area.map_err(|_: Refusal| MemoryError::NotMapped { address: 0 })?;
        Ok(Journal {
            _memory: memory,
            area,
            records,
            written: 0,
            turn: 0,
            is_touched: false,
        })
    }

    /// Takes away what was written in a turn that did not end: it would count from the end of the next one on.
    fn forget_last_turn(&self) {
        for index in 0..self.written {
            for place in [place(index, 0), place(index, 1)] {
                if self.turn_of(place) > self.turn {
                    self.area
                        .publish_u64(Point::JournalForget, place, 0, Ordering::Relaxed);
                }
            }
        }
    }

    /// How many records there may be: those behind them have never been written.
    pub fn written(&self) -> usize {
        self.written
    }

    /// The record at this index, as it was at the end of the last turn.
    pub fn read(&self, index: usize) -> Option<Vec<u8>> {
        if index >= self.written {
            return None;
        }
        let places = [place(index, 0), place(index, 1)];
        let counting = places.into_iter().filter(|place| self.counts(*place));
        let newest = counting.max_by_key(|place| self.turn_of(*place))?;
        let len = self.area.load_u32(newest + 8, Ordering::Relaxed) as usize;
        let checksum = self.area.load_u32(newest + 12, Ordering::Relaxed);
        if len == 0 || len > MAX_RECORD_BYTES {
            return None;
        }
        let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
        let mut found = Checksum::of(self.turn_of(newest), index, len);
        for word in 0..len.div_ceil(8) {
            let word = self
                .area
                .load_u64(newest + 16 + 8 * word, Ordering::Relaxed);
            found.add(word);
            bytes.extend(word.to_le_bytes());
        }
        bytes.truncate(len);
        (found.get() == checksum).then_some(bytes)
    }

    /// Replaces the record at this index by another one, or without bytes by none, from the next [`commit`](Self::commit) on. Returns whether there is room for it.
    pub fn write(&mut self, index: usize, record: &[u8]) -> bool {
        if index >= self.records || record.len() > MAX_RECORD_BYTES {
            return false;
        }
        if index >= self.written {
            self.written = index + 1;
            let written = self.written as u64;
            self.area.publish_u64(
                Point::JournalWritten,
                WRITTEN_AT,
                written,
                Ordering::Release,
            );
        }
        let places = [place(index, 0), place(index, 1)];
        let next = self.turn + 1;
        // The one that does not count; of two that do, the older one, which counts no more.
        let [first, second] = places.map(|place| match self.turn_of(place) {
            turn if turn > self.turn => 0,
            turn => turn,
        });
        let place = places[usize::from(second < first)];
        let area = &self.area;
        area.publish_u64(Point::JournalPlace, place, next, Ordering::Relaxed);
        area.publish_u32(
            Point::JournalLen,
            place + 8,
            record.len() as u32,
            Ordering::Relaxed,
        );
        let mut checksum = Checksum::of(next, index, record.len());
        let mut at = place + 16;
        let mut publish = |word| {
            checksum.add(word);
            area.publish_u64(Point::JournalWord, at, word, Ordering::Relaxed);
            at += 8;
        };
        let words = record.chunks_exact(8);
        let rest = words.remainder();
        for word in words {
            publish(u64::from_le_bytes(word.try_into().unwrap_or_default()));
        }
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            publish(u64::from_le_bytes(word));
        }
        area.publish_u32(
            Point::JournalChecksum,
            place + 12,
            checksum.get(),
            Ordering::Relaxed,
        );
        self.is_touched = true;
        true
    }

    /// From now on all that was written counts.
    pub fn commit(&mut self) {
        if !std::mem::take(&mut self.is_touched) {
            return;
        }
        self.turn += 1;
        self.area
            .publish_u64(Point::JournalTurn, TURN_AT, self.turn, Ordering::Release);
    }

    fn turn_of(&self, place: usize) -> u64 {
        self.area.load_u64(place, Ordering::Relaxed)
    }

    fn counts(&self, place: usize) -> bool {
        (1..=self.turn).contains(&self.turn_of(place))
    }
}

/// Where a place of a record begins.
fn place(index: usize, which: usize) -> usize {
    HEADER_BYTES + (2 * index + which) * PLACE_BYTES
}

/// Of a record's turn, index, length and words. Each step is a bijection of what came before, so that a change of one word changes the 64 bits in any case; against
/// forgery it is no help, and need not be: only daemons write a journal.
struct Checksum(u64);

impl Checksum {
    fn of(turn: u64, index: usize, len: usize) -> Checksum {
        let mut checksum = Checksum(0);
        checksum.add(turn);
        checksum.add((index as u64) << 32 | len as u64);
        checksum
    }

    fn add(&mut self, word: u64) {
        // The odd number is of SplitMix64 (Steele, Lea, Flood 2014).
        let mixed = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn get(&self) -> u32 {
        self.0 as u32
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
