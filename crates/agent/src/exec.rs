//! Between a running command and the host: one thread, one poll loop.
//!
//! Every turn sends what the socket takes, waits until something can be done, and does it. What is waited for follows
//! from what there is room for: output is read only with credit and with room in the outgoing buffer, the terminal or
//! pipe of the input is watched only while input is queued. So no turn is idle, and nothing is buffered without a bound.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::Signal;
use rustix::termios::SpecialCodeIndex;
use wire::agent::credit::{CreditError, ReceiveWindow, SendCredit};
use wire::agent::{
    Decoder, ErrorKind, ErrorReport, ExitStatus, Frame, MAX_DATA_LEN, OPERATION_CHANNEL, Stream,
};

use crate::command::{Running, set_window_size};
use crate::outgoing::Outgoing;
use crate::stop::Stop;
use crate::stream::{try_receive, until, wait};

/// The most standard input that is kept for a command that does not read it yet, in bytes.
const INPUT_WINDOW: u32 = 256 * 1024;

/// How long the output of processes that outlive the command is still waited for. What the command itself wrote is
/// delivered however long that takes.
const DRAIN_GRACE: Duration = Duration::from_millis(500);

/// How long a command whose client has gone may take between SIGHUP and SIGKILL.
const HANGUP_GRACE: Duration = Duration::from_secs(2);

/// How often a terminal's reader gets the end of its input, for as long as it runs.
const END_INTERVAL: Duration = Duration::from_secs(1);

/// One command and the host that asked for it.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    socket: &'a OwnedFd,
    decoder: Decoder,
    state: State,
}

/// Everything but the decoder, whose frames borrow from it.
#[derive(Debug)]
struct State {
    outgoing: Outgoing,
    command: Running,
    input: Input,
    outputs: [Output; 2],
    status: Option<ExitStatus>,
    /// When the output of others is not waited for any more.
    drain_ends: Option<Instant>,
}

/// The host's input on its way to the command.
#[derive(Debug)]
struct Input {
    /// At most the window.
    queue: VecDeque<u8>,
    window: ReceiveWindow,
    /// The host sends no more.
    ended: bool,
    /// The last byte that the command was given.
    last_byte: u8,
    /// When a terminal's reader gets the end of its input again.
    says_end_at: Option<Instant>,
}

/// The command's output on its way to the host.
#[derive(Debug)]
struct Output {
    stream: Stream,
    credit: SendCredit,
    /// The host wants no more of it.
    discarded: bool,
    /// How many bytes are still to be read, once only what is there already counts.
    remaining: Option<usize>,
}

/// What poll reports about.
#[derive(Debug, Clone, Copy)]
enum Source {
    Socket,
    Input,
    Output(usize),
    Ended,
}

