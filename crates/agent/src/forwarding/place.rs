//! Where programs of the guest are: TCP ports and UNIX sockets.
//!
//! The binary is static, so the C library's resolver is not there: a host is an address, `localhost`, or a name in `/etc/hosts`.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wire::agent::forward::Place;

use crate::transport::listen_at_path;

/// How long each address of a host may take to answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The most that is read of `/etc/hosts`, in bytes.
const MAX_HOSTS_LEN: u64 = 1024 * 1024;

/// The most addresses of one name that are tried.
const MAX_ADDRESSES: usize = 8;

/// Connect: a socket that does not block.
pub(super) fn connect(place: &Place) -> io::Result<OwnedFd> {
    let socket: OwnedFd = match place {
        Place::Unix { path } => UnixStream::connect(path_of(path))?.into(),
        Place::Tcp { host, port } => {
            let mut last = io::Error::from(io::ErrorKind::NotFound);
            let addresses = addresses(host)?;
            let connected = addresses.into_iter().find_map(|address| {
                let address = SocketAddr::new(address, *port);
                TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)
                    .map_err(|error| last = error)
                    .ok()
            });
            let stream = connected.ok_or(last)?;
            // What comes was put together by the program that sent it: Nagle's wait would only add to the line's.
            let _ = stream.set_nodelay(true);
            stream.into()
        }
    };
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

/// Listen: a socket that does not block, and where it listens.
pub(super) fn listen(place: &Place) -> io::Result<(OwnedFd, Place)> {
    let (socket, place): (OwnedFd, Place) = match place {
        Place::Unix { path } => (listen_at_path(path_of(path))?, place.clone()),
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
            (listener.into(), place)
        }
    };
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok((socket, place))
}

pub(super) fn path_of(path: &[u8]) -> &Path {
    Path::new(std::ffi::OsStr::from_bytes(path))
}

/// A UNIX socket's file, removed when what listens there ends.
#[derive(Debug)]
pub(super) struct SocketFile(PathBuf);

impl SocketFile {
    pub(super) fn of(place: &Place) -> Option<SocketFile> {
        match place {
            Place::Unix { path } => Some(SocketFile(path_of(path).to_owned())),
            Place::Tcp { .. } => None,
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may have been removed by somebody else, which is as good.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn addresses(host: &str) -> io::Result<Vec<IpAddr>> {
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    let hosts =
        crate::guest::read_limited(Path::new("/etc/hosts"), MAX_HOSTS_LEN).unwrap_or_default();
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
    fn names_are_looked_up_as_the_file_says() {
        let hosts = "127.0.0.1 localhost # db\n::1\tlocalhost ip6-localhost\nnonsense db\n\n10.0.0.7 web DB\n";
        assert_eq!(named(hosts, "db"), [IpAddr::from([10, 0, 0, 7])]);
        assert_eq!(named(hosts, "localhost").len(), 2);
        assert!(named(hosts, "nonsense").is_empty());
        let many = "10.0.0.1 a\n".repeat(MAX_ADDRESSES + 1);
        assert_eq!(named(&many, "a").len(), MAX_ADDRESSES);
    }
}
