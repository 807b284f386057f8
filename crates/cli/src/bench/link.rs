//! A connection to an agent that takes part in a measurement.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use wire::agent::bench::{Arrival, Message, Received, Start};
use wire::agent::{
    CAPABILITY_BENCH, CONNECTION_CHANNEL, Decoder, Frame, Hello, OPERATION_CHANNEL, negotiate,
};

use super::{BenchError, Party, STALL_TIMEOUT};
use crate::guest::{ANSWER_TIMEOUT, Deadline, across_secret_change, connect, printable};

/// How long one call of the system may wait before the stream looks whether it is enough.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The connection, and what it brought.
#[derive(Debug)]
pub(super) struct Link {
    vm: String,
    stream: UnixStream,
    decoder: Decoder,
}

impl Link {
    /// Reach the agent of this VM, and ask it for this.
    pub(super) fn open(party: &Party, start: Start) -> Result<Link, BenchError> {
        let mut link = across_secret_change(|| Link::reach(party), BenchError::is_secret_change)?;
        link.say(Message::Start(start))?;
        Ok(link)
    }

    fn reach(party: &Party) -> Result<Link, BenchError> {
        let vm = party.name.clone();
        let stream = match connect(&party.host_socket, Deadline::after(ANSWER_TIMEOUT)) {
            Ok(stream) => stream,
            Err(source) => return Err(BenchError::Connect { vm, source }),
        };
        let mut link = Link {
            vm,
            stream,
            decoder: Decoder::new(),
        };
        let local = |source| BenchError::Local {
            what: "set up a connection",
            source,
        };
        link.stream
            .set_read_timeout(Some(LOOK_INTERVAL))
            .map_err(local)?;
        link.stream
            .set_write_timeout(Some(LOOK_INTERVAL))
            .map_err(local)?;
        link.greet()?;
        Ok(link)
    }

    fn greet(&mut self) -> Result<(), BenchError> {
        let ours = Hello::new(concat!("ringdown ", env!("CARGO_PKG_VERSION")));
        let bytes = Frame::Hello(ours.clone()).to_bytes(CONNECTION_CHANNEL)?;
        self.send(&bytes)?;
        let theirs = match self.wait_for_frame()? {
            Frame::Hello(hello) => hello,
            _ => return Err(self.protocol("its first frame is not a hello")),
        };
        if negotiate(&ours, &theirs).is_none() || !theirs.can(CAPABILITY_BENCH) {
            return Err(BenchError::Unsupported {
                vm: self.vm.clone(),
                software: printable(&theirs.software),
            });
        }
        Ok(())
    }

    /// The next message, which the agent owes now.
    pub(super) fn answer(&mut self) -> Result<Message, BenchError> {
        match self.wait_for_frame()? {
            Frame::Bench(message) => Ok(message),
            _ => Err(self.protocol("a frame that is not part of a benchmark")),
        }
    }

    /// Wait until the agent is ready.
    pub(super) fn wait_until_ready(&mut self) -> Result<(), BenchError> {
        match self.answer()? {
            Message::Ready => Ok(()),
            other => Err(self.protocol(format!("expected that it is ready, not {other:?}"))),
        }
    }

    fn wait_for_frame(&mut self) -> Result<Frame<'static>, BenchError> {
        let until = Instant::now() + ANSWER_TIMEOUT;
        let mut nothing = Received::new(None);
        loop {
            match self.next(&mut nothing)? {
                Some(Arrival::Frame(Frame::Bench(message))) => return Ok(Frame::Bench(message)),
                Some(Arrival::Frame(Frame::Hello(hello))) => return Ok(Frame::Hello(hello)),
                Some(_) => return Err(self.protocol("an unexpected frame")),
                None if Instant::now() >= until => return Err(self.stalled(ANSWER_TIMEOUT)),
                None => {}
            }
            self.receive()?;
        }
    }

    /// What comes next of what was received already. What the agent says about a failure is the failure.
    pub(super) fn next<'d>(
        &'d mut self,
        received: &mut Received,
    ) -> Result<Option<Arrival<'d>>, BenchError> {
        let vm = &self.vm;
        match received.next(&mut self.decoder) {
            Ok(Arrival::Nothing) => Ok(None),
            Ok(Arrival::Frame(Frame::Error(report))) => Err(BenchError::Agent {
                vm: vm.clone(),
                report,
            }),
            Ok(arrival) => Ok(Some(arrival)),
            Err(error) => Err(BenchError::Protocol {
                vm: vm.clone(),
                what: error.to_string(),
            }),
        }
    }

    /// Bytes without frames, at most `limit`, of what was received already.
    pub(super) fn raw(&mut self, limit: usize) -> &[u8] {
        self.decoder.take_raw(limit)
    }

    /// Receive what comes within a short while: whether something came.
    pub(super) fn receive(&mut self) -> Result<bool, BenchError> {
        match self.stream.read(self.decoder.space()) {
            Ok(0) => Err(self.broken("it was closed")),
            Ok(count) => {
                self.decoder.advance(count);
                Ok(true)
            }
            Err(error) if is_no_failure(&error) => Ok(false),
            Err(error) => Err(self.broken(error)),
        }
    }

    /// Send what is taken within a short while: how many bytes.
    pub(super) fn send_some(&mut self, bytes: &[u8]) -> Result<usize, BenchError> {
        match self.stream.write(bytes) {
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
                return Err(self.stalled(STALL_TIMEOUT));
            }
        }
        Ok(())
    }

    /// Say something to the agent.
    pub(super) fn say(&mut self, message: Message) -> Result<(), BenchError> {
        let bytes = Frame::Bench(message).to_bytes(OPERATION_CHANNEL)?;
        self.send(&bytes)
    }

    /// If sending fails, the agent may have said why before it closed.
    fn why_broken(&mut self, error: &io::Error) -> BenchError {
        let mut nothing = Received::new(None);
        while matches!(self.receive(), Ok(true)) {
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

    pub(super) fn broken(&self, what: impl ToString) -> BenchError {
        BenchError::Broken {
            vm: self.vm.clone(),
            what: what.to_string(),
        }
    }

    pub(super) fn protocol(&self, what: impl Into<String>) -> BenchError {
        BenchError::Protocol {
            vm: self.vm.clone(),
            what: printable(&what.into()),
        }
    }

    pub(super) fn stalled(&self, time: Duration) -> BenchError {
        BenchError::Stalled {
            vm: self.vm.clone(),
            seconds: time.as_secs(),
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn is_no_failure(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}
