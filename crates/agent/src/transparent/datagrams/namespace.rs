//! The process that lives in the namespace. There, every address at port 53 leads to the loopback, other ports of foreign addresses lead nowhere, and the loopback is as it
//! is everywhere. So a program's datagram socket needs nothing from this program: the kernel knows the sender, and fails for other destinations by itself.
//!
//! Each user has a resolver's socket of its own, whose queue it alone can fill. The users' sockets are marked with their numbers (`SO_MARK`), which programs without rights cannot
//! change, and by the mark the kernel chooses among the resolver's sockets, all of which are bound alike (`SO_REUSEPORT`).

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_reuseaddr, set_socket_reuseport};
use rustix::net::{
    AddressFamily, Protocol, RawProtocol, SendFlags, SocketFlags, SocketType, bind, socket_with,
};
use sys::descriptors::send;
use sys::sockets::{choose_by_mark, set_option};
use sys::supervise::MAX_USERS;

use super::super::address::Family;
use super::super::names;
use super::super::resolver::DNS_PORT;
use super::super::supervisor::PROTOCOL_UDP;

/// The length of the error number of an answer, in bytes.
pub(super) const NUMBER_LEN: usize = 4;

/// Messages of rtnetlink(7), and their flags.
const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
const NEW_RULE: u16 = 32;
const REQUEST: u16 = 0x001;
const ACKNOWLEDGE: u16 = 0x004;
const CREATE: u16 = 0x400;
const EXCLUSIVE: u16 = 0x200;

/// Its header, in bytes. The acknowledgement has an error number behind it.
const HEADER_LEN: usize = 16;

/// The first interface of a namespace.
const LOOPBACK: u32 = 1;
const IS_UP: u32 = 1;

/// No other address has to be asked whether it has this one, too.
const NO_DUPLICATES: u8 = 2;
const SCOPE_HOST: u8 = 254;
const ADDRESS: u16 = 1;
const ADDRESS_LOCAL: u16 = 2;

/// A table of routes that is not one of the kernel's own.
const TABLE: u8 = 100;
const FROM_ADMINISTRATOR: u8 = 4;
const TO_ITSELF: u8 = 2;
const ROUTE_INTERFACE: u16 = 4;
const ROUTE_SOURCE: u16 = 7;

const TO_TABLE: u8 = 1;
const RULE_PRIORITY: u16 = 6;
const RULE_PROTOCOL: u16 = 22;
const RULE_PORTS: u16 = 24;
const PRIORITY: u32 = 100;

/// Options of IPv4 and IPv6: an address that is not the machine's; to which address a datagram was sent; no IPv4.
const SOL_IP: i32 = 0;
const IP_PKTINFO: i32 = 8;
const IP_TRANSPARENT: i32 = 19;
const SOL_IPV6: i32 = 41;
const IPV6_V6ONLY: i32 = 26;
const IPV6_RECVPKTINFO: i32 = 49;
const IPV6_TRANSPARENT: i32 = 75;

/// Enters a namespace, and makes sockets for the process at the other end, until it is closed.
pub(crate) fn serve(mut asking: UnixStream) -> io::Result<()> {
    let resolvers = enter();
    let answered = match &resolvers {
        Ok(resolvers) => {
            let resolvers: Vec<BorrowedFd<'_>> = resolvers.iter().map(AsFd::as_fd).collect();
            answer(&asking, Ok(&resolvers))
        }
        Err(error) => answer(&asking, Err(*error)),
    };
    answered?;
    drop(resolvers);
    let mut asked = [0; 3];
    // So few bytes come in one piece.
    while asking.read(&mut asked)? == asked.len() {
        let [family, protocol, user] = asked;
        let made = Family::of(family.into())
            .ok_or(Errno::AFNOSUPPORT)
            .and_then(|family| {
                let socket = datagram_socket(family, protocol)?;
                set_mark(&socket, user)?;
                Ok(socket)
            });
        match made {
            Ok(socket) => answer(&asking, Ok(&[socket.as_fd()]))?,
            Err(errno) => answer(&asking, Err(errno))?,
        }
    }
    Ok(())
}

fn answer(asking: &UnixStream, result: Result<&[BorrowedFd<'_>], Errno>) -> io::Result<()> {
    let number = result.map_or_else(Errno::raw_os_error, |_| 0);
    let descriptors = result.unwrap_or_default();
    let number = number.to_ne_bytes();
    send(asking, &number, descriptors, SendFlags::empty())?;
    Ok(())
}

fn datagram_socket(family: Family, protocol: u8) -> Result<OwnedFd, Errno> {
    let family = AddressFamily::from_raw(family.number());
    let protocol = RawProtocol::new(protocol.into()).map(Protocol::from_raw);
    socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, protocol)
}

fn set_mark(socket: &OwnedFd, user: u8) -> Result<(), Errno> {
    use nix::sys::socket::{setsockopt, sockopt::Mark};
    let set = setsockopt(socket, Mark, &user.into());
    set.map_err(|errno| Errno::from_raw_os_error(errno as i32))
}

/// The sockets at which questions arrive, whatever their address: for each user one, of IPv4 and then of IPv6. A kernel without IPv6 has the first.
fn enter() -> Result<Vec<OwnedFd>, Errno> {
    sys::namespaces::enter_network()?;
    // Of `NETLINK_ROUTE`, which is 0.
    let kernel = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?;
    tell(&kernel, &link_up())?;
    let mut resolvers = Vec::new();
    for family in [Family::V4, Family::V6] {
        match arrange(&kernel, family) {
            Ok(sockets) => resolvers.extend(sockets),
            Err(errno) if family == Family::V4 => return Err(errno),
            Err(_) => {}
        }
    }
    Ok(resolvers)
}

