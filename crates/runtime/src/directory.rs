//! The runtime directory, its lock, and the sockets that a dead daemon left behind.
//!
//! One daemon owns a runtime directory. It holds an advisory lock on a file there for as long as it lives, which
//! the kernel releases however it dies. So a socket found by the owner of the lock belongs to no living process, or
//! to another program; a dial shows which: a socket without a listener refuses it. Of a daemon whose end the kernel does
//! not complete, the lock and the sockets are set aside: see [`set_ended_aside`].

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf, absolute};

use config::directories::lock_file;
use device::SocketFile;
use rustix::fs::{Access, FileType, FlockOperation, fstat};
use sys::links::{Entry, FileId, Fuse, find};
use sys::socket_file::{self, Occupant};

mod aside;
mod others;

pub use aside::set_ended_aside;
pub use others::{close_to_others, give_to_group, open_to, operators, who_is_shut_out};

/// Why a directory or a socket cannot be had.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("the directory {} does not exist: create it with `mkdir -p {}`, or name another{}", path.display(), path.display(), by(option))]
    MissingDirectory {
        path: PathBuf,
        /// The option that names another one.
        option: &'static str,
    },
    #[error("{} is not a directory: name another{}", path.display(), by(option))]
    NotADirectory {
        /// What is not a directory.
        path: PathBuf,
        /// The option that names another one.
        option: &'static str,
    },
    #[error("uid {uid} has no permission to create sockets in {}: name a directory of its own{}", path.display(), by(option))]
    Unwritable {
        path: PathBuf,
        /// The user that this process runs as.
        uid: u32,
        /// The option that names another one.
        option: &'static str,
    },
    #[error(
        "another ringdown daemon{} serves {} already: use that one (`ringdown vm ls`), end it, or name another runtime directory with --runtime-dir",
        process(*pid),
        path.display()
    )]
    SecondDaemon {
        path: PathBuf,
        /// The other daemon's process, if it is known.
        pid: Option<u32>,
    },
    #[error("another program listens on {}: if it is a keeper (`ringdown hold`), give its socket by --keeper; else end it, or choose another path", path.display())]
    InUse { path: PathBuf },
    #[error("{} exists and is not a socket: remove it, or choose another path", path.display())]
    NotASocket { path: PathBuf },
    #[error(
        "[control] lets others use the control socket, and they cannot pass through {}, whose mode ({mode:04o}) the daemon has not set and leaves alone: \
         name a directory with --runtime-dir that the daemon makes itself, or let them pass with `{remedy}`",
        path.display()
    )]
    NotOursToOpen {
        path: PathBuf,
        mode: u32,
        /// What its owner can do.
        remedy: String,
    },
    #[error(
        "cannot let the group {gid} use {}: {error}; start the daemon as a member of that group (SupplementaryGroups={gid} in \
         ringdown.service), or as root, or take the group out of [control]",
        path.display()
    )]
    NotForGroup {
        /// The socket or the directory.
        path: PathBuf,
        gid: u32,
        error: io::Error,
    },
    #[error("{what} {}: {error}", path.display())]
    System {
        /// What was tried, in words.
        what: &'static str,
        /// What it was tried on.
        path: PathBuf,
        error: io::Error,
    },
}

/// The lock on a runtime directory. Dropping it gives the directory free.
#[derive(Debug)]
pub struct RuntimeLock {
    _file: File,
}

/// Makes the runtime or the state directory with mode 0700 if its parent is there, and checks that files can be made in it. `option` is
/// named in the remedy.
///
/// # Errors
/// [`RuntimeError`] when it cannot be made, is no directory, or is not writable.
pub fn prepare_directory(path: &Path, option: &'static str) -> Result<(), RuntimeError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => {
            // The parent explains most failures: it is not there, is no directory, or may not be written.
            if let Some(parent) = path.parent() {
                check_directory(parent, option)?;
            }
            return Err(RuntimeError::System {
                what: "cannot create",
                path: path.to_owned(),
                error,
            });
        }
    }
    check_directory(path, option)
}

/// Checks that a socket could be made in a directory. `option` is named in the remedy.
///
/// # Errors
/// [`RuntimeError`] when it is missing, is no directory, or is not writable.
pub fn check_directory(path: &Path, option: &'static str) -> Result<(), RuntimeError> {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    // Of a VMM's directory as of others: its user may have set a link there, or mounted FUSE.
    let found = absolute(path).and_then(|path| find(&path, Fuse::Refused));
    let found = found.and_then(|found| Ok((fstat(&found)?, found)));
    let found = match found {
        Ok((stat, _)) if FileType::from_raw_mode(stat.st_mode) != FileType::Directory => {
            return Err(RuntimeError::NotADirectory {
                path: path.to_owned(),
                option,
            });
        }
        Ok((_, found)) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(RuntimeError::MissingDirectory {
                path: path.to_owned(),
                option,
            });
        }
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Err(RuntimeError::NotADirectory {
                path: path.to_owned(),
                option,
            });
        }
        Err(error) => {
            return Err(RuntimeError::System {
                what: "cannot use",
                path: path.to_owned(),
                error,
            });
        }
    };
    let it = format!("/proc/self/fd/{}", found.as_raw_fd());
    match rustix::fs::access(it, Access::WRITE_OK | Access::EXEC_OK) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::ACCESS | rustix::io::Errno::PERM | rustix::io::Errno::ROFS) => {
            let uid = rustix::process::geteuid().as_raw();
            Err(RuntimeError::Unwritable {
                path: path.to_owned(),
                uid,
                option,
            })
        }
        Err(error) => Err(RuntimeError::System {
            what: "cannot use",
            path: path.to_owned(),
            error: error.into(),
        }),
    }
}

