//! The way out: sockets that become circuits, through an egress service of the host.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::socket::{SockFlag, SockType, VsockAddr, bind};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use wire::agent::FIRST_UNPRIVILEGED_PORT;
use wire::destination::Destination;
use wire::socks::{self, Announcement, METHOD_ACCEPTED, Reply};

use crate::stream::until;
use crate::transport::{ANY_CID, ANY_PORT, HOST_CID, dial_host_to_announce};

/// Where the sockets come from that stand in for the programs' own, and how one reaches the egress service. It is a trait, so that tests need no AF_VSOCK.
pub(crate) trait Way: Send + Sync {
    /// A stream socket that is not connected, and is closed on exec.
    ///
    /// # Errors
    /// The system's reason.
    fn socket(&self) -> io::Result<OwnedFd>;

    /// Begins to connect such a socket to the egress service; waits for the end of it only if the socket blocks.
    ///
    /// # Errors
    /// The system's reason, `EINPROGRESS` above all.
    fn begin(&self, socket: BorrowedFd<'_>) -> Result<(), Errno>;

    /// Has the host put through the next call of this socket, to this destination and by a program of this user, if it offers that to this process: what has become of it comes over the
    /// connection that is returned.
    ///
    /// # Errors
    /// It is not known whether the host expects the call, so the socket cannot be connected in another way.
    fn announce(
        &self,
        socket: BorrowedFd<'_>,
        call: (&Destination, u32),
        deadline: Instant,
    ) -> Result<Option<OwnedFd>, Errno>;

    /// The number that the socket has at this end, once it is connected.
    fn own_port(&self, socket: BorrowedFd<'_>) -> u32;
}

/// The way over vsock: a program's socket is the circuit.
#[derive(Debug)]
pub(crate) struct VsockWay {
    port: u32,
    /// Whether announcements are worth a try, of ordinary users' calls and of root's. They need a privileged port here, and a host that knows them.
    may_announce: [AtomicBool; 2],
}

/// How long the host may take to answer a vsock request. It takes at most 10 seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

impl VsockWay {
    /// To the egress service at this port.
    pub(crate) fn new(port: u32) -> VsockWay {
        VsockWay {
            port,
            may_announce: [true; 2].map(AtomicBool::new),
        }
    }

    /// A connection from a privileged port, over which calls of this socket can be announced, and what says so.
    fn announcer(
        &self,
        socket: BorrowedFd<'_>,
        destination: &Destination,
        user: u32,
    ) -> io::Result<(OwnedFd, Announcement)> {
        let announcer = dial_host_to_announce(self.port, user)?;
        bind_anywhere(socket)?;
        let announcement = Announcement {
            destination: destination.clone(),
            own_port: own_port(announcer.as_fd())?,
            port: own_port(socket)?,
            is_privileged: user == 0,
        };
        Ok((announcer, announcement))
    }

    fn may_announce(&self, user: u32) -> &AtomicBool {
        &self.may_announce[usize::from(user == 0)]
    }
}

impl Way for VsockWay {
    fn socket(&self) -> io::Result<OwnedFd> {
        let family = nix::sys::socket::AddressFamily::Vsock;
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = nix::sys::socket::socket(family, SockType::Stream, flags, None)?;
        sys::sockets::set_vsock_connect_timeout(socket.as_fd(), REQUEST_TIMEOUT)?;
        Ok(socket)
    }

    fn begin(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        bind_anywhere(socket).map_err(sys::supervise::errno)?;
        let address = VsockAddr::new(HOST_CID, self.port);
        let begun = nix::sys::socket::connect(socket.as_raw_fd(), &address);
        begun.map_err(|errno| Errno::from_raw_os_error(errno as i32))
    }

    fn announce(
        &self,
        socket: BorrowedFd<'_>,
        (to, user): (&Destination, u32),
        deadline: Instant,
    ) -> Result<Option<OwnedFd>, Errno> {
        let may_announce = self.may_announce(user);
        if !may_announce.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let (announcer, announcement) = match self.announcer(socket, to, user) {
            Ok(begun) => begun,
            Err(error) => {
                if error.kind() == io::ErrorKind::PermissionDenied {
                    may_announce.store(false, Ordering::Relaxed);
                }
                return Ok(None);
            }
        };
        let replied = announce_over(announcer.as_fd(), &announcement, deadline);
        match replied.map_err(unreachable_in_time)? {
            Reply::Succeeded => return Ok(Some(announcer)),
            // Another's call is expected from this port: this one would be put through where that one was to go.
            Reply::GeneralFailure => return Err(Errno::CONNABORTED),
            Reply::CommandNotSupported => may_announce.store(false, Ordering::Relaxed),
            _ => {}
        }
        Ok(None)
    }

    fn own_port(&self, socket: BorrowedFd<'_>) -> u32 {
        own_port(socket).unwrap_or(0)
    }
}

/// How often a port is tried that another socket may have. There are 2^32.
const PORT_ATTEMPTS: usize = 8;

/// Gives a socket a port that no program can foresee. The kernel's come one after the other: a program could have a call announced from the next one, end that call before it arrives, and so have
/// another program's call put through where its own was to go.
fn bind_anywhere(socket: BorrowedFd<'_>) -> io::Result<()> {
    if own_port(socket)? != ANY_PORT {
        return Ok(());
    }
    let mut bound = Ok(());
    for _ in 0..PORT_ATTEMPTS {
        let address = VsockAddr::new(ANY_CID, random_port()?);
        bound = bind(socket.as_raw_fd(), &address);
        if bound != Err(nix::errno::Errno::EADDRINUSE) {
            break;
        }
    }
    Ok(bound?)
}

/// A port that is not privileged.
fn random_port() -> io::Result<u32> {
    let mut bytes = [0; 4];
    while rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? < bytes.len()
    {
    }
    let number = u32::from_ne_bytes(bytes);
    Ok(FIRST_UNPRIVILEGED_PORT + number % (ANY_PORT - FIRST_UNPRIVILEGED_PORT))
}

fn own_port(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let own: VsockAddr = nix::sys::socket::getsockname(socket.as_raw_fd())?;
    Ok(own.port())
}

fn announce_over(
    announcer: BorrowedFd<'_>,
    announcement: &Announcement,
    deadline: Instant,
) -> Result<Reply, Errno> {
    let words = [&socks::GREETING[..], &announcement.to_bytes()].concat();
    send(announcer, &words, deadline)?;
    read_method(announcer, deadline)?;
    read_reply(announcer, deadline)
}

/// What has become of a call that was announced: it is put through, or the program's call is to fail so.
pub(crate) fn outcome(announcer: OwnedFd, deadline: Instant) -> Result<(), Errno> {
    match read_reply(announcer.as_fd(), deadline) {
        Ok(Reply::Succeeded) => Ok(()),
        Ok(reply) => Err(errno(reply)),
        Err(errno) => {
            withdraw(announcer);
            Err(errno)
        }
    }
}

/// Waits until the host does not expect a call any more: as long as it does, the port may be no other program's.
pub(crate) fn withdraw(announcer: OwnedFd) {
    let deadline = Instant::now() + REQUEST_TIMEOUT;
    // A host that is gone expects nothing.
    let _ = rustix::net::shutdown(&announcer, Shutdown::Write);
    while read_reply(announcer.as_fd(), deadline).is_ok() {}
}

/// Makes a program's socket a circuit to this destination. Of the proxy's answer nothing is left in the socket, and nothing behind it is read.
///
/// # Errors
/// What the program's call is to fail with. The socket cannot be used again then.
pub(crate) fn open(
    way: &dyn Way,
    socket: BorrowedFd<'_>,
    to: &Destination,
    deadline: Instant,
) -> Result<(), Errno> {
    let connected = match way.begin(socket) {
        Err(Errno::INPROGRESS) => wait(socket, PollFlags::OUT, deadline)
            .and_then(|()| rustix::net::sockopt::socket_error(socket)?),
        connected => connected,
    };
    connected.map_err(unreachable)?;
    let opened = ask(socket, to, deadline);
    if opened.is_err() {
        // If that fails it is not connected, which is as good.
        let _ = rustix::net::shutdown(socket, Shutdown::Both);
    }
    opened
}

fn unreachable_in_time(errno: Errno) -> Errno {
    match errno {
        Errno::TIMEDOUT => errno,
        errno => unreachable(errno),
    }
}

/// The egress service is the whole network: without it there is none.
pub(crate) fn unreachable(errno: Errno) -> Errno {
    match errno {
        Errno::ISCONN | Errno::ALREADY | Errno::INTR => errno,
        _ => Errno::NETUNREACH,
    }
}

fn ask(socket: BorrowedFd<'_>, to: &Destination, deadline: Instant) -> Result<(), Errno> {
    let words = [&socks::GREETING[..], &socks::request(to)].concat();
    send(socket, &words, deadline)?;
    read_method(socket, deadline)?;
    match read_reply(socket, deadline)? {
        Reply::Succeeded => Ok(()),
        reply => Err(errno(reply)),
    }
}

fn send(socket: BorrowedFd<'_>, mut bytes: &[u8], deadline: Instant) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, deadline)?,
            Err(Errno::INTR) => {}
            Err(_) => return Err(Errno::CONNREFUSED),
        }
    }
    Ok(())
}

