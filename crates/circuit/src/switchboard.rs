//! The conversation with a switchboard: lines, and the descriptors that come with them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, send};
use wire::switchboard::Lines;
use wire::switchboard::program::{Answer, CIRCUIT_DESCRIPTORS, Request, SOCKET, SOCKET_VARIABLE};

use crate::{Error, Result};

/// The most descriptors that wait for their line.
const MAX_DESCRIPTORS: usize = 4 * CIRCUIT_DESCRIPTORS;

/// One conversation.
#[derive(Debug)]
pub(crate) struct Conversation {
    socket: UnixStream,
    lines: Lines,
    /// Those of lines that were not taken yet, in order.
    descriptors: VecDeque<OwnedFd>,
}

/// Where a switchboard may be, in this order.
pub(crate) fn places() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(path) = variable(SOCKET_VARIABLE) {
        return vec![path.into()];
    }
    // Where the daemon puts its sockets.
    if let Some(directory) = variable("RINGDOWN_RUNTIME_DIR") {
        return vec![Path::new(&directory).join("circuit.sock")];
    }
    let own = variable("XDG_RUNTIME_DIR");
    let own = own.map(|directory| Path::new(&directory).join("ringdown/circuit.sock"));
    own.into_iter().chain([SOCKET.into()]).collect()
}

impl Conversation {
    /// Opens one, at the first of these sockets that answers.
    pub(crate) fn begin(places: &[PathBuf], request: &Request) -> Result<Conversation> {
        let mut failure = std::io::Error::from(std::io::ErrorKind::NotFound);
        for path in places {
            match UnixStream::connect(path).and_then(|socket| ask(socket, request)) {
                Ok(conversation) => return Ok(conversation),
                Err(error) => failure = error,
            }
        }
        let tried: Vec<_> = places
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        Err(Error::NoSwitchboard {
            tried: tried.join(" or "),
            source: failure,
        })
    }

    /// The next line; waits for it, for ever without a time.
    pub(crate) fn answer(&mut self, timeout: Option<Duration>) -> Result<Answer> {
        let started = Instant::now();
        loop {
            if let Some(answer) = self.try_answer()? {
                return Ok(answer);
            }
            let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
            if left == Some(Duration::ZERO) {
                return Err(Error::TimedOut {
                    waited_ms: started.elapsed().as_millis(),
                });
            }
            let timeout = left.map(|left| Timespec {
                tv_sec: left.as_secs().min(i32::MAX as u64) as i64,
                tv_nsec: left.subsec_nanos().into(),
            });
            let mut waiting = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut waiting, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next line, if it is there.
    pub(crate) fn try_answer(&mut self) -> Result<Option<Answer>> {
        loop {
            let line = self.lines.next_line().map_err(|error| found(&error))?;
            if let Some(line) = line {
                let answer = Answer::parse(line).map_err(|error| {
                    let line = String::from_utf8_lossy(line);
                    found(&format_args!("{line:?} ({error})"))
                })?;
                return match answer {
                    Answer::Error { code, text } => Err(Error::NotGiven { code, text }),
                    answer => Ok(Some(answer)),
                };
            }
            if !self.receive()? {
                return Ok(None);
            }
        }
    }

    /// The descriptors of the line that was taken last, if there are so many.
    pub(crate) fn take_descriptors<const COUNT: usize>(&mut self) -> Result<[OwnedFd; COUNT]> {
        let available = self.descriptors.len();
        let taken: Vec<OwnedFd> = self.descriptors.drain(..COUNT.min(available)).collect();
        taken.try_into().map_err(|_| {
            found(&format_args!(
                "a line with {available} descriptors where {COUNT} were expected"
            ))
        })
    }

    /// False when nothing is there.
    fn receive(&mut self) -> Result<bool> {
        let mut descriptors = Vec::new();
        let received = loop {
            match sys::descriptors::receive(
                &self.socket,
                self.lines.space(),
                &mut descriptors,
                CIRCUIT_DESCRIPTORS,
                RecvFlags::DONTWAIT,
            ) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        };
        self.descriptors.extend(descriptors);
        if received.truncated || self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(found(
                &"more descriptors than a line has, or than this process may have",
            ));
        }
        if received.len == 0 {
            return Err(found(&"nothing, and went away"));
        }
        self.lines.filled(received.len);
        Ok(true)
    }
}

fn ask(socket: UnixStream, request: &Request) -> std::io::Result<Conversation> {
    let line = request.to_string();
    let mut rest = line.as_bytes();
    while !rest.is_empty() {
        // The program's signal for broken pipes is not for us to raise.
        match send(&socket, rest, SendFlags::NOSIGNAL) {
            Ok(sent) => rest = &rest[sent..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Conversation {
        socket,
        lines: Lines::new(),
        descriptors: VecDeque::new(),
    })
}

impl AsFd for Conversation {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

pub(crate) fn found(what: &impl std::fmt::Display) -> Error {
    Error::Switchboard {
        found: what.to_string(),
    }
}
