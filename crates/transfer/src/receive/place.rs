//! Directories, links and removals.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use wire::agent::transfer::Metadata;

use super::{Level, Receiver};
use crate::destination::Target;
use crate::error::Stop;
use crate::observer::Arrival;
use crate::partial::{Trouble, apply, other_name, owner, rename, times};
use crate::remove;
use crate::walk::{metadata, open_directory};

impl Receiver<'_> {
    /// Enters a directory, which is made if it is not there.
    pub(super) fn enter(&mut self, name: Vec<u8>, metadata: Metadata) -> Result<(), Stop> {
        let is_sync = self.options.sync.is_some();
        self.check_top(self.options.recursive)?;
        if !self.lost.is_empty() {
            self.check_depth()?;
            self.refuse(&name, IN_NOTHING)?;
            self.lost.push(name);
            return self.list_nothing(is_sync);
        }
        let name = self.admit(name)?;
        self.check_depth()?;
        let (opened, metadata) = if name == b"." {
            (self.open_destination(), None)
        } else {
            (self.make_directory(&name), Some(metadata))
        };
        match opened {
            Ok(directory) => {
                self.levels.push(Level {
                    directory,
                    name,
                    metadata,
                });
                self.arrive(None, Some(Arrival::Entered), false);
                if is_sync { self.list() } else { Ok(()) }
            }
            Err(trouble) => {
                self.trouble(&name, trouble)?;
                self.lost.push(name);
                self.list_nothing(is_sync)
            }
        }
    }

    fn open_destination(&self) -> Result<OwnedFd, Trouble> {
        match self.request.target {
            Target::Place(place) => Ok(rustix::io::fcntl_dupfd_cloexec(&place.directory, 0)?),
            Target::Stream(_) => Err(Trouble::Entry(NO_STREAM.to_owned())),
        }
    }

    fn make_directory(&self, name: &[u8]) -> Result<OwnedFd, Trouble> {
        let parent = self
            .directory()
            .ok_or_else(|| Trouble::Entry(NO_STREAM.to_owned()))?;
        // No other user may read it before it has its mode.
        let mode = if self.options.preserve { 0o700 } else { 0o777 };
        let is_new = match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(mode)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(error.into()),
        };
        let directory = open_directory(parent, name).map_err(|error| match error {
            Errno::NOTDIR | Errno::LOOP => Trouble::Entry(
                "there is something in its place that is no directory, or a symbolic link"
                    .to_owned(),
            ),
            error => Trouble::from(error),
        })?;
        if !is_new && self.options.preserve {
            open_up(&directory)?;
        }
        Ok(directory)
    }

    /// A directory is complete: it gets its mode and its times.
    pub(super) fn exit(&mut self) -> Result<(), Stop> {
        if let Some(name) = self.lost.pop() {
            if self.lost.is_empty() {
                self.arrive(Some(&name), None, true);
            }
            return Ok(());
        }
        let Some(level) = self.levels.last() else {
            return Err(Stop::protocol(
                "it left a directory that it had not entered",
            ));
        };
        let applied = match &level.metadata {
            Some(metadata) => apply(level.directory.as_fd(), metadata, &self.options),
            None => Ok(()),
        };
        let synced = if self.options.fsync {
            rustix::fs::fsync(&level.directory).map_err(|error| error.to_string())
        } else {
            Ok(())
        };
        if let Err(why) = applied.and(synced) {
            self.refuse(b"", &why)?;
        }
        self.arrive(None, Some(Arrival::Directory), true);
        self.levels.pop();
        Ok(())
    }

    pub(super) fn make_symlink(
        &mut self,
        name: Vec<u8>,
        metadata: &Metadata,
        target: &[u8],
    ) -> Result<(), Stop> {
        self.check_top(false)?;
        if !self.lost.is_empty() {
            return self.refuse(&name, IN_NOTHING);
        }
        let name = self.admit(name)?;
        let arrival = match self.place_symlink(&name, metadata, target) {
            Ok(()) => Some(Arrival::Symlink),
            Err(trouble) => {
                self.trouble(&name, trouble)?;
                None
            }
        };
        self.arrive(Some(&name), arrival, true);
        Ok(())
    }

    fn place_symlink(
        &self,
        name: &[u8],
        metadata: &Metadata,
        target: &[u8],
    ) -> Result<(), Trouble> {
        let directory = self
            .directory()
            .ok_or_else(|| Trouble::Entry(NO_STREAM.to_owned()))?;
        match rustix::fs::symlinkat(target, directory, name) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let own_name = other_name(&self.request.id);
                let _ = rustix::fs::unlinkat(directory, own_name.as_slice(), AtFlags::empty());
                rustix::fs::symlinkat(target, directory, own_name.as_slice())?;
                if let Err(trouble) = rename(directory, &own_name, name) {
                    let _ = rustix::fs::unlinkat(directory, own_name.as_slice(), AtFlags::empty());
                    return Err(trouble);
                }
            }
            Err(error) => return Err(error.into()),
        }
        if self.options.owner {
            give_link(directory, name, owner(metadata))?;
        }
        // Another program may have put something else there in this moment: whatever it is, it is not followed.
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        if self.options.preserve {
            rustix::fs::utimensat(directory, name, &times(metadata), flags)?;
        }
        Ok(())
    }

    /// Removes what the source does not have any more, if the user asked for that.
    pub(super) fn remove(&mut self, name: &[u8]) -> Result<(), Stop> {
        if !self.options.sync.is_some_and(|sync| sync.delete) {
            return Err(Stop::protocol(
                "it wants something removed, which was not asked for",
            ));
        }
        if !self.lost.is_empty() {
            return self.refuse(name, IN_NOTHING);
        }
        let Some(level) = self.levels.last() else {
            return Err(Stop::protocol(
                "it wants something removed beside the destination",
            ));
        };
        let channel = &mut *self.channel;
        let removed = remove::remove(&level.directory, name, || channel.stay_alive())?;
        let arrival = match removed {
            Ok(()) => Some(Arrival::Removed),
            Err(why) => {
                self.refuse(name, &why)?;
                None
            }
        };
        self.arrive(None, arrival, false);
        Ok(())
    }
}

