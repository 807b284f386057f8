//! The guest's loopback where its kernel has no TCP (`CONFIG_INET=n`): streams of AF_UNIX. The abstract name of each end is its address, so that the other end learns it, and an address is
//! taken once. All programs of the guest share these names, those of other runs and the agent that serves published ports among them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with, bind,
    connect, getsockname, socket_with,
};

use super::address::Family;

/// What stands before an address in a name.
const PREFIX: &str = "ringdown/tcp/";

/// The ports that are given to sockets that ask for none: the first, and how many.
const FIRST_PORT: u16 = 32_768;
const PORTS: u16 = 28_232;

/// Ports below it are root's.
const FIRST_UNPRIVILEGED_PORT: u16 = 1024;

/// How long a call waits for room in a listener's queue.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether this kernel has TCP of its own.
pub(crate) fn kernel_has_tcp() -> bool {
    super::supervisor::kernel_socket(Family::V4).err() != Some(Errno::AFNOSUPPORT)
}

fn name_of(address: SocketAddr) -> io::Result<SocketAddrUnix> {
    let name = format!("{PREFIX}{address}");
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

fn address_of(name: SocketAddrAny) -> Option<SocketAddr> {
    let name = SocketAddrUnix::try_from(name).ok()?;
    let name = std::str::from_utf8(name.abstract_name()?).ok()?;
    name.strip_prefix(PREFIX)?.parse().ok()
}

/// Listeners that an address of the guest's own may reach: at it, or at all addresses.
pub(crate) fn names_at(to: SocketAddr) -> io::Result<Vec<SocketAddrUnix>> {
    let (every_v4, every): (IpAddr, IpAddr) =
        (Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into());
    let ip = concrete(to.ip().to_canonical());
    let addresses = match ip {
        IpAddr::V4(_) => vec![ip, every_v4, every],
        IpAddr::V6(_) => vec![ip, every],
    };
    let names = addresses
        .into_iter()
        .map(|ip| name_of((ip, to.port()).into()));
    names.collect()
}

/// An address to call in the place of none.
fn concrete(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    }
}

/// A socket with this address of the guest's own, and the address. For port 0 it gets one.
///
/// # Errors
/// `EADDRINUSE`; `EADDRNOTAVAIL` for an address that is not the guest's own.
pub(crate) fn bound(to: SocketAddr) -> Result<(OwnedFd, SocketAddr), Errno> {
    let ip = to.ip().to_canonical();
    if !ip.is_loopback() && !ip.is_unspecified() {
        return Err(Errno::ADDRNOTAVAIL);
    }
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    // Its program takes it for TCP, and would wait while it closes what another user's has sent.
    sys::peer::refuse_descriptors(socket.as_fd()).map_err(sys::supervise::errno)?;
    let name = |port| {
        let address = SocketAddr::from((ip, port));
        name_of(address)
            .map_err(|_| Errno::INVAL)
            .map(|name| (name, address))
    };
    if to.port() != 0 {
        let (name, address) = name(to.port())?;
        bind(&socket, &name)?;
        return Ok((socket, address));
    }
    // Sockets that follow each other begin at ports that follow each other.
    let number = super::sockets::number_of(socket.as_fd()).unwrap_or_default();
    for step in 0..PORTS {
        let offset = (number + u64::from(step)) % u64::from(PORTS);
        let (name, address) = name(FIRST_PORT + offset as u16)?;
        match bind(&socket, &name) {
            Err(Errno::ADDRINUSE) => {}
            bound => return bound.map(|()| (socket, address)),
        }
    }
    Err(Errno::ADDRINUSE)
}

