//! A FUSE file system of another user that never answers: its callers wait until it is gone. And a file of one that answers all but the first close.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Set where a test runs in mounts of its own.
const INSIDE: &str = "RINGDOWN_OWN_MOUNTS";

/// After so long waiting calls go on, with an error, so that a test that fails ends.
const PATIENCE: Duration = Duration::from_secs(60);

/// The time between two looks whether it is to end.
const PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

/// Whether a test runs in a mount namespace of its own, where nothing that it mounts is left over. Else it is run in one here, if that may be.
///
/// # Panics
/// There it has failed.
pub fn has_own_mounts(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let unshare = || {
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--propagation", "private"]);
        unshare
    };
    let may = unshare().arg("true").output();
    let may = may.is_ok_and(|output| output.status.success()) && Path::new("/dev/fuse").exists();
    if !may {
        let words = format!("SKIPPED: no FUSE file system can be mounted here for {test}\n");
        // Past the test harness, which shows no output of a test that passes.
        let written = io::stderr().write_all(words.as_bytes());
        assert!(written.is_ok());
        return false;
    }
    let output = unshare()
        .args(std::env::current_exe().ok())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output();
    let output = output.unwrap_or_else(|error| panic!("{test}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    let is_passed = output.status.success() && said.contains("1 passed");
    assert!(is_passed, "{said}\n{complained}");
    false
}

/// It is there until this is dropped, or until all callers have waited long enough.
pub struct SilentFuse {
    /// With its end waiting calls go on.
    stays: Option<Sender<()>>,
    holder: Option<JoinHandle<()>>,
    is_asked: Arc<AtomicBool>,
}

impl SilentFuse {
    /// Mounts it at a directory, for all users.
    ///
    /// # Errors
    /// What the system says.
    pub fn at(directory: &Path) -> io::Result<SilentFuse> {
        let device = mount_at(directory, 0o40_000)?;
        Ok(SilentFuse::silent(device))
    }

    /// A file of its own, open for reading and writing, which is nowhere else. The first descriptor of it that is closed, in whatever process, is never let go. The file at this path is only where it is
    /// mounted for a moment.
    ///
    /// # Errors
    /// What the system says.
    pub fn with_file(path: &Path) -> io::Result<(SilentFuse, File)> {
        let device = mount_at(path, 0o100_000)?;
        let is_asked = Arc::new(AtomicBool::new(false));
        let (stays, gone) = channel();
        let asked = is_asked.clone();
        let holder = std::thread::spawn(move || {
            let begun = Instant::now();
            // Nothing is sent: it is dropped, or the time is over.
            while begun.elapsed() < PATIENCE && gone.try_recv() == Err(TryRecvError::Empty) {
                if waits(&device, &PAUSE) && answer_but_first_flush(&device, &asked).is_err() {
                    return;
                }
            }
        });
        let fuse = SilentFuse {
            stays: Some(stays),
            holder: Some(holder),
            is_asked,
        };
        let file = File::options().read(true).write(true).open(path);
        unmount(path, UnmountFlags::DETACH)?;
        Ok((fuse, file?))
    }

    /// Whether a descriptor of the file is being closed.
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Relaxed)
    }

    fn silent(device: OwnedFd) -> SilentFuse {
        let is_asked = Arc::new(AtomicBool::new(false));
        let (stays, gone) = channel();
        let asked = is_asked.clone();
        let holder = std::thread::spawn(move || {
            // Nothing is sent: it is dropped, or the time is over.
            let _ = gone.recv_timeout(PATIENCE);
            asked.store(waits(&device, &Timespec::default()), Ordering::Relaxed);
        });
        SilentFuse {
            stays: Some(stays),
            holder: Some(holder),
            is_asked,
        }
    }

    /// Ends it. Returns whether it has been asked anything.
    pub fn was_asked(mut self) -> bool {
        self.end();
        self.is_asked.load(Ordering::Relaxed)
    }

    fn end(&mut self) {
        self.stays = None;
        if let Some(holder) = self.holder.take() {
            // It says nothing that could fail.
            let _ = holder.join();
        }
    }
}

impl Drop for SilentFuse {
    fn drop(&mut self) {
        self.end();
    }
}

/// Mounts one whose root is of this type, and answers the kernel's greeting.
fn mount_at(place: &Path, kind: u32) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/fuse", flags, Mode::empty())?;
    let number = device.as_raw_fd();
    let options = format!("fd={number},rootmode={kind:o},user_id=65534,group_id=65534,allow_other");
    mount(
        "silent",
        place,
        "fuse",
        MountFlags::empty(),
        Some(CString::new(options)?.as_c_str()),
    )?;
    greet(&device)?;
    Ok(device)
}

/// Answers the kernel's greeting, before which it passes nothing on.
fn greet(device: &OwnedFd) -> io::Result<()> {
    let request = read(device)?;
    // Version 7.31, and the defaults of all that can be chosen.
    let version = [7_u32.to_ne_bytes(), 31_u32.to_ne_bytes()].concat();
    answer(device, &request, 0, &[&version[..], &[0; 56]].concat())
}

/// Lets the file be opened and closed, but not closed for the first time, and knows nothing else.
fn answer_but_first_flush(device: &OwnedFd, is_asked: &AtomicBool) -> io::Result<()> {
    const OPEN: u32 = 14;
    const FLUSH: u32 = 25;
    let request = read(device)?;
    let kind = request.get(4..8).and_then(|kind| kind.try_into().ok());
    match kind.map(u32::from_ne_bytes) {
        // Its number there, no flags.
        Some(OPEN) => answer(device, &request, 0, &[0; 16]),
        Some(FLUSH) if !is_asked.swap(true, Ordering::Relaxed) => Ok(()),
        Some(FLUSH) => answer(device, &request, 0, &[]),
        // The kernel waits for no answer to these: FORGET, INTERRUPT, BATCH_FORGET.
        Some(2 | 36 | 42) => Ok(()),
        _ => answer(device, &request, Errno::NOSYS.raw_os_error(), &[]),
    }
}

fn read(device: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut request = vec![0; 1 << 16];
    let len = rustix::io::read(device, &mut request)?;
    request.truncate(len);
    Ok(request)
}

/// A struct fuse_out_header: the length of all, the error as a negative number, and to what it is an answer; and what is behind it.
fn answer(device: &OwnedFd, request: &[u8], error: i32, words: &[u8]) -> io::Result<()> {
    let of_request = request.get(8..16).unwrap_or_default();
    let len = u32::try_from(16 + words.len()).unwrap_or(u32::MAX);
    let answer: [&[u8]; 4] = [
        &len.to_ne_bytes(),
        &(-error).to_ne_bytes(),
        of_request,
        words,
    ];
    rustix::io::write(device, &answer.concat())?;
    Ok(())
}

/// Whether a request waits within this time.
fn waits(device: &OwnedFd, time: &Timespec) -> bool {
    let mut question = [PollFd::new(device, PollFlags::IN)];
    poll(&mut question, Some(time)).is_ok_and(|ready| ready > 0)
}