impl<'a> Session<'a> {
    /// For `command`; `decoder` may hold frames that came with the request.
    pub(crate) fn new(socket: &'a OwnedFd, decoder: Decoder, command: Running) -> Session<'a> {
        let output = |stream| Output {
            stream,
            credit: SendCredit::default(),
            discarded: false,
            remaining: None,
        };
        let window = ReceiveWindow::new(INPUT_WINDOW);
        let state = State {
            outgoing: Outgoing::new(),
            command,
            input: Input {
                queue: VecDeque::new(),
                window,
                ended: false,
                last_byte: b'\n',
                says_end_at: None,
            },
            outputs: [output(Stream::Stdout), output(Stream::Stderr)],
            status: None,
            drain_ends: None,
        };
        Session {
            socket,
            decoder,
            state,
        }
    }

    /// Carry bytes and signals until the command has ended and the host has been sent everything.
    ///
    /// # Errors
    /// Why it ended before; the command is to be ended by [`Session::abandon`].
    pub(crate) fn run(&mut self) -> Result<(), Stop> {
        let pid = self.state.command.pid();
        self.state.push(&Frame::Started { pid })?;
        self.state.push(&Frame::Credit {
            stream: Stream::Stdin,
            bytes: self.state.input.window.size(),
        })?;
        self.take_frames()?;
        loop {
            self.state
                .outgoing
                .send(self.socket)
                .map_err(Stop::HostGone)?;
            if let Some(status) = self.state.complete() {
                self.state.push(&Frame::Exit(status))?;
                return self.flush(None);
            }
            self.turn()?;
        }
    }

    /// End a command whose session failed, and send the host the reason, if there is one.
    pub(crate) fn abandon(mut self, stop: &Stop) {
        if let Stop::Report(report) = stop {
            let sent = self
                .state
                .outgoing
                .push(OPERATION_CHANNEL, &Frame::Error(report.clone()));
            if sent.is_ok() {
                // The host may be gone as well; the command ends in any case.
                let _ = self.flush(Some(Instant::now() + HANGUP_GRACE));
            }
        }
        self.state.command.hang_up(Instant::now() + HANGUP_GRACE);
    }

    /// Wait until something can be done, and do it.
    fn turn(&mut self) -> Result<(), Stop> {
        for (source, events) in self.state.wait(self.socket)? {
            match source {
                Source::Socket if events == PollFlags::OUT => {}
                Source::Socket => match try_receive(self.socket, &mut self.decoder) {
                    Ok(Some(0)) => {
                        return Err(Stop::HostGone(std::io::ErrorKind::UnexpectedEof.into()));
                    }
                    Ok(_) => self.take_frames()?,
                    Err(error) => return Err(Stop::HostGone(error)),
                },
                Source::Input => self.state.feed(events)?,
                Source::Output(index) => self.state.carry(index)?,
                Source::Ended => self.state.command_ended()?,
            }
        }
        self.state.say_end_again();
        self.state.check_drain()
    }

    fn take_frames(&mut self) -> Result<(), Stop> {
        loop {
            match self.decoder.next_frame() {
                Ok(Some((OPERATION_CHANNEL, frame))) => self.state.handle(frame)?,
                Ok(Some((channel, _))) => {
                    return Err(protocol(format!(
                        "a frame for the unknown channel {channel}"
                    )));
                }
                Ok(None) => return Ok(()),
                Err(error) => return Err(protocol(error.to_string())),
            }
        }
    }

    /// Send everything that is outgoing.
    fn flush(&mut self, deadline: Option<Instant>) -> Result<(), Stop> {
        let far = Duration::from_secs(3600);
        loop {
            self.state
                .outgoing
                .send(self.socket)
                .map_err(Stop::HostGone)?;
            if self.state.outgoing.is_empty() {
                return Ok(());
            }
            match wait(
                self.socket,
                PollFlags::OUT,
                deadline.unwrap_or_else(|| Instant::now() + far),
            ) {
                Err(error)
                    if deadline.is_some() || error.kind() != std::io::ErrorKind::TimedOut =>
                {
                    return Err(Stop::HostGone(error));
                }
                _ => {}
            }
        }
    }
}

impl State {
    fn push(&mut self, frame: &Frame<'_>) -> Result<(), Stop> {
        self.outgoing
            .push(OPERATION_CHANNEL, frame)
            .map_err(Stop::Report)
    }

    /// The exit status, once the output has ended too.
    fn complete(&self) -> Option<ExitStatus> {
        self.status
            .filter(|_| self.command.stdout.is_none() && self.command.stderr.is_none())
    }

    /// The command's end of an output.
    fn output(&mut self, index: usize) -> &mut Option<OwnedFd> {
        if index == 0 {
            &mut self.command.stdout
        } else {
            &mut self.command.stderr
        }
    }

