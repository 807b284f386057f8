//! Open files whose locks others may hold.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::act::{Act, Outcome};
use super::place::is_ours;
use super::{Entry, Fuse, helper};

/// The most that goes into one packet.
const MAX_PIECE: usize = helper::MAX_PACKET - 64;

/// As much room as a busy machine has in well below the time that one act may take.
const ALLOCATED_AT_ONCE: u64 = 16 << 20;

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
    match others_may_hold(file)? {
        true => perform_beside(act, file, path),
        false => act.perform(&[file.as_fd()]),
    }
}

/// The process beside this one does it, if there is one.
fn perform_beside(act: &Act, file: &File, path: &Path) -> io::Result<Outcome> {
    match helper::in_force() {
        Some(helper) => helper.ask(act, path, &[file.as_fd()]),
        None => act.perform(&[file.as_fd()]),
    }
}

/// An ordinary file that other programs were given open, whatever its mode says: any of them may hold its lock.
///
/// The errors of all functions are the system's, and [`io::ErrorKind::TimedOut`] where it takes too long, and may be done later.
#[derive(Debug)]
pub struct SharedFile {
    file: File,
    path: PathBuf,
}

impl SharedFile {
    /// `path` is the file's, or else a name that no other file has: nothing more is tried there while it is held up.
    pub fn new(file: File, path: PathBuf) -> SharedFile {
        SharedFile { file, path }
    }

    /// For what takes no lock.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Sets its mode.
    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        self.perform(&Act::SetMode { mode })
    }

    /// Sets its length.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        self.perform(&Act::SetLen { len })
    }

    /// Leaves nothing in this part of it.
    pub fn punch(&self, part: Range<u64>) -> io::Result<()> {
        self.allocate_in_pieces(true, part)
    }

    /// Takes the room for this part of it.
    pub fn allocate(&self, part: Range<u64>) -> io::Result<()> {
        self.allocate_in_pieces(false, part)
    }

    /// Writes at most 8 KiB at this place of it.
    pub fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let bytes = bytes.to_vec();
        let len = bytes.len();
        let written = perform_beside(&Act::WriteAt { bytes, at }, &self.file, &self.path)?;
        match written.number == len {
            true => Ok(()),
            false => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn allocate_in_pieces(&self, is_hole: bool, part: Range<u64>) -> io::Result<()> {
        for from in part.clone().step_by(ALLOCATED_AT_ONCE as usize) {
            let len = ALLOCATED_AT_ONCE.min(part.end - from);
            self.perform(&Act::Allocate { is_hole, from, len })?;
        }
        Ok(())
    }

    fn perform(&self, act: &Act) -> io::Result<()> {
        perform_beside(act, &self.file, &self.path).map(drop)
    }
}

/// Whether users other than root and this process's may have the file open.
fn others_may_hold(file: &File) -> io::Result<bool> {
    let stat = fstat(file)?;
    let by_others = Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
    Ok(!is_ours(&stat) || stat.st_mode & by_others.bits() != 0)
}
