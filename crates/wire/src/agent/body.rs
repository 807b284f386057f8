//! The structured bodies and their limits.

use serde::{Deserialize, Serialize};

use super::{
    Frame, Invalid, Kind, MAX_ARGUMENTS, MAX_CAPABILITIES, MAX_DIRECTORY_LEN, MAX_ENVIRONMENT,
    MAX_ERROR_MESSAGE_LEN, MAX_HOSTNAME_LEN, MAX_NAME_LEN, MAX_SIGNAL, MAX_TERMINAL_TYPE_LEN,
    PROTOCOL_VERSION, Stream,
};

/// What a side is and can do. Its layout never changes between versions of the protocol.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The lowest version of the protocol that it speaks, at least 1.
    pub protocol_min: u16,
    /// The highest version of the protocol that it speaks.
    pub protocol_max: u16,
    /// Its software and version, such as `ringdown-agent 0.1.0`.
    pub software: String,
    /// The guest's boot identifier (`/proc/sys/kernel/random/boot_id`), or nothing.
    pub boot_id: String,
    /// The guest's host name, or nothing.
    pub hostname: String,
    /// What it can do beyond the protocol's core. Unknown names are to be ignored.
    pub capabilities: Vec<String>,
    /// Of a guest, a random identifier that changes when the guest was seen to go on from an earlier or another state than the one it was in:
    /// restored, resumed, moved. Of the host, and of an agent that has no means to find out, nothing.
    pub generation: String,
    /// What the side's clock said when it said hello, in nanoseconds since 1970; 0 if it does not say.
    pub unix_ns: u64,
}

impl Hello {
    /// A hello in the version of this module, without boot identifier, host name and capabilities.
    pub fn new(software: impl Into<String>) -> Hello {
        Hello {
            protocol_min: PROTOCOL_VERSION,
            protocol_max: PROTOCOL_VERSION,
            software: software.into(),
            boot_id: String::new(),
            hostname: String::new(),
            capabilities: Vec::new(),
            generation: String::new(),
            unix_ns: 0,
        }
    }

    /// Whether it announces this capability.
    pub fn can(&self, capability: &str) -> bool {
        self.capabilities.iter().any(|name| name == capability)
    }

    pub(super) fn check(&self) -> Result<(), Invalid> {
        if self.protocol_min == 0 || self.protocol_min > self.protocol_max {
            return Err(Invalid::OutOfRange {
                what: "the lowest protocol version",
                value: self.protocol_min.into(),
                expected: "1 up to the highest protocol version",
            });
        }
        check_len(
            "the name of the software",
            self.software.as_bytes(),
            MAX_NAME_LEN,
        )?;
        check_len("the boot identifier", self.boot_id.as_bytes(), MAX_NAME_LEN)?;
        check_len("the generation", self.generation.as_bytes(), MAX_NAME_LEN)?;
        check_len("the host name", self.hostname.as_bytes(), MAX_HOSTNAME_LEN)?;
        check_count("capabilities", self.capabilities.len(), MAX_CAPABILITIES)?;
        self.capabilities
            .iter()
            .try_for_each(|name| check_len("a capability", name.as_bytes(), MAX_NAME_LEN))
    }
}

/// A command to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecStart {
    /// The command's name, looked up in PATH unless it has a slash, and its arguments.
    pub arguments: Vec<Vec<u8>>,
    /// Variables to set on top of the agent's default environment: name and value.
    pub environment: Vec<(Vec<u8>, Vec<u8>)>,
    /// The working directory; if none, the home directory of the agent's user.
    pub directory: Option<Vec<u8>>,
    /// Run it on a terminal of its own with this description, instead of three pipes.
    pub terminal: Option<Terminal>,
}

impl ExecStart {
    pub(super) fn check(&self) -> Result<(), Invalid> {
        check_count("arguments", self.arguments.len(), MAX_ARGUMENTS)?;
        match self.arguments.first() {
            Some(name) if !name.is_empty() => {}
            _ => return Err(Invalid::Empty("the command")),
        }
        self.arguments
            .iter()
            .try_for_each(|argument| check_no_zero("an argument", argument))?;
        check_count(
            "environment variables",
            self.environment.len(),
            MAX_ENVIRONMENT,
        )?;
        for (name, value) in &self.environment {
            if name.is_empty() {
                return Err(Invalid::Empty("the name of an environment variable"));
            }
            if name.contains(&b'=') {
                return Err(Invalid::EqualsSign);
            }
            check_no_zero("the name of an environment variable", name)?;
            check_no_zero("the value of an environment variable", value)?;
        }
        if let Some(directory) = &self.directory {
            if directory.is_empty() {
                return Err(Invalid::Empty("the working directory"));
            }
            check_len("the working directory", directory, MAX_DIRECTORY_LEN)?;
            check_no_zero("the working directory", directory)?;
        }
        match &self.terminal {
            Some(terminal) => terminal.check(),
            None => Ok(()),
        }
    }
}