fn read_method(socket: BorrowedFd<'_>, deadline: Instant) -> Result<(), Errno> {
    let mut method = [0; 2];
    read(socket, &mut method, deadline)?;
    match method == METHOD_ACCEPTED {
        true => Ok(()),
        false => Err(Errno::PROTO),
    }
}

fn read_reply(socket: BorrowedFd<'_>, deadline: Instant) -> Result<Reply, Errno> {
    let mut head = [0; 5];
    read(socket, &mut head, deadline)?;
    let len = socks::reply_rest_len(head).ok_or(Errno::PROTO)?;
    // An address behind a byte for its length.
    let mut rest = [0; 255 + 2];
    read(socket, &mut rest[..len], deadline)?;
    Reply::from_byte(head[1]).ok_or(Errno::PROTO)
}

/// What it means, as far as the host says, and what may be done about it.
pub(crate) fn meaning(errno: Errno) -> &'static str {
    match errno {
        Errno::ACCESS => {
            ": the host's policy denies it; there, `ringdown why VM name:HOST PORT` (or address:HOST) names the rule"
        }
        Errno::NETUNREACH => {
            ": the host's egress service cannot be reached, or may not be called; `ringdown-agent doctor` tries it"
        }
        Errno::HOSTUNREACH => ": the host knows no such name, or no route",
        Errno::CONNREFUSED => ": no server listens there",
        Errno::TIMEDOUT => ": no answer in time",
        Errno::CONNABORTED => {
            ": the host could not make the connection, or a rule allows no more; its audit has the reason"
        }
        _ => "",
    }
}

