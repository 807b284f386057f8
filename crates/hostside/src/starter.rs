//! The starter of programs: a second process, outside the sandbox, which starts those programs that it was given a list of before the
//! first guest could speak, and nothing else.
//!
//! # Theory of operation
//!
//! The daemon launches it from its own file, with one end of a socket pair as standard input. What it says there is one packet each:
//!
//! - first, once: nothing, with a descriptor of a file that holds the list of commands;
//! - then for each program: the command's number and the variables of its environment, with three descriptors: the program's circuit
//!   (its standard input and output), where its standard error goes, and the *leash*, a socket pair's end.
//!
//! All that concerns one program passes over its leash. The starter says whether it has started, and later how it has ended; the daemon says
//! which of three signals it is to get. When the daemon's end is closed the program is killed: so nothing is left over, however the
//! daemon ends. Only variables whose names begin with `RINGDOWN_` are taken, so that a daemon that was taken over cannot
//! have a program load something else.

mod process;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::process::{Pid, Resource, Rlimit};
use serde::{Deserialize, Serialize};

pub use process::run;

/// How many descriptors programs have on most systems, unless they ask for more.
const USUAL_DESCRIPTORS: u64 = 1024;

/// Variables of the daemon's own environment that a program gets.
pub(crate) const INHERITED: [&str; 2] = ["PATH", "LANG"];

/// The longest request, in bytes: a command's number and some names.
const MAX_REQUEST_LEN: usize = 32 * 1024;

/// The most descriptors that come with one.
const MAX_DESCRIPTORS: usize = 3;

/// What a program's environment may contain: names that begin with this.
const ENVIRONMENT_PREFIX: &str = "RINGDOWN_";

static IN_FORCE: OnceLock<Option<Starter>> = OnceLock::new();

/// From now on this process starts no program itself: the starter does, and without one nothing is started. It cannot be taken back.
pub fn confine(starter: Option<Starter>) {
    // The first one holds, as what it is part of does.
    let _ = IN_FORCE.set(starter);
}

/// The starter, where this process starts none.
pub fn in_force() -> Option<Option<&'static Starter>> {
    IN_FORCE.get().map(Option::as_ref)
}

/// A program that is asked for.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    command: usize,
    environment: Vec<(String, String)>,
}

/// What the starter says over a leash: a letter and a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// The program runs.
    Started,
    /// It could not be started: the system's error number.
    Failed(i32),
    /// It has ended: its status as `wait` gives it.
    Ended(i32),
}

const WORD_LEN: usize = 5;

impl Word {
    fn encode(self) -> [u8; WORD_LEN] {
        let (letter, number) = match self {
            Word::Started => (b's', 0),
            Word::Failed(error) => (b'f', error),
            Word::Ended(status) => (b'e', status),
        };
        let [a, b, c, d] = number.to_le_bytes();
        [letter, a, b, c, d]
    }

    fn decode(bytes: [u8; WORD_LEN]) -> Option<Word> {
        let [letter, a, b, c, d] = bytes;
        let number = i32::from_le_bytes([a, b, c, d]);
        match letter {
            b's' => Some(Word::Started),
            b'f' => Some(Word::Failed(number)),
            b'e' => Some(Word::Ended(number)),
            _ => None,
        }
    }

