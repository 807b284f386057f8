//! Where the agent listens, and how it reaches the host.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr};
use rustix::fs::Mode;
use rustix::net::SocketFlags;
use sys::links::{Entry, Fuse};
use sys::socket_file::SocketFile;
use wire::agent::{FIRST_UNPRIVILEGED_PORT, PORT};

use crate::serial::SerialPort;

/// The context identifier of the host, as its guests see it.
pub(crate) const HOST_CID: u32 = 2;

/// Any context identifier: this guest, in an address to bind to.
pub(crate) const ANY_CID: u32 = u32::MAX;

/// Any port, in an address to bind to.
pub(crate) const ANY_PORT: u32 = u32::MAX;

/// Privileged ports from which `run` announces calls, each while its call is under way, those from which programs of root's are called for, and those from which the agent
/// dials. Those below stay free for well-known services.
const ANNOUNCER_SOURCE_PORTS: Range<u32> = 512..640;
const ROOT_SOURCE_PORTS: Range<u32> = ANNOUNCER_SOURCE_PORTS.end..768;
const AGENT_SOURCE_PORTS: Range<u32> = ROOT_SOURCE_PORTS.end..FIRST_UNPRIVILEGED_PORT;

/// How many connections may wait to be accepted. Of vsock the kernel refuses further ones, the host's too, and any program of the guest may call a port.
const BACKLOG: i32 = 1024;

/// Where the agent listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// Vsock port [`PORT`], for the host.
    Vsock,
    /// A UNIX socket, for root and the agent's own user.
    Unix(PathBuf),
    /// A virtio-serial port, for the host.
    Serial(SerialPort),
}

impl Endpoint {
    /// An endpoint as it is written on the command line: `vsock`, `serial`, `serial:NAME`, `serial-socket:PATH` or `unix:PATH`.
    pub fn parse(text: &OsStr) -> Result<Endpoint, String> {
        let bytes = text.as_bytes();
        let path_behind = |word: &[u8]| {
            let path = bytes.strip_prefix(word).filter(|path| !path.is_empty());
            path.map(|path| PathBuf::from(OsStr::from_bytes(path)))
        };
        if let Some(path) = path_behind(b"unix:") {
            return Ok(Endpoint::Unix(path));
        }
        if let Some(path) = path_behind(b"serial-socket:") {
            return Ok(Endpoint::Serial(SerialPort::Socket(path)));
        }
        let name = text.to_str().and_then(|text| text.strip_prefix("serial:"));
        if let Some(name) = name.filter(|name| is_port_name(name)) {
            return Ok(Endpoint::Serial(SerialPort::Named(name.to_owned())));
        }
        match bytes {
            b"vsock" => Ok(Endpoint::Vsock),
            b"serial" => Ok(Endpoint::serial()),
            _ => Err(format!(
                "--listen expects vsock, serial, serial:NAME, serial-socket:PATH or unix:PATH, not {text:?}"
            )),
        }
    }

    /// The virtio-serial port that hosts give their guests for the agent.
    pub fn serial() -> Endpoint {
        Endpoint::Serial(SerialPort::Named(serial::PORT_NAME.to_owned()))
    }
}

/// Whether a virtio-serial port can have this name, which is looked for in a directory.
fn is_port_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'/';
    (1..=64).contains(&name.len()) && name.bytes().all(is_plain) && !name.starts_with('.')
}

/// A socket that listens.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    is_vsock: bool,
}

impl Listener {
    /// Listen for the host on vsock.
    ///
    /// # Errors
    /// The system's reason; also that the vsock module is not loaded yet (`EAFNOSUPPORT`).
    pub fn vsock() -> io::Result<Listener> {
        let socket = vsock_socket()?;
        nix::sys::socket::bind(socket.as_raw_fd(), &VsockAddr::new(ANY_CID, PORT))?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(Listener {
            socket,
            is_vsock: true,
        })
    }

    /// Listen at a UNIX socket for root and the agent's user. One whose owner is gone is replaced.
    pub fn unix(path: &Path) -> io::Result<Listener> {
        let (socket, mut file) = listen_at_path(path)?;
        file.stay();
        Ok(Listener {
            socket,
            is_vsock: false,
        })
    }

    /// Wait for the next connection that comes from the host (or, on a UNIX socket, from root or the agent's user).
    ///
    /// # Errors
    /// The system's reason; `PermissionDenied` for a connection of another peer, which is closed.
    pub fn accept(&self) -> io::Result<OwnedFd> {
        let connection =
            rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        if self.is_vsock {
            let peer: VsockAddr = nix::sys::socket::getpeername(connection.as_raw_fd())?;
            check_cid(peer.cid())?;
        } else {
            let peer = peer_user(&connection)?;
            if ![0, rustix::process::geteuid().as_raw()].contains(&peer) {
                return Err(refused(&format!(
                    "user {peer} is neither root nor the agent's user"
                )));
            }
        }
        Ok(connection)
    }
}

