//! The agent's binary on a UNIX socket, and a client that sends and expects single frames.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(
    clippy::unwrap_used,
    reason = "these are tests, though not marked as such one by one"
)]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use wire::agent::{
    CONNECTION_CHANNEL, Decoder, ErrorReport, ExecStart, ExitStatus, Frame, Hello, MAX_DATA_LEN,
    OPERATION_CHANNEL, Secret, Stream, Terminal,
};

/// How long a test waits for anything before it fails.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A running agent; it ends with the test.
pub struct Agent {
    child: Child,
    pub directory: TempDir,
}

impl Agent {
    pub fn start() -> Agent {
        Agent::start_by(command())
    }

    /// By [`command`], or one that begins it.
    pub fn start_by(mut command: Command) -> Agent {
        let directory = tempfile::tempdir().unwrap();
        let mut child = command
            .stdin(Stdio::null())
            .arg(listen_argument(&directory))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        log.read_line(&mut line).unwrap();
        assert!(line.contains("listening"), "{line}");
        // Its log must not fill the pipe.
        thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Agent { child, directory }
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("agent.sock")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A connection on which nothing was said.
    pub fn connect(&self) -> Client {
        Client::new(UnixStream::connect(self.socket()).unwrap())
    }

    /// A connection that asked for a command.
    pub fn request(&self, request: ExecStart) -> Client {
        let mut client = self.connect();
        client.greet();
        client.send(&Frame::ExecStart(request));
        client
    }

    /// A command that runs, with plenty of credit for its output.
    pub fn exec(&self, request: ExecStart) -> Client {
        let mut client = self.request(request);
        client.grant(Stream::Stdout, 1 << 20);
        client.grant(Stream::Stderr, 1 << 20);
        client.expect_started();
        client
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The agent's binary, set to listen; the endpoint is to follow.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdown-agent"));
    command.arg("--listen").stdin(Stdio::null());
    command
}

pub fn listen_argument(directory: &TempDir) -> String {
    format!("unix:{}/agent.sock", directory.path().display())
}

pub fn shell(script: &str) -> ExecStart {
    words(&["sh", "-c", script])
}

pub fn words(words: &[&str]) -> ExecStart {
    let arguments = words.iter().map(|word| word.as_bytes().to_vec()).collect();
    ExecStart {
        arguments,
        environment: vec![],
        directory: None,
        terminal: None,
    }
}

pub fn on_terminal(request: ExecStart) -> ExecStart {
    ExecStart {
        terminal: Some(Terminal {
            rows: 40,
            columns: 100,
            kind: "xterm".to_owned(),
        }),
        ..request
    }
}

/// What a command did until its exit.
#[derive(Default)]
pub struct Transcript {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub ended: Vec<Stream>,
    pub closed_input: bool,
}

impl std::fmt::Debug for Transcript {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let start =
            |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
        write!(
            formatter,
            "{} bytes of output: {:?}, ",
            self.stdout.len(),
            start(&self.stdout)
        )?;
        write!(
            formatter,
            "{} of error: {:?}",
            self.stderr.len(),
            start(&self.stderr)
        )
    }
}

impl Transcript {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// The host's side of a connection, frame by frame.
pub struct Client {
    pub stream: UnixStream,
    decoder: Decoder,
    pub transcript: Transcript,
    pub input_credit: u32,
}

impl Client {
    pub fn new(stream: UnixStream) -> Client {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client {
            stream,
            decoder: Decoder::new(),
            transcript: Transcript::default(),
            input_credit: 0,
        }
    }

    pub fn send(&mut self, frame: &Frame<'_>) {
        let channel = if matches!(frame, Frame::Hello(_) | Frame::Secret(_)) {
            CONNECTION_CHANNEL
        } else {
            OPERATION_CHANNEL
        };
        self.stream
            .write_all(&frame.to_bytes(channel).unwrap())
            .unwrap();
    }

    /// Exchange hellos: the agent's.
    pub fn greet(&mut self) -> Hello {
        self.send(&Frame::Hello(Hello::new("test")));
        self.expect_hello()
    }

    pub fn expect_hello(&mut self) -> Hello {
        match self.next() {
            Some(Frame::Hello(hello)) => hello,
            other => panic!("expected a hello, not {other:?}"),
        }
    }

    /// Answer the agent's own call, with these capabilities.
    pub fn answer_as_host(&mut self, capabilities: &[&str]) -> Hello {
        self.send(&Frame::Hello(Hello {
            capabilities: capabilities.iter().map(|&name| name.to_owned()).collect(),
            ..Hello::new("test")
        }));
        self.expect_hello()
    }

    pub fn expect_secret(&mut self) -> Secret {
        match self.next() {
            Some(Frame::Secret(secret)) => secret,
            other => panic!("expected a secret, not {other:?}"),
        }
    }

    /// The agent refuses, without naming its capabilities.
    pub fn expect_refusal(&mut self) -> ErrorReport {
        match self.next() {
            Some(Frame::Error(report)) => {
                self.expect_end();
                report
            }
            other => panic!("expected a refusal, not {other:?}"),
        }
    }

    pub fn grant(&mut self, stream: Stream, bytes: u32) {
        self.send(&Frame::Credit { stream, bytes });
    }

    pub fn input(&mut self, bytes: &[u8]) {
        for bytes in bytes.chunks(MAX_DATA_LEN) {
            self.send(&Frame::Data {
                stream: Stream::Stdin,
                bytes,
            });
        }
    }

