//! Daemons that have ended and still have the lock of a directory: see [`sys::ended`].
//!
//! The file of such a lock gets another name, which says whose it is, so that the daemons that follow know whose sockets still listen. It is removed once
//! its lock is given free.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use config::directories::lock_file;
use rustix::fs::{FlockOperation, flock};

use super::{RuntimeError, open_lock, read_pid};

/// Lets a lock be taken whose daemon has ended though the kernel has not let go of it, and [notes](sys::ended::note) such daemons. To be called before this process
/// is in its sandbox, where it sees no other process.
///
/// # Errors
/// What the system says.
pub fn set_ended_aside(directory: &Path) -> Result<(), RuntimeError> {
    let path = lock_file(directory);
    let failed = |error| RuntimeError::System {
        what: "cannot lock",
        path: path.clone(),
        error,
    };
    if ended_owner(&path).is_some() {
        // One at a time looks and renames: what stands there by now may be the lock of a daemon that was faster.
        let turn = open_lock(&path.with_extension("turn")).map_err(failed)?;
        flock(&turn, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
        if let Some(pid) = ended_owner(&path) {
            tracing::warn!(
                pid,
                directory = %directory.display(),
                "the daemon before has ended, and the kernel does not let go of it: its lock and its sockets are taken over"
            );
            let aside = path.with_extension(pid.to_string());
            fs::rename(&path, aside).map_err(failed)?;
        }
    }
    note_all(directory);
    Ok(())
}

/// Notes those whose locks were set aside, now or by a daemon before.
fn note_all(directory: &Path) {
    let lock = lock_file(directory);
    // A directory that can be written need not be readable. Nothing was set aside then that could be found.
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    for path in files.map(|file| file.path()) {
        let pid = path.extension().and_then(|pid| pid.to_str()?.parse().ok());
        if pid.is_none_or(|pid: i32| path != lock.with_extension(pid.to_string())) {
            continue;
        }
        match ended_owner(&path) {
            Some(owner) => sys::ended::note(owner),
            // Another daemon may have removed it.
            None => drop(fs::remove_file(&path)),
        }
    }
}

/// The process that has this lock, if it has ended. It has to be named by the file and by the kernel: in another container its number may be that of another process.
fn ended_owner(lock: &Path) -> Option<i32> {
    let flags =
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC;
    let file = rustix::fs::open(lock, flags, rustix::fs::Mode::empty()).ok()?;
    let mut file = File::from(file);
    let inode = file.metadata().ok()?.ino();
    let pid = i32::try_from(read_pid(&mut file)?).ok()?;
    (sys::ended::has_lock(pid, inode) && sys::ended::has_ended(pid)).then_some(pid)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::RuntimeLock;
    use super::*;

    #[test]
    fn a_lock_stays_where_its_process_lives_or_is_not_the_one_that_it_names() {
        let directory = tempfile::tempdir().unwrap();
        let lock = lock_file(directory.path());
        set_ended_aside(directory.path()).unwrap();
        assert!(!lock.exists());
        let held = RuntimeLock::acquire(directory.path()).unwrap();
        for text in [None, Some("2\n"), Some("0\n"), Some("garbage"), Some("")] {
            text.map_or(Ok(()), |text| fs::write(&lock, text)).unwrap();
            set_ended_aside(directory.path()).unwrap();
            let second = RuntimeLock::acquire(directory.path()).unwrap_err();
            assert!(matches!(second, RuntimeError::SecondDaemon { .. }));
        }
        drop(held);
        // A process that another test has just begun may have it until it runs its program.
        let until = Instant::now() + Duration::from_secs(60);
        while RuntimeLock::acquire(directory.path()).is_err() {
            assert!(Instant::now() < until, "it is not free");
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_was_set_aside_is_removed_once_its_process_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["lock.77", "lock.077", "lock.turn", "other.77", "lock"] {
            fs::write(at(name), "77\n").unwrap();
        }
        set_ended_aside(directory.path()).unwrap();
        assert!(!at("lock.77").exists());
        for name in ["lock.077", "lock.turn", "other.77", "lock"] {
            assert!(at(name).exists(), "{name}");
        }
    }
}
