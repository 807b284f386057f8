//! A file that is not complete yet. It has a temporary name beside its final place, and is renamed when it is complete: no program ever sees half a
//! file under the final name.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps, UTIME_OMIT,
};
use rustix::io::Errno;
use wire::agent::transfer::{File, Metadata, Options};

use crate::error::Stop;
use crate::file;
use crate::walk::{describe, kind};

/// What all names of partial files begin with …
const PREFIX: &str = ".ringdown-";

/// … and end with.
const SUFFIX: &str = ".partial";

/// Why a file is not written any further.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// This file cannot be had; others may.
    Entry(String),
    /// The disk is full, so no others either.
    Full(String),
}

impl From<Errno> for Trouble {
    fn from(error: Errno) -> Trouble {
        match error {
            Errno::NOSPC | Errno::DQUOT => {
                Trouble::Full(format!("the destination's file system is full: {error}"))
            }
            error => Trouble::Entry(error.to_string()),
        }
    }
}

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct Partial {
    /// Its name while it is not complete.
    own_name: Vec<u8>,
    /// The name that it will have.
    name: Vec<u8>,
    file: OwnedFd,
    metadata: Metadata,
    /// Behind the last byte that was written.
    end: u64,
}

impl Partial {
    /// Begins a file for `name` in this directory, or goes on with what a broken connection left of the same content.
    pub(crate) fn open(
        directory: BorrowedFd<'_>,
        id: &[u8; 16],
        begun: File,
        name: Vec<u8>,
        options: &Options,
    ) -> Result<Partial, Trouble> {
        let own_name = own_name(id, begun.identity);
        // No other user may read it before it has its mode; without one to keep, the process's mask decides, as for any new file.
        let mode = if options.preserve {
            0o600
        } else {
            begun.metadata.mode & 0o777
        };
        let mut partial = Partial {
            file: if begun.asks {
                reopen(directory, &own_name, mode)?
            } else {
                create(directory, &own_name, mode)?
            },
            own_name,
            name,
            metadata: begun.metadata,
            end: 0,
        };
        if begun.asks {
            let there = file::size(&rustix::fs::fstat(&partial.file)?);
            if begun.size.is_some_and(|size| there <= size) {
                partial.end = there;
            } else {
                rustix::fs::ftruncate(&partial.file, 0)?;
            }
        }
        Ok(partial)
    }

