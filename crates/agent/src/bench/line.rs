//! What a stream's payload passes on, and what the host says meanwhile.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use wire::agent::bench::{Arrival, Message, Received};
use wire::agent::{Decoder, ErrorKind, ErrorReport, Frame, OPERATION_CHANNEL};

use super::{STALL_TIMEOUT, protocol};
use crate::stop::Stop;
use crate::stream::{send_all, try_receive, until};

/// How long the host may take from the agent's "ready" to its "go": it connects all other streams meanwhile.
pub(super) const GO_TIMEOUT: Duration = Duration::from_secs(180);

/// The host's connection and, between guests, the circuit to the other.
#[derive(Debug)]
pub(super) struct Line<'a> {
    host: &'a OwnedFd,
    host_decoder: Decoder,
    /// The circuit to the other guest, if the payload does not pass on the host's connection.
    circuit: Option<(OwnedFd, Decoder)>,
    stop: bool,
    inside_payload: bool,
    ends: Option<Instant>,
}

impl<'a> Line<'a> {
    /// A line on the host's connection; `decoder` may hold what came with the request.
    pub(super) fn new(host: &'a OwnedFd, decoder: Decoder) -> Line<'a> {
        Line {
            host,
            host_decoder: decoder,
            circuit: None,
            stop: false,
            inside_payload: false,
            ends: None,
        }
    }

    /// From now on the payload passes here.
    pub(super) fn set_circuit(&mut self, circuit: OwnedFd, decoder: Decoder) {
        self.circuit = Some((circuit, decoder));
    }

    /// Give everything up at this time.
    pub(super) fn end_by(&mut self, ends: Instant) {
        self.ends = Some(ends);
    }

    /// Whether the payload passes between guests.
    pub(super) fn is_between_guests(&self) -> bool {
        self.circuit.is_some()
    }

    /// Whether the host said that it is enough.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop
    }

    /// Note whether a message of the sender would be taken for payload now.
    pub(super) fn set_inside_payload(&mut self, inside: bool) {
        self.inside_payload = inside;
    }

    /// Whether the host would take a message for payload now.
    pub(super) fn is_inside_payload(&self) -> bool {
        self.inside_payload && self.circuit.is_none()
    }

    /// Say something to the host.
    pub(super) fn tell_host(&self, message: Message) -> Result<(), Stop> {
        let bytes = encoded(message)?;
        send_all(self.host, &bytes, self.deadline()).map_err(Stop::HostGone)
    }

    /// Say something to the other end.
    pub(super) fn tell_other(&mut self, message: Message) -> Result<(), Stop> {
        let bytes = encoded(message)?;
        self.send(&bytes, false)
    }

    /// Wait until the host says "go".
    pub(super) fn wait_for_go(&mut self) -> Result<(), Stop> {
        let deadline = Instant::now() + GO_TIMEOUT;
        loop {
            match self.next_of_host()? {
                Some(Message::Go) => return Ok(()),
                Some(Message::Stop) => self.stop = true,
                Some(_) => return Err(protocol("expected the frame that starts the benchmark")),
                None => self.wait_for_host(deadline)?,
            }
        }
    }

    /// Take note of what the host has said, without waiting. Only for the sender, or between guests: otherwise what
    /// the host sends is payload.
    pub(super) fn hear_host(&mut self) -> Result<(), Stop> {
        loop {
            match self.next_of_host()? {
                Some(Message::Stop) => self.stop = true,
                Some(_) => {
                    return Err(protocol(
                        "expected the frame that stops the benchmark, or none",
                    ));
                }
                None => match try_receive(self.host, &mut self.host_decoder) {
                    Ok(None) => return Ok(()),
                    Ok(Some(0)) => return Err(gone(io::ErrorKind::UnexpectedEof)),
                    Ok(Some(_)) => {}
                    Err(error) => return Err(Stop::HostGone(error)),
                },
            }
        }
    }

    fn next_of_host(&mut self) -> Result<Option<Message>, Stop> {
        match self.host_decoder.next_frame() {
            Ok(None) => Ok(None),
            Ok(Some((OPERATION_CHANNEL, Frame::Bench(message)))) => Ok(Some(message)),
            Ok(Some(_)) => Err(protocol("a frame that is not part of a benchmark")),
            Err(error) => Err(protocol(error.to_string())),
        }
    }

    fn wait_for_host(&mut self, deadline: Instant) -> Result<(), Stop> {
        match crate::stream::receive(self.host, &mut self.host_decoder, deadline) {
            Ok(()) => Ok(()),
            Err(error) => Err(Stop::HostGone(error)),
        }
    }

