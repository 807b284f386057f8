//! Programs of the host: each a thread with one socket, that blocks as ordinary programs do.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice, tee};

use super::control::Control;
use super::guest::Payload;
use super::pattern::Pattern;

/// Room of the pipes of the cheap mode, in bytes.
const PIPE_LEN: usize = 1 << 20;

/// Dials a guest: connects to its host socket and asks for a port.
///
/// # Errors
/// What the system reports; `ConnectionRefused` with the answer when it is not OK.
pub fn dial(patience: Duration, path: &Path, port: u32) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut line = [0; 128];
    let mut len = 0;
    // One byte at a time: what follows the line is the circuit's.
    while len < line.len() {
        if stream.read(&mut line[len..=len])? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        if line[len] == b'\n' {
            break;
        }
        len += 1;
    }
    let answer = String::from_utf8_lossy(&line[..len]).into_owned();
    match answer.starts_with("OK") {
        true => {
            stream.set_read_timeout(None)?;
            Ok(stream)
        }
        false => Err(io::Error::new(io::ErrorKind::ConnectionRefused, answer)),
    }
}

/// Accepts one connection.
///
/// # Errors
/// `TimedOut`, or what the system reports.
pub fn accept(listener: &UnixListener, patience: Duration) -> io::Result<UnixStream> {
    let until = Instant::now() + patience;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let limit = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut wanted = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut wanted, Some(&limit)) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::TimedOut)),
            Ok(_) => return listener.accept().map(|(stream, _)| stream),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// One end of a circuit in a program of the host.
pub struct Endpoint {
    /// The socket.
    pub stream: UnixStream,
    /// Which of the case's streams it is.
    pub number: usize,
    /// Length of messages, in bytes.
    pub message_len: usize,
    /// What becomes of the bytes.
    pub payload: Payload,
    /// What is written counts as received: for limits, whose other end is elsewhere.
    pub counts_sent: bool,
    /// Shared.
    pub control: Arc<Control>,
}

impl Endpoint {
    fn ended(&self, result: io::Result<()>) {
        if self.control.stopped() {
            return;
        }
        let what = match result {
            Ok(()) => "the end of the stream came".to_owned(),
            Err(error) => format!("the socket said: {error}"),
        };
        self.control
            .fail(format!("{what} on the host's stream {}", self.number));
    }

    /// Writes messages without end.
    pub fn source(mut self) {
        let result = match self.payload {
            Payload::Copied => self.write_all_along(),
            Payload::Untouched => self.splice_out(),
            Payload::Checked => self.write_pattern(),
        };
        self.ended(result);
    }

    fn write_all_along(&mut self) -> io::Result<()> {
        let message = vec![0xa5; self.message_len];
        while !self.control.stopped() {
            self.stream.write_all(&message)?;
            if self.counts_sent {
                self.control.received[self.number].add(message.len() as u64);
            }
        }
        Ok(())
    }

    fn write_pattern(&mut self) -> io::Result<()> {
        let pattern = Pattern::default();
        let mut position = 0;
        while !self.control.stopped() {
            let message = pattern.slice(self.number, position, self.message_len);
            self.stream.write_all(message)?;
            position += self.message_len as u64;
        }
        Ok(())
    }

    /// The pages of one message, again and again, without a copy here.
    fn splice_out(&mut self) -> io::Result<()> {
        let pipe = || pipe_with(PipeFlags::CLOEXEC);
        let (master_out, master_in) = pipe()?;
        let (way_out, way_in) = pipe()?;
        for end in [&master_in, &way_in] {
            rustix::pipe::fcntl_setpipe_size(end, PIPE_LEN.max(2 * self.message_len))?;
        }
        let mut written = 0;
        let message = vec![0xa5; self.message_len];
        while written < message.len() {
            written += rustix::io::write(&master_in, &message[written..])?;
        }
        while !self.control.stopped() {
            let mut left = tee(&master_out, &way_in, self.message_len, SpliceFlags::empty())?;
            while left > 0 {
                let flags = SpliceFlags::empty();
                left -= splice(&way_out, None, &self.stream, None, left, flags)?;
            }
        }
        Ok(())
    }

    /// Reads without end.
    pub fn sink(mut self) {
        let result = match self.payload {
            Payload::Copied => self.read_all_along(),
            Payload::Untouched => self.splice_in(),
            Payload::Checked => self.read_pattern(),
        };
        self.ended(result);
    }

    fn read_all_along(&mut self) -> io::Result<()> {
        let mut message = vec![0; self.message_len];
        let meter = &self.control.received[self.number];
        loop {
            match self.stream.read(&mut message)? {
                0 => return Ok(()),
                len => meter.add(len as u64),
            }
        }
    }

    fn read_pattern(&mut self) -> io::Result<()> {
        let pattern = Pattern::default();
        let mut message = vec![0; self.message_len];
        let mut position = 0;
        loop {
            let len = self.stream.read(&mut message)?;
            if len == 0 {
                return Ok(());
            }
            if message[..len] != *pattern.slice(self.number, position, len) {
                self.control.fail(format!(
                    "the bytes from {position} on came out wrong on the host's stream {}",
                    self.number
                ));
            }
            position += len as u64;
            self.control.received[self.number].add(len as u64);
        }
    }

    /// Bytes go to nowhere without a copy here.
    fn splice_in(&mut self) -> io::Result<()> {
        let (way_out, way_in) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::pipe::fcntl_setpipe_size(&way_in, PIPE_LEN)?;
        let nowhere = std::fs::File::options().write(true).open("/dev/null")?;
        let flags = SpliceFlags::MOVE;
        loop {
            let len = splice(&self.stream, None, &way_in, None, self.message_len, flags)?;
            if len == 0 {
                return Ok(());
            }
            let mut left = len;
            while left > 0 {
                left -= splice(&way_out, None, &nowhere, None, left, flags)?;
            }
            self.control.received[self.number].add(len as u64);
        }
    }

    /// Sends a message, waits for it to come back, and takes the time, without end. Returns the times in nanoseconds.
    pub fn ping(mut self) -> Histogram<u64> {
        let mut latencies = super::latency::histogram();
        let result = self.ping_along(&mut latencies);
        self.ended(result);
        latencies
    }

    fn ping_along(&mut self, latencies: &mut Histogram<u64>) -> io::Result<()> {
        let message = vec![0xa5; self.message_len];
        let mut answer = vec![0; self.message_len];
        while !self.control.stopped() {
            let start = Instant::now();
            self.stream.write_all(&message)?;
            self.stream.read_exact(&mut answer)?;
            if self.control.counts() {
                let elapsed = start.elapsed().as_nanos();
                latencies.saturating_record(elapsed.try_into().unwrap_or(u64::MAX));
            }
            self.control.operations[self.number].add(1);
        }
        Ok(())
    }

    /// The socket is shut down when the measurement ends.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn wake_at_the_end(&self) -> io::Result<()> {
        let socket = self.stream.as_fd().try_clone_to_owned()?;
        self.control.wake_socket(UnixStream::from(socket));
        Ok(())
    }
}
