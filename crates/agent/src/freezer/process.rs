//! The owner's process, its files, and its words: see [`super`].

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FlockOperation, OFlags};
use wire::agent::MAX_DIRECTORY_LEN;
use wire::agent::job::MAX_FROZEN;

use super::owner::{self, Frozen, Mount, Thawed, World};
use crate::guest::read_limited;
use crate::stream::until;
use crate::tool::{Output, Tool};

/// The argument that makes the agent's binary an owner. It is not for people.
pub const SUBCOMMAND: &str = "hold-frozen";

/// The longest list, in bytes.
const MAX_LIST_LEN: usize = MAX_FROZEN * (MAX_DIRECTORY_LEN + 1);

/// The longest report or answer, in bytes.
pub(super) const MAX_REPORT_LEN: usize = 1 + MAX_LIST_LEN;

/// How long one file system may take: all that is in its cache is written to disk first.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long thawing one file system may take before the next is tried.
const THAW_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an answer may take to be read.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The most that may wait for an answer.
const MAX_ASKERS: usize = 64;

/// The directory with the owner's files.
#[derive(Debug, Clone)]
pub(super) struct Place(PathBuf);

impl Place {
    pub(super) fn at(path: &Path) -> Place {
        Place(path.to_owned())
    }

    pub(super) fn create(path: &Path) -> Result<Place, String> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(format!(
                "cannot create {}: {error}; nothing was frozen",
                path.display()
            )),
            _ => Ok(Place::at(path)),
        }
    }

    /// Where the owner is asked to thaw.
    pub(super) fn socket(&self) -> PathBuf {
        self.0.join("socket")
    }

    /// What may be frozen.
    pub(super) fn list(&self) -> Vec<Mount> {
        split(&read_limited(&self.0.join("list"), MAX_LIST_LEN as u64).unwrap_or_default())
    }

    fn write_list(&self, list: &[Mount]) -> io::Result<()> {
        let (path, new) = (self.0.join("list"), self.0.join("list.new"));
        if list.is_empty() {
            return match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        std::fs::write(&new, join(list))?;
        std::fs::rename(new, path)
    }

    /// The lock of the owner, when it is free.
    pub(super) fn lock(&self) -> io::Result<File> {
        let file = self.open("lock")?;
        loop {
            match rustix::fs::flock(&file, FlockOperation::LockExclusive) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result.map(|()| file)?),
            }
        }
    }

    /// The lock of the owner, if it is free.
    pub(super) fn try_lock(&self) -> io::Result<Option<File>> {
        self.try_lock_file("lock", FlockOperation::NonBlockingLockExclusive)
    }

    /// Whether there is no owner.
    pub(super) fn is_free(&self) -> bool {
        !self.0.exists() || matches!(self.try_lock(), Ok(Some(_)))
    }

    fn try_lock_file(&self, name: &str, operation: FlockOperation) -> io::Result<Option<File>> {
        let file = self.open(name)?;
        match rustix::fs::flock(&file, operation) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn open(&self, name: &str) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.mode(0o600).open(self.0.join(name))
    }
}

/// Paths with a zero byte behind each.
fn join(mounts: &[Mount]) -> Vec<u8> {
    let bytes = mounts.iter().flat_map(|mount| [mount.as_slice(), &[0]]);
    bytes.collect::<Vec<_>>().concat()
}

fn split(bytes: &[u8]) -> Vec<Mount> {
    let paths = bytes
        .split(|byte| *byte == 0)
        .filter(|path| !path.is_empty());
    paths.map(<[u8]>::to_vec).take(MAX_FROZEN).collect()
}

/// A report or an answer: whether it was done, and mount points or words.
fn encode(result: Result<&[Mount], String>) -> Vec<u8> {
    let (mark, bytes) = match result {
        Ok(mounts) => (b'+', join(mounts)),
        Err(words) => (b'-', words.into_bytes()),
    };
    [&[mark], bytes.as_slice()].concat()
}

pub(super) fn decode(bytes: &[u8]) -> Option<Result<Vec<Mount>, String>> {
    match bytes.split_first()? {
        (b'+', mounts) => Some(Ok(split(mounts))),
        (_, words) => Some(Err(String::from_utf8_lossy(words).into_owned())),
    }
}

