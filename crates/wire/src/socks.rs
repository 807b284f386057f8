//! SOCKS version 5 (RFC 1928), as far as the egress proxy offers it: no authentication, the CONNECT command, names and
//! addresses of both families. A command of our own announces a call that comes later. A client greets, is answered, asks, and is answered; then the connection is the circuit.

use std::net::IpAddr;

use crate::destination::{Destination, DestinationError, Host, ipv4, ipv6};

/// The first byte of everything that a client of this version says.
pub const VERSION: u8 = 5;

/// The longest greeting, in bytes: version, count, and 255 methods.
pub const MAX_GREETING_LEN: usize = 2 + 255;

/// The longest request, in bytes: four bytes, a name with its length, and a port; of an announcement two ports of vsock more.
pub const MAX_REQUEST_LEN: usize = 4 + 1 + 255 + 2 + 4 + 4;

/// The answer to a greeting that offers no authentication.
pub const METHOD_ACCEPTED: [u8; 2] = [VERSION, NO_AUTHENTICATION];

/// The answer to a greeting that insists on authentication.
pub const METHOD_REFUSED: [u8; 2] = [VERSION, 0xff];

const NO_AUTHENTICATION: u8 = 0;
const COMMAND_CONNECT: u8 = 1;
/// Not of RFC 1928, which has 1 to 3.
const COMMAND_ANNOUNCE: u8 = 0xa0;
const COMMAND_ANNOUNCE_PRIVILEGED: u8 = 0xa1;
const ADDRESS_IPV4: u8 = 1;
const ADDRESS_NAME: u8 = 3;
const ADDRESS_IPV6: u8 = 4;

/// What a client says first that offers no authentication.
pub const GREETING: [u8; 3] = [VERSION, 1, NO_AUTHENTICATION];

/// The request of a client of the same guest that another call, which has not been made yet, be put through to a destination without a word on it. It is answered twice:
/// when that call may be made, and with what has become of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// Where to.
    pub destination: Destination,
    /// The port that the request comes from. On a line that does not keep the guest's ports the proxy sees another, and does not offer this.
    pub own_port: u32,
    /// The port that the call will come from.
    pub port: u32,
    /// Whether the call is a privileged program's, as is one from a port below 1024. Hosts of before do not know it.
    pub is_privileged: bool,
}

impl Announcement {
    /// How a client asks for it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = request(&self.destination);
        bytes[1] = match self.is_privileged {
            false => COMMAND_ANNOUNCE,
            true => COMMAND_ANNOUNCE_PRIVILEGED,
        };
        bytes.extend(self.own_port.to_be_bytes());
        bytes.extend(self.port.to_be_bytes());
        bytes
    }
}

/// How a client asks for a destination.
pub fn request(destination: &Destination) -> Vec<u8> {
    let mut bytes = vec![VERSION, COMMAND_CONNECT, 0];
    match &destination.host {
        Host::Address(IpAddr::V4(address)) => {
            bytes.push(ADDRESS_IPV4);
            bytes.extend(address.octets());
        }
        Host::Address(IpAddr::V6(address)) => {
            bytes.push(ADDRESS_IPV6);
            bytes.extend(address.octets());
        }
        Host::Name(name) => {
            // Names have 253 bytes at most.
            bytes.extend([ADDRESS_NAME, name.len() as u8]);
            bytes.extend(name.as_bytes());
        }
    }
    bytes.extend(destination.port.to_be_bytes());
    bytes
}

/// The length of the rest of an answer to a request, by its first five bytes. There is none for a kind of address that is unknown.
pub fn reply_rest_len(head: [u8; 5]) -> Option<usize> {
    match head {
        [VERSION, _, _, ADDRESS_IPV4, _] => Some(3 + 2),
        [VERSION, _, _, ADDRESS_IPV6, _] => Some(15 + 2),
        [VERSION, _, _, ADDRESS_NAME, len] => Some(usize::from(len) + 2),
        _ => None,
    }
}

