//! Paths through directories that others may write.
//!
//! A link in such a directory could lead to a file that the link's owner may not open. So a path is walked name by name, and a link, symbolic or hard, counts only where
//! no user but root and this process's could have set it. `openat2` would walk in one call, but it keeps its flags in memory, where a seccomp filter cannot see
//! whether it makes a file.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf, absolute};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, openat, readlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

/// As many links as the kernel follows in a path.
const MAX_LINKS: usize = 40;

/// Whether there is a link on the way to what stands at `path` that does not count here, so that the path leads nowhere.
pub fn has_link_of_others(path: &Path) -> bool {
    let found = absolute(path).and_then(|path| find(&path));
    found.is_err_and(|error| error.raw_os_error().is_none())
}

/// What stands at an absolute path, if no link leads there that another user could have set.
///
/// # Errors
/// What the system says, and without a number of the system's, when there is such a link.
pub fn find(path: &Path) -> io::Result<OwnedFd> {
    let mut names = names(path);
    let mut place = Place::root()?;
    let mut links = 0;
    while let Some(name) = names.pop() {
        let entry = openat(&place.directory, &name, PATH_ONLY, Mode::empty())?;
        let stat = fstat(&entry)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let is_firm = place.is_firm(&stat);
        let is_link = kind == FileType::Symlink || kind != FileType::Directory && stat.st_nlink > 1;
        if is_link && !is_firm {
            return Err(refused(path, &name));
        }
        if kind == FileType::Symlink {
            links += 1;
            if links > MAX_LINKS {
                return Err(Errno::LOOP.into());
            }
            let target = readlinkat(&entry, "", Vec::new())?;
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            if target.is_absolute() {
                place = place.back_to_root()?;
            }
            names.extend(self::names(&target));
        } else if names.is_empty() {
            return Ok(entry);
        } else {
            place = Place {
                directory: entry,
                stat,
                is_firm,
            };
        }
    }
    // The path is that of a directory.
    Err(Errno::CONNREFUSED.into())
}

const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A directory on the way.
struct Place {
    directory: OwnedFd,
    stat: Stat,
    /// No other user could have put it in the way, nor anything above it.
    is_firm: bool,
}

impl Place {
    fn root() -> io::Result<Place> {
        let directory = rustix::fs::open("/", PATH_ONLY, Mode::empty())?;
        let stat = fstat(&directory)?;
        Ok(Place {
            directory,
            stat,
            is_firm: true,
        })
    }

    /// A link to an absolute path counts no more than the way to it.
    fn back_to_root(&self) -> io::Result<Place> {
        Ok(Place {
            is_firm: self.is_firm,
            ..Place::root()?
        })
    }

    /// Whether no user but root and this process's could have put this entry here. In a directory like `/tmp` that is so of what is theirs, but for hard links to it.
    fn is_firm(&self, entry: &Stat) -> bool {
        let is_directory = FileType::from_raw_mode(entry.st_mode) == FileType::Directory;
        let stays = self.stat.st_mode & Mode::SVTX.bits() != 0
            && is_ours(entry)
            && (is_directory || entry.st_nlink == 1);
        // In a file with an access control list, the group's bits are the upper bound of what the list grants.
        let is_closed = self.stat.st_mode & (Mode::WGRP | Mode::WOTH).bits() == 0;
        self.is_firm && is_ours(&self.stat) && (is_closed || stays)
    }
}

fn is_ours(file: &Stat) -> bool {
    file.st_uid == 0 || file.st_uid == geteuid().as_raw()
}

/// The names in a path, the last one first.
fn names(path: &Path) -> Vec<OsString> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    let mut names: Vec<OsString> = names.collect();
    names.reverse();
    names
}

fn refused(path: &Path, name: &OsString) -> io::Error {
    io::Error::other(format!(
        "{name:?} in {} is a link, or has a second name, in a directory that others than root and the daemon's user may write, and could lead to any socket: \
         name the socket by its own path",
        path.display()
    ))
}
