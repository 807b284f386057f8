//! Holding all writes to the guest's file systems while its disks are copied, and letting them go again whatever happens.
//!
//! # Theory of operation
//!
//! Frozen file systems have one *owner*: the process or thread that has the lock in [`PLACE`]. It alone freezes, keeps the list of what is frozen, and thaws,
//! one after the other, so that these cannot overlap ([`owner`] is what it does, without system calls). The agent takes the lock
//! and hands it to a process of its own, which lives on without the agent and the host. That process freezes, reports, waits until the time is
//! over or it is asked to at its socket, and thaws. It checks the time before and after each file system: freezing that takes longer fails, and
//! everything is thawed.
//!
//! A file system is on the list before it is frozen, and leaves it when it is known not to be: what cannot be thawed stays there
//! and is tried again. If the owner ends before the list is empty, the agent, next to have the lock, becomes the owner and thaws; so does
//! an agent that starts and finds a list. A call of `fsfreeze` that was killed, or whose owner was, may still freeze
//! when its wait in the kernel is over. It holds a lock of its own, and until that is free nothing leaves the list.
//!
//! A file system is found once, before the first is frozen: its root is opened, and is what is frozen and thawed. By its path it could be another by then,
//! as users may rename directories of theirs, and mount over them, in which root has mounted something. A successor has not opened it, and finds it by its
//! device in the table of mounts, wherever it is mounted by then; a path in that table counts only if it leads to that very mount.
//!
//! `fsfreeze` (of util-linux or busybox) freezes one file system after the other, the last mounted first, so that no file
//! system has to write through a frozen one to become still. A writer to a frozen file system waits. Therefore nothing here does:
//! [`PLACE`] has to be in memory, and the agent writes no log meanwhile.

mod mounts;
mod owner;
mod process;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::log::{be_quiet, say};
use crate::tool::find;
use process::{MAX_REPORT_LEN, Place, Process, Told, decode};
pub use process::{SUBCOMMAND, run};

/// Where the owner's files are. Not in `/run/ringdown`, which service managers may remove when the agent ends.
pub const PLACE: &str = "/run/ringdown-freeze";

/// How long an owner that is just beginning or ending is waited for.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is tried meanwhile.
const CHANGE_INTERVAL: Duration = Duration::from_millis(20);

/// How long the owner may take beyond the time of the freeze: for the file system at hand, and to thaw all of them once.
const OWNER_TIMEOUT: Duration = Duration::from_secs(300);

/// What freezes and thaws in this guest.
#[derive(Debug)]
pub struct Freezer {
    /// Where `fsfreeze` is looked for.
    pub search_path: OsString,
    /// The agent's own executable.
    pub launcher: PathBuf,
    /// Where the owner's files are.
    pub place: PathBuf,
    /// The table of mounts, as proc(5) describes `mountinfo`.
    pub mounts: PathBuf,
}

impl Freezer {
    pub(crate) fn new(search_path: &OsStr, launcher: &Path) -> Freezer {
        Freezer {
            search_path: search_path.to_owned(),
            launcher: launcher.to_owned(),
            place: PLACE.into(),
            mounts: "/proc/self/mountinfo".into(),
        }
    }

