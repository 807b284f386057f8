//! The messages between a program and its switchboard.
//!
//! A program connects to the UNIX stream socket [`SOCKET`] of its switchboard and sends one [`Request`].
//!
//! | request | answer |
//! | --- | --- |
//! | `CONNECT to=NAME:PORT kind=bytes ring=N` | one line: `CIRCUIT`, `STREAM` or `ERROR`. Then the switchboard closes the socket |
//! | `LISTEN port=N kind=bytes ring=N` | `LISTENING port=N` or `ERROR`. Then one line `CIRCUIT` or `STREAM` for each caller, until the program closes the socket |
//! | `LISTEN port=N kind=bytes ring=N vm=NAME` | the same for callers from that VM; on the host only. Without `vm` it is for all VMs |
//!
//! | line | descriptors | meaning |
//! | --- | --- | --- |
//! | `CIRCUIT side=first kind=bytes ring=N page=N offset=N generation=N nonce=HEX from=NAME:PORT` | window, wake channel, lease | a zero-copy circuit, see [`Circuit`] |
//! | `STREAM from=NAME:PORT` | stream | an ordinary connection |
//! | `ERROR code=refused words` | | there is none, and why |
//!
//! Descriptors come as `SCM_RIGHTS` with the first byte of their line, and a line is sent as one message; so there is never more than one line's set of them in what is
//! received at once. A program sends none.
//!
//! The *lease* is a socket that means nothing but that the program has not done with the window: the program keeps it open for as long as it has the window mapped. Once it is
//! closed, which the end of the program does too, the window is taken away and given to others.

use std::fmt;

use super::{Fields, Hex16, Kind, LineError, MAX_LINE_LEN, Place, Side, split_verb};

/// Where the switchboard of a guest, or of a host whose daemon is the system's, listens.
pub const SOCKET: &str = "/run/ringdown/circuit.sock";

/// The environment variable that names another socket.
pub const SOCKET_VARIABLE: &str = "RINGDOWN_CIRCUIT_SOCKET";

/// How many descriptors come with [`Answer::Circuit`]: window, wake channel and lease, in this order.
pub const CIRCUIT_DESCRIPTORS: usize = 3;

/// How many descriptors come with [`Answer::Stream`].
pub const STREAM_DESCRIPTORS: usize = 1;

/// What a program asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A circuit to this party.
    Connect {
        /// Callee.
        to: Place,
        /// What is to be in it.
        kind: Kind,
        /// The largest rings that are wanted, in bytes: a power of two.
        ring: u64,
    },
    /// Circuits from callers of this port.
    Listen {
        /// The vsock port.
        port: u32,
        /// What is to be in them.
        kind: Kind,
        /// The largest rings that are wanted, in bytes: a power of two.
        ring: u64,
        /// From this VM only. On the host only.
        vm: Option<String>,
    },
}

impl Request {
    /// Reads a line without its end.
    pub fn parse(line: &[u8]) -> Result<Request, LineError> {
        let mut fields = Fields::parse(line)?;
        let request = match fields.verb {
            "CONNECT" => Request::Connect {
                to: fields.place("to")?,
                kind: fields.kind("kind")?,
                ring: fields.ring("ring")?,
            },
            "LISTEN" => Request::Listen {
                port: fields.port("port")?,
                kind: fields.kind("kind")?,
                ring: fields.ring("ring")?,
                vm: fields.take_optional("vm", "the name of a VM", |name| {
                    crate::directory::is_full_name(name).then(|| name.to_owned())
                })?,
            },
            _ => {
                return Err(LineError::Verb {
                    expected: "CONNECT or LISTEN",
                });
            }
        };
        fields.end()?;
        Ok(request)
    }
}

impl fmt::Display for Request {
    /// The line, with its end.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Connect { to, kind, ring } => {
                writeln!(formatter, "CONNECT to={to} kind={kind} ring={ring}")
            }
            Request::Listen {
                port,
                kind,
                ring,
                vm,
            } => {
                write!(formatter, "LISTEN port={port} kind={kind} ring={ring}")?;
                match vm {
                    Some(vm) => writeln!(formatter, " vm={vm}"),
                    None => writeln!(formatter),
                }
            }
        }
    }
}

