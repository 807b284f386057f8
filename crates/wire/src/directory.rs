//! The directory port: a guest asks the host for names, in lines that any program can speak.
//!
//! A guest dials CID 2 at [`PORT`] and sends requests, each a line; each is answered by one line, in order, until the guest
//! closes. Words are separated by one space, and a line ends with a line feed (a carriage return before it is ignored).
//!
//! | request | answer | meaning |
//! |---|---|---|
//! | `RESOLVE db` | `OK 4` | the CID by which this guest reaches the VM `db` of its domain |
//! | `RESOLVE blue/db` | `OK 4294963201` | the same for a VM of another domain: a CID of its own here |
//! | `SERVICE registry` | `OK 2 5000` | CID and port of a service of this guest's domain |
//! | `WHOAMI` | `OK web default 3` | the guest's name, domain and CID |
//! | anything else, or what this guest may not know | `ERR words` | why there is no answer |
//!
//! Only a guest that may call a name gets its address, so `ERR` does not show whether the name exists.

use std::fmt;

/// The port of CID 2. Like the agent's it is privileged, so that no ordinary program of a host could squat it.
pub const PORT: u32 = 1006;

/// The longest line of either side, in bytes with its line feed.
pub const MAX_LINE_LEN: usize = 256;

/// The longest name, in bytes: a domain, a slash and a name of 63 bytes each.
pub const MAX_NAME_LEN: usize = 63 + 1 + 63;

/// A line at the start of what was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line<'a> {
    /// It has no end yet.
    Partial,
    /// It is whole.
    Complete {
        /// The line, without its end.
        text: &'a [u8],
        /// How many bytes it takes up, with its end.
        len: usize,
    },
    /// It has no end among the first [`MAX_LINE_LEN`] bytes.
    TooLong,
}

impl<'a> Line<'a> {
    /// The line at the start of `bytes`, which may go on beyond it, or end before it does.
    pub fn split(bytes: &'a [u8]) -> Line<'a> {
        Line::split_within(bytes, MAX_LINE_LEN)
    }

    /// The same for lines of other protocols, with a length of their own.
    pub(crate) fn split_within(bytes: &'a [u8], max_line_len: usize) -> Line<'a> {
        let window = &bytes[..bytes.len().min(max_line_len)];
        match window.iter().position(|byte| *byte == b'\n') {
            Some(end) => Line::Complete {
                text: window[..end].strip_suffix(b"\r").unwrap_or(&window[..end]),
                len: end + 1,
            },
            None if window.len() < max_line_len => Line::Partial,
            None => Line::TooLong,
        }
    }
}

/// What a guest asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// By which CID a VM is called.
    Resolve {
        /// Its name, with its domain if it has another: `db`, `blue/db`.
        name: String,
    },
    /// At which port a service is called.
    Service {
        /// Its name in the guest's own domain.
        name: String,
    },
    /// The guest.
    WhoAmI,
}

/// Why a line is no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Another word at its start, or too few or too many words.
    #[error("expected RESOLVE name, SERVICE name or WHOAMI")]
    Words,
    /// A name that is not valid.
    #[error(
        "a name has 1 to 63 of the characters a-z, 0-9, '.', '_' and '-', after a domain and '/' if it is of another"
    )]
    Name,
}

impl Request {
    /// Reads a line without its end.
    pub fn parse(line: &[u8]) -> Result<Request, RequestError> {
        let line = std::str::from_utf8(line).map_err(|_| RequestError::Words)?;
        let (verb, name) = match line.split_once(' ') {
            Some((verb, name)) => (verb, Some(name)),
            None => (line, None),
        };
        match (verb, name) {
            ("WHOAMI", None) => Ok(Request::WhoAmI),
            ("RESOLVE", Some(name)) if is_full_name(name) => Ok(Request::Resolve {
                name: name.to_owned(),
            }),
            ("RESOLVE", Some(_)) => Err(RequestError::Name),
            ("SERVICE", Some(name)) if is_name(name) => Ok(Request::Service {
                name: name.to_owned(),
            }),
            ("SERVICE", Some(_)) => Err(RequestError::Name),
            _ => Err(RequestError::Words),
        }
    }
}

impl fmt::Display for Request {
    /// The line, with its end.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Resolve { name } => writeln!(formatter, "RESOLVE {name}"),
            Request::Service { name } => writeln!(formatter, "SERVICE {name}"),
            Request::WhoAmI => writeln!(formatter, "WHOAMI"),
        }
    }
}

/// A VM's name, or a domain, a slash and the name of a VM there.
pub(crate) fn is_full_name(name: &str) -> bool {
    match name.split_once('/') {
        Some((domain, inside)) => is_name(domain) && is_name(inside),
        None => is_name(name),
    }
}

/// The names of VMs, services and domains.
fn is_name(name: &str) -> bool {
    let inner = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'_' | b'-')
    };
    (1..=63).contains(&name.len())
        && name.bytes().all(inner)
        && name.as_bytes()[0].is_ascii_alphanumeric()
}

/// What the host answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The words behind `OK`.
    Ok(String),
    /// The words behind `ERR`.
    Error(String),
}

