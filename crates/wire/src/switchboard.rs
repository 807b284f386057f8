//! Setting up zero-copy circuits: the protocol between programs and their switchboard.
//!
//! A *switchboard* gives circuits to programs: in a guest its agent, on the host the daemon. Both have the same protocol for programs, at a UNIX
//! socket ([`program`]). The agent and the daemon have a connection of their own, over which the daemon decides and assigns the windows ([`link`]).
//!
//! Both protocols are lines of printable ASCII: a verb, and then fields in any order, each `key=value` and each once, all with one space between them and with a line feed
//! at their end. A line has at most [`MAX_LINE_LEN`] bytes. What is not known is refused and never passed over: not to understand
//! half of a line is not to know what it asks for.
//!
//! ```
//! use wire::switchboard::program::Request;
//! use wire::switchboard::{Kind, Place};
//!
//! let request = Request::parse(b"CONNECT to=blue/db:5432 kind=bytes ring=2097152").unwrap();
//! let expected = Request::Connect { to: Place::parse("blue/db:5432").unwrap(), kind: Kind::Bytes, ring: 2 << 20 };
//! assert_eq!(request, expected);
//! assert_eq!(request.to_string(), "CONNECT to=blue/db:5432 kind=bytes ring=2097152\n");
//! ```

use std::fmt;

use crate::directory::{self, Line};

#[macro_use]
mod messages;

pub mod link;
pub mod program;
pub mod window;

#[cfg(test)]
mod tests;

/// The longest line, in bytes with its line feed.
pub const MAX_LINE_LEN: usize = 512;

/// The least that a ring may have, in bytes. As `shmring` has it.
pub const MIN_RING_LEN: u64 = 4096;

/// The most that a ring may have, in bytes.
pub const MAX_RING_LEN: u64 = 1 << 30;

/// The highest generation of a window: it shares a word with eight bits of state.
pub const MAX_GENERATION: u64 = (1 << 56) - 1;

/// The largest pages that a window may have, in bytes.
pub const MAX_PAGE_LEN: u64 = 1 << 30;

/// Why a line was not understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// A byte that no line has.
    #[error("expected a line of printable ASCII")]
    Characters,
    /// Another verb.
    #[error("expected a line that begins with {expected}")]
    Verb {
        /// The verbs there are.
        expected: &'static str,
    },
    /// A word that is no `key=value`.
    #[error("expected key=value with one space in between")]
    Word,
    /// A field is not there.
    #[error("expected a field {key}=")]
    Missing {
        /// Which.
        key: &'static str,
    },
    /// A field says what it cannot say.
    #[error("expected {expected} in the field {key}=")]
    Value {
        /// Which.
        key: &'static str,
        /// What it can say.
        expected: &'static str,
    },
    /// A field that this line does not have, or has twice.
    #[error("expected each field once, and none that this line does not have")]
    Surplus,
}

/// What the bytes in a circuit are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A stream.
    Bytes,
    /// Messages, each with its length before it.
    Records,
}

impl Kind {
    const EXPECTED: &'static str = "bytes or records";

    fn parse(text: &str) -> Option<Kind> {
        match text {
            "bytes" => Some(Kind::Bytes),
            "records" => Some(Kind::Records),
            _ => None,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Kind::Bytes => "bytes",
            Kind::Records => "records",
        })
    }
}

/// One of the two sides of a window. The caller is the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Writes into the first ring.
    First,
    /// Writes into the second ring.
    Second,
}

impl Side {
    const EXPECTED: &'static str = "first or second";

    fn parse(text: &str) -> Option<Side> {
        match text {
            "first" => Some(Side::First),
            "second" => Some(Side::Second),
            _ => None,
        }
    }

    /// The peer's.
    pub const fn other(self) -> Side {
        match self {
            Side::First => Side::Second,
            Side::Second => Side::First,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Side::First => "first",
            Side::Second => "second",
        })
    }
}

/// Sixteen bytes as 32 hexadecimal digits: a window's name (the UUID in its info block), or a nonce.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hex16(pub [u8; 16]);

impl Hex16 {
    const EXPECTED: &'static str = "32 hexadecimal digits in lower case";

