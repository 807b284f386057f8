//! The agent protocol: how the host runs commands in a guest, over any reliable stream of bytes.
//!
//! # Theory of operation
//!
//! Each side sends frames: an eight-byte header (kind, a zero, channel, length; integers little-endian) and a body.
//! Both sides say [`Hello`] as soon as the stream is there; the version spoken is the highest that both know
//! ([`negotiate`]). Then, on a stream that the host opened, the host asks for one operation:
//!
//! ```text
//! host                                agent
//!   Hello ────────────────────────►
//!         ◄────────────────────────── Hello
//!   ExecStart, Credit(out), Credit(err) ►
//!         ◄────────────────────────── Started, Credit(in)     (or Error: nothing was started)
//!   Stdin, EndOfStream(in) ───────►
//!   Signal, WindowSize ───────────►
//!         ◄────────────────────────── Stdout, Stderr, EndOfStream(out), EndOfStream(err)
//!   Credit(out), StreamClosed(out) ►
//!         ◄────────────────────────── Credit(in), StreamClosed(in)
//!         ◄────────────────────────── Exit                    (or Error)
//! ```
//!
//! The end of the byte stream never means "finished". Only [`Frame::Exit`] and [`Frame::Error`] do; a stream that
//! ends before them is a broken connection, and the other side says so.
//!
//! Each of the three streams has credit of its own ([`credit`]): a sender sends no byte that the receiver has not made room for. So a standard output
//! without a reader holds up neither standard error nor signals, and each side can always read the next frame without blocking. That rules out
//! deadlock.
//!
//! A benchmark is asked for in the same way; what passes then is said in [`bench`]. So is a connection that is carried ([`forward`]),
//! and so are files ([`transfer`]).
//!
//! Figures, logs and the other everyday jobs are asked for with one frame, [`Frame::Ask`], and answered as said in [`job`].
//!
//! On the stream that the agent opens towards the host to say that it is ready, only the two hellos pass, and where the line does not
//! show callers, a [`Secret`] that the host's connections then begin with. The stream stays open for as long as the agent lives.
//!
//! A header names a channel, so that one stream (virtio-serial, later) can carry many operations; over vsock there
//! is one stream per operation and its channel is [`OPERATION_CHANNEL`].
//!
//! Bodies of structured frames are [postcard](https://postcard.jamesmunns.com/wire-format), checked against the
//! limits of this module both when they are written and when they are read.

pub mod bench;
mod body;
pub mod credit;
mod decoder;
pub mod forward;
pub mod job;
mod secret;
pub mod transfer;

pub use body::{ErrorKind, ErrorReport, ExecStart, ExitStatus, Hello, Terminal};
pub use decoder::{DecodeError, Decoder};
pub use secret::{AGENT_AWAY, CALLERS_KNOWN, CALLERS_PROVE, CAPABILITY_PROOF, SECRET_LEN, Secret};

use serde::{Deserialize, Serialize};

/// The vsock port of the agent in the guest, and of the host's registry of ready agents. It is below 1024, so that
/// an ordinary program of the guest cannot listen there before the agent does.
pub const PORT: u32 = 1007;

/// The lowest vsock port that any program of a Linux guest may use. A hello that comes from a port below it was sent
/// by a privileged program.
pub const FIRST_UNPRIVILEGED_PORT: u32 = 1024;

/// The version of the protocol that this module describes.
pub const PROTOCOL_VERSION: u16 = 1;

/// The capability of running commands ([`ExecStart`]).
pub const CAPABILITY_EXEC: &str = "exec";

/// The capability of taking part in benchmarks ([`bench`]).
pub const CAPABILITY_BENCH: &str = "bench";

/// The capability of carrying connections ([`forward`]). Agents that offered `forward` carried them without frames, so that a connection that was
/// cut could look complete.
pub const CAPABILITY_FORWARD: &str = "forward-frames";
/// The capability of receiving and sending files ([`transfer`]).
pub const CAPABILITY_TRANSFER: &str = "transfer";

