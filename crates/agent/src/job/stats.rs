//! The figures of the guest, from `/proc` and from its file systems.
//!
//! The kernel's texts are read into numbers by functions of text, so that each can be tested with what kernels really say. What a line
//! does not have counts as 0: an old kernel reports less.

use std::io::{Error, ErrorKind};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::StatVfs;
use sys::links::Fuse;
use wire::agent::job::{
    Answer, Cpu, Disk, FileSystem, MAX_LISTED, MAX_STATS_TEXT_LEN, Memory, NetworkLink, Stats,
};

use super::Host;
use crate::guest::{read_limited, read_mounts, unescape};
use crate::log::say;
use crate::stop::Stop;

/// The most that is read of a file in `/proc`, in bytes.
const MAX_PROC_LEN: u64 = 16 * 1024 * 1024;

/// The size of a sector in the kernel's counters of disks, in bytes, whatever the disk has.
const SECTOR_LEN: u64 = 512;

/// Kinds of file systems that have a disk, or memory, of this guest behind them. Others are the kernel's own tables, or they are another
/// machine's and may never answer.
const KINDS: [&str; 19] = [
    "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs",
    "msdos", "nilfs2", "ntfs3", "squashfs", "tmpfs", "udf", "vfat", "xfs", "zfs",
];

pub(super) fn run(host: &mut Host<'_>, interval_ms: u32, count: u32) -> Result<(), Stop> {
    let interval = Duration::from_millis(interval_ms.into());
    let mut next = Instant::now();
    let mut answered = 0;
    loop {
        host.answer(Answer::Stats(Box::new(collect())))?;
        answered += 1;
        if count != 0 && answered >= count {
            return host.answer(Answer::Done);
        }
        // After a pause of the whole guest, what was missed is not made up for.
        next = (next + interval).max(Instant::now());
        host.pause(next)?;
    }
}

/// The figures now.
pub(crate) fn collect() -> Stats {
    let text = |path: &str, text: std::io::Result<Vec<u8>>| {
        let is_large = |error: &&Error| error.kind() == ErrorKind::FileTooLarge;
        if let Some(error) = text.as_ref().err().filter(is_large) {
            say!("figures of {path} are left out: {error}");
        }
        String::from_utf8_lossy(&text.unwrap_or_default()).into_owned()
    };
    let read = |path: &str| text(path, read_limited(Path::new(path), MAX_PROC_LEN));
    // The second word of its lines is a path.
    let mounted = "/proc/self/mounts";
    let mounted = text(mounted, read_mounts(Path::new(mounted), 1..=1));
    let stat = read("/proc/stat");
    let (load, tasks) = load(&read("/proc/loadavg"));
    let tick_ms = 1000 / rustix::param::clock_ticks_per_second().max(1);
    Stats {
        uptime_ms: uptime_ms(&read("/proc/uptime")),
        load,
        tasks,
        cpus: cpus(&stat),
        cpu: cpu(&stat, tick_ms),
        memory: memory(&read("/proc/meminfo")),
        file_systems: mounts(&mounted)
            .into_iter()
            .filter_map(|mount| {
                with_sizes(mount, |path| {
                    let point = sys::links::find(Path::new(path), Fuse::Refused)?;
                    Ok(rustix::fs::fstatvfs(point)?)
                })
            })
            .take(MAX_LISTED)
            .collect(),
        disks: disks(&read("/proc/diskstats"), |name| {
            Path::new("/sys/block").join(name).exists()
        }),
        links: links(&read("/proc/net/dev")),
    }
}

fn number(word: Option<&str>) -> u64 {
    word.and_then(|word| word.parse().ok()).unwrap_or(0)
}

fn uptime_ms(text: &str) -> u64 {
    hundredths(text.split_whitespace().next()).saturating_mul(10)
}

/// A number with two digits behind its point.
fn hundredths(word: Option<&str>) -> u64 {
    let (whole, part) = word
        .and_then(|word| word.split_once('.'))
        .unwrap_or_default();
    number(Some(whole))
        .saturating_mul(100)
        .saturating_add(number(part.get(..2)))
}

/// The averages, and the number of tasks: `0.20 0.18 0.12 1/80 11206`.
fn load(text: &str) -> ([u32; 3], u32) {
    let mut words = text.split_whitespace();
    let average = |word| u32::try_from(hundredths(word)).unwrap_or(u32::MAX);
    let averages = [
        average(words.next()),
        average(words.next()),
        average(words.next()),
    ];
    let tasks = words.next().and_then(|word| word.split_once('/'));
    let tasks = number(tasks.map(|(_, all)| all));
    (averages, u32::try_from(tasks).unwrap_or(u32::MAX))
}

