//! Paths through directories that others may write.
//!
//! A link in such a directory could lead to a file that the link's owner may not open. So a path is walked name by name, and a link, symbolic or hard, counts only where
//! no user but root and this process's could have set it. `openat2` would walk in one call, but it keeps its flags in memory, where a seccomp filter cannot see
//! whether it makes a file.
//!
//! Such a directory may also be, or become, the root of a FUSE file system, whose program may let a call wait for ever: see [`Fuse`].

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, openat, readlinkat};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use act::{Act, Outcome};
use place::{PATH_ONLY, Place};

mod act;
mod file;
mod fuse;
mod helper;
mod place;

pub use file::{SharedFile, open_behind_links, read_byte, write};
pub use helper::{has_ended as helper_has_ended, start as start_helper};

/// As many links as the kernel follows in a path.
const MAX_LINKS: usize = 40;

/// Whether a path may lead into a FUSE file system. Its program, which may be any user's, can let every call that asks it wait for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fuse {
    /// It may: what is done there may wait.
    Entered,
    /// It may not, and the program is asked nothing. What the process's root directory is in counts, whatever it is. Before Linux 5.8, which does not tell
    /// the mount of a file, this is as [`Fuse::Entered`].
    Refused,
}

/// Whether there is a link, or FUSE that is refused, on the way to what stands at `path`, so that the path leads nowhere.
pub fn leads_nowhere(path: &Path, fuse: Fuse) -> bool {
    let found = absolute(path).and_then(|path| find(&path, fuse));
    found.is_err_and(|error| error.kind() == io::ErrorKind::Other)
}

/// What stands at an absolute path, if no link leads there that another user could have set.
///
/// # Errors
/// What the system says, and without a number of the system's, when there is such a link, or FUSE that is refused.
pub fn find(path: &Path, fuse: Fuse) -> io::Result<OwnedFd> {
    // One name shows what is in that directory.
    let directory = path.parent().unwrap_or(path);
    Ok(Place::at(path, fuse, directory)?.file)
}

/// Where a socket that was found is connected to: what its name stands for by then does not matter. A descriptor of this kind has no other way to its file.
///
/// # Errors
/// None that is known: the path is short.
pub fn address_of(found: &OwnedFd) -> io::Result<SocketAddrUnix> {
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok(SocketAddrUnix::new(path)?)
}

/// Which file that is.
///
/// # Errors
/// As [`find`].
pub fn id_of(path: &Path, fuse: Fuse) -> io::Result<FileId> {
    let path = absolute(path)?;
    let directory = path.parent().unwrap_or(&path);
    Ok(file_id(&Place::at(&path, fuse, directory)?.stat))
}

/// The path of what was found, without links.
///
/// # Errors
/// What the system says.
pub fn path_of(found: &OwnedFd) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

/// Which file it is, whatever its name.
pub type FileId = (u64, u64);

/// The [`FileId`] of what a system call has described.
pub fn file_id(stat: &Stat) -> FileId {
    (stat.st_dev, stat.st_ino)
}

/// A name in a directory to which no link leads that another user could have set. It stays in that directory, wherever the path leads later.
#[derive(Debug)]
pub struct Entry {
    path: PathBuf,
    directory: Arc<Place>,
    name: OsString,
    /// Others may hold the directory's lock, though they may not read it.
    is_of_shared: bool,
}

