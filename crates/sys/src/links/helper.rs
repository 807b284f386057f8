//! A process beside this one that does what takes the locks of directories and files.
//!
//! # Theory of operation
//!
//! A program that may read a directory can hold its lock without end: it lists the directory into memory that a FUSE file system of its own never provides. A lookup of a name there
//! sleeps where no signal wakes it, and its process cannot end: it keeps its descriptors, and with them its locks and its listeners.
//!
//! So it is with the lock of a file: a program that has it open writes to it from such memory. The next to write sleeps in the same way.
//!
//! So such acts are done by a process that has nothing to keep. It is forked while this one has a single thread, and is confined as this one is. Each call is a packet on
//! a *connection*, a socket pair of which the process has a thread for the other end, and descriptors come and go with it. A call waits for [`PATIENCE`] at most:
//! the thread that serves all VMs makes none. A connection that has not been answered is set aside with the directory that was looked into; in that directory nothing
//! more is tried until it has been, and for [`PAUSE`] in any case, and calls for other directories wait for [`PATIENCE_AFTER`] meanwhile: so many directories that are held
//! up cost little more than one. Late answers are closed. An act on an open file is set aside with the file's own path, and leaves its directory as it is.
//!
//! The process ends when the socket pair by which it gets its connections is closed, which is when this process ends.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};

use super::act::{Act, Outcome, Way};
use crate::descriptors::{receive, send};
use crate::lock;

/// How long a call waits.
const PATIENCE: Duration = Duration::from_secs(3);

/// How long a call waits while a directory is set aside.
const PATIENCE_AFTER: Duration = Duration::from_millis(300);

/// How long nothing is tried in a directory that was waited for in vain.
const PAUSE: Duration = Duration::from_secs(10);

/// The longest packet: two paths of the system's greatest length, and a few bytes.
pub(super) const MAX_PACKET: usize = 2 * 4096 + 64;

/// The most descriptors that come with one.
const MAX_DESCRIPTORS: usize = 2;

/// A connection's thread goes along paths, and no more.
const STACK_LEN: usize = 256 * 1024;

static IN_FORCE: RwLock<Option<Arc<Helper>>> = RwLock::new(None);

/// The process by which this one does such acts, if it has one.
pub(super) fn in_force() -> Option<Arc<Helper>> {
    let in_force = IN_FORCE.read().unwrap_or_else(PoisonError::into_inner);
    in_force.clone()
}

/// Whether this process has lost the one by which it does such acts: it goes on without it, and each of them fails.
pub fn has_ended() -> bool {
    let Some(helper) = in_force() else {
        return false;
    };
    let mut socket = [PollFd::new(&helper.socket, PollFlags::empty())];
    poll(&mut socket, Some(&Timespec::default())).is_ok_and(|ended| ended > 0)
}

/// What is said of an act.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Answer {
    Done {
        way: Way,
        number: usize,
    },
    /// The system's error number.
    System(i32),
    /// An error without one.
    Refused(String),
}

/// This process's end.
#[derive(Debug)]
pub(super) struct Helper {
    /// Connections are sent here.
    socket: OwnedFd,
    /// A connection for the next call. Calls at the same time make further ones.
    idle: Mutex<Option<OwnedFd>>,
    held: Mutex<HashMap<PathBuf, Held>>,
}

/// A directory in which an act took too long, or a file.
#[derive(Debug)]
struct Held {
    until: Instant,
    /// Those that have not been answered.
    pending: Vec<OwnedFd>,
}

impl Helper {
    /// In place of one by which this process has learned already where nothing is to be tried.
    fn new(socket: OwnedFd, former: Option<&Helper>) -> Helper {
        let held = former.map(|former| std::mem::take(&mut *lock(&former.held)));
        Helper {
            socket,
            idle: Mutex::default(),
            held: Mutex::new(held.unwrap_or_default()),
        }
    }