/// The host's terminal, which the guest's is to be like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// Height in characters.
    pub rows: u16,
    /// Width in characters.
    pub columns: u16,
    /// What the variable TERM is to say, such as `xterm-256color`; nothing leaves it to the agent.
    pub kind: String,
}

impl Terminal {
    fn check(&self) -> Result<(), Invalid> {
        check_len(
            "the terminal type",
            self.kind.as_bytes(),
            MAX_TERMINAL_TYPE_LEN,
        )?;
        check_no_zero("the terminal type", self.kind.as_bytes())
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It ended by itself with this exit code.
    Code(u8),
    /// This signal ended it: 1 to [`MAX_SIGNAL`] in Linux's numbering, or a real-time signal up to 64.
    Signal(u8),
}

/// The highest signal number that Linux knows.
const MAX_EXIT_SIGNAL: u8 = 64;

impl ExitStatus {
    fn check(self) -> Result<(), Invalid> {
        match self {
            ExitStatus::Code(_) => Ok(()),
            ExitStatus::Signal(number) => check_signal(number, MAX_EXIT_SIGNAL, "1 to 64"),
        }
    }
}

/// What went wrong, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ErrorKind {
    /// The other side broke the protocol.
    Protocol,
    /// There is no version of the protocol that both sides speak.
    Version,
    /// The limit of concurrent operations is reached: try again later.
    Busy,
    /// The request means nothing or is too large.
    InvalidRequest,
    /// There is no such command.
    CommandNotFound,
    /// The command is there and cannot be executed.
    CommandNotExecutable,
    /// The working directory is not there or may not be entered.
    NoSuchDirectory,
    /// The guest lacks something that the request needs.
    Unavailable,
    /// Something failed that should not.
    Internal,
    /// The other guest, or the program to connect to, cannot be reached.
    Unreachable,
    /// The guest's administrator has switched this off, or the connection does not prove that it comes from the host.
    Forbidden,
    /// The connection's proof that it comes from the host is not the one that the agent gave its host last. Where a program of the host called, the agent
    /// has called its host anew meanwhile, and nothing has been done: call again.
    WrongProof,
}

/// Why an operation or a stream ends before its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReport {
    /// For programs.
    pub kind: ErrorKind,
    /// For people. Bytes that are not printable are the reader's business to escape.
    pub message: String,
}

impl ErrorReport {
    /// A report; a message that is too long is cut.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> ErrorReport {
        let mut message = message.into();
        let mut end = message.len().min(MAX_ERROR_MESSAGE_LEN);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        ErrorReport { kind, message }
    }

    fn check(&self) -> Result<(), Invalid> {
        check_len(
            "the message of an error",
            self.message.as_bytes(),
            MAX_ERROR_MESSAGE_LEN,
        )
    }
}

/// Why a body cannot be read.
pub(super) enum BodyError {
    /// It does not have the form of its kind, or bytes follow it.
    Malformed,
    /// It exceeds a limit.
    Invalid(Invalid),
}

impl From<Invalid> for BodyError {
    fn from(error: Invalid) -> BodyError {
        BodyError::Invalid(error)
    }
}