/// What the first bytes of a client say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Greeting {
    /// Nothing is wrong yet, and nothing is complete.
    Partial,
    /// A greeting, which takes up this many bytes.
    Complete {
        /// Whether the client goes on without authentication.
        without_authentication: bool,
        /// The greeting's length in bytes.
        len: usize,
    },
    /// This is no greeting.
    Invalid,
}

/// What the bytes behind the greeting say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Nothing is wrong yet, and nothing is complete.
    Partial,
    /// A request to connect, which takes up this many bytes. What follows belongs to the circuit.
    Connect {
        /// Where to.
        destination: Destination,
        /// The request's length in bytes.
        len: usize,
    },
    /// A request to put through a later call, which takes up this many bytes.
    Announce {
        /// Which call, and where to.
        announcement: Announcement,
        /// The request's length in bytes.
        len: usize,
    },
    /// A request that is refused with this answer.
    Refused(Reply),
    /// A request for something that is no destination. It is refused with [`Reply::GeneralFailure`].
    BadDestination(DestinationError),
    /// This is no request: nothing sensible can be answered.
    Invalid,
}

/// How a request is answered (RFC 1928, section 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Reply {
    /// The connection is there.
    Succeeded = 0,
    /// Something else went wrong.
    GeneralFailure = 1,
    /// The policy does not allow it.
    NotAllowed = 2,
    /// There is no route to the network.
    NetworkUnreachable = 3,
    /// There is no route to the host, or its name does not resolve.
    HostUnreachable = 4,
    /// There is no listener.
    ConnectionRefused = 5,
    /// No answer in time: "TTL expired", the only answer of RFC 1928 about time.
    TimedOut = 6,
    /// Only CONNECT is offered.
    CommandNotSupported = 7,
    /// Neither a name nor an address of either family.
    AddressTypeNotSupported = 8,
}

impl Reply {
    /// What a byte of an answer says. There are no others.
    pub fn from_byte(byte: u8) -> Option<Reply> {
        let replies = [
            Reply::Succeeded,
            Reply::GeneralFailure,
            Reply::NotAllowed,
            Reply::NetworkUnreachable,
            Reply::HostUnreachable,
            Reply::ConnectionRefused,
            Reply::TimedOut,
            Reply::CommandNotSupported,
            Reply::AddressTypeNotSupported,
        ];
        replies.get(usize::from(byte)).copied()
    }

    /// The answer, with no address of its own: which of the host's addresses a circuit uses is not the guest's business.
    pub fn to_bytes(self) -> [u8; 10] {
        [VERSION, self as u8, 0, ADDRESS_IPV4, 0, 0, 0, 0, 0, 0]
    }
}

impl Greeting {
    /// Reads the greeting at the start of `bytes`, which may go on beyond it, or end before it does.
    pub fn parse(bytes: &[u8]) -> Greeting {
        match bytes {
            [] | [VERSION] => Greeting::Partial,
            [VERSION, count, methods @ ..] => match methods.get(..usize::from(*count)) {
                Some(methods) => Greeting::Complete {
                    without_authentication: methods.contains(&NO_AUTHENTICATION),
                    len: 2 + methods.len(),
                },
                None => Greeting::Partial,
            },
            _ => Greeting::Invalid,
        }
    }
}

