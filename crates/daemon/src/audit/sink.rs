//! Where the lines go: a file that the system's tools may move away, or the log.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use sys::links;

pub(super) struct Sink {
    file: Option<(Box<Path>, File)>,
    /// The last line may have been written in part, so the next one begins with an end.
    torn: bool,
    /// Lines that could not be written and of which nothing has been said in the file yet.
    unwritten: u64,
    /// The failure that goes on has been logged.
    told: bool,
}

impl Sink {
    pub(super) fn open(path: Option<&Path>) -> io::Result<Sink> {
        let file = path.map(open_file).transpose()?;
        Ok(Sink {
            torn: file
                .as_ref()
                .is_some_and(|(path, file)| is_torn(path, file)),
            file,
            unwritten: 0,
            told: false,
        })
    }

    /// Whether lines go to the log.
    pub(super) fn is_log(&self) -> bool {
        self.file.is_none()
    }

    /// Opens the same file again, or another, or none. When that fails the old one stays.
    pub(super) fn reopen(&mut self, path: Option<Option<Box<Path>>>) -> io::Result<()> {
        let path = match path {
            Some(path) => path,
            None => self.file.as_ref().map(|(path, _)| path.clone()),
        };
        let fresh = Sink::open(path.as_deref())?;
        let is_same = matches!((&self.file, &fresh.file), (Some((_, old)), Some((_, new))) if is_same(old, new));
        *self = Sink {
            unwritten: self.unwritten,
            // Also of a pipe, whose content is seen by its reader alone.
            torn: fresh.torn || self.torn && is_same,
            ..fresh
        };
        Ok(())
    }

    /// Writes a line. What cannot be written is counted.
    pub(super) fn write(&mut self, notable: bool, line: &impl Serialize) {
        self.write_or_count(notable, line, 1);
    }

    /// Writes a line that stands for so many others.
    pub(super) fn write_count(&mut self, line: &impl Serialize, lines: u64) {
        self.write_or_count(true, line, lines);
    }

    /// Lines that were not written since this was asked last.
    pub(super) fn take_unwritten(&mut self) -> u64 {
        std::mem::take(&mut self.unwritten)
    }

    fn write_or_count(&mut self, notable: bool, line: &impl Serialize, lines: u64) {
        // Records hold nothing that JSON could not say.
        let mut text = serde_json::to_string(line).unwrap_or_default();
        let Some((path, file)) = &mut self.file else {
            match notable {
                true => tracing::info!(target: crate::log_budget::AUDIT, "{text}"),
                false => tracing::debug!(target: crate::log_budget::AUDIT, "{text}"),
            }
            return;
        };
        text.push('\n');
        if self.torn {
            text.insert(0, '\n');
        }
        match write_all(file, path, text.as_bytes()) {
            Ok(()) => {
                self.torn = false;
                if std::mem::take(&mut self.told) {
                    tracing::info!(file = %path.display(), "the audit can be written again");
                }
            }
            Err(error) => {
                self.torn = true;
                self.unwritten += lines;
                if !std::mem::replace(&mut self.told, true) {
                    tracing::error!(
                        file = %path.display(),
                        %error,
                        "cannot write the audit: what is lost is counted; make room, or run `ringdown audit rotate`"
                    );
                }
            }
        }
    }
}

fn open_file(path: &Path) -> io::Result<(Box<Path>, File)> {
    // A pipe without a reader must not stop us, neither now nor when it is full.
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NONBLOCK;
    let file = links::open_behind_links(path, flags, Mode::RUSR | Mode::WUSR)?;
    Ok((path.into(), file))
}

fn write_all(file: &File, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        match links::write(file, path, rest)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => rest = &rest[count..],
        }
    }
    Ok(())
}

/// Whether a file ends within a line, as a full disk or the end of a machine has left it. If that cannot be read, it may.
fn is_torn(path: &Path, file: &File) -> bool {
    let Ok(metadata) = file.metadata() else {
        return true;
    };
    if !metadata.is_file() || metadata.len() == 0 {
        return false;
    }
    let last = || {
        // What has the name by now may be another file.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let read = links::open_behind_links(path, flags, Mode::empty())?;
        if !is_same(&read, file) {
            return Err(io::ErrorKind::NotFound.into());
        }
        links::read_byte(&read, path, metadata.len() - 1)
    };
    last().map_or(true, |last| last != b'\n')
}

fn is_same(one: &File, other: &File) -> bool {
    let id = |file: &File| Some((file.metadata().ok()?.dev(), file.metadata().ok()?.ino()));
    id(one).is_some() && id(one) == id(other)
}
