//! The two processes, and how they come together.

use std::fs::File;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use circuit::{Circuit, Options};
use clap::Args;
use rustix::event::{EventfdFlags, eventfd};
use shmring::bare::Bare;
use shmring::{Identity, Kind, Side, Window, WindowSpec, system_page_len};
use tempfile::TempDir;

use super::case::{Case, OTHERS, Subject, Work};
use super::end::{End, RING_LEN, options};
use crate::perf::measure::Conditions;
use crate::perf::processor::pin;

/// Of the circuits that are open and idle, in bytes.
const OTHER_RING_LEN: u64 = 64 << 10;

/// Messages to the other process.
#[derive(Debug, Args)]
pub struct OtherOptions {
    /// The socket to come to
    #[arg(long)]
    path: PathBuf,
    /// What is measured
    #[arg(long)]
    subject: Subject,
    /// In which case
    #[arg(long)]
    case: Case,
    /// A file, or a port, of the first process
    #[arg(long)]
    meeting: Option<String>,
    /// How long to wait for anything, in milliseconds
    #[arg(long)]
    patience_ms: u64,
}

/// The other process, and our end towards it.
pub struct Other {
    /// Our end.
    pub end: End,
    child: Child,
    _others: Vec<Circuit>,
    _directory: TempDir,
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spec() -> WindowSpec {
    WindowSpec {
        identity: Identity {
            generation: 1,
            nonce: [7; 16],
        },
        kind: Kind::Bytes,
        ring_len: RING_LEN,
        page_len: system_page_len(),
    }
}

impl Other {
    /// Starts it for this subject and case.
    pub fn start(subject: Subject, case: &Case, conditions: &Conditions) -> Result<Other, String> {
        start(subject, case, conditions).map_err(|error| error.to_string())
    }
}

type Anything = Box<dyn std::error::Error>;

fn start(subject: Subject, case: &Case, conditions: &Conditions) -> Result<Other, Anything> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path)?;
    let patience = conditions.patience;
    let mut command = command(subject, case, patience, &path)?;

    // What the other process needs beside the socket.
    let window = Window::create(&spec())?;
    let tcp = TcpListener::bind("127.0.0.1:0")?;
    let eventfds: [OwnedFd; 2] = [
        eventfd(0, EventfdFlags::CLOEXEC)?,
        eventfd(0, EventfdFlags::CLOEXEC)?,
    ];
    match subject {
        Subject::Bare => {
            let file = format!("/proc/{}/fd/{}", std::process::id(), window.as_raw_fd());
            command.args(["--meeting", &file]);
        }
        Subject::Tcp => {
            command.args(["--meeting", &tcp.local_addr()?.to_string()]);
        }
        // Nothing but inheritance hands an eventfd over without further ado.
        Subject::Eventfd => {
            command.stdin(eventfds[0].try_clone()?);
            command.stdout(eventfds[1].try_clone()?);
        }
        Subject::Ringdown | Subject::Unix | Subject::Memcpy => {}
    }
    pin(conditions.placement.subject)?;
    let child = command.spawn();
    pin(conditions.placement.generator)?;
    let child = child?;

    let stream = accept(&listener, patience)?;
    stream.set_read_timeout(Some(patience))?;
    let end = match subject {
        Subject::Ringdown => {
            let circuit = Circuit::offer(stream, &options(case.wait, RING_LEN))?;
            End::ringdown(circuit, patience)
        }
        Subject::Bare => {
            let window = Window::attach(&window, 0, &spec())?;
            End::Bare(Box::new(Bare::new(window, Side::First)))
        }
        Subject::Tcp => {
            let (tcp, _) = tcp.accept()?;
            tcp.set_nodelay(true)?;
            tcp.set_read_timeout(Some(patience))?;
            End::Tcp(tcp, vec![0; case.message_len])
        }
        Subject::Eventfd => {
            let [to_other, from_other] = eventfds;
            End::Eventfd(File::from(from_other), File::from(to_other))
        }
        Subject::Unix | Subject::Memcpy => End::Unix(stream, vec![0; case.message_len]),
    };
    let others = others(case, |options| {
        Ok(Circuit::offer(accept(&listener, patience)?, options)?)
    })?;
    Ok(Other {
        end,
        child,
        _others: others,
        _directory: directory,
    })
}

/// What the other process is started with.
fn command(subject: Subject, case: &Case, patience: Duration, path: &Path) -> io::Result<Command> {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(std::env::current_exe()?)
        .args(["circuit", "other", "--subject", subject.name()])
        .args(["--case", &case.to_string()])
        .args(["--patience-ms", &patience.as_millis().to_string()])
        .arg("--path")
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    Ok(command)
}

/// The circuits that are open and idle, each of which is made so.
fn others(
    case: &Case,
    make: impl Fn(&Options) -> Result<Circuit, Anything>,
) -> Result<Vec<Circuit>, Anything> {
    let count = if case.among_others { OTHERS } else { 0 };
    let options = options(case.wait, OTHER_RING_LEN);
    (0..count).map(|_| make(&options)).collect()
}

/// The other process may have failed, and never come.
fn accept(listener: &UnixListener, patience: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + patience;
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(error) => return Err(error),
        }
    }
}

/// The other process's work, until it is killed.
///
/// # Errors
/// In words. That the first process ends is the usual end.
pub fn be_other(options: &OtherOptions) -> Result<(), String> {
    let (mut end, _others) = come(options).map_err(|error| error.to_string())?;
    let case = &options.case;
    let mut message = vec![0; case.message_len];
    let mut first = 0;
    loop {
        if case.work == Work::RoundTrip {
            end.receive(&mut message)?;
            end.send(&message)?;
        } else {
            let in_place = case.work == Work::InPlace;
            end.produce(case.message_len, &mut first, in_place, &mut message)?;
        }
    }
}

fn come(given: &OtherOptions) -> Result<(End, Vec<Circuit>), Anything> {
    let case = &given.case;
    let patience = Duration::from_millis(given.patience_ms);
    let stream = UnixStream::connect(&given.path)?;
    let meeting = || given.meeting.as_deref().ok_or("no --meeting");
    let end = match given.subject {
        Subject::Ringdown => {
            let circuit = Circuit::accept(stream, &options(case.wait, RING_LEN))?;
            End::ringdown(circuit, patience)
        }
        Subject::Bare => {
            let file = open(Path::new(meeting()?))?;
            let window = Window::attach(&file, 0, &spec())?;
            End::Bare(Box::new(Bare::new(window, Side::Second)))
        }
        Subject::Tcp => {
            let tcp = TcpStream::connect(meeting()?)?;
            tcp.set_nodelay(true)?;
            End::Tcp(tcp, vec![0; case.message_len])
        }
        Subject::Eventfd => {
            let woken = io::stdin().as_fd().try_clone_to_owned()?;
            let wake = io::stdout().as_fd().try_clone_to_owned()?;
            End::Eventfd(File::from(woken), File::from(wake))
        }
        Subject::Unix | Subject::Memcpy => End::Unix(stream, vec![0; case.message_len]),
    };
    let others = others(case, |options| {
        Ok(Circuit::accept(UnixStream::connect(&given.path)?, options)?)
    })?;
    Ok((end, others))
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}
