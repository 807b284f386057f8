//! Opening of ordinary files alone, where another user may put anything at the path.
//!
//! To open something else may do something, or wait: a watchdog is started, a tape is rewound, a pipe waits for a writer.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, openat};

/// Opens the ordinary file at a path, and describes it. `no_link` is `NOFOLLOW` or nothing.
///
/// # Errors
/// What the system says. What is no ordinary file is described by its kind, and is not opened.
pub fn open(
    directory: impl AsFd,
    path: impl AsRef<OsStr>,
    no_link: OFlags,
) -> io::Result<Result<(OwnedFd, Stat), FileType>> {
    let path_only = OFlags::PATH | OFlags::CLOEXEC;
    let named = openat(directory, path.as_ref(), path_only | no_link, Mode::empty())?;
    let kind = FileType::from_raw_mode(fstat(&named)?.st_mode);
    if kind != FileType::RegularFile {
        return Ok(Err(kind));
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let again = format!("/proc/self/fd/{}", named.as_raw_fd());
    let file = rustix::fs::open(again, flags, Mode::empty())?;
    let stat = fstat(&file)?;
    Ok(Ok((file, stat)))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, inotify, mkfifoat};

    use super::*;

    #[test]
    fn what_is_no_ordinary_file_is_not_opened() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        mkfifoat(CWD, at("pipe"), Mode::RWXU).unwrap();
        std::os::unix::fs::symlink(at("pipe"), at("link")).unwrap();
        std::fs::write(at("file"), "content").unwrap();
        std::os::unix::fs::symlink(at("file"), at("good")).unwrap();
        let events = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&events, at("pipe"), inotify::WatchFlags::OPEN).unwrap();
        let kind = |name: &str, flags| open(CWD, at(name), flags).unwrap().map(drop).unwrap_err();
        assert_eq!(kind("pipe", OFlags::empty()), FileType::Fifo);
        assert_eq!(kind("link", OFlags::empty()), FileType::Fifo);
        assert_eq!(kind("good", OFlags::NOFOLLOW), FileType::Symlink);
        let opened = rustix::io::read(&events, &mut [0; 512]);
        assert_eq!(opened, Err(rustix::io::Errno::AGAIN));
        for (name, flags) in [("good", OFlags::empty()), ("file", OFlags::NOFOLLOW)] {
            let (file, stat) = open(CWD, at(name), flags).unwrap().unwrap();
            assert_eq!(stat.st_size, 7);
            let text = io::read_to_string(std::fs::File::from(file)).unwrap();
            assert_eq!(text, "content");
        }
    }
}
