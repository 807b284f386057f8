//! Options and state of sockets that have no other wrapper.
//!
//! It needs `unsafe` for `setsockopt` with a value of bytes, or with a filter, and for an `ioctl`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::io::Errno;

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

/// How much of what this socket has sent its peer has yet to take: to acknowledge, in bytes (TCP, where the end counts as one), or to read, in what it takes
/// up in the kernel (UNIX).
///
/// # Errors
/// That the connection is no more.
pub fn untaken(socket: BorrowedFd<'_>) -> io::Result<u32> {
    // A TCP socket that was reset still says how much was under way.
    rustix::net::getpeername(socket)?;
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one number, for which there is room.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
        0 => Ok(u32::try_from(bytes).unwrap_or(0)),
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

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

    /// Bytes that are there to be taken, and then are.
    #[test]
    fn what_a_peer_has_yet_to_take_is_known_until_it_has_or_is_gone() {
        use std::io::{Read, Write};
        let (mut one, mut other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(untaken(one.as_fd()).unwrap(), 0);
        one.write_all(b"four").unwrap();
        assert_ne!(untaken(one.as_fd()).unwrap(), 0);
        other.read_exact(&mut [0; 4]).unwrap();
        assert_eq!(untaken(one.as_fd()).unwrap(), 0);
        one.write_all(b"more").unwrap();
        drop(other);
        assert_eq!(untaken(one.as_fd()).unwrap(), 0);

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 65536]).is_ok() {}
        assert!(untaken(near.as_fd()).unwrap() > 0);
        // With what it has not read, it is a reset.
        drop(far);
        assert!(untaken(near.as_fd()).is_err());
    }
}
