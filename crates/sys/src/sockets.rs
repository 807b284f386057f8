//! UNIX sockets that stand in the way of new ones, and options of sockets that have no other wrapper.
//!
//! It needs `unsafe` for `setsockopt` with a value of bytes, or with a filter.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, absolute};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with,
};

use crate::links::{Entry, FileId, file_id};

/// Whether a stream socket stands at this path at which no process listens any more. A link and any other file are none.
pub fn is_stale(path: &Path) -> bool {
    let found = std::fs::symlink_metadata(path);
    found.is_ok_and(|found| found.file_type().is_socket()) && dial(path) == Err(Errno::CONNREFUSED)
}

/// The file of a socket that was bound at a path. It is removed when this is dropped, if it still stands where it was made.
#[derive(Debug)]
pub struct BoundFile {
    entry: Entry,
    file: FileId,
    stays: bool,
}

impl BoundFile {
    /// Binds a stream socket. One that stands there and whose owner is gone is replaced.
    ///
    /// # Errors
    /// As [`Entry::at`], `EADDRINUSE`, and what else the system says.
    pub fn bind(socket: BorrowedFd<'_>, path: &Path) -> io::Result<BoundFile> {
        let entry = Entry::at(&absolute(path)?)?;
        let address = entry.address()?;
        match bind(socket, &address) {
            Err(Errno::ADDRINUSE) if is_stale(&entry.pinned_path()) => {
                entry.remove(file_id(&entry.stat()?))?;
                bind(socket, &address)?;
            }
            bound => bound?,
        }
        let file = file_id(&entry.stat()?);
        Ok(BoundFile {
            entry,
            file,
            stays: false,
        })
    }

    /// Leaves the file where it is, also when this is dropped.
    pub fn stay(mut self) {
        self.stays = true;
    }
}

impl Drop for BoundFile {
    fn drop(&mut self) {
        if !self.stays {
            // It may have been removed already.
            let _ = self.entry.remove(self.file);
        }
    }
}

/// Sets an option of TCP, IPv4 or IPv6 as a program has set it. Options of other levels may contain pointers, and are refused.
///
/// # Errors
/// The system's reason; `EINVAL` for another level.
pub fn set_option(socket: BorrowedFd<'_>, level: i32, option: i32, value: &[u8]) -> io::Result<()> {
    if ![libc::IPPROTO_IP, libc::IPPROTO_TCP, libc::IPPROTO_IPV6].contains(&level) {
        return Err(Errno::INVAL.into());
    }
    set(socket, level, option, value)
}

/// How long `connect` of this AF_VSOCK socket waits for an answer; 2 seconds, if nothing is said.
///
/// # Errors
/// It is none of AF_VSOCK.
pub fn set_vsock_connect_timeout(socket: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    // `SO_VM_SOCKETS_CONNECT_TIMEOUT_NEW`, whose value is two numbers of 64 bits: seconds and microseconds.
    const CONNECT_TIMEOUT: i32 = 8;
    let numbers = [timeout.as_secs(), timeout.subsec_micros().into()];
    let value = numbers.map(u64::to_ne_bytes).concat();
    set(socket, libc::AF_VSOCK, CONNECT_TIMEOUT, &value)
}

/// Has the kernel choose among sockets that are bound alike (`SO_REUSEPORT`), of which this is one, by the mark of what arrives: 0 is the one that was bound first.
///
/// # Errors
/// The system's reason.
pub fn choose_by_mark(socket: BorrowedFd<'_>) -> io::Result<()> {
    let word = |code: u32, k: i32| libc::sock_filter {
        // Codes and offsets are what the kernel's headers say.
        code: code as u16,
        jt: 0,
        jf: 0,
        k: k as u32,
    };
    let mut words = [
        word(
            libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
            libc::SKF_AD_OFF + libc::SKF_AD_MARK,
        ),
        word(libc::BPF_RET | 0x10, 0),
    ];
    let program = libc::sock_fprog {
        len: words.len() as u16,
        filter: words.as_mut_ptr(),
    };
    // SAFETY: the kernel reads the structure and the words that it points at, which are there.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set(socket: BorrowedFd<'_>, level: i32, option: i32, value: &[u8]) -> io::Result<()> {
    let (pointer, len) = (value.as_ptr().cast(), value.len() as libc::socklen_t);
    // SAFETY: the kernel reads so many bytes, which are there; none of these options has a pointer in them.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, pointer, len) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A full backlog is one of a process that listens, so this does not wait for room.
fn dial(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn options_are_set_of_these_levels_only() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let one = 1i32.to_ne_bytes();
        let (tcp, no_delay) = (libc::IPPROTO_TCP, libc::TCP_NODELAY);
        set_option(socket.as_fd(), tcp, no_delay, &one).unwrap();
        assert!(rustix::net::sockopt::tcp_nodelay(&socket).unwrap());
        let error = set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_DEBUG, &one);
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        set_vsock_connect_timeout(socket.as_fd(), Duration::from_secs(1)).unwrap_err();
    }

    /// As when another user, whose directory it is, puts a link in its place.
    #[test]
    fn a_file_is_removed_where_it_was_made_and_nowhere_else() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir(at("mine")).unwrap();
        std::fs::create_dir(at("precious")).unwrap();
        std::fs::write(at("precious/s"), "precious").unwrap();
        let flags = SocketFlags::CLOEXEC;
        let socket = || socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let (first, second) = (socket(), socket());
        let file = BoundFile::bind(first.as_fd(), &at("mine/s")).unwrap();
        let again = BoundFile::bind(second.as_fd(), &at("mine/s"));
        assert!(again.is_ok(), "it does not listen, and is replaced");
        drop(again);
        assert!(!at("mine/s").exists());
        drop(file);
        let file = BoundFile::bind(socket().as_fd(), &at("mine/s")).unwrap();
        std::fs::rename(at("mine"), at("moved")).unwrap();
        symlink(at("precious"), at("mine")).unwrap();
        drop(file);
        assert!(at("precious/s").exists() && !at("moved/s").exists());
    }

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
