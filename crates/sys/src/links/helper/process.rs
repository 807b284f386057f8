//! Forking the process.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, PoisonError};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::process::{WaitOptions, setpgid, waitpid};

use super::super::fuse;
use super::{Helper, IN_FORCE, packet, pair, serve};
use crate::descriptors::{replace, send};

/// Signals that are for the process beside it.
const IGNORED: [libc::c_int; 6] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// From now on this process has another one look up, make and remove names in directories that others may read or write, and waits a few seconds for each of that: see [`crate::links`]. The
/// one that it had before ends. `confine` is called in the new process before anything else is.
///
/// # Errors
/// This process has more than one thread, of which a forked one would have one only; `confine` has failed; or what the system says.
pub fn start(confine: impl FnOnce() -> bool) -> io::Result<()> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!(
            "there are {threads} threads already"
        )));
    }
    let (socket, theirs) = pair()?;
    // SAFETY: there is one thread, so that the new process has all of it, and no lock that another thread has.
    match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        0 => become_helper(theirs, confine),
        child => {
            drop(theirs);
            let child = rustix::process::Pid::from_raw(child);
            // It ends at once: the helper is its child, so that no process has to reap the helper.
            while let Err(Errno::INTR) = waitpid(child, WaitOptions::empty()) {}
        }
    }
    // The first word.
    packet(&socket)
        .map_err(|_| io::Error::other("the process that looks into directories has not started"))?;
    let mut in_force = IN_FORCE.write().unwrap_or_else(PoisonError::into_inner);
    *in_force = Some(Arc::new(Helper::new(socket, in_force.as_deref())));
    Ok(())
}

fn become_helper(socket: OwnedFd, confine: impl FnOnce() -> bool) -> ! {
    // SAFETY: as before.
    match unsafe { libc::fork() } {
        0 => {}
        _ => exit(),
    }
    // What is copied is the other process's: nothing of it is dropped.
    if settle().is_ok()
        && confine()
        && let_go(&socket).is_ok()
        && send(&socket, b"ready", &[], SendFlags::empty()).is_ok()
    {
        serve(&socket);
    }
    exit()
}

fn exit() -> ! {
    // SAFETY: it ends the process at once, and runs nothing that was registered for its end.
    unsafe { libc::_exit(0) }
}

/// Makes this process one of its own, with all that it can no longer get once it is confined.
fn settle() -> io::Result<()> {
    // The other process's.
    let former = IN_FORCE
        .write()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    std::mem::forget(former);
    for signal in IGNORED {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // A group of its own, as signals of a terminal are for the other process; and no session, which would have a share of the processors of its own (`sched_autogroup`): on a busy
    // machine it would wait up to a second for one.
    setpgid(None, None)?;
    rustix::thread::set_name(c"ringdown-paths")?;
    rustix::process::chdir("/")?;
    // What it binds belongs to this user alone until the other process opens it to others.
    rustix::process::umask(Mode::from_raw_mode(0o077));
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for standard in 0..=2 {
        replace(&standard, &null)?;
    }
    fuse::open_own_table()
}

/// Closes all descriptors of the other process.
fn let_go(socket: &OwnedFd) -> io::Result<()> {
    let mut kept = [socket.as_raw_fd().unsigned_abs(), fuse::table_number()?];
    kept.sort_unstable();
    let [one, other] = kept;
    for (first, last) in [(3, one - 1), (one + 1, other - 1), (other + 1, u32::MAX)] {
        if first > last {
            continue;
        }
        // SAFETY: the descriptors are copies of the other process's. What owns them in the copied memory is neither used nor dropped: `_exit` ends this process.
        let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        if closed != 0 {
            return close_listed(kept);
        }
    }
    Ok(())
}

/// The same before Linux 5.9.
fn close_listed(kept: [u32; 2]) -> io::Result<()> {
    let listed: Vec<u32> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for number in listed {
        if number > 2 && !kept.contains(&number) {
            // SAFETY: as there. The one by which the list was read is closed already, which is an error that does nothing.
            unsafe { libc::syscall(libc::SYS_close, number) };
        }
    }
    Ok(())
}
