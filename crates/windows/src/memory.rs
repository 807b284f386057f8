//! The windows of all VMs: the memory of zero-copy circuits, from when it is made until it is destroyed.
//!
//! # Theory of operation
//!
//! A window has two parties for as long as it is there: the host and a VM, or two VMs. It is never used between others. On the host's side it belongs
//! to the first user that got it, since a program of that user may keep it mapped for ever. So whatever was in a window that is used again, only
//! the two able to read it then can read it now; and it is cleaned all the same (`standing.rs` has the states).
//!
//! What a VM says is not believed further than it has to be: a window is named by a UUID that was made here, words about another's window
//! change nothing, and nothing is read from the memory that guests can write.
//!
//! How a guest comes to its windows:
//!
//! - *With `qmp`* each is a sealed memfd, and is added to the running QEMU: those with the host when the session of the guest's agent begins, one between
//!   two VMs when they first need it. What an earlier daemon has added is lost with that daemon: it is of no use until QEMU is started anew.
//! - *Without* there are only windows with the host, as files that the VMM is started with. They outlive the daemon: `windows.json` beside
//!   them says which is which. A program that has such a file open could truncate it and so end the VMM; so they are for programs of root and of
//!   the daemon's own user, and the others are carried as streams.
//!
//! # Limits
//!
//! [`MAX_WINDOWS`](config::MAX_WINDOWS) for a VM and the host, as many again for a VM and others, [`MAX_WINDOWS_OF_ALL`] of the first sort in all,
//! and at most as many of the second.

mod pool;
pub mod qmp;
mod record;
mod standing;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::SystemTime;

pub use config::MAX_WINDOWS_OF_ALL;
use config::{LineSpec, StateError, WindowsSpec};
use device::window::WindowFile;

use crate::switchboard::pool::{Owners, Party, WindowId, WindowState};
use record::{Record, Remembered};
use runtime::directory::{RuntimeError, prepare_directory};
use standing::Standing;
use sys::links::{Entry, Fuse, file_id};

pub use qmp::port_name;

/// Why a VM's windows are not there.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum WindowsError {
    #[error(transparent)]
    Directory(#[from] RuntimeError),
    #[error(transparent)]
    Record(#[from] StateError),
    #[error(
        "cannot make a window{} of {len} bytes: {error}; make room, or have fewer or smaller ones",
        path.as_ref().map(|path| format!(" {}", path.display())).unwrap_or_default()
    )]
    File {
        /// Its path, if it has one.
        path: Option<PathBuf>,
        len: u64,
        error: io::Error,
    },
}

impl WindowsError {
    /// Whether the files may be as they were, once they answer.
    fn may_pass(&self) -> bool {
        matches!(self, WindowsError::File { error, .. } if error.kind() == io::ErrorKind::TimedOut)
    }
}

/// The program that is run when a window is in use or free from now on, and of which VMs it is: one, or two with a comma between them.
pub type Observer = Box<dyn Fn(WindowState, String) + Send + Sync>;

/// The windows of a daemon.
pub struct Windows {
    directory: PathBuf,
    /// The daemon's own user.
    uid: u32,
    state: Mutex<State>,
    /// Something has been shown, or let go of.
    changed: Condvar,
    /// The program that is run when a window is given away.
    observer: OnceLock<Observer>,
}

#[derive(Debug)]
struct State {
    vms: BTreeMap<String, Vm>,
    windows: BTreeMap<WindowId, Window>,
    record: Record,
    /// The number of the latest life of any window.
    generation: u64,
}

#[derive(Debug)]
struct Vm {
    spec: WindowsSpec,
    qmp: Option<Arc<Monitor>>,
    /// A session of its agent is there.
    is_here: bool,
}

/// A VMM's control socket. It takes one client at a time.
#[derive(Debug)]
struct Monitor {
    path: PathBuf,
    lock: Mutex<()>,
    /// It has not done what it was asked, so it is asked for nothing more until its VM's agent comes again.
    has_failed: AtomicBool,
    /// How many windows its VM may have.
    ports: u32,
}

#[derive(Debug)]
struct Window {
    file: Arc<WindowFile>,
    owners: Owners,
    standing: Standing,
    /// Its number among those of its VM that have a path.
    index: Option<u32>,
    /// It is being cleaned.
    is_being_cleaned: bool,
    /// Cleaning it has failed.
    is_broken: bool,
}