/// The owner: `TIMEOUT_MS PLACE FSFREEZE MOUNT…`, and the lock as standard input.
pub fn run(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let mut next = || arguments.next().unwrap_or_default();
    let (timeout, place, program) = (next(), PathBuf::from(next()), PathBuf::from(next()));
    let timeout = timeout.to_str().and_then(|text| text.parse().ok());
    let Some(timeout) = timeout.map(Duration::from_millis) else {
        return ExitCode::from(2);
    };
    let mounts: Vec<Mount> = arguments.map(OsString::into_vec).collect();
    // Of a session of its own, so that nothing that ends the agent's ends it.
    let _ = rustix::process::setsid();
    let mut process = Process::new(Place(place), program);
    process.time = Some((Instant::now() + timeout, timeout));
    let listens = match (process.take_signals(), &process.listener) {
        (Ok(()), Some(_)) => Ok(()),
        (Ok(()), None) => Err("it cannot listen".to_owned()),
        (Err(error), _) => Err(format!("it cannot take signals: {error}")),
    };
    if let Err(words) = listens {
        let words = format!("cannot start the process that freezes: {words}; nothing was frozen");
        let Ok(_) = process.report(Err(words));
        return ExitCode::FAILURE;
    }
    let Ok(()) = owner::hold(&mut process, &mounts);
    ExitCode::SUCCESS
}

/// An owner in its guest.
pub(super) struct Process {
    place: Place,
    program: PathBuf,
    /// When what is frozen is thawed, and how long that was at first; an owner that only thaws has none.
    time: Option<(Instant, Duration)>,
    /// At which it is asked to thaw.
    listener: Option<UnixListener>,
    askers: Vec<UnixStream>,
    /// Readable when a signal asks to end, which is to thaw.
    signals: Option<UnixStream>,
    /// What keeps file systems from being unmounted while they are frozen, as they could then not be thawed.
    held: Vec<(Mount, File)>,
}

impl Process {
    /// Of one who has the lock.
    pub(super) fn new(place: Place, program: PathBuf) -> Process {
        let _ = std::fs::remove_file(place.socket());
        let listener = UnixListener::bind(place.socket()).ok();
        Process {
            listener: listener.filter(|listener| listener.set_nonblocking(true).is_ok()),
            place,
            program,
            time: None,
            askers: Vec::new(),
            signals: None,
            held: Vec::new(),
        }
    }

    fn take_signals(&mut self) -> io::Result<()> {
        let (read, write) = UnixStream::pair()?;
        read.set_nonblocking(true)?;
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
        }
        self.signals = Some(read);
        Ok(())
    }

    /// Whether it is asked to thaw.
    fn is_asked(&mut self) -> bool {
        if let Some(listener) = &self.listener {
            while let Ok((asker, _)) = listener.accept() {
                if self.askers.len() < MAX_ASKERS {
                    self.askers.push(asker);
                }
            }
        }
        let signals = self.signals.as_mut();
        let is_signalled = signals.is_some_and(|signals| signals.read(&mut [0; 64]).is_ok());
        is_signalled || !self.askers.is_empty()
    }

    fn call(
        &self,
        tool: Tool<'_>,
        verb: &str,
        mount: &Mount,
        timeout: Duration,
    ) -> io::Result<Output> {
        let deadline = Instant::now() + timeout;
        tool.arguments([OsStr::new(verb), OsStr::from_bytes(mount)])
            .run(deadline)
    }

    fn try_freeze(&mut self, mount: &Mount) -> Result<Frozen, String> {
        let failed = |error: io::Error| error.to_string();
        let busy = self
            .place
            .try_lock_file("busy", FlockOperation::NonBlockingLockShared)
            .map_err(failed)?
            .ok_or("a file system is still being frozen")?;
        let mut options = OpenOptions::new();
        options
            .read(true)
            .custom_flags(OFlags::DIRECTORY.bits() as i32);
        let held = options.open(OsStr::from_bytes(mount)).map_err(failed)?;
        let left = self
            .time
            .map(|(end, _)| end.saturating_duration_since(Instant::now()));
        let timeout = FREEZE_TIMEOUT.min(left.unwrap_or(FREEZE_TIMEOUT));
        let tool = Tool::new(&self.program).stdin(busy.into());
        let frozen = match self.call(tool, "--freeze", mount, timeout) {
            Ok(output) if output.succeeded => Frozen::Yes,
            // It was killed, and may have been in the middle of it.
            Ok(output) if output.complaint.is_empty() => {
                Frozen::Unknown("fsfreeze ended without a word".to_owned())
            }
            // As the C libraries say EOPNOTSUPP.
            Ok(output) if output.last_words.ends_with("ot supported") => Frozen::Unsupported,
            Ok(output) => Frozen::No(output.complaint),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Frozen::Unknown(format!("that takes longer than {timeout:.0?}"))
            }
            Err(error) => Frozen::No(error.to_string()),
        };
        if matches!(frozen, Frozen::Yes | Frozen::Unknown(_)) {
            self.held.push((mount.clone(), held));
        }
        Ok(frozen)
    }
}

