//! The file behind a window: the memory of zero-copy circuits, as the host makes it and as a guest finds it.
//!
//! # Theory of operation
//!
//! A guest is given the file as a virtio-pmem device. Its kernel looks for an *info block* at byte 4096 of the device (Linux
//! `drivers/nvdimm/pfn.h`, `struct nd_pfn_sb`); the one that stands here says "device DAX, data from byte 2 MiB on, in pages of 2 MiB", and so the
//! kernel makes `/dev/daxN.0` of the rest, with nothing to be configured or installed. The UUID in the info block is the window's name: the guest's
//! agent reads it at `/sys/bus/nd/devices/daxN.0/uuid`.
//!
//! ```text
//! 0        4 KiB        8 KiB       2 MiB                4 MiB
//! | unused | info block | unused    | the circuit's      | first ring | second ring | unused |
//! |        |            |           | header             |            |             |
//!                                   ^ /dev/daxN.0 and the circuit's window begin here
//! ```
//!
//! There are two kinds of files. A *sealed* one is a memfd that can neither shrink nor grow: it can be handed to any program. An *ordinary* one has a path,
//! so that a VMM can be started with it; a program that has it open can truncate it, and memory that is gone when a guest touches it ends that guest's VMM.
//! So it is for programs only that could end the VMM anyhow.
//!
//! # Trust
//!
//! The guest can write anywhere in the file, the info block included. So nothing is ever read from it: what the host knows about a window it keeps
//! elsewhere, and [`renew`](WindowFile::renew) writes the info block anew each time.
//!
//! A holder of the file can hold its lock without end: what takes it is done by [`SharedFile`].

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use shmring::{Identity, Kind, MAX_RING_LEN, MIN_RING_LEN, Window, WindowError, WindowSpec};
use sys::links::{Entry, Fuse, SharedFile};
use wire::window::{MAX_LEN, MIN_LEN, PAGE_LEN, is_len};

#[cfg(test)]
mod tests;

/// Where the guest's device and the circuit's window begin in the file.
pub const DATA_OFFSET: u64 = PAGE_LEN;

/// The longest file that a guest has with another one, or with programs of the host that could not end its VMM anyhow: less than a section of Linux's memory,
/// which is 128 MiB on x86-64. Every holder of the window can write the info block that the guest's kernel goes by, and so make it keep its descriptions
/// of the pages in the window, where they could be forged. Linux does so for whole sections only.
pub const MAX_LEN_BETWEEN_STRANGERS: u64 = 64 << 20;

const INFO_BLOCK_AT: u64 = 4096;
const INFO_BLOCK_LEN: usize = 4096;
const INFO_BLOCK_END: u64 = INFO_BLOCK_AT + INFO_BLOCK_LEN as u64;
const SIGNATURE: &[u8; 16] = b"NVDIMM_DAX_INFO\0";
const VERSION_MAJOR: u16 = 1;
/// The first one that says how large a page and its description are.
const VERSION_MINOR: u16 = 4;
/// The descriptions of the pages are in the guest's ordinary memory, and take no room in the window.
const MODE_RAM: u32 = 1;
const SYSTEM_PAGE_LEN: u32 = 4096;
const PAGE_DESCRIPTION_LEN: u16 = 64;

/// The longest rings, at most `max_ring` bytes each, for which there is room in a file of this length. `None` if there is none for the shortest.
pub fn ring_len(len: u64, max_ring: u64) -> Option<u64> {
    let room = len.saturating_sub(DATA_OFFSET + PAGE_LEN) / 2;
    let most = room.min(max_ring).min(MAX_RING_LEN);
    most.checked_ilog2()
        .map(|power| 1 << power)
        .filter(|ring_len| *ring_len >= MIN_RING_LEN)
}

/// One use of a window, by one circuit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    /// Which one it is.
    pub generation: u64,
    /// Random.
    pub nonce: [u8; 16],
    /// Of each of the two rings, in bytes.
    pub ring_len: u64,
    /// Its rings carry messages rather than a stream of bytes.
    pub has_records: bool,
}

/// The file of one window.
#[derive(Debug)]
pub struct WindowFile {
    file: SharedFile,
    uuid: [u8; 16],
    len: u64,
    is_sealed: bool,
}

impl WindowFile {
    /// Whether the file is in memory: a VMM may hand over no other.
    pub fn is_in_memory(&self) -> bool {
        rustix::fs::fcntl_get_seals(self.file.file()).is_ok()
    }

