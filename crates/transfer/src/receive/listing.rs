//! What is there already, for a sender that sends only what differs.

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use wire::agent::transfer::{Listed, MAX_LISTED, MAX_PATH_LEN, Message, What};

use super::Receiver;
use crate::error::Stop;
use crate::file;
use crate::partial::is_own;
use crate::walk::{Found, kind, list, metadata};

impl Receiver<'_> {
    /// Says what is in the directory that was entered.
    pub(super) fn list(&mut self) -> Result<(), Stop> {
        let with_digest = self.options.sync.is_some_and(|sync| sync.checksum);
        let found = match self.levels.last().map(|level| list(&level.directory)) {
            Some(Ok(found)) => found,
            Some(Err(why)) => {
                self.refuse(b"", &format!("what is there cannot be read: {why}"))?;
                Vec::new()
            }
            None => Vec::new(),
        };
        let mut listed = Vec::with_capacity(MAX_LISTED.min(found.len()));
        let mut room = LISTING_LEN;
        for found in found {
            if is_own(&self.request.id, &found.name) {
                continue;
            }
            let Some(one) = self.look(&found, with_digest)? else {
                continue;
            };
            let len = ENTRY_LEN + one.name.len() + target_len(&one.what);
            if listed.len() >= MAX_LISTED || len > room {
                self.channel
                    .queue(Message::Listing(std::mem::take(&mut listed)))?;
                room = LISTING_LEN;
            }
            room -= len;
            listed.push(one);
        }
        self.channel.queue(Message::Listing(listed))?;
        self.list_nothing(true)
    }

    /// Says that there is nothing (more).
    pub(super) fn list_nothing(&mut self, is_sync: bool) -> Result<(), Stop> {
        if is_sync {
            self.channel.queue(Message::EndOfListing)?;
            self.channel.flush()?;
        }
        Ok(())
    }

    fn look(&mut self, found: &Found, with_digest: bool) -> Result<Option<Listed>, Stop> {
        let Some(level) = self.levels.last() else {
            return Ok(None);
        };
        let name = found.name.as_slice();
        let Ok(stat) = rustix::fs::statat(&level.directory, name, AtFlags::SYMLINK_NOFOLLOW) else {
            return Ok(None);
        };
        let what = match kind(&stat) {
            FileType::Directory => What::Directory,
            FileType::RegularFile => What::File {
                size: file::size(&stat),
                digest: if with_digest {
                    self.digest(name, &stat)?
                } else {
                    None
                },
            },
            FileType::Symlink => match rustix::fs::readlinkat(&level.directory, name, Vec::new()) {
                Ok(target) if (1..=MAX_PATH_LEN).contains(&target.as_bytes().len()) => {
                    What::Symlink {
                        target: target.into_bytes(),
                    }
                }
                _ => What::Other,
            },
            _ => What::Other,
        };
        Ok(Some(Listed {
            name: found.name.clone(),
            what,
            metadata: metadata(&stat),
        }))
    }

    fn digest(&mut self, name: &[u8], seen: &Stat) -> Result<Option<u64>, Stop> {
        let Some(level) = self.levels.last() else {
            return Ok(None);
        };
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let Ok(file) = rustix::fs::openat(&level.directory, name, flags, Mode::empty()) else {
            return Ok(None);
        };
        let is_same = rustix::fs::fstat(&file)
            .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (seen.st_dev, seen.st_ino));
        if !is_same {
            return Ok(None);
        }
        let channel = &mut *self.channel;
        Ok(file::digest(&file, || channel.stay_alive())?.ok())
    }
}

/// The most of one listing that names and targets take, with [`ENTRY_LEN`] for each entry's numbers, in bytes.
const LISTING_LEN: usize = 48 * 1024;

/// The most that the numbers of an entry take, in bytes.
const ENTRY_LEN: usize = 64;

fn target_len(what: &What) -> usize {
    match what {
        What::Symlink { target } => target.len(),
        _ => 0,
    }
}
