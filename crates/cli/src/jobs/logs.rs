//! A guest's log, resumed where it was when the connection breaks.
//!
//! Each entry comes with the place behind it. What was written out last is remembered by its place, so after a broken connection the
//! agent is asked for what comes behind it: nothing is lost, and nothing comes twice. It does not matter what broke: the connection, the
//! agent, the daemon, or a guest that was away meanwhile.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use wire::agent::ErrorKind;
use wire::agent::job::{Answer, Ask, FileCursor, FileLog, JournalLog, LogEntry, LogSource, Logs};

use super::{Job, unexpected};
use crate::guest::{Agent, GuestError, is_harmful, printable};
use crate::json;

/// The wait between two attempts to get the connection back.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// What is wanted.
#[derive(Debug, Clone, Default)]
pub struct LogOptions {
    /// Files of the guest; its journal if there are none.
    pub files: Vec<PathBuf>,
    /// Of the journal, only these units.
    pub units: Vec<String>,
    /// Of the journal, only what is not older, in journalctl's words.
    pub since: String,
    /// Only so many of the last entries.
    pub lines: Option<u32>,
    /// Go on with what comes later.
    pub follow: bool,
    /// For how long to try to get a broken connection back.
    pub retry: Duration,
    /// How entries are written.
    pub style: Style,
}

/// How entries are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Style {
    /// As they are.
    #[default]
    Raw,
    /// Without what could steer a terminal.
    Harmless,
    /// A line of JSON each.
    Json,
}

/// Why a log ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error("cannot write the log: {0}")]
    Output(io::Error),
}

/// Write a log to `out`, and to `notes` what is not of the log.
pub fn write(
    agent: Agent<'_>,
    options: &LogOptions,
    out: &mut impl Write,
    notes: &mut impl FnMut(&str),
) -> Result<(), LogError> {
    let mut request = request(options);
    let mut printer = Printer::new(options);
    let mut last_seen = Instant::now();
    let mut is_broken = false;
    loop {
        let error = match follow(
            agent,
            &mut request,
            &mut printer,
            out,
            notes,
            &mut is_broken,
        ) {
            Ok(()) => return Ok(()),
            Err((error, worked)) => {
                if worked {
                    last_seen = Instant::now();
                }
                error
            }
        };
        match error {
            LogError::Guest(error) if may_pass(&error) && last_seen.elapsed() < options.retry => {
                if !is_broken {
                    notes(&format!(
                        "{error}; reconnecting for up to {} s",
                        options.retry.as_secs()
                    ));
                    is_broken = true;
                }
                std::thread::sleep(RETRY_INTERVAL);
            }
            error => return Err(error),
        }
    }
}

/// One connection's part: until the log's end, or an error, and whether the connection had worked until then.
fn follow(
    agent: Agent<'_>,
    request: &mut Logs,
    printer: &mut Printer,
    out: &mut impl Write,
    notes: &mut impl FnMut(&str),
    is_broken: &mut bool,
) -> Result<(), (LogError, bool)> {
    let mut job =
        Job::ask(agent, Ask::Logs(request.clone())).map_err(|error| (error.into(), false))?;
    job.wait_for(None);
    if std::mem::take(is_broken) {
        notes("reconnected to the guest; continuing");
    }
    let result = receive(&mut job, request, printer, out, notes);
    if result.is_err() {
        begin_journal(request, job.connection.hello.unix_ns);
    }
    result.map_err(|error| (error, true))
}

/// Write out what comes.
fn receive(
    job: &mut Job,
    request: &mut Logs,
    printer: &mut Printer,
    out: &mut impl Write,
    notes: &mut impl FnMut(&str),
) -> Result<(), LogError> {
    loop {
        match job.answer()? {
            Answer::Log(entries) => {
                for entry in &entries {
                    printer.print(entry, out).map_err(LogError::Output)?;
                    remember(request, entry);
                }
                out.flush().map_err(LogError::Output)?;
            }
            Answer::Begin(places) => begin(request, &places),
            Answer::Note(words) => notes(&printable(&words)),
            Answer::Done if request.follow => {
                let words = "it ended a log that was to be followed".to_owned();
                return Err(GuestError::Protocol(words).into());
            }
            Answer::Done => return Ok(()),
            other => return Err(unexpected(&other).into()),
        }
    }
}