fn arrange(kernel: &OwnedFd, family: Family) -> Result<Vec<OwnedFd>, Errno> {
    // In the order in which they are bound, they have the numbers of users.
    let sockets = (0..MAX_USERS).map(|_| resolver_socket(family));
    let sockets = sockets.collect::<Result<Vec<_>, _>>()?;
    if let Some(first) = sockets.first() {
        choose_by_mark(first.as_fd()).map_err(sys::supervise::errno)?;
    }
    let own = names::own_address(family.unspecified().ip());
    for message in [address(own), route(own), rule(family)] {
        tell(kernel, &message)?;
    }
    Ok(sockets)
}

fn resolver_socket(family: Family) -> Result<OwnedFd, Errno> {
    // A byte.
    let socket = datagram_socket(family, PROTOCOL_UDP as u8)?;
    let options = match family {
        Family::V4 => &[(SOL_IP, IP_TRANSPARENT), (SOL_IP, IP_PKTINFO)][..],
        Family::V6 => &[
            (SOL_IPV6, IPV6_V6ONLY),
            (SOL_IPV6, IPV6_TRANSPARENT),
            (SOL_IPV6, IPV6_RECVPKTINFO),
        ],
    };
    for (level, option) in options {
        let set = set_option(socket.as_fd(), *level, *option, &1i32.to_ne_bytes());
        set.map_err(sys::supervise::errno)?;
    }
    set_socket_reuseport(&socket, true)?;
    // A name server of the program's own may have this port at an address of the loopback. There it is asked, since the kernel prefers the narrower address.
    set_socket_reuseaddr(&socket, true)?;
    bind(
        &socket,
        &SocketAddr::new(family.unspecified().ip(), DNS_PORT),
    )?;
    Ok(socket)
}

/// Sends a message, and waits for the kernel's answer to it.
pub(crate) fn tell(kernel: &OwnedFd, message: &[u8]) -> Result<(), Errno> {
    rustix::io::write(kernel, message)?;
    let mut answer = [0; 1024];
    let len = rustix::io::read(kernel, &mut answer)?;
    let number = answer[..len.min(answer.len())]
        .get(HEADER_LEN..)
        .and_then(<[u8]>::first_chunk);
    match number.map(|number| i32::from_ne_bytes(*number)) {
        Some(0) => Ok(()),
        Some(number) => Err(Errno::from_raw_os_error(-number)),
        None => Err(Errno::PROTO),
    }
}

/// A message: its header, the fixed part of its kind, and attributes.
pub(crate) fn message(kind: u16, fixed: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut rest = fixed.to_vec();
    for (attribute, value) in attributes {
        // They are a few bytes long.
        let len = 4 + value.len() as u16;
        rest.extend([len.to_ne_bytes(), attribute.to_ne_bytes()].concat());
        rest.extend(*value);
        rest.resize(rest.len().next_multiple_of(4), 0);
    }
    let len = (HEADER_LEN + rest.len()) as u32;
    let flags = match kind {
        NEW_LINK => REQUEST | ACKNOWLEDGE,
        _ => REQUEST | ACKNOWLEDGE | CREATE | EXCLUSIVE,
    };
    let mut bytes = len.to_ne_bytes().to_vec();
    bytes.extend([kind.to_ne_bytes(), flags.to_ne_bytes()].concat());
    // Its number and the sender's are not needed.
    bytes.resize(HEADER_LEN, 0);
    bytes.extend(rest);
    bytes
}

pub(crate) fn link_up() -> Vec<u8> {
    // Of no family and no type.
    let numbers = [0, LOOPBACK, IS_UP, IS_UP];
    message(NEW_LINK, &numbers.map(u32::to_ne_bytes).concat(), &[])
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn family_of(address: IpAddr) -> u8 {
    let family = match address {
        IpAddr::V4(_) => Family::V4,
        IpAddr::V6(_) => Family::V6,
    };
    // A small number.
    family.number() as u8
}

/// The address that a socket shows as its own.
fn address(own: IpAddr) -> Vec<u8> {
    let bytes = octets(own);
    let mut fixed = vec![
        family_of(own),
        8 * bytes.len() as u8,
        NO_DUPLICATES,
        SCOPE_HOST,
    ];
    fixed.extend(LOOPBACK.to_ne_bytes());
    message(
        NEW_ADDRESS,
        &fixed,
        &[(ADDRESS_LOCAL, &bytes), (ADDRESS, &bytes)],
    )
}

/// Whatever comes to this table is the namespace's own.
fn route(own: IpAddr) -> Vec<u8> {
    let scope = if own.is_ipv4() { SCOPE_HOST } else { 0 };
    let mut fixed = vec![
        family_of(own),
        0,
        0,
        0,
        TABLE,
        FROM_ADMINISTRATOR,
        scope,
        TO_ITSELF,
    ];
    fixed.extend([0; 4]);
    let interface = LOOPBACK.to_ne_bytes();
    let source = octets(own);
    message(
        NEW_ROUTE,
        &fixed,
        &[(ROUTE_INTERFACE, &interface), (ROUTE_SOURCE, &source)],
    )
}

/// Questions come to it.
fn rule(family: Family) -> Vec<u8> {
    let mut fixed = vec![family.number() as u8, 0, 0, 0, TABLE, 0, 0, TO_TABLE];
    fixed.extend([0; 4]);
    let ports = [DNS_PORT, DNS_PORT].map(u16::to_ne_bytes).concat();
    let attributes = [
        (RULE_PRIORITY, &PRIORITY.to_ne_bytes()[..]),
        // A byte.
        (RULE_PROTOCOL, &[PROTOCOL_UDP as u8]),
        (RULE_PORTS, &ports),
    ];
    message(NEW_RULE, &fixed, &attributes)
}
