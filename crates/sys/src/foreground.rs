//! Being the parent of one command in the foreground: signals for it are passed on, its orphans are reaped, its exit code is ours.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpgrp, getpid, pidfd_open, pidfd_send_signal,
    set_child_subreaper, wait,
};
use rustix::termios::tcgetpgrp;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

mod background;

pub use background::Background;

/// The signals that are the command's. Others it has in common with this process, such as those of the terminal, or they are not sent.
const FORWARDED: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// Ready for a command, which is not there yet. Signals wait until it is.
#[derive(Debug)]
pub struct Foreground {
    signals: Signals,
}

impl Foreground {
    /// Takes signals, but for those that this process was started to ignore, and becomes the parent of the command's orphans: where a process may look into its
    /// descendants only, they have to stay that when their parents end.
    ///
    /// # Errors
    /// The system refuses one of the two.
    pub fn begin() -> io::Result<Foreground> {
        set_child_subreaper(Some(getpid()))?;
        let ignored = ignored_signals();
        let wanted = FORWARDED
            .into_iter()
            .filter(|signal| ignored & (1 << (signal - 1)) == 0);
        let signals = Signals::new(wanted)?;
        Ok(Foreground { signals })
    }

    /// Waits until the command has ended, and returns its exit code, or 128 and the signal that ended it. This process is expected to exit then.
    ///
    /// # Errors
    /// It cannot be waited for, or the system has no thread for the signals.
    pub fn attend(self, child: &Child) -> io::Result<u8> {
        let pid = Pid::from_child(child);
        forward(self.signals, pid)?;
        Ok(exit_code(wait_for(pid)?))
    }
}

/// A bit per signal that this process was started to ignore, from bit 0 for signal 1.
pub fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

fn forward(mut signals: Signals, pid: Pid) -> io::Result<()> {
    let command = pidfd_open(pid, PidfdFlags::empty())?;
    let forward = move || {
        for number in signals.forever() {
            let Some(signal) = Signal::from_named_raw(number) else {
                continue;
            };
            // Keys of the terminal are for the whole foreground group, the command in it.
            let is_typed = matches!(signal, Signal::INT | Signal::QUIT) && is_in_foreground();
            if !is_typed {
                // A process that has ended is as good.
                let _ = pidfd_send_signal(&command, signal);
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(forward).map(drop)
}

fn is_in_foreground() -> bool {
    let terminal = std::fs::File::open("/dev/tty");
    terminal.is_ok_and(|terminal| tcgetpgrp(&terminal).is_ok_and(|group| group == getpgrp()))
}

/// Waits until the command has ended, and meanwhile reaps those of its processes that came to this one when their parents ended.
fn wait_for(pid: Pid) -> io::Result<ExitStatus> {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended == pid => {
                return Ok(ExitStatus::from_raw(status.as_raw()));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn code_of(status: rustix::process::WaitStatus) -> u8 {
    exit_code(ExitStatus::from_raw(status.as_raw()))
}

fn exit_code(status: ExitStatus) -> u8 {
    // Both are below 256 by the definition of a status, and signals below 128.
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.unwrap_or(255) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        // Rust programs ignore SIGPIPE (13), and nothing ignores SIGKILL (9).
        assert_eq!(ignored_signals() & (1 << 12 | 1 << 8), 1 << 12);
    }
}