/// What a program sees of a refusal.
fn errno(reply: Reply) -> Errno {
    match reply {
        Reply::NotAllowed => Errno::ACCESS,
        Reply::NetworkUnreachable => Errno::NETUNREACH,
        Reply::HostUnreachable => Errno::HOSTUNREACH,
        Reply::ConnectionRefused => Errno::CONNREFUSED,
        Reply::TimedOut => Errno::TIMEDOUT,
        Reply::Succeeded
        | Reply::GeneralFailure
        | Reply::CommandNotSupported
        | Reply::AddressTypeNotSupported => Errno::CONNABORTED,
    }
}

/// Reads exactly so many bytes.
fn read(socket: BorrowedFd<'_>, bytes: &mut [u8], deadline: Instant) -> Result<(), Errno> {
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::net::recv(socket, &mut bytes[filled..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(Errno::CONNREFUSED),
            Ok((count, _)) => filled += count,
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, deadline)?,
            Err(Errno::INTR) => {}
            Err(_) => return Err(Errno::CONNREFUSED),
        }
    }
    Ok(())
}

fn wait(socket: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> Result<(), Errno> {
    loop {
        let timeout = until(deadline);
        let mut polled = [PollFd::new(&socket, flags)];
        match rustix::event::poll(&mut polled, Some(&timeout)) {
            Ok(0) if Instant::now() >= deadline => return Err(Errno::TIMEDOUT),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_not_privileged_and_do_not_follow_each_other() {
        let ports: Vec<u32> = (0..100).map(|_| random_port().unwrap()).collect();
        let is_right = |port: &u32| (FIRST_UNPRIVILEGED_PORT..ANY_PORT).contains(port);
        assert!(ports.iter().all(is_right));
        let is_next = |pair: &[u32]| pair[0].abs_diff(pair[1]) < 1 << 10;
        assert!(!ports.windows(2).any(is_next));
    }

    #[test]
    fn whatever_a_program_sees_of_a_refusal_has_a_meaning() {
        for reply in 1..=8 {
            let errno = errno(Reply::from_byte(reply).unwrap());
            assert_ne!(meaning(errno), "", "{errno}");
        }
        assert!(meaning(Errno::ACCESS).contains("`ringdown why VM name:HOST PORT`"));
    }
}