impl Windows {
    /// No windows yet. `runtime_dir` is locked.
    pub fn new(runtime_dir: &Path) -> Result<Windows, WindowsError> {
        let directory = directory(runtime_dir);
        let record = record::load(&directory)?;
        // Higher than any that an earlier daemon gave, unless the clock was set back, and below 2^56: 41 bits of milliseconds, and room for 16 lives
        // in each microsecond.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now_ms = now.map_or(0, |now| now.as_millis() as u64 & ((1 << 41) - 1));
        Ok(Windows {
            directory,
            uid: rustix::process::geteuid().as_raw(),
            state: Mutex::new(State {
                vms: BTreeMap::new(),
                windows: BTreeMap::new(),
                record,
                generation: now_ms << 14,
            }),
            changed: Condvar::new(),
            observer: OnceLock::new(),
        })
    }

    /// Sets the program that is run when a window is given away.
    pub fn set_observer(&self, observer: Observer) {
        // The first is meant to be the only one.
        let _ = self.observer.set(observer);
    }

    /// Makes the windows of a VM, or finds those that an earlier daemon made.
    ///
    /// # Errors
    /// [`WindowsError`]. There are none of this VM then.
    pub fn open(&self, line: &LineSpec) -> Result<(), WindowsError> {
        let name = line.full_name();
        let Some(spec) = line.windows else {
            self.close(&name);
            return Ok(());
        };
        let opened = match &line.qmp {
            Some(_) => self.open_sealed(&name, spec),
            None => self.open_files(&name, spec),
        };
        if let Err(error) = opened {
            match error.may_pass() {
                true => self.hide(&name),
                false => self.close(&name),
            }
            return Err(error);
        }
        let monitor = |path: &PathBuf| {
            Arc::new(Monitor {
                path: path.clone(),
                lock: Mutex::new(()),
                has_failed: AtomicBool::new(false),
                ports: ports(spec),
            })
        };
        let vm = Vm {
            spec,
            qmp: line.qmp.as_ref().map(monitor),
            is_here: false,
        };
        sys::lock(&self.state).vms.insert(name, vm);
        Ok(())
    }

    fn open_sealed(&self, name: &str, spec: WindowsSpec) -> Result<(), WindowsError> {
        // It may have had files before.
        self.close(name);
        for _ in 0..spec.count {
            let uuid = new_uuid();
            let made = WindowFile::sealed(uuid.0, spec.len).map_err(|error| WindowsError::File {
                path: None,
                len: spec.len,
                error,
            });
            let window = Window::with_host(name, made?, None, None);
            sys::lock(&self.state).windows.insert(uuid, window);
        }
        Ok(())
    }

    fn open_files(&self, name: &str, spec: WindowsSpec) -> Result<(), WindowsError> {
        let directory = directory_of(&self.directory, name);
        prepare_directory(&self.directory, "--runtime-dir")?;
        self.forget(|(vm, index), window| {
            vm != name || (*index < spec.count && window.len == spec.len)
        })?;
        prepare_directory(&directory, "--runtime-dir")?;
        let windows = {
            let mut state = sys::lock(&self.state);
            let mut record = state.record.clone();
            let mut remembered = |index| {
                let new = || Remembered {
                    uuid: new_uuid(),
                    len: spec.len,
                    uid: None,
                    is_over: false,
                };
                let entry = record.entry((name.to_owned(), index));
                *entry.or_insert_with(new)
            };
            let windows: Vec<_> = (0..spec.count).map(&mut remembered).collect();
            // Before the files: one that is there without a record would never be removed.
            self.remember(&mut state, record)?;
            windows
        };
        for (index, remembered) in (0..).zip(windows) {
            let path = file_in(&directory, index);
            let made = match remembered.is_over {
                true => Err(io::Error::other(
                    "it could not be removed yet, with the VM that had it: end the VMM that holds it up",
                )),
                false => WindowFile::at(&path, remembered.uuid.0, spec.len),
            };
            let file = made.map_err(|error| WindowsError::File {
                path: Some(path),
                len: spec.len,
                error,
            })?;
            if index == 0 && !file.is_in_memory() {
                tracing::warn!(vm = name, directory = %self.directory.display(), "windows that are not in memory: the VM's VMM will be refused; have the runtime directory on a tmpfs, or give the VM `qmp`");
            }
            let window = Window::with_host(name, file, Some(index), remembered.uid);
            sys::lock(&self.state)
                .windows
                .insert(remembered.uuid, window);
        }
        Ok(())
    }

