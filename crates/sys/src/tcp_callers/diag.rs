//! Asking the kernel about one TCP socket: sock_diag(7). However many there are, it finds this one at once.

use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// A message's header (`nlmsghdr`), the question behind it (`inet_diag_req_v2`) and the answer (`inet_diag_msg`), in bytes.
const HEADER_LEN: usize = 16;
const QUESTION_LEN: usize = 56;
const ANSWER_LEN: usize = 72;

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;

/// Where both ports stand in a question, behind its header, and in an answer.
const PORTS_OF_QUESTION: std::ops::Range<usize> = 8..12;
const PORTS: std::ops::Range<usize> = 4..8;

/// Where in an answer the user stands and behind it the number of its file, which is 0 when the program has closed it.
const USER_AT: usize = 64;
const FILE_AT: usize = 68;

/// The user whose socket has these ends; none of one that its program has closed, and where another socket listens at the port.
///
/// # Errors
/// [`Errno::NOENT`] when there is no such socket, or the kernel cannot say it; why it cannot be asked.
pub(super) fn user_of(local: SocketAddr, remote: SocketAddr) -> Result<Option<u32>, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let family = AddressFamily::NETLINK;
    let socket = rustix::net::socket_with(family, SocketType::RAW, flags, Some(SOCK_DIAG))?;
    let kernel = SocketAddrNetlink::new(0, 0);
    let question = question(local, remote);
    rustix::net::sendto(&socket, &question, SendFlags::empty(), &kernel)?;
    let mut answer = [0; 1024];
    let (len, _, sender) = rustix::net::recvfrom(&socket, &mut answer, RecvFlags::empty())?;
    let sender = sender.and_then(|sender| SocketAddrNetlink::try_from(sender).ok());
    match sender {
        Some(sender) if sender.pid() == 0 => read(&answer[..len], &question[HEADER_LEN..]),
        _ => Err(Errno::BADMSG),
    }
}

fn question(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let len = HEADER_LEN + QUESTION_LEN;
    let mut message = Vec::with_capacity(len);
    message.extend((len as u32).to_ne_bytes());
    message.extend(BY_FAMILY.to_ne_bytes());
    message.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    // A sequence number and a port identifier, which are not used.
    message.extend([0; 8]);
    let family = match local {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    message.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    // In any state.
    message.extend(u32::MAX.to_ne_bytes());
    for port in [local.port(), remote.port()] {
        message.extend(port.to_be_bytes());
    }
    for address in [local.ip(), remote.ip()] {
        let mut octets = [0; 16];
        match address {
            IpAddr::V4(address) => octets[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => octets = address.octets(),
        }
        message.extend(octets);
    }
    // On any interface, whatever its cookie.
    message.extend(0_u32.to_ne_bytes());
    message.extend([u8::MAX; 8]);
    message
}

fn read(answer: &[u8], question: &[u8]) -> Result<Option<u32>, Errno> {
    let kind = answer.get(4..6).and_then(|kind| kind.first_chunk());
    let kind = kind.map(|kind| u16::from_ne_bytes(*kind));
    let body = answer.get(HEADER_LEN..).unwrap_or_default();
    let word = |at: usize| {
        let word = body.get(at..).and_then(|rest| rest.first_chunk());
        word.map_or(0, |word| u32::from_ne_bytes(*word))
    };
    match kind {
        Some(BY_FAMILY) if body.len() >= ANSWER_LEN => {
            // Where no socket is connected so, the kernel finds one that listens at the port.
            let is_it = body[PORTS] == question[PORTS_OF_QUESTION];
            Ok(Some(word(USER_AT)).filter(|_| is_it && word(FILE_AT) != 0))
        }
        // A negative number of an error.
        Some(kind) if i32::from(kind) == libc::NLMSG_ERROR && word(0) != 0 => {
            Err(Errno::from_raw_os_error(word(0).wrapping_neg() as i32))
        }
        _ => Err(Errno::BADMSG),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_listener_is_no_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        match user_of(local, "127.0.0.1:1".parse().unwrap()) {
            Ok(user) => assert_eq!(user, None),
            // Not found, or a kernel without it.
            Err(error) => println!("{error}"),
        }
    }
}
