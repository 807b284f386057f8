//! Whether the host's routing leads an address to the host itself or to a network that it is attached to.
//!
//! The kernel is asked about each address when it is about to be called (rtnetlink(7), `RTM_GETROUTE`): its answer covers addresses of all
//! interfaces, further local and anycast routes, every routing table, and rules but those about a protocol, a port or a mark that is given later; it is never older than the question. No list is kept that
//! would have to be kept up. The kernel answers while the question is sent, without a lock that others hold, so nothing waits.

use std::net::IpAddr;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::decide::is_network;

/// A message's header (`nlmsghdr`), and the header of a route behind it (`rtmsg`), in bytes.
const MESSAGE_LEN: usize = 16;
const ROUTE_LEN: usize = 12;

/// The route as it stands in its table, and not as it was found for the address: its destination is that of the whole route.
const AS_IN_THE_TABLE: u32 = 0x2000; // RTM_F_FIB_MATCH

/// Attributes of a route that name a router: `RTA_GATEWAY`, and `RTA_VIA` for one of the other family.
const ROUTERS: [u16; 2] = [5, 18];

/// What of a route says where it leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Route {
    is_unicast: bool,
    prefix_len: u8,
    has_router: bool,
}

/// Whether an address is the host's own or of a directly attached network, which is one that a route leads to without a router. A
/// route for the whole world is not one to a network. `from` is the address that it is called from, once that is known.
///
/// # Errors
/// What the kernel says when there is no route, as `connect` would ([`is_no_route`]), or why it cannot be asked.
pub(crate) fn is_near(to: IpAddr, from: Option<IpAddr>) -> Result<bool, Errno> {
    let route = ask(to, from, 0)?;
    if !route.is_unicast || route.has_router {
        return Ok(!route.is_unicast);
    }
    let route = ask(to, from, AS_IN_THE_TABLE)?;
    Ok(!route.is_unicast || is_network(route.prefix_len))
}

/// Whether an address is that of one other host, and not the host's own or that of many.
///
/// # Errors
/// As of [`is_near`].
pub(crate) fn is_unicast(to: IpAddr, from: Option<IpAddr>) -> Result<bool, Errno> {
    ask(to, from, 0).map(|route| route.is_unicast)
}

/// Whether this is how the kernel says that it has no route: none at all, or one that says "unreachable", "prohibit" or "blackhole".
pub(crate) fn is_no_route(error: Errno) -> bool {
    [
        Errno::NETUNREACH,
        Errno::HOSTUNREACH,
        Errno::ACCESS,
        Errno::INVAL,
    ]
    .contains(&error)
}

fn ask(to: IpAddr, from: Option<IpAddr>, flags: u32) -> Result<Route, Errno> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    let kernel = SocketAddrNetlink::new(0, 0);
    let question = question(to, from, flags);
    rustix::net::sendto(&socket, &question, SendFlags::empty(), &kernel)?;
    let mut answer = [0; 4096];
    let (len, _, sender) = rustix::net::recvfrom(&socket, &mut answer, RecvFlags::empty())?;
    let sender = sender.and_then(|sender| SocketAddrNetlink::try_from(sender).ok());
    match sender {
        Some(sender) if sender.pid() == 0 => read(&answer[..len]),
        _ => Err(Errno::BADMSG),
    }
}

