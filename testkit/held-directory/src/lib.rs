//! A directory whose lock is held: a thread that looks up a new name there, or makes or removes one, sleeps until it is let go, and no signal wakes it.
//!
//! A thread lists the directory into memory that is not provided (userfaultfd(2)), as any user can by memory of a FUSE file system of its own. Another one makes a file there, so that who only
//! looks waits behind it.

use std::fs::{File, read_to_string};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// linux/userfaultfd.h.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const API: u64 = 0xaa;
const MODE_MISSING: u64 = 1;

/// Any page size divides it.
const MEMORY_LEN: usize = 64 * 1024;

/// Until what must happen at once is given up.
const PATIENCE: Duration = Duration::from_secs(60);

mod file;
pub use file::HeldFile;

/// It is held until this is dropped.
pub struct HeldDirectory {
    _holding: Holding,
}

struct Holding {
    /// Once it is closed the memory is provided as any other.
    faults: Option<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl HeldDirectory {
    /// Holds it from now on. None, and a line that says so, where this user may not: root may.
    ///
    /// # Errors
    /// What the system says.
    pub fn at(directory: &Path) -> io::Result<Option<HeldDirectory>> {
        let Some(faults) = faults()? else {
            return Ok(None);
        };
        let memory = missing_memory(&faults)?;
        let directory = File::open(directory)?;
        let listed = directory.try_clone()?;
        let lists = thread::spawn(move || {
            // SAFETY: the memory is mapped for good, and no other uses it.
            unsafe { libc::syscall(libc::SYS_getdents64, listed.as_raw_fd(), memory, MEMORY_LEN) };
        });
        let mut holding = Holding::until_fault(faults, lists)?;
        let (tell, told) = channel();
        holding.threads.push(thread::spawn(move || {
            let id = rustix::thread::gettid().as_raw_nonzero();
            // It is received.
            let _ = tell.send(id);
            let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
            if openat(&directory, ".holds", flags, Mode::RUSR).is_ok() {
                let _ = unlinkat(&directory, ".holds", AtFlags::empty());
            }
        }));
        let id = told.recv().map_err(io::Error::other)?;
        wait_until_it_sleeps(id.get())?;
        Ok(Some(HeldDirectory { _holding: holding }))
    }
}

impl Holding {
    /// By a thread that has begun, once it waits for the memory.
    fn until_fault(faults: OwnedFd, holds: JoinHandle<()>) -> io::Result<Holding> {
        let holding = Holding {
            faults: Some(faults),
            threads: vec![holds],
        };
        holding.wait_for_fault()?;
        Ok(holding)
    }

    fn wait_for_fault(&self) -> io::Result<()> {
        let timeout = Timespec::try_from(PATIENCE).map_err(io::Error::other)?;
        let mut wanted: Vec<_> = self
            .faults
            .iter()
            .map(|faults| PollFd::new(faults, PollFlags::IN))
            .collect();
        match poll(&mut wanted, Some(&timeout))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.faults = None;
        for thread in self.threads.drain(..) {
            // It says nothing that could fail.
            let _ = thread.join();
        }
    }
}

/// None, and a line that says so, if it is not permitted.
fn faults() -> io::Result<Option<OwnedFd>> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the call uses no memory.
    let number = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let error = io::Error::last_os_error();
    match (i32::try_from(number), Errno::from_io_error(&error)) {
        // SAFETY: the descriptor is new.
        (Ok(number @ 0..), _) => Ok(Some(unsafe { OwnedFd::from_raw_fd(number) })),
        (_, Some(Errno::PERM | Errno::NOSYS)) => {
            // Past the test harness, which shows no output of a test that passes.
            writeln!(
                io::stderr(),
                "SKIPPED: nothing can be held here: userfaultfd(2) is not permitted"
            )?;
            Ok(None)
        }
        _ => Err(error),
    }
}

/// The address of memory whose first use waits.
fn missing_memory(faults: &OwnedFd) -> io::Result<usize> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the mapping is new, and stays.
    let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), MEMORY_LEN, access, flags) }?;
    let memory = memory as usize;
    let mut api = [API, 0, 0];
    let mut range = [memory as u64, MEMORY_LEN as u64, MODE_MISSING, 0];
    // SAFETY: a `struct uffdio_api`.
    let greeted = unsafe { libc::ioctl(faults.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) };
    // SAFETY: a `struct uffdio_register`.
    let registered =
        unsafe { libc::ioctl(faults.as_raw_fd(), UFFDIO_REGISTER, range.as_mut_ptr()) };
    match greeted == 0 && registered == 0 {
        true => Ok(memory),
        false => Err(io::Error::last_os_error()),
    }
}

/// Until this thread of the process waits for the lock.
fn wait_until_it_sleeps(thread: i32) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let stat = read_to_string(format!("/proc/self/task/{thread}/stat"))?;
        let after_name = stat.rsplit(") ").next();
        if after_name.is_some_and(|rest| rest.starts_with('D')) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(5));
    }
    Err(io::ErrorKind::TimedOut.into())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn who_looks_waits_until_it_is_let_go() {
        let directory = std::env::temp_dir().join(format!("held-{}", std::process::id()));
        std::fs::create_dir(&directory).expect("made");
        let held = HeldDirectory::at(&directory).expect("held");
        if held.is_some() {
            let (found, name) = (Arc::new(AtomicBool::new(false)), directory.join("name"));
            let looked = found.clone();
            let (tell, told) = channel();
            let looks = thread::spawn(move || {
                let _ = tell.send(rustix::thread::gettid().as_raw_nonzero());
                let _ = name.exists();
                looked.store(true, Ordering::SeqCst);
            });
            let id = told.recv().expect("a thread");
            wait_until_it_sleeps(id.get()).expect("it sleeps");
            assert!(!found.load(Ordering::SeqCst));
            drop(held);
            looks.join().expect("it ends");
        }
        std::fs::remove_dir(&directory).expect("removed");
    }
}
