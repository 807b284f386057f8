//! Holding all writes to the guest's file systems while its disks are copied, and letting them go again whatever happens.
//!
//! # Theory of operation
//!
//! `fsfreeze` (of util-linux or busybox) freezes one file system after the other, those that are mounted deepest first, so that no file
//! system has to write through a frozen one to become still. Who writes to a frozen file system waits. Therefore nothing here does: what is
//! frozen is written into a list in memory ([`STATE`] in `/run`, which is a tmpfs and is never frozen), before the first one is, and the
//! agent's log is silent meanwhile.
//!
//! A guest that stays frozen is lost, so thawing does not depend on the host, nor on this agent: before anything is frozen, a *guard* is
//! started, a process of its own that sleeps until the time is over and then thaws what the list has. It holds a lock on the list for
//! as long as it lives. An agent that starts and finds a list without that lock takes it that the guard was killed too, and starts
//! another one. Whoever thaws removes the list, and a guard whose list is gone ends.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use wire::agent::MAX_DIRECTORY_LEN;
use wire::agent::job::MAX_FROZEN;

use crate::guest::{read_limited, unescape};
use crate::log::{be_quiet, say};
use crate::session::Options;
use crate::tool::{Tool, find};

/// The argument that makes the agent's binary a guard. It is not for people.
pub const SUBCOMMAND: &str = "thaw-later";

/// The list of what is frozen. `/run` is in memory on every distribution.
const STATE: &str = "/run/ringdown-frozen";

/// The longest list, in bytes.
const MAX_STATE_LEN: u64 = (MAX_FROZEN * (MAX_DIRECTORY_LEN + 1)) as u64;

/// How long one file system may take: all that is in its cache is written to disk first.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long thawing one file system may take.
const THAW_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the guard may take to start.
const GUARD_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a guard looks whether it is still needed.
const GUARD_LOOK: Duration = Duration::from_millis(500);

/// The most that is read of the table of mounts, in bytes.
const MAX_MOUNTS_LEN: u64 = 1024 * 1024;

/// Kinds of file systems that can be frozen and have a disk behind them.
const KINDS: [&str; 10] = [
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "gfs2", "jfs", "nilfs2", "xfs",
];

/// What `fsfreeze` says of a file system that cannot be frozen, by this kernel: it is left out.
const UNSUPPORTED: &str = "Operation not supported";

/// What freezes and thaws in this guest.
#[derive(Debug)]
pub(crate) struct Freezer {
    search_path: OsString,
    launcher: PathBuf,
    state: PathBuf,
    mounts: PathBuf,
}

impl Freezer {
    pub(crate) fn new(options: &Options) -> Freezer {
        Freezer {
            search_path: options.config.search_path.clone(),
            launcher: options.launcher.clone(),
            state: STATE.into(),
            mounts: "/proc/self/mounts".into(),
        }
    }

    /// Freeze everything for that long at most: the mount points, in their order.
    ///
    /// # Errors
    /// In words; then nothing is frozen.
    pub(crate) fn freeze(&self, timeout: Duration) -> Result<Vec<Vec<u8>>, String> {
        let program = self.fsfreeze()?;
        let table = read_limited(&self.mounts, MAX_MOUNTS_LEN)
            .map_err(|error| format!("cannot read the table of mounts: {error}"))?;
        let mounts = to_freeze(&String::from_utf8_lossy(&table));
        if mounts.is_empty() {
            return Err("there is no file system in this guest that can be frozen".to_owned());
        }
        if mounts.len() > MAX_FROZEN {
            return Err(format!(
                "{} file systems are mounted, at most {MAX_FROZEN} are frozen together",
                mounts.len()
            ));
        }
        self.write_state(&mounts)?;
        if let Err(words) = self.start_guard(timeout) {
            let _ = std::fs::remove_file(&self.state);
            return Err(words);
        }
        be_quiet(true);
        let mut frozen = Vec::new();
        for mount in mounts {
            match switch(&program, "--freeze", &mount, FREEZE_TIMEOUT) {
                Ok(()) => frozen.push(mount),
                Err(words) if words.ends_with(UNSUPPORTED) => {}
                Err(words) => {
                    // All of the list, as whether this one is frozen is not known; thawing what is not frozen fails, and does no harm.
                    let _ = self.thaw();
                    let mount = shown(&mount);
                    return Err(format!(
                        "cannot freeze {mount}: {words}; everything was thawed again"
                    ));
                }
            }
        }
        Ok(frozen)
    }