impl Entry {
    /// The last name of a path, in its directory. Nothing need have that name.
    ///
    /// # Errors
    /// As [`find`] for the directory.
    pub fn at(path: &Path, fuse: Fuse) -> io::Result<Entry> {
        let path = absolute(path)?;
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Errno::ISDIR.into());
        };
        Ok(Entry {
            directory: Arc::new(Place::at(parent, fuse, parent)?),
            name: name.to_owned(),
            path,
            is_of_shared: false,
        })
    }

    /// The same, in a directory of files that others have open: a remover waits for its lock, and holds the directory's meanwhile.
    ///
    /// # Errors
    /// As [`Entry::at`].
    pub fn of_shared(path: &Path, fuse: Fuse) -> io::Result<Entry> {
        let entry = Entry::at(path, fuse)?;
        Ok(Entry {
            is_of_shared: true,
            ..entry
        })
    }

    /// What a path leads to by links that no other user could have set. Nothing need be there.
    ///
    /// # Errors
    /// As [`find`].
    pub fn behind_links(path: &Path, fuse: Fuse) -> io::Result<Entry> {
        Entry::follow(path, fuse, |_| false)
    }

    /// The same, and links at such a path are not followed.
    fn follow(path: &Path, fuse: Fuse, is_end: fn(&Path) -> bool) -> io::Result<Entry> {
        let mut entry = Entry::at(path, fuse)?;
        for _ in 0..=MAX_LINKS {
            if is_end(&entry.path) {
                return Ok(entry);
            }
            let link = match entry.find() {
                Ok((link, stat)) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => {
                    link
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => return Ok(entry),
            };
            let target = readlinkat(&link, "", Vec::new())?;
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            entry = match target.is_absolute() {
                true => Entry::at(&target, fuse)?,
                false => Entry::at(&entry.path.with_file_name(target), fuse)?,
            };
        }
        Err(Errno::LOOP.into())
    }

    /// The name by a path that stays in its directory, as long as this entry is there.
    pub fn pinned_path(&self) -> PathBuf {
        let path = act::pinned(&self.directory.file, self.name.as_bytes());
        PathBuf::from(OsString::from_vec(path))
    }

    /// Binds a socket: at the path as long as no other user can change where it leads, such as by a mount on a directory of its own.
    ///
    /// # Errors
    /// As bind(2).
    pub fn bind(&self, socket: impl AsFd) -> io::Result<()> {
        let directory = &self.directory;
        let stays = directory.is_firm && (directory.is_closed() || directory.is_sticky());
        let act = Act::Bind {
            name: self.name.as_bytes().to_vec(),
            path: stays.then(|| self.path.as_os_str().as_bytes().to_vec()),
        };
        self.perform(&act, &[socket.as_fd()]).map(drop)
    }

    /// Another name in the same directory, whatever the path leads to by now.
    pub fn beside(&self, name: &OsStr) -> Entry {
        Entry {
            path: self.path.with_file_name(name),
            directory: self.directory.clone(),
            name: name.to_owned(),
            is_of_shared: self.is_of_shared,
        }
    }

    /// Whether root and this process's user alone can read or change what is in its directory, and change where the path leads: no other can hold up a lookup there.
    pub fn is_private(&self) -> bool {
        !self.is_of_shared && self.directory.is_private()
    }

    /// The path by which it is in its directory, as it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name.
    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// Opens the directory in which the name is, for reading.
    pub fn open_directory(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(openat(&self.directory.file, ".", flags, Mode::empty())?)
    }

    /// What has the name now, also if it is a link.
    pub fn stat(&self) -> io::Result<Stat> {
        Ok(self.look()?.1)
    }

    /// Names what has the name now, also if it is a link that does not count, and describes it.
    pub fn look(&self) -> io::Result<(OwnedFd, Stat)> {
        let found = self.opened(PATH_ONLY, Mode::empty())?;
        let found = self.directory.arrive(found, &self.name, &self.path)?;
        Ok((found.file, found.stat))
    }

    /// Names what has the name now, and describes it.
    ///
    /// # Errors
    /// As [`find`]; a symbolic link is described, and not followed.
    pub fn find(&self) -> io::Result<(OwnedFd, Stat)> {
        let found = self.opened(PATH_ONLY, Mode::empty())?;
        let found = self.directory.arrive(found, &self.name, &self.path)?;
        let found = found.if_it_counts(&self.name, &self.path)?;
        Ok((found.file, found.stat))
    }

    /// Opens what has the name, which is no symbolic link, nor a file of another name that another user could have put here.
    ///
    /// # Errors
    /// As [`find`], and [`Errno::LOOP`] for a symbolic link.
    pub fn open(&self, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = self.opened(flags, mode)?;
        let stat = fstat(&file)?;
        // By the name: a second name may be gone by now, and then this is another file's.
        let (_, named) = self.find()?;
        match file_id(&named) == file_id(&stat) {
            true => Ok(file),
            false => Err(Errno::AGAIN.into()),
        }
    }

    /// Gives what has the name another one in the same directory.
    pub fn rename(&self, name: &OsStr) -> io::Result<()> {
        let (name, new) = (self.name.as_bytes().to_vec(), name.as_bytes().to_vec());
        self.perform(&Act::Rename { name, new }, &[]).map(drop)
    }

    /// Removes the name, if it still is this file's.
    ///
    /// # Errors
    /// It is not, or what the system says.
    pub fn remove(&self, file: FileId) -> io::Result<()> {
        let name = self.name.as_bytes().to_vec();
        self.perform(&Act::Unlink { name, file }, &[]).map(drop)
    }

    fn opened(&self, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let act = Act::Open {
            name: self.name.as_bytes().to_vec(),
            flags: flags.bits(),
            mode: mode.bits(),
        };
        Ok(self.perform(&act, &[])?.file.ok_or(Errno::IO)?)
    }

    /// The process beside this one does it, if there is one and others could hold the directory's lock.
    fn perform(&self, act: &Act, more: &[BorrowedFd<'_>]) -> io::Result<Outcome> {
        let directory = self.directory.file.as_fd();
        let descriptors = [&[directory], more].concat();
        match helper::in_force() {
            Some(helper) if !self.is_private() => {
                let parent = self.path.parent().unwrap_or(&self.path);
                helper.ask(act, parent, &descriptors)
            }
            _ => act.perform(&descriptors),
        }
    }
}

/// Sets the mode of a file by a descriptor that only names it, as `O_PATH` gives, which has no other way to its file's mode.
pub fn set_mode_of(found: &OwnedFd, mode: u32) -> io::Result<()> {
    let file = format!("/proc/self/fd/{}", found.as_raw_fd());
    fs::set_permissions(file, Permissions::from_mode(mode))
}
