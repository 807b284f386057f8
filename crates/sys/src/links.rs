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
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf, absolute};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, fstat, openat, readlinkat, renameat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;
use rustix::process::geteuid;

mod fuse;

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
    found.is_err_and(|error| error.raw_os_error().is_none())
}

/// What stands at an absolute path, if no link leads there that another user could have set.
///
/// # Errors
/// What the system says, and without a number of the system's, when there is such a link, or FUSE that is refused.
pub fn find(path: &Path, fuse: Fuse) -> io::Result<OwnedFd> {
    Ok(walk(path, fuse)?.file)
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
    Ok(file_id(&walk(&absolute(path)?, fuse)?.stat))
}

/// The path of what was found, without links.
///
/// # Errors
/// What the system says.
pub fn path_of(found: &OwnedFd) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

fn walk(path: &Path, fuse: Fuse) -> io::Result<Place> {
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
    directory: Place,
    name: OsString,
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
            directory: walk(parent, fuse)?,
            name: name.to_owned(),
            path,
        })
    }

    /// What a path leads to by links that no other user could have set. Nothing need be there.
    ///
    /// # Errors
    /// As [`find`].
    pub fn behind_links(path: &Path, fuse: Fuse) -> io::Result<Entry> {
        let mut entry = Entry::at(path, fuse)?;
        for _ in 0..=MAX_LINKS {
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
        let directory = format!("/proc/self/fd/{}", self.directory.file.as_raw_fd());
        Path::new(&directory).join(&self.name)
    }

    /// Where a socket binds or is connected to, which is the path as long as no other user can change where it leads, such as by a mount on a directory of its own.
    ///
    /// # Errors
    /// The path is too long for a socket.
    pub fn address(&self) -> io::Result<SocketAddrUnix> {
        let directory = &self.directory;
        if directory.is_firm && (directory.is_closed() || directory.is_sticky()) {
            return Ok(SocketAddrUnix::new(&self.path)?);
        }
        Ok(SocketAddrUnix::new(self.pinned_path())?)
    }

    /// Whether root and this process's user alone can change what is in its directory, and where the path leads.
    pub fn is_ours(&self) -> bool {
        self.directory.is_firm && self.directory.is_closed()
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
        let found = self.directory.look(&self.name, &self.path)?;
        Ok((found.file, found.stat))
    }

    /// Names what has the name now, and describes it.
    ///
    /// # Errors
    /// As [`find`]; a symbolic link is described, and not followed.
    pub fn find(&self) -> io::Result<(OwnedFd, Stat)> {
        let found = self.directory.find(&self.name, &self.path)?;
        Ok((found.file, found.stat))
    }

    /// Opens what has the name, which is no symbolic link, nor a file of another name that another user could have put here.
    ///
    /// # Errors
    /// As [`find`], and [`Errno::LOOP`] for a symbolic link.
    pub fn open(&self, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.directory.file, &self.name, flags, mode)?;
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
        let directory = &self.directory.file;
        Ok(renameat(directory, &self.name, directory, name)?)
    }

    /// Removes the name, if it still is this file's.
    ///
    /// # Errors
    /// It is not, or what the system says.
    pub fn remove(&self, file: FileId) -> io::Result<()> {
        if file_id(&self.stat()?) != file {
            return Err(io::Error::other("another file stands there by now"));
        }
        Ok(unlinkat(
            &self.directory.file,
            &self.name,
            AtFlags::empty(),
        )?)
    }
}

/// Sets the mode of a file by a descriptor that only names it, as `O_PATH` gives, which has no other way to its file's mode.
pub fn set_mode_of(found: &OwnedFd, mode: u32) -> io::Result<()> {
    let file = format!("/proc/self/fd/{}", found.as_raw_fd());
    fs::set_permissions(file, Permissions::from_mode(mode))
}

const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A file on the way.
#[derive(Debug)]
struct Place {
    file: OwnedFd,
    stat: Stat,
    /// No other user could have put it in the way, nor anything above it.
    is_firm: bool,
    /// Whether the way may go on into FUSE.
    fuse: Fuse,
    /// Its mount, if it matters and is known.
    mount: Option<u64>,
}

impl Place {
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

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// What has this name here on the way to `path`, unless it is a link that does not count.
    fn find(&self, name: &OsStr, path: &Path) -> io::Result<Place> {
        let found = self.look(name, path)?;
        let kind = found.kind();
        let is_link =
            kind == FileType::Symlink || kind != FileType::Directory && found.stat.st_nlink > 1;
        match is_link && !found.is_firm {
            true => Err(refused(path, name)),
            false => Ok(found),
        }
    }

    /// What has this name here, also if it is a link that does not count.
    fn look(&self, name: &OsStr, path: &Path) -> io::Result<Place> {
        let file = openat(&self.file, name, PATH_ONLY, Mode::empty())?;
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
            Some(id) if mount != self.mount && fuse::is_fuse(id)? => Err(in_fuse(path, name)),
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
    fn is_closed(&self) -> bool {
        // In a file with an access control list, the group's bits are the upper bound of what the list grants.
        is_ours(&self.stat) && self.stat.st_mode & (Mode::WGRP | Mode::WOTH).bits() == 0
    }

    /// Whether others may write it, and not change what is not theirs.
    fn is_sticky(&self) -> bool {
        is_ours(&self.stat) && self.stat.st_mode & Mode::SVTX.bits() != 0
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
