//! The owner's process, its files, and its words: see [`super`].

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::FlockOperation;
use wire::agent::MAX_DIRECTORY_LEN;
use wire::agent::job::MAX_FROZEN;

use super::mounts;
use super::owner::{self, Frozen, Mount, NONE, Thawed, World};
use crate::guest::read_limited;
use crate::stream::until;
use crate::tool::{Output, Tool};

/// The argument that makes the agent's binary an owner. It is not for people.
pub const SUBCOMMAND: &str = "hold-frozen";

/// The longest name of a device, in bytes: two numbers of 32 bits.
const MAX_DEVICE_LEN: usize = 21;

/// The longest list, in bytes.
const MAX_LIST_LEN: usize = MAX_FROZEN * (MAX_DEVICE_LEN + MAX_DIRECTORY_LEN + 2);

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

/// Each with its device before and a zero byte behind.
fn join(mounts: &[Mount]) -> Vec<u8> {
    let bytes = mounts
        .iter()
        .flat_map(|mount| [mount.device.as_bytes(), b" ", &mount.point, &[0]]);
    bytes.collect::<Vec<_>>().concat()
}

fn split(bytes: &[u8]) -> Vec<Mount> {
    let mounts = bytes
        .split(|byte| *byte == 0)
        .filter(|mount| !mount.is_empty());
    let mounts = mounts.map(|mount| {
        let end = mount.iter().position(|byte| *byte == b' ');
        let (device, point) = mount.split_at(end.unwrap_or(0));
        Mount {
            device: String::from_utf8_lossy(device).into_owned(),
            point: point.strip_prefix(b" ").unwrap_or(point).to_vec(),
        }
    });
    mounts.take(MAX_FROZEN).collect()
}

/// A report or an answer: whether it was done, and mount points or words.
fn encode(result: Result<&[Mount], String>) -> Vec<u8> {
    let (mark, bytes) = match result {
        Ok(mounts) => (b'+', join(mounts)),
        Err(words) => (b'-', words.into_bytes()),
    };
    [&[mark], bytes.as_slice()].concat()
}

/// The mount points of what was frozen or thawed, or why it was not.
pub(super) type Told = Result<Vec<Vec<u8>>, String>;

pub(super) fn decode(bytes: &[u8]) -> Option<Told> {
    match bytes.split_first()? {
        (b'+', mounts) => {
            let mounts = split(mounts).into_iter();
            Some(Ok(mounts.map(|mount| mount.point).collect()))
        }
        (_, words) => Some(Err(String::from_utf8_lossy(words).into_owned())),
    }
}

/// The owner: `TIMEOUT_MS PLACE FSFREEZE MOUNTS`, and the lock as standard input.
pub fn run(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let mut next = || arguments.next().unwrap_or_default();
    let (timeout, place) = (next(), PathBuf::from(next()));
    let (program, table) = (PathBuf::from(next()), PathBuf::from(next()));
    let timeout = timeout.to_str().and_then(|text| text.parse().ok());
    let Some(timeout) = timeout.map(Duration::from_millis) else {
        return ExitCode::from(2);
    };
    // Of a session of its own, so that nothing that ends the agent's ends it.
    let _ = rustix::process::setsid();
    let mut process = Process::new(Place(place), program, table);
    process.time = Some((Instant::now() + timeout, timeout));
    match process.prepare() {
        Ok(mounts) => {
            let Ok(()) = owner::hold(&mut process, &mounts);
            ExitCode::SUCCESS
        }
        Err(words) => {
            let Ok(_) = process.report(Err(format!("{words}; nothing was frozen")));
            ExitCode::FAILURE
        }
    }
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
    /// The table of mounts.
    table: PathBuf,
    /// The roots of what is still to be frozen, opened before anything is: to open may wait for what is frozen.
    opened: Vec<(Mount, OwnedFd)>,
    /// The roots of what is frozen. They are thawed by these, whatever their paths lead to by then, and cannot be unmounted.
    held: Vec<(Mount, OwnedFd)>,
}

impl Process {
    /// Of the lock's holder.
    pub(super) fn new(place: Place, program: PathBuf, table: PathBuf) -> Process {
        let _ = std::fs::remove_file(place.socket());
        let listener = UnixListener::bind(place.socket()).ok();
        Process {
            listener: listener.filter(|listener| listener.set_nonblocking(true).is_ok()),
            place,
            program,
            time: None,
            askers: Vec::new(),
            signals: None,
            table,
            opened: Vec::new(),
            held: Vec::new(),
        }
    }