/// A socket that is connected to an address of the guest's own, and its own address.
///
/// # Errors
/// As of TCP.
pub(crate) fn connected(to: SocketAddr) -> Result<(OwnedFd, SocketAddr), Errno> {
    let call = |name: &SocketAddrUnix, waits: bool| {
        let (socket, own) = bound((concrete(to.ip().to_canonical()), 0).into())?;
        set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_TIMEOUT))?;
        rustix::io::ioctl_fionbio(&socket, !waits)?;
        match connect(&socket, name) {
            Err(Errno::AGAIN) if waits => Err(Errno::TIMEDOUT.into()),
            result => Ok(result.map(|()| (socket, own))?),
        }
    };
    first_of(to, call).map_err(sys::supervise::errno)
}

/// Calls listeners of an address of the guest's own, and returns the first at which root listens, or else the first; of a privileged port root's only. A name has no owner: any user
/// could take the narrower or the wider one of a port that is root's, and with it root's callers. A queue that is full is waited for only if nothing of root's listens.
pub(crate) fn first_of<A>(
    to: SocketAddr,
    call: impl Fn(&SocketAddrUnix, bool) -> io::Result<(OwnedFd, A)>,
) -> io::Result<(OwnedFd, A)> {
    let mut found = Err(Errno::CONNREFUSED.into());
    let mut names = names_at(to)?;
    for waits in [false, true] {
        let mut full = Vec::new();
        for name in names {
            match call(&name, waits) {
                Ok(called) if crate::transport::peer_user(&called.0)? == 0 => return Ok(called),
                Ok(_) if to.port() < FIRST_UNPRIVILEGED_PORT => {}
                Ok(called) if found.is_err() => found = Ok(called),
                Ok(_) => {}
                // It was bound and does not listen, or does not any more.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !waits => {
                    full.push(name);
                }
                Err(error) => return Err(error),
            }
        }
        names = full;
    }
    found
}

/// Whether this user may have this port.
pub(crate) fn may_bind(user: u32, port: u16) -> bool {
    user == 0 || port == 0 || port >= FIRST_UNPRIVILEGED_PORT
}

/// The caller.
pub(crate) struct Accepted {
    pub(crate) socket: OwnedFd,
    pub(crate) own: SocketAddr,
    pub(crate) peer: SocketAddr,
}

/// Whether a call waits at a listener, or to accept one fails.
pub(crate) fn may_accept(listener: &OwnedFd) -> Result<bool, Errno> {
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default()))?;
    Ok(!polled[0].revents().is_empty())
}

