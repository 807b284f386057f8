//! The client against the agent's own session code, through a host socket that does the handshake and nothing else; and
//! against hostile answers.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use wire::agent::{CONNECTION_CHANNEL, ExitStatus, Frame, Hello, OPERATION_CHANNEL, PORT, Stream};

use super::*;

mod terminal;

/// Run a command through the host socket at `path`.
fn run_at(path: &Path, options: &ExecOptions, local: Local) -> Result<u8, ExecError> {
    session::run(reach(Agent::at(path))?, path, options, local)
}

/// A host socket, whose connections get the answer and then the service that the test chooses.
struct HostSocket {
    directory: TempDir,
}

impl HostSocket {
    fn path(&self) -> PathBuf {
        self.directory.path().join("web.sock")
    }

    /// Each connection is checked to begin with exactly the line that asks for the agent.
    fn serve(
        answer: &'static [u8],
        service: impl Fn(UnixStream) + Send + Clone + 'static,
    ) -> HostSocket {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("web.sock")).unwrap();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                let service = service.clone();
                thread::spawn(move || {
                    let expected = format!("CONNECT {PORT}\n");
                    let mut line = vec![0; expected.len()];
                    connection.read_exact(&mut line).unwrap();
                    assert_eq!(line, expected.as_bytes());
                    connection.write_all(answer).unwrap();
                    service(connection);
                });
            }
        });
        HostSocket { directory }
    }

    /// A guest whose agent works.
    fn with_agent() -> HostSocket {
        let options = agent::session::Options::new();
        HostSocket::serve(b"OK 1073741824\n", move |connection| {
            // What went wrong is the client's to notice.
            let _ = agent::session::serve(&connection.into(), &options);
        })
    }

    /// An agent that greets, reads the request, and then sends these bytes and closes.
    fn with_answer(bytes: Vec<u8>) -> HostSocket {
        HostSocket::serve(b"OK 1\n", move |mut connection| {
            connection
                .write_all(&frames(&[(CONNECTION_CHANNEL, hello())]))
                .unwrap();
            let mut decoder = wire::agent::Decoder::new();
            loop {
                match decoder.next_frame().unwrap() {
                    Some((_, Frame::ExecStart(_))) => break,
                    Some(_) => {}
                    None => {
                        let count = connection.read(decoder.space()).unwrap();
                        assert_ne!(count, 0, "the client left before it asked");
                        decoder.advance(count);
                    }
                }
            }
            connection.write_all(&bytes).unwrap();
        })
    }
}

fn hello() -> Frame<'static> {
    Frame::Hello(Hello {
        capabilities: vec!["exec".to_owned()],
        ..Hello::new("fake 1")
    })
}

fn frames(frames: &[(u16, Frame<'_>)]) -> Vec<u8> {
    frames
        .iter()
        .flat_map(|(channel, frame)| frame.to_bytes(*channel).unwrap())
        .collect()
}

/// What a command did.
#[derive(Debug)]
struct Outcome {
    result: Result<u8, ExecError>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

fn command(words: &[&str]) -> ExecOptions {
    ExecOptions {
        command: words.iter().map(OsString::from).collect(),
        ..ExecOptions::default()
    }
}

fn shell(script: &str) -> ExecOptions {
    command(&["sh", "-c", script])
}

/// A pipe that the commands of other tests in this process do not inherit: its reader, its writer.
fn pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()
}

fn file_with(bytes: &[u8]) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.into()
}

/// Start a client with this input; the outcome arrives with the outputs, which go to files.
fn start(host: &HostSocket, options: ExecOptions, stdin: OwnedFd) -> Receiver<Outcome> {
    let (sender, receiver) = channel();
    let path = host.path();
    thread::spawn(move || {
        let (mut stdout, mut stderr) =
            (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let copy = |file: &File| OwnedFd::from(file.try_clone().unwrap());
        let local = Local {
            stdin,
            stdout: copy(&stdout),
            stderr: copy(&stderr),
            signals: false,
        };
        let result = run_at(&path, &options, local);
        let read = |file: &mut File| {
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(0)).unwrap();
            file.read_to_end(&mut bytes).unwrap();
            bytes
        };
        let _ = sender.send(Outcome {
            result,
            stdout: read(&mut stdout),
            stderr: read(&mut stderr),
        });
    });
    receiver
}

fn finish(outcome: &Receiver<Outcome>) -> Outcome {
    outcome
        .recv_timeout(Duration::from_secs(60))
        .expect("the client ends within a minute")
}

fn run_with_input(host: &HostSocket, options: ExecOptions, input: &[u8]) -> Outcome {
    finish(&start(host, options, file_with(input)))
}

/// Bytes without a short period, so that a lost, doubled or swapped piece shows.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next)
        .take(len.div_ceil(8))
        .flatten()
        .take(len)
        .collect()
}