    /// What comes next from the other end; waits for it.
    pub(super) fn next<'d>(
        &'d mut self,
        received: &mut Received,
    ) -> Result<Option<Arrival<'d>>, Stop> {
        let between = self.is_between_guests();
        let decoder = match &mut self.circuit {
            Some((_, decoder)) => decoder,
            None => &mut self.host_decoder,
        };
        match received.next(decoder) {
            Ok(Arrival::Nothing) => Ok(None),
            Ok(Arrival::Frame(Frame::Error(report))) if between => {
                let message = format!("the other guest's agent reports: {}", report.message);
                Err(Stop::Report(ErrorReport::new(report.kind, message)))
            }
            Ok(arrival) => Ok(Some(arrival)),
            Err(error) => Err(protocol(error.to_string())),
        }
    }

    /// Bytes without frames from the other end, at most `limit`; none if none are there.
    pub(super) fn raw(&mut self, limit: usize) -> &[u8] {
        match &mut self.circuit {
            Some((_, decoder)) => decoder.take_raw(limit),
            None => self.host_decoder.take_raw(limit),
        }
    }

    /// Receive at least one byte from the other end.
    pub(super) fn receive(&mut self) -> Result<(), Stop> {
        let deadline = self.deadline();
        if self.ends == Some(deadline) && Instant::now() >= deadline {
            let message = "the benchmark takes longer than was agreed";
            return Err(Stop::Report(ErrorReport::new(
                ErrorKind::Unavailable,
                message,
            )));
        }
        loop {
            let result = match &mut self.circuit {
                Some((circuit, decoder)) => try_receive(&*circuit, decoder),
                None => try_receive(self.host, &mut self.host_decoder),
            };
            match result {
                Ok(Some(0)) => return Err(self.other_gone(io::ErrorKind::UnexpectedEof.into())),
                Ok(Some(_)) => return Ok(()),
                Ok(None) => self.wait(PollFlags::IN, false, deadline)?,
                Err(error) => return Err(self.other_gone(error)),
            }
        }
    }

    /// Send all of this to the other end. With `listens`, what comes meanwhile on the same connection is the host's word.
    pub(super) fn send(&mut self, mut bytes: &[u8], listens: bool) -> Result<(), Stop> {
        while !bytes.is_empty() {
            let socket = self
                .circuit
                .as_ref()
                .map_or(self.host, |(circuit, _)| circuit);
            match rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, listens, self.deadline())?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.other_gone(error.into())),
            }
        }
        Ok(())
    }

    /// Wait for the other end, and hear the host meanwhile where it can be heard.
    fn wait(&mut self, flags: PollFlags, listens: bool, deadline: Instant) -> Result<(), Stop> {
        let timeout = until(deadline);
        let (other, host) = match &self.circuit {
            Some((circuit, _)) => {
                let mut fds = [
                    PollFd::new(circuit, flags),
                    PollFd::new(self.host, PollFlags::IN),
                ];
                let count = rustix::event::poll(&mut fds, Some(&timeout));
                check_poll(count)?;
                (!fds[0].revents().is_empty(), !fds[1].revents().is_empty())
            }
            None => {
                let wanted = if listens {
                    flags | PollFlags::IN
                } else {
                    flags
                };
                let mut fds = [PollFd::new(self.host, wanted)];
                check_poll(rustix::event::poll(&mut fds, Some(&timeout)))?;
                let found = fds[0].revents();
                (
                    !found.is_empty(),
                    listens && found.intersects(PollFlags::IN),
                )
            }
        };
        if host {
            self.hear_host()?;
        }
        if !other && !host && Instant::now() >= deadline {
            let message = format!("nothing passed for {} s", STALL_TIMEOUT.as_secs());
            return Err(Stop::Report(ErrorReport::new(
                ErrorKind::Unavailable,
                message,
            )));
        }
        Ok(())
    }

    /// Wait for one of two: something to read there, or a word of the host.
    pub(super) fn wait_for(&mut self, socket: &OwnedFd, deadline: Instant) -> Result<bool, Stop> {
        let timeout = until(deadline);
        let mut fds = [
            PollFd::new(socket, PollFlags::IN),
            PollFd::new(self.host, PollFlags::IN),
        ];
        check_poll(rustix::event::poll(&mut fds, Some(&timeout)))?;
        let (there, host) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if host {
            self.hear_host()?;
        }
        Ok(there)
    }

    fn deadline(&self) -> Instant {
        let stalled = Instant::now() + STALL_TIMEOUT;
        self.ends.map_or(stalled, |ends| ends.min(stalled))
    }

    fn other_gone(&self, error: io::Error) -> Stop {
        if self.circuit.is_none() {
            return Stop::HostGone(error);
        }
        let message = format!("the circuit between the guests broke: {error}");
        Stop::Report(ErrorReport::new(ErrorKind::Unreachable, message))
    }
}

fn check_poll(result: Result<usize, Errno>) -> Result<(), Stop> {
    match result {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(Stop::HostGone(error.into())),
    }
}

fn encoded(message: Message) -> Result<Vec<u8>, Stop> {
    let bytes = Frame::Bench(message).to_bytes(OPERATION_CHANNEL);
    bytes.map_err(|error| Stop::Report(ErrorReport::new(ErrorKind::Internal, error.to_string())))
}

fn gone(kind: io::ErrorKind) -> Stop {
    Stop::HostGone(kind.into())
}
