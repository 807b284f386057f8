//! The agent of a guest, as commands speak with it.
//!
//! A connection is for one operation: it reaches the agent through the VM's host socket, says hello, and makes sure that the agent can do what
//! is wanted. Then the command asks for its operation, and takes the frames that come.

mod access;
mod connect;
mod secret_change;
mod timed;

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wire::agent::{
    AGENT_AWAY, CONNECTION_CHANNEL, DecodeError, Decoder, ErrorKind, ErrorReport, Frame, Hello,
    Invalid, negotiate, not_offered,
};

pub(crate) use access::remedy as access_remedy;
use connect::no_answer;
pub(crate) use connect::{ANSWER_TIMEOUT, connect, read_line};
use secret_change::across_secret_change;
pub(crate) use timed::{Deadline, Timed};

/// Why the guest's agent did not do it.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error("cannot connect to the VM's host socket {}: {source}; is `ringdown serve` running with this VM?", path.display())]
    Connect { path: PathBuf, source: io::Error },
    #[error("no permission to connect to the VM's host socket {}: {}", path.display(), access_remedy(path))]
    Denied { path: PathBuf },
    #[error(
        "the guest's agent cannot be reached: {reason}; is ringdown-agent running in the guest, and is the guest awake? After `ringdown suspend` its VMM has to wake it up"
    )]
    Refused {
        /// The reason as the daemon gave it.
        reason: String,
    },
    #[error("the host socket gave an unexpected answer to CONNECT: {0}; expected OK or ERR")]
    Answer(String),
    #[error(
        "the guest's agent did not answer within {seconds} s; is the VM paused, suspended or very busy? (what is known: `ringdown check`)"
    )]
    NoAnswer {
        /// How long it was waited for.
        seconds: u64,
    },
    #[error("the request cannot be sent to the guest: {0}")]
    Request(#[from] Invalid),
    #[error("{0}")]
    Unsupported(String),
    #[error("{}", printable(&.0.message))]
    Agent(ErrorReport),
    /// The connection ended before the end was reported. How far it came in the guest is unknown; the agent ends what it was doing
    #[error("the connection to the guest broke before it reported the end ({0})")]
    Broken(String),
    #[error("the guest's agent broke the protocol: {0}")]
    Protocol(String),
}

impl GuestError {
    /// The agent is just giving its host a new secret.
    fn is_secret_change(&self) -> bool {
        match self {
            GuestError::Refused { reason } => reason == AGENT_AWAY,
            GuestError::Agent(report) => report.kind == ErrorKind::WrongProof,
            _ => false,
        }
    }
}

impl From<DecodeError> for GuestError {
    fn from(error: DecodeError) -> GuestError {
        GuestError::Protocol(error.to_string())
    }
}

/// Whether a character could steer a terminal, turn the order of others around, or break a line.
pub(crate) fn is_harmful(character: char) -> bool {
    let turns = matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let breaks = matches!(character, '\u{2028}' | '\u{2029}');
    turns || breaks || (character.is_control() && character != '\t')
}

/// A text of the guest's as it may be shown on the host's terminal: without what could steer it, break its line or turn other characters around.
pub(crate) fn printable(message: &str) -> String {
    let harmless = |character| match is_harmful(character) || character == '\t' {
        true => '\u{fffd}',
        false => character,
    };
    message.chars().map(harmless).collect()
}

/// The same for lines with columns: line feeds and tabs stay.
pub(crate) fn printable_lines(text: &str) -> String {
    let harmless = |character| match is_harmful(character) && character != '\n' {
        true => '\u{fffd}',
        false => character,
    };
    text.chars().map(harmless).collect()
}

/// Where a guest's agent is called, and how long it may take to answer.
#[derive(Debug, Clone, Copy)]
pub struct Agent<'a> {
    /// The VM's host socket.
    pub host_socket: &'a Path,
    pub patience: Duration,
}

impl Agent<'_> {
    /// An agent that nothing was waited for yet.
    pub fn at(host_socket: &Path) -> Agent<'_> {
        Agent {
            host_socket,
            patience: ANSWER_TIMEOUT,
        }
    }
}

/// A connection to the agent, and what it brought.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The stream.
    pub(crate) stream: UnixStream,
    /// What was received and not taken yet.
    pub(crate) decoder: Decoder,
    /// What the agent said of itself; its texts are the guest's and are to be shown through [`printable`].
    pub(crate) hello: Hello,
    /// Until when the agent may speak and listen.
    deadline: Option<Deadline>,
}

impl Connection {
    /// Reach the agent of the guest behind this host socket, and make sure that it can do what `capability` stands for.
    /// All of it, what is asked included, within [`ANSWER_TIMEOUT`], unless another time is set.
    pub(crate) fn open(host_socket: &Path, capability: &str) -> Result<Connection, GuestError> {
        Connection::open_by(host_socket, capability, Deadline::after(ANSWER_TIMEOUT))
    }

    /// The same by this deadline.
    pub(crate) fn open_by(
        host_socket: &Path,
        capability: &str,
        deadline: Deadline,
    ) -> Result<Connection, GuestError> {
        let connection =
            across_secret_change(|| Connection::greet(connect(host_socket, deadline)?, deadline))?;
        if !connection.hello.can(capability) {
            let software = printable(&connection.hello.software);
            return Err(GuestError::Unsupported(not_offered(&software, capability)));
        }
        Ok(connection)
    }

