//! A connection to an agent that takes part in a measurement.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use wire::agent::bench::{Arrival, Message, Received, Start};
use wire::agent::{CAPABILITY_BENCH, Frame, OPERATION_CHANNEL};

use super::{BenchError, Party, STALL_TIMEOUT};
use crate::guest::{Connection, Deadline, GuestError, printable};

/// How long one call of the system may wait before the stream looks whether it is enough.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How long the agent's reason is looked for after sending failed.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_secs(1);

/// The connection, and what it brought.
#[derive(Debug)]
pub(super) struct Link {
    vm: String,
    connection: Box<Connection>,
}

impl Link {
    /// Reach the agent of this VM, and ask it for this.
    pub(super) fn open(
        party: &Party,
        start: Start,
        deadline: Deadline,
    ) -> Result<Link, BenchError> {
        let opened = Connection::open_by(&party.host_socket, CAPABILITY_BENCH, deadline);
        let mut link = Link {
            vm: party.name.clone(),
            connection: Box::new(opened.map_err(|error| failed(&party.name, error))?),
        };
        let bytes = Frame::Bench(Message::Start(start)).to_bytes(OPERATION_CHANNEL)?;
        let said = link.connection.say(&bytes);
        said.map_err(|error| link.failed(error))?;
        Ok(link)
    }

    /// The next message, which the agent has to send before the deadline of the set-up.
    pub(super) fn answer(&mut self) -> Result<Message, BenchError> {
        match self.connection.next_frame() {
            Ok(Frame::Bench(message)) => Ok(message),
            Ok(_) => Err(self.protocol("a frame that is not part of a benchmark")),
            Err(error) => Err(failed(&self.vm, error)),
        }
    }

    /// Wait until the agent is ready. From then on a call of the system waits for [`LOOK_INTERVAL`].
    pub(super) fn wait_until_ready(&mut self) -> Result<(), BenchError> {
        match self.answer()? {
            Message::Ready => {}
            other => return Err(self.protocol(format!("expected that it is ready, not {other:?}"))),
        }
        let stream = &self.connection.stream;
        stream
            .set_read_timeout(Some(LOOK_INTERVAL))
            .and_then(|()| stream.set_write_timeout(Some(LOOK_INTERVAL)))
            .map_err(|source| BenchError::Local {
                what: "set up a connection",
                source,
            })
    }

    /// What comes next of what was received already. What the agent says about a failure is the failure.
    pub(super) fn next<'d>(
        &'d mut self,
        received: &mut Received,
    ) -> Result<Option<Arrival<'d>>, BenchError> {
        match received.next(&mut self.connection.decoder) {
            Ok(Arrival::Nothing) => Ok(None),
            Ok(Arrival::Frame(Frame::Error(report))) => {
                Err(failed(&self.vm, GuestError::Agent(report)))
            }
            Ok(arrival) => Ok(Some(arrival)),
            Err(error) => Err(failed(&self.vm, GuestError::Protocol(error.to_string()))),
        }
    }

    /// Bytes without frames, at most `limit`, of what was received already.
    pub(super) fn raw(&mut self, limit: usize) -> &[u8] {
        self.connection.decoder.take_raw(limit)
    }

    /// Receive what comes within a short while: whether something came.
    pub(super) fn receive(&mut self) -> Result<bool, BenchError> {
        match self.connection.stream.read(self.connection.decoder.space()) {
            Ok(0) => Err(self.broken("it was closed")),
            Ok(count) => {
                self.connection.decoder.advance(count);
                Ok(true)
            }
            Err(error) if is_no_failure(&error) => Ok(false),
            Err(error) => Err(self.broken(error)),
        }
    }

    /// Send what is taken within a short while: how many bytes.
    pub(super) fn send_some(&mut self, bytes: &[u8]) -> Result<usize, BenchError> {
        match self.connection.stream.write(bytes) {
            Ok(count) => Ok(count),
            Err(error) if is_no_failure(&error) => Ok(0),
            Err(error) => Err(self.why_broken(&error)),
        }
    }

    /// Send everything. One message that takes longer than this is stalled, even where a little of it passes now and then.
    pub(super) fn send(&mut self, mut bytes: &[u8]) -> Result<(), BenchError> {
        let begun = Instant::now();
        while !bytes.is_empty() {
            let count = self.send_some(bytes)?;
            bytes = &bytes[count..];
            if !bytes.is_empty() && begun.elapsed() > STALL_TIMEOUT {
                return Err(self.stalled());
            }
        }
        Ok(())
    }

    /// Say something to the agent.
    pub(super) fn say(&mut self, message: Message) -> Result<(), BenchError> {
        let bytes = Frame::Bench(message).to_bytes(OPERATION_CHANNEL)?;
        self.send(&bytes)
    }

    /// If sending fails, the agent may have said why before it closed. An agent that says something else without end does
    /// not hold up the failure.
    fn why_broken(&mut self, error: &io::Error) -> BenchError {
        let until = Instant::now() + LAST_WORDS_TIMEOUT;
        let mut nothing = Received::new(None);
        while Instant::now() < until && matches!(self.receive(), Ok(true)) {
            loop {
                match self.next(&mut nothing) {
                    Ok(None) => break,
                    Ok(Some(_)) => {}
                    Err(error) => return error,
                }
            }
        }
        self.broken(error)
    }

    fn broken(&self, what: impl ToString) -> BenchError {
        self.failed(GuestError::Broken(what.to_string()))
    }

    pub(super) fn protocol(&self, what: impl Into<String>) -> BenchError {
        self.failed(GuestError::Protocol(printable(&what.into())))
    }

    pub(super) fn stalled(&self) -> BenchError {
        self.failed(GuestError::NoAnswer {
            seconds: STALL_TIMEOUT.as_secs(),
        })
    }

    fn failed(&self, source: GuestError) -> BenchError {
        failed(&self.vm, source)
    }
}

fn failed(vm: &str, source: GuestError) -> BenchError {
    let vm = vm.to_owned();
    BenchError::Guest { vm, source }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.stream.as_fd()
    }
}

fn is_no_failure(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}