/// The capability of giving circuits to programs of the guest ([`switchboard`](crate::switchboard)).
pub const CAPABILITY_CIRCUITS: &str = "circuits";

/// What a guest's administrator can switch off: the keys of `[methods]` in the agent's configuration, and the capability that each stands for.
pub const METHODS: [(&str, &str); 12] = [
    ("exec", CAPABILITY_EXEC),
    ("cp", CAPABILITY_TRANSFER),
    ("forward", CAPABILITY_FORWARD),
    ("logs", job::CAPABILITY_LOGS),
    ("stats", job::CAPABILITY_STATS),
    ("power", job::CAPABILITY_POWER),
    ("freeze", job::CAPABILITY_FREEZE),
    ("time", job::CAPABILITY_TIME),
    ("clipboard", job::CAPABILITY_CLIPBOARD),
    ("lock", job::CAPABILITY_LOCK),
    ("bench", CAPABILITY_BENCH),
    ("circuits", CAPABILITY_CIRCUITS),
];

/// That an agent has not announced a capability, in words for its caller.
pub fn not_offered(software: &str, capability: &str) -> String {
    let mut methods = METHODS.iter();
    let method = methods.find(|(_, name)| *name == capability);
    let method = method.map_or(capability, |(key, _)| key);
    format!(
        "the guest's {software} does not offer {method}: it is older than that, or {method} is off in its /etc/ringdown/agent.toml"
    )
}

/// The channel of hellos, and of errors that concern the whole stream.
pub const CONNECTION_CHANNEL: u16 = 0;

/// The channel of the operation on a stream that carries only one.
pub const OPERATION_CHANNEL: u16 = 1;

/// Size of a frame's header, in bytes.
pub const HEADER_LEN: usize = 8;

/// The most payload that one frame of standard input, output or error carries, in bytes.
pub const MAX_DATA_LEN: usize = 64 * 1024;

/// The longest body of an [`ExecStart`], in bytes: the longest of all frames.
pub const MAX_EXEC_START_LEN: usize = 256 * 1024;

/// The longest body of a [`Hello`] or an [`ErrorReport`], in bytes.
pub const MAX_MESSAGE_LEN: usize = 4096;

/// The longest body of a frame of a benchmark, in bytes.
pub const MAX_BENCH_LEN: usize = 160;

/// The longest body of every other frame, in bytes.
pub const MAX_SMALL_LEN: usize = 16;

/// The most arguments of a command, its name included.
pub const MAX_ARGUMENTS: usize = 4096;

/// The most environment variables that an [`ExecStart`] sets.
pub const MAX_ENVIRONMENT: usize = 1024;

/// The longest path of a working directory, in bytes (Linux's PATH_MAX without the final zero).
pub const MAX_DIRECTORY_LEN: usize = 4095;

/// The longest name of a terminal type, in bytes.
pub const MAX_TERMINAL_TYPE_LEN: usize = 64;

/// The longest host name, in bytes (Linux's HOST_NAME_MAX is 64; names in the DNS have up to 255).
pub const MAX_HOSTNAME_LEN: usize = 255;

/// The longest name and version of a peer's software, boot identifier and name of a capability, in bytes each.
pub const MAX_NAME_LEN: usize = 64;

/// The most capabilities in a hello.
pub const MAX_CAPABILITIES: usize = 32;

/// The longest message of an [`ErrorReport`], in bytes.
pub const MAX_ERROR_MESSAGE_LEN: usize = 1024;

/// The highest signal number that may be sent or reported (Linux's SIGSYS; real-time signals are not forwarded).
pub const MAX_SIGNAL: u8 = 31;

/// One of the three streams of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Stream {
    /// Standard input, from host to guest.
    Stdin,
    /// Standard output, from guest to host. With a terminal, all of its output.
    Stdout,
    /// Standard error, from guest to host. Unused with a terminal.
    Stderr,
}