    /// Freeze everything for that long at most: the mount points, in their order.
    ///
    /// # Errors
    /// In words. Then nothing is frozen, or the words say what could not be thawed yet and is tried again.
    pub fn freeze(&self, timeout: Duration) -> Result<Vec<Vec<u8>>, String> {
        let program = find(&self.search_path, "fsfreeze").ok_or(
            "there is no fsfreeze in this guest: install util-linux, or a busybox that has it",
        )?;
        self.check_place()?;
        let place = Place::create(&self.place)?;
        let lock = self.become_owner(&place)?;
        be_quiet(true);
        // Before anything is frozen, and waiting until this owner has ended.
        if let Err(error) = self.succeed_owner(&place) {
            be_quiet(false);
            return Err(format!(
                "cannot start a thread: {error}; nothing was frozen"
            ));
        }
        let mut owner = Command::new(&self.launcher);
        owner
            .arg(SUBCOMMAND)
            .arg(timeout.as_millis().to_string())
            .arg(&self.place)
            .arg(program)
            .arg(&self.mounts)
            .env_clear()
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::from(lock))
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let spawned = owner.spawn();
        // Its copy of the lock.
        drop(owner);
        let mut owner = spawned.map_err(|error| {
            format!("cannot start the process that freezes: {error}; nothing was frozen")
        })?;
        let report = read_report(&mut owner, Instant::now() + timeout + OWNER_TIMEOUT);
        // Its end is taken note of, so that it does not stay as a zombie.
        let reap = move || owner.wait();
        let _ = std::thread::Builder::new()
            .name("reaper".into())
            .spawn(reap);
        report.unwrap_or_else(|| {
            let thawed = match self.thaw() {
                Ok(_) => "everything was thawed".to_owned(),
                Err(words) => words,
            };
            Err(format!(
                "the process that freezes has ended unexpectedly; {thawed}"
            ))
        })
    }

    /// Thaw what was frozen here: the mount points.
    pub fn thaw(&self) -> Result<Vec<Vec<u8>>, String> {
        let place = Place::at(&self.place);
        let deadline = Instant::now() + CHANGE_TIMEOUT;
        loop {
            if let Ok(mut owner) = UnixStream::connect(place.socket()) {
                // An owner that was just ending says nothing.
                if let Some(answer) = ask(&mut owner)? {
                    return answer;
                }
            } else if place.list().is_empty() && place.is_free() {
                return Err("nothing is frozen, or its time was over".to_owned());
            }
            if Instant::now() > deadline {
                return Err(format!(
                    "the process that keeps the file systems frozen does not answer: see {}, and thaw with fsfreeze --unfreeze",
                    self.place.display()
                ));
            }
            std::thread::sleep(CHANGE_INTERVAL);
        }
    }

    /// Take care of what an agent before this one left frozen.
    pub fn recover(&self) {
        let place = Place::at(&self.place);
        if place.list().is_empty() && place.is_free() {
            return;
        }
        be_quiet(true);
        if let Err(error) = self.succeed_owner(&place) {
            be_quiet(false);
            say!("cannot start the thread that thaws what is frozen: {error}");
        }
    }

    fn check_place(&self) -> Result<(), String> {
        match mounts::is_in_memory(&mounts::read(&self.mounts)?, &self.place) {
            true => Ok(()),
            false => Err(format!(
                "{} has to be in memory, as what is frozen is written down there: mount a tmpfs at /run",
                self.place.display()
            )),
        }
    }

    /// The lock, if nothing is frozen. An owner that is ending is waited for.
    fn become_owner(&self, place: &Place) -> Result<File, String> {
        let deadline = Instant::now() + CHANGE_TIMEOUT;
        loop {
            let lock = place.try_lock().map_err(|error| {
                format!(
                    "cannot use {}: {error}; nothing was frozen",
                    self.place.display()
                )
            })?;
            let list = place.list();
            match lock {
                Some(lock) if list.is_empty() => return Ok(lock),
                None if !list.is_empty() => {
                    return Err("file systems are frozen already: thaw them first".to_owned());
                }
                // The owner is beginning or ending, or its successor has not begun.
                _ if Instant::now() < deadline => std::thread::sleep(CHANGE_INTERVAL),
                _ => return Err("another freeze is beginning or ending: try again".to_owned()),
            }
        }
    }

    /// Wait for the owner's end in a thread, thaw what it has left, and let the log speak again.
    fn succeed_owner(&self, place: &Place) -> std::io::Result<()> {
        let program = find(&self.search_path, "fsfreeze").unwrap_or_else(|| "fsfreeze".into());
        let (place, table) = (place.clone(), self.mounts.clone());
        let succeed = move || {
            let locked = place.lock();
            let list = place.list();
            if !list.is_empty() {
                let Ok(never) = owner::thaw(&mut Process::new(place, program, table), list, None);
                never
            }
            be_quiet(false);
            drop(locked);
        };
        let builder = std::thread::Builder::new().name("thaw".into());
        builder.spawn(succeed).map(drop)
    }
}

/// What the owner reports of its freezing; nothing if it ended before.
fn read_report(owner: &mut Child, deadline: Instant) -> Option<Told> {
    let pipe = std::os::fd::OwnedFd::from(owner.stdout.take()?);
    let mut report = Vec::new();
    let mut piece = [0; 4096];
    loop {
        crate::stream::wait(&pipe, rustix::event::PollFlags::IN, deadline).ok()?;
        match rustix::io::read(&pipe, &mut piece) {
            Ok(0) => return decode(&report),
            Ok(count) if report.len() + count <= MAX_REPORT_LEN => {
                report.extend_from_slice(&piece[..count]);
            }
            Err(rustix::io::Errno::INTR) => {}
            Ok(_) | Err(_) => return None,
        }
    }
}

/// Asks the owner to thaw: its answer, if it gives one.
fn ask(owner: &mut UnixStream) -> Result<Option<Told>, String> {
    let mut answer = Vec::new();
    let read = owner.set_read_timeout(Some(OWNER_TIMEOUT));
    match read.and_then(|()| owner.take(MAX_REPORT_LEN as u64).read_to_end(&mut answer)) {
        Ok(_) => Ok(decode(&answer)),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(None),
        Err(error) => Err(format!("the process that thaws does not answer: {error}")),
    }
}

#[cfg(test)]
#[path = "freezer/tests/model.rs"]
mod model;
