//! Where things are received: a directory, or one name in it, or a stream.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, absolute};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use sys::links::{Entry, Fuse, find};
use wire::agent::transfer::{Totals, check_name};

use crate::source::look;
use crate::walk::{describe, kind};

/// What is received into.
#[derive(Debug)]
pub enum Target {
    /// A place in the file system.
    Place(Destination),
    /// A pipe or the like, which takes the content of one file.
    Stream(OwnedFd),
}

/// A place in the file system.
#[derive(Debug)]
pub struct Destination {
    /// What everything is created below.
    pub(crate) directory: OwnedFd,
    /// The name that the only source gets in it; if none, sources keep theirs.
    pub(crate) name: Option<Vec<u8>>,
}

impl Destination {
    /// The place at the path that the user gave, for so many sources: into it if it is a directory, else in its stead. With `into_directory` that was
    /// decided before. For a synchronisation the directory is created if its parent is there. No link leads there that a user other than root and this process's could have set.
    ///
    /// # Errors
    /// Why nothing can be received there, for people.
    pub fn open(
        path: &Path,
        sources: usize,
        is_sync: bool,
        into_directory: Option<bool>,
    ) -> Result<Destination, String> {
        let shown = path.display();
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        if is_sync {
            make(path)?;
        }
        let there = look(path).ok().map(|(_, file_type)| file_type);
        let is_directory = there == Some(FileType::Directory);
        if into_directory.unwrap_or(is_directory) || is_sync {
            return Ok(Destination {
                directory: open(path)
                    .map_err(|error| format!("cannot open the directory {shown}: {error}"))?,
                name: None,
            });
        }
        if sources > 1 {
            return Err(format!(
                "{shown} is no directory: {sources} sources need one that is there"
            ));
        }
        let ends_with_slash = path.as_os_str().as_bytes().ends_with(b"/");
        if ends_with_slash && !is_directory && into_directory.is_none() {
            return Err(format!("there is no directory {shown}"));
        }
        match there {
            Some(FileType::RegularFile | FileType::Directory) | None => {}
            Some(other) => {
                return Err(format!(
                    "{shown} is {}, which is not written to",
                    describe(other)
                ));
            }
        }
        let named = path.file_name().unwrap_or_default().as_bytes();
        check_name(named).map_err(|_| format!("{shown} does not name a file"))?;
        let (directory, name) = parent(path, there == Some(FileType::RegularFile))
            .map_err(|error| format!("cannot open the directory of {shown}: {error}"))?;
        Ok(Destination {
            directory,
            name: Some(name),
        })
    }

    /// Whether sources are put into it under their own names.
    pub fn is_directory(&self) -> bool {
        self.name.is_none()
    }

    /// Whether there is room for all that was announced.
    pub(crate) fn check_room(&self, totals: &Totals, max_size: Option<u64>) -> Result<(), String> {
        let limit = self.size_limit(max_size);
        if totals.apparent_bytes > limit && max_size.is_some() {
            return Err(format!(
                "all files together have {}, which is more than the largest size that was allowed, {}",
                human(totals.apparent_bytes),
                human(limit)
            ));
        }
        let Ok(room) = rustix::fs::fstatvfs(&self.directory) else {
            return Ok(());
        };
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        // Some file systems do not say how large they are.
        if room.f_blocks > 0 && totals.bytes > free {
            return Err(format!(
                "the destination's file system has not enough room: {} are needed, {} are free",
                human(totals.bytes),
                human(free)
            ));
        }
        if room.f_files > 0 && totals.entries > room.f_favail {
            return Err(format!(
                "the destination's file system has not enough room: {} files are needed, {} are possible",
                totals.entries, room.f_favail
            ));
        }
        Ok(())
    }

    /// The longest file that is received, in bytes: what was allowed, or what its file system could hold if it were empty.
    pub(crate) fn size_limit(&self, max_size: Option<u64>) -> u64 {
        if let Some(limit) = max_size {
            return limit;
        }
        match rustix::fs::fstatvfs(&self.directory) {
            Ok(room) if room.f_blocks > 0 => room.f_blocks.saturating_mul(room.f_frsize),
            _ => u64::MAX,
        }
    }
}

fn make(path: &Path) -> Result<(), String> {
    let made = Entry::at(path, Fuse::Entered).and_then(|entry| {
        let mode = Mode::from_raw_mode(0o777);
        Ok(rustix::fs::mkdir(entry.pinned_path(), mode)?)
    });
    match made {
        Ok(()) => Ok(()),
        Err(error) => match Errno::from_io_error(&error) {
            // The latter for a path without a name of its own, like `..`.
            Some(Errno::EXIST | Errno::ISDIR) => Ok(()),
            Some(Errno::NOENT) => {
                let parent = path.parent().unwrap_or(path).display();
                Err(format!("{parent} does not exist: make it first"))
            }
            _ => Err(format!(
                "cannot create the directory {}: {error}",
                path.display()
            )),
        },
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

fn open(path: &Path) -> io::Result<OwnedFd> {
    let found = find(&absolute(path)?, Fuse::Entered)?;
    Ok(rustix::fs::openat(found, ".", DIRECTORY, Mode::empty())?)
}

/// The directory of a name, and the name. A file that the path leads to by symbolic links is replaced itself: the user named it, not the sender.
fn parent(path: &Path, is_file: bool) -> io::Result<(OwnedFd, Vec<u8>)> {
    let mut entry = Entry::at(path, Fuse::Entered)?;
    let is_link = || Ok::<_, io::Error>(kind(&entry.stat()?) == FileType::Symlink);
    if is_file && is_link()? {
        entry = Entry::behind_links(path, Fuse::Entered)?;
    }
    let directory = entry.open_directory()?;
    Ok((directory, entry.name().as_bytes().to_vec()))
}

/// A number of bytes for people.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}
