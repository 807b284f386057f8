//! A file of lines, from a place in it on, through everything that is done to log files.
//!
//! # Theory of operation
//!
//! What is read is a queue of open files, of which the last is the one at the path: the lines of the first are sent until its end, then
//! those of the next. An open file stays the same file when it is renamed, so a rotation (another file appears at the path) adds to the
//! queue's end, and the old file is left only when it has had nothing more for a while: its writer goes on with it until it is signalled.
//!
//! A place is found again by content: the file's number, the offset, and a hash of the [`CONTEXT`] bytes before it. So a file that was
//! truncated or written anew is not mistaken for a file that went on, and a copy that was made before a truncation serves as well as a
//! renamed file. Where the place is in an older file, all that were rotated away since are read, in the order in which they were last
//! written. A place that is nowhere any more (compressed, removed) is said to be lost, and the file at the path is read from its beginning.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{CWD, OFlags};
use wire::agent::job::{FileCursor, LogEntry, MAX_ENTRY_LEN};

use super::logs::Batch;

/// How many bytes before a place identify it.
const CONTEXT: usize = 256;

/// How much is read at once, in bytes.
const READ_LEN: usize = 64 * 1024;

/// How long a file that was rotated away is still read after its end.
const DRAIN: Duration = Duration::from_secs(1);

/// The most names of a directory that are read for rotated files.
const MAX_SIBLINGS: usize = 4096;

/// Whether there is more to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// Now.
    More,
    /// Later, perhaps.
    Idle,
    /// Never.
    End,
}

#[derive(Debug)]
pub(super) struct Tail {
    index: u16,
    path: PathBuf,
    follow: bool,
    queue: VecDeque<Open>,
    notes: Vec<String>,
}

impl Tail {
    /// Begin behind `cursor`, or with the last `lines`, or with the first.
    ///
    /// # Errors
    /// In words: the file cannot be read.
    pub(super) fn open(
        index: u16,
        path: PathBuf,
        cursor: Option<FileCursor>,
        lines: Option<u32>,
        follow: bool,
    ) -> Result<Tail, String> {
        let mut tail = Tail {
            index,
            path,
            follow,
            queue: VecDeque::new(),
            notes: Vec::new(),
        };
        let current = match Open::new(&tail.path) {
            Ok(open) => Some(open),
            Err(error) if follow && error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(tail.failed(&error)),
        };
        match (cursor, current) {
            (Some(cursor), current) => tail.resume(cursor, current),
            (None, Some(mut open)) => {
                if let Some(lines) = lines {
                    let start = open.start_of_last(lines);
                    start
                        .and_then(|start| open.seek(start))
                        .map_err(|error| tail.failed(&error))?;
                }
                tail.queue.push_back(open);
            }
            (None, None) => tail.note("does not exist yet; waiting for it".to_owned()),
        }
        Ok(tail)
    }

    /// Where it begins.
    pub(super) fn place(&self) -> FileCursor {
        self.queue.front().map(Open::place).unwrap_or_default()
    }

