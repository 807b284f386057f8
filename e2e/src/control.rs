//! The harness's end of the control channel: shell lines for the guest, many at once.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base64::{Engine, engine::general_purpose::STANDARD};

use crate::protocol::{CHUNK_BYTES, Lines, Reply, Request, STREAM_LIMIT_BYTES};

/// How long a command may take unless said otherwise, in seconds. Generous, because guests may be emulated on a busy machine.
pub const DEFAULT_DEADLINE_S: u64 = 60;

/// A shell line to be run in a guest.
#[derive(Debug, Clone)]
pub struct CommandSpec {
    /// Handed to `sh -c` as root.
    pub line: String,
    /// Its standard input, at most [`STREAM_LIMIT_BYTES`].
    pub stdin: Vec<u8>,
    /// After this it is killed and the wait for it fails.
    pub deadline: Duration,
}

impl CommandSpec {
    /// A line with no input and the default deadline.
    pub fn new(line: impl Into<String>) -> CommandSpec {
        CommandSpec {
            line: line.into(),
            stdin: Vec::new(),
            deadline: Duration::from_secs(DEFAULT_DEADLINE_S),
        }
    }

    /// Sets the standard input.
    #[must_use]
    pub fn stdin(mut self, stdin: impl Into<Vec<u8>>) -> CommandSpec {
        self.stdin = stdin.into();
        self
    }

    /// Sets the deadline.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> CommandSpec {
        self.deadline = deadline;
        self
    }
}

/// What a command left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// The exit code, or 128 and the signal's number.
    pub code: i32,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// True when a stream was longer than [`STREAM_LIMIT_BYTES`] and its rest was left out.
    pub truncated: bool,
}

impl Output {
    /// Standard output as text without its last line break.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout)
            .trim_end_matches('\n')
            .to_owned()
    }

    /// Standard error as text without its last line break.
    pub fn error_text(&self) -> String {
        String::from_utf8_lossy(&self.stderr)
            .trim_end_matches('\n')
            .to_owned()
    }
}

/// The channel to one guest. Cheap to clone; commands may be run from several threads.
#[derive(Debug, Clone)]
pub struct Control {
    shared: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    writer: Mutex<UnixStream>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    boots: Vec<String>,
    release: String,
    closed: bool,
    pending: HashMap<u64, Pending>,
}

#[derive(Debug)]
struct Pending {
    output: Output,
    end: Option<Result<(), String>>,
}

/// A command under way.
#[derive(Debug)]
pub struct Running {
    control: Control,
    id: u64,
    line: String,
    deadline: Instant,
}

impl Control {
    /// Takes over the connection from QEMU and reads it until it closes.
    pub fn new(stream: UnixStream) -> Result<Control> {
        let mut reader = stream
            .try_clone()
            .context("cannot share the control connection")?;
        let shared = Arc::new(Inner {
            writer: Mutex::new(stream),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let inner = Arc::clone(&shared);
        thread::spawn(move || {
            let mut lines = Lines::default();
            let mut buffer = vec![0; 64 * 1024];
            // Any error is the end: QEMU is gone.
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                lines.push(&buffer[..count], |line| {
                    if let Ok(reply) = serde_json::from_slice::<Reply>(line) {
                        inner.take(reply);
                    }
                });
            }
            let mut state = inner.lock();
            state.closed = true;
            state.fail_all("the guest's VMM is gone");
            inner.changed.notify_all();
        });
        Ok(Control { shared })
    }

    /// How many times this guest has come up (its control program has said hello with a new boot identity).
    pub fn boot_count(&self) -> usize {
        self.shared.lock().boots.len()
    }

    /// What `uname -r` said in the guest's last hello.
    pub fn release(&self) -> String {
        self.shared.lock().release.clone()
    }

    /// Waits until the guest has come up `count` times, at most `patience`. True if it has.
    pub fn wait_for_boots(&self, count: usize, patience: Duration) -> bool {
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(self.shared.lock(), patience, |state| {
                !state.closed && state.boots.len() < count
            })
            .unwrap_or_else(PoisonError::into_inner);
        state.boots.len() >= count
    }

    /// Starts a command.
    pub fn start(&self, spec: CommandSpec) -> Result<Running> {
        if spec.stdin.len() > STREAM_LIMIT_BYTES {
            bail!(
                "{} bytes are too many for a command's input: {STREAM_LIMIT_BYTES}",
                spec.stdin.len()
            );
        }
        let id = {
            let mut state = self.shared.lock();
            if state.closed {
                bail!("cannot run `{}`: the guest's VMM is gone", spec.line);
            }
            state.next_id += 1;
            let id = state.next_id;
            let output = Output {
                code: -1,
                stdout: Vec::new(),
                stderr: Vec::new(),
                truncated: false,
            };
            state.pending.insert(id, Pending { output, end: None });
            id
        };
        let running = Running {
            control: self.clone(),
            id,
            line: spec.line.clone(),
            deadline: Instant::now() + spec.deadline,
        };
        let writer = &mut *self
            .shared
            .writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for chunk in spec.stdin.chunks(CHUNK_BYTES) {
            write_frame(
                writer,
                &Request::Input {
                    id,
                    data: STANDARD.encode(chunk),
                },
            )?;
        }
        write_frame(
            writer,
            &Request::Run {
                id,
                line: spec.line,
            },
        )?;
        Ok(running)
    }
}

impl Running {
    /// Waits for the end of the command. An error if it did not run, or not to its end in time; then it is killed.
    pub fn wait(self) -> Result<Output> {
        let shared = &self.control.shared;
        let patience = self.deadline.saturating_duration_since(Instant::now());
        let (mut state, _) = shared
            .changed
            .wait_timeout_while(shared.lock(), patience, |state| !state.has_ended(self.id))
            .unwrap_or_else(PoisonError::into_inner);
        let Some(pending) = state.pending.remove(&self.id) else {
            bail!("`{}` is not known any more", self.line);
        };
        drop(state);
        match pending.end {
            Some(Ok(())) => Ok(pending.output),
            Some(Err(reason)) => bail!("`{}` did not run to its end: {reason}", self.line),
            None => {
                self.kill();
                bail!("`{}` did not end in time", self.line)
            }
        }
    }

