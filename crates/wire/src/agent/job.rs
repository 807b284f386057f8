//! The everyday jobs of an agent: figures, logs, power, freezing, time, the clipboard.
//!
//! # Theory of operation
//!
//! The host asks with one [`Ask`], the agent gives [`Answer`]s, and which come is a matter of what was asked:
//!
//! ```text
//! Stats            Answer::Stats, once or at each interval                          then Answer::Done
//! Logs             Answer::Begin (of files), Answer::Log, batches of entries; Answer::Note between them       then Answer::Done, or never (follow)
//! Power            Answer::Power as soon as it is under way                         then the guest is on its way out
//! Freeze, Thaw     Answer::FileSystems
//! Time             Answer::Time; the host may ask again on the same connection
//! ClipboardGet     Answer::Clipboard, Data(out) of that length, EndOfStream(out)
//! ClipboardSet     Data(in) from the host of the length that it announced           then Answer::Done
//! Lock             Answer::Done
//! ```
//!
//! Data flows in one direction only and is bounded by what was announced, so it needs no credit: the connection's own
//! backpressure holds a sender. An [`Error`](super::Frame::Error) ends any of them.
//!
//! Each entry of a log says where the reader would go on behind it, so a host that lost the connection asks for the rest with
//! what it got last, and nothing is lost or doubled. The places mean nothing to the host: it hands back what it was given.

mod logs;
mod stats;

pub use logs::{
    FileCursor, FileLog, JournalLog, LogEntry, LogSource, Logs, MAX_BATCH_LEN, MAX_CURSOR_LEN,
    MAX_ENTRIES, MAX_ENTRY_LEN, MAX_FILES, MAX_LINES, MAX_UNITS, MAX_WORD_LEN,
};
pub use stats::{
    Cpu, Disk, FileSystem, MAX_LISTED, MAX_STATS_TEXT_LEN, Memory, NetworkLink, Stats,
};

use serde::{Deserialize, Serialize};

use super::body::{check_count, check_len};
use super::{Invalid, MAX_DIRECTORY_LEN, MAX_ERROR_MESSAGE_LEN, MAX_NAME_LEN};

/// The longest body of an [`Ask`], in bytes.
pub const MAX_ASK_LEN: usize = 128 * 1024;

/// The longest body of an [`Answer`], in bytes.
pub const MAX_ANSWER_LEN: usize = 192 * 1024;

/// The capability of giving figures ([`Stats`]).
pub const CAPABILITY_STATS: &str = "stats";
/// The capability of showing logs ([`Logs`]).
pub const CAPABILITY_LOGS: &str = "logs";
/// The capability of shutting down, rebooting and suspending ([`Power`]).
pub const CAPABILITY_POWER: &str = "power";
/// The capability of freezing and thawing file systems.
pub const CAPABILITY_FREEZE: &str = "freeze";
/// The capability of reading and setting the clock.
pub const CAPABILITY_TIME: &str = "time";
/// The capability of reading and setting the clipboard of the guest's desktop.
pub const CAPABILITY_CLIPBOARD: &str = "clipboard";
/// The capability of locking the guest's sessions.
pub const CAPABILITY_LOCK: &str = "lock";

/// The shortest and the longest interval between figures, in milliseconds.
pub const STATS_INTERVAL_MS: std::ops::RangeInclusive<u32> = 100..=3_600_000;

/// The shortest and the longest time for which file systems may be frozen, in milliseconds.
pub const FREEZE_TIMEOUT_MS: std::ops::RangeInclusive<u32> = 1_000..=3_600_000;

/// The longest content of a clipboard, in bytes.
pub const MAX_CLIPBOARD_LEN: u32 = 1024 * 1024;

/// The most file systems that are frozen at once.
pub const MAX_FROZEN: usize = 64;

/// The furthest that a clock may be set in one step, in nanoseconds: a hundred years.
pub const MAX_CLOCK_STEP_NS: i64 = 100 * 366 * 24 * 3600 * 1_000_000_000;

/// What the host wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Figures of the guest.
    Stats {
        /// Milliseconds between two answers, in [`STATS_INTERVAL_MS`].
        interval_ms: u32,
        /// How many answers; 0 goes on for as long as the host is there.
        count: u32,
    },
    /// A log.
    Logs(Logs),
    /// Shut down, reboot or suspend.
    Power {
        /// Which of them.
        action: Power,
        /// Have the kernel do it, after writing everything to disk, where the guest has no way of its own, where that fails, and after so many
        /// milliseconds; never if absent.
        force_after_ms: Option<u32>,
    },
    /// Hold all writes to the guest's file systems, so that a snapshot of its disks is consistent.
    Freeze {
        /// Thaw by itself after so many milliseconds, in [`FREEZE_TIMEOUT_MS`].
        timeout_ms: u32,
    },
    /// Let writes go on.
    Thaw,
    /// What the guest's clock says, after moving it if that is wanted.
    Time {
        /// Add this to the clock first, in nanoseconds; at most [`MAX_CLOCK_STEP_NS`] either way.
        step_ns: Option<i64>,
    },
    /// The text in the clipboard of the guest's desktop.
    ClipboardGet,
    /// Put a text into the clipboard of the guest's desktop: data of standard input follows.
    ClipboardSet {
        /// Its length in bytes, at most [`MAX_CLIPBOARD_LEN`].
        len: u32,
    },
    /// Lock the screens of the guest's sessions.
    Lock,
}

