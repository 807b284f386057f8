//! Where programs of the guest are: TCP ports and UNIX sockets.
//!
//! The binary is static, so the C library's resolver is not there: a host is an address, `localhost`, or a name in `/etc/hosts`.

use std::io::{
    self,
    ErrorKind::{ConnectionAborted, TimedOut},
};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, absolute};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use sys::links::{Fuse, address_of, find};
use sys::socket_file::SocketFile;
use wire::agent::forward::Place;

use crate::stream::until;
use crate::transport::listen_at_path;

/// How long a connection may take, over all addresses of its host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a UNIX socket with a full backlog is tried again: there is no event for room in it.
const BACKLOG_PAUSE: Duration = Duration::from_millis(20);

/// The most that is read of `/etc/hosts`, in bytes.
const MAX_HOSTS_LEN: u64 = 16 * 1024 * 1024;

/// The most addresses of one name that are tried.
const MAX_ADDRESSES: usize = 8;

/// Connect: a socket that does not block.
///
/// # Errors
/// The system's reason; `TimedOut`, and `ConnectionAborted` when the waiting host has gone.
pub(super) fn connect(place: &Place, host: &OwnedFd) -> io::Result<OwnedFd> {
    let attempt = Attempt {
        host,
        deadline: Instant::now() + CONNECT_TIMEOUT,
    };
    match place {
        Place::Unix { path } => attempt.path(path_of(path)),
        Place::Tcp { host, port } => {
            let addresses = addresses(host)?.into_iter();
            let addresses: Vec<_> = addresses
                .map(|address| SocketAddr::new(address, *port))
                .collect();
            let socket = attempt.first_of(&addresses)?;
            // What comes was put together by the program that sent it: Nagle's wait would only add to the line's.
            let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
            Ok(socket)
        }
    }
}

/// The host has gone: another address is of no use.
fn is_final(error: &io::Error) -> bool {
    error.raw_os_error().is_none() && error.kind() == ConnectionAborted
}

/// Connecting for a host until a deadline.
struct Attempt<'a> {
    host: &'a OwnedFd,
    deadline: Instant,
}