    /// Thaw what was frozen here: the mount points.
    ///
    /// # Errors
    /// In words.
    pub(crate) fn thaw(&self) -> Result<Vec<Vec<u8>>, String> {
        let program = self.fsfreeze()?;
        let list = match read_limited(&self.state, MAX_STATE_LEN) {
            Ok(list) => parse_state(&list),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err("nothing is frozen, or its time was over".to_owned());
            }
            Err(error) => return Err(format!("cannot read {}: {error}", self.state.display())),
        };
        let (mut thawed, mut first_failure) = (Vec::new(), None);
        // The other way round: what is mounted highest first.
        for mount in list.into_iter().rev() {
            match switch(&program, "--unfreeze", &mount, THAW_TIMEOUT) {
                Ok(()) => thawed.push(mount),
                Err(words) => {
                    first_failure.get_or_insert(format!("cannot thaw {}: {words}", shown(&mount)));
                }
            }
        }
        let _ = std::fs::remove_file(&self.state);
        be_quiet(false);
        match first_failure {
            Some(words) if thawed.is_empty() => Err(words),
            _ => Ok(thawed),
        }
    }

    /// Take care of what an agent before this one left frozen.
    pub(crate) fn recover(&self) {
        let Ok(file) = File::options().read(true).write(true).open(&self.state) else {
            return;
        };
        let is_guarded =
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err();
        drop(file);
        be_quiet(true);
        if !is_guarded {
            if let Err(words) = self.start_guard(Duration::ZERO) {
                // The last resort: the time that was asked for does not matter any more.
                let thawed = self.thaw();
                say!("{words}; thawed by the agent itself: {thawed:?}");
                return;
            }
        }
        // The log comes back when the guard, whoever started it, has done its work.
        let state = self.state.clone();
        let watch = move || {
            while state.exists() {
                std::thread::sleep(GUARD_LOOK);
            }
            be_quiet(false);
        };
        if std::thread::Builder::new()
            .name("thaw".into())
            .spawn(watch)
            .is_err()
        {
            be_quiet(false);
        }
    }

    fn fsfreeze(&self) -> Result<PathBuf, String> {
        find(&self.search_path, "fsfreeze").ok_or_else(|| {
            "there is no fsfreeze in this guest: install util-linux, or a busybox that has it"
                .to_owned()
        })
    }

    /// The list: paths with a zero byte behind each. That it is there says that something is frozen.
    fn write_state(&self, mounts: &[Vec<u8>]) -> Result<(), String> {
        let text: Vec<u8> = mounts
            .iter()
            .flat_map(|mount| mount.iter().copied().chain([0]))
            .collect();
        let created = File::options()
            .write(true)
            .create_new(true)
            .open(&self.state);
        let written = created.and_then(|mut file| file.write_all(&text));
        written.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                "file systems are frozen already: thaw them first".to_owned()
            }
            _ => format!(
                "cannot write {}: {error}; nothing was frozen",
                self.state.display()
            ),
        })
    }

    /// Start the process that thaws when the time is over, and wait until it holds the lock.
    fn start_guard(&self, timeout: Duration) -> Result<(), String> {
        let failed =
            |error: io::Error| format!("cannot start the process that thaws by itself: {error}");
        let mut guard = Command::new(&self.launcher);
        guard
            .arg(SUBCOMMAND)
            .arg(timeout.as_millis().to_string())
            .arg(&self.state)
            .arg(self.fsfreeze()?)
            .env_clear()
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut guard = guard.spawn().map_err(failed)?;
        let mut ready = guard.stdout.take().map(std::os::fd::OwnedFd::from);
        let is_ready = ready.as_mut().is_some_and(|ready| {
            let waited = crate::stream::wait(
                ready,
                rustix::event::PollFlags::IN,
                Instant::now() + GUARD_TIMEOUT,
            );
            waited.is_ok() && rustix::io::read(&*ready, &mut [0_u8; 1]) == Ok(1)
        });
        if !is_ready {
            let _ = guard.kill();
            let _ = guard.wait();
            return Err(failed(io::Error::other("it does not say that it is there")));
        }
        // Its end is taken note of, so that it does not stay as a zombie.
        let reap = move || {
            let _ = guard.wait();
            be_quiet(false);
        };
        let _ = std::thread::Builder::new().name("guard".into()).spawn(reap);
        Ok(())
    }
}