impl Request {
    /// Reads the request at the start of `bytes`, which may go on beyond it, or end before it does. A request is judged when it
    /// is complete, so that its answer is never taken for that of another.
    pub fn parse(bytes: &[u8]) -> Request {
        let (command, kind, rest) = match bytes {
            [VERSION, command, 0, kind, rest @ ..] => (*command, *kind, rest),
            [] | [VERSION] | [VERSION, _] | [VERSION, _, 0] => return Request::Partial,
            _ => return Request::Invalid,
        };
        let host_len = match (kind, rest.first()) {
            (ADDRESS_IPV4, _) => 4,
            (ADDRESS_IPV6, _) => 16,
            (ADDRESS_NAME, Some(len)) => 1 + usize::from(*len),
            (ADDRESS_NAME, None) => return Request::Partial,
            // The length of such an address is unknown.
            _ => return Request::Refused(Reply::AddressTypeNotSupported),
        };
        let (Some(host), Some(port)) = (rest.get(..host_len), rest.get(host_len..host_len + 2))
        else {
            return Request::Partial;
        };
        let len = 4 + host_len + 2;
        let ports = match command {
            COMMAND_CONNECT => None,
            COMMAND_ANNOUNCE | COMMAND_ANNOUNCE_PRIVILEGED => match bytes[len..].first_chunk::<8>()
            {
                Some([a, b, c, d, e, f, g, h]) => Some((
                    u32::from_be_bytes([*a, *b, *c, *d]),
                    u32::from_be_bytes([*e, *f, *g, *h]),
                )),
                None => return Request::Partial,
            },
            _ => return Request::Refused(Reply::CommandNotSupported),
        };
        let host = match host {
            [a, b, c, d] if kind == ADDRESS_IPV4 => Ok(ipv4([*a, *b, *c, *d])),
            bytes if kind == ADDRESS_IPV6 => match <[u8; 16]>::try_from(bytes) {
                Ok(bytes) => Ok(ipv6(bytes)),
                Err(_) => return Request::Invalid,
            },
            // A name, behind its length.
            bytes => std::str::from_utf8(&bytes[1..])
                .map_err(|_| DestinationError::Host)
                .and_then(Host::parse),
        };
        let port = u16::from_be_bytes([port[0], port[1]]);
        match (host.and_then(|host| Destination::new(host, port)), ports) {
            (Ok(destination), None) => Request::Connect { destination, len },
            (Ok(destination), Some((own_port, port))) => Request::Announce {
                announcement: Announcement {
                    destination,
                    own_port,
                    port,
                    is_privileged: command == COMMAND_ANNOUNCE_PRIVILEGED,
                },
                len: len + 8,
            },
            (Err(error), _) => Request::BadDestination(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn named(name: &[u8], port: u16) -> Vec<u8> {
        let mut bytes = vec![5, 1, 0, 3, name.len() as u8];
        bytes.extend(name);
        bytes.extend(port.to_be_bytes());
        bytes
    }

    #[test]
    fn what_a_client_says_is_what_is_read() {
        let greeting = Greeting::Complete {
            without_authentication: true,
            len: GREETING.len(),
        };
        assert_eq!(Greeting::parse(&GREETING), greeting);
        for text in ["deb.debian.org:443", "192.0.2.7:1", "[2001:db8::7]:65535"] {
            let destination = Destination::parse(text).expect("a destination");
            let bytes = request(&destination);
            let len = bytes.len();
            let read = Request::Connect {
                destination: destination.clone(),
                len,
            };
            assert_eq!(Request::parse(&bytes), read);
            for is_privileged in [false, true] {
                let announcement = Announcement {
                    destination: destination.clone(),
                    own_port: 1023,
                    port: u32::MAX,
                    is_privileged,
                };
                let bytes = announcement.to_bytes();
                let len = bytes.len();
                for end in 0..len {
                    assert_eq!(Request::parse(&bytes[..end]), Request::Partial);
                }
                assert_eq!(
                    Request::parse(&bytes),
                    Request::Announce { announcement, len }
                );
            }
        }
        for byte in 0..=8 {
            let reply = Reply::from_byte(byte).expect("a reply").to_bytes();
            assert_eq!(reply[1], byte);
            let head = *reply.first_chunk().expect("five bytes");
            assert_eq!(reply_rest_len(head), Some(reply.len() - 5));
        }
        assert_eq!(Reply::from_byte(9), None);
        assert_eq!(reply_rest_len([5, 0, 0, 3, 9]), Some(11));
        assert_eq!(reply_rest_len([5, 0, 0, 4, 9]), Some(17));
        assert_eq!(reply_rest_len([4, 0, 0, 1, 9]), None);
    }

    #[test]
    fn a_greeting_offers_methods() {
        assert_eq!(
            Greeting::parse(&[5, 2, 2, 0, 99]),
            Greeting::Complete {
                without_authentication: true,
                len: 4
            }
        );
        assert_eq!(
            Greeting::parse(&[5, 1, 2]),
            Greeting::Complete {
                without_authentication: false,
                len: 3
            }
        );
        assert_eq!(
            Greeting::parse(&[5, 0]),
            Greeting::Complete {
                without_authentication: false,
                len: 2
            }
        );
        assert_eq!(Greeting::parse(&[4, 1]), Greeting::Invalid);
        let mut longest = vec![5, 255];
        longest.resize(MAX_GREETING_LEN - 1, 0);
        assert_eq!(Greeting::parse(&longest), Greeting::Partial);
        longest.push(0);
        assert_eq!(
            Greeting::parse(&longest),
            Greeting::Complete {
                without_authentication: true,
                len: MAX_GREETING_LEN
            }
        );
    }

    #[test]
    fn a_request_names_a_host_in_three_ways() {
        let mut bytes = named(b"Example.ORG", 443);
        let len = bytes.len();
        bytes.extend(b"payload");
        let destination = Destination::parse("example.org:443").expect("a destination");
        assert_eq!(
            Request::parse(&bytes),
            Request::Connect { destination, len }
        );

        let destination = Destination::parse("10.1.2.3:80").expect("a destination");
        assert_eq!(
            Request::parse(&[5, 1, 0, 1, 10, 1, 2, 3, 0, 80]),
            Request::Connect {
                destination,
                len: 10
            }
        );

        let mut bytes = vec![5, 1, 0, 4, 0x20, 0x01, 0x0d, 0xb8];
        bytes.extend([0; 11]);
        bytes.extend([1, 1, 187]);
        let destination = Destination::parse("[2001:db8::1]:443").expect("a destination");
        assert_eq!(
            Request::parse(&bytes),
            Request::Connect {
                destination,
                len: 22
            }
        );
    }

    #[test]
    fn an_address_sent_as_a_name_is_an_address() {
        let destination = Destination::parse("127.0.0.1:80").expect("a destination");
        assert!(matches!(
            Request::parse(&named(b"127.0.0.1", 80)),
            Request::Connect { destination: found, .. } if found == destination
        ));
    }

    #[test]
    fn what_is_not_offered_has_its_own_answer() {
        for command in [0, 2, 3, 255] {
            assert_eq!(
                Request::parse(&[5, command, 0, 1, 1, 2, 3, 4, 0, 80]),
                Request::Refused(Reply::CommandNotSupported)
            );
        }
        assert_eq!(
            Request::parse(&[5, 1, 0, 2]),
            Request::Refused(Reply::AddressTypeNotSupported)
        );
        for bytes in [&[4, 1, 0, 1][..], &[5, 1, 1, 1], &[5, 1, 7]] {
            assert_eq!(Request::parse(bytes), Request::Invalid, "{bytes:?}");
        }
        assert_eq!(
            Request::parse(&named(b"", 80)),
            Request::BadDestination(DestinationError::Host)
        );
        assert_eq!(
            Request::parse(&named(&[0xff], 80)),
            Request::BadDestination(DestinationError::Host)
        );
        assert_eq!(
            Request::parse(&named(b"a", 0)),
            Request::BadDestination(DestinationError::Port)
        );
    }

    #[test]
    fn a_request_may_arrive_in_any_pieces() {
        let bytes = named(b"example.org", 443);
        for end in 0..bytes.len() {
            assert_eq!(
                Request::parse(&bytes[..end]),
                Request::Partial,
                "{end} bytes"
            );
        }
        let longest = named(&[b'a'; 255], 80);
        assert_eq!(longest.len() + 8, MAX_REQUEST_LEN);
        assert_eq!(
            Request::parse(&longest[..longest.len() - 1]),
            Request::Partial
        );
        assert_ne!(Request::parse(&longest), Request::Partial);
    }

    proptest! {
        #[test]
        fn any_bytes_get_an_answer_that_stays(bytes in proptest::collection::vec(any::<u8>(), 0..300), cut in 0usize..300) {
            let shorter = &bytes[..cut.min(bytes.len())];
            if Request::parse(shorter) != Request::Partial {
                prop_assert_eq!(Request::parse(shorter), Request::parse(&bytes));
            }
            if Greeting::parse(shorter) != Greeting::Partial {
                prop_assert_eq!(Greeting::parse(shorter), Greeting::parse(&bytes));
            }
        }
    }
}
