//! Directories as a walk sees them: in the order of names, so that it can go on anywhere.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use wire::agent::transfer::{MAX_DIRECTORY_ENTRIES, Metadata};

/// Something in a directory.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) name: Vec<u8>,
    pub(crate) file_type: FileType,
}

/// What is in a directory, in the order of names.
///
/// # Errors
/// Why it cannot be read, for people.
pub(crate) fn list(directory: impl AsFd) -> Result<Vec<Found>, String> {
    let mut found = Vec::new();
    let entries = Dir::read_from(&directory).map_err(|error| error.to_string())?;
    for entry in entries {
        let entry = entry.map_err(|error| error.to_string())?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if found.len() >= MAX_DIRECTORY_ENTRIES {
            return Err(format!(
                "it has more than {MAX_DIRECTORY_ENTRIES} entries, which is the limit"
            ));
        }
        let mut file_type = entry.file_type();
        if file_type == FileType::Unknown {
            // Some file systems do not report the type; an entry that has just gone fails when it is opened.
            file_type = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .map_or(FileType::Unknown, |stat| kind(&stat));
        }
        found.push(Found {
            name: name.to_vec(),
            file_type,
        });
    }
    found.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

/// Opens a directory in a directory. A symbolic link is none.
pub(crate) fn open_directory(directory: impl AsFd, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::empty())
}

pub(crate) fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

// The fields' types differ between architectures.
#[allow(clippy::unnecessary_cast)]
pub(crate) fn metadata(stat: &Stat) -> Metadata {
    Metadata {
        mode: stat.st_mode as u32 & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified_s: stat.st_mtime as i64,
        modified_ns: (stat.st_mtime_nsec as u32).min(999_999_999),
    }
}

/// What people call it.
pub(crate) fn describe(file_type: FileType) -> &'static str {
    match file_type {
        FileType::Directory => "a directory",
        FileType::RegularFile => "a file",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Unknown => "something of unknown kind",
    }
}