/// What is to become of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Power {
    /// Shut down and power off.
    Shutdown,
    /// Shut down and start again.
    Reboot,
    /// Sleep, with everything kept in memory.
    Suspend,
}

/// What the agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// It is done, or everything was sent.
    Done,
    /// Figures.
    Stats(Box<Stats>),
    /// Entries of a log, in their order; at least one.
    Log(Vec<LogEntry>),
    /// Where the files of a log begin for this reader, each in turn, before the first of its entries: a reader that has seen none of them yet
    /// continues here.
    Begin(Vec<FileCursor>),
    /// Something about a log that is not in it: that a file was truncated, or a gap.
    Note(String),
    /// It is under way; the guest may be gone at any moment.
    Power {
        /// What was called for it, such as `systemctl poweroff`.
        way: String,
    },
    /// The file systems that were frozen or thawed, by their mount points.
    FileSystems(Vec<Vec<u8>>),
    /// The clock.
    Time(Clock),
    /// The clipboard: data of standard output follows.
    Clipboard {
        /// Its length in bytes, at most [`MAX_CLIPBOARD_LEN`].
        len: u32,
    },
}

/// What the guest's clock says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    /// Nanoseconds since 1970-01-01 00:00 UTC.
    pub unix_ns: i64,
    /// The service in the guest that keeps the clock right: `systemd-timesyncd`, `chronyd`; else nothing.
    pub kept_by: String,
}

impl Ask {
    /// The capability that stands for it.
    pub fn capability(&self) -> &'static str {
        match self {
            Ask::Stats { .. } => CAPABILITY_STATS,
            Ask::Logs(_) => CAPABILITY_LOGS,
            Ask::Power { .. } => CAPABILITY_POWER,
            Ask::Freeze { .. } | Ask::Thaw => CAPABILITY_FREEZE,
            Ask::Time { .. } => CAPABILITY_TIME,
            Ask::ClipboardGet | Ask::ClipboardSet { .. } => CAPABILITY_CLIPBOARD,
            Ask::Lock => CAPABILITY_LOCK,
        }
    }

    pub(super) fn check(&self) -> Result<(), Invalid> {
        match self {
            Ask::Stats { interval_ms, .. } => check_range(
                "the interval",
                *interval_ms,
                &STATS_INTERVAL_MS,
                "100 to 3600000 ms",
            ),
            Ask::Logs(logs) => logs.check(),
            Ask::Freeze { timeout_ms } => check_range(
                "the time of a freeze",
                *timeout_ms,
                &FREEZE_TIMEOUT_MS,
                "1000 to 3600000 ms",
            ),
            Ask::Time {
                step_ns: Some(step),
            } if step.unsigned_abs() > MAX_CLOCK_STEP_NS as u64 => Err(Invalid::OutOfRange {
                what: "the step of the clock",
                value: u32::MAX,
                expected: "a hundred years at most",
            }),
            Ask::ClipboardSet { len } => check_clipboard(*len),
            Ask::Power { .. } | Ask::Thaw | Ask::Time { .. } | Ask::ClipboardGet | Ask::Lock => {
                Ok(())
            }
        }
    }
}

impl Answer {
    pub(super) fn check(&self) -> Result<(), Invalid> {
        match self {
            Answer::Stats(stats) => stats.check(),
            Answer::Log(entries) => logs::check_entries(entries),
            Answer::Begin(places) => check_count("files", places.len(), MAX_FILES),
            Answer::Note(words) => check_len("a note", words.as_bytes(), MAX_ERROR_MESSAGE_LEN),
            Answer::Power { way } => {
                check_len("the way to power", way.as_bytes(), MAX_ERROR_MESSAGE_LEN)
            }
            Answer::FileSystems(mounts) => {
                check_count("file systems", mounts.len(), MAX_FROZEN)?;
                mounts
                    .iter()
                    .try_for_each(|path| check_len("a mount point", path, MAX_DIRECTORY_LEN))
            }
            Answer::Time(clock) => check_len(
                "who keeps the clock",
                clock.kept_by.as_bytes(),
                MAX_NAME_LEN,
            ),
            Answer::Clipboard { len } => check_clipboard(*len),
            Answer::Done => Ok(()),
        }
    }
}

fn check_clipboard(len: u32) -> Result<(), Invalid> {
    check_range(
        "the length of the clipboard",
        len,
        &(0..=MAX_CLIPBOARD_LEN),
        "1048576 bytes at most",
    )
}

fn check_range(
    what: &'static str,
    value: u32,
    range: &std::ops::RangeInclusive<u32>,
    expected: &'static str,
) -> Result<(), Invalid> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(Invalid::OutOfRange {
        what,
        value,
        expected,
    })
}

#[cfg(test)]
pub(super) mod tests;