/// Lets us write into a directory of ours that is there, as one that was complete when a connection broke may forbid it. It gets its mode when it
/// is complete.
fn open_up(directory: &OwnedFd) -> Result<(), Trouble> {
    let stat = rustix::fs::fstat(directory)?;
    let mode = metadata(&stat).mode;
    if mode & 0o700 != 0o700 && stat.st_uid == rustix::process::geteuid().as_raw() {
        rustix::fs::fchmod(directory, Mode::from_raw_mode(mode | 0o700))?;
    }
    Ok(())
}

/// Why nothing can be put into a directory that is not there.
/// Gives a link that was just made to its owner, and nothing that another program has put in its place.
fn give_link(
    directory: BorrowedFd<'_>,
    name: &[u8],
    (uid, gid): (Option<Uid>, Option<Gid>),
) -> Result<(), Trouble> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let link = rustix::fs::openat(directory, name, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&link)?;
    let is_ours = FileType::from_raw_mode(found.st_mode) == FileType::Symlink
        && found.st_uid == rustix::process::geteuid().as_raw()
        && found.st_nlink == 1;
    if !is_ours {
        return Err(Trouble::Entry(REPLACED.to_owned()));
    }
    Ok(rustix::fs::chownat(
        link,
        "",
        uid,
        gid,
        AtFlags::EMPTY_PATH,
    )?)
}

const REPLACED: &str = "another program has put something else in its place: copy into a directory that no other user may write";

pub(super) const IN_NOTHING: &str = "its directory could not be made";

const NO_STREAM: &str = "only a single file can be written to standard output";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_is_put_in_a_links_place_is_given_to_no_one() {
        let scene = tempfile::tempdir().unwrap();
        let at = |name: &str| scene.path().join(name);
        std::fs::write(at("file"), "secret").unwrap();
        symlink("file", at("link")).unwrap();
        std::fs::hard_link(at("link"), at("twice")).unwrap();
        symlink("file", at("own")).unwrap();
        let directory = std::fs::File::open(scene.path()).unwrap();
        let uid = Some(rustix::process::geteuid());
        let give = |name: &[u8]| give_link(directory.as_fd(), name, (uid, None));
        for name in [&b"file"[..], b"twice"] {
            assert!(matches!(give(name), Err(Trouble::Entry(why)) if why == REPLACED));
        }
        assert!(give(b"own").is_ok());
    }
}
