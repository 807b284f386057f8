//! Whose program is at the other end of a UNIX socket, and what it may send.
//!
//! The calls are made here because no safe library makes them: `SO_PEERGROUPS` and `SO_PASSRIGHTS` are in none, and the process of `SO_PEERCRED` may be 0, which rustix takes for impossible.

use std::io;
use std::mem::{size_of, size_of_val};
use std::os::fd::{AsRawFd, BorrowedFd};

/// The most supplementary groups that a program may have. Linux allows 65,536; what is kept of one that calls is to stay small.
pub const MAX_GROUPS: usize = 1024;

/// The program at the other end of a UNIX socket, as it was when it connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The user that it runs as.
    pub uid: u32,
    /// Every group that it runs with: its primary group, then the supplementary ones. A group may be there twice.
    pub groups: Vec<u32>,
    /// The process; 0 if it cannot be seen from here, as from within a container.
    pub pid: i32,
}

/// The peer of a connected UNIX socket (unix(7), `SO_PEERCRED` and `SO_PEERGROUPS`). If this fails, the peer is to be refused: a rule that denies
/// a user or a group would say nothing about it.
///
/// # Errors
/// What the system says, as for a socket that is no UNIX socket, and when the program has more than [`MAX_GROUPS`] supplementary groups.
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let credentials = credentials(socket)?;
    let mut groups = vec![credentials.gid];
    groups.extend(supplementary_groups(socket)?);
    Ok(Peer {
        uid: credentials.uid,
        groups,
        pid: credentials.pid,
    })
}

/// The process at the other end of a connected UNIX socket; 0 if it cannot be seen from here, or there is none. Of a listener that was connected to, it is the one that
/// called listen(2) last, by whatever path it was found.
pub fn process(socket: BorrowedFd<'_>) -> io::Result<i32> {
    Ok(credentials(socket)?.pid)
}

/// The user that the program at the other end of a connected UNIX socket runs as.
pub fn user(socket: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(credentials(socket)?.uid)
}

/// Makes sends of descriptors to this UNIX socket fail with `EPERM` (`SO_PASSRIGHTS`, since Linux 6.16). Sockets that a listener accepts inherit it. A descriptor that
/// is received and not wanted is closed by the thread that reads or closes the socket, which can take seconds: of a TCP socket with `SO_LINGER`, or a large memfd.
///
/// Returns false on an older system, which does not know the option: nothing changes there.
///
/// # Errors
/// What the system says, as for a socket that is no UNIX socket.
pub fn refuse_descriptors(socket: BorrowedFd<'_>) -> io::Result<bool> {
    // The libc crate does not have it yet.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let pass: libc::c_int = 0;
    // SAFETY: the option is an integer, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const pass).cast(),
            size_of_val(&pass) as libc::socklen_t,
        )
    };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOPROTOOPT) => Ok(false),
        _ => Err(error),
    }
}

fn credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED writes a `ucred`, of which every value is valid, and its length; both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(credentials)
}

fn supplementary_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: [libc::gid_t; MAX_GROUPS] = [0; MAX_GROUPS];
    let mut len = size_of_val(&groups) as libc::socklen_t;
    // SAFETY: SO_PEERGROUPS writes at most `len` bytes, which the array has, and the length; both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &mut len,
        )
    };
    // With too little room nothing is written but how much is needed.
    let found = len as usize / size_of::<libc::gid_t>();
    if let (0, Some(groups)) = (result, groups.get(..found)) {
        return Ok(groups.to_vec());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::ERANGE) {
        return Err(error);
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!(
            "expected at most {MAX_GROUPS} groups of the program that calls, found {found}: run it with fewer"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn it_is_this_process_with_all_its_groups() {
        let (one, _other) = UnixStream::pair().unwrap();
        let mut found = peer(one.as_fd()).unwrap();
        let own_gid = rustix::process::getegid().as_raw();
        assert_eq!(found.uid, rustix::process::geteuid().as_raw());
        assert_eq!(found.groups[0], own_gid);
        assert_eq!(u32::try_from(found.pid), Ok(std::process::id()));
        let supplementary = rustix::process::getgroups().unwrap();
        let mut own: Vec<u32> = supplementary.iter().map(|group| group.as_raw()).collect();
        own.push(own_gid);
        found.groups.sort_unstable();
        own.sort_unstable();
        assert_eq!(found.groups, own);
    }

    #[test]
    fn of_a_listener_it_is_who_listens() {
        let path = std::env::temp_dir().join(format!("ringdown-peer-{}", std::process::id()));
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let caller = UnixStream::connect(&path);
        std::fs::remove_file(&path).unwrap();
        let found = process(caller.unwrap().as_fd()).unwrap();
        assert_eq!(u32::try_from(found), Ok(std::process::id()));
    }

    #[test]
    fn what_is_no_unix_socket_has_none() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(peer(socket.as_fd()).is_err());
        // The system says so of any socket without a peer.
        assert_eq!(process(socket.as_fd()).unwrap(), 0);
    }
}