    /// Reads 32 digits, in lower case only.
    pub fn parse(text: &str) -> Option<Hex16> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 32 || !text.bytes().all(is_digit) {
            return None;
        }
        u128::from_str_radix(text, 16)
            .ok()
            .map(|number| Hex16(number.to_be_bytes()))
    }

    /// Reads what the kernel writes into a device's `uuid`: the same digits with hyphens, and perhaps a line feed behind them.
    pub fn parse_hyphenated(text: &str) -> Option<Hex16> {
        let text = text.trim_end();
        let is_hyphenated = text.len() == 36
            && text
                .bytes()
                .enumerate()
                .all(|(index, byte)| (byte == b'-') == matches!(index, 8 | 13 | 18 | 23));
        match is_hyphenated {
            true => Hex16::parse(&text.replace('-', "")),
            false => None,
        }
    }
}

impl fmt::Display for Hex16 {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Hex16 {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// A party and a port there: `db:5432`, `blue/db:5432`, `4:5432`, `host:5432`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    name: String,
    port: u32,
}

impl Place {
    /// What is expected where a place stands.
    pub const EXPECTED: &'static str = "NAME:PORT, as in db:5432, blue/db:5432, 4:5432 (a CID) or host:5432, with a port from 0 to 4294967294";

    /// A name and a port; `None` if the name or the port is not valid.
    pub fn new(name: impl Into<String>, port: u32) -> Option<Place> {
        let name = name.into();
        match directory::is_full_name(&name) && port != u32::MAX {
            true => Some(Place { name, port }),
            false => None,
        }
    }

    /// Reads `NAME:PORT`.
    pub fn parse(text: &str) -> Option<Place> {
        let (name, port) = text.rsplit_once(':')?;
        Place::new(name, number(port)?)
    }

    /// A VM's name, with its domain before a slash if it has another; a CID; or `host`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The vsock port.
    pub fn port(&self) -> u32 {
        self.port
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.name, self.port)
    }
}

/// Lines as they come from a socket: whatever is read is put in here, and taken out line by line. It holds no more than [`MAX_LINE_LEN`] bytes beyond those that were asked for.
///
/// ```
/// use wire::switchboard::Lines;
///
/// let mut lines = Lines::new();
/// let said = b"HELLO version=1\nUNLIS";
/// lines.space()[..said.len()].copy_from_slice(said);
/// lines.filled(said.len());
/// assert_eq!(lines.next_line().unwrap(), Some(&b"HELLO version=1"[..]));
/// assert_eq!(lines.next_line().unwrap(), None);
/// ```
#[derive(Debug)]
pub struct Lines {
    buffer: Box<[u8; 2 * MAX_LINE_LEN]>,
    start: usize,
    end: usize,
}

/// A line that does not end within [`MAX_LINE_LEN`] bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a line of at most {MAX_LINE_LEN} bytes")]
pub struct LineTooLong;

impl Default for Lines {
    fn default() -> Lines {
        Lines::new()
    }
}

impl Lines {
    /// Nothing yet.
    pub fn new() -> Lines {
        Lines {
            buffer: Box::new([0; 2 * MAX_LINE_LEN]),
            start: 0,
            end: 0,
        }
    }

    /// Where more can be read into. It is never empty once [`next_line`](Self::next_line) has said that there is no line.
    pub fn space(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        &mut self.buffer[self.end..]
    }

    /// So many bytes were read into the [`space`](Self::space).
    ///
    /// # Panics
    /// If there was no space for so many.
    pub fn filled(&mut self, len: usize) {
        assert!(
            len <= self.buffer.len() - self.end,
            "{len} bytes are more than there was space for"
        );
        self.end += len;
    }

    /// The next whole line, without its end.
    ///
    /// # Errors
    /// [`LineTooLong`], from then on always.
    pub fn next_line(&mut self) -> Result<Option<&[u8]>, LineTooLong> {
        match Line::split_within(&self.buffer[self.start..self.end], MAX_LINE_LEN) {
            Line::Complete { text, len } => {
                self.start += len;
                Ok(Some(text))
            }
            Line::Partial => Ok(None),
            Line::TooLong => Err(LineTooLong),
        }
    }

