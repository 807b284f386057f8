//! A file that grows to a size and then begins anew, with what was before it beside it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fstat};
use sys::links::{self, Entry, Fuse, file_id};

/// A file that is appended to. With the one before it, `PATH.1`, it never has more than twice its size on the disk.
#[derive(Debug)]
pub(super) struct GrowingFile {
    path: PathBuf,
    max_bytes: u64,
    file: Option<File>,
    len: u64,
}

impl GrowingFile {
    /// A file that is opened when something is written to it.
    pub(super) fn new(path: PathBuf, max_bytes: u64) -> GrowingFile {
        GrowingFile {
            path,
            max_bytes,
            file: None,
            len: 0,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends these bytes, of which there are not more than fit into one file. If the file was moved away, a new one begins.
    ///
    /// # Errors
    /// What the system says, and how many of the bytes have been written.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
        let mut written = 0;
        self.append_counting(bytes, &mut written)
            .map_err(|error| (written, error))
    }

    fn append_counting(&mut self, bytes: &[u8], written: &mut usize) -> io::Result<()> {
        // Anew each time: another user may have set a link since. This thread may wait.
        let entry = Entry::at(&self.path, Fuse::Entered)?;
        while *written < bytes.len() {
            if self.is_elsewhere(&entry) {
                self.file = None;
            }
            if self.file.is_none() {
                self.open(&entry)?;
            }
            let room = self.max_bytes.saturating_sub(self.len);
            if room == 0 {
                self.begin_anew(&entry)?;
                continue;
            }
            let rest = &bytes[*written..];
            // Cut at a line's end: a log is easier read in whole lines. One that is longer than a file cannot stay whole.
            let fits = rest.len().min(usize::try_from(room).unwrap_or(usize::MAX));
            let whole_lines = || rest[..fits].iter().rposition(|byte| *byte == b'\n');
            let cut = match whole_lines() {
                _ if fits == rest.len() => fits,
                Some(end) => end + 1,
                None if self.len == 0 => fits,
                None => 0,
            };
            if cut == 0 {
                self.begin_anew(&entry)?;
                continue;
            }
            let Some(file) = &self.file else {
                return Err(io::ErrorKind::NotFound.into());
            };
            let count = links::write(file, &self.path, &rest[..cut])?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            *written += count;
            self.len += count as u64;
            if count == cut && cut < fits {
                self.begin_anew(&entry)?;
            }
        }
        Ok(())
    }

    fn open(&mut self, entry: &Entry) -> io::Result<()> {
        // A pipe must not make us wait.
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NONBLOCK;
        let file = File::from(entry.open(flags, Mode::RUSR | Mode::WUSR)?);
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            let words = "it is not a regular file, and nothing is written to it";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, words));
        }
        self.len = metadata.len();
        self.file = Some(file);
        Ok(())
    }

    /// Whether another file than the one that is open has the name, or none.
    fn is_elsewhere(&self, entry: &Entry) -> bool {
        let Some(Ok(open)) = self.file.as_ref().map(fstat) else {
            return false;
        };
        entry
            .stat()
            .map_or(true, |found| file_id(&found) != file_id(&open))
    }

    fn begin_anew(&mut self, entry: &Entry) -> io::Result<()> {
        let mut before = self.path.file_name().unwrap_or_default().to_owned();
        before.push(".1");
        entry.rename(&before)?;
        self.file = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, chown, symlink};

    use super::*;

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_file_grows_to_its_size_and_the_one_before_it_stays_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let (path, before) = (directory.path().join("log"), directory.path().join("log.1"));
        let mut file = GrowingFile::new(path.clone(), 10);
        file.append(b"one\ntwo\n").unwrap();
        assert!(!before.exists());
        // Two bytes fit, and no whole line.
        file.append(b"three\n").unwrap();
        assert_eq!(read(&before), "one\ntwo\n");
        assert_eq!(read(&path), "three\n");
        file.append(b"a\nbcd\nefghijkl\nm\n").unwrap();
        assert_eq!(read(&before), "efghijkl\n");
        assert_eq!(read(&path), "m\n");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        // Another daemon goes on where the first has stopped.
        let mut again = GrowingFile::new(path.clone(), 10);
        again.append(b"n\n").unwrap();
        assert_eq!(read(&path), "m\nn\n");
        again.append(&[b'x'; 25]).unwrap();
        assert_eq!(
            (read(&before), read(&path)),
            ("x".repeat(10), "x".repeat(5))
        );
    }

    #[test]
    fn a_file_that_was_moved_away_begins_anew() {
        let directory = tempfile::tempdir().unwrap();
        let (path, moved) = (directory.path().join("log"), directory.path().join("moved"));
        let mut file = GrowingFile::new(path.clone(), 100);
        file.append(b"one").unwrap();
        fs::rename(&path, &moved).unwrap();
        file.append(b"two").unwrap();
        assert_eq!(
            (read(&moved), read(&path)),
            ("one".to_owned(), "two".to_owned())
        );
        fs::remove_file(&path).unwrap();
        file.append(b"three").unwrap();
        assert_eq!(read(&path), "three");
    }

    #[test]
    fn what_is_no_file_is_refused_with_how_much_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        symlink(directory.path().join("elsewhere"), &link).unwrap();
        let paths = [directory.path().to_owned(), link, "/dev/null".into()];
        for path in paths {
            let (written, _) = GrowingFile::new(path, 10).append(b"x").unwrap_err();
            assert_eq!(written, 0);
        }
        assert!(!directory.path().join("elsewhere").exists());
        // A full disk, as Linux offers one, is no file either.
        assert!(
            GrowingFile::new("/dev/full".into(), 10)
                .append(b"x")
                .is_err()
        );
    }

    #[test]
    fn a_link_of_another_user_leads_into_no_other_file() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not tried: only root can give a directory to another user");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (ours, theirs) = (directory.path().join("a"), directory.path().join("b"));
        for path in [&ours, &theirs] {
            fs::create_dir_all(path.join("log")).unwrap();
        }
        let path = ours.join("log/console");
        let mut file = GrowingFile::new(path, 10);
        let mut other = GrowingFile::new(theirs.join("log/console"), 10);
        file.append(b"a").unwrap();
        other.append(b"b").unwrap();
        fs::rename(ours.join("log"), ours.join("old")).unwrap();
        symlink(theirs.join("log"), ours.join("log")).unwrap();
        chown(&ours, Some(12345), None).unwrap();
        let (written, _) = file.append(&[b'x'; 25]).unwrap_err();
        assert_eq!(written, 0);
        assert_eq!(read(&theirs.join("log/console")), "b");
        assert!(!theirs.join("log/console.1").exists());
    }
}
