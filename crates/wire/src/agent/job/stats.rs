//! The figures of a guest. All counters begin with the guest's boot.

use serde::{Deserialize, Serialize};

use crate::agent::Invalid;
use crate::agent::body::{check_count, check_len};

/// The most file systems, disks and network links, of each.
pub const MAX_LISTED: usize = 64;

/// The longest name of one of them, in bytes. What is longer is left out by the agent.
pub const MAX_STATS_TEXT_LEN: usize = 255;

/// Figures at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Time since the boot, in milliseconds.
    pub uptime_ms: u64,
    /// Processes that want to run, averaged over 1, 5 and 15 minutes, in hundredths.
    pub load: [u32; 3],
    /// Processes and threads.
    pub tasks: u32,
    /// Processors that are on.
    pub cpus: u32,
    /// What all processors did together.
    pub cpu: Cpu,
    /// Memory.
    pub memory: Memory,
    /// File systems of its own; not those of other machines, which might not answer.
    pub file_systems: Vec<FileSystem>,
    /// Disks, whole ones only.
    pub disks: Vec<Disk>,
    /// Network links; not the loopback.
    pub links: Vec<NetworkLink>,
}

/// What processors did, in milliseconds of one processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Programs, niced ones included.
    pub user: u64,
    /// The kernel.
    pub system: u64,
    /// Nothing.
    pub idle: u64,
    /// Nothing, while a disk was waited for.
    pub io_wait: u64,
    /// Interrupts, hard and soft.
    pub interrupt: u64,
    /// They wanted to run, and the host ran something else.
    pub stolen: u64,
}

/// Memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// Unused.
    pub free: u64,
    /// What programs could get without swapping.
    pub available: u64,
    /// Kept of files.
    pub cached: u64,
    /// Swap, all of it.
    pub swap_total: u64,
    /// Swap, unused.
    pub swap_free: u64,
}

/// A file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSystem {
    /// Where it is mounted.
    pub mounted_at: String,
    /// What is mounted.
    pub device: String,
    /// Its kind, such as `ext4`.
    pub kind: String,
    /// Its size in bytes.
    pub size: u64,
    /// What is free in bytes.
    pub free: u64,
    /// What is free for unprivileged users, in bytes.
    pub available: u64,
    /// How many files it can have; 0 if it does not say.
    pub files: u64,
    /// How many more.
    pub files_free: u64,
}

/// A disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Its name, such as `vda`.
    pub name: String,
    /// Reads done.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes done.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Time in which it had something to do, in milliseconds.
    pub busy_ms: u64,
}

/// A network link.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkLink {
    /// Its name, such as `eth0`.
    pub name: String,
    /// Bytes received.
    pub received_bytes: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Packets that arrived damaged.
    pub receive_errors: u64,
    /// Packets that arrived and were dropped.
    pub receive_drops: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Packets sent.
    pub sent_packets: u64,
    /// Packets that could not be sent.
    pub send_errors: u64,
    /// Packets dropped before they were sent.
    pub send_drops: u64,
}

impl Stats {
    pub(super) fn check(&self) -> Result<(), Invalid> {
        check_count("file systems", self.file_systems.len(), MAX_LISTED)?;
        check_count("disks", self.disks.len(), MAX_LISTED)?;
        check_count("network links", self.links.len(), MAX_LISTED)?;
        let names = self
            .file_systems
            .iter()
            .flat_map(|fs| [&fs.mounted_at, &fs.device, &fs.kind])
            .chain(self.disks.iter().map(|disk| &disk.name))
            .chain(self.links.iter().map(|link| &link.name));
        for name in names {
            check_len("a name", name.as_bytes(), MAX_STATS_TEXT_LEN)?;
        }
        Ok(())
    }
}