impl Answer {
    /// Reads a line without its end. There is none in a line that is no answer.
    pub fn parse(line: &[u8]) -> Option<Answer> {
        let line = std::str::from_utf8(line).ok()?;
        // Printed on terminals: control characters are none of the protocol's.
        if line.chars().any(char::is_control) {
            return None;
        }
        match line.split_once(' ')? {
            ("OK", words) => Some(Answer::Ok(words.to_owned())),
            ("ERR", words) => Some(Answer::Error(words.to_owned())),
            _ => None,
        }
    }
}

impl fmt::Display for Answer {
    /// The line, with its end; never longer than [`MAX_LINE_LEN`].
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verb, words) = match self {
            Answer::Ok(words) => ("OK", words),
            Answer::Error(words) => ("ERR", words),
        };
        let mut end = words.len().min(MAX_LINE_LEN - verb.len() - " \n".len());
        while !words.is_char_boundary(end) {
            end -= 1;
        }
        writeln!(formatter, "{verb} {}", &words[..end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_line_ends_at_its_line_feed() {
        assert_eq!(
            Line::split(b"WHOAMI\nx"),
            Line::Complete {
                text: b"WHOAMI",
                len: 7
            }
        );
        assert_eq!(
            Line::split(b"WHOAMI\r\n"),
            Line::Complete {
                text: b"WHOAMI",
                len: 8
            }
        );
        assert_eq!(Line::split(b"\n"), Line::Complete { text: b"", len: 1 });
        assert_eq!(Line::split(b"WHO"), Line::Partial);
        assert_eq!(Line::split(b""), Line::Partial);
    }

    #[test]
    fn the_longest_line_is_as_long_as_stated() {
        let mut line = vec![b'a'; MAX_LINE_LEN - 1];
        assert_eq!(Line::split(&line), Line::Partial);
        line.push(b'\n');
        assert!(matches!(
            Line::split(&line),
            Line::Complete {
                len: MAX_LINE_LEN,
                ..
            }
        ));
        line.insert(0, b'a');
        assert_eq!(Line::split(&line), Line::TooLong);
        let longest = Request::Resolve {
            name: format!("{0}/{0}", "a".repeat(63)),
        };
        assert!(longest.to_string().len() <= MAX_LINE_LEN);
    }

    #[test]
    fn requests_are_read_as_they_are_written() {
        for request in [
            Request::WhoAmI,
            Request::Resolve {
                name: "db".to_owned(),
            },
            Request::Resolve {
                name: "blue/db-1.x_y".to_owned(),
            },
            Request::Service {
                name: "registry".to_owned(),
            },
        ] {
            let line = request.to_string();
            let Line::Complete { text, len } = Line::split(line.as_bytes()) else {
                panic!("{line:?} is no line");
            };
            assert_eq!(len, line.len());
            assert_eq!(Request::parse(text), Ok(request));
        }
    }

    #[test]
    fn other_lines_are_refused() {
        for line in [
            "", "WHOAMI ", "WHOAMI x", "whoami", "RESOLVE", "SERVICE", "HELP", "\u{e9}",
        ] {
            assert_eq!(
                Request::parse(line.as_bytes()),
                Err(RequestError::Words),
                "{line:?}"
            );
        }
        let long = format!("RESOLVE {}", "a".repeat(64));
        for line in [
            "RESOLVE ",
            "RESOLVE  db",
            "RESOLVE DB",
            "RESOLVE -x",
            "RESOLVE a/b/c",
            "RESOLVE /b",
            "RESOLVE a/",
            "SERVICE a/b",
            "RESOLVE db ",
            &long,
        ] {
            assert_eq!(
                Request::parse(line.as_bytes()),
                Err(RequestError::Name),
                "{line:?}"
            );
        }
        assert_eq!(Request::parse(&[0xff, 0xfe]), Err(RequestError::Words));
    }

    #[test]
    fn answers_fit_into_a_line() {
        let answer = Answer::Error("\u{e9}".repeat(400));
        let line = answer.to_string();
        assert!(
            line.len() <= MAX_LINE_LEN && line.len() >= MAX_LINE_LEN - 1,
            "{}",
            line.len()
        );
        assert_eq!(
            Answer::parse(b"OK 2 5000"),
            Some(Answer::Ok("2 5000".to_owned()))
        );
        assert_eq!(
            Answer::parse(b"ERR no"),
            Some(Answer::Error("no".to_owned()))
        );
        for line in [
            &b"OK"[..],
            b"",
            b"NO x",
            b"OK \x1b[2J",
            &[b'O', b'K', b' ', 0xff],
        ] {
            assert_eq!(Answer::parse(line), None, "{line:?}");
        }
    }

    proptest! {
        #[test]
        fn any_line_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Line::Complete { text, len } = Line::split(&bytes) {
                prop_assert!(len <= MAX_LINE_LEN && text.len() < len);
                if let Ok(request) = Request::parse(text) {
                    prop_assert_eq!(Request::parse(request.to_string().trim_end().as_bytes()), Ok(request));
                }
                let _ = Answer::parse(text);
            }
        }
    }
}
