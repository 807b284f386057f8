//! The groups of whoever is at the other end of a UNIX socket.
//!
//! The call is made here because no safe library offers it: `SO_PEERCRED` tells of the primary group only.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Groups for which there is room at first. More are rare.
const USUAL_GROUPS: usize = 64;

/// The most groups that a process has on Linux (`NGROUPS_MAX`).
const MAX_GROUPS: usize = 65_536;

/// The supplementary groups that the process at the other end of a connected UNIX socket had when it connected (unix(7), `SO_PEERGROUPS`).
///
/// # Errors
/// What the system says, as for a socket that is no UNIX socket.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; USUAL_GROUPS];
    loop {
        // At most 65,536 times four bytes.
        let mut len = (groups.len() * size_of::<libc::gid_t>()) as libc::socklen_t;
        // SAFETY: SO_PEERGROUPS writes at most `len` bytes, which the vector has, and the length; both outlive the call.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &mut len,
            )
        };
        let found = len as usize / size_of::<libc::gid_t>();
        if result == 0 {
            groups.truncate(found);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // Too little room: the length says how much is needed. The groups are those of the moment of connecting, so this ends.
        if error.raw_os_error() != Some(libc::ERANGE)
            || !(groups.len() + 1..=MAX_GROUPS).contains(&found)
        {
            return Err(error);
        }
        groups.resize(found, 0);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn they_are_those_of_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let mut theirs = peer_groups(one.as_fd()).unwrap();
        let mut own: Vec<u32> = rustix::process::getgroups()
            .unwrap()
            .iter()
            .map(|group| group.as_raw())
            .collect();
        theirs.sort_unstable();
        own.sort_unstable();
        assert_eq!(theirs, own);
    }

    #[test]
    fn there_are_none_of_what_is_no_unix_socket() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(peer_groups(socket.as_fd()).is_err());
    }
}