fn request(options: &LogOptions) -> Logs {
    let source = if options.files.is_empty() {
        LogSource::Journal(JournalLog {
            units: options.units.clone(),
            since: options.since.clone(),
            cursor: String::new(),
        })
    } else {
        let file = |path: &PathBuf| FileLog {
            path: path.as_os_str().as_bytes().to_vec(),
            cursor: None,
        };
        LogSource::Files(options.files.iter().map(file).collect())
    };
    Logs {
        source,
        lines: options.lines,
        follow: options.follow,
    }
}

/// The next request begins here, where no entry was seen before.
fn begin(request: &mut Logs, places: &[FileCursor]) {
    if let LogSource::Files(files) = &mut request.source {
        for (file, place) in files.iter_mut().zip(places) {
            file.cursor.get_or_insert(*place);
        }
    }
}

/// The next request for a journal of which nothing was seen begins when the guest was first asked, by its clock.
fn begin_journal(request: &mut Logs, guest_unix_ns: u64) {
    if let LogSource::Journal(journal) = &mut request.source {
        if journal.cursor.is_empty() && request.lines.is_some() && guest_unix_ns > 0 {
            journal.since = format!("@{}", guest_unix_ns / 1_000_000_000);
            request.lines = None;
        }
    }
}

/// The next request begins behind this entry.
fn remember(request: &mut Logs, entry: &LogEntry) {
    match &mut request.source {
        LogSource::Journal(journal) => journal.cursor.clone_from(&entry.cursor),
        LogSource::Files(files) => {
            if let Some(file) = files.get_mut(usize::from(entry.file)) {
                file.cursor = Some(entry.place);
            }
        }
    }
}

/// Whether it may be better a moment later.
fn may_pass(error: &GuestError) -> bool {
    match error {
        GuestError::Connect { .. }
        | GuestError::Refused { .. }
        | GuestError::NoAnswer { .. }
        | GuestError::Broken(_) => true,
        GuestError::Agent(report) => report.kind == ErrorKind::Busy,
        _ => false,
    }
}

/// What an entry is in JSON.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a Path>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    identifier: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    text: std::borrow::Cow<'a, str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    continues: bool,
}

struct Printer {
    style: Style,
    files: Vec<PathBuf>,
    /// The file of the last entry, and whether its line goes on.
    last: Option<(u16, bool)>,
}

impl Printer {
    fn new(options: &LogOptions) -> Printer {
        Printer {
            style: options.style,
            files: options.files.clone(),
            last: None,
        }
    }

    fn print(&mut self, entry: &LogEntry, out: &mut impl Write) -> io::Result<()> {
        match (self.style, self.files.is_empty()) {
            (Style::Json, _) => self.print_json(entry, out),
            (_, true) => self.print_record(entry, out),
            (_, false) => self.print_line(entry, out),
        }
    }

    fn print_json(&self, entry: &LogEntry, out: &mut impl Write) -> io::Result<()> {
        let of_journal = self.files.is_empty();
        let line = Line {
            file: self
                .files
                .get(usize::from(entry.file))
                .map(PathBuf::as_path),
            time: of_journal.then(|| time(entry.time_us)),
            priority: of_journal.then_some(entry.priority),
            identifier: of_journal.then_some(entry.identifier.as_str()),
            pid: (entry.pid != 0).then_some(entry.pid),
            text: String::from_utf8_lossy(&entry.text),
            continues: entry.continues,
        };
        out.write_all(json::line(json::named("entry", line))?.as_bytes())
    }

    /// A record of the journal: `time identifier[pid]: text`, further lines of the text indented.
    fn print_record(&self, entry: &LogEntry, out: &mut impl Write) -> io::Result<()> {
        let pid = match entry.pid {
            0 => String::new(),
            pid => format!("[{pid}]"),
        };
        let head = format!("{} {}{pid}: ", time(entry.time_us), entry.identifier);
        let head = self.shown(head.as_bytes()).into_owned();
        let text = entry.text.strip_suffix(b"\n").unwrap_or(&entry.text);
        for (index, line) in text.split(|byte| *byte == b'\n').enumerate() {
            let indent = if index == 0 { &head[..] } else { b"    " };
            out.write_all(indent)?;
            out.write_all(&self.shown(line))?;
            out.write_all(b"\n")?;
        }
        if entry.continues {
            out.write_all(b"    [cut here by ringdown-agent]\n")?;
        }
        Ok(())
    }