impl Frame<'_> {
    /// Check the limits and append the body.
    pub(super) fn encode_body(&self, out: &mut Vec<u8>) -> Result<Kind, Invalid> {
        self.check()?;
        Ok(match self {
            Frame::Hello(hello) => append(Kind::Hello, hello, out),
            Frame::Secret(secret) => append(Kind::Secret, secret, out),
            Frame::Error(report) => append(Kind::Error, report, out),
            Frame::ExecStart(start) => append(Kind::ExecStart, start, out),
            Frame::Started { pid } => append(Kind::Started, pid, out),
            Frame::Data { stream, bytes } => {
                out.extend_from_slice(bytes);
                Kind::of_data(*stream)
            }
            Frame::EndOfStream(stream) => append(Kind::EndOfStream, stream, out),
            Frame::StreamClosed(stream) => append(Kind::StreamClosed, stream, out),
            Frame::Credit { stream, bytes } => append(Kind::Credit, &(stream, bytes), out),
            Frame::WindowSize { rows, columns } => append(Kind::WindowSize, &(rows, columns), out),
            Frame::Signal(number) => append(Kind::Signal, number, out),
            Frame::Exit(status) => append(Kind::Exit, status, out),
            Frame::Bench(message) => append(Kind::Bench, message, out),
            Frame::Ask(ask) => append(Kind::Ask, ask, out),
            Frame::Answer(answer) => append(Kind::Answer, answer, out),
            Frame::Forward(message) => append(Kind::Forward, message, out),
            Frame::Transfer(message) => append(Kind::Transfer, message, out),
        })
    }

    fn check(&self) -> Result<(), Invalid> {
        match self {
            Frame::Hello(hello) => hello.check(),
            Frame::Error(report) => report.check(),
            Frame::ExecStart(start) => start.check(),
            Frame::Data { bytes: [], .. } => Err(Invalid::Empty("the data")),
            Frame::Credit { bytes: 0, .. } => Err(Invalid::Empty("the credit")),
            Frame::Signal(number) => check_signal(*number, MAX_SIGNAL, "1 to 31"),
            Frame::Exit(status) => status.check(),
            Frame::Bench(message) => message.check(),
            Frame::Ask(ask) => ask.check(),
            Frame::Answer(answer) => answer.check(),
            Frame::Forward(message) => message.check(),
            Frame::Transfer(message) => message.check(),
            Frame::Secret(_)
            | Frame::Started { .. }
            | Frame::Data { .. }
            | Frame::EndOfStream(_)
            | Frame::StreamClosed(_)
            | Frame::Credit { .. }
            | Frame::WindowSize { .. } => Ok(()),
        }
    }

    /// Read a body of this kind.
    pub(super) fn decode_body(kind: Kind, body: &[u8]) -> Result<Frame<'_>, BodyError> {
        let frame = match kind {
            Kind::Hello => Frame::Hello(parse(body)?),
            Kind::Secret => Frame::Secret(parse(body)?),
            Kind::Error => Frame::Error(parse(body)?),
            Kind::ExecStart => Frame::ExecStart(parse(body)?),
            Kind::Started => Frame::Started { pid: parse(body)? },
            Kind::Stdin => Frame::Data {
                stream: Stream::Stdin,
                bytes: body,
            },
            Kind::Stdout => Frame::Data {
                stream: Stream::Stdout,
                bytes: body,
            },
            Kind::Stderr => Frame::Data {
                stream: Stream::Stderr,
                bytes: body,
            },
            Kind::EndOfStream => Frame::EndOfStream(parse(body)?),
            Kind::StreamClosed => Frame::StreamClosed(parse(body)?),
            Kind::Credit => {
                let (stream, bytes) = parse(body)?;
                Frame::Credit { stream, bytes }
            }
            Kind::WindowSize => {
                let (rows, columns) = parse(body)?;
                Frame::WindowSize { rows, columns }
            }
            Kind::Signal => Frame::Signal(parse(body)?),
            Kind::Exit => Frame::Exit(parse(body)?),
            Kind::Bench => Frame::Bench(parse(body)?),
            Kind::Ask => Frame::Ask(parse(body)?),
            Kind::Answer => Frame::Answer(parse(body)?),
            Kind::Forward => Frame::Forward(parse(body)?),
            Kind::Transfer => Frame::Transfer(parse(body)?),
        };
        frame.check()?;
        Ok(frame)
    }
}

pub(super) fn append<T: Serialize>(kind: Kind, body: &T, out: &mut Vec<u8>) -> Kind {
    // Serialising into a vector fails only for types of unknown length, which no body has.
    match postcard::to_extend(body, std::mem::take(out)) {
        Ok(extended) => *out = extended,
        Err(error) => unreachable!("a body of known length is serialised: {error}"),
    }
    kind
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, BodyError> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        _ => Err(BodyError::Malformed),
    }
}

pub(super) fn check_len(what: &'static str, bytes: &[u8], max: usize) -> Result<(), Invalid> {
    if bytes.len() > max {
        return Err(Invalid::TextTooLong {
            what,
            len: bytes.len(),
            max,
        });
    }
    Ok(())
}

pub(super) fn check_count(what: &'static str, count: usize, max: usize) -> Result<(), Invalid> {
    if count > max {
        return Err(Invalid::TooMany { what, count, max });
    }
    Ok(())
}

pub(super) fn check_no_zero(what: &'static str, bytes: &[u8]) -> Result<(), Invalid> {
    if bytes.contains(&0) {
        return Err(Invalid::ZeroByte(what));
    }
    Ok(())
}

fn check_signal(number: u8, max: u8, expected: &'static str) -> Result<(), Invalid> {
    if number == 0 || number > max {
        return Err(Invalid::OutOfRange {
            what: "the signal",
            value: number.into(),
            expected,
        });
    }
    Ok(())
}
