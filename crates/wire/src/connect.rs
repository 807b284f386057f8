//! The handshake on a VM's host socket, as Firecracker made it common: the program sends `CONNECT <port>\n`, and is
//! answered `OK <host port>\n`; from then on the socket is the circuit. A refusal is `ERR <reason>\n`, and the socket
//! is closed.

use std::fmt;
use std::path::{Path, PathBuf};

/// The longest request, in bytes with its line feed: `CONNECT 4294967295` and some room for spaces.
pub const MAX_REQUEST_LEN: usize = 32;

/// The path of the listener for programs that dial a guest with SEQPACKET sockets.
pub fn seqpacket_path(host: &Path) -> PathBuf {
    let mut path = host.as_os_str().to_owned();
    path.push(".seqpacket");
    PathBuf::from(path)
}

/// What the first bytes on a host socket say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Nothing is wrong yet, and nothing is complete.
    Partial,
    /// A request for this port, which takes up this many bytes. What follows belongs to the circuit.
    Connect {
        /// The guest's port.
        port: u32,
        /// The request's length in bytes, its line feed included.
        len: usize,
    },
    /// This is no request.
    Invalid(RequestError),
}

/// What is wrong with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestError {
    /// Another word than `CONNECT`.
    Verb,
    /// Not a port.
    Port,
    /// No line feed among the first [`MAX_REQUEST_LEN`] bytes.
    TooLong,
}

impl fmt::Display for RequestError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            RequestError::Verb => "expected \"CONNECT <port>\"",
            RequestError::Port => "expected a port from 0 to 4294967294 after CONNECT",
            RequestError::TooLong => "expected \"CONNECT <port>\" and a line feed within 32 bytes",
        })
    }
}

const VERB: &[u8] = b"CONNECT ";

impl Request {
    /// Reads the request at the start of `bytes`, which may go on beyond it, or end before it does.
    pub fn parse(bytes: &[u8]) -> Request {
        let verb = &bytes[..bytes.len().min(VERB.len())];
        if !VERB.starts_with(verb) {
            return Request::Invalid(RequestError::Verb);
        }
        let line = &bytes[..bytes.len().min(MAX_REQUEST_LEN)];
        let Some(end) = line.iter().position(|byte| *byte == b'\n') else {
            return match line.len() < MAX_REQUEST_LEN {
                true => Request::Partial,
                false => Request::Invalid(RequestError::TooLong),
            };
        };
        // A line feed inside the verb would not have been a prefix of it, so the verb is whole here.
        match parse_port(&line[VERB.len()..end]) {
            Some(port) => Request::Connect { port, len: end + 1 },
            None => Request::Invalid(RequestError::Port),
        }
    }
}

/// Length of the header of a vhost-user message: its request's number, its flags, and how many bytes follow.
const VHOST_USER_HEADER_LEN: usize = 12;
/// Above every request's number and every message's length that a VMM begins with.
const MAX_VHOST_USER_REQUEST: u32 = 64;
const MAX_VHOST_USER_LEN: u32 = 4096;

/// Whether `bytes` begin with the header of a vhost-user request, version 1, with or without the flag that asks for an acknowledgement: a VMM has
/// connected to the wrong socket.
pub fn is_vhost_user(bytes: &[u8]) -> bool {
    const NEEDS_REPLY: u32 = 1 << 3;
    let Some(header) = bytes.first_chunk::<VHOST_USER_HEADER_LEN>() else {
        return false;
    };
    let [request, flags, len] = [0, 4, 8].map(|at| {
        let mut number = [0; 4];
        number.copy_from_slice(&header[at..at + 4]);
        u32::from_le_bytes(number)
    });
    (1..=MAX_VHOST_USER_REQUEST).contains(&request)
        && flags & !NEEDS_REPLY == 1
        && len <= MAX_VHOST_USER_LEN
}