#[test]
fn streams_stay_apart_and_the_exit_code_is_the_commands() {
    let host = HostSocket::with_agent();
    let outcome = run_with_input(&host, shell("cat; echo err >&2; exit 7"), b"some input\n");
    assert_eq!(outcome.result.unwrap(), 7);
    assert_eq!(outcome.stdout, b"some input\n");
    assert_eq!(outcome.stderr, b"err\n");
}

#[test]
fn a_hundred_mebibytes_go_in_and_come_out_unchanged() {
    let host = HostSocket::with_agent();
    let input = noise(100 * 1024 * 1024);
    let outcome = run_with_input(&host, command(&["cat"]), &input);
    assert_eq!(outcome.result.unwrap(), 0);
    assert_eq!(outcome.stdout.len(), input.len());
    assert!(outcome.stdout == input, "the bytes differ");
}

#[test]
fn a_signal_in_the_guest_is_128_and_its_number() {
    let host = HostSocket::with_agent();
    let outcome = run_with_input(&host, shell("kill -TERM $$"), b"");
    assert_eq!(outcome.result.unwrap(), 128 + 15);
}

#[test]
fn environment_and_directory_reach_the_command() {
    let host = HostSocket::with_agent();
    let options = ExecOptions {
        environment: vec![("GREETING".into(), "hello world".into())],
        directory: Some("/proc/self".into()),
        ..shell("echo \"$GREETING\"; pwd; test -n \"$HOME\" && test -n \"$PATH\"")
    };
    let outcome = run_with_input(&host, options, b"");
    assert_eq!(outcome.result.unwrap(), 0);
    let lines: Vec<&str> = std::str::from_utf8(&outcome.stdout)
        .unwrap()
        .lines()
        .collect();
    assert_eq!(lines[0], "hello world");
    assert!(lines[1].starts_with("/proc/"), "{lines:?}");
}

#[test]
fn what_cannot_be_run_has_the_codes_of_a_shell() {
    let host = HostSocket::with_agent();
    let code = |words: &[&str]| {
        run_with_input(&host, command(words), b"")
            .result
            .unwrap_err()
            .exit_code()
    };
    assert_eq!(code(&["there-is-no-such-command"]), 127);
    assert_eq!(code(&["/there/is/no/such/command"]), 127);
    assert_eq!(code(&["/etc"]), 126);
    assert_eq!(code(&["/etc/passwd"]), 126);

    let options = ExecOptions {
        directory: Some("/there/is/no/such/directory".into()),
        ..command(&["true"])
    };
    let error = run_with_input(&host, options, b"").result.unwrap_err();
    assert_eq!(error.exit_code(), 126);
    assert!(
        error.to_string().contains("/there/is/no/such/directory"),
        "{error}"
    );

    let error = run_with_input(&host, command(&[]), b"").result.unwrap_err();
    assert!(
        matches!(error, ExecError::Guest(GuestError::Request(_))),
        "{error}"
    );
    assert_eq!(error.exit_code(), crate::failure::USAGE);
}

#[test]
fn a_command_that_never_reads_its_input_ends_all_the_same() {
    let host = HostSocket::with_agent();
    let outcome = run_with_input(&host, shell("exit 3"), &noise(8 * 1024 * 1024));
    assert_eq!(outcome.result.unwrap(), 3);

    // And with an input that never ends and never has anything.
    let (reader, _writer) = pipe();
    let outcome = finish(&start(&host, shell("echo done"), reader));
    assert_eq!(outcome.result.unwrap(), 0);
    assert_eq!(outcome.stdout, b"done\n");
}

#[test]
fn much_standard_error_and_output_at_once() {
    let host = HostSocket::with_agent();
    let script = "head -c 20000000 /dev/zero >&2 & head -c 20000000 /dev/zero; wait";
    let outcome = run_with_input(&host, shell(script), b"");
    assert_eq!(outcome.result.unwrap(), 0);
    assert_eq!(
        (outcome.stdout.len(), outcome.stderr.len()),
        (20_000_000, 20_000_000)
    );
}