fields! {
    /// A zero-copy circuit: what the header of its window says, and where the window is.
    pub struct Circuit {
        /// Which side the program is.
        side: Side = side,
        /// What is in the rings.
        kind: Kind = kind,
        /// The length of each ring in bytes.
        ring: u64 = ring,
        /// The length of a page of the window in bytes, a power of two: the rings begin at the first one behind the header.
        page: u64 = page,
        /// Where in its file the window begins, in bytes: at a page.
        offset: u64 = number,
        /// Which life of the window this is.
        generation: u64 = generation,
        /// Random, other in each life.
        nonce: Hex16 = hex,
        /// The peer.
        from: Place = place,
    }
}

/// An answer to a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Callers to this port come here from now on.
    Listening {
        /// The vsock port.
        port: u32,
    },
    /// A circuit with a window.
    Circuit(Circuit),
    /// A circuit without one: a stream socket that carries the bytes.
    Stream {
        /// The peer.
        from: Place,
    },
    /// Why there is none.
    Error {
        /// For programs.
        code: ErrorCode,
        /// For people: printable ASCII.
        text: String,
    },
}

/// Why there is no circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorCode {
    /// There is no listener, or the port is taken already.
    Refused,
    /// A policy does not allow it.
    Denied,
    /// There is nothing of that name, or the program may not know of it.
    Unknown,
    /// As many as there may be are there already. It may work later.
    Busy,
    /// The request is none.
    Invalid,
    /// The other machine, or the daemon, is not there now.
    Unreachable,
}

impl ErrorCode {
    const EXPECTED: &'static str = "refused, denied, unknown, busy, invalid or unreachable";

    pub(super) const ALL: [(ErrorCode, &'static str); 6] = [
        (ErrorCode::Refused, "refused"),
        (ErrorCode::Denied, "denied"),
        (ErrorCode::Unknown, "unknown"),
        (ErrorCode::Busy, "busy"),
        (ErrorCode::Invalid, "invalid"),
        (ErrorCode::Unreachable, "unreachable"),
    ];

    fn parse(text: &str) -> Option<ErrorCode> {
        let known = ErrorCode::ALL.iter().find(|(_, word)| *word == text);
        known.map(|(code, _)| *code)
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = ErrorCode::ALL.iter().find(|(code, _)| code == self);
        formatter.write_str(known.map_or("invalid", |(_, word)| word))
    }
}

impl Answer {
    /// An error. What is not printable ASCII in its words becomes `?`, and what is too long for a line is cut off.
    pub fn error(code: ErrorCode, text: impl fmt::Display) -> Answer {
        let room = MAX_LINE_LEN - "ERROR code=unreachable \n".len();
        let text = text.to_string();
        let printable = |character: char| match character {
            ' '..='~' => character,
            _ => '?',
        };
        Answer::Error {
            code,
            text: text.chars().take(room).map(printable).collect(),
        }
    }

    /// Reads a line without its end.
    pub fn parse(line: &[u8]) -> Result<Answer, LineError> {
        if let ("ERROR", rest) = split_verb(line)? {
            return Answer::parse_error(rest.unwrap_or_default());
        }
        let mut fields = Fields::parse(line)?;
        let answer = match fields.verb {
            "LISTENING" => Answer::Listening {
                port: fields.port("port")?,
            },
            "CIRCUIT" => Answer::Circuit(Circuit::take(&mut fields)?),
            "STREAM" => Answer::Stream {
                from: fields.place("from")?,
            },
            _ => {
                return Err(LineError::Verb {
                    expected: "LISTENING, CIRCUIT, STREAM or ERROR",
                });
            }
        };
        fields.end()?;
        Ok(answer)
    }

    /// `code=refused` and words.
    fn parse_error(rest: &str) -> Result<Answer, LineError> {
        let (code, text) = rest.split_once(' ').unwrap_or((rest, ""));
        let code = code
            .strip_prefix("code=")
            .ok_or(LineError::Missing { key: "code" })?;
        let code = ErrorCode::parse(code).ok_or(LineError::Value {
            key: "code",
            expected: ErrorCode::EXPECTED,
        })?;
        Ok(Answer::error(code, text))
    }
}

impl fmt::Display for Answer {
    /// The line, with its end.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Answer::Listening { port } => writeln!(formatter, "LISTENING port={port}"),
            Answer::Circuit(circuit) => writeln!(formatter, "CIRCUIT{circuit}"),
            Answer::Stream { from } => writeln!(formatter, "STREAM from={from}"),
            Answer::Error { code, text } => writeln!(formatter, "ERROR code={code} {text}"),
        }
    }
}
