//! A transfer's watcher.

use wire::agent::transfer::{Position, Totals};

/// What was put in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// A file with so many bytes of content, holes not counted.
    File {
        /// How many.
        bytes: u64,
    },
    /// A directory with all that is in it.
    Directory,
    /// A directory that was entered; it is reported once more when it is complete.
    Entered,
    /// A symbolic link.
    Symlink,
    /// A name that is no more.
    Removed,
}

/// Gets the progress of a transfer, in the thread that makes it.
pub trait Observer {
    /// So much will come. Not repeated when the transfer goes on after a broken connection.
    fn announced(&mut self, totals: &Totals) {
        let _ = totals;
    }

    /// This file begins, of which so much was there already.
    fn begins(&mut self, path: &[u8], there_already: u64) {
        let _ = (path, there_already);
    }

    /// So many bytes of it have been sent or received.
    fn passed(&mut self, bytes: u64) {
        let _ = bytes;
    }

    /// Everything up to here is in place at the receiver, and this is what came last. Nothing came if it could not be put in place.
    fn arrived(&mut self, position: &Position, arrival: Option<Arrival>) {
        let _ = (position, arrival);
    }

    /// This could not be read or not be put in place, or not as it was meant.
    fn failed(&mut self, path: &[u8], reason: &str) {
        let _ = (path, reason);
    }

    /// The receiver has this file already.
    fn unchanged(&mut self, path: &[u8], bytes: u64) {
        let _ = (path, bytes);
    }

    /// Whether the destination is a directory into which the sources are put; called on senders.
    fn proceeds(&mut self, into_directory: bool) {
        let _ = into_directory;
    }
}

/// Ignores all progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {}