    /// A sealed one of `len` bytes.
    pub fn sealed(uuid: [u8; 16], len: u64) -> io::Result<WindowFile> {
        check_len(len)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("ringdown-window", flags)?);
        file.set_len(len)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        // No other program has it yet.
        file.write_all_at(&info_block(uuid, len), INFO_BLOCK_AT)?;
        let name = format!("window {:032x}", u128::from_be_bytes(uuid));
        Ok(WindowFile {
            file: SharedFile::new(file, PathBuf::from(name)),
            uuid,
            len,
            is_sealed: true,
        })
    }

    /// An ordinary one of `len` bytes at this path, which only its owner may open. One that is there is taken over if it is a file of ours. There is nothing else in the
    /// directory but such files of the same VM.
    ///
    /// # Errors
    /// `len` cannot be, something else is at the path, or what the system reports.
    pub fn at(path: &Path, uuid: [u8; 16], len: u64) -> io::Result<WindowFile> {
        check_len(len)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NONBLOCK;
        let entry = Entry::of_shared(path, Fuse::Refused)?;
        let file = File::from(entry.open(flags, Mode::RUSR | Mode::WUSR)?);
        let metadata = file.metadata()?;
        let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
        if !metadata.is_file() || !is_ours || metadata.nlink() != 1 {
            let message = format!(
                "{} is no ordinary file of this user with no other name: remove it",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        let window = WindowFile {
            file: SharedFile::new(file, path.to_owned()),
            uuid,
            len,
            is_sealed: false,
        };
        window.file.set_mode(0o600)?;
        window.renew()?;
        Ok(window)
    }

    /// Leaves nothing in the file but its info block.
    ///
    /// # Errors
    /// What the system reports, such as that there is no room for an ordinary file.
    pub fn renew(&self) -> io::Result<()> {
        if !self.is_sealed && self.file.file().metadata()?.len() != self.len {
            self.file.set_len(self.len)?;
        }
        self.file.punch(0..INFO_BLOCK_AT)?;
        self.file.punch(INFO_BLOCK_END..self.len)?;
        if !self.is_sealed {
            // Now, rather than when a guest writes and there is no room: that would end its VMM.
            self.file.allocate(0..self.len)?;
        }
        // Never a hole for a moment: a guest that boots just now looks for it.
        let info_block = info_block(self.uuid, self.len);
        self.file.write_at(&info_block, INFO_BLOCK_AT)
    }

    /// Writes the header of a circuit's window, for one life of it. It is renewed before.
    pub fn format(&self, life: &Life) -> Result<(), WindowError> {
        let spec = WindowSpec {
            identity: Identity {
                generation: life.generation,
                nonce: life.nonce,
            },
            kind: match life.has_records {
                true => Kind::Records,
                false => Kind::Bytes,
            },
            ring_len: life.ring_len,
            page_len: PAGE_LEN,
        };
        Window::format(self.file.file(), DATA_OFFSET, &spec)
    }

    /// The window's name.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Of the file, in bytes.
    pub fn file_len(&self) -> u64 {
        self.len
    }

    /// Of the guest's device, in bytes.
    pub fn device_len(&self) -> u64 {
        self.len - DATA_OFFSET
    }

    /// Whether it can be handed to any program.
    pub fn is_sealed(&self) -> bool {
        self.is_sealed
    }

    /// The file, open for reading and writing, for another process. It is opened anew: flags such as `O_APPEND` belong to an open file description, and a
    /// copy's would be this one's.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        let ours = format!("/proc/self/fd/{}", self.file.file().as_raw_fd());
        let theirs = OpenOptions::new().read(true).write(true).open(ours)?;
        Ok(theirs.into())
    }
}

fn check_len(len: u64) -> io::Result<()> {
    match is_len(len) {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "a window of {len} bytes: expected {MIN_LEN} to {MAX_LEN}, and a multiple of {PAGE_LEN}"
            ),
        )),
    }
}

/// What the guest's kernel looks for, and checks.
fn info_block(uuid: [u8; 16], len: u64) -> [u8; INFO_BLOCK_LEN] {
    let mut block = [0; INFO_BLOCK_LEN];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    let pages = (len - DATA_OFFSET) / u64::from(SYSTEM_PAGE_LEN);
    put(0, SIGNATURE);
    put(16, &uuid);
    // From 32 on the parent's UUID, which such a device has not, and flags.
    put(52, &VERSION_MAJOR.to_le_bytes());
    put(54, &VERSION_MINOR.to_le_bytes());
    put(56, &DATA_OFFSET.to_le_bytes());
    put(64, &pages.to_le_bytes());
    put(72, &MODE_RAM.to_le_bytes());
    // Nothing is left out before or behind: eight zeros.
    put(84, &(PAGE_LEN as u32).to_le_bytes());
    put(88, &SYSTEM_PAGE_LEN.to_le_bytes());
    put(92, &PAGE_DESCRIPTION_LEN.to_le_bytes());
    let checksum = fletcher64(&block);
    block[INFO_BLOCK_LEN - 8..].copy_from_slice(&checksum.to_le_bytes());
    block
}

/// Fletcher's checksum over little-endian words of 32 bits, as the kernel has it (`nd_fletcher64`). The checksum's own place counts as zero.
fn fletcher64(block: &[u8]) -> u64 {
    let words = block.chunks_exact(4);
    let (low, high) = words.fold((0_u32, 0_u64), |(low, high), word| {
        let word = word
            .iter()
            .rev()
            .fold(0, |all, byte| all << 8 | u32::from(*byte));
        let low = low.wrapping_add(word);
        (low, high.wrapping_add(u64::from(low)))
    });
    high << 32 | u64::from(low)
}