/// The guard: `TIMEOUT_MS LIST FSFREEZE`.
pub fn guard(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let mut next = || arguments.next().unwrap_or_default();
    let (timeout, state, program) = (next(), PathBuf::from(next()), PathBuf::from(next()));
    let Some(timeout) = timeout
        .to_str()
        .and_then(|text| text.parse().ok())
        .map(Duration::from_millis)
    else {
        return ExitCode::from(2);
    };
    let deadline = Instant::now() + timeout;
    // Of a session of its own, so that nothing that ends the agent's ends it.
    let _ = rustix::process::setsid();
    let Ok(file) = File::options().read(true).write(true).open(&state) else {
        return ExitCode::FAILURE;
    };
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return ExitCode::FAILURE;
    }
    if rustix::io::write(rustix::stdio::stdout(), b"+").is_err() {
        return ExitCode::FAILURE;
    }
    while Instant::now() < deadline {
        if file.metadata().is_ok_and(|metadata| metadata.nlink() == 0) {
            return ExitCode::SUCCESS;
        }
        std::thread::sleep(GUARD_LOOK.min(deadline.saturating_duration_since(Instant::now())));
    }
    let mut list = Vec::new();
    let mut whole = file.take(MAX_STATE_LEN);
    if whole.read_to_end(&mut list).is_err() {
        return ExitCode::FAILURE;
    }
    for mount in parse_state(&list).into_iter().rev() {
        let _ = switch(&program, "--unfreeze", &mount, THAW_TIMEOUT);
    }
    let _ = std::fs::remove_file(&state);
    ExitCode::SUCCESS
}

fn switch(program: &Path, verb: &str, mount: &[u8], timeout: Duration) -> Result<(), String> {
    let output = Tool::new(program)
        .arguments([OsStr::new(verb), OsStr::from_bytes(mount)])
        .run(Instant::now() + timeout);
    match output {
        Ok(output) if output.succeeded => Ok(()),
        Ok(output) => Err(output.complaint),
        Err(error) => Err(error.to_string()),
    }
}

/// The mount points to freeze, in order: each file system once, what was mounted last first; not those that cannot be written.
fn to_freeze(table: &str) -> Vec<Vec<u8>> {
    let mut devices: Vec<&str> = Vec::new();
    let mut mounts = Vec::new();
    for line in table.lines() {
        let mut words = line.split(' ');
        let mut next = || words.next().unwrap_or_default();
        let (device, mount, kind, options) = (next(), next(), next(), next());
        let is_writable = !options.split(',').any(|option| option == "ro");
        if KINDS.contains(&kind) && is_writable && !devices.contains(&device) {
            devices.push(device);
            mounts.push(unescape(mount).into_bytes());
        }
    }
    mounts.reverse();
    mounts
}

fn parse_state(list: &[u8]) -> Vec<Vec<u8>> {
    let paths = list
        .split(|byte| *byte == 0)
        .filter(|path| !path.is_empty());
    paths.map(<[u8]>::to_vec).take(MAX_FROZEN).collect()
}

fn shown(mount: &[u8]) -> String {
    String::from_utf8_lossy(mount).into_owned()
}

#[cfg(test)]
mod tests;
