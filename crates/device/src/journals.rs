//! Journals that the keeper has for the daemon after this one.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use guestmem::crash::{self, Point};
use guestmem::journal::{Journal, JournalError};
use keeper::Keeper;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// One of them.
#[derive(Debug)]
pub(crate) struct KeptJournal {
    /// Under which the keeper has it.
    pub(crate) key: &'static str,
    /// How many records it has room for.
    pub(crate) records: usize,
    /// What is lost if it cannot be read, for the log.
    pub(crate) loss: &'static str,
}

impl KeptJournal {
    /// What a predecessor has left. What cannot be read is none.
    ///
    /// # Errors
    /// When it is a later version's.
    pub(crate) fn of_before(&self, keeper: &Keeper) -> io::Result<Option<Journal>> {
        let item = keeper.take(self.key);
        let file = item.and_then(|item| item.descriptors.into_iter().next());
        let opened = file.map(|file| Journal::open(File::from(file), self.records));
        match opened.transpose() {
            Ok(journal) => Ok(journal),
            Err(error @ JournalError::Newer) => Err(io::Error::other(error)),
            Err(error) => {
                tracing::warn!(%error, "cannot read what the daemon before wrote down: {}", self.loss);
                Ok(None)
            }
        }
    }

    /// A new one, which the keeper has from now on.
    pub(crate) fn create(&self, keeper: &Keeper) -> io::Result<Journal> {
        let file = memfd_create(format!("ringdown-{}", self.key), MemfdFlags::CLOEXEC)?;
        ftruncate(&file, Journal::file_bytes(self.records))?;
        let copy = File::from(file.try_clone()?);
        let journal = Journal::create(copy, self.records).map_err(io::Error::other)?;
        crash::point(Point::Keeper);
        keeper.put(self.key, &[], &[file.as_fd()])?;
        crash::point(Point::Keeper);
        Ok(journal)
    }
}
