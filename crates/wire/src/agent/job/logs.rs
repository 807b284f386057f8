//! What is asked of a log, and what comes of it.

use serde::{Deserialize, Serialize};

use crate::agent::body::{check_count, check_len, check_no_zero};
use crate::agent::{Invalid, MAX_DIRECTORY_LEN};

/// The most files that are read together.
pub const MAX_FILES: usize = 16;

/// The most units whose journal is asked for together.
pub const MAX_UNITS: usize = 16;

/// The longest name of a unit and the longest time in words, in bytes.
pub const MAX_WORD_LEN: usize = 256;

/// The longest place in a journal, in bytes. Those of systemd have some 150.
pub const MAX_CURSOR_LEN: usize = 512;

/// The longest text of an entry, in bytes. A longer line of a file comes in pieces; of a longer record of the journal only the
/// beginning comes, and a word that it was cut.
pub const MAX_ENTRY_LEN: usize = 64 * 1024;

/// The most entries in one answer.
pub const MAX_ENTRIES: usize = 1024;

/// The most text in one answer, in bytes.
pub const MAX_BATCH_LEN: usize = 64 * 1024;

/// The most lines that may be asked for from the end of a log.
pub const MAX_LINES: u32 = 1_000_000;

/// A log that is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Logs {
    /// Where from.
    pub source: LogSource,
    /// Only so many of the last entries that are there; at most [`MAX_LINES`]. Of no effect where a cursor is given.
    pub lines: Option<u32>,
    /// Go on with what comes later.
    pub follow: bool,
}

/// Where a log is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogSource {
    /// systemd's journal.
    Journal(JournalLog),
    /// Files, 1 to [`MAX_FILES`].
    Files(Vec<FileLog>),
}

/// What of the journal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalLog {
    /// Only of these units; of all if there are none.
    pub units: Vec<String>,
    /// Only what is not older, in journalctl's words; no limit if it is empty.
    pub since: String,
    /// Only what comes behind this place; from the beginning if it is empty.
    pub cursor: String,
}

/// A file of lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileLog {
    /// Its absolute path.
    pub path: Vec<u8>,
    /// Only what comes behind this place.
    pub cursor: Option<FileCursor>,
}

/// A place in a file, by which it is found again after the file was renamed, and by which it is noticed that it was written anew.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileCursor {
    /// The device of its file system.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// The bytes before the place.
    pub offset: u64,
    /// A hash of the last of them.
    pub before: u64,
}

/// An entry of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// Of a file: which of those asked for, from 0.
    pub file: u16,
    /// Of a file: the place behind it.
    pub place: FileCursor,
    /// Of the journal: the place of this record.
    pub cursor: String,
    /// Of the journal: when, in microseconds since 1970.
    pub time_us: u64,
    /// Of the journal: 0 (emergency) to 7 (debugging).
    pub priority: u8,
    /// Of the journal: what wrote it, such as `sshd`.
    pub identifier: String,
    /// Of the journal: its process; 0 if it is not known.
    pub pid: u32,
    /// The text, without the end of the line.
    pub text: Vec<u8>,
    /// Whether the line goes on in the next entry of the file; of a record, whether the rest of it was cut off.
    pub continues: bool,
}

impl Logs {
    pub(super) fn check(&self) -> Result<(), Invalid> {
        if let Some(lines) = self.lines {
            super::check_range(
                "the number of lines",
                lines,
                &(0..=MAX_LINES),
                "1000000 at most",
            )?;
        }
        match &self.source {
            LogSource::Journal(journal) => {
                check_count("units", journal.units.len(), MAX_UNITS)?;
                for word in journal.units.iter().chain([&journal.since]) {
                    check_len(
                        "the name of a unit, or a time",
                        word.as_bytes(),
                        MAX_WORD_LEN,
                    )?;
                    check_no_zero("the name of a unit, or a time", word.as_bytes())?;
                }
                check_no_zero("a place in the journal", journal.cursor.as_bytes())?;
                check_len(
                    "a place in the journal",
                    journal.cursor.as_bytes(),
                    MAX_CURSOR_LEN,
                )
            }
            LogSource::Files(files) => {
                check_count("files", files.len(), MAX_FILES)?;
                if files.is_empty() {
                    return Err(Invalid::Empty("the list of files"));
                }
                for file in files {
                    if file.path.is_empty() {
                        return Err(Invalid::Empty("the path of a file"));
                    }
                    check_len("the path of a file", &file.path, MAX_DIRECTORY_LEN)?;
                    check_no_zero("the path of a file", &file.path)?;
                }
                Ok(())
            }
        }
    }
}

pub(super) fn check_entries(entries: &[LogEntry]) -> Result<(), Invalid> {
    check_count("entries", entries.len(), MAX_ENTRIES)?;
    if entries.is_empty() {
        return Err(Invalid::Empty("the list of entries"));
    }
    for entry in entries {
        check_len("an entry", &entry.text, MAX_ENTRY_LEN)?;
        check_len(
            "a place in the journal",
            entry.cursor.as_bytes(),
            MAX_CURSOR_LEN,
        )?;
        check_len(
            "what wrote an entry",
            entry.identifier.as_bytes(),
            MAX_WORD_LEN,
        )?;
        if usize::from(entry.file) >= MAX_FILES {
            return Err(Invalid::OutOfRange {
                what: "the number of a file",
                value: entry.file.into(),
                expected: "0 to 15",
            });
        }
        if entry.priority > 7 {
            return Err(Invalid::OutOfRange {
                what: "the priority of an entry",
                value: entry.priority.into(),
                expected: "0 to 7",
            });
        }
    }
    Ok(())
}
