//! Sending a log: entries in batches, and with `follow` what comes later as it comes.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use wire::agent::ErrorKind;
use wire::agent::job::{
    Answer, FileLog, JournalLog, LogEntry, LogSource, Logs, MAX_BATCH_LEN, MAX_ENTRIES,
};

use super::journal::Journal;
use super::tail::{Progress, Tail};
use super::{Host, report, unavailable};
use crate::config::Config;
use crate::stop::Stop;
use crate::stream::until;

/// How often files are polled for more.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// How long a wait for the journal lasts before the host is checked again. Its leaving wakes the wait up; this only bounds it.
const JOURNAL_WAIT: Duration = Duration::from_secs(60);

/// What an entry counts beside its text, in bytes.
const ENTRY_OVERHEAD: usize = 64;

pub(super) fn run(host: &mut Host<'_>, config: &Config, request: Logs) -> Result<(), Stop> {
    match &request.source {
        LogSource::Journal(log) => send_journal(host, config, log, &request),
        LogSource::Files(files) => send_files(host, files, &request),
    }
}

/// Entries that wait to be sent together.
#[derive(Debug, Default)]
pub(super) struct Batch {
    entries: Vec<LogEntry>,
    size: usize,
}

impl Batch {
    /// Whether it is to be sent before another entry is added.
    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= MAX_ENTRIES || self.size >= MAX_BATCH_LEN
    }

    pub(super) fn push(&mut self, entry: LogEntry) {
        self.size +=
            entry.text.len() + entry.cursor.len() + entry.identifier.len() + ENTRY_OVERHEAD;
        self.entries.push(entry);
    }

    #[cfg(test)]
    pub(super) fn into_entries(self) -> Vec<LogEntry> {
        self.entries
    }

    fn send(&mut self, host: &mut Host<'_>) -> Result<(), Stop> {
        self.size = 0;
        match std::mem::take(&mut self.entries) {
            entries if entries.is_empty() => Ok(()),
            entries => host.answer(Answer::Log(entries)),
        }
    }
}

fn send_journal(
    host: &mut Host<'_>,
    config: &Config,
    log: &JournalLog,
    request: &Logs,
) -> Result<(), Stop> {
    let mut journal = Journal::open(config, log, request)?;
    let mut buffer = vec![0; 64 * 1024];
    let (mut batch, mut entries) = (Batch::default(), Vec::new());
    loop {
        match rustix::io::read(&journal.output, &mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                journal.feed(&buffer[..count], &mut entries);
                for entry in entries.drain(..) {
                    batch.push(entry);
                    if batch.is_full() {
                        batch.send(host)?;
                    }
                }
            }
            Err(Errno::AGAIN) => {
                batch.send(host)?;
                wait_for_either(host, &journal.output)?;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(unavailable(format!("cannot wait for journalctl: {error}"))),
        }
    }
    batch.send(host)?;
    journal.finish()?;
    if request.follow {
        return Err(unavailable("journalctl has ended unexpectedly"));
    }
    host.answer(Answer::Done)
}

/// Wait until the journal has more, or the host leaves.
fn wait_for_either(host: &mut Host<'_>, output: &OwnedFd) -> Result<(), Stop> {
    let mut poll = [
        PollFd::new(output, PollFlags::IN),
        PollFd::new(host.socket, PollFlags::IN),
    ];
    match rustix::event::poll(&mut poll, Some(&until(Instant::now() + JOURNAL_WAIT))) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(report(ErrorKind::Internal, error.to_string())),
    }
    if !poll[1].revents().is_empty() {
        host.pause(Instant::now())?;
    }
    Ok(())
}

fn send_files(host: &mut Host<'_>, files: &[FileLog], request: &Logs) -> Result<(), Stop> {
    let mut tails = Vec::new();
    for (index, file) in files.iter().enumerate() {
        let path = PathBuf::from(
            <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&file.path),
        );
        if !path.is_absolute() {
            let message = format!("{}: the path of a log is absolute", path.display());
            return Err(report(ErrorKind::InvalidRequest, message));
        }
        let tail = Tail::open(
            index as u16,
            path,
            file.cursor,
            request.lines,
            request.follow,
        );
        tails.push(tail.map_err(unavailable)?);
    }
    host.answer(Answer::Begin(tails.iter().map(Tail::place).collect()))?;
    let mut batch = Batch::default();
    loop {
        let mut is_idle = true;
        let mut is_at_end = true;
        for tail in &mut tails {
            let progress = tail.step(&mut batch).map_err(unavailable)?;
            is_idle &= progress != Progress::More;
            is_at_end &= progress == Progress::End;
            // What is said about a file comes where it happened between its lines.
            for note in tail.notes() {
                batch.send(host)?;
                host.answer(Answer::Note(note))?;
            }
            if batch.is_full() {
                batch.send(host)?;
            }
        }
        if is_idle {
            batch.send(host)?;
            if is_at_end {
                return host.answer(Answer::Done);
            }
            host.pause(Instant::now() + POLL_INTERVAL)?;
        }
    }
}