    /// The next frame, data excepted, which goes to the transcript; nothing at the end of the connection.
    pub fn next(&mut self) -> Option<Frame<'static>> {
        loop {
            while let Some((_, frame)) = self.decoder.next_frame().unwrap() {
                match frame {
                    Frame::Data {
                        stream: Stream::Stdout,
                        bytes,
                    } => self.transcript.stdout.extend(bytes),
                    Frame::Data {
                        stream: Stream::Stderr,
                        bytes,
                    } => self.transcript.stderr.extend(bytes),
                    Frame::Data {
                        stream: Stream::Stdin,
                        ..
                    } => panic!("input comes back"),
                    Frame::EndOfStream(stream) => self.transcript.ended.push(stream),
                    Frame::StreamClosed(_) => self.transcript.closed_input = true,
                    Frame::Credit { bytes, .. } => self.input_credit += bytes,
                    Frame::Hello(hello) => return Some(Frame::Hello(hello)),
                    Frame::Error(report) => return Some(Frame::Error(report)),
                    Frame::Started { pid } => return Some(Frame::Started { pid }),
                    Frame::Exit(status) => return Some(Frame::Exit(status)),
                    Frame::Secret(secret) => return Some(Frame::Secret(secret)),
                    Frame::Answer(answer) => return Some(Frame::Answer(answer)),
                    other => panic!("an agent does not send {other:?}"),
                }
            }
            if self.receive() == 0 {
                return None;
            }
        }
    }

    /// Takes what there is of data and credit, and waits for some if there is none; false at the end of the connection.
    pub fn take_some(&mut self) -> bool {
        let mut is_first = true;
        loop {
            while let Some((_, frame)) = self.decoder.next_frame().unwrap() {
                match frame {
                    Frame::Data { bytes, .. } => self.transcript.stdout.extend(bytes),
                    Frame::Credit { bytes, .. } => self.input_credit += bytes,
                    other => panic!("expected data or credit, not {other:?}"),
                }
                is_first = false;
            }
            if !is_first {
                return true;
            }
            if self.receive() == 0 {
                return false;
            }
        }
    }

    fn receive(&mut self) -> usize {
        let count = loop {
            match self.stream.read(self.decoder.space()) {
                Ok(count) => break count,
                // What a process that was stopped gets from a socket with a timeout, see signal(7).
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break 0,
                Err(error) => panic!("nothing came: {error}"),
            }
        };
        self.decoder.advance(count);
        count
    }

    pub fn expect_started(&mut self) -> u32 {
        match self.next() {
            Some(Frame::Started { pid }) => pid,
            other => panic!("expected that the command starts, not {other:?}"),
        }
    }

    pub fn expect_exit(&mut self) -> ExitStatus {
        match self.next() {
            Some(Frame::Exit(status)) => status,
            other => panic!("expected an exit, not {other:?}; {:?}", self.transcript),
        }
    }

    pub fn expect_error(&mut self) -> ErrorReport {
        match self.next() {
            Some(Frame::Error(report)) => report,
            other => panic!("expected an error, not {other:?}"),
        }
    }

    pub fn expect_end(&mut self) {
        let next = self.next();
        assert!(
            next.is_none(),
            "expected the end of the connection, not {next:?}"
        );
    }

    /// Receive until standard output contains this text.
    pub fn wait_for_output(&mut self, text: &str) {
        while !self.transcript.text().contains(text) {
            match self.decoder.next_frame().unwrap() {
                Some((
                    _,
                    Frame::Data {
                        stream: Stream::Stdout,
                        bytes,
                    },
                )) => self.transcript.stdout.extend(bytes),
                Some((_, Frame::Credit { bytes, .. })) => self.input_credit += bytes,
                Some((_, Frame::StreamClosed(_))) => self.transcript.closed_input = true,
                Some((_, other)) => panic!(
                    "waiting for {text:?}, there came {other:?}; {:?}",
                    self.transcript
                ),
                None => assert_ne!(
                    self.receive(),
                    0,
                    "waiting for {text:?}: {:?}",
                    self.transcript
                ),
            }
        }
    }
}

pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::yield_now();
    }
}

/// Whether a process runs: it is there and not merely waiting for its parent to ask how it ended.
pub fn is_running(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    !state.is_some_and(|state| state.starts_with(['Z', 'X']))
}

impl Client {
    /// Receive once and note the data; an exit is a failure.
    pub fn poll_data(&mut self) {
        assert_eq!(self.poll_exit(), None, "{:?}", self.transcript);
    }

    /// Receive once and note the data; the exit, if it came.
    pub fn poll_exit(&mut self) -> Option<ExitStatus> {
        assert_ne!(self.receive(), 0, "the connection ended");
        while let Some((_, frame)) = self.decoder.next_frame().unwrap() {
            match frame {
                Frame::Data {
                    stream: Stream::Stdout,
                    bytes,
                } => self.transcript.stdout.extend(bytes),
                Frame::Data {
                    stream: Stream::Stderr,
                    bytes,
                } => self.transcript.stderr.extend(bytes),
                Frame::Credit { .. } | Frame::EndOfStream(_) | Frame::StreamClosed(_) => {}
                Frame::Exit(status) => return Some(status),
                other => panic!("unexpected {other:?}"),
            }
        }
        None
    }
}
