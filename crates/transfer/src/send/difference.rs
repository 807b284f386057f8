//! What differs between a directory here and the same one at the receiver.

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use wire::agent::transfer::{Listed, MAX_DIRECTORY_ENTRIES, Message, What, check_name};

use super::Sender;
use crate::error::Stop;
use crate::file;
use crate::observer::Arrival;
use crate::walk::{Found, metadata};

/// The most that is kept of one listing while it comes, in bytes. Behind its end only what is here too is.
const MAX_LISTING_LEN: usize = 256 * 1024 * 1024;

impl Sender<'_> {
    /// Takes in what the receiver lists of the directory that was entered.
    pub(super) fn hear_listing(
        &mut self,
        mut each: impl FnMut(Listed) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let mut count = 0;
        loop {
            match self.channel.message()? {
                Message::Listing(listed) => {
                    count += listed.len();
                    if count > MAX_DIRECTORY_ENTRIES {
                        return Err(Stop::protocol("it listed more than a directory may have"));
                    }
                    listed.into_iter().try_for_each(&mut each)?;
                }
                Message::EndOfListing => return Ok(()),
                other => self.hear(other)?,
            }
        }
    }

    /// Takes what the receiver has in the directory that was entered, says what is no more, and keeps what is here too.
    pub(super) fn compare_names(
        &mut self,
        ours: &[Found],
        delete: bool,
    ) -> Result<Vec<Listed>, Stop> {
        let (mut theirs, mut gone) = (Vec::new(), Vec::new());
        let mut len = 0;
        self.hear_listing(|mut listed| {
            let place = ours.binary_search_by(|found| found.name.cmp(&listed.name));
            let here = place.ok().map(|place| ours[place].file_type);
            if here != Some(FileType::Symlink) && matches!(listed.what, What::Symlink { .. }) {
                listed.what = What::Other;
            }
            len += size_of::<Listed>() + listed.name.len();
            if let What::Symlink { target } = &listed.what {
                len += target.len();
            }
            let is_directory = listed.what == What::Directory;
            match here {
                // What is of another kind has to make room.
                Some(here) if !delete || (here == FileType::Directory) == is_directory => {
                    theirs.push(listed);
                }
                _ if delete => gone.push(listed.name),
                _ => return Ok(()),
            }
            match len > MAX_LISTING_LEN {
                true => Err(Stop::protocol("it listed more than can be compared")),
                false => Ok(()),
            }
        })?;
        theirs.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        theirs.dedup_by(|one, other| one.name == other.name);
        theirs.shrink_to_fit();
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
