//! A FUSE file system of another user that never answers: who asks it something waits until it is gone.

use std::ffi::CString;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount};

/// Set where a test runs in mounts of its own.
const INSIDE: &str = "RINGDOWN_OWN_MOUNTS";

/// After so long those who wait go on, with an error, so that a test that fails ends.
const PATIENCE: Duration = Duration::from_secs(60);

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

/// It is there until this is dropped, or until all who ask it have waited long enough.
pub struct SilentFuse {
    /// With its end those who wait go on.
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
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let device = rustix::fs::open("/dev/fuse", flags, Mode::empty())?;
        let number = device.as_raw_fd();
        let options =
            format!("fd={number},rootmode=40000,user_id=65534,group_id=65534,allow_other");
        mount(
            "silent",
            directory,
            "fuse",
            MountFlags::empty(),
            Some(CString::new(options)?.as_c_str()),
        )?;
        greet(&device)?;
        let is_asked = Arc::new(AtomicBool::new(false));
        let (stays, gone) = channel();
        let asked = is_asked.clone();
        let holder = std::thread::spawn(move || {
            // Nothing is sent: it is dropped, or the time is over.
            let _ = gone.recv_timeout(PATIENCE);
            asked.store(is_readable(&device), Ordering::Relaxed);
        });
        Ok(SilentFuse {
            stays: Some(stays),
            holder: Some(holder),
            is_asked,
        })
    }

    /// Ends it. Returns whether anybody has asked it anything.
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

/// Answers the kernel's greeting, before which it passes nothing on.
fn greet(device: &OwnedFd) -> io::Result<()> {
    let mut request = vec![0; 1 << 16];
    let len = rustix::io::read(device, &mut request)?;
    let of_request = request.get(8..16.min(len)).unwrap_or_default();
    let answer: [&[u8]; 6] = [
        // The length of all, no error, and to what it is an answer.
        &80_u32.to_ne_bytes(),
        &0_u32.to_ne_bytes(),
        of_request,
        // Version 7.31.
        &7_u32.to_ne_bytes(),
        &31_u32.to_ne_bytes(),
        // The defaults of all that can be chosen.
        &[0; 56],
    ];
    rustix::io::write(device, &answer.concat())?;
    Ok(())
}

fn is_readable(device: &OwnedFd) -> bool {
    let mut question = [PollFd::new(device, PollFlags::IN)];
    poll(&mut question, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