/// What a VMM that speaks this convention has answered to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Nothing is wrong yet, and nothing is complete.
    Partial,
    /// The guest has taken the call. The answer takes up this many bytes; what follows belongs to the circuit.
    Accepted {
        /// The answer's length in bytes, its line feed included.
        len: usize,
    },
    /// A refusal, or something else that no VMM says.
    Refused,
}

const ACCEPTED: &[u8] = b"OK ";

impl Answer {
    /// Reads the answer at the start of `bytes`, which may go on beyond it, or end before it does. It is no longer than
    /// [`MAX_REQUEST_LEN`].
    pub fn parse(bytes: &[u8]) -> Answer {
        let word = &bytes[..bytes.len().min(ACCEPTED.len())];
        if !ACCEPTED.starts_with(word) {
            return Answer::Refused;
        }
        let line = &bytes[..bytes.len().min(MAX_REQUEST_LEN)];
        let Some(end) = line.iter().position(|byte| *byte == b'\n') else {
            return match line.len() < MAX_REQUEST_LEN {
                true => Answer::Partial,
                false => Answer::Refused,
            };
        };
        let number = line[ACCEPTED.len()..end].trim_ascii();
        match !number.is_empty() && number.iter().all(u8::is_ascii_digit) {
            true => Answer::Accepted { len: end + 1 },
            false => Answer::Refused,
        }
    }
}

/// The request for this port.
pub fn request(port: u32) -> String {
    format!("CONNECT {port}\n")
}

/// A decimal port between optional spaces, with an optional carriage return at the end, as lenient as Firecracker.
fn parse_port(bytes: &[u8]) -> Option<u32> {
    let digits = bytes.trim_ascii();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let port = std::str::from_utf8(digits).ok()?.parse().ok()?;
    // The highest number is VMADDR_PORT_ANY, which cannot be called.
    (port != u32::MAX).then_some(port)
}

/// The answer to a request that was granted.
pub fn accepted(host_port: u32) -> String {
    format!("OK {host_port}\n")
}