/// Takes a call that waits at a listener. Does not wait if nothing else takes calls there meanwhile.
///
/// # Errors
/// `EAGAIN` if none waits; the system's reason.
pub(crate) fn accept(listener: &OwnedFd, family: Family) -> Result<Accepted, Errno> {
    if !may_accept(listener)? {
        return Err(Errno::AGAIN);
    }
    let (socket, from) = acceptfrom_with(listener, SocketFlags::CLOEXEC)?;
    let listens_at = address_of(getsockname(&socket)?).unwrap_or_else(|| family.unspecified());
    // The agent has no name, as it calls for others.
    let peer = from.and_then(address_of).unwrap_or_else(|| {
        let number = super::sockets::number_of(socket.as_fd()).unwrap_or_default();
        let port = FIRST_PORT + (number % u64::from(PORTS)) as u16;
        let is_v6 = listens_at.is_ipv6() && listens_at.ip().is_loopback();
        let ip = if is_v6 {
            Ipv6Addr::LOCALHOST.into()
        } else {
            Ipv4Addr::LOCALHOST.into()
        };
        SocketAddr::new(ip, port)
    });
    let ip = match listens_at.ip().is_unspecified() {
        true => peer.ip(),
        false => listens_at.ip(),
    };
    let own = (ip, listens_at.port()).into();
    Ok(Accepted { socket, own, peer })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_taken_once_and_shows_at_the_other_end() {
        let (listener, at) = bound("0.0.0.0:0".parse().unwrap()).unwrap();
        assert_eq!(bound(at).unwrap_err(), Errno::ADDRINUSE);
        let loopback = SocketAddr::new([127, 0, 0, 1].into(), at.port());
        // It does not listen yet.
        assert_eq!(connected(loopback).unwrap_err(), Errno::CONNREFUSED);
        rustix::net::listen(&listener, 1).unwrap();
        assert_eq!(accept(&listener, Family::V4).err(), Some(Errno::AGAIN));
        let (_caller, own) = connected(loopback).unwrap();
        let accepted = accept(&listener, Family::V4).unwrap();
        assert_eq!((accepted.own, accepted.peer), (loopback, own));
        let foreign = bound("192.0.2.1:80".parse().unwrap());
        assert_eq!(foreign.unwrap_err(), Errno::ADDRNOTAVAIL);
    }

    #[test]
    fn neither_end_takes_descriptors_where_the_system_can_refuse_them() {
        let (listener, at) = bound("127.0.0.1:0".parse().unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let (caller, _) = connected(at).unwrap();
        let accepted = accept(&listener, Family::V4).unwrap().socket;
        if !sys::peer::refuse_descriptors(listener.as_fd()).unwrap() {
            return;
        }
        for end in [&caller, &accepted] {
            let flags = rustix::net::SendFlags::empty();
            let sent = sys::descriptors::send(end, b"x", &[listener.as_fd()], flags);
            assert_eq!(sent.unwrap_err(), Errno::PERM);
        }
    }

    #[test]
    fn who_listens_at_all_addresses_is_called_by_both_families() {
        let (listener, at) = bound("[::]:0".parse().unwrap()).unwrap();
        rustix::net::listen(&listener, 4).unwrap();
        for ip in ["127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0"] {
            let to = SocketAddr::new(ip.parse().unwrap(), at.port());
            let (_caller, own) = connected(to).unwrap();
            let accepted = accept(&listener, Family::V6).unwrap();
            assert_eq!(accepted.peer, own);
            assert_eq!(accepted.own.ip(), concrete(to.ip().to_canonical()));
        }
        let (unnamed, name) = (names_at(at).unwrap(), AddressFamily::UNIX);
        let caller = socket_with(name, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        connect(&caller, unnamed.last().unwrap()).unwrap();
        assert!(
            accept(&listener, Family::V6)
                .unwrap()
                .peer
                .ip()
                .is_loopback()
        );
    }

    /// Listens in a thread of another user.
    fn listen_as(user: u32, at: SocketAddr) -> OwnedFd {
        let thread = std::thread::spawn(move || {
            let user = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            let (listener, _) = bound(at).unwrap();
            rustix::net::listen(&listener, 1).unwrap();
            listener
        });
        thread.join().unwrap()
    }

    #[test]
    fn no_user_gets_roots_callers() {
        if !rustix::process::geteuid().is_root() {
            println!("not tried: this user cannot become others");
            return;
        }
        for (roots, anothers) in [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")] {
            let ips = [roots, anothers].map(|ip| ip.parse::<IpAddr>().unwrap());
            let (listener, at) = bound((ips[0], 0).into()).unwrap();
            rustix::net::listen(&listener, 1).unwrap();
            let taken = listen_as(4242, (ips[1], at.port()).into());
            let to = SocketAddr::from(([127, 0, 0, 1], at.port()));
            // The other's queue is full with the third.
            for _ in 0..3 {
                let _caller = connected(to).unwrap();
                assert!(accept(&listener, Family::V4).is_ok(), "{roots}");
            }
            drop(listener);
            while accept(&taken, Family::V4).is_ok() {}
            let _caller = connected(to).unwrap();
            assert!(accept(&taken, Family::V4).is_ok(), "{roots}");
        }
        let port = 1023;
        let _taken = listen_as(4242, ([127, 0, 0, 1], port).into());
        let refused = connected(([127, 0, 0, 1], port).into());
        assert_eq!(refused.unwrap_err(), Errno::CONNREFUSED);
        assert!(!may_bind(4242, port) && may_bind(4242, 0) && may_bind(0, port));
    }
}
