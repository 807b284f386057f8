//! A way through directories, name by name.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, openat, readlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::act::Act;
use super::{Fuse, MAX_LINKS, fuse, helper};

/// Goes there by system calls of this process.
pub(super) fn walk(path: &Path, fuse: Fuse) -> io::Result<Place> {
    let mut names = names(path);
    let mut place = Place::root(fuse)?;
    let mut links = 0;
    while let Some(name) = names.pop() {
        let found = place.find(&name, path)?;
        if found.kind() != FileType::Symlink {
            place = found;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        let target = readlinkat(&found.file, "", Vec::new())?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            place = place.back_to_root()?;
        }
        names.extend(self::names(&target));
    }
    Ok(place)
}

pub(super) const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A file on the way.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) file: OwnedFd,
    pub(super) stat: Stat,
    /// No other user could have put it in the way, nor anything above it.
    pub(super) is_firm: bool,
    /// Whether the way may go on into FUSE.
    pub(super) fuse: Fuse,
    /// Its mount, if it matters and is known.
    pub(super) mount: Option<u64>,
}

impl Place {
    /// What is at the end of a path, found by the process that this one has for that, if it has one. `directory` is what that is said to look into.
    pub(super) fn at(path: &Path, fuse: Fuse, directory: &Path) -> io::Result<Place> {
        let Some(helper) = helper::in_force() else {
            return walk(path, fuse);
        };
        let act = Act::Walk {
            path: path.as_os_str().as_bytes().to_vec(),
            refuses_fuse: fuse == Fuse::Refused,
        };
        let found = helper.ask(&act, directory, &[])?;
        let file = found.file.ok_or(Errno::IO)?;
        Ok(Place {
            stat: fstat(&file)?,
            file,
            is_firm: found.way.is_firm,
            fuse,
            mount: found.way.mount,
        })
    }

    fn root(fuse: Fuse) -> io::Result<Place> {
        let file = rustix::fs::open("/", PATH_ONLY, Mode::empty())?;
        let mount = match fuse {
            Fuse::Entered => None,
            Fuse::Refused => fuse::mount_of(&file)?,
        };
        let stat = fstat(&file)?;
        Ok(Place {
            file,
            stat,
            is_firm: true,
            fuse,
            mount,
        })
    }

    /// A link to an absolute path counts no more than the way to it.
    fn back_to_root(&self) -> io::Result<Place> {
        Ok(Place {
            is_firm: self.is_firm,
            ..Place::root(self.fuse)?
        })
    }

    pub(super) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// What has this name here on the way to `path`, unless it is a link that does not count.
    fn find(&self, name: &OsStr, path: &Path) -> io::Result<Place> {
        let file = openat(&self.file, name, PATH_ONLY, Mode::empty())?;
        self.arrive(file, name, path)?.if_it_counts(name, path)
    }

    /// The same, unless it is a link that does not count.
    pub(super) fn if_it_counts(self, name: &OsStr, path: &Path) -> io::Result<Place> {
        let kind = self.kind();
        let is_link =
            kind == FileType::Symlink || kind != FileType::Directory && self.stat.st_nlink > 1;
        match is_link && !self.is_firm {
            true => Err(refused(path, name)),
            false => Ok(self),
        }
    }

    /// What has this name here, which was opened only to name it, also if it is a link that does not count.
    pub(super) fn arrive(&self, file: OwnedFd, name: &OsStr, path: &Path) -> io::Result<Place> {
        // The root of a mount is opened without its file system, which `fstat` may ask.
        let mount = self.pass_to(&file, name, path)?;
        let stat = fstat(&file)?;
        Ok(Place {
            is_firm: self.is_firm(&stat),
            file,
            stat,
            fuse: self.fuse,
            mount,
        })
    }

    /// The mount of what has this name here, if it matters; none that is FUSE.
    fn pass_to(&self, found: &OwnedFd, name: &OsStr, path: &Path) -> io::Result<Option<u64>> {
        if self.fuse == Fuse::Entered {
            return Ok(None);
        }
        let mount = fuse::mount_of(found)?;
        match mount {
            Some(id) if mount != self.mount && fuse::is_fuse(found, id)? => {
                Err(in_fuse(path, name))
            }
            _ => Ok(mount),
        }
    }

    /// Whether no user but root and this process's could have put this entry here. In a directory like `/tmp` that is so of what is theirs, but for hard links to it.
    fn is_firm(&self, entry: &Stat) -> bool {
        let is_directory = FileType::from_raw_mode(entry.st_mode) == FileType::Directory;
        let stays = self.is_sticky() && is_ours(entry) && (is_directory || entry.st_nlink == 1);
        self.is_firm && (self.is_closed() || stays)
    }

    /// Whether no other user may write it.
    pub(super) fn is_closed(&self) -> bool {
        // In a file with an access control list, the group's bits are the upper bound of what the list grants.
        is_ours(&self.stat) && self.stat.st_mode & (Mode::WGRP | Mode::WOTH).bits() == 0
    }

    /// Whether only root and this process's user can change where it is, change or read what is in it, and so hold its lock.
    pub(super) fn is_private(&self) -> bool {
        let by_others = Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        self.is_firm && is_ours(&self.stat) && self.stat.st_mode & by_others.bits() == 0
    }

    /// Whether others may write it, and not change what is not theirs.
    pub(super) fn is_sticky(&self) -> bool {
        is_ours(&self.stat) && self.stat.st_mode & Mode::SVTX.bits() != 0
    }
}

pub(super) fn is_ours(file: &Stat) -> bool {
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

fn refused(path: &Path, name: &OsStr) -> io::Error {
    io::Error::other(format!(
        "{name:?} in {} is a link, or has a second name, in a directory that others than root and this process's user may write, and could lead to any file: \
         name the file by its own path",
        path.display()
    ))
}

fn in_fuse(path: &Path, name: &OsStr) -> io::Error {
    io::Error::other(format!(
        "{name:?} in {} is a FUSE file system, whose program could hold up this process: name a path outside of it",
        path.display()
    ))
}