    /// Say hello on a stream that reaches an agent.
    fn greet(stream: UnixStream, deadline: Deadline) -> Result<Connection, GuestError> {
        let ours = Hello::new(concat!("ringdown ", env!("CARGO_PKG_VERSION")));
        let mut connection = Connection {
            stream,
            decoder: Decoder::new(),
            hello: Hello::new(""),
            deadline: Some(deadline),
        };
        let bytes = Frame::Hello(ours.clone()).to_bytes(CONNECTION_CHANNEL)?;
        connection.say(&bytes)?;
        connection.hello = match connection.next_frame()? {
            Frame::Hello(hello) => hello,
            _ => {
                return Err(GuestError::Protocol(
                    "its first frame is not a hello".to_owned(),
                ));
            }
        };
        let theirs = &connection.hello;
        if negotiate(&ours, theirs).is_none() {
            return Err(GuestError::Unsupported(format!(
                "the guest's {} supports versions {} to {} of the agent protocol, this is version {}: update the older one",
                printable(&theirs.software),
                theirs.protocol_min,
                theirs.protocol_max,
                ours.protocol_max
            )));
        }
        Ok(connection)
    }

    /// Send frames that have been encoded, and wait for the frame that answers them.
    pub(crate) fn ask(&mut self, request: &[u8]) -> Result<Frame<'_>, GuestError> {
        self.say(request)?;
        self.next_frame()
    }

    /// Send frames that have been encoded. If the agent refused before, what it said is the failure.
    pub(crate) fn say(&mut self, frames: &[u8]) -> Result<(), GuestError> {
        let deadline = self.deadline;
        let Err(error) = self.write(frames) else {
            return Ok(());
        };
        let mut is_hello = self
            .next_frame()
            .map(|frame| matches!(frame, Frame::Hello(_)));
        if let Ok(true) = is_hello {
            is_hello = self.next_frame().map(|_| false);
        }
        Err(match is_hello {
            Err(GuestError::Agent(report)) => GuestError::Agent(report),
            _ => no_answer(error, deadline),
        })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match timed(&self.stream, self.deadline) {
            Some(mut timed) => timed.write_all(bytes),
            None => self.stream.write_all(bytes),
        }
    }

    /// The next frame. What the agent says about a failure is the failure.
    pub(crate) fn next_frame(&mut self) -> Result<Frame<'_>, GuestError> {
        while !self.decoder.has_frame() {
            self.receive()?;
        }
        match self.decoder.next_frame()? {
            Some((_, Frame::Error(report))) => Err(GuestError::Agent(report)),
            Some((_, frame)) => Ok(frame),
            None => Err(GuestError::Protocol("a frame ended early".to_owned())),
        }
    }

    /// From here on the other side has so long, or as long as it likes.
    pub(crate) fn wait_for(&mut self, patience: Option<Duration>) {
        self.deadline = patience.map(Deadline::after);
    }

    /// Receive what is there, at least one byte.
    pub(crate) fn receive(&mut self) -> Result<(), GuestError> {
        loop {
            let received = match timed(&self.stream, self.deadline) {
                Some(mut timed) => timed.read(self.decoder.space()),
                None => self.stream.read(self.decoder.space()),
            };
            match received {
                Ok(0) if self.decoder.is_inside_frame() => {
                    return Err(GuestError::Broken("it ended inside a frame".to_owned()));
                }
                Ok(0) => return Err(GuestError::Broken("it was closed".to_owned())),
                Ok(count) => {
                    self.decoder.advance(count);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(no_answer(error, self.deadline)),
            }
        }
    }
}

/// The stream until the deadline, if there is one.
fn timed(stream: &UnixStream, deadline: Option<Deadline>) -> Option<Timed<'_>> {
    deadline.map(|deadline| Timed {
        socket: stream.as_fd(),
        deadline: deadline.at,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As one that has no place for another operation.
    #[test]
    fn an_agent_that_refuses_before_it_listens_is_heard() {
        let refusal = wire::agent::ErrorReport::new(wire::agent::ErrorKind::Busy, "64 run");
        let hello = Frame::Hello(Hello::new("test")).to_bytes(CONNECTION_CHANNEL);
        let refused = Frame::Error(refusal).to_bytes(wire::agent::OPERATION_CHANNEL);
        let (hello, refused) = (hello.unwrap(), refused.unwrap());
        for said in [refused.clone(), [hello, refused].concat()] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(&said).unwrap();
            drop(theirs);
            let error = Connection::greet(ours, Deadline::after(ANSWER_TIMEOUT)).unwrap_err();
            assert!(error.to_string().contains("64 run"), "{error}");
        }
    }

    #[test]
    fn what_could_steer_a_terminal_is_replaced() {
        assert_eq!(
            printable("web\x1b[2J\r\n\u{202e}bd\u{9b}1m\t"),
            "web�[2J���bd�1m�"
        );
        assert_eq!(printable("Größe-日本"), "Größe-日本");
        let harmful = "\u{7f}\u{80}\u{9b}\u{9f}\u{61c}\u{200f}\u{2028}\u{2029}\u{202e}\u{2066}";
        assert!(harmful.chars().all(is_harmful));
        assert_eq!(
            printable_lines("a\tb\nc\u{202e}\u{61c}\r\n"),
            "a\tb\nc���\n"
        );
    }
}
