//! What takes a directory's lock in the kernel: looking a name up, making it, giving it another one, removing it. And what takes a file's: writing, reading on some file systems, and changing its mode, length or room.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, fallocate, fchmod, ftruncate, openat, renameat, statat,
    unlinkat,
};
use rustix::io::{Errno, pread, pwrite, write};
use rustix::net::{SocketAddrUnix, bind};
use serde::{Deserialize, Serialize};

use super::place::walk;
use super::{FileId, Fuse, file_id};

/// One such act. Names are those in the directory that the first descriptor names; bytes are those of the file that it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Act {
    /// Goes along a path, and opens what is at its end.
    Walk { path: Vec<u8>, refuses_fuse: bool },
    /// openat(2).
    Open {
        name: Vec<u8>,
        flags: u32,
        mode: u32,
    },
    /// unlinkat(2), if the name still is this file's.
    Unlink { name: Vec<u8>, file: FileId },
    /// renameat(2) within the directory.
    Rename { name: Vec<u8>, new: Vec<u8> },
    /// bind(2) of the socket that the second descriptor is, at a path, or else at a name in the directory.
    Bind {
        name: Vec<u8>,
        path: Option<Vec<u8>>,
    },
    /// write(2).
    Write { bytes: Vec<u8> },
    /// pread(2) of one byte.
    ReadByte { at: u64 },
    /// pwrite(2).
    WriteAt { bytes: Vec<u8>, at: u64 },
    /// fchmod(2).
    SetMode { mode: u32 },
    /// ftruncate(2).
    SetLen { len: u64 },
    /// fallocate(2), which leaves the file's length as it is.
    Allocate { is_hole: bool, from: u64, len: u64 },
}

/// What an act has brought.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) file: Option<OwnedFd>,
    /// Of the end of a walk: see [`super::place::Place`].
    pub(super) way: Way,
    /// How many bytes were written, or the byte that was read.
    pub(super) number: usize,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Way {
    pub(super) is_firm: bool,
    pub(super) mount: Option<u64>,
}

impl Outcome {
    fn of(number: usize) -> Outcome {
        Outcome {
            number,
            ..Outcome::default()
        }
    }
}

impl Act {
    /// Does it by system calls of this process.
    pub(super) fn perform(&self, descriptors: &[BorrowedFd<'_>]) -> io::Result<Outcome> {
        let given = |index: usize| descriptors.get(index).copied().ok_or(Errno::BADF);
        match self {
            Act::Walk { path, refuses_fuse } => {
                let fuse = match refuses_fuse {
                    true => Fuse::Refused,
                    false => Fuse::Entered,
                };
                let place = walk(Path::new(OsStr::from_bytes(path)), fuse)?;
                let way = Way {
                    is_firm: place.is_firm,
                    mount: place.mount,
                };
                return Ok(Outcome {
                    file: Some(place.file),
                    way,
                    number: 0,
                });
            }
            Act::Open { name, flags, mode } => {
                let flags = OFlags::from_bits_retain(*flags) | OFlags::CLOEXEC;
                let file = openat(given(0)?, &name[..], flags, Mode::from_raw_mode(*mode))?;
                return Ok(Outcome {
                    file: Some(file),
                    ..Outcome::default()
                });
            }
            Act::Unlink { name, file } => {
                let named = statat(given(0)?, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
                if file_id(&named) != *file {
                    return Err(io::Error::other("another file stands there by now"));
                }
                unlinkat(given(0)?, &name[..], AtFlags::empty())?;
            }
            Act::Rename { name, new } => renameat(given(0)?, &name[..], given(0)?, &new[..])?,
            Act::Bind { name, path } => {
                let address = match path {
                    Some(path) => SocketAddrUnix::new(&path[..])?,
                    None => SocketAddrUnix::new(pinned(given(0)?, name))?,
                };
                bind(given(1)?, &address)?;
            }
            Act::Write { bytes } => return Ok(Outcome::of(write(given(0)?, bytes)?)),
            Act::ReadByte { at } => {
                let mut byte = [0];
                return match pread(given(0)?, &mut byte, *at)? {
                    0 => Err(Errno::IO.into()),
                    _ => Ok(Outcome::of(byte[0].into())),
                };
            }
            Act::WriteAt { bytes, at } => {
                return Ok(Outcome::of(pwrite(given(0)?, bytes, *at)?));
            }
            Act::SetMode { mode } => fchmod(given(0)?, Mode::from_raw_mode(*mode))?,
            Act::SetLen { len } => ftruncate(given(0)?, *len)?,
            Act::Allocate { is_hole, from, len } => {
                let keep = FallocateFlags::KEEP_SIZE;
                let flags = match is_hole {
                    true => keep | FallocateFlags::PUNCH_HOLE,
                    false => keep,
                };
                fallocate(given(0)?, flags, *from, *len)?;
            }
        }
        Ok(Outcome::default())
    }
}

/// The path of a name in a directory, whatever the directory's own path is.
pub(super) fn pinned(directory: impl AsFd, name: &[u8]) -> Vec<u8> {
    let directory = directory.as_fd().as_raw_fd();
    [format!("/proc/self/fd/{directory}/").as_bytes(), name].concat()
}