    /// Has an act done in a directory, or on a file, of which this is the path.
    ///
    /// # Errors
    /// As the act; [`io::ErrorKind::TimedOut`] where it takes too long, and may be done later; [`io::ErrorKind::BrokenPipe`] if the process has ended.
    pub(super) fn ask(
        &self,
        act: &Act,
        directory: &Path,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Outcome> {
        let now = Instant::now();
        self.check(directory, now)?;
        let patience = self.patience(now);
        let packet = postcard::to_allocvec(act).map_err(io::Error::other)?;
        if packet.len() > MAX_PACKET {
            return Err(Errno::NAMETOOLONG.into());
        }
        let connection = self.connection()?;
        send(&connection, &packet, descriptors, SendFlags::empty())?;
        if !is_answered(&connection, patience)? {
            self.set_aside(directory, connection);
            return Err(held_up(directory));
        }
        let (answer, file) = answer(&connection)?;
        *lock(&self.idle) = Some(connection);
        finish(answer, file)
    }

    /// How long a call that begins now waits.
    fn patience(&self, now: Instant) -> Duration {
        let held = lock(&self.held);
        let is_any_held = held.values().any(|held| now < held.until);
        match is_any_held {
            true => PATIENCE_AFTER,
            false => PATIENCE,
        }
    }

    /// Whether anything is to be tried in a directory.
    fn check(&self, directory: &Path, now: Instant) -> io::Result<()> {
        let mut held = lock(&self.held);
        let Some(found) = held.get_mut(directory) else {
            return Ok(());
        };
        // An answer that has come by now is for no caller.
        let is_pending =
            |connection: &OwnedFd| !is_answered(connection, Duration::ZERO).unwrap_or(true);
        found.pending.retain(is_pending);
        if !found.pending.is_empty() || now < found.until {
            return Err(held_up(directory));
        }
        held.remove(directory);
        Ok(())
    }

    fn set_aside(&self, directory: &Path, connection: OwnedFd) {
        let until = Instant::now() + PAUSE;
        let mut held = lock(&self.held);
        let found = held.entry(directory.to_owned()).or_insert_with(|| Held {
            until,
            pending: Vec::new(),
        });
        found.until = until;
        found.pending.push(connection);
    }

    fn connection(&self) -> io::Result<OwnedFd> {
        if let Some(connection) = lock(&self.idle).take() {
            return Ok(connection);
        }
        let (connection, theirs) = pair()?;
        // Descriptors that are under way count for their sender.
        send(&self.socket, b"new", &[theirs.as_fd()], SendFlags::DONTWAIT).map_err(gone)?;
        Ok(connection)
    }
}

/// Whether a packet, or the end, comes in this time.
fn is_answered(connection: &OwnedFd, within: Duration) -> Result<bool, Errno> {
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(connection, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            polled => return Ok(polled? > 0),
        }
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Bytes, and the descriptors that came with them.
type Packet = (Vec<u8>, Vec<OwnedFd>);

/// The next one, once it comes.
///
/// # Errors
/// [`Errno::PIPE`] at the end; [`Errno::MFILE`] if this process may not have the descriptors.
fn packet(socket: &OwnedFd) -> Result<Packet, Errno> {
    let (mut bytes, mut descriptors) = (vec![0; MAX_PACKET], Vec::new());
    loop {
        let flags = RecvFlags::empty();
        match receive(socket, &mut bytes, &mut descriptors, MAX_DESCRIPTORS, flags) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
            Ok(received) if received.truncated => return Err(Errno::MFILE),
            Ok(received) if received.len == 0 => return Err(Errno::PIPE),
            Ok(received) => {
                bytes.truncate(received.len);
                return Ok((bytes, descriptors));
            }
        }
    }
}

fn answer(connection: &OwnedFd) -> io::Result<(Answer, Option<OwnedFd>)> {
    let (bytes, mut descriptors) = packet(connection).map_err(gone)?;
    let answer = postcard::from_bytes(&bytes).map_err(io::Error::other)?;
    Ok((answer, descriptors.pop()))
}

fn finish(answer: Answer, file: Option<OwnedFd>) -> io::Result<Outcome> {
    match answer {
        Answer::Done { way, number } => Ok(Outcome { file, way, number }),
        Answer::System(number) => Err(io::Error::from_raw_os_error(number)),
        Answer::Refused(words) => Err(io::Error::other(words)),
    }
}

/// Only the end of a connection says that the process has ended, or has no thread or descriptor left for it.
fn gone(error: Errno) -> io::Error {
    match error {
        Errno::PIPE | Errno::CONNRESET => {
            let words = "the process that looks into directories and writes to files of others, `ringdown-paths`, has ended: start this one anew";
            io::Error::new(io::ErrorKind::BrokenPipe, words)
        }
        error => error.into(),
    }
}

fn held_up(directory: &Path) -> io::Error {
    let words = format!(
        "{} has not answered in time: its disk is slow, or a program holds its lock, which every program can that may read it",
        directory.display()
    );
    io::Error::new(io::ErrorKind::TimedOut, words)
}

/// Does what comes by the connections that come here, until the other end is closed.
fn serve(socket: &OwnedFd) {
    loop {
        match packet(socket) {
            Ok((_, connections)) => connections.into_iter().for_each(begin),
            // No descriptor is left: those waiting for one get errors.
            Err(Errno::MFILE) => {}
            Err(_) => return,
        }
    }
}

fn begin(connection: OwnedFd) {
    let named = thread::Builder::new().name("paths".to_owned());
    // Without a thread the connection is closed.
    let _ = named
        .stack_size(STACK_LEN)
        .spawn(move || while serve_next(&connection).is_ok() {});
}

fn serve_next(connection: &OwnedFd) -> Result<(), Errno> {
    let (answer, file) = match packet(connection) {
        Ok((packet, descriptors)) => perform(&packet, &descriptors)?,
        Err(Errno::MFILE) => (Answer::System(Errno::MFILE.raw_os_error()), None),
        Err(error) => return Err(error),
    };
    let bytes = postcard::to_allocvec(&answer).map_err(|_| Errno::BADMSG)?;
    let file = file.as_ref().map(AsFd::as_fd);
    send(connection, &bytes, file.as_slice(), SendFlags::empty()).map(drop)
}

/// The caller's descriptors are closed when this returns.
fn perform(packet: &[u8], descriptors: &[OwnedFd]) -> Result<(Answer, Option<OwnedFd>), Errno> {
    let act: Act = postcard::from_bytes(packet).map_err(|_| Errno::BADMSG)?;
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    Ok(match act.perform(&descriptors) {
        Ok(Outcome { file, way, number }) => (Answer::Done { way, number }, file),
        Err(error) => match error.raw_os_error() {
            Some(number) => (Answer::System(number), None),
            None => (Answer::Refused(error.to_string()), None),
        },
    })
}

mod process;
pub use process::start;

#[cfg(test)]
mod tests;