fn cpus(text: &str) -> u32 {
    let lines = text.lines().filter(|line| {
        let digits = line
            .strip_prefix("cpu")
            .and_then(|rest| rest.chars().next());
        digits.is_some_and(|digit| digit.is_ascii_digit())
    });
    lines.count() as u32
}

fn cpu(text: &str, tick_ms: u64) -> Cpu {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "));
    let mut ticks = line.unwrap_or_default().split_whitespace();
    let mut next = || number(ticks.next()).saturating_mul(tick_ms);
    let [user, nice, system, idle, io_wait, irq, softirq, stolen] = std::array::from_fn(|_| next());
    Cpu {
        user: user.saturating_add(nice),
        system,
        idle,
        io_wait,
        interrupt: irq.saturating_add(softirq),
        stolen,
    }
}

fn memory(text: &str) -> Memory {
    let bytes = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        number(line.and_then(|line| line.split_whitespace().next())).saturating_mul(1024)
    };
    Memory {
        total: bytes("MemTotal"),
        free: bytes("MemFree"),
        available: bytes("MemAvailable"),
        cached: bytes("Cached").saturating_add(bytes("Buffers")),
        swap_total: bytes("SwapTotal"),
        swap_free: bytes("SwapFree"),
    }
}

/// The file systems that are mounted, without their sizes: each once, where it was mounted first.
pub(crate) fn mounts(text: &str) -> Vec<FileSystem> {
    let mut mounts: Vec<FileSystem> = Vec::new();
    for line in text.lines() {
        let mut words = line.split(' ').map(unescape);
        let (Some(device), Some(mounted_at), Some(kind)) =
            (words.next(), words.next(), words.next())
        else {
            continue;
        };
        let is_known = KINDS.contains(&kind.as_str());
        let is_repeated = kind != "tmpfs"
            && mounts
                .iter()
                .any(|other| (&other.device, &other.kind) == (&device, &kind));
        let is_long = [&device, &mounted_at]
            .iter()
            .any(|text| text.len() > MAX_STATS_TEXT_LEN);
        // What was mounted there before cannot be seen any more.
        mounts.retain(|other| other.mounted_at != mounted_at);
        if is_known && !is_repeated && !is_long {
            mounts.push(FileSystem {
                mounted_at,
                device,
                kind,
                ..FileSystem::default()
            });
        }
    }
    mounts
}

fn with_sizes(
    mount: FileSystem,
    statvfs: impl Fn(&str) -> std::io::Result<StatVfs>,
) -> Option<FileSystem> {
    let sizes = statvfs(&mount.mounted_at).ok()?;
    Some(FileSystem {
        size: sizes.f_blocks.saturating_mul(sizes.f_frsize),
        free: sizes.f_bfree.saturating_mul(sizes.f_frsize),
        available: sizes.f_bavail.saturating_mul(sizes.f_frsize),
        files: sizes.f_files,
        files_free: sizes.f_ffree,
        ..mount
    })
}

/// Disks that have done anything: `253 0 vda reads merged sectors ms writes merged sectors ms now ms …`.
fn disks(text: &str, is_whole: impl Fn(&str) -> bool) -> Vec<Disk> {
    let mut disks = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace().skip(2);
        let name = words.next().unwrap_or_default();
        let numbers: [u64; 10] = std::array::from_fn(|_| number(words.next()));
        let [
            reads,
            _,
            sectors_read,
            _,
            writes,
            _,
            sectors_written,
            _,
            _,
            busy_ms,
        ] = numbers;
        let is_used = reads != 0 || writes != 0;
        if !is_used || name.len() > MAX_STATS_TEXT_LEN || !is_whole(name) {
            continue;
        }
        disks.push(Disk {
            name: name.to_owned(),
            reads,
            read_bytes: sectors_read.saturating_mul(SECTOR_LEN),
            writes,
            written_bytes: sectors_written.saturating_mul(SECTOR_LEN),
            busy_ms,
        });
        if disks.len() == MAX_LISTED {
            break;
        }
    }
    disks
}

/// `eth0: bytes packets errs drop fifo frame compressed multicast bytes packets errs drop …`, behind two lines of words.
fn links(text: &str) -> Vec<NetworkLink> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let links = lines.map(|(name, numbers)| {
        let mut words = numbers.split_whitespace();
        let numbers: [u64; 12] = std::array::from_fn(|_| number(words.next()));
        NetworkLink {
            name: name.trim().to_owned(),
            received_bytes: numbers[0],
            received_packets: numbers[1],
            receive_errors: numbers[2],
            receive_drops: numbers[3],
            sent_bytes: numbers[8],
            sent_packets: numbers[9],
            send_errors: numbers[10],
            send_drops: numbers[11],
        }
    });
    links
        .filter(|link| link.name != "lo" && link.name.len() <= MAX_STATS_TEXT_LEN)
        .take(MAX_LISTED)
        .collect()
}

#[cfg(test)]
mod tests;
