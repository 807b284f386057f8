//! What differs between a directory here and the same one at the receiver.

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use wire::agent::transfer::{Listed, Message, What, check_name};

use super::Sender;
use crate::error::Stop;
use crate::file;
use crate::observer::Arrival;
use crate::walk::{Found, metadata};

impl Sender<'_> {
    /// What the receiver says about the directory that was entered, in the order of names.
    pub(super) fn hear_listing(&mut self) -> Result<Vec<Listed>, Stop> {
        self.heard.listing.clear();
        self.heard.listing_complete = false;
        self.wait_for(|heard| heard.listing_complete)?;
        let mut listing = std::mem::take(&mut self.heard.listing);
        listing.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(listing)
    }

    /// Hears what the receiver has in the directory that was entered, and says what is no more.
    pub(super) fn compare_names(
        &mut self,
        ours: &[Found],
        delete: bool,
    ) -> Result<Vec<Listed>, Stop> {
        let mut theirs = self.hear_listing()?;
        if !delete {
            return Ok(theirs);
        }
        let is_gone = |listed: &Listed| {
            match ours.binary_search_by(|found| found.name.cmp(&listed.name)) {
                Err(_) => true,
                // What is of another kind has to make room.
                Ok(place) => {
                    (ours[place].file_type == FileType::Directory)
                        != (listed.what == What::Directory)
                }
            }
        };
        let mut gone = Vec::new();
        theirs.retain(|listed| {
            let is_gone = is_gone(listed);
            if is_gone {
                gone.push(listed.name.clone());
            }
            !is_gone
        });
        for name in gone {
            if check_name(&name).is_err() {
                continue;
            }
            self.begin(
                Message::Remove { name: name.clone() },
                Some(Arrival::Removed),
                false,
            )?;
            // The position stays that of the directory, which begins with what is gone whenever the walk comes here.
            if let Some(removal) = self.in_flight.back_mut() {
                removal.path.push(b'/');
                removal.path.extend_from_slice(&name);
            }
        }
        Ok(theirs)
    }

    /// Whether the receiver has this file as it is here.
    pub(super) fn is_there(&mut self, found: &Found) -> Result<bool, Stop> {
        let Some(sync) = self.options.sync else {
            return Ok(false);
        };
        let Some((listed, directory)) = self.listed(found) else {
            return Ok(false);
        };
        let What::File { size, digest } = listed.what else {
            return Ok(false);
        };
        let theirs = listed.metadata;
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let Ok(stat) = rustix::fs::statat(directory, found.name.as_slice(), flags) else {
            return Ok(false);
        };
        let ours = metadata(&stat);
        let same_time =
            (ours.modified_s, ours.modified_ns) == (theirs.modified_s, theirs.modified_ns);
        let same_owner = !self.options.owner || (ours.uid, ours.gid) == (theirs.uid, theirs.gid);
        let mode_mask = if self.options.owner { 0o7777 } else { 0o777 };
        let same_mode = !self.options.preserve || ours.mode & mode_mask == theirs.mode & mode_mask;
        if file::size(&stat) != size
            || !same_owner
            || !same_mode
            || (self.options.preserve && !same_time)
        {
            return Ok(false);
        }
        if sync.checksum {
            let open = OFlags::RDONLY
                | OFlags::CLOEXEC
                | OFlags::NOFOLLOW
                | OFlags::NONBLOCK
                | OFlags::NOCTTY;
            let Ok(file) =
                rustix::fs::openat(directory, found.name.as_slice(), open, Mode::empty())
            else {
                return Ok(false);
            };
            let ours = file::digest(&file, || self.channel.stay_alive())?.ok();
            if ours.is_none() || ours != digest {
                return Ok(false);
            }
        } else if !same_time {
            return Ok(false);
        }
        let path = self.described_path();
        self.observer.unchanged(&path, size);
        Ok(true)
    }

    /// Whether the receiver has a link that leads there.
    pub(super) fn is_same_link(&self, found: &Found, ours: &[u8]) -> bool {
        self.listed(found).is_some_and(
            |(listed, _)| matches!(&listed.what, What::Symlink { target } if target == ours),
        )
    }

    fn listed(&self, found: &Found) -> Option<(&Listed, &std::os::fd::OwnedFd)> {
        let level = self.levels.last()?;
        let place = level
            .theirs
            .binary_search_by(|listed| listed.name.cmp(&found.name))
            .ok()?;
        Some((&level.theirs[place], &level.directory))
    }
}