/// What is wrong with a directory of sockets in which every user may make files, and what to do: a listener that is made there is called by guests.
pub fn writable_by_all(path: &Path) -> Option<(String, String)> {
    let mode = std::fs::metadata(path).ok()?.mode();
    let path = path.display();
    (mode & 0o002 != 0).then(|| {
        let found = format!(
            "every user may write {path} (mode {:04o}), and so make sockets NAME.sock_PORT there, at which guests' calls arrive",
            mode & 0o7777
        );
        (found, format!("chmod o-w {path}"))
    })
}

impl RuntimeLock {
    /// Takes the lock of a runtime directory, and leaves this process's id in its file for others to read.
    ///
    /// # Errors
    /// [`RuntimeError::SecondDaemon`] when a living daemon has it.
    pub fn acquire(runtime_dir: &Path) -> Result<RuntimeLock, RuntimeError> {
        let path = lock_file(runtime_dir);
        let failed = |error| RuntimeError::System {
            what: "cannot lock",
            path: path.clone(),
            error,
        };
        let mut file = loop {
            let mut file = open_lock(&path).map_err(failed)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // It may have been set aside meanwhile.
                Ok(()) if is_at(&file, &path) => break file,
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(RuntimeError::SecondDaemon {
                        path: runtime_dir.to_owned(),
                        pid: read_pid(&mut file),
                    });
                }
                Err(error) => return Err(failed(error.into())),
            }
        };
        let write_pid = |file: &mut File| -> io::Result<()> {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{}", std::process::id())
        };
        write_pid(&mut file).map_err(failed)?;
        Ok(RuntimeLock { _file: file })
    }
}

/// The file of a lock, which is made if need be.
fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    // A link left by another user must not make us write into a file of theirs.
    options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    options.open(path)
}

fn is_at(file: &File, path: &Path) -> bool {
    let id = |found: &Metadata| (found.dev(), found.ino());
    let found = std::fs::symlink_metadata(path);
    matches!((file.metadata(), found), (Ok(file), Ok(found)) if id(&file) == id(&found))
}

/// Makes room for a socket: removes one without a listener. Returns whether there was one.
///
/// # Errors
/// [`RuntimeError::InUse`] when a process listens there, [`RuntimeError::NotASocket`] when it is something else;
/// neither is touched.
pub fn remove_stale_socket(path: &Path) -> Result<bool, RuntimeError> {
    let Some((entry, stale)) = stale_socket(path)? else {
        return Ok(false);
    };
    socket_file::remove(&entry, stale).map_err(|error| RuntimeError::System {
        what: "cannot remove the stale socket",
        path: path.to_owned(),
        error,
    })
}

/// Whether there is room for a socket: nothing is there, or a socket without a listener.
///
/// # Errors
/// Those of [`remove_stale_socket`].
pub fn check_socket(path: &Path) -> Result<(), RuntimeError> {
    stale_socket(path).map(drop)
}

/// A socket without a listener, if there is one.
fn stale_socket(path: &Path) -> Result<Option<(Entry, FileId)>, RuntimeError> {
    let system = |error: io::Error| RuntimeError::System {
        what: "cannot find out what stands at",
        path: path.to_owned(),
        error,
    };
    let entry = match Entry::at(path, Fuse::Refused) {
        Ok(entry) => entry,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(system(error)),
    };
    let path = path.to_owned();
    match Occupant::of(&entry).map_err(system)? {
        Occupant::Nothing => Ok(None),
        Occupant::Stale(id) => Ok(Some((entry, id))),
        Occupant::Socket => Err(RuntimeError::InUse { path }),
        Occupant::Other => Err(RuntimeError::NotASocket { path }),
    }
}

/// Listens on a socket that only this user may connect to, and to which no descriptors can be sent. A stale socket is taken over, and the log says so.
///
/// # Errors
/// Those of [`remove_stale_socket`], and what the system says to binding.
pub fn listen_privately(path: &Path) -> Result<(UnixListener, SocketFile), RuntimeError> {
    let system = |what, error| RuntimeError::System {
        what,
        path: path.to_owned(),
        error,
    };
    if remove_stale_socket(path)? {
        tracing::warn!(socket = %path.display(), "took over the stale socket of a daemon that has died");
    }
    let (listener, file) = device::listen_without_descriptors(path)
        .map_err(|error| system("cannot listen on", error))?;
    // The process's umask made it private from the start where it could; this holds for embedders too.
    file.set_mode(0o600)
        .map_err(|error| system("cannot protect", error))?;
    Ok((listener, file))
}

fn read_pid(file: &mut File) -> Option<u32> {
    // A process id has at most ten digits; whatever else is in the file is not one.
    let mut text = String::new();
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn process(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})"))
        .unwrap_or_default()
}

fn by(option: &str) -> String {
    format!(" with {option}")
}

#[cfg(test)]
mod tests;