impl Attempt<'_> {
    /// What stands there by no link that another user could have set: the callers of a published place reach it as root.
    fn path(&self, path: &Path) -> io::Result<OwnedFd> {
        let found = find(&absolute(path)?, Fuse::Entered)?;
        self.unix(&address_of(&found)?, true)
    }

    fn unix(&self, address: &SocketAddrUnix, waits: bool) -> io::Result<OwnedFd> {
        let socket = new_socket(AddressFamily::UNIX)?;
        loop {
            match rustix::net::connect(&socket, address) {
                Ok(()) => return Ok(socket),
                Err(Errno::AGAIN) if waits => {
                    let pause = self.deadline.min(Instant::now() + BACKLOG_PAUSE);
                    self.wait(None, pause)?;
                    if Instant::now() >= self.deadline {
                        return Err(timed_out());
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The first that answers. One that does not answer leaves the others their share of the time.
    fn first_of(&self, addresses: &[SocketAddr]) -> io::Result<OwnedFd> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for (index, address) in addresses.iter().enumerate() {
            let to_come = u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
            let now = Instant::now();
            let share = self.deadline.saturating_duration_since(now) / to_come;
            match self.tcp(*address, now + share) {
                Err(error) if !is_final(&error) => last = error,
                result => return result,
            }
        }
        Err(last)
    }

    fn tcp(&self, address: SocketAddr, deadline: Instant) -> io::Result<OwnedFd> {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let socket = match new_socket(family) {
            Err(error) if error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) => {
                return self.without_inet(address);
            }
            socket => socket?,
        };
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(Errno::INPROGRESS | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !self.wait(Some(&socket), deadline)? {
            return Err(timed_out());
        }
        rustix::net::sockopt::socket_error(&socket)??;
        Ok(socket)
    }

    /// In a kernel without TCP: what listens under `ringdown-agent run`.
    fn without_inet(&self, address: SocketAddr) -> io::Result<OwnedFd> {
        if !address.ip().is_loopback() {
            return Err(Errno::NETUNREACH.into());
        }
        let call = |name: &_, waits| Ok((self.unix(name, waits)?, ()));
        let (socket, ()) = crate::transparent::loopback::first_of(address, call)?;
        Ok(socket)
    }

    /// Waits until then for a socket to be connected: whether it is. The host's end is an error; what it says stays for the program.
    fn wait(&self, wanted: Option<&OwnedFd>, until_then: Instant) -> io::Result<bool> {
        let mut polled = vec![PollFd::new(self.host, PollFlags::RDHUP)];
        polled.extend(wanted.map(|socket| PollFd::new(socket, PollFlags::OUT)));
        loop {
            match poll(&mut polled, Some(&until(until_then))) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if !polled[0].revents().is_empty() => {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                Ok(0) if Instant::now() < until_then => {}
                Ok(count) => return Ok(count > 0),
            }
        }
    }
}

fn new_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

fn timed_out() -> io::Error {
    let words = format!("no answer within {} s", CONNECT_TIMEOUT.as_secs());
    io::Error::new(TimedOut, words)
}

/// Listen: a socket that does not block, where it listens, and its file if it has one.
pub(super) fn listen(place: &Place) -> io::Result<(OwnedFd, Place, Option<SocketFile>)> {
    let (socket, place, file): (OwnedFd, Place, _) = match place {
        Place::Unix { path } => {
            let (socket, file) = listen_at_path(path_of(path))?;
            (socket, place.clone(), Some(file))
        }
        Place::Tcp { host, port } => {
            let addresses: Vec<_> = addresses(host)?
                .into_iter()
                .map(|address| SocketAddr::new(address, *port))
                .collect();
            let listener = TcpListener::bind(addresses.as_slice())?;
            let place = Place::Tcp {
                host: host.clone(),
                port: listener.local_addr()?.port(),
            };
            (listener.into(), place, None)
        }
    };
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok((socket, place, file))
}

pub(super) fn path_of(path: &[u8]) -> &Path {
    Path::new(std::ffi::OsStr::from_bytes(path))
}

fn addresses(host: &str) -> io::Result<Vec<IpAddr>> {
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    let hosts = match crate::guest::read_limited(Path::new("/etc/hosts"), MAX_HOSTS_LEN) {
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            return Err(io::Error::new(error.kind(), format!("/etc/hosts: {error}")));
        }
        hosts => hosts.unwrap_or_default(),
    };
    let mut found = named(&String::from_utf8_lossy(&hosts), host);
    if found.is_empty() && host.eq_ignore_ascii_case("localhost") {
        found = vec![
            [127, 0, 0, 1].into(),
            IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
        ];
    }
    if found.is_empty() {
        let message = "the agent knows addresses, localhost, and the names in the guest's /etc/hosts, and this is none of them";
        return Err(io::Error::new(io::ErrorKind::NotFound, message));
    }
    Ok(found)
}

/// The addresses that the text of `/etc/hosts` has for a name.
fn named(hosts: &str, name: &str) -> Vec<IpAddr> {
    let addresses = hosts.lines().filter_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let address = words.next()?.parse().ok()?;
        words
            .any(|word| word.eq_ignore_ascii_case(name))
            .then_some(address)
    });
    addresses.take(MAX_ADDRESSES).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_backlog_is_given_up_at_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hung");
        let hung = std::os::unix::net::UnixListener::bind(&path).unwrap();
        rustix::net::listen(&hung, 0).unwrap();
        let _waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let (host, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let attempt = Attempt {
            host: &host.into(),
            deadline: Instant::now(),
        };
        let error = attempt
            .unix(&SocketAddrUnix::new(&path).unwrap(), true)
            .unwrap_err();
        assert_eq!(error.kind(), TimedOut, "{error}");
    }

    /// Another user of the guest would choose what the host's callers reach, as root.
    #[test]
    fn a_link_in_a_directory_of_others_leads_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let _secret = std::os::unix::net::UnixListener::bind(at("secret")).unwrap();
        std::os::unix::fs::symlink(at("secret"), at("link")).unwrap();
        let (host, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let host = OwnedFd::from(host);
        let reaches = |mode, name: &str| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(directory.path(), mode).unwrap();
            let path = at(name).into_os_string().into_encoded_bytes();
            connect(&Place::Unix { path }, &host)
        };
        assert!(reaches(0o700, "secret").is_ok() && reaches(0o700, "link").is_ok());
        assert!(reaches(0o777, "secret").is_ok());
        let error = reaches(0o777, "link").unwrap_err();
        assert_eq!(error.raw_os_error(), None, "{error}");
    }

    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&silent, 0).unwrap();
        let silent = silent.local_addr().unwrap();
        let _waiting = std::net::TcpStream::connect(silent).unwrap();
        let answering = TcpListener::bind("127.0.0.1:0").unwrap();
        let answering = answering.local_addr().unwrap();
        let (host, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let attempt = Attempt {
            host: &host.into(),
            deadline: Instant::now() + Duration::from_secs(1),
        };
        let socket = attempt.first_of(&[silent, answering]).unwrap();
        let reached = rustix::net::getpeername(&socket).unwrap();
        assert_eq!(SocketAddr::try_from(reached.unwrap()).unwrap(), answering);
        let error = attempt.first_of(&[silent, silent]).unwrap_err();
        assert_eq!(error.kind(), TimedOut, "{error}");
    }

    #[test]
    fn without_tcp_a_program_is_reached_at_the_name_of_its_address() {
        let (listener, at) =
            crate::transparent::loopback::bound("0.0.0.0:0".parse().unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let (host, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let attempt = Attempt {
            host: &host.into(),
            deadline: Instant::now() + Duration::from_secs(1),
        };
        let port = at.port();
        attempt.without_inet(([127, 0, 0, 1], port).into()).unwrap();
        let foreign = attempt.without_inet(([192, 0, 2, 1], port).into());
        let unreachable = Errno::NETUNREACH.raw_os_error();
        assert_eq!(foreign.unwrap_err().raw_os_error(), Some(unreachable));
        drop(listener);
        let refused = attempt.without_inet(([127, 0, 0, 1], port).into());
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn names_are_looked_up_as_the_file_says() {
        let hosts = "127.0.0.1 localhost # db\n::1\tlocalhost ip6-localhost\nnonsense db\n\n10.0.0.7 web DB\n";
        assert_eq!(named(hosts, "db"), [IpAddr::from([10, 0, 0, 7])]);
        assert_eq!(named(hosts, "localhost").len(), 2);
        assert!(named(hosts, "nonsense").is_empty());
        let many = "10.0.0.1 a\n".repeat(MAX_ADDRESSES + 1);
        assert_eq!(named(&many, "a").len(), MAX_ADDRESSES);
    }
}