/// One frame without its channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame<'a> {
    /// The first frame of each side.
    Hello(Hello),
    /// Agent to host, in the agent's own call: what connections of the host are to begin with. In such a connection, its first frame.
    Secret(Secret),
    /// The operation, or the whole stream, ends here and this is why. The last frame of its channel.
    Error(ErrorReport),
    /// Host to agent: start this command.
    ExecStart(ExecStart),
    /// Agent to host: the command runs.
    Started {
        /// Its process identifier in the guest.
        pid: u32,
    },
    /// Bytes of a stream, 1 to [`MAX_DATA_LEN`].
    Data {
        /// Which stream.
        stream: Stream,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// The sender will send no more data of this stream.
    EndOfStream(Stream),
    /// The receiver of this stream will take no more data: what the reader of a pipe says by closing it.
    StreamClosed(Stream),
    /// The receiver of this stream has room for that many bytes more, at least 1.
    Credit {
        /// Which stream.
        stream: Stream,
        /// How many bytes more.
        bytes: u32,
    },
    /// Host to agent: the terminal has a new size, in characters.
    WindowSize {
        /// Height in characters.
        rows: u16,
        /// Width in characters.
        columns: u16,
    },
    /// Host to agent: send this signal, 1 to [`MAX_SIGNAL`] in Linux's numbering, to the command's process group.
    Signal(u8),
    /// Agent to host: the command has ended and all of its output was sent. The last frame of its channel.
    Exit(ExitStatus),
    /// Part of a benchmark.
    Bench(bench::Message),
    /// Host to agent: one of the everyday jobs.
    Ask(job::Ask),
    /// Agent to host: what has become of it.
    Answer(job::Answer),
    /// Part of carrying connections.
    Forward(forward::Message),
    /// Part of a transfer of files.
    Transfer(transfer::Message),
}

/// What a frame is, as its header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Kind {
    Hello = 1,
    Error = 2,
    Credit = 3,
    EndOfStream = 4,
    StreamClosed = 5,
    Secret = 6,
    ExecStart = 16,
    Started = 17,
    Stdin = 18,
    Stdout = 19,
    Stderr = 20,
    WindowSize = 21,
    Signal = 22,
    Exit = 23,
    Bench = 32,
    Ask = 40,
    Answer = 41,
    Forward = 56,
    Transfer = 48,
}

impl Kind {
    /// Every kind there is.
    pub(crate) const ALL: [Kind; 19] = [
        Kind::Hello,
        Kind::Error,
        Kind::Credit,
        Kind::EndOfStream,
        Kind::StreamClosed,
        Kind::Secret,
        Kind::ExecStart,
        Kind::Started,
        Kind::Stdin,
        Kind::Stdout,
        Kind::Stderr,
        Kind::WindowSize,
        Kind::Signal,
        Kind::Exit,
        Kind::Bench,
        Kind::Ask,
        Kind::Answer,
        Kind::Forward,
        Kind::Transfer,
    ];

    fn from_wire(value: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == value)
    }

    /// The longest body of this kind of frame, in bytes.
    pub(crate) fn max_body_len(self) -> usize {
        match self {
            Kind::Hello | Kind::Error => MAX_MESSAGE_LEN,
            Kind::Secret => SECRET_LEN,
            Kind::ExecStart => MAX_EXEC_START_LEN,
            Kind::Stdin | Kind::Stdout | Kind::Stderr => MAX_DATA_LEN,
            Kind::Bench => MAX_BENCH_LEN,
            Kind::Ask => job::MAX_ASK_LEN,
            Kind::Answer => job::MAX_ANSWER_LEN,
            Kind::Forward => forward::MAX_LEN,
            Kind::Transfer => transfer::MAX_MESSAGE_LEN,
            _ => MAX_SMALL_LEN,
        }
    }

    fn of_data(stream: Stream) -> Kind {
        match stream {
            Stream::Stdin => Kind::Stdin,
            Stream::Stdout => Kind::Stdout,
            Stream::Stderr => Kind::Stderr,
        }
    }
}

