//! A log that the daemon writes, read while it grows and begins anew.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::guest::is_harmful;

/// What is read at once, in bytes.
const PIECE_BYTES: usize = 64 * 1024;

/// The most files that are read at once, each of which has come in the place of the one before.
const MAX_FILES: usize = 4;

/// The log: a file, and the one before it, `PATH.1`.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    open: Option<File>,
    /// Some of the log has gone before it was read. The caller reports it and resets this.
    pub has_gap: bool,
}

impl LogFile {
    /// The log at this path, which need not be there yet.
    pub fn new(path: PathBuf) -> LogFile {
        LogFile {
            path,
            open: None,
            has_gap: false,
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Hands what is new to `write`. Returns whether there was anything.
    ///
    /// # Errors
    /// It cannot be read, or what `write` says.
    pub fn read(&mut self, write: &mut impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<bool> {
        let mut some = false;
        for _ in 0..MAX_FILES {
            let (more, is_last) = self.read_one(write)?;
            some |= more;
            if is_last {
                break;
            }
        }
        Ok(some)
    }

    /// The same of one file. Returns whether there was anything, and whether no other file has come meanwhile.
    fn read_one(
        &mut self,
        write: &mut impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<(bool, bool)> {
        let mut some = false;
        if self.open.is_none() {
            let Some((current, before)) = self.open_both()? else {
                return Ok((false, true));
            };
            if let Some(mut before) = before {
                some |= copy(&mut before, write)?;
            }
            self.open = Some(current);
        }
        let Some(mut current) = self.open.take() else {
            return Ok((some, true));
        };
        // Checked before it is read: what it has when it is not the current one any more is all that it will have.
        let moved = is_elsewhere(&current, &self.path)?;
        some |= copy(&mut current, write)?;
        if !moved {
            self.open = Some(current);
            return Ok((some, true));
        }
        let Some((next, before)) = self.open_both()? else {
            return Ok((some, true));
        };
        let is_next = match before {
            Some(before) => is_same(&before.metadata()?, &current.metadata()?),
            None => false,
        };
        self.has_gap |= !is_next;
        self.open = Some(next);
        Ok((some, false))
    }

    /// The file, and the one before it if there is one; none if there is no file yet.
    fn open_both(&self) -> io::Result<Option<(File, Option<File>)>> {
        let mut before = self.path.as_os_str().to_owned();
        before.push(".1");
        loop {
            let Some(current) = open(&self.path)? else {
                return Ok(None);
            };
            let before = open(Path::new(&before))?;
            // The one may have become the other in between.
            if !is_elsewhere(&current, &self.path)? {
                return Ok(Some((current, before)));
            }
        }
    }
}

fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the path leads to another file than this. While there is none at all, this is the latest.
fn is_elsewhere(file: &File, path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(found) => Ok(!is_same(&found, &file.metadata()?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_same(one: &fs::Metadata, other: &fs::Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Copies what is there now, and not what comes while it is read: a guest that writes all the time must not hold this up.
fn copy(file: &mut File, write: &mut impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<bool> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut some = false;
    let mut file = file.take(file.metadata()?.len());
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(some),
            count => write(&piece[..count])?,
        }
        some = true;
    }
}

/// Makes text of bytes that come in any pieces, without what could steer a terminal.
#[derive(Debug, Default)]
pub struct Harmless {
    /// The beginning of a character whose rest is yet to come.
    begun: Vec<u8>,
}

impl Harmless {
    /// What can be shown so far.
    pub fn show(&mut self, bytes: &[u8]) -> String {
        self.begun.extend_from_slice(bytes);
        let bytes = std::mem::take(&mut self.begun);
        let mut text = String::with_capacity(bytes.len());
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let (valid, wrong) = match std::str::from_utf8(rest) {
                Ok(all) => (all, 0),
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    let valid = std::str::from_utf8(valid).unwrap_or_default();
                    match error.error_len() {
                        Some(len) => (valid, len),
                        None => {
                            self.begun = after.to_vec();
                            (valid, after.len())
                        }
                    }
                }
            };
            text.extend(valid.chars().filter_map(shown));
            if wrong > 0 && self.begun.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            rest = &rest[valid.len() + wrong..];
        }
        text
    }
}

fn shown(character: char) -> Option<char> {
    match character {
        // At the end of a line it says nothing, and elsewhere it would overwrite one.
        '\r' => None,
        '\n' => Some('\n'),
        harmful if is_harmful(harmful) => Some(char::REPLACEMENT_CHARACTER),
        other => Some(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(log: &mut LogFile) -> String {
        let mut bytes = Vec::new();
        log.read(&mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })
        .unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn what_is_written_while_it_is_read_does_not_hold_it_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        append(&path, "a");
        let mut log = LogFile::new(path.clone());
        let mut pieces = 0;
        let read = log.read(&mut |_| {
            pieces += 1;
            assert!(pieces < 10, "it is read for ever");
            append(&path, "b");
            Ok(())
        });
        assert!(read.unwrap());
        assert_eq!(next(&mut log), "b");
        // Nor does one that begins anew all the time.
        let mut files = 0;
        let read = log.read(&mut |_| Ok(()));
        assert!(!read.unwrap());
        append(&path, "c");
        let read = log.read(&mut |_| {
            files += 1;
            assert!(files < 10, "it is read for ever");
            fs::rename(&path, directory.path().join("log.1")).unwrap();
            append(&path, "d");
            Ok(())
        });
        assert!(read.unwrap());
    }

    fn append(path: &Path, text: &str) {
        use std::io::Write;
        let mut file = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn a_log_is_followed_from_before_its_beginning_through_its_rotations() {
        let directory = tempfile::tempdir().unwrap();
        let (path, before) = (directory.path().join("log"), directory.path().join("log.1"));
        let mut log = LogFile::new(path.clone());
        assert_eq!(next(&mut log), "");
        append(&before, "one\n");
        append(&path, "two\n");
        assert_eq!(next(&mut log), "one\ntwo\n");
        assert_eq!(next(&mut log), "");
        append(&path, "three\n");
        fs::rename(&path, &before).unwrap();
        // Between the two there is a moment without a file.
        assert_eq!(next(&mut log), "three\n");
        append(&before, "four\n");
        append(&path, "five\n");
        assert_eq!(next(&mut log), "four\nfive\n");
        assert!(!log.has_gap);
        for text in ["gone\n", "six\n"] {
            fs::rename(&path, &before).unwrap();
            append(&path, text);
        }
        assert_eq!(next(&mut log), "six\n");
        assert!(log.has_gap);
        // An error of the reader is returned.
        append(&path, "seven\n");
        let refused = log.read(&mut |_| Err(io::ErrorKind::BrokenPipe.into()));
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn what_a_guest_writes_cannot_steer_a_terminal_however_it_is_cut() {
        let bytes = "a\x1b[2J\tb\r\n\u{202e}\u{9b}grün\u{7}".as_bytes();
        let expected = "a\u{fffd}[2J\tb\n\u{fffd}\u{fffd}grün\u{fffd}";
        for cut in 0..=bytes.len() {
            let mut harmless = Harmless::default();
            let text = harmless.show(&bytes[..cut]) + &harmless.show(&bytes[cut..]);
            assert_eq!(text, expected, "{cut}");
        }
        assert_eq!(
            Harmless::default().show(b"a\xff\xfeb\xc3"),
            "a\u{fffd}\u{fffd}b"
        );
    }
}
