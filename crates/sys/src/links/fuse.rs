//! Telling FUSE from other file systems without asking its program, which may never answer: `fstatfs` asks it, and so does `fstat`.
//!
//! The kernel reports a file's mount by itself, and of what kind each mount is stands in `/proc/self/mountinfo`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

/// Those of this process's mount namespace, as they were read last.
static MOUNTS: Mutex<Option<Mounts>> = Mutex::new(None);

struct Mounts {
    table: File,
    /// By mount, whether it is FUSE.
    are_fuse: HashMap<u64, bool>,
}

/// The mount of what a descriptor names. It is no other's as long as the descriptor is open.
pub(super) fn mount_of(found: &OwnedFd) -> io::Result<Option<u64>> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = statx(found, "", flags, StatxFlags::MNT_ID)?;
    let is_told = found.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    Ok(is_told.then_some(found.stx_mnt_id))
}

/// Whether a mount is FUSE, of which a descriptor is open.
///
/// # Errors
/// [`Errno::STALE`] for one that is not in the table: it has been unmounted meanwhile. And what the system says to reading the table.
pub(super) fn is_fuse(mount: u64) -> io::Result<bool> {
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
        let mut lines = Vec::new();
        table.rewind()?;
        table.read_to_end(&mut lines)?;
        let known = lines.split(|byte| *byte == b'\n').filter_map(id_and_kind);
        let mut are_fuse: HashMap<_, _> =
            known.map(|(id, kind)| (id, is_kind_fuse(kind))).collect();
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