/// Why a frame cannot be sent: one of the limits of this module is exceeded, or a value means nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// The body would be longer than its kind allows.
    #[error("the request has {len} bytes where at most {max} are allowed")]
    BodyTooLong {
        /// Its length in bytes.
        len: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// A text or path is longer than allowed.
    #[error("{what} has {len} bytes where at most {max} are allowed")]
    TextTooLong {
        /// What it is.
        what: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// A list has more entries than allowed.
    #[error("there are {count} {what} where at most {max} are allowed")]
    TooMany {
        /// What they are.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// Something that must have content is empty.
    #[error("{0} is empty")]
    Empty(&'static str),
    /// A text that goes to the kernel contains a zero byte.
    #[error("{0} contains a zero byte")]
    ZeroByte(&'static str),
    /// The name of an environment variable contains an equals sign.
    #[error("the name of an environment variable contains an equals sign")]
    EqualsSign,
    /// A number is outside its range.
    #[error("{what} is {value}, expected {expected}")]
    OutOfRange {
        /// What it is.
        what: &'static str,
        /// Its value.
        value: u32,
        /// The range in words.
        expected: &'static str,
    },
    /// A path does not begin with a slash.
    #[error("{0} is not absolute: it is to begin with a slash")]
    Relative(&'static str),
    /// A number is larger than allowed.
    #[error("{what} is {value}, where at most {max} is allowed")]
    TooMuch {
        /// What it is.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The limit.
        max: u64,
    },
    /// A name leads somewhere else.
    #[error(
        "a name contains a slash, or is \".\" or \"..\", where only something in one directory may be named"
    )]
    NotAName,
    /// Numbers that belong together do not agree.
    #[error("{0} contradicts itself")]
    Contradiction(&'static str),
}

impl Frame<'_> {
    /// Append the frame to `out`.
    ///
    /// # Errors
    /// A limit of this module is exceeded; `out` is as it was.
    pub fn encode(&self, channel: u16, out: &mut Vec<u8>) -> Result<(), Invalid> {
        let start = out.len();
        out.extend_from_slice(&[0; HEADER_LEN]);
        let kind = match self.encode_body(out) {
            Ok(kind) => kind,
            Err(error) => {
                out.truncate(start);
                return Err(error);
            }
        };
        let len = out.len() - start - HEADER_LEN;
        if len > kind.max_body_len() {
            out.truncate(start);
            return Err(Invalid::BodyTooLong {
                len,
                max: kind.max_body_len(),
            });
        }
        out[start..start + HEADER_LEN].copy_from_slice(&header(kind, channel, len));
        Ok(())
    }

    /// The frame as bytes of its own; see [`Frame::encode`].
    ///
    /// # Errors
    /// A limit of this module is exceeded.
    pub fn to_bytes(&self, channel: u16) -> Result<Vec<u8>, Invalid> {
        let mut out = Vec::new();
        self.encode(channel, &mut out)?;
        Ok(out)
    }
}

/// The header of a frame with `len` bytes of `stream`: for senders that read data straight into the place behind it.
///
/// # Errors
/// `len` is zero or above [`MAX_DATA_LEN`].
pub fn data_header(stream: Stream, channel: u16, len: usize) -> Result<[u8; HEADER_LEN], Invalid> {
    if len == 0 {
        return Err(Invalid::Empty("the data"));
    }
    if len > MAX_DATA_LEN {
        return Err(Invalid::BodyTooLong {
            len,
            max: MAX_DATA_LEN,
        });
    }
    Ok(header(Kind::of_data(stream), channel, len))
}

/// The version that both sides speak: the highest known to both, if there is one.
pub fn negotiate(ours: &Hello, theirs: &Hello) -> Option<u16> {
    let highest = ours.protocol_max.min(theirs.protocol_max);
    let lowest = ours.protocol_min.max(theirs.protocol_min);
    (lowest <= highest).then_some(highest)
}

fn header(kind: Kind, channel: u16, len: usize) -> [u8; HEADER_LEN] {
    let [channel_low, channel_high] = channel.to_le_bytes();
    let [a, b, c, d] = (len as u32).to_le_bytes();
    [kind as u8, 0, channel_low, channel_high, a, b, c, d]
}

#[cfg(test)]
mod tests;