    fn wait<'s>(&'s self, socket: &'s OwnedFd) -> Result<Vec<(Source, PollFlags)>, Stop> {
        let mut sources = Vec::with_capacity(5);
        let mut polled = Vec::with_capacity(5);
        let mut watch = |source, file: BorrowedFd<'s>, flags| {
            sources.push(source);
            polled.push(PollFd::from_borrowed_fd(file, flags));
        };
        let sending = if self.outgoing.is_empty() {
            PollFlags::empty()
        } else {
            PollFlags::OUT
        };
        watch(Source::Socket, socket.as_fd(), PollFlags::IN | sending);
        if let Some(stdin) = &self.command.stdin {
            if !self.input.queue.is_empty() {
                watch(Source::Input, stdin.as_fd(), PollFlags::OUT);
            } else if self.command.terminal.is_none() {
                // A pipe without readers is reported even when nothing is asked for.
                watch(Source::Input, stdin.as_fd(), PollFlags::empty());
            }
        }
        for (index, file) in [&self.command.stdout, &self.command.stderr]
            .into_iter()
            .enumerate()
        {
            let Some(file) = file else {
                continue;
            };
            if self.outputs[index].may_read(&self.outgoing) {
                watch(Source::Output(index), file.as_fd(), PollFlags::IN);
            }
        }
        if self.status.is_none() {
            watch(Source::Ended, self.command.ended(), PollFlags::IN);
        }
        let first = [self.drain_ends, self.input.says_end_at];
        let timeout = first.into_iter().flatten().min().map(until);
        match rustix::event::poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(internal(&format!("poll failed: {error}"))),
        }
        let events = polled.iter().map(PollFd::revents);
        Ok(sources
            .into_iter()
            .zip(events)
            .filter(|(_, events)| !events.is_empty())
            .collect())
    }

    fn handle(&mut self, frame: Frame<'_>) -> Result<(), Stop> {
        match frame {
            Frame::Data {
                stream: Stream::Stdin,
                bytes,
            } => self.accept_input(bytes),
            Frame::EndOfStream(Stream::Stdin) => {
                self.input.ended = true;
                self.finish_input_if_due();
                Ok(())
            }
            Frame::Credit {
                stream: Stream::Stdout,
                bytes,
            } => Ok(self.outputs[0].credit.grant(bytes)?),
            Frame::Credit {
                stream: Stream::Stderr,
                bytes,
            } => Ok(self.outputs[1].credit.grant(bytes)?),
            Frame::StreamClosed(Stream::Stdout) => self.refuse_output(0),
            Frame::StreamClosed(Stream::Stderr) => self.refuse_output(1),
            Frame::WindowSize { rows, columns } => {
                if let Some(terminal) = &self.command.terminal {
                    // It fails only when the terminal is gone, which its output shows too.
                    let _ = set_window_size(terminal, rows, columns);
                }
                Ok(())
            }
            Frame::Signal(number) => {
                // A number without a name is none that a program waits for.
                if let Some(signal) = Signal::from_named_raw(number.into()) {
                    self.command.signal(signal);
                }
                Ok(())
            }
            Frame::Error(report) => Err(Stop::HostGone(std::io::Error::other(report.message))),
            other => Err(protocol(format!(
                "an unexpected frame while a command runs: {}",
                name_of(&other)
            ))),
        }
    }

    fn accept_input(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        if self.input.ended {
            return Err(protocol("standard input after its end".to_owned()));
        }
        self.input.window.received(bytes.len())?;
        if self.command.stdin.is_none() {
            return Ok(());
        }
        let mut rest = bytes;
        if self.input.queue.is_empty() {
            rest = &bytes[self.write_input(bytes)?..];
        }
        self.input.queue.extend(rest);
        Ok(())
    }

    /// The command's input can be written to, or is closed.
    fn feed(&mut self, events: PollFlags) -> Result<(), Stop> {
        if self.input.queue.is_empty() {
            return if events.intersects(PollFlags::ERR) {
                self.close_input()
            } else {
                Ok(())
            };
        }
        let (bytes, more) = self.input.queue.as_slices();
        let bytes = if bytes.is_empty() { more } else { bytes };
        // Taken out for the moment, so that it can be written while the state changes.
        let bytes = bytes[..bytes.len().min(MAX_DATA_LEN)].to_vec();
        let count = self.write_input(&bytes)?;
        self.input.queue.drain(..count.min(self.input.queue.len()));
        self.finish_input_if_due();
        Ok(())
    }

    /// Write input: how many bytes are done with.
    fn write_input(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        let Some(stdin) = &self.command.stdin else {
            return Ok(bytes.len());
        };
        match rustix::io::write(stdin, bytes) {
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Ok(count) => {
                self.input.last_byte = bytes[count - 1];
                self.input.window.consumed(count);
                if let Some(bytes) = self.input.window.grant_due() {
                    self.push(&Frame::Credit {
                        stream: Stream::Stdin,
                        bytes,
                    })?;
                }
                Ok(count)
            }
            // It has no reader any more.
            Err(_) => {
                self.close_input()?;
                Ok(bytes.len())
            }
        }
    }

    fn close_input(&mut self) -> Result<(), Stop> {
        self.input.queue.clear();
        if self.command.stdin.take().is_some() && !self.input.ended {
            self.push(&Frame::StreamClosed(Stream::Stdin))?;
        }
        Ok(())
    }

    /// Show the command the end of its input once it has been given all of it.
    fn finish_input_if_due(&mut self) {
        if !self.input.ended || !self.input.queue.is_empty() {
            return;
        }
        if self.command.terminal.is_some() {
            // Behind an unfinished line it takes two.
            self.say_end(if self.input.last_byte == b'\n' { 1 } else { 2 });
        } else {
            self.command.stdin.take();
        }
    }

    /// A terminal has no end but the character that stands for it, and that is read once: by a first program and not by the next, or by none if
    /// a shell makes the terminal raw just then. The end of a pipe stays, and so this is said again.
    fn say_end_again(&mut self) {
        if self
            .input
            .says_end_at
            .is_some_and(|at| at <= Instant::now())
        {
            self.say_end(1);
        }
    }

    fn say_end(&mut self, count: usize) {
        self.input.says_end_at = None;
        let Some(stdin) = &self.command.stdin else {
            return;
        };
        let code = rustix::termios::tcgetattr(stdin)
            .map_or(4, |modes| modes.special_codes[SpecialCodeIndex::VEOF]);
        // Should the terminal take nothing more, its reader has enough to read and the host can hang up.
        let _ = rustix::io::write(stdin, &[code, code][..count]);
        self.input.says_end_at = Some(Instant::now() + END_INTERVAL);
    }

    /// Read output of the command once.
    fn carry(&mut self, index: usize) -> Result<(), Stop> {
        let output = &mut self.outputs[index];
        let file = if index == 0 {
            &self.command.stdout
        } else {
            &self.command.stderr
        };
        let Some(file) = file else {
            return Ok(());
        };
        // Asked again, because the other output may have taken the room meanwhile.
        if !output.may_read(&self.outgoing) {
            return Ok(());
        }
        let remaining = output.remaining.unwrap_or(usize::MAX);
        let read = if output.discarded {
            rustix::io::read(file, &mut [0; 4096])
        } else {
            let limit = output.credit.available().min(remaining);
            self.outgoing.read_data(output.stream, file, limit)
        };
        match read {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            // The read end of a terminal whose last user is gone gives an error (EIO) instead of an end.
            Ok(0) | Err(_) => return self.end_output(index),
            Ok(count) => {
                if !output.discarded {
                    output.credit.spend(count);
                }
                output.remaining = output
                    .remaining
                    .map(|remaining| remaining.saturating_sub(count));
            }
        }
        if output.remaining == Some(0) {
            self.end_output(index)
        } else {
            Ok(())
        }
    }

    fn end_output(&mut self, index: usize) -> Result<(), Stop> {
        let output = &self.outputs[index];
        let (stream, discarded) = (output.stream, output.discarded);
        if self.output(index).take().is_some() && !discarded {
            self.push(&Frame::EndOfStream(stream))?;
        }
        Ok(())
    }

    /// The host takes no more of an output: a pipe is closed, so that the command notices; a terminal has other uses.
    fn refuse_output(&mut self, index: usize) -> Result<(), Stop> {
        self.outputs[index].discarded = true;
        if self.command.terminal.is_none() {
            self.output(index).take();
        }
        Ok(())
    }

    fn command_ended(&mut self) -> Result<(), Stop> {
        let status = self
            .command
            .reap()
            .map_err(|error| internal(&format!("wait failed: {error}")))?;
        self.status = Some(status);
        self.drain_ends = Some(Instant::now() + DRAIN_GRACE);
        self.command.stdin.take();
        self.input.queue.clear();
        self.input.says_end_at = None;
        // An output without credit is not read, so its end would go unnoticed.
        for index in 0..self.outputs.len() {
            if self.output(index).as_ref().is_some_and(is_at_end) {
                self.end_output(index)?;
            }
        }
        Ok(())
    }

    /// After the command and a moment of grace, only what is in the pipes already is still delivered: a process that
    /// the command left in the background may hold them open for ever.
    fn check_drain(&mut self) -> Result<(), Stop> {
        if self.drain_ends.is_none_or(|end| Instant::now() < end) {
            return Ok(());
        }
        self.drain_ends = None;
        for index in 0..self.outputs.len() {
            let Some(file) = self.output(index) else {
                continue;
            };
            let left = rustix::io::ioctl_fionread(file.as_fd()).map_or(0, |left| left as usize);
            if left == 0 || self.outputs[index].discarded {
                self.end_output(index)?;
            } else {
                self.outputs[index].remaining = Some(left);
            }
        }
        Ok(())
    }
}