    /// How much is there.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Writes bytes that were found right.
    pub(crate) fn write(&mut self, offset: u64, mut bytes: &[u8]) -> Result<(), Trouble> {
        self.end = offset;
        while !bytes.is_empty() {
            match rustix::io::pwrite(&self.file, bytes, self.end) {
                Ok(count) => {
                    bytes = &bytes[count..];
                    self.end += count as u64;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Makes it complete: it gets its size, its owner, its mode, its times, and its name. `busy` is called again and again if that takes long.
    pub(crate) fn finish(
        &self,
        directory: BorrowedFd<'_>,
        size: u64,
        digest: Option<u64>,
        options: &Options,
        busy: impl FnMut() -> Result<(), Stop>,
    ) -> Result<Result<(), Trouble>, Stop> {
        let sized = if self.end == size {
            Ok(())
        } else {
            rustix::fs::ftruncate(&self.file, size)
        };
        if let Err(error) = sized {
            return Ok(Err(error.into()));
        }
        if let Some(expected) = digest {
            match file::digest(&self.file, busy)? {
                Ok(found) if found == expected => {}
                Ok(found) => {
                    return Ok(Err(Trouble::Entry(format!(
                        "read once more it is not what the source is: its checksum is {found:016x}, expected {expected:016x}"
                    ))));
                }
                Err(error) => return Ok(Err(error.into())),
            }
        }
        Ok(self.put_in_place(directory, options))
    }

    fn put_in_place(&self, directory: BorrowedFd<'_>, options: &Options) -> Result<(), Trouble> {
        apply(self.file.as_fd(), &self.metadata, options).map_err(Trouble::Entry)?;
        if options.fsync {
            rustix::fs::fsync(&self.file)?;
        }
        rename(directory, &self.own_name, &self.name)
    }

    /// Removes it.
    pub(crate) fn remove(&self, directory: BorrowedFd<'_>) {
        let _ = rustix::fs::unlinkat(directory, self.own_name.as_slice(), AtFlags::empty());
    }

    /// What is left of it if the transfer is not resumed.
    pub(crate) fn leave(self, directory: OwnedFd) -> LeftOver {
        LeftOver {
            directory,
            name: self.own_name,
        }
    }
}

/// A partial file that a broken connection has left behind.
#[derive(Debug)]
pub struct LeftOver {
    directory: OwnedFd,
    name: Vec<u8>,
}

impl LeftOver {
    /// Removes it: the transfer will not be resumed.
    pub fn remove(self) {
        let _ = rustix::fs::unlinkat(&self.directory, self.name.as_slice(), AtFlags::empty());
    }
}

/// Whether a name is that of a partial file of this transfer.
pub(crate) fn is_own(id: &[u8; 16], name: &[u8]) -> bool {
    name.starts_with(prefix(id).as_bytes()) && name.ends_with(SUFFIX.as_bytes())
}

fn prefix(id: &[u8; 16]) -> String {
    format!("{PREFIX}{:032x}-", u128::from_be_bytes(*id))
}

fn own_name(id: &[u8; 16], identity: u64) -> Vec<u8> {
    format!("{}{identity:016x}{SUFFIX}", prefix(id)).into_bytes()
}

/// A name of ours for something that is not a file.
pub(crate) fn other_name(id: &[u8; 16]) -> Vec<u8> {
    format!("{}link{SUFFIX}", prefix(id)).into_bytes()
}

/// O_RDWR: what was asked for may be read once more.
const FLAGS: OFlags = OFlags::RDWR.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn create(directory: BorrowedFd<'_>, name: &[u8], mode: u32) -> Result<OwnedFd, Trouble> {
    let open = || {
        let flags = FLAGS | OFlags::CREATE | OFlags::EXCL;
        rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(mode | 0o600))
    };
    match open() {
        Err(Errno::EXIST) => {
            // Only this transfer has such a name: an earlier connection left it.
            rustix::fs::unlinkat(directory, name, AtFlags::empty())?;
            Ok(open()?)
        }
        result => Ok(result?),
    }
}

/// Opens what an earlier connection has left of this content; what it left of another content is removed.
fn reopen(directory: BorrowedFd<'_>, name: &[u8], mode: u32) -> Result<OwnedFd, Trouble> {
    match rustix::fs::openat(directory, name, FLAGS, Mode::empty()) {
        Ok(file) => {
            let stat = rustix::fs::fstat(&file)?;
            // Another link of it may be any file of this user, linked here by another program.
            if kind(&stat) == FileType::RegularFile
                && stat.st_uid == rustix::process::geteuid().as_raw()
                && stat.st_nlink == 1
            {
                return Ok(file);
            }
            Err(Trouble::Entry(
                "what an earlier connection has left is not its file any more".to_owned(),
            ))
        }
        Err(Errno::NOENT) => {
            let common = name.len().saturating_sub(16 + SUFFIX.len());
            for found in crate::walk::list(directory).unwrap_or_default() {
                if found.name.starts_with(&name[..common])
                    && found.name.ends_with(SUFFIX.as_bytes())
                {
                    let _ =
                        rustix::fs::unlinkat(directory, found.name.as_slice(), AtFlags::empty());
                }
            }
            create(directory, name, mode)
        }
        Err(error) => Err(error.into()),
    }
}

/// Gives something that is open its owner, its mode and its times, in this order: a new owner takes bits of the mode away.
pub(crate) fn apply(
    file: BorrowedFd<'_>,
    metadata: &Metadata,
    options: &Options,
) -> Result<(), String> {
    if options.owner {
        let (uid, gid) = owner(metadata);
        rustix::fs::fchown(file, uid, gid).map_err(|error| {
            format!(
                "it cannot be given to user {} and group {}: {error}",
                metadata.uid, metadata.gid
            )
        })?;
    }
    if options.preserve {
        let mask = if options.owner { 0o7777 } else { 0o777 };
        rustix::fs::fchmod(file, Mode::from_raw_mode(metadata.mode & mask))
            .map_err(|error| format!("its mode cannot be set: {error}"))?;
        rustix::fs::futimens(file, &times(metadata))
            .map_err(|error| format!("its time cannot be set: {error}"))?;
    }
    Ok(())
}

pub(crate) fn owner(metadata: &Metadata) -> (Option<rustix::fs::Uid>, Option<rustix::fs::Gid>) {
    // All ones mean "leave it" to the system; such a user does not exist.
    let uid = Some(metadata.uid).filter(|uid| *uid != u32::MAX);
    let gid = Some(metadata.gid).filter(|gid| *gid != u32::MAX);
    (
        uid.map(rustix::fs::Uid::from_raw),
        gid.map(rustix::fs::Gid::from_raw),
    )
}

pub(crate) fn times(metadata: &Metadata) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: metadata.modified_s,
            tv_nsec: metadata.modified_ns.into(),
        },
    }
}

/// Gives something its name. What has that name is replaced if it is a file or a symbolic link.
pub(crate) fn rename(directory: BorrowedFd<'_>, from: &[u8], to: &[u8]) -> Result<(), Trouble> {
    match rustix::fs::renameat_with(directory, from, directory, to, RenameFlags::NOREPLACE) {
        Ok(()) => return Ok(()),
        // Something is there, or the file system does not show whether.
        Err(Errno::EXIST | Errno::INVAL | Errno::NOSYS) => {}
        Err(error) => return Err(error.into()),
    }
    let there: Result<Stat, Errno> = rustix::fs::statat(directory, to, AtFlags::SYMLINK_NOFOLLOW);
    match there.as_ref().map(kind) {
        Ok(FileType::RegularFile | FileType::Symlink) | Err(&Errno::NOENT) => {}
        Ok(other) => {
            return Err(Trouble::Entry(format!(
                "there is {} in its place, which is not replaced",
                describe(other)
            )));
        }
        Err(error) => return Err((*error).into()),
    }
    Ok(rustix::fs::renameat(directory, from, directory, to)?)
}