    /// There are none of a VM, though their files stay.
    fn hide(&self, name: &str) {
        let mut state = sys::lock(&self.state);
        state.vms.remove(name);
        let party = Party::Vm(name.to_owned());
        state
            .windows
            .retain(|_, window| !window.standing.has(&party));
    }

    /// Destroys the windows of a VM.
    pub fn close(&self, name: &str) {
        self.hide(name);
        if let Err(error) = self.forget(|(vm, _), _| vm != name) {
            tracing::error!(vm = name, %error, "cannot forget windows");
        }
        self.changed.notify_all();
    }

    /// Destroys what an earlier daemon made for VMs that are no more. To be called when all are open.
    pub fn sweep(&self) {
        let vms: BTreeSet<_> = sys::lock(&self.state).vms.keys().cloned().collect();
        if let Err(error) = self.forget(|(vm, _), _| vms.contains(vm)) {
            tracing::error!(%error, "cannot forget windows");
        }
    }

    /// Removes the files of all windows but those that are kept, and then what is remembered of them. The calls of this come one after another.
    fn forget(
        &self,
        is_kept: impl Fn(&(String, u32), &Remembered) -> bool,
    ) -> Result<(), StateError> {
        let is_kept = |key: &_, window: &Remembered| !window.is_over && is_kept(key, window);
        let mut gone = sys::lock(&self.state).record.clone();
        gone.retain(|key, window| !is_kept(key, window));
        // Without the lock: each may take seconds.
        gone.retain(|(vm, index), _| {
            let directory = directory_of(&self.directory, vm);
            let is_removed = remove(&file_in(&directory, *index));
            if is_removed {
                // As long as it has others in it, it stays. To remove one that is held up would hold up the one that it is in.
                let _ = std::fs::remove_dir(directory);
            }
            is_removed
        });
        let mut state = sys::lock(&self.state);
        let mut record = state.record.clone();
        record.retain(|key, window| {
            window.is_over = !is_kept(key, window);
            !gone.contains_key(key)
        });
        self.remember(&mut state, record)
    }

    /// Brings a record into force.
    fn remember(&self, state: &mut State, record: Record) -> Result<(), StateError> {
        if state.record != record {
            record::save(&self.directory, &record)?;
            state.record = record;
        }
        Ok(())
    }
}

/// Removes a window's file. Returns whether it is gone by now.
fn remove(path: &Path) -> bool {
    let removed = Entry::of_shared(path, Fuse::Refused).and_then(|entry| {
        let (_, stat) = entry.find()?;
        entry.remove(file_id(&stat))
    });
    match removed {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => {
            tracing::error!(file = %path.display(), %error, "cannot remove a window");
            false
        }
    }
}

impl Window {
    fn with_host(name: &str, file: WindowFile, index: Option<u32>, uid: Option<u32>) -> Window {
        let vm = name.to_owned();
        Window {
            file: Arc::new(file),
            standing: Standing::between([Party::Host, Party::Vm(vm.clone())]),
            owners: Owners::Host { vm, uid },
            index,
            is_being_cleaned: false,
            is_broken: false,
        }
    }
}

/// Where a VMM finds the windows that it is started with, of a VM without `qmp`.
pub fn files(runtime_dir: &Path, line: &LineSpec) -> Vec<PathBuf> {
    let count = match line.qmp {
        None => line.windows.map_or(0, |spec| spec.count),
        Some(_) => 0,
    };
    let directory = directory_of(&directory(runtime_dir), &line.full_name());
    (0..count).map(|index| file_in(&directory, index)).collect()
}

/// How many windows are added to a VM while it runs: with the host, and with other VMs.
pub fn ports(spec: WindowsSpec) -> u32 {
    2 * spec.count
}

fn directory(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join("windows")
}

/// A VM's own: `web.d`, or `red@web.d` in the domain `red`: no name has an `@`.
fn directory_of(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{}.d", name.replace('/', "@")))
}

fn file_in(directory: &Path, index: u32) -> PathBuf {
    directory.join(index.to_string())
}

fn new_uuid() -> WindowId {
    let mut uuid = [0; 16];
    random(&mut uuid);
    // By which agents know windows in the memory of their guests.
    WindowId(wire::switchboard::window::name(uuid).0)
}

fn random(bytes: &mut [u8; 16]) {
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(len) => filled += len,
            Err(rustix::io::Errno::INTR) => {}
            // Linux has it since 3.17, and it fails for nothing else.
            Err(error) => panic!("the system has no random bytes: {error}"),
        }
    }
}
