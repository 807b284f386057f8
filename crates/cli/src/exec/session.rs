//! The session with the agent, on a stream that reaches it.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use wire::agent::credit::SendCredit;
use wire::agent::{
    AGENT_AWAY, CAPABILITY_EXEC, ExecStart, ExitStatus, Frame, HEADER_LEN, MAX_DATA_LEN,
    OPERATION_CHANNEL, Stream, data_header,
};

use super::escape::Keys;
use super::output::{Output, read_some};
use super::terminal::{self, RawMode};
use super::{ExecError, ExecOptions, Local, signals};
use crate::guest::{Connection, Deadline, GuestError};

/// The most standard output that is kept while it cannot be written, in bytes.
const STDOUT_WINDOW: u32 = 1024 * 1024;

/// The most standard error that is kept while it cannot be written, in bytes.
const STDERR_WINDOW: u32 = 256 * 1024;

/// How many signals and new window sizes may wait to be sent; more are dropped.
const MAX_PENDING_EVENTS: usize = 64;

/// How long an agent may take to show that it runs, after a signal that asks the command to end.
const SIGNAL_PATIENCE: Duration = Duration::from_secs(5);

/// A further such signal ends the session if the one before has been without an answer for so long. `timeout` sends two at once.
const REPEATED_AFTER: Duration = Duration::from_secs(1);

/// The wait between two calls of an agent that cannot be reached.
const CALL_INTERVAL: Duration = Duration::from_millis(200);

/// Run a command through the agent of the guest behind this host socket, to which there is a connection: its exit code.
pub(super) fn run(
    mut connection: Connection,
    host_socket: &Path,
    options: &ExecOptions,
    local: Local,
) -> Result<u8, ExecError> {
    start(&mut connection, options, &local)?;
    connection.wait_for(None);
    let status = Running::new(connection, host_socket, options, local)?.carry()?;
    Ok(match status {
        ExitStatus::Code(code) => code,
        ExitStatus::Signal(number) => 128 + (number & 0x7f),
    })
}

fn local_error(what: &'static str) -> impl FnOnce(io::Error) -> ExecError {
    move |source| ExecError::Local { what, source }
}

/// Ask for the command and wait until it runs.
fn start(
    connection: &mut Connection,
    options: &ExecOptions,
    local: &Local,
) -> Result<(), GuestError> {
    let bytes_of = |text: &std::ffi::OsStr| text.as_bytes().to_vec();
    let request = ExecStart {
        arguments: options
            .command
            .iter()
            .map(|argument| bytes_of(argument))
            .collect(),
        environment: options
            .environment
            .iter()
            .map(|(name, value)| (bytes_of(name), bytes_of(value)))
            .collect(),
        directory: options
            .directory
            .as_deref()
            .map(Path::as_os_str)
            .map(bytes_of),
        terminal: options.terminal.then(|| terminal::describe(local)),
    };
    let mut bytes = Frame::ExecStart(request).to_bytes(OPERATION_CHANNEL)?;
    for (stream, window) in [
        (Stream::Stdout, STDOUT_WINDOW),
        (Stream::Stderr, STDERR_WINDOW),
    ] {
        Frame::Credit {
            stream,
            bytes: window,
        }
        .encode(OPERATION_CHANNEL, &mut bytes)?;
    }
    match connection.ask(&bytes)? {
        Frame::Started { .. } => Ok(()),
        _ => Err(GuestError::Protocol(
            "it did not say that the command runs".to_owned(),
        )),
    }
}

/// What the threads of a session share.
#[derive(Debug)]
struct Shared {
    /// For sending; a sender holds the lock for a whole frame.
    sender: Mutex<UnixStream>,
    /// The same socket, to shut it down while another thread sends.
    stream: UnixStream,
    input: Mutex<Input>,
    input_changed: Condvar,
    stdout: Output,
    stderr: Output,
    /// The command has ended or the connection has: signals are this process's own again.
    over: AtomicBool,
    /// Why the session was left before the command's end.
    left: Mutex<Option<ExecError>>,
    raw_mode: Option<RawMode>,
    /// The first failure at the local ends of the streams.
    problem: Mutex<Option<ExecError>>,
}

#[derive(Debug, Default)]
struct Input {
    credit: SendCredit,
    /// Input is no longer taken.
    closed: bool,
}

