//! The content of files: where it is, and its sum.

use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, Stat};
use rustix::io::Errno;
use xxhash_rust::xxh64::Xxh64;

use crate::error::Stop;

/// What is read at once for a digest, in bytes.
const DIGEST_PIECE: usize = 128 * 1024;

/// The largest page of the architectures that Linux runs on, in bytes.
const LARGEST_PAGE: u64 = 64 * 1024;

/// What is said of a file that changed while it was read.
pub(crate) const CHANGED: &str =
    "it changed while it was read: the copy may be neither the old nor the new content";

/// Distinguishes the content of a file from earlier and later content, and from that of other files.
#[allow(clippy::unnecessary_cast)]
pub(crate) fn identity(stat: &Stat) -> u64 {
    let mut hash = Xxh64::new(0);
    for number in [
        stat.st_dev as u64,
        stat.st_ino as u64,
        stat.st_size as u64,
        stat.st_mtime as u64,
        stat.st_mtime_nsec as u64,
    ] {
        hash.update(&number.to_le_bytes());
    }
    hash.digest()
}

/// Whether a file has been written to between these two checks.
pub(crate) fn has_changed(before: &Stat, after: &Stat) -> bool {
    (before.st_size, before.st_mtime, before.st_mtime_nsec)
        != (after.st_size, after.st_mtime, after.st_mtime_nsec)
}

/// The size of a file.
pub(crate) fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// The size of a file, if its status says it. Files that the kernel makes up, as in /proc and /sys, say none or a page's and take no room: what
/// they have is seen when they are read, as is what little there can be in a small file without room on the disk.
pub(crate) fn known_size(stat: &Stat) -> Option<u64> {
    let size = size(stat);
    let is_made_up = allocated(stat) == 0 && size <= LARGEST_PAGE;
    (!is_made_up).then_some(size)
}

/// How many bytes of a file are on the disk: less than its size if it has holes.
#[allow(clippy::unnecessary_cast)]
pub(crate) fn allocated(stat: &Stat) -> u64 {
    (stat.st_blocks as u64).saturating_mul(512)
}

/// The next part of a file, between `from` and `size`, that is not a hole: its beginning and its end. Nothing if only a hole is left.
pub(crate) fn next_extent(
    file: impl AsFd,
    from: u64,
    size: u64,
) -> rustix::io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(&file, SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // A file system that knows of no holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((from, size))),
        Err(error) => return Err(error),
    };
    if start >= size {
        return Ok(None);
    }
    let end = rustix::fs::seek(&file, SeekFrom::Hole(start))?.min(size);
    // A file that changes meanwhile may answer anything: what is said goes forward, or the rest is taken as it is.
    Ok(Some((
        start.max(from),
        if end > start.max(from) { end } else { size },
    )))
}

/// The XXH64 of all of a file, with holes as zeros. `busy` is called again and again meanwhile.
pub(crate) fn digest(
    file: impl AsFd,
    mut busy: impl FnMut() -> Result<(), Stop>,
) -> Result<rustix::io::Result<u64>, Stop> {
    let mut hash = Xxh64::new(0);
    let mut piece = vec![0; DIGEST_PIECE];
    let mut offset = 0;
    loop {
        match rustix::io::pread(&file, piece.as_mut_slice(), offset) {
            Ok(0) => return Ok(Ok(hash.digest())),
            Ok(count) => {
                hash.update(&piece[..count]);
                offset += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Ok(Err(error)),
        }
        busy()?;
    }
}