    /// What it is to freeze, opened; it can be asked to end by then.
    fn prepare(&mut self) -> Result<Vec<Mount>, String> {
        let cannot = |words| format!("cannot start the process that freezes: {words}");
        self.take_signals()
            .map_err(|error| cannot(format!("it cannot take signals: {error}")))?;
        if self.listener.is_none() {
            return Err(cannot("it cannot listen".to_owned()));
        }
        self.opened = mounts::to_freeze(&mounts::read(&self.table)?, mounts::find)?;
        match self.opened.len() {
            0 => Err(NONE.to_owned()),
            1..=MAX_FROZEN => Ok(self.opened.iter().map(|(mount, _)| mount.clone()).collect()),
            count => Err(format!(
                "{count} file systems are mounted, at most {MAX_FROZEN} are frozen together"
            )),
        }
    }

    /// The root of what an owner before this one has frozen.
    fn find(&self, mount: &Mount) -> Result<OwnedFd, String> {
        let table = mounts::read(&self.table)?;
        mounts::of_device(&table, &mount.device, mounts::find).ok_or_else(|| {
            format!(
                "its device, {}, is not mounted where it can be reached: mount it, or unmount what is mounted over it",
                mount.device
            )
        })
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

    /// `fsfreeze` in a root: the names on the way there may be others by now.
    fn call(
        tool: Tool<'_>,
        verb: &str,
        root: BorrowedFd<'_>,
        timeout: Duration,
    ) -> io::Result<Output> {
        let deadline = Instant::now() + timeout;
        tool.directory(root).arguments([verb, "."]).run(deadline)
    }

    fn try_freeze(&mut self, mount: &Mount) -> Result<Frozen, String> {
        let failed = |error: io::Error| error.to_string();
        let busy = self
            .place
            .try_lock_file("busy", FlockOperation::NonBlockingLockShared)
            .map_err(failed)?
            .ok_or("a file system is still being frozen")?;
        let index = self.opened.iter().position(|(opened, _)| opened == mount);
        let index = index.ok_or("it is not open")?;
        let (_, root) = self.opened.swap_remove(index);
        let left = self
            .time
            .map(|(end, _)| end.saturating_duration_since(Instant::now()));
        let timeout = FREEZE_TIMEOUT.min(left.unwrap_or(FREEZE_TIMEOUT));
        let tool = Tool::new(&self.program).stdin(busy.into());
        let frozen = match Self::call(tool, "--freeze", root.as_fd(), timeout) {
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
            self.held.push((mount.clone(), root));
        }
        Ok(frozen)
    }
}

impl World for Process {
    type Dead = Infallible;

    fn write_list(&mut self, list: &[Mount]) -> Result<Result<(), String>, Infallible> {
        // What is not on the list is not thawed any more, and can be unmounted.
        self.held.retain(|(held, _)| list.contains(held));
        let written = self.place.write_list(list);
        Ok(written.map_err(|error| format!("cannot write {}: {error}", self.place.0.display())))
    }

    fn freeze(&mut self, mount: &Mount) -> Result<Frozen, Infallible> {
        Ok(self.try_freeze(mount).unwrap_or_else(Frozen::No))
    }

    fn thaw(&mut self, mount: &Mount) -> Result<Thawed, Infallible> {
        let held = self.held.iter().find(|(held, _)| held == mount);
        let found;
        let root = match held {
            Some((_, root)) => root.as_fd(),
            None => match self.find(mount) {
                Ok(root) => {
                    found = root;
                    found.as_fd()
                }
                Err(words) => return Ok(Thawed::No(words)),
            },
        };
        let tool = Tool::new(&self.program);
        Ok(match Self::call(tool, "--unfreeze", root, THAW_TIMEOUT) {
            Ok(output) if output.succeeded => Thawed::Yes,
            // EINVAL.
            Ok(output) if output.last_words.ends_with("Invalid argument") => Thawed::WasNot,
            Ok(output) => Thawed::No(output.complaint),
            Err(error) => Thawed::No(error.to_string()),
        })
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
        // A reader waits for its end.
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