/// Refuses what does not have the host's context identifier.
fn check_cid(cid: u32) -> io::Result<()> {
    match cid {
        HOST_CID => Ok(()),
        other => Err(refused(&format!(
            "context identifier {other} is not the host"
        ))),
    }
}

/// The user of the program at the other end of a UNIX socket. Not by rustix, for which a process that cannot be seen from here (0) is impossible.
pub(crate) fn peer_user(connection: &OwnedFd) -> io::Result<u32> {
    use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
    Ok(getsockopt(connection, PeerCredentials)?.uid())
}

/// Listen at a path, for root and the agent's own user (mode 0600). A socket there whose owner is gone is replaced.
///
/// # Errors
/// The system's reason; `AddrInUse` if another program listens there.
pub(crate) fn listen_at_path(path: &Path) -> io::Result<(OwnedFd, SocketFile)> {
    listen_at_path_with_mode(path, 0o600)
}

/// The same for users that this mode allows.
pub(crate) fn listen_at_path_with_mode(
    path: &Path,
    mode: u32,
) -> io::Result<(OwnedFd, SocketFile)> {
    let (family, kind) = (
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
    );
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // Linux gives the file the mode of the socket that is bound, less the process's mask: later the path may lead to another file.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    let (file, _) = SocketFile::take_over(&socket, Entry::at(path, Fuse::Entered)?)?;
    if mode & 0o077 != 0 {
        file.set_mode(mode)?;
        // None are taken, and to close some is to wait. Connections inherit it. Older systems than Linux 6.16 cannot refuse them.
        sys::peer::refuse_descriptors(socket.as_fd())?;
    }
    // No program can connect before, so the mode is right from the first connection on.
    rustix::net::listen(&socket, BACKLOG)?;
    Ok((socket, file))
}

fn refused(reason: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("a connection is refused: {reason}"),
    )
}

/// Dial the host's port [`PORT`] from a privileged port, which proves to the host that this is no ordinary program.
///
/// # Errors
/// The system's reason: no vsock device yet, no listener, no privileged port free or allowed.
pub fn dial_host() -> io::Result<OwnedFd> {
    dial_host_as_agent(PORT)
}

/// The same for another port of the host.
pub(crate) fn dial_host_as_agent(host_port: u32) -> io::Result<OwnedFd> {
    dial_host_from(AGENT_SOURCE_PORTS, host_port)
}

/// The same, to announce a call of a program of this user.
pub(crate) fn dial_host_to_announce(host_port: u32, user: u32) -> io::Result<OwnedFd> {
    dial_host_from(announcer_ports(user), host_port)
}

/// The ports that there are for a user: all for root, and half of them for any other. They follow from its number alone, as several runs know nothing of each other: so that a user in many runs
/// leaves the other half to others.
fn announcer_ports(user: u32) -> Vec<u32> {
    let mut ports: Vec<u32> = ANNOUNCER_SOURCE_PORTS.collect();
    if user != 0 {
        ports.sort_by_cached_key(|port| mixed(u64::from(user) << 32 | u64::from(*port)));
        ports.truncate(ports.len() / 2);
    }
    ports
}

/// A number that looks like any other: the last step of SplitMix64.
fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