impl World for Process {
    type Dead = Infallible;

    fn write_list(&mut self, list: &[Mount]) -> Result<Result<(), String>, Infallible> {
        let written = self.place.write_list(list);
        Ok(written.map_err(|error| format!("cannot write {}: {error}", self.place.0.display())))
    }

    fn freeze(&mut self, mount: &Mount) -> Result<Frozen, Infallible> {
        Ok(self.try_freeze(mount).unwrap_or_else(Frozen::No))
    }

    fn thaw(&mut self, mount: &Mount) -> Result<Thawed, Infallible> {
        let tool = Tool::new(&self.program);
        let thawed = match self.call(tool, "--unfreeze", mount, THAW_TIMEOUT) {
            Ok(output) if output.succeeded => Thawed::Yes,
            // EINVAL.
            Ok(output) if output.last_words.ends_with("Invalid argument") => Thawed::WasNot,
            Ok(output) => Thawed::No(output.complaint),
            Err(error) => Thawed::No(error.to_string()),
        };
        if !matches!(thawed, Thawed::No(_)) {
            self.held.retain(|(held, _)| held != mount);
        }
        Ok(thawed)
    }

    fn is_freezing(&mut self) -> Result<bool, Infallible> {
        let locked = self
            .place
            .try_lock_file("busy", FlockOperation::NonBlockingLockExclusive);
        Ok(!matches!(locked, Ok(Some(_))))
    }

    fn interruption(&mut self) -> Result<Option<String>, Infallible> {
        if self.is_asked() {
            return Ok(Some("it was asked to thaw meanwhile".to_owned()));
        }
        let over = self.time.filter(|(end, _)| Instant::now() >= *end);
        Ok(over.map(|(_, time)| {
            format!("freezing took longer than the {time:?} that it was to last: allow for more with --timeout")
        }))
    }

    fn wait(&mut self, pause: Option<Duration>) -> Result<(), Infallible> {
        let end = match (pause, self.time) {
            (Some(pause), _) => Instant::now() + pause,
            (None, Some((end, _))) => end,
            (None, None) => return Ok(()),
        };
        while !self.is_asked() && Instant::now() < end {
            let listener = self
                .listener
                .as_ref()
                .map(|end| PollFd::new(end, PollFlags::IN));
            let signals = self
                .signals
                .as_ref()
                .map(|end| PollFd::new(end, PollFlags::IN));
            let mut polled: Vec<PollFd<'_>> = listener.into_iter().chain(signals).collect();
            if let Err(error) = rustix::event::poll(&mut polled, Some(&until(end))) {
                if error != rustix::io::Errno::INTR {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn report(&mut self, frozen: Result<&[Mount], String>) -> Result<bool, Infallible> {
        let mut stdout = io::stdout().lock();
        let written = stdout
            .write_all(&encode(frozen))
            .and_then(|()| stdout.flush());
        // Who reads it waits for its end.
        let closed = File::options().write(true).open("/dev/null");
        let closed = closed.and_then(|null| Ok(rustix::stdio::dup2_stdout(null)?));
        Ok(written.and(closed).is_ok())
    }

    fn answer(&mut self, thawed: Result<&[Mount], String>) -> Result<(), Infallible> {
        let answer = encode(thawed);
        for mut asker in self.askers.drain(..) {
            // A client that does not take it asks again.
            let _ = asker
                .set_write_timeout(Some(ANSWER_TIMEOUT))
                .and_then(|()| asker.write_all(&answer));
        }
        Ok(())
    }
}