    /// Whether a line has begun that has not ended.
    pub fn is_inside_line(&self) -> bool {
        self.start < self.end
    }
}

/// A line's verb and its fields, which are taken out one after the other.
struct Fields<'a> {
    verb: &'a str,
    /// No more than half as many as a line has bytes.
    fields: Vec<(&'a str, &'a str)>,
}

impl<'a> Fields<'a> {
    /// All words are fields.
    fn parse(line: &'a [u8]) -> Result<Fields<'a>, LineError> {
        let (verb, rest) = split_verb(line)?;
        let field = |word: &'a str| word.split_once('=').ok_or(LineError::Word);
        let fields = match rest {
            Some(rest) => rest.split(' ').map(field).collect::<Result<_, _>>()?,
            None => Vec::new(),
        };
        Ok(Fields { verb, fields })
    }

    fn take_optional<T>(
        &mut self,
        key: &'static str,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, LineError> {
        let Some(index) = self.fields.iter().position(|(known, _)| *known == key) else {
            return Ok(None);
        };
        let (_, value) = self.fields.swap_remove(index);
        match parse(value) {
            Some(value) => Ok(Some(value)),
            None => Err(LineError::Value { key, expected }),
        }
    }

    fn take<T>(
        &mut self,
        key: &'static str,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, LineError> {
        self.take_optional(key, expected, parse)?
            .ok_or(LineError::Missing { key })
    }

    fn port(&mut self, key: &'static str) -> Result<u32, LineError> {
        self.take(key, "a port from 0 to 4294967294", |text| {
            number(text).filter(|port| *port != u32::MAX)
        })
    }

    fn number<T: std::str::FromStr>(&mut self, key: &'static str) -> Result<T, LineError> {
        self.take(key, "a number", number)
    }

    fn cid(&mut self, key: &'static str) -> Result<u32, LineError> {
        self.take(key, "a CID", number)
    }

    fn kind(&mut self, key: &'static str) -> Result<Kind, LineError> {
        self.take(key, Kind::EXPECTED, Kind::parse)
    }

    fn side(&mut self, key: &'static str) -> Result<Side, LineError> {
        self.take(key, Side::EXPECTED, Side::parse)
    }

    fn ring(&mut self, key: &'static str) -> Result<u64, LineError> {
        self.take(key, "a power of two from 4096 to 1073741824", |text| {
            number(text).filter(|len: &u64| {
                len.is_power_of_two() && (MIN_RING_LEN..=MAX_RING_LEN).contains(len)
            })
        })
    }

    fn page(&mut self, key: &'static str) -> Result<u64, LineError> {
        self.take(key, "a power of two from 4096 to 1073741824", |text| {
            number(text)
                .filter(|len: &u64| len.is_power_of_two() && (4096..=MAX_PAGE_LEN).contains(len))
        })
    }

    fn generation(&mut self, key: &'static str) -> Result<u64, LineError> {
        self.take(key, "a number from 1 to 2^56 - 1", |text| {
            number(text).filter(|generation| (1..=MAX_GENERATION).contains(generation))
        })
    }

    fn hex(&mut self, key: &'static str) -> Result<Hex16, LineError> {
        self.take(key, Hex16::EXPECTED, Hex16::parse)
    }

    fn place(&mut self, key: &'static str) -> Result<Place, LineError> {
        self.take(key, Place::EXPECTED, Place::parse)
    }

    /// When all that are known were taken.
    fn end(self) -> Result<(), LineError> {
        match self.fields.is_empty() {
            true => Ok(()),
            false => Err(LineError::Surplus),
        }
    }
}

/// The first word of a line, and what stands behind the space after it.
fn split_verb(line: &[u8]) -> Result<(&str, Option<&str>), LineError> {
    let is_printable = |byte: &u8| matches!(byte, b' '..=b'~');
    if !line.iter().all(is_printable) {
        return Err(LineError::Characters);
    }
    let line = std::str::from_utf8(line).map_err(|_| LineError::Characters)?;
    Ok(match line.split_once(' ') {
        Some((verb, rest)) => (verb, Some(rest)),
        None => (line, None),
    })
}

/// Digits and nothing else.
fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    match text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => text.parse().ok(),
        false => None,
    }
}