/// The answer to a request that was refused. The reason is one line of words.
pub fn refused(reason: impl fmt::Display) -> String {
    format!("ERR {reason}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_ends_at_its_line_feed_and_what_follows_is_payload() {
        assert_eq!(
            Request::parse(b"CONNECT 1234\nhello"),
            Request::Connect {
                port: 1234,
                len: 13
            }
        );
        assert_eq!(
            Request::parse(b"CONNECT 0\n"),
            Request::Connect { port: 0, len: 10 }
        );
        assert_eq!(
            Request::parse(b"CONNECT 22\r\n"),
            Request::Connect { port: 22, len: 12 }
        );
        assert_eq!(
            Request::parse(b"CONNECT 4294967294\n\n"),
            Request::Connect {
                port: u32::MAX - 1,
                len: 19
            }
        );
    }

    #[test]
    fn a_request_may_arrive_in_any_pieces() {
        let whole = b"CONNECT 5432\n";
        for end in 0..whole.len() {
            assert_eq!(
                Request::parse(&whole[..end]),
                Request::Partial,
                "{end} bytes"
            );
        }
    }

    #[test]
    fn garbage_is_refused_as_soon_as_it_is_seen() {
        for bytes in [
            &b"G"[..],
            b"GET / HTTP/1.1",
            b"connect 1\n",
            b"CONNECT\n",
            b"\n",
            b"CONNECTS 1\n",
        ] {
            assert_eq!(
                Request::parse(bytes),
                Request::Invalid(RequestError::Verb),
                "{bytes:?}"
            );
        }
        for bytes in [
            &b"CONNECT \n"[..],
            b"CONNECT x\n",
            b"CONNECT -1\n",
            b"CONNECT +1\n",
            b"CONNECT 1 2\n",
            b"CONNECT 4294967295\n",
            b"CONNECT 99999999999\n",
        ] {
            assert_eq!(
                Request::parse(bytes),
                Request::Invalid(RequestError::Port),
                "{bytes:?}"
            );
        }
    }

    #[test]
    fn a_vmm_at_the_wrong_socket_is_known_by_its_first_header() {
        let header = |request: u32, flags: u32, len: u32| {
            [request, flags, len].map(u32::to_le_bytes).concat()
        };
        for bytes in [
            header(1, 1, 0),
            header(3, 1, 0),
            header(2, 9, 8),
            [header(2, 1, 8), vec![0; 8]].concat(),
        ] {
            assert!(is_vhost_user(&bytes), "{bytes:?}");
            assert_eq!(Request::parse(&bytes), Request::Invalid(RequestError::Verb));
        }
        for bytes in [
            header(0, 1, 0),
            header(65, 1, 0),
            header(1, 0, 0),
            header(1, 2, 0),
            header(1, 5, 8),
            header(1, 1, 4097),
            header(1, 1, 0)[..11].to_vec(),
            b"CONNECT 1234\n".to_vec(),
            b"GET / HTTP/1.1\r\n".to_vec(),
        ] {
            assert!(!is_vhost_user(&bytes), "{bytes:?}");
        }
    }

    #[test]
    fn the_longest_request_is_as_long_as_stated() {
        let mut bytes = b"CONNECT ".to_vec();
        bytes.resize(MAX_REQUEST_LEN - 2, b' ');
        bytes.push(b'7');
        assert_eq!(Request::parse(&bytes), Request::Partial);
        bytes.push(b'\n');
        assert_eq!(bytes.len(), MAX_REQUEST_LEN);
        assert_eq!(
            Request::parse(&bytes),
            Request::Connect {
                port: 7,
                len: MAX_REQUEST_LEN
            }
        );
        bytes.insert(8, b' ');
        assert_eq!(
            Request::parse(&bytes),
            Request::Invalid(RequestError::TooLong)
        );
    }

    #[test]
    fn an_answer_may_arrive_in_any_pieces_and_ends_at_its_line_feed() {
        let whole = b"OK 1073741824\npayload";
        for end in 0..14 {
            assert_eq!(Answer::parse(&whole[..end]), Answer::Partial, "{end} bytes");
        }
        for end in 14..whole.len() {
            assert_eq!(Answer::parse(&whole[..end]), Answer::Accepted { len: 14 });
        }
        assert_eq!(Answer::parse(b"OK 5\r\n"), Answer::Accepted { len: 6 });
    }

    #[test]
    fn what_is_no_acceptance_is_a_refusal() {
        for bytes in [
            &b"ERR no rule allows it\n"[..],
            b"K",
            b"ok 1\n",
            b"OK\n",
            b"OK \n",
            b"OK -1\n",
            b"OK 1 2\n",
            b"OK 11111111111111111111111111111",
            b"\0",
        ] {
            assert_eq!(Answer::parse(bytes), Answer::Refused, "{bytes:?}");
        }
        let longest = b"OK 1111111111111111111111111111\n";
        assert_eq!(longest.len(), MAX_REQUEST_LEN);
        assert_eq!(
            Answer::parse(longest),
            Answer::Accepted {
                len: MAX_REQUEST_LEN
            }
        );
        assert_eq!(Answer::parse(&longest[..31]), Answer::Partial);
    }

    proptest! {
        #[test]
        fn any_answer_is_understood_in_a_way_that_stays(bytes in proptest::collection::vec(any::<u8>(), 0..64), cut in 0usize..64) {
            let shorter = Answer::parse(&bytes[..cut.min(bytes.len())]);
            if shorter != Answer::Partial {
                prop_assert_eq!(shorter, Answer::parse(&bytes));
            }
        }

        #[test]
        fn any_bytes_get_an_answer_that_stays(bytes in proptest::collection::vec(any::<u8>(), 0..64), cut in 0usize..64) {
            let answer = Request::parse(&bytes);
            let shorter = Request::parse(&bytes[..cut.min(bytes.len())]);
            // Once something has been said, more bytes do not unsay it.
            if shorter != Request::Partial {
                prop_assert_eq!(shorter, answer);
            }
        }
    }
}