#[test]
fn an_output_that_nobody_reads_holds_up_neither_the_other_nor_the_input() {
    let host = HostSocket::with_agent();
    let (stdout_reader, stdout) = pipe();
    let (stderr_reader, stderr) = pipe();
    let (stdin, stdin_writer) = pipe();
    let path = host.path();
    // 8 MiB fill every buffer on the way; the line on standard error comes while they do.
    let options = shell("head -c 8388608 /dev/zero & read line; echo \"got $line\" >&2; wait");
    let client = thread::spawn(move || {
        let local = Local {
            stdin,
            stdout,
            stderr,
            signals: false,
        };
        run_at(&path, &options, local)
    });
    // Something of standard output is there, so it flows; then it is left alone.
    let mut stdout = File::from(stdout_reader);
    stdout.read_exact(&mut [0; 4096]).unwrap();
    File::from(stdin_writer).write_all(b"the input\n").unwrap();
    let mut line = [0; 14];
    File::from(stderr_reader).read_exact(&mut line).unwrap();
    assert_eq!(&line, b"got the input\n");
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), 8_388_608 - 4096);
    assert_eq!(client.join().unwrap().unwrap(), 0);
}

#[test]
fn a_reader_that_leaves_ends_the_command_as_a_pipe_would() {
    let host = HostSocket::with_agent();
    let (reader, stdout) = pipe();
    let path = host.path();
    let client = thread::spawn(move || {
        let local = Local {
            stdin: file_with(b""),
            stdout,
            stderr: file_with(b""),
            signals: false,
        };
        run_at(&path, &command(&["yes"]), local)
    });
    let mut reader = File::from(reader);
    reader.read_exact(&mut [0; 2]).unwrap();
    drop(reader);
    assert_eq!(client.join().unwrap().unwrap(), 128 + 13);
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let host = HostSocket::with_agent();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let local = Local {
        stdin: file_with(b""),
        stdout: full.into(),
        stderr: file_with(b""),
        signals: false,
    };
    let error = run_at(&host.path(), &shell("echo something"), local).unwrap_err();
    assert!(
        matches!(
            error,
            ExecError::Output {
                name: "standard output",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(error.exit_code(), FAILURE);
}

#[test]
fn a_process_left_in_the_background_does_not_keep_the_client() {
    let host = HostSocket::with_agent();
    let outcome = run_with_input(&host, shell("sleep 1000 & echo $!"), b"");
    assert_eq!(outcome.result.unwrap(), 0);
    let pid: i32 = std::str::from_utf8(&outcome.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)
        .expect("it lives on, as it would in a shell");
}

#[test]
fn refusals_say_why() {
    let cases: [(&[u8], &str); 5] = [
        (
            b"ERR nobody listens on port 1007\n",
            "nobody listens on port 1007",
        ),
        (b"", "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\n", "unexpected answer"),
        (b"OK what\n", "unexpected answer"),
        (b"ERR \x1b[2Jsly\n", "\u{fffd}[2Jsly"),
    ];
    for (answer, expected) in cases {
        let host = HostSocket::serve(answer, drop);
        let error = run_with_input(&host, command(&["true"]), b"")
            .result
            .unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.exit_code(), crate::failure::FAILURE);
    }
    // An agent whose administrator has switched exec off.
    let hello = Frame::Hello(Hello::new("test")).to_bytes(CONNECTION_CHANNEL);
    let host = HostSocket::serve(b"OK 1\n", move |mut stream| {
        let _ = stream.write_all(hello.as_ref().unwrap());
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let error = run_with_input(&host, command(&["true"]), b"").result;
    assert_eq!(error.unwrap_err().exit_code(), FAILURE);
    let directory = tempfile::tempdir().unwrap();
    let error =
        Connection::open(&directory.path().join("nothing.sock"), CAPABILITY_EXEC).unwrap_err();
    assert!(matches!(error, GuestError::Connect { .. }), "{error}");
}

#[test]
fn an_answer_without_an_end_is_given_up() {
    let host = HostSocket::serve(&[b'x'; 5000], drop);
    let error = run_with_input(&host, command(&["true"]), b"")
        .result
        .unwrap_err();
    assert!(
        matches!(error, ExecError::NotReached(GuestError::Answer(_))),
        "{error}"
    );
}

#[test]
fn the_end_of_the_stream_is_never_the_end_of_the_command() {
    let started = (OPERATION_CHANNEL, Frame::Started { pid: 1 });
    let output = (
        OPERATION_CHANNEL,
        Frame::Data {
            stream: Stream::Stdout,
            bytes: b"partial",
        },
    );
    let end = |stream| (OPERATION_CHANNEL, Frame::EndOfStream(stream));
    let exit = (OPERATION_CHANNEL, Frame::Exit(ExitStatus::Code(0)));
    let whole = frames(&[
        started,
        output,
        end(Stream::Stdout),
        end(Stream::Stderr),
        exit,
    ]);
    for cut in 0..whole.len() {
        let host = HostSocket::with_answer(whole[..cut].to_vec());
        let error = run_with_input(&host, command(&["true"]), b"")
            .result
            .unwrap_err();
        assert!(
            matches!(error, ExecError::Guest(GuestError::Broken(_))),
            "cut at {cut}: {error}"
        );
    }
    let outcome = run_with_input(&HostSocket::with_answer(whole), command(&["true"]), b"");
    assert_eq!(outcome.result.unwrap(), 0);
    assert_eq!(outcome.stdout, b"partial");
}

#[test]
fn an_agent_that_breaks_the_rules_is_left() {
    let started = || (OPERATION_CHANNEL, Frame::Started { pid: 1 });
    let check = |bytes: Vec<u8>| {
        let error = run_with_input(&HostSocket::with_answer(bytes), command(&["true"]), b"")
            .result
            .unwrap_err();
        assert!(
            matches!(error, ExecError::Guest(GuestError::Protocol(_))),
            "{error}"
        );
    };
    check(vec![0xff; 64]);
    check(frames(&[(
        OPERATION_CHANNEL,
        Frame::Exit(ExitStatus::Code(0)),
    )]));
    check(frames(&[started(), started()]));
    check(frames(&[started(), (9, Frame::Exit(ExitStatus::Code(0)))]));
    check(frames(&[
        started(),
        (
            OPERATION_CHANNEL,
            Frame::Data {
                stream: Stream::Stdin,
                bytes: b"x",
            },
        ),
    ]));
    check(frames(&[
        started(),
        (
            OPERATION_CHANNEL,
            Frame::Credit {
                stream: Stream::Stdout,
                bytes: 1,
            },
        ),
    ]));
    check(frames(&[
        started(),
        (
            OPERATION_CHANNEL,
            Frame::Credit {
                stream: Stream::Stdin,
                bytes: u32::MAX,
            },
        ),
    ]));
}

#[test]
fn versions_and_capabilities_are_checked() {
    let other = Hello {
        protocol_min: 7,
        protocol_max: 9,
        ..Hello::new("future 9")
    };
    for (hello, expected) in [
        (other, "versions 7 to 9"),
        (Hello::new("simple 1"), "does not offer exec"),
    ] {
        let bytes = frames(&[(CONNECTION_CHANNEL, Frame::Hello(hello))]);
        let host = HostSocket::serve(b"OK 1\n", move |mut connection| {
            connection.write_all(&bytes).unwrap();
            // Until the client leaves, so that it has time to read.
            let _ = connection.read_to_end(&mut Vec::new());
        });
        let error = run_with_input(&host, command(&["true"]), b"")
            .result
            .unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// In a process of its own, as others' descriptors and threads would be counted.
#[test]
fn many_quick_commands_leak_no_descriptor_and_no_thread() {
    const ALONE: &str = "RINGDOWN_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "exec::tests::many_quick_commands_leak_no_descriptor_and_no_thread";
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let status = alone.args([name, "--exact"]).env(ALONE, "1").status();
        assert!(status.unwrap().success());
        return;
    }
    let host = HostSocket::with_agent();
    for round in 0..300_u32 {
        let code = round % 100;
        let outcome = run_with_input(&host, shell(&format!("exit {code}")), b"");
        assert_eq!(u32::from(outcome.result.unwrap()), code);
    }
    let count = |directory: &str| std::fs::read_dir(directory).unwrap().count();
    wait_until("descriptors are closed and threads have ended", || {
        count("/proc/self/fd") < 50 && count("/proc/self/task") < 50
    });
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within 20 s");
        thread::yield_now();
    }
}