impl Output {
    fn may_read(&self, outgoing: &Outgoing) -> bool {
        self.discarded || (self.credit.available() > 0 && outgoing.has_room_for_data())
    }
}

/// Whether nothing is there to be read and it has no writer any more.
fn is_at_end(file: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(file, PollFlags::IN)];
    let now = rustix::event::Timespec::default();
    rustix::event::poll(&mut polled, Some(&now)).is_ok() && polled[0].revents() == PollFlags::HUP
}

fn name_of(frame: &Frame<'_>) -> &'static str {
    match frame {
        Frame::Hello(_) => "hello",
        Frame::Secret(_) => "secret",
        Frame::Error(_) => "error",
        Frame::ExecStart(_) => "start of a command",
        Frame::Started { .. } => "started",
        Frame::Data { .. } => "output",
        Frame::EndOfStream(_) => "end of output",
        Frame::StreamClosed(_) => "closed input",
        Frame::Credit { .. } => "credit for input",
        Frame::WindowSize { .. } => "window size",
        Frame::Signal(_) => "signal",
        Frame::Exit(_) => "exit",
        Frame::Bench(_) => "bench",
        Frame::Ask(_) => "an ask",
        Frame::Answer(_) => "an answer",
        Frame::Forward(_) => "forward",
        Frame::Transfer(_) => "files",
    }
}

fn protocol(message: String) -> Stop {
    Stop::Report(ErrorReport::new(ErrorKind::Protocol, message))
}

fn internal(message: &str) -> Stop {
    Stop::Report(ErrorReport::new(ErrorKind::Internal, message))
}

impl From<CreditError> for Stop {
    fn from(error: CreditError) -> Stop {
        protocol(error.to_string())
    }
}
