//! systemd's journal, read by its own `journalctl` in the export format.
//!
//! A record is lines of `NAME=value`, or, where the value is not plain text, a line `NAME`, its length as a little-endian number of eight
//! bytes, the value and a line's end. An empty line ends the record. Any program of the guest can write into the journal, and nearly
//! anything: names and values are cut at limits, and a record is whole before it is passed on.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use wire::agent::job::{JournalLog, LogEntry, Logs, MAX_CURSOR_LEN, MAX_ENTRY_LEN, MAX_WORD_LEN};

use super::unavailable;
use crate::command::be_as_usual;
use crate::config::Config;
use crate::guest::User;
use crate::stop::Stop;
use crate::tool::find;

/// The fields that are asked for beside those that always come (`__CURSOR`, `__REALTIME_TIMESTAMP`).
const FIELDS: &str = "MESSAGE,PRIORITY,SYSLOG_IDENTIFIER,SYSLOG_PID,_COMM,_PID";

/// The most that is kept of a line with a name and a value, in bytes. A longer message has the other form, or is cut.
const MAX_LINE_LEN: usize = MAX_ENTRY_LEN + 64;

/// A running `journalctl`; dropping it ends it.
#[derive(Debug)]
pub(super) struct Journal {
    child: Child,
    /// What it writes; non-blocking.
    pub(super) output: OwnedFd,
    parser: Parser,
}

impl Journal {
    /// Start reading.
    pub(super) fn open(config: &Config, log: &JournalLog, request: &Logs) -> Result<Journal, Stop> {
        let program = find(&config.search_path, "journalctl").ok_or_else(|| {
            unavailable(
                "there is no journalctl in this guest: name the file of the log, such as /var/log/messages",
            )
        })?;
        let mut command = Command::new(program);
        be_as_usual(&mut command);
        command
            .args(arguments(log, request))
            .env_clear()
            .envs(User::current().environment())
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let failed = |error: std::io::Error| unavailable(format!("cannot run journalctl: {error}"));
        let mut child = command.spawn().map_err(failed)?;
        let Some(output) = child.stdout.take() else {
            return Err(unavailable("journalctl has no output"));
        };
        let journal = Journal {
            child,
            output: output.into(),
            parser: Parser::default(),
        };
        rustix::io::ioctl_fionbio(&journal.output, true).map_err(|error| failed(error.into()))?;
        Ok(journal)
    }

    /// Take in what it wrote.
    pub(super) fn feed(&mut self, bytes: &[u8], entries: &mut Vec<LogEntry>) {
        self.parser.feed(bytes, entries);
    }