fn dial_host_from(
    ports: impl IntoIterator<Item = u32, IntoIter: DoubleEndedIterator>,
    host_port: u32,
) -> io::Result<OwnedFd> {
    let socket = vsock_socket()?;
    bind_to_one_of(&socket, ports)?;
    connect(&socket, HOST_CID, host_port)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

/// Gives a socket the last of these ports that is free.
fn bind_to_one_of(
    socket: &OwnedFd,
    ports: impl IntoIterator<Item = u32, IntoIter: DoubleEndedIterator>,
) -> io::Result<()> {
    let mut bound = Err(nix::errno::Errno::EADDRINUSE);
    for port in ports.into_iter().rev().filter(|port| *port != PORT) {
        bound = nix::sys::socket::bind(socket.as_raw_fd(), &VsockAddr::new(ANY_CID, port));
        if bound != Err(nix::errno::Errno::EADDRINUSE) {
            break;
        }
    }
    Ok(bound?)
}

/// How often a dial to another guest is tried again when nothing answers: the kernel gives up after two seconds, in which a busy
/// machine may not have come to it.
pub(crate) const DIAL_ATTEMPTS: u32 = 4;

/// Whether the kernel has given up waiting for an answer.
pub(crate) fn is_timeout(error: &io::Error) -> bool {
    rustix::io::Errno::from_io_error(error) == Some(rustix::io::Errno::TIMEDOUT)
}

/// A vsock socket with a port of its own, which is not a privileged one.
pub(crate) fn bind_anywhere() -> io::Result<(OwnedFd, u32)> {
    let socket = vsock_socket()?;
    nix::sys::socket::bind(socket.as_raw_fd(), &VsockAddr::new(ANY_CID, ANY_PORT))?;
    let address: VsockAddr = nix::sys::socket::getsockname(socket.as_raw_fd())?;
    Ok((socket, address.port()))
}

/// Makes a call.
pub(crate) fn connect(socket: &OwnedFd, cid: u32, port: u32) -> io::Result<()> {
    Ok(nix::sys::socket::connect(
        socket.as_raw_fd(),
        &VsockAddr::new(cid, port),
    )?)
}

/// The next connection, which blocks, and the CID and port it comes from; nothing if there is none yet.
pub(crate) fn accept_anybody(listener: &OwnedFd) -> io::Result<Option<(OwnedFd, u32, u32)>> {
    let connection = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(connection) => connection,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let peer: VsockAddr = nix::sys::socket::getpeername(connection.as_raw_fd())?;
    Ok(Some((connection, peer.cid(), peer.port())))
}

/// Listen for another guest, at this port or, if it is 0, at any: the socket, non-blocking, and the port.
///
/// # Errors
/// The system's reason: no vsock, the port is in use.
pub(crate) fn listen_for_guest(port: u32) -> io::Result<(OwnedFd, u32)> {
    let port = if port == 0 { ANY_PORT } else { port };
    let socket = vsock_socket()?;
    nix::sys::socket::bind(socket.as_raw_fd(), &VsockAddr::new(ANY_CID, port))?;
    rustix::net::listen(&socket, BACKLOG)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    let address: VsockAddr = nix::sys::socket::getsockname(socket.as_raw_fd())?;
    Ok((socket, address.port()))
}

/// The next connection of that guest; nothing if there is none yet, or if it was another guest's, which is closed.
pub(crate) fn accept_guest(listener: &OwnedFd, cid: u32) -> io::Result<Option<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connection = match rustix::net::accept_with(listener, flags) {
        Ok(connection) => connection,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let peer: VsockAddr = nix::sys::socket::getpeername(connection.as_raw_fd())?;
    Ok((peer.cid() == cid).then_some(connection))
}

/// Dial a port of another guest, or of the host.
///
/// # Errors
/// The system's reason; a refusal, by a rule or for want of a listener, is a reset.
pub(crate) fn dial_guest(cid: u32, port: u32) -> io::Result<OwnedFd> {
    dial_as(0..0, cid, port)
}

/// Dial a port of the host for a program of root's: from a privileged port, if there is one free. Of what the host has for this guest, a part is for calls from there.
pub(crate) fn dial_host_for_root(port: u32) -> io::Result<OwnedFd> {
    dial_as(ROOT_SOURCE_PORTS, HOST_CID, port)
}

fn dial_as(from: Range<u32>, cid: u32, port: u32) -> io::Result<OwnedFd> {
    let mut attempt = 1;
    loop {
        let socket = vsock_socket()?;
        // Without one of these it has a port as any program's.
        let _ = bind_to_one_of(&socket, from.clone());
        match connect(&socket, cid, port) {
            Err(error) if is_timeout(&error) && attempt < DIAL_ATTEMPTS => attempt += 1,
            Err(error) => return Err(error),
            Ok(()) => {
                rustix::io::ioctl_fionbio(&socket, true)?;
                return Ok(socket);
            }
        }
    }
}

fn vsock_socket() -> io::Result<OwnedFd> {
    Ok(nix::sys::socket::socket(
        AddressFamily::Vsock,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Each run counts for itself; the ports are all runs'.
    #[test]
    fn a_user_in_many_runs_leaves_ports_to_each_other_user() {
        assert_eq!(announcer_ports(0).len(), ANNOUNCER_SOURCE_PORTS.len());
        for user in [1000, 1001, 65_534, 100_000] {
            let taken = announcer_ports(user);
            assert_eq!(taken, announcer_ports(user), "in another run");
            for other in (1..2000).filter(|other| *other != user) {
                let mut ports = announcer_ports(other);
                ports.retain(|port| !taken.contains(port));
                assert!(
                    ports.len() >= 16,
                    "{} of {other} beside {user}",
                    ports.len()
                );
            }
        }
    }

    #[test]
    fn a_socket_has_its_mode_whatever_the_mask() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        for mode in [0o600, 0o660, 0o666] {
            let _listener = listen_at_path_with_mode(&path, mode).unwrap();
            let found = std::fs::symlink_metadata(&path).unwrap().permissions();
            assert_eq!(found.mode() & 0o777, mode);
        }
    }

    #[test]
    fn no_context_identifier_but_the_hosts_is_served() {
        assert!(check_cid(2).is_ok());
        for other in [0, 1, 3, 4, 1 << 30, u32::MAX] {
            let error = check_cid(other).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        }
    }
}
