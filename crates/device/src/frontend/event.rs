//! The descriptors by which a guest and the fabric notify each other.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{CWD, readlinkat};

/// What `/proc` shows for an eventfd. The path of a file begins with a slash.
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";

/// Refuses what is no eventfd, which is what the vhost-user specification names for kick and call. The fabric's thread waits on these
/// descriptors, writes to them and closes them. With any other file it could have to wait: for the process that serves a FUSE file, or for the
/// peer of a socket. The name is asked of `/proc` and not of the file, which need not answer.
pub(super) fn check(file: &File) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let name = readlinkat(CWD, &path, Vec::new()).map_err(|error| {
        let error = io::Error::from(error);
        let words = format!("cannot tell what a kick or call descriptor is: {path}: {error}");
        io::Error::new(error.kind(), words)
    })?;
    match name.as_bytes() == EVENTFD {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            // As its maker named it, which may be with line breaks.
            "a kick or call descriptor has to be an eventfd, and is {:?}",
            name.to_string_lossy()
        ))),
    }
}

/// Makes an eventfd fit for interrupts: a full one must not block.
pub(super) fn prepare_call(call: &File) -> io::Result<()> {
    check(call)?;
    Ok(rustix::io::ioctl_fionbio(call.as_fd(), true)?)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;

    use rustix::event::{EventfdFlags, epoll, eventfd};

    use super::*;

    #[test]
    fn only_an_eventfd_is_waited_on_written_to_and_closed() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        check(&File::from(event)).unwrap();

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let named = directory.path().join("anon_inode:[eventfd]");
        let others: [OwnedFd; 5] = [
            File::create(named).unwrap().into(),
            File::open("/dev/zero").unwrap().into(),
            rustix::pipe::pipe().unwrap().1,
            epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
            stream.into(),
        ];
        for other in others {
            let error = check(&File::from(other)).unwrap_err();
            assert!(error.to_string().contains("eventfd"), "{error}");
        }
    }

    #[test]
    fn a_name_adds_no_line_to_the_log() {
        let directory = tempfile::tempdir().unwrap();
        let named = directory.path().join("file\nvm=db \u{1b}[2J\u{202e}");
        let error = check(&File::create(named).unwrap()).unwrap_err();
        let words = error.to_string();
        assert!(words.contains("vm=db"), "{words}");
        let is_shown = |char: char| char.is_ascii() && !char.is_ascii_control();
        assert!(words.chars().all(is_shown), "{words:?}");
    }
}