    /// It has closed its output: how it ended, if not well.
    pub(super) fn finish(mut self) -> Result<(), Stop> {
        use std::io::Read;
        let failed =
            |error: std::io::Error| unavailable(format!("cannot wait for journalctl: {error}"));
        let mut complaint = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            // What it had to say is in the pipe already, as its output has ended.
            rustix::io::ioctl_fionbio(&stderr, true).map_err(|error| failed(error.into()))?;
            let _ = stderr.take(500).read_to_string(&mut complaint);
        }
        let status = self.child.wait().map_err(failed)?;
        if status.success() {
            return Ok(());
        }
        let words = complaint.lines().next().unwrap_or_default();
        Err(unavailable(format!(
            "journalctl failed ({status}): {words}"
        )))
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn arguments(log: &JournalLog, request: &Logs) -> Vec<OsString> {
    let mut arguments = vec![
        "--output=export".to_owned(),
        format!("--output-fields={FIELDS}"),
        "--no-pager".to_owned(),
        "--quiet".to_owned(),
    ];
    arguments.extend(log.units.iter().map(|unit| format!("--unit={unit}")));
    if request.follow {
        arguments.push("--follow".to_owned());
    }
    match request.lines.filter(|_| log.cursor.is_empty()) {
        Some(lines) => arguments.push(format!("--lines={lines}")),
        // Else following would begin with the last ten, and not behind the place.
        None => arguments.push("--no-tail".to_owned()),
    }
    if !log.cursor.is_empty() {
        arguments.push(format!("--after-cursor={}", log.cursor));
    } else if !log.since.is_empty() {
        arguments.push(format!("--since={}", log.since));
    }
    arguments.into_iter().map(OsString::from).collect()
}

/// Records out of bytes, however they are cut.
#[derive(Debug, Default)]
struct Parser {
    state: State,
    /// The line, or the number, that is being read.
    line: Vec<u8>,
    record: Record,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Line,
    /// The eight bytes of the length of the value of this name.
    Length(Vec<u8>),
    /// So many bytes of the value are still to come.
    Value(Vec<u8>, u64),
    /// The end of the line behind a value.
    End,
}

#[derive(Debug, Default)]
struct Record {
    entry: LogEntry,
    has_identifier: bool,
    has_pid: bool,
}

impl Parser {
    fn feed(&mut self, mut bytes: &[u8], entries: &mut Vec<LogEntry>) {
        while let Some((&first, behind)) = bytes.split_first() {
            match &mut self.state {
                State::Line => {
                    let end = bytes.iter().position(|byte| *byte == b'\n');
                    keep(
                        &mut self.line,
                        &bytes[..end.unwrap_or(bytes.len())],
                        MAX_LINE_LEN,
                    );
                    bytes = &bytes[end.map_or(bytes.len(), |end| end + 1)..];
                    if end.is_some() {
                        self.end_line(entries);
                    }
                }
                State::Length(name) => {
                    self.line.push(first);
                    bytes = behind;
                    if let Ok(length) = <[u8; 8]>::try_from(self.line.as_slice()) {
                        let name = std::mem::take(name);
                        self.line.clear();
                        self.state = State::Value(name, u64::from_le_bytes(length));
                        self.end_value_if_whole();
                    }
                }
                State::Value(_, left) => {
                    let count = usize::try_from(*left)
                        .unwrap_or(usize::MAX)
                        .min(bytes.len());
                    // One byte beyond the limit shows that it was cut.
                    keep(&mut self.line, &bytes[..count], MAX_ENTRY_LEN + 1);
                    *left -= count as u64;
                    bytes = &bytes[count..];
                    self.end_value_if_whole();
                }
                State::End => {
                    self.state = State::Line;
                    bytes = behind;
                }
            }
        }
    }

    fn end_line(&mut self, entries: &mut Vec<LogEntry>) {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let record = std::mem::take(&mut self.record);
            // Without a place it could not be gone on from; there is no such record but in an empty journal.
            if !record.entry.cursor.is_empty() {
                entries.push(record.entry);
            }
            return;
        }
        match line.iter().position(|byte| *byte == b'=') {
            Some(equals) => self.record.set(&line[..equals], &line[equals + 1..]),
            None => self.state = State::Length(line),
        }
    }

    fn end_value_if_whole(&mut self) {
        if let State::Value(name, 0) = &mut self.state {
            let (name, value) = (std::mem::take(name), std::mem::take(&mut self.line));
            self.record.set(&name, &value);
            self.state = State::End;
        }
    }
}

fn keep(kept: &mut Vec<u8>, bytes: &[u8], max: usize) {
    let room = max.saturating_sub(kept.len()).min(bytes.len());
    kept.extend_from_slice(&bytes[..room]);
}

impl Record {
    fn set(&mut self, name: &[u8], value: &[u8]) {
        let text = || String::from_utf8_lossy(value).into_owned();
        let word = || {
            let mut text = text();
            while text.len() > MAX_WORD_LEN {
                text.pop();
            }
            text
        };
        let entry = &mut self.entry;
        match name {
            b"__CURSOR" if value.len() <= MAX_CURSOR_LEN => entry.cursor = text(),
            b"__REALTIME_TIMESTAMP" => entry.time_us = text().parse().unwrap_or(0),
            b"MESSAGE" => {
                entry.continues = value.len() > MAX_ENTRY_LEN;
                entry.text = value[..value.len().min(MAX_ENTRY_LEN)].to_vec();
            }
            b"PRIORITY" => {
                entry.priority = text()
                    .parse()
                    .ok()
                    .filter(|number| *number <= 7)
                    .unwrap_or(6)
            }
            b"SYSLOG_IDENTIFIER" => {
                (entry.identifier, self.has_identifier) = (word(), true);
            }
            b"_COMM" if !self.has_identifier => entry.identifier = word(),
            b"SYSLOG_PID" => {
                if let Ok(pid) = text().trim().parse() {
                    (entry.pid, self.has_pid) = (pid, true);
                }
            }
            b"_PID" if !self.has_pid => entry.pid = text().parse().unwrap_or(0),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