    /// The next one from a leash. It waits only where the socket does.
    pub(crate) fn read(leash: impl AsFd) -> io::Result<Word> {
        let mut bytes = [0; WORD_LEN];
        let (received, _) = rustix::net::recv(leash, &mut bytes[..], RecvFlags::empty())?;
        if received < WORD_LEN {
            return Err(gone());
        }
        Word::decode(bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

fn gone() -> io::Error {
    let message = "the process that starts programs has ended: start the daemon anew";
    io::Error::new(io::ErrorKind::BrokenPipe, message)
}

/// The daemon's end of the starter.
#[derive(Debug)]
pub struct Starter {
    socket: OwnedFd,
    commands: Vec<Vec<String>>,
}

impl Starter {
    /// Starts this very program once more, with these arguments, as the starter of these commands.
    pub fn launch(commands: BTreeSet<Vec<String>>, arguments: &[String]) -> io::Result<Starter> {
        let commands: Vec<Vec<String>> = commands.into_iter().collect();
        let (socket, theirs) = pair()?;
        Command::new("/proc/self/exe")
            .arg0("ringdown")
            .args(arguments)
            .stdin(theirs)
            .stdout(Stdio::null())
            // A key pressed in a terminal is for the daemon, which ends its programs itself.
            .process_group(0)
            // These are for the daemon alone.
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .env_remove("LISTEN_FDS")
            .env_remove("LISTEN_PID")
            .env_remove("LISTEN_FDNAMES")
            .spawn()?;
        Starter::of(socket, commands)
    }

    /// Gives a starter its commands, once.
    fn of(socket: OwnedFd, commands: Vec<Vec<String>>) -> io::Result<Starter> {
        let mut list = File::from(rustix::fs::memfd_create("commands", MemfdFlags::CLOEXEC)?);
        list.write_all(&serde_json::to_vec(&commands)?)?;
        send(&socket, b"list", &[list.as_fd()])?;
        Ok(Starter { socket, commands })
    }

    /// How many commands it can start.
    pub fn command_count(&self) -> usize {
        self.commands.len()
    }

    /// Whether the command is in the list.
    pub fn has(&self, words: &[String]) -> bool {
        self.number(words).is_some()
    }

    fn number(&self, words: &[String]) -> Option<usize> {
        self.commands.iter().position(|command| command == words)
    }

    /// Has a program started, and waits until it is. Returns its leash.
    pub(crate) fn start(
        &self,
        words: &[String],
        environment: Vec<(&'static str, String)>,
        circuit: BorrowedFd<'_>,
        errors: BorrowedFd<'_>,
    ) -> io::Result<OwnedFd> {
        let command = self.number(words).ok_or(io::ErrorKind::NotFound)?;
        let environment = environment
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        let request = serde_json::to_vec(&Request {
            command,
            environment,
        })?;
        if request.len() > MAX_REQUEST_LEN {
            return Err(io::ErrorKind::ArgumentListTooLong.into());
        }
        let (leash, theirs) = pair()?;
        send(&self.socket, &request, &[circuit, errors, theirs.as_fd()])?;
        drop(theirs);
        match Word::read(&leash)? {
            Word::Started => {}
            Word::Failed(error) => return Err(io::Error::from_raw_os_error(error)),
            Word::Ended(_) => return Err(io::ErrorKind::InvalidData.into()),
        }
        rustix::io::ioctl_fionbio(&leash, true)?;
        Ok(leash)
    }
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        kind,
        flags,
        None,
    )?)
}

/// Says something, with descriptors. It waits while the other side has more to do than it takes.
fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let sent = sys::descriptors::send(socket, bytes, descriptors, SendFlags::empty());
    sent.map(drop).map_err(|error| match error {
        rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => gone(),
        error => error.into(),
    })
}

/// The next request and its descriptors; `None` when the other side is gone.
fn receive(socket: impl AsFd) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_REQUEST_LEN];
    let mut descriptors = Vec::new();
    let flags = RecvFlags::empty();
    let received =
        sys::descriptors::receive(socket, &mut bytes, &mut descriptors, MAX_DESCRIPTORS, flags)?;
    let len = received.len;
    bytes.truncate(len);
    Ok((len > 0).then_some((bytes, descriptors)))
}

/// Gives a program the usual limit of open files instead of the daemon's own, which is raised: many a program closes every number up to
/// its limit when it starts, or has room for no more in a set of `select`. It may raise it again.
pub(crate) fn limit_descriptors(pid: Pid) {
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    let usual = Rlimit {
        current: Some(maximum.map_or(USUAL_DESCRIPTORS, |most| most.min(USUAL_DESCRIPTORS))),
        maximum,
    };
    // It may have ended already, which is no fault of the call's.
    let _ = rustix::process::prlimit(Some(pid), Resource::Nofile, usual);
}

/// A starter of these commands that is a thread of this process.
#[cfg(test)]
fn process_of(commands: Vec<Vec<String>>) -> Starter {
    let (socket, theirs) = pair().expect("a socket pair");
    std::thread::spawn(move || process::run(theirs));
    Starter::of(socket, commands).expect("the thread listens")
}

#[cfg(test)]
mod tests;