    /// True when the command has ended.
    pub fn has_ended(&self) -> bool {
        self.control.shared.lock().has_ended(self.id)
    }

    /// Kills the command and what it started in its process group; [`Running::wait`] then gives 137.
    pub fn kill(&self) {
        let writer = &mut *self
            .control
            .shared
            .writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // A guest that is gone has killed it already.
        let _ = write_frame(writer, &Request::Kill { id: self.id });
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.control.shared.lock().pending.remove(&self.id);
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, reply: Reply) {
        let mut state = self.lock();
        match reply {
            Reply::Hello { boot, release } => {
                state.fail_all("the guest, or its control program, was started anew");
                state.release = release;
                if !state.boots.contains(&boot) {
                    state.boots.push(boot);
                }
            }
            Reply::Stdout { id, data } => state.append(id, &data, |output| &mut output.stdout),
            Reply::Stderr { id, data } => state.append(id, &data, |output| &mut output.stderr),
            Reply::Exit {
                id,
                code,
                truncated,
            } => {
                if let Some(pending) = state.pending.get_mut(&id) {
                    pending.output.code = code;
                    pending.output.truncated |= truncated;
                    pending.end = Some(Ok(()));
                }
            }
            Reply::Refused { id, reason } => {
                if let Some(pending) = state.pending.get_mut(&id) {
                    pending.end = Some(Err(reason));
                }
            }
        }
        self.changed.notify_all();
    }
}

impl State {
    fn has_ended(&self, id: u64) -> bool {
        self.pending
            .get(&id)
            .is_none_or(|pending| pending.end.is_some())
    }

    fn fail_all(&mut self, reason: &str) {
        for pending in self.pending.values_mut() {
            pending.end.get_or_insert_with(|| Err(reason.to_owned()));
        }
    }

    /// Adds a piece of output, up to the limit that the guest should have kept by itself.
    fn append(&mut self, id: u64, data: &str, stream: impl Fn(&mut Output) -> &mut Vec<u8>) {
        let Some(pending) = self.pending.get_mut(&id) else {
            return;
        };
        let Ok(bytes) = STANDARD.decode(data) else {
            return;
        };
        if stream(&mut pending.output).len() + bytes.len() > STREAM_LIMIT_BYTES {
            pending.output.truncated = true;
        } else {
            stream(&mut pending.output).extend_from_slice(&bytes);
        }
    }
}

fn write_frame(writer: &mut UnixStream, request: &Request) -> Result<()> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    writer
        .write_all(&line)
        .context("cannot reach the guest's VMM")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest made of a socket: the test plays the control program.
    fn pair() -> (Control, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Control::new(ours).unwrap(), theirs)
    }

    fn say(guest: &mut UnixStream, reply: &Reply) {
        let mut line = serde_json::to_vec(reply).unwrap();
        line.push(b'\n');
        guest.write_all(&line).unwrap();
    }

    fn hello(boot: &str) -> Reply {
        Reply::Hello {
            boot: boot.into(),
            release: "6".into(),
        }
    }

    #[test]
    fn output_and_exit_code_come_back() {
        let (control, mut guest) = pair();
        say(&mut guest, &hello("a"));
        assert!(control.wait_for_boots(1, Duration::from_secs(10)));
        let running = control.start(CommandSpec::new("x").stdin("in")).unwrap();
        say(
            &mut guest,
            &Reply::Stdout {
                id: 1,
                data: STANDARD.encode("out"),
            },
        );
        say(
            &mut guest,
            &Reply::Stderr {
                id: 1,
                data: STANDARD.encode("err\n"),
            },
        );
        say(
            &mut guest,
            &Reply::Exit {
                id: 1,
                code: 7,
                truncated: false,
            },
        );
        let output = running.wait().unwrap();
        assert_eq!(
            (output.code, output.text(), output.error_text()),
            (7, "out".into(), "err".into())
        );
    }

    #[test]
    fn a_new_hello_fails_what_was_under_way_and_counts_only_new_boots() {
        let (control, mut guest) = pair();
        say(&mut guest, &hello("a"));
        assert!(control.wait_for_boots(1, Duration::from_secs(10)));
        let running = control.start(CommandSpec::new("x")).unwrap();
        guest.write_all(b"{\"stdout\":{\"id\":1,\"da").unwrap();
        guest.write_all(b"\n").unwrap();
        say(&mut guest, &hello("a"));
        assert!(
            running
                .wait()
                .unwrap_err()
                .to_string()
                .contains("started anew")
        );
        assert_eq!(control.boot_count(), 1);
        say(&mut guest, &hello("b"));
        assert!(control.wait_for_boots(2, Duration::from_secs(10)));
    }

    #[test]
    fn a_lost_guest_and_a_deadline_are_errors() {
        let (control, guest) = pair();
        let late = control
            .start(CommandSpec::new("late").deadline(Duration::ZERO))
            .unwrap();
        assert!(late.wait().unwrap_err().to_string().contains("in time"));
        let lost = control.start(CommandSpec::new("lost")).unwrap();
        drop(guest);
        assert!(lost.wait().unwrap_err().to_string().contains("gone"));
        assert!(!control.wait_for_boots(1, Duration::from_secs(10)));
        assert!(control.start(CommandSpec::new("x")).is_err());
    }
}
