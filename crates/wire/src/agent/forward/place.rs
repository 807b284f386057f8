//! Where programs are, and how people write it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{MAX_HOST_LEN, MAX_PATH_LEN};
use crate::agent::Invalid;
use crate::agent::body::{check_len, check_no_zero};

/// Where programs of the guest listen, or are to find the host's.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Place {
    /// A TCP port.
    Tcp {
        /// A name or an address as the guest knows it. To listen: one of its own addresses.
        host: String,
        /// The port. To listen, 0 stands for any that is free.
        port: u16,
    },
    /// A UNIX stream socket, by its path.
    Unix {
        /// The path, absolute.
        path: Vec<u8>,
    },
}

/// As people write it. What a guest says is to be shown without control characters.
impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Tcp { host, port } if host.contains(':') => write!(formatter, "[{host}]:{port}"),
            Place::Tcp { host, port } => write!(formatter, "{host}:{port}"),
            Place::Unix { path } => write!(formatter, "{}", String::from_utf8_lossy(path)),
        }
    }
}

impl Place {
    /// Reads where a program of the guest listens: `tcp:PORT` of 127.0.0.1, `tcp:HOST:PORT` with an IPv6 address in brackets, or `unix:PATH`.
    pub fn parse(text: &str) -> Option<Place> {
        match text.split_once(':')? {
            ("tcp", address) => {
                let mut words = split_places(address)?;
                if words.len() == 1 {
                    words.insert(0, "127.0.0.1");
                }
                let place = Place::take_target(&mut words)?;
                let is_tcp = matches!(place, Place::Tcp { .. });
                (is_tcp && words.is_empty()).then_some(place)
            }
            ("unix", path) => Place::unix(path),
            _ => None,
        }
    }

    /// Takes what can be connected to from the end of words: `HOST` and `PORT`, or a path.
    pub fn take_target(words: &mut Vec<&str>) -> Option<Place> {
        let last = words.pop()?;
        if last.starts_with('/') {
            return Place::unix(last);
        }
        let port = parse_port(last).filter(|port| *port > 0)?;
        Place::tcp(words.pop()?, port)
    }

    /// Takes where can be listened from the end of words: a port, with an address before it if there is one more word, or a path.
    pub fn take_listener(words: &mut Vec<&str>) -> Option<Place> {
        let last = words.pop()?;
        if last.starts_with('/') {
            return Place::unix(last);
        }
        let port = parse_port(last)?;
        match words.pop() {
            None => Place::tcp("127.0.0.1", port),
            // As for ssh: all addresses.
            Some("" | "*") => Place::tcp("0.0.0.0", port),
            Some(address) => Place::tcp(address, port),
        }
    }

    fn tcp(host: &str, port: u16) -> Option<Place> {
        let is_host = (1..=MAX_HOST_LEN).contains(&host.len())
            && host.bytes().all(|byte| byte.is_ascii_graphic())
            && !host.starts_with('/');
        let host = host.to_owned();
        is_host.then_some(Place::Tcp { host, port })
    }

    fn unix(path: &str) -> Option<Place> {
        let path = path.as_bytes().to_vec();
        let place = Place::Unix { path };
        place.check(false).is_ok().then_some(place)
    }

    pub(super) fn check(&self, any_port: bool) -> Result<(), Invalid> {
        match self {
            Place::Tcp { host, port } => {
                if host.is_empty() {
                    return Err(Invalid::Empty("the name of a host"));
                }
                if *port == 0 && !any_port {
                    return Err(Invalid::OutOfRange {
                        what: "the port",
                        value: 0,
                        expected: "1 to 65535",
                    });
                }
                check_len("the name of a host", host.as_bytes(), MAX_HOST_LEN)?;
                check_no_zero("the name of a host", host.as_bytes())
            }
            Place::Unix { path } => {
                if path.first() != Some(&b'/') {
                    return Err(Invalid::Relative("the path of a socket"));
                }
                check_len("the path of a socket", path, MAX_PATH_LEN)?;
                check_no_zero("the path of a socket", path)
            }
        }
    }
}

/// The parts of one place or two between colons. Those in brackets may have colons.
pub fn split_places(text: &str) -> Option<Vec<&str>> {
    let mut words = Vec::new();
    let mut rest = Some(text);
    while let Some(text) = rest {
        let (word, behind) = match text.strip_prefix('[') {
            Some(inside) => inside.split_once(']')?,
            None => text.split_at(text.find(':').unwrap_or(text.len())),
        };
        words.push(word);
        rest = match behind {
            "" => None,
            behind => Some(behind.strip_prefix(':')?),
        };
    }
    Some(words)
}

/// Digits alone: a sign is none.
fn parse_port(text: &str) -> Option<u16> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Place {
        let host = host.to_owned();
        Place::Tcp { host, port }
    }

    fn unix(path: &str) -> Place {
        let path = path.as_bytes().to_vec();
        Place::Unix { path }
    }

    #[test]
    fn places_are_written_as_people_do() {
        assert_eq!(tcp("web", 80).to_string(), "web:80");
        assert_eq!(tcp("::1", 80).to_string(), "[::1]:80");
        assert_eq!(unix("/run/db").to_string(), "/run/db");
    }

    #[test]
    fn places_are_read_up_to_their_limits() {
        let host = "h".repeat(MAX_HOST_LEN);
        let path = format!("/{}", "p".repeat(MAX_PATH_LEN - 1));
        let cases = [
            ("tcp:80".to_owned(), tcp("127.0.0.1", 80)),
            ("tcp:1".to_owned(), tcp("127.0.0.1", 1)),
            ("tcp:65535".to_owned(), tcp("127.0.0.1", 65535)),
            ("tcp:10.0.0.7:80".to_owned(), tcp("10.0.0.7", 80)),
            ("tcp:localhost:80".to_owned(), tcp("localhost", 80)),
            ("tcp:[::1]:80".to_owned(), tcp("::1", 80)),
            (format!("tcp:{host}:80"), tcp(&host, 80)),
            (format!("unix:{path}"), unix(&path)),
            ("unix:/run/a:b".to_owned(), unix("/run/a:b")),
        ];
        for (text, place) in cases {
            assert_eq!(Place::parse(&text), Some(place), "{text}");
        }
        for wrong in [
            "",
            "80",
            "tcp",
            "tcp:",
            "tcp:0",
            "tcp:65536",
            "tcp:+80",
            "tcp:http",
            "tcp::80",
            "tcp:[::1]",
            "tcp:::1:80",
            "tcp:a:b:80",
            "tcp:a b:80",
            "tcp:/run/x",
            "tcp:a:/run/x",
            "udp:53",
            "unix:",
            "unix:run/x",
            "unix:/a\0b",
            "web:80",
        ] {
            assert_eq!(Place::parse(wrong), None, "{wrong:?}");
        }
        for wrong in [format!("tcp:{host}h:80"), format!("unix:{path}p")] {
            assert_eq!(Place::parse(&wrong), None, "{wrong:?}");
        }
    }
}