impl Shared {
    /// Send a frame. If that fails the connection is broken, which the receiving thread notices as well.
    fn send(&self, frame: &Frame<'_>) {
        if let Ok(bytes) = frame.to_bytes(OPERATION_CHANNEL) {
            let _ = sys::lock(&self.sender).write_all(&bytes);
        }
    }

    fn report(&self, problem: ExecError) {
        sys::lock(&self.problem).get_or_insert(problem);
    }

    /// How much input may be sent, at least one byte, waiting for credit; nothing if no more is wanted.
    fn input_allowance(&self) -> Option<usize> {
        let waiting = |input: &mut Input| input.credit.available() == 0 && !input.closed;
        let input = self
            .input_changed
            .wait_while(sys::lock(&self.input), waiting)
            .unwrap_or_else(PoisonError::into_inner);
        (!input.closed).then(|| input.credit.available())
    }

    fn close_input(&self) {
        sys::lock(&self.input).closed = true;
        self.input_changed.notify_all();
    }

    /// The session ends, whatever the agent does, and `why` says it.
    fn leave(&self, why: ExecError) {
        sys::lock(&self.left).get_or_insert(why);
        self.over.store(true, Ordering::Release);
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// A command that runs, seen from here.
struct Running {
    connection: Connection,
    shared: Arc<Shared>,
    writers: Vec<JoinHandle<()>>,
    signals: Option<signal_hook::iterator::Handle>,
}

impl Running {
    fn new(
        connection: Connection,
        host_socket: &Path,
        options: &ExecOptions,
        local: Local,
    ) -> Result<Running, ExecError> {
        let clone = || {
            connection
                .stream
                .try_clone()
                .map_err(local_error("copy a descriptor"))
        };
        let raw_mode = if options.terminal {
            RawMode::enter(&local.stdin)
                .map_err(|error| local_error("use the terminal")(error.into()))?
        } else {
            None
        };
        let shared = Arc::new(Shared {
            sender: Mutex::new(clone()?),
            stream: clone()?,
            input: Mutex::default(),
            input_changed: Condvar::new(),
            stdout: Output::new(STDOUT_WINDOW),
            stderr: Output::new(STDERR_WINDOW),
            over: AtomicBool::new(false),
            left: Mutex::default(),
            raw_mode,
            problem: Mutex::new(None),
        });
        let mut running = Running {
            connection,
            shared,
            writers: Vec::new(),
            signals: None,
        };
        running.start_threads(host_socket, options, local)?;
        Ok(running)
    }

    fn start_threads(
        &mut self,
        host_socket: &Path,
        options: &ExecOptions,
        local: Local,
    ) -> Result<(), ExecError> {
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            thread::Builder::new()
                .name(name.to_owned())
                .spawn(work)
                .map_err(local_error("start a thread"))
        };
        let (events, pending) = sync_channel(MAX_PENDING_EVENTS);
        let shared = Arc::clone(&self.shared);
        spawn("events", Box::new(move || send_events(&shared, &pending)))?;
        if local.signals {
            let terminal = options
                .terminal
                .then(|| copy_of_files(&local))
                .transpose()?;
            let forwarding = Forwarding {
                shared: Arc::clone(&self.shared),
                events,
                terminal,
                host_socket: host_socket.to_owned(),
                unanswered: Arc::default(),
            };
            // Once by itself: the size may have changed since the command was asked for.
            signals::Receiver::resized(&forwarding);
            self.signals =
                Some(signals::receive(forwarding).map_err(local_error("receive signals"))?);
        }
        let Local {
            stdin,
            stdout,
            stderr,
            ..
        } = local;
        let shared = Arc::clone(&self.shared);
        // Neither is waited for at the end: one may be inside a read of a terminal without input.
        if self.shared.raw_mode.is_some() {
            let keys = Arc::new(Keys::default());
            let (typed, watched) = (Arc::clone(&keys), Arc::clone(&shared));
            let watch = move || {
                if typed.watch(&stdin) {
                    watched.leave(ExecError::Left);
                }
            };
            spawn("keys", Box::new(watch))?;
            let send = move || {
                send_input(&shared, |buffer| keys.take(buffer));
                keys.close();
            };
            spawn("stdin", Box::new(send))?;
        } else {
            let send = move || send_input(&shared, |buffer| read_some(&stdin, buffer));
            spawn("stdin", Box::new(send))?;
        }
        for (stream, file) in [(Stream::Stdout, stdout), (Stream::Stderr, stderr)] {
            let shared = Arc::clone(&self.shared);
            self.writers.push(spawn(
                "output",
                Box::new(move || write_output(&shared, stream, &file)),
            )?);
        }
        Ok(())
    }

    /// Receive until the command has ended, and all of its output is written.
    fn carry(mut self) -> Result<ExitStatus, ExecError> {
        let result = self.receive_frames();
        self.shared.over.store(true, Ordering::Release);
        self.shared.close_input();
        self.shared.stdout.end();
        self.shared.stderr.end();
        // What arrived before the connection broke is written in any case.
        for writer in self.writers.drain(..) {
            // A panic there was reported on standard error already.
            let _ = writer.join();
        }
        // A status that has come is returned, even after `left`.
        let left = sys::lock(&self.shared.left).take();
        let status = result.map_err(|error| left.unwrap_or(error.into()))?;
        match sys::lock(&self.shared.problem).take() {
            Some(problem) => Err(problem),
            None => Ok(status),
        }
    }

    fn receive_frames(&mut self) -> Result<ExitStatus, GuestError> {
        let protocol = |message: &str| GuestError::Protocol(message.to_owned());
        loop {
            match self.connection.decoder.next_frame()? {
                Some((OPERATION_CHANNEL, frame)) => match frame {
                    Frame::Data {
                        stream: Stream::Stdout,
                        bytes,
                    } => {
                        self.shared
                            .stdout
                            .push(bytes)
                            .map_err(|error| protocol(&error.to_string()))?;
                    }
                    Frame::Data {
                        stream: Stream::Stderr,
                        bytes,
                    } => {
                        self.shared
                            .stderr
                            .push(bytes)
                            .map_err(|error| protocol(&error.to_string()))?;
                    }
                    Frame::EndOfStream(Stream::Stdout) => self.shared.stdout.end(),
                    Frame::EndOfStream(Stream::Stderr) => self.shared.stderr.end(),
                    Frame::Credit {
                        stream: Stream::Stdin,
                        bytes,
                    } => {
                        let granted = sys::lock(&self.shared.input).credit.grant(bytes);
                        granted.map_err(|error| protocol(&error.to_string()))?;
                        self.shared.input_changed.notify_all();
                    }
                    Frame::StreamClosed(Stream::Stdin) => self.shared.close_input(),
                    Frame::Exit(status) => return Ok(status),
                    Frame::Error(report) => return Err(GuestError::Agent(report)),
                    _ => return Err(protocol("an unexpected frame while the command runs")),
                },
                Some((_, Frame::Error(report))) => return Err(GuestError::Agent(report)),
                Some(_) => return Err(protocol("a frame for another channel")),
                None => self.connection.receive()?,
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(signals) = &self.signals {
            signals.close();
        }
        // The agent ends a command whose client is gone; a thread that still holds the socket must not prevent it.
        let _ = self.shared.stream.shutdown(Shutdown::Both);
        if let Some(raw_mode) = &self.shared.raw_mode {
            raw_mode.restore();
        }
    }
}

fn copy_of_files(local: &Local) -> Result<Local, ExecError> {
    let copy = || {
        let (stdin, stdout) = (local.stdin.try_clone()?, local.stdout.try_clone()?);
        Ok(Local {
            stdin,
            stdout,
            stderr: local.stderr.try_clone()?,
            signals: false,
        })
    };
    copy().map_err(local_error("copy a descriptor"))
}

/// Send standard input, as far as there is credit, until it ends or is no longer wanted.
fn send_input(shared: &Shared, mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) {
    let mut frame = vec![0; HEADER_LEN + MAX_DATA_LEN];
    while let Some(allowance) = shared.input_allowance() {
        let limit = allowance.min(MAX_DATA_LEN);
        match read(&mut frame[HEADER_LEN..HEADER_LEN + limit]) {
            Ok(0) => break,
            Ok(count) => {
                sys::lock(&shared.input).credit.spend(count);
                let Ok(header) = data_header(Stream::Stdin, OPERATION_CHANNEL, count) else {
                    unreachable!("a read gives at least one byte and at most its buffer");
                };
                frame[..HEADER_LEN].copy_from_slice(&header);
                if sys::lock(&shared.sender)
                    .write_all(&frame[..HEADER_LEN + count])
                    .is_err()
                {
                    return;
                }
            }
            Err(error) => {
                shared.report(ExecError::Input(error));
                break;
            }
        }
    }
    shared.send(&Frame::EndOfStream(Stream::Stdin));
}

/// Write one output, and give credit back.
fn write_output(shared: &Shared, stream: Stream, file: &std::os::fd::OwnedFd) {
    let (output, name) = match stream {
        Stream::Stderr => (&shared.stderr, "standard error"),
        _ => (&shared.stdout, "standard output"),
    };
    if let Err(source) = output.drain(file, |bytes| shared.send(&Frame::Credit { stream, bytes })) {
        shared.send(&Frame::StreamClosed(stream));
        // A reader that went away (`| head`) is nothing to complain about: the command gets SIGPIPE as usual.
        if source.kind() != io::ErrorKind::BrokenPipe {
            shared.report(ExecError::Output { name, source });
        }
    }
}

/// Send signals and window sizes. On a thread of its own, because sending may block and receiving signals must not.
fn send_events(shared: &Shared, pending: &Receiver<Frame<'static>>) {
    while let Ok(frame) = pending.recv() {
        shared.send(&frame);
    }
}

/// What this process's signals do.
struct Forwarding {
    shared: Arc<Shared>,
    events: SyncSender<Frame<'static>>,
    /// The files of which one may be the terminal, if the command has a terminal.
    terminal: Option<Local>,
    /// Where the agent is asked whether it runs.
    host_socket: PathBuf,
    /// Since when it is asked, while it has not answered.
    unanswered: Arc<Mutex<Option<Instant>>>,
}

impl signals::Receiver for Forwarding {
    fn forward(&self, signal: u8) {
        // With that many waiting, the guest takes none anyhow.
        let _ = self.events.try_send(Frame::Signal(signal));
    }

    fn resized(&self) {
        if let Some((rows, columns)) = self.terminal.as_ref().and_then(terminal::size) {
            let _ = self.events.try_send(Frame::WindowSize { rows, columns });
        }
    }

    fn asks_to_end(&self) {
        let mut unanswered = sys::lock(&self.unanswered);
        match *unanswered {
            Some(since) if since.elapsed() >= REPEATED_AFTER => self.give_up(),
            Some(_) => {}
            None => {
                *unanswered = Some(Instant::now());
                let (shared, socket) = (Arc::clone(&self.shared), self.host_socket.clone());
                let unanswered = Arc::clone(&self.unanswered);
                let call = move || match call_agent(&socket) {
                    Ok(()) => *sys::lock(&unanswered) = None,
                    Err(error) => shared.leave(ExecError::Silent(error)),
                };
                let thread = thread::Builder::new().name("call".to_owned());
                // Without a thread, further signals end the session.
                let _ = thread.spawn(call);
            }
        }
    }

    fn give_up(&self) {
        self.shared.leave(ExecError::Interrupted);
    }

    fn is_over(&self) -> bool {
        self.shared.over.load(Ordering::Acquire)
    }

    fn before_death(&self) {
        if let Some(raw_mode) = &self.shared.raw_mode {
            raw_mode.restore();
        }
    }
}

/// Calls the agent until it says anything, for [`SIGNAL_PATIENCE`]. The session's own connection does not show whether it runs: of a command that is silent and takes its
/// time to end, nothing comes.
fn call_agent(host_socket: &Path) -> Result<(), GuestError> {
    let deadline = Deadline::after(SIGNAL_PATIENCE);
    loop {
        match Connection::open_by(host_socket, CAPABILITY_EXEC, deadline) {
            Ok(_)
            | Err(GuestError::Agent(_) | GuestError::Unsupported(_) | GuestError::Protocol(_)) => {
                return Ok(());
            }
            // By the daemon, for want of room: that says nothing of the agent.
            Err(GuestError::Refused { reason }) if reason != AGENT_AWAY => return Ok(()),
            Err(error) if Instant::now() + CALL_INTERVAL >= deadline.at => return Err(error),
            Err(_) => thread::sleep(CALL_INTERVAL),
        }
    }
}