    /// What there is to say since the last time.
    pub(super) fn notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Add lines to the batch, until it is full or there are none for now.
    ///
    /// # Errors
    /// In words: the file cannot be read.
    pub(super) fn step(&mut self, batch: &mut Batch) -> Result<Progress, String> {
        let Some(open) = self.queue.front_mut() else {
            return Ok(self.look_at_path());
        };
        open.take_lines(self.index, batch);
        if batch.is_full() {
            return Ok(Progress::More);
        }
        let read = if open.was_rewritten() {
            Ok(None)
        } else {
            open.read().map(Some)
        };
        match read {
            Ok(None) => {
                let cursor = open.place();
                self.note("was truncated or written anew; going on from its beginning".to_owned());
                self.queue.pop_front();
                let current = self
                    .queue
                    .is_empty()
                    .then(|| Open::new(&self.path).ok())
                    .flatten();
                self.resume(cursor, current);
                Ok(Progress::More)
            }
            Ok(Some(0)) => Ok(self.at_end(batch)),
            Ok(Some(_)) => {
                open.take_lines(self.index, batch);
                Ok(Progress::More)
            }
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// The first file of the queue has no more for now.
    fn at_end(&mut self, batch: &mut Batch) -> Progress {
        if self.queue.len() > 1 {
            let is_drained = self.queue.front().is_some_and(|open| open.may_be_left());
            if !is_drained && self.follow {
                return Progress::Idle;
            }
            if let Some(mut open) = self.queue.pop_front() {
                open.take_rest(self.index, batch, false);
            }
            return Progress::More;
        }
        if !self.follow {
            if let Some(open) = self.queue.front_mut() {
                open.take_rest(self.index, batch, true);
            }
            return Progress::End;
        }
        self.look_at_path()
    }

    /// Whether another file is at the path by now.
    fn look_at_path(&mut self) -> Progress {
        let known = self.queue.back().map(|open| open.identity);
        let Ok(current) = Open::new(&self.path) else {
            return Progress::Idle;
        };
        // An empty file is where a log will go on, but its writer still has the old one.
        if Some(current.identity) == known || (known.is_some() && current.len() == 0) {
            return Progress::Idle;
        }
        match self.queue.back_mut() {
            None => self.queue.push_back(current),
            Some(last) => {
                last.left_from = Instant::now() + DRAIN;
                let identity = last.identity;
                let between = successors(&self.path, identity, current.identity);
                self.queue.extend(between);
                self.queue.push_back(current);
            }
        }
        Progress::Idle
    }

    /// Go on behind this place, with the file at the path as it is now.
    fn resume(&mut self, cursor: FileCursor, current: Option<Open>) {
        let mut files = Vec::new();
        let is_in_current = current.as_ref().is_some_and(|open| open.has(&cursor));
        if !is_in_current {
            let siblings = siblings(&self.path, current.as_ref().map(|open| open.identity));
            let exact = |open: &&Open| open.identity == (cursor.device, cursor.inode);
            let found = siblings
                .iter()
                .filter(|open| open.has(&cursor))
                .find(exact)
                .or_else(|| {
                    siblings
                        .iter()
                        .find(|open| open.has(&cursor) && cursor.offset > 0)
                })
                .map(|open| open.identity);
            if let Some(found) = found {
                files = siblings
                    .into_iter()
                    .skip_while(|open| open.identity != found)
                    .collect();
            } else if cursor.offset > 0 && current.is_some() {
                self.note(
                    "the place in it is lost (rotated and compressed, removed, or written anew); \
                     going on from its beginning"
                        .to_owned(),
                );
            }
        }
        files.extend(current);
        let is_found = is_in_current || files.len() > 1;
        if let Some(first) = files
            .first_mut()
            .filter(|first| is_found && first.has(&cursor))
        {
            // Of a file that could just be read, so that an error shows when it is read again.
            let _ = first.seek(cursor.offset);
        }
        for open in files.into_iter().rev() {
            self.queue.push_front(open);
        }
    }

    fn note(&mut self, words: String) {
        self.notes.push(
            format!("{}: {words}", self.path.display())
                .chars()
                .take(250)
                .collect(),
        );
    }

    fn failed(&self, error: &std::io::Error) -> String {
        format!("cannot read {}: {error}", self.path.display())
    }
}

/// An open file, and what was read of it.
#[derive(Debug)]
struct Open {
    file: File,
    /// Its device, and its number there.
    identity: (u64, u64),
    /// What was read: up to [`CONTEXT`] bytes that were passed on, and those that were not yet.
    buffer: Vec<u8>,
    /// Where in the buffer the latter begin.
    start: usize,
    /// Where they begin in the file.
    offset: u64,
    /// Until here they are known to have no end of a line.
    searched: usize,
    /// When it may be left for the next, once it is at its end.
    left_from: Instant,
    modified: SystemTime,
}

impl Open {
    fn new(path: &Path) -> std::io::Result<Open> {
        let Ok((file, _)) = sys::regular::open(CWD, path, OFlags::empty())? else {
            return Err(std::io::Error::other("it is no regular file"));
        };
        let file = File::from(file);
        let metadata = file.metadata()?;
        Ok(Open {
            identity: (metadata.dev(), metadata.ino()),
            buffer: Vec::new(),
            start: 0,
            offset: 0,
            searched: 0,
            left_from: Instant::now(),
            modified: metadata.modified()?,
            file,
        })
    }

    fn len(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.len())
    }

    /// Behind the last byte that was read.
    fn end(&self) -> u64 {
        self.offset + (self.buffer.len() - self.start) as u64
    }

    fn may_be_left(&self) -> bool {
        Instant::now() >= self.left_from
    }

    /// Go on from this offset.
    fn seek(&mut self, offset: u64) -> std::io::Result<()> {
        let context = self.before(offset)?;
        (self.start, self.searched) = (context.len(), context.len());
        self.buffer = context;
        self.offset = offset;
        Ok(())
    }

    /// The bytes that identify this offset.
    fn before(&self, offset: u64) -> std::io::Result<Vec<u8>> {
        let len = offset.min(CONTEXT as u64);
        let mut context = vec![0; len as usize];
        self.file.read_exact_at(&mut context, offset - len)?;
        Ok(context)
    }

    /// Whether this place is in it.
    fn has(&self, cursor: &FileCursor) -> bool {
        let is_this = self.identity == (cursor.device, cursor.inode);
        match cursor.offset {
            0 => is_this,
            offset => self
                .before(offset)
                .is_ok_and(|context| hash(&context) == cursor.before),
        }
    }

    /// Whether it is not the file any more that was read so far.
    fn was_rewritten(&self) -> bool {
        let kept = self.buffer.len().min(CONTEXT);
        let last = &self.buffer[self.buffer.len() - kept..];
        let mut now = vec![0; kept];
        let at = self.end() - kept as u64;
        kept > 0 && (self.file.read_exact_at(&mut now, at).is_err() || now != last)
    }

    /// Read more: how many bytes.
    fn read(&mut self) -> std::io::Result<usize> {
        let passed = self.start.saturating_sub(CONTEXT);
        self.buffer.drain(..passed);
        self.start -= passed;
        self.searched -= passed;
        let (len, end) = (self.buffer.len(), self.end());
        self.buffer.resize(len + READ_LEN, 0);
        let read = self.file.read_at(&mut self.buffer[len..], end);
        self.buffer
            .truncate(len + read.as_ref().map_or(0, |count| *count));
        read
    }

    /// Pass on the whole lines that were read, and the pieces of those that are too long, for as long as the batch has room.
    fn take_lines(&mut self, index: u16, batch: &mut Batch) {
        while !batch.is_full() {
            let newline = self.buffer[self.searched..]
                .iter()
                .position(|byte| *byte == b'\n');
            let line_len = newline.map(|position| self.searched + position - self.start);
            let rest_len = self.buffer.len() - self.start;
            match line_len {
                Some(len) if len <= MAX_ENTRY_LEN => self.pass(index, batch, len, 1, false),
                _ if rest_len > MAX_ENTRY_LEN => self.pass(index, batch, MAX_ENTRY_LEN, 0, true),
                _ => {
                    self.searched = self.buffer.len();
                    return;
                }
            }
        }
    }

    /// Pass on what is left without the end of a line.
    fn take_rest(&mut self, index: u16, batch: &mut Batch, continues: bool) {
        let len = self.buffer.len() - self.start;
        if len > 0 {
            self.pass(index, batch, len, 0, continues);
        }
    }

    fn pass(&mut self, index: u16, batch: &mut Batch, len: usize, end_len: usize, continues: bool) {
        let text = self.buffer[self.start..self.start + len].to_vec();
        self.start += len + end_len;
        self.offset += (len + end_len) as u64;
        self.searched = self.start;
        batch.push(LogEntry {
            file: index,
            place: self.place(),
            text,
            continues,
            ..LogEntry::default()
        });
    }

    /// The place behind what was passed on.
    fn place(&self) -> FileCursor {
        let from = self.start.saturating_sub(CONTEXT);
        FileCursor {
            device: self.identity.0,
            inode: self.identity.1,
            offset: self.offset,
            before: hash(&self.buffer[from..self.start]),
        }
    }

    /// Where the last so many lines begin.
    fn start_of_last(&self, lines: u32) -> std::io::Result<u64> {
        let mut end = self.len();
        if lines == 0 {
            return Ok(end);
        }
        // The end of the last line does not begin another one.
        let mut is_last = true;
        let mut found = 0;
        let mut piece = vec![0; READ_LEN];
        while end > 0 {
            let len = end.min(READ_LEN as u64) as usize;
            let at = end - len as u64;
            self.file.read_exact_at(&mut piece[..len], at)?;
            for (index, byte) in piece[..len].iter().enumerate().rev() {
                if *byte == b'\n' && !is_last {
                    found += 1;
                    if found == lines {
                        return Ok(at + index as u64 + 1);
                    }
                }
                is_last = false;
            }
            end = at;
        }
        Ok(0)
    }
}

/// The files that this one was rotated to, the oldest first.
fn siblings(path: &Path, current: Option<(u64, u64)>) -> Vec<Open> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Vec::new();
    };
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut found: Vec<(PathBuf, Open)> = entries
        .flatten()
        .take(MAX_SIBLINGS)
        .filter(|entry| is_rotated_name(name.as_bytes(), entry.file_name().as_bytes()))
        .filter_map(|entry| Some((entry.path(), Open::new(&entry.path()).ok()?)))
        .filter(|(_, open)| Some(open.identity) != current)
        .collect();
    // Of two that were written last at the same time, the one with the higher number is older.
    found.sort_by_key(|(path, open)| (open.modified, Reverse(path.clone())));
    found.into_iter().map(|(_, open)| open).collect()
}

/// The files that lie between this one, which was rotated away, and the current one.
fn successors(path: &Path, of: (u64, u64), current: (u64, u64)) -> Vec<Open> {
    let all = siblings(path, Some(current));
    match all.iter().position(|open| open.identity == of) {
        Some(position) => all.into_iter().skip(position + 1).collect(),
        None => Vec::new(),
    }
}

/// Whether a file of this name is one that `name` was rotated to: `log.1`, `log-20261122`, `log.old`; not compressed ones.
fn is_rotated_name(name: &[u8], candidate: &[u8]) -> bool {
    let is_numbering = |rest: &[u8]| {
        rest.len() > 1
            && rest
                .iter()
                .all(|byte| byte.is_ascii_digit() || b".-_T".contains(byte))
    };
    candidate
        .strip_prefix(name)
        .is_some_and(|rest| is_numbering(rest) || rest == b".old" || rest == b"~")
}

/// FNV-1a: the same in every version of the agent, as places outlive agents.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
