//! Terminals, for programs that want one.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// How long a program may take to show what a test waits for.
const SHOW_DEADLINE: Duration = Duration::from_secs(60);

/// Both ends of a new terminal: the screen with its keyboard, and what programs open.
///
/// # Errors
/// When the system has no more terminals.
pub fn terminal() -> Result<(File, File)> {
    let screen = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&screen)?;
    unlockpt(&screen)?;
    let path = ptsname(&screen, Vec::new())?;
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let terminal = rustix::fs::open(path.as_c_str(), flags, Mode::empty())?;
    Ok((File::from(screen), File::from(terminal)))
}

/// Reads until `text` has been seen; what is read is added to `shown`.
///
/// # Errors
/// When it ends before, or a minute has passed.
pub fn read_until(source: &mut (impl Read + AsFd), shown: &mut String, text: &str) -> Result<()> {
    let until = Instant::now() + SHOW_DEADLINE;
    let mut buffer = [0; 4096];
    while !shown.contains(text) {
        let patience = until.saturating_duration_since(Instant::now());
        let mut descriptors = [PollFd::new(source, PollFlags::IN)];
        if poll(&mut descriptors, Some(&patience.try_into()?))? == 0 {
            bail!("it shows {shown:?} and not {text:?}");
        }
        let count = source
            .read(&mut buffer)
            .with_context(|| format!("it ended with {shown:?}"))?;
        if count == 0 {
            bail!("it ended with {shown:?}");
        }
        shown.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    Ok(())
}