    fn print_line(&mut self, entry: &LogEntry, out: &mut impl Write) -> io::Result<()> {
        let is_other = self.last.is_none_or(|(file, _)| file != entry.file);
        if is_other {
            if self.last.is_some_and(|(_, continues)| continues) {
                out.write_all(b"\n")?;
            }
            if self.files.len() > 1 {
                let path = self.files.get(usize::from(entry.file));
                let name = path
                    .map(|path| path.display().to_string())
                    .unwrap_or_default();
                writeln!(out, "==> {name} <==")?;
            }
        }
        out.write_all(&self.shown(&entry.text))?;
        if !entry.continues {
            out.write_all(b"\n")?;
        }
        self.last = Some((entry.file, entry.continues));
        Ok(())
    }

    fn shown<'a>(&self, bytes: &'a [u8]) -> std::borrow::Cow<'a, [u8]> {
        if self.style == Style::Raw {
            return bytes.into();
        }
        let text = String::from_utf8_lossy(bytes);
        let harmless: String = text
            .chars()
            .map(|character| {
                if is_harmful(character) {
                    '\u{fffd}'
                } else {
                    character
                }
            })
            .collect();
        harmless.into_bytes().into()
    }
}

fn time(unix_us: u64) -> String {
    let timestamp = i64::try_from(unix_us)
        .ok()
        .and_then(|us| jiff::Timestamp::from_microsecond(us).ok());
    timestamp.map_or_else(|| "-".to_owned(), |timestamp| format!("{timestamp:.6}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(options: LogOptions, entries: &[LogEntry]) -> String {
        let mut printer = Printer::new(&options);
        let mut out = Vec::new();
        for entry in entries {
            printer.print(entry, &mut out).unwrap();
        }
        String::from_utf8(out).unwrap()
    }

    fn record(text: &str) -> LogEntry {
        LogEntry {
            time_us: 1_700_000_000_000_001,
            identifier: "ss\x1b[2Jhd".to_owned(),
            pid: 7,
            priority: 3,
            text: text.into(),
            ..LogEntry::default()
        }
    }

    fn line(file: u16, text: &str, continues: bool) -> LogEntry {
        LogEntry {
            file,
            text: text.into(),
            continues,
            ..LogEntry::default()
        }
    }

    #[test]
    fn a_guests_words_cannot_steer_a_terminal() {
        let options = LogOptions {
            style: Style::Harmless,
            ..LogOptions::default()
        };
        let text = printed(options, &[record("a\x1b]0;title\x07\tb\r\nnext\u{202e}")]);
        let expected = "2023-11-14T22:13:20.000001Z ss\u{fffd}[2Jhd[7]: a\u{fffd}]0;title\u{fffd}\tb\u{fffd}\n    next\u{fffd}\n";
        assert_eq!(text, expected);
        let raw = printed(LogOptions::default(), &[record("a\x1b")]);
        assert!(raw.ends_with("[7]: a\x1b\n"), "{raw:?}");
    }

    #[test]
    fn lines_of_several_files_are_told_apart() {
        let options = LogOptions {
            files: vec!["/a".into(), "/b".into()],
            ..LogOptions::default()
        };
        let entries = [
            line(0, "one", false),
            line(0, "two ", true),
            line(0, "halves", false),
            line(0, "broken", true),
            line(1, "three", false),
        ];
        assert_eq!(
            printed(options, &entries),
            "==> /a <==\none\ntwo halves\nbroken\n==> /b <==\nthree\n"
        );
    }

    #[test]
    fn entries_in_json() {
        let options = LogOptions {
            style: Style::Json,
            ..LogOptions::default()
        };
        let text = printed(options, &[record("quote \" and \x1b")]);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["entry"]["text"], "quote \" and \x1b");
        assert_eq!(value["entry"]["priority"], 3);
        assert!(!text.contains('\x1b'), "JSON escapes it");
    }
}