fn question(to: IpAddr, from: Option<IpAddr>, flags: u32) -> Vec<u8> {
    let bits = |address: IpAddr| if address.is_ipv4() { 32 } else { 128 };
    let family = if to.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    let mut message = vec![0; MESSAGE_LEN];
    message.extend([family as u8, bits(to), from.map_or(0, bits)]);
    message.extend([0; 5]);
    message.extend(flags.to_ne_bytes());
    let attributes = [
        Some((libc::RTA_DST, to)),
        from.map(|from| (libc::RTA_SRC, from)),
    ];
    for (kind, address) in attributes.into_iter().flatten() {
        let octets = match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        message.extend((4 + octets.len() as u16).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(octets);
    }
    let len = message.len() as u32;
    message[..4].copy_from_slice(&len.to_ne_bytes());
    message[4..6].copy_from_slice(&libc::RTM_GETROUTE.to_ne_bytes());
    message[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    message
}

fn read(answer: &[u8]) -> Result<Route, Errno> {
    let kind = u16_at(answer, 4).ok_or(Errno::BADMSG)?;
    let body = answer.get(MESSAGE_LEN..).ok_or(Errno::BADMSG)?;
    if kind == libc::NLMSG_ERROR as u16 {
        let code = body.first_chunk().map(|code| i32::from_ne_bytes(*code));
        // Zero is no error, and no answer either.
        return Err(match code {
            Some(code @ ..0) => Errno::from_raw_os_error(code.saturating_neg()),
            _ => Errno::BADMSG,
        });
    }
    if kind != libc::RTM_NEWROUTE || body.len() < ROUTE_LEN {
        return Err(Errno::BADMSG);
    }
    let mut has_router = false;
    let mut attributes = &body[ROUTE_LEN..];
    while let (Some(len), Some(kind)) = (u16_at(attributes, 0), u16_at(attributes, 2)) {
        has_router |= ROUTERS.contains(&kind);
        // Each begins at a multiple of four bytes.
        let len = usize::from(len).max(4).next_multiple_of(4);
        attributes = attributes.get(len..).unwrap_or_default();
    }
    Ok(Route {
        is_unicast: body[7] == libc::RTN_UNICAST,
        prefix_len: body[1],
        has_router,
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_near() {
        assert_eq!(is_near([127, 0, 0, 1].into(), None), Ok(true));
        let own = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(is_near(own, Some(own)), Ok(true));
    }

    #[test]
    fn errors_and_answers_about_something_else_are_no_routes() {
        let mut error = [0; 36];
        error[4..6].copy_from_slice(&(libc::NLMSG_ERROR as u16).to_ne_bytes());
        assert_eq!(read(&error), Err(Errno::BADMSG));
        error[16..20].copy_from_slice(&(-libc::ENETUNREACH).to_ne_bytes());
        assert_eq!(read(&error), Err(Errno::NETUNREACH));
        assert!(is_no_route(Errno::NETUNREACH) && !is_no_route(Errno::PERM));
        let mut other = [0; 28];
        other[4..6].copy_from_slice(&libc::RTM_NEWADDR.to_ne_bytes());
        assert_eq!(read(&other), Err(Errno::BADMSG));
        assert_eq!(read(&other[..20]), Err(Errno::BADMSG));
    }

    #[test]
    fn a_route_has_a_router_or_not_and_any_cut_of_it_is_read() {
        let mut route = vec![0; 16];
        route[4..6].copy_from_slice(&libc::RTM_NEWROUTE.to_ne_bytes());
        route.extend([libc::AF_INET as u8, 24, 0, 0, 254, 2, 0, libc::RTN_UNICAST]);
        route.extend([0; 4]);
        let attached = Route {
            is_unicast: true,
            prefix_len: 24,
            has_router: false,
        };
        assert_eq!(read(&route), Ok(attached));
        for router in ROUTERS {
            let mut route = route.clone();
            for kind in [libc::RTA_OIF, router] {
                route.extend([8_u16.to_ne_bytes(), kind.to_ne_bytes()].concat());
                route.extend([1; 4]);
            }
            let routed = Route {
                has_router: true,
                ..attached
            };
            assert_eq!(read(&route), Ok(routed));
            for len in 0..route.len() {
                assert_eq!(read(&route[..len]).is_err(), len < 28, "{len} bytes");
            }
        }
        // An attribute that says it has no length.
        route.extend([0; 4]);
        assert_eq!(read(&route), Ok(attached));
    }
}
