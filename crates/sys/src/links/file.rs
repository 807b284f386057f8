//! Open files whose locks others may hold.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::act::{Act, Outcome};
use super::place::is_ours;
use super::{Entry, Fuse, helper};

/// The most that goes into one packet.
const MAX_PIECE: usize = helper::MAX_PACKET - 64;

/// Opens what a path leads to by links that no other user could have set, also where that is a descriptor of this process, as `/dev/stdout` is. This may wait for a FUSE file system.
///
/// # Errors
/// As [`Entry::open`].
pub fn open_behind_links(path: &Path, flags: OFlags, mode: Mode) -> io::Result<File> {
    let entry = Entry::follow(path, Fuse::Entered, is_of_this_process)?;
    let file = match is_of_this_process(entry.path()) {
        // What such a link says is no path.
        true => openat(CWD, entry.path(), flags | OFlags::CLOEXEC, mode)?,
        false => entry.open(flags, mode)?,
    };
    Ok(file.into())
}

fn is_of_this_process(path: &Path) -> bool {
    path.starts_with("/proc") || path.starts_with("/dev/fd")
}

/// Writes some of these bytes where the file stands, or at its end if it is open so, and says how many. `path` is the file's: nothing more is tried there while it is held up.
///
/// # Errors
/// What the system says; [`io::ErrorKind::TimedOut`] where it takes too long: the bytes may be written later.
pub fn write(file: &File, path: &Path, bytes: &[u8]) -> io::Result<usize> {
    if !others_may_hold(file)? {
        return Ok(rustix::io::write(file, bytes)?);
    }
    let bytes = bytes[..bytes.len().min(MAX_PIECE)].to_vec();
    Ok(perform(&Act::Write { bytes }, file, path)?.number)
}

/// The byte at this place of a file.
///
/// # Errors
/// As [`write`], and [`Errno::IO`] behind its end.
pub fn read_byte(file: &File, path: &Path, at: u64) -> io::Result<u8> {
    let read = perform(&Act::ReadByte { at }, file, path)?;
    u8::try_from(read.number).map_err(|_| Errno::IO.into())
}

/// The process beside this one does it, if there is one and others could hold the file's lock.
fn perform(act: &Act, file: &File, path: &Path) -> io::Result<Outcome> {
    match helper::in_force() {
        Some(helper) if others_may_hold(file)? => helper.ask(act, path, &[file.as_fd()]),
        _ => act.perform(&[file.as_fd()]),
    }
}

/// Whether users other than root and this process's may have the file open.
fn others_may_hold(file: &File) -> io::Result<bool> {
    let stat = fstat(file)?;
    let by_others = Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
    Ok(!is_ours(&stat) || stat.st_mode & by_others.bits() != 0)
}
