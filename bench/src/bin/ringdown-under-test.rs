//! The `ringdown` program as tests start it: it ends when its standard input does, so that no test leaves one behind.
//!
//! A process beside it watches that input. A thread would be in the way: the daemon goes into its sandbox while it has but one.

use std::env;
use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::process::parent_id;
use std::process::{Command, ExitCode, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, fstat};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The only argument of the watcher.
const WATCH: &str = "--watch-the-standard-input-for-my-parent";

fn main() -> ExitCode {
    let mut arguments = env::args_os();
    if arguments.nth(1) == Some(OsString::from(WATCH)) {
        return match watch() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    match start_watcher() {
        Ok(()) => cli::run(env::args_os()),
        Err(error) => {
            eprintln!("error: the standard input is not watched: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the watcher, unless the input is something else than a test's pipe: the process that starts programs for the daemon gets its requests
/// there.
fn start_watcher() -> io::Result<()> {
    let input = fstat(io::stdin())?;
    if FileType::from_raw_mode(input.st_mode) != FileType::Fifo {
        return Ok(());
    }
    let mut command = Command::new(env::current_exe()?);
    command.arg(WATCH).stdout(Stdio::null());
    // It ends with this process, which need not wait for it.
    command.stderr(Stdio::null()).spawn()?;
    Ok(())
}

/// Waits for the end of the standard input, and ends the parent then; or for the parent's own end.
fn watch() -> io::Result<()> {
    let parent = i32::try_from(parent_id()).ok().and_then(Pid::from_raw);
    let parent = pidfd_open(parent.ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
    let mut input = io::stdin();
    loop {
        let mut watched = [
            PollFd::new(&parent, PollFlags::IN),
            PollFd::new(&input, PollFlags::IN),
        ];
        poll(&mut watched, None)?;
        let [parent_ended, something_came] = watched.map(|one| !one.revents().is_empty());
        if parent_ended {
            return Ok(());
        }
        // However it ended, the holder of the other end is gone.
        if something_came && !matches!(input.read(&mut [0; 256]), Ok(1..)) {
            return Ok(pidfd_send_signal(&parent, Signal::KILL)?);
        }
    }
}
