//! Telling FUSE from other file systems without asking its program, which may never answer: `fstatfs` asks it, and so does `fstat`.
//!
//! The kernel reports a file's mount by itself, and of what kind each mount is stands in `/proc/self/mountinfo`. Users who may mount can make that long, and change it at any time. So
//! it is read for mounts alone that are not known yet, where the kernel gives no number of a mount again (since Linux 6.8).

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

/// Those of this process's mount namespace, as they were read last.
static MOUNTS: Mutex<Option<Mounts>> = Mutex::new(None);

/// Mounts that are not FUSE, by the numbers that no others get. Nothing is waited for while it is locked.
static ORDINARY: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

/// Then it begins anew.
const MAX_ORDINARY: usize = 4096;

/// `STATX_MNT_ID_UNIQUE`, since Linux 6.8.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);

struct Mounts {
    table: File,
    /// By mount, whether it is FUSE.
    are_fuse: HashMap<u64, bool>,
}

/// The mount of what a descriptor names. It is no other's as long as the descriptor is open.
pub(super) fn mount_of(found: &OwnedFd) -> io::Result<Option<u64>> {
    number_of(found, StatxFlags::MNT_ID)
}

fn number_of(found: &OwnedFd, sort: StatxFlags) -> io::Result<Option<u64>> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = statx(found, "", flags, sort)?;
    let is_told = found.stx_mask & sort.bits() != 0;
    Ok(is_told.then_some(found.stx_mnt_id))
}

/// Whether the mount of what a descriptor names is FUSE, which is `mount`.
///
/// # Errors
/// [`Errno::STALE`] for one that is not in the table: it has been unmounted meanwhile. And what the system says to reading the table.
pub(super) fn is_fuse(found: &OwnedFd, mount: u64) -> io::Result<bool> {
    let unique = number_of(found, MNT_ID_UNIQUE)?;
    let ordinary = || ORDINARY.lock().unwrap_or_else(PoisonError::into_inner);
    let is_ordinary = |number| {
        ordinary()
            .as_ref()
            .is_some_and(|known| known.contains(&number))
    };
    if unique.is_some_and(is_ordinary) {
        return Ok(false);
    }
    let is_fuse = is_fuse_by_table(mount)?;
    if let (Some(number), false) = (unique, is_fuse) {
        let mut known = ordinary();
        let known = known.get_or_insert_default();
        if known.len() >= MAX_ORDINARY {
            known.clear();
        }
        known.insert(number);
    }
    Ok(is_fuse)
}

fn is_fuse_by_table(mount: u64) -> io::Result<bool> {
    let mut known = MOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    // What cannot be read is read anew the next time.
    let mounts = match known.take() {
        Some(mounts) => mounts.renewed()?,
        None => Mounts::read(File::open("/proc/self/mountinfo")?)?,
    };
    let is_fuse = known.insert(mounts).are_fuse.get(&mount).copied();
    Ok(is_fuse.ok_or(Errno::STALE)?)
}

/// Opens the table of this process, as a forked one has that of another. From then on it can be read where its file can no longer be opened.
pub(super) fn open_own_table() -> io::Result<()> {
    let own = Mounts::read(File::open("/proc/self/mountinfo")?)?;
    let mut known = MOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    // The descriptor is not this process's any more.
    std::mem::forget(known.replace(own));
    Ok(())
}

/// The number of its descriptor.
pub(super) fn table_number() -> io::Result<u32> {
    let known = MOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mounts = known.as_ref().ok_or(Errno::BADF)?;
    Ok(mounts.table.as_raw_fd().unsigned_abs())
}

impl Mounts {
    /// Reads the table again if a mount has come or gone since, which is what the kernel calls an error of its file.
    fn renewed(self) -> io::Result<Mounts> {
        let mut change = [PollFd::new(&self.table, PollFlags::PRI)];
        match poll(&mut change, Some(&Timespec::default()))? {
            0 => Ok(self),
            _ => Mounts::read(self.table),
        }
    }

    fn read(mut table: File) -> io::Result<Mounts> {
        table.rewind()?;
        let mut are_fuse = HashMap::new();
        // One line at a time: all of them may be any length.
        for line in BufReader::new(&table).split(b'\n') {
            let line = line?;
            are_fuse.extend(id_and_kind(&line).map(|(id, kind)| (id, is_kind_fuse(kind))));
        }
        // What is at the root counts. It is not in the table after a `chroot` to a directory that is no mount's root.
        let root = statx(CWD, "/", AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID)?;
        are_fuse.insert(root.stx_mnt_id, false);
        Ok(Mounts { table, are_fuse })
    }
}

/// `fuse.NAME` is of one program.
fn is_kind_fuse(kind: &[u8]) -> bool {
    let before_dot = kind.split(|byte| *byte == b'.').next();
    matches!(before_dot, Some(b"fuse" | b"fuseblk"))
}

/// `ID PARENT DEVICE ROOT PLACE OPTIONS [FIELD ...] - KIND SOURCE OPTIONS`; a space in a name is written as `\040`.
fn id_and_kind(line: &[u8]) -> Option<(u64, &[u8])> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    fields.by_ref().skip(5).find(|field| *field == b"-")?;
    Some((id, fields.next()?))
}

#[cfg(test)]
mod tests;
