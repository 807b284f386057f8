//! UNIX sockets that stand in the way of new ones.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Whether a stream socket stands at this path at which no process listens any more. A link and any other file are none.
pub fn is_stale(path: &Path) -> bool {
    let found = std::fs::symlink_metadata(path);
    found.is_ok_and(|found| found.file_type().is_socket()) && dial(path) == Err(Errno::CONNREFUSED)
}

/// A full backlog is one of a process that listens, so this does not wait for room.
fn dial(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_a_socket_without_a_listener_is_stale() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let _listener = UnixListener::bind(at("live")).unwrap();
        // It never listens: a process that another test starts may hold it for a moment.
        let dead = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        );
        rustix::net::bind(dead.unwrap(), &SocketAddrUnix::new(at("dead")).unwrap()).unwrap();
        std::fs::write(at("file"), "precious").unwrap();
        symlink(at("dead"), at("link")).unwrap();
        for name in ["live", "file", "link", "missing"] {
            assert!(!is_stale(&at(name)), "{name}");
        }
        assert!(is_stale(&at("dead")));
    }
}
